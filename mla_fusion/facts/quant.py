"""Quantised projections: the scales of a product, and the dynamic quantisation that its activation
went through.

``y = (x_int8 @ w_int8) * weight_scale * token_scale`` with ``x_int8, token_scale =
npu_dynamic_quant(x, smooth)``; alike in the float formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from mla_fusion.facts.dynamic_quant import DynamicQuant, DynamicQuantReader
from mla_fusion.facts.static_quant import StaticQuant
from mla_fusion.fx.contraction import Scales
from mla_fusion.meta.number_formats import NumberFormat


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """Of one projection. ``dynamic`` is None where the activation enters the graph quantised, or is
    not of the kind that the kernel does itself.

    format                        of activation and weight; None: one that the kernel has not
    static                        how the activation was quantised, where one scale for all tokens
                                  did
    token_factor, token_inverse   a token's rows are multiplied by token_factor * token_scale (over
                                  it with inverse)
    """

    weight_scale: Node
    token_scale: Node | None
    offset: Node | None
    format: NumberFormat | None
    dynamic: DynamicQuant | None
    token_factor: float = 1.0
    token_inverse: bool = False
    static: StaticQuant | None = None

    @property
    def source(self) -> Node | None:
        """What was quantised, where that is known."""
        how = self.dynamic or self.static
        return how.source if how is not None else None


def read(reader: DynamicQuantReader, activation: Node, scales: Scales) -> Quantised:
    """The quantisation of a product with these scales."""
    dynamic = reader.of_product(activation, scales)
    return Quantised(
        weight_scale=scales.weight,
        token_scale=scales.token,
        offset=scales.offset,
        format=scales.format,
        dynamic=dynamic,
        token_factor=scales.factor,
        token_inverse=scales.inverse,
    )
