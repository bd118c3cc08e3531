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
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.kinds import is_faithful_cast, is_getitem, is_view
from mla_fusion.fx.measured import measured
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.view import View


@dataclass(frozen=True, kw_only=True)
class UnabsorbedFact:
    """Every node of ``roots`` holds ``factor * q_nope``, ``codes`` of its shape: (token * N + n) * D + d.

    columns      [N][D] columns of the product, heads and dims in ascending order
    factor       what q_nope is multiplied by after the product (LongCat's scale), 1.0 where nothing is
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


@measured
def find(
    view: View, cone: Cone, up: Projection, rotated: Collection[int], heads: int, latent_dim: int
) -> list[UnabsorbedFact]:
    """q_nope in the product ``up``: all columns that are not ``rotated``, where something reads them as one piece.
    One fact for each factor by which it is read.
    """
    nope = [column for column in range(cone.width) if column not in rotated]
    d = len(nope) // heads
    if not 0 < d <= latent_dim or len(nope) % heads:
        return []
    place = torch.full((cone.width,), -1)
    place[nope] = torch.arange(len(nope))
    forms = {form.node: form for form in _forms(view, cone)}
    roots: dict[float, list[tuple[Node, torch.Tensor]]] = {}
    holding: dict[Node, float] = {}
    for node, form in forms.items():
        places = place[form.codes % cone.width]
        if form.codes.numel() != cone.tokens * len(nope) or not bool((places >= 0).all()):
            continue
        holding[node] = form.factor
        if form.of is None or holding.get(form.of) != form.factor:
            roots.setdefault(form.factor, []).append((node, form.codes // cone.width * len(nope) + places))
    columns = tuple(tuple(nope[head * d : head * d + d]) for head in range(heads))
    return [UnabsorbedFact(
        projection=up, columns=columns, factor=factor, roots=tuple(held), latent_dim=latent_dim
    ) for factor, held in roots.items()]


@dataclass(frozen=True)
class _Form:
    """``node`` is ``factor`` times the product's elements ``codes``, made from ``of`` (None: the product itself)."""

    node: Node
    codes: torch.Tensor
    factor: float
    of: Node | None


def _forms(view: View, cone: Cone) -> list[_Form]:
    """The product, its views and casts, and their multiples by one number."""
    values = cone.run(cone.codes.double() + 1, cone.draw(torch.Generator().manual_seed(0)))
    forms = {cone.node: _Form(cone.node, cone.codes, 1.0, None)}
    for node in cone.nodes:
        inputs = node.args[0].all_input_nodes if _is_piece(node) else node.all_input_nodes  # type: ignore[union-attr]
        source = next((arg for arg in inputs if arg in forms), None)
        value = values[cone.slot(node)]
        if source is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        of = forms[source]
        if is_view(node) or is_faithful_cast(node):
            codes = _recode(view, cone, source, of.codes, node)
            if codes is not None:
                forms[node] = _Form(node, codes, of.factor, source)
        elif value.shape == of.codes.shape:
            ratio = value / (of.codes + 1)
            factor = float(ratio.reshape(-1)[0]) if ratio.numel() else 0.0
            if factor and torch.allclose(ratio, torch.full_like(ratio, factor), rtol=1e-9, atol=0.0):
                forms[node] = _Form(node, of.codes, float(f"{factor:.10g}"), source)
    return list(forms.values())


def _is_piece(node: Node) -> bool:
    """One result of a split."""
    return is_getitem(node) and isinstance(node.args[0], Node)


def _recode(view: View, cone: Cone, source: Node, codes: torch.Tensor, node: Node) -> torch.Tensor | None:
    program = Program([source], nodes_between((source,), node), view.binding, shrink=cone.shrink)
    value = program.run([codes])[program.slot(node)]
    return value.long() if isinstance(value, torch.Tensor) else None
