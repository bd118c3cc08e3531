"""q_nope as the model reads it, where no W_uk product follows: the columns of W_uq_qr's product that are not rotated.

The kernel has no output for it, but ``query = q_nope W_uk`` is q_nope itself, bit for bit, with W_uk the identity in
its first D columns and zero in the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts.projection import Projection
from mla_fusion.graph.cone import Cone
from mla_fusion.graph.kinds import is_faithful_cast, is_view
from mla_fusion.graph.program import Program
from mla_fusion.graph.view import View


@dataclass(frozen=True)
class UnabsorbedFact:
    """Every node of ``roots`` holds q_nope, ``codes`` of its shape: (token * N + n) * D + d.

    columns      [N][D] columns of the product, heads and dims in ascending order
    latent_dim   Hckv, the width of the kernel's query output
    """

    projection: Projection
    columns: tuple[tuple[int, ...], ...]
    roots: tuple[tuple[Node, torch.Tensor], ...]
    latent_dim: int
    factor: float = 1.0

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
) -> UnabsorbedFact | None:
    """q_nope in the product ``up``: all columns that are not ``rotated``, where something reads them as one piece."""
    nope = [column for column in range(cone.width) if column not in rotated]
    d = len(nope) // heads
    if not 0 < d <= latent_dim or len(nope) % heads:
        return None
    place = torch.full((cone.width,), -1)
    place[nope] = torch.arange(len(nope))
    roots: list[tuple[Node, torch.Tensor]] = []
    holding: set[object] = set()
    for node, codes in _forms(view, cone):
        places = place[codes % cone.width]
        if codes.numel() != cone.tokens * len(nope) or not bool((places >= 0).all()):
            continue
        holding.add(node)
        if node is cone.node or node.args[0] not in holding:
            roots.append((node, codes // cone.width * len(nope) + places))
    columns = tuple(tuple(nope[head * d : head * d + d]) for head in range(heads))
    return UnabsorbedFact(up, columns, tuple(roots), latent_dim) if roots else None


def _forms(view: View, cone: Cone) -> list[tuple[Node, torch.Tensor]]:
    """The product, then its views and casts, each with the codes of its elements."""
    order, inside = [], {cone.node}
    for node in cone.nodes:
        if (is_view(node) or is_faithful_cast(node)) and node.args[0] in inside:
            inside.add(node)
            order.append(node)
    program = Program([cone.node], order, view.binding, shrink=cone.shrink)
    values = program.run([cone.codes])
    found = [(node, values[program.slot(node)]) for node in (cone.node, *order)]
    return [(node, value.long()) for node, value in found if isinstance(value, torch.Tensor)]
