"""q_nope as the model reads it, where no W_uk product follows: the columns of W_uq_qr's product
that are not rotated.

The kernel has no output for it, but ``query = q_nope W_uk`` is q_nope itself, bit for bit, with
W_uk the identity in its first D columns and zero in the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts.multiples import multiples
from mla_fusion.facts.projection import Projection
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.view import View


@dataclass(frozen=True, kw_only=True)
class UnabsorbedFact:
    """Every node of ``roots`` holds ``factor * q_nope``, ``codes`` of its shape: (token * N + n) *
    D + d.

    columns      [N][D] columns of the product, heads and dims in ascending order
    factor       what q_nope is multiplied by after the product (LongCat's scale), 1.0 where nothing
                 is
    latent_dim   Hckv, the width of the kernel's query output
    """

    projection: Projection
    columns: tuple[tuple[int, ...], ...]
    factor: float
    roots: tuple[tuple[Node, torch.Tensor], ...]
    latent_dim: int

    @property
    def node(self) -> Node:
        return self.roots[0][0]

    @property
    def codes(self) -> torch.Tensor:
        return self.roots[0][1]

    @property
    def heads(self) -> int:
        return len(self.columns)

    @property
    def nope_dim(self) -> int:
        return len(self.columns[0])


def find(
    view: View, cone: Cone, up: Projection, rotated: Collection[int], heads: int, latent_dim: int
) -> list[UnabsorbedFact]:
    """q_nope in the product ``up``: all columns that are not ``rotated``, where something reads
    them as one piece. One fact for each factor by which it is read.
    """
    nope = [column for column in range(cone.width) if column not in rotated]
    d = len(nope) // heads
    if not 0 < d <= latent_dim or len(nope) % heads:
        return []
    place = torch.full((cone.width,), -1, dtype=torch.int64)
    place[nope] = torch.arange(len(nope))
    forms = {form.node: form for form in multiples(view, cone)}
    roots: dict[float, list[tuple[Node, torch.Tensor]]] = {}
    holding: dict[Node, float] = {}
    for node, form in forms.items():
        places = place[form.codes % cone.width]
        if form.codes.numel() != cone.tokens * len(nope) or not bool((places >= 0).all()):
            continue
        holding[node] = form.factor
        if form.of is None or holding.get(form.of) != form.factor:
            roots.setdefault(form.factor, []).append(
                (node, form.codes // cone.width * len(nope) + places)
            )
    columns = tuple(tuple(nope[head * d : head * d + d]) for head in range(heads))
    return [
        UnabsorbedFact(
            projection=up, columns=columns, factor=factor, roots=tuple(held), latent_dim=latent_dim
        )
        for factor, held in roots.items()
    ]
