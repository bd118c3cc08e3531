"""What is made of a product by re-indexing and by numbers: its views and casts, and their multiples
by one number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.fx.cone import Cone
from mla_fusion.fx.kinds import is_faithful_cast, is_getitem, is_view
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.view import View


@dataclass(frozen=True)
class Multiple:
    """``node`` is ``factor`` times the product's elements ``codes``, made from ``of`` (None: the
    product itself).
    """

    node: Node
    codes: torch.Tensor
    factor: float
    of: Node | None


def multiples(view: View, cone: Cone) -> list[Multiple]:
    """The product, its views and casts, and their multiples by one number."""
    values = cone.run(cone.codes.double() + 1, cone.draw(torch.Generator().manual_seed(0)))
    forms = {cone.node: Multiple(cone.node, cone.codes, 1.0, None)}
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
                forms[node] = Multiple(node, codes, of.factor, source)
        elif value.shape == of.codes.shape:
            ratio = value / (of.codes + 1)
            factor = float(ratio.reshape(-1)[0]) if ratio.numel() else 0.0
            if factor and torch.allclose(
                ratio, torch.full_like(ratio, factor), rtol=1e-9, atol=0.0
            ):
                forms[node] = Multiple(node, of.codes, float(f"{factor:.10g}"), source)
    return list(forms.values())


def _is_piece(node: Node) -> bool:
    """One result of a split."""
    return is_getitem(node) and isinstance(node.args[0], Node)


def _recode(
    view: View, cone: Cone, source: Node, codes: torch.Tensor, node: Node
) -> torch.Tensor | None:
    program = Program([source], nodes_between((source,), node), view.binding, shrink=cone.shrink)
    value = program.run([codes])[program.slot(node)]
    return value.long() if isinstance(value, torch.Tensor) else None
