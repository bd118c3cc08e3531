"""W8A8 dynamic quantisation written with plain operators, as hands without the npu ones write it.

One linear layer in three steps: ``quantise`` the rows, ``multiply`` int8 by int8, ``bring_back`` to
floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCQ, Base, D, npu
from .entry import IN_PLACE, OURS, entry, miss
from .int8 import Full, QuantLinear, Transposed


def largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(-1, keepdim=True)


def to_int8(steps: Tensor) -> Tensor:
    return steps.round().clamp(-128, 127).to(torch.int8)


class PlainLinear(QuantLinear):
    """The most usual spelling; in float64 the maths without quantisation, as of any QuantLinear."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return super().forward(x)
        values, scale = self.quantise(x)
        return self.bring_back(self.multiply(values, self.matrix()), scale)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = largest(x.float()) / 127
        return to_int8(x.float() / scale), scale

    def multiply(self, values: Tensor, matrix: Tensor) -> Tensor:
        return torch._int_mm(values, matrix)

    def bring_back(self, sums: Tensor, scale: Tensor) -> Tensor:
        return (sums.float() * scale * self.scale).to(torch.bfloat16)


# -- quantise


def clamped(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """max, a floor under it, no -128."""
    scale = x.float().abs().max(-1, keepdim=True).values.clamp(min=1e-8) / 127.0
    return torch.clamp(torch.round(x.float() / scale), -127, 127).to(torch.int8), scale


def by_both_ends(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    ends = torch.maximum(x.float().amax(-1), -x.float().amin(-1))
    return torch.round(x.float() * (127.0 / ends)[:, None]).to(torch.int8), (
        ends * (1 / 127)
    ).unsqueeze(-1)


def by_norm(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    ends = torch.linalg.vector_norm(x.float(), ord=float("inf"), dim=-1, keepdim=True)
    return torch.round(x.float() * 127 / ends).to(torch.int8), ends / 127


def in_bfloat16(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x) / 127
    return to_int8(x / scale), scale


def by_reciprocal(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x.float()).clamp(min=1e-5) / 127
    return to_int8(x.float() * scale.reciprocal()), scale


def inverse(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    steps = 127 / largest(x.float())
    return torch.round(x.float() * steps).to(torch.int8), steps


def by_operator(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = npu.npu_dynamic_quant(x)
    return values, scale.unsqueeze(-1)


def whole(steps: Tensor) -> Tensor:
    return steps.float().round().to(torch.int8)


def of_narrow_rows(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows themselves were rounded before: their largest is exact in bfloat16, too."""
    scale = largest(x).float() / 127
    return whole(x.float() / scale), scale


def by_wide_product(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    return whole(wide * 127 / largest(wide)), largest(wide) / 127


def by_wide_reciprocal(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x.float()) / 127
    return whole(x.float() * scale.reciprocal()), scale


def by_reciprocal_clamped(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x) / 127
    return (x * scale.reciprocal()).float().round().clamp(-128, 127).to(torch.int8), scale


def by_integers(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x.float()) / 127
    steps = (x.float() / scale).round().to(torch.int32)
    return steps.clamp(-128, 127).to(torch.int8), scale


# -- a guard against rows of zeros: of the largest of each row, its step

Guard = Callable[[Tensor], Tensor]
one = torch.ones_like


GUARDS: dict[str, Guard] = {
    "where it is 0": lambda m: torch.where(m / 127 == 0, one(m), m / 127),
    "where it is not": lambda m: torch.where(m / 127 != 0, m / 127, one(m)),
    "masked_fill": lambda m: (m / 127).masked_fill(m == 0, 1.0),
    "where it is above 0": lambda m: torch.where(m > 0, m / 127, 0.5),
    "where it is no more": lambda m: torch.where(m <= 0, one(m), m) / 127,
    "where 0 is below it": lambda m: torch.where(torch.zeros_like(m) < m, m, one(m)) / 127,
    "by a copy of the mask": lambda m: torch.where((m == 0).clone(), one(m), m) / 127,
}


def guarded(guard: Guard) -> Callable[[Any, Tensor], tuple[Tensor, Tensor]]:
    def quantise(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = guard(largest(x.float()))
        return to_int8(x.float() / scale), scale

    return quantise


# -- multiply


def in_int32(self: Any, values: Tensor, matrix: Tensor) -> Tensor:
    return values.to(torch.int32) @ matrix.to(torch.int32)


def in_float32(self: Any, values: Tensor, matrix: Tensor) -> Tensor:
    return values.float() @ matrix.float()


def as_linear(self: Any, values: Tensor, matrix: Tensor) -> Tensor:
    return F.linear(values.float(), matrix.t().float())


def by_einsum(self: Any, values: Tensor, matrix: Tensor) -> Tensor:
    return torch.einsum("ti,io->to", values.int(), matrix.int())


def by_einsum_turned(self: Any, values: Tensor, matrix: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", values.float(), matrix.t().float())


def product_in_bfloat16(self: Any, values: Tensor, matrix: Tensor) -> Tensor:
    return values.bfloat16() @ matrix.bfloat16()


def to_sums(self: Any, values: Tensor, matrix: Tensor) -> Tensor:
    """The operator's int32 output is the sum before any scale."""
    return npu.npu_quant_matmul(
        values, matrix, torch.ones_like(self.scale), output_dtype=torch.int32
    )


def to_scaled_columns(self: Any, values: Tensor, matrix: Tensor) -> Tensor:
    return npu.npu_quant_matmul(values, matrix, self.scale, output_dtype=torch.bfloat16)


def whole_operator(self: Any, values: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    return values, matrix


# -- bring back


def by_outer_product(self: Any, sums: Tensor, scale: Tensor) -> Tensor:
    return (sums * (scale * self.scale)).to(torch.bfloat16)


def columns_first(self: Any, sums: Tensor, scale: Tensor) -> Tensor:
    return ((sums * self.scale.view(1, -1)).float() * scale).bfloat16()


def beside_a_number(self: Any, sums: Tensor, scale: Tensor) -> Tensor:
    return (sums.float() * scale * (self.scale / 3) * 3).bfloat16()


def by_inverse(self: Any, sums: Tensor, scale: Tensor) -> Tensor:
    return (sums.float() / scale * self.scale).bfloat16()


def all_in_bfloat16(self: Any, sums: Tensor, scale: Tensor) -> Tensor:
    return sums.to(torch.bfloat16) * scale.to(torch.bfloat16) * self.scale.to(torch.bfloat16)


def rows_alone(self: Any, sums: Tensor, scale: Tensor) -> Tensor:
    return (sums * scale).bfloat16()


def by_quant_matmul(self: Any, operands: tuple[Tensor, Tensor], scale: Tensor) -> Tensor:
    return npu.npu_quant_matmul(
        *operands, self.scale, pertoken_scale=scale.view(-1), output_dtype=torch.bfloat16
    )


# -- whole layers


class HeldTransposed(Transposed, PlainLinear):
    pass


class Batched(PlainLinear):
    """Rows [B, S], flattened for the product alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return super().forward(x)
        values, scale = self.quantise(x.view(2, -1, x.shape[-1]))
        sums = torch._int_mm(values.flatten(0, 1), self.matrix())
        return self.bring_back(sums.view(*values.shape[:-1], -1), scale).flatten(0, 1)


class Smoothed(PlainLinear):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, smooth=True)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.smooth is not None
        return super().quantise(x * self.smooth.to(x.dtype))


def linear_of(name: str, **methods: Any) -> type[PlainLinear]:
    return type(name, (PlainLinear,), methods)


LINEARS: dict[str, type[PlainLinear]] = {
    "plain": PlainLinear,
    "clamped": linear_of("l", quantise=clamped, multiply=in_int32),
    "by_both_ends": linear_of("l", quantise=by_both_ends, multiply=in_float32),
    "by_norm": linear_of("l", quantise=by_norm, bring_back=by_outer_product),
    "by_einsum": linear_of("l", multiply=by_einsum),
    "by_einsum_turned": linear_of("l", multiply=by_einsum_turned),
    "in_bfloat16": linear_of("l", quantise=in_bfloat16, multiply=as_linear),
    "columns_first": linear_of("l", bring_back=columns_first),
    "by_reciprocal": linear_of("l", quantise=by_reciprocal, multiply=product_in_bfloat16),
    "inverse": linear_of("l", quantise=inverse, bring_back=by_inverse),
    "beside_a_number": linear_of("l", bring_back=beside_a_number),
    "by_operator": linear_of("l", quantise=by_operator),
    "to_sums": linear_of("l", multiply=to_sums),
    "to_scaled_columns": linear_of("l", multiply=to_scaled_columns, bring_back=rows_alone),
    "by_quant_matmul": linear_of("l", multiply=whole_operator, bring_back=by_quant_matmul),
    "all_in_bfloat16": linear_of("l", bring_back=all_in_bfloat16),
    "of_narrow_rows": linear_of("l", quantise=of_narrow_rows),
    "by_wide_product": linear_of("l", quantise=by_wide_product),
    "by_wide_reciprocal": linear_of("l", quantise=by_wide_reciprocal),
    "by_reciprocal_clamped": linear_of("l", quantise=by_reciprocal_clamped),
    "by_integers": linear_of("l", quantise=by_integers),
    "held_transposed": HeldTransposed,
    "batched": Batched,
    **{
        f"guarded {name}": linear_of("l", quantise=guarded(guard)) for name, guard in GUARDS.items()
    },
}


class PlainFull(Full):
    linear = PlainLinear


class PlainPartial(Base):
    """Only W_uq_qr is int8."""

    linear: type[QuantLinear] = PlainLinear

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = self.linear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


def model_of(base: type[nn.Module], linear: type[QuantLinear]) -> nn.Module:
    return type(base.__name__, (base,), {"linear": linear})()


for name, kind in LINEARS.items():
    model = partial(model_of, PlainFull, kind)
    weights = {"tags": "int8, plain, weights", "weight_quant_mode": 2}
    entry(IN_PLACE, source=OURS, name=f"linear {name}", **weights)(model)


# -- two projections each quantise x by equal steps of their own, in whatever way


def to_seven_bits(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.round(x.float() * 63 / largest(x.float())).to(torch.int8), largest(x.float()) / 63


def by_powers_of_two(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(torch.ceil(torch.log2(largest(x.float()) / 127)))
    return torch.round(x.float() / scale).to(torch.int8), scale


def truncated(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x.float() * 127 / largest(x.float())).to(torch.int8), largest(x.float()) / 127


def doubled_scale(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = to_seven_bits(self, x)
    return values, scale * 2


class Twice(PlainFull):
    of_query = of_key = staticmethod(to_seven_bits)

    def __init__(self) -> None:
        super().__init__()
        of_both = (self.q_a_proj, self.of_query), (self.kv_a_proj_with_mqa, self.of_key)
        for layer, quantise in of_both:
            layer.__class__ = linear_of("Linear", quantise=quantise)


def twice(name: str, query: Any, key: Any) -> type[Twice]:
    of_both = {"of_query": staticmethod(query), "of_key": staticmethod(key)}
    return type(f"x quantised twice, {name}", (Twice,), of_both)


ways = [(way.__name__, way, way) for way in (to_seven_bits, by_powers_of_two, truncated)]
for names in (*ways, ("the key doubled_scale", to_seven_bits, doubled_scale)):
    kind = twice(*names)
    entry(IN_PLACE, source=OURS, tags="int8, plain, weights", weight_quant_mode=2)(kind)
kind = twice("the key truncated", to_seven_bits, truncated)
miss("kv_latent.absent", of="x that is quantised twice", tags="int8, plain, weights")(kind)
