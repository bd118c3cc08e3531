"""Prologues with int8 weights, as stacks write them: npu_dynamic_quant, npu_quant_matmul."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, HE, Base, D, HfNorm, npu
from .entry import IN_PLACE, OURS, STAGED, entry
from .quantised import (
    Chunked,
    Full,
    FullSmooth,
    HalfRope,
    IndexerReads,
    InterleavedRope,
    MergedDown,
    QuantLinear,
)


class Transposed:
    """Of a linear layer: the weight held as [out, in]."""

    weight: nn.Parameter

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.weight = nn.Parameter(self.weight.t().contiguous(), requires_grad=False)

    def matrix(self) -> Tensor:
        return self.weight.t()


class TransposedLinear(Transposed, QuantLinear):
    pass


class FlattenedLinear(QuantLinear):
    """cann-recipes: rows and scales flattened between the two operators."""

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        rows = super().product(x.view(-1, x.shape[-1]), x_scale.view(-1))
        return rows.view(*x.shape[:-1], -1)


int8 = partial(
    entry,
    source=OURS,
    tags="int8, operators, device, portable, weights",
    weight_quant_mode=2,
    slack=1.1,
)


@int8(IN_PLACE, weight_quant_mode=1)
class Partial(Base):
    """Only W_uq_qr is int8."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = QuantLinear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


@int8(IN_PLACE, weight_quant_mode=1)
class PartialSmooth(Base):
    """Smooth scales on c_q alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = QuantLinear(HCQ, self.heads * (D + DR), smooth=True)  # type: ignore[assignment]


int8(IN_PLACE, source="AscendW8A8Dynamic and cann-recipes")(Full)


@int8(IN_PLACE)
class FullBfloat16Scales(Full):
    def __init__(self) -> None:
        super().__init__()
        for module in (self.q_a_proj, self.q_b_proj, self.kv_a_proj_with_mqa):
            module.scale = nn.Parameter(module.scale.bfloat16(), requires_grad=False)  # type: ignore[union-attr]


int8(IN_PLACE)(FullSmooth)


@int8(IN_PLACE)
class SecondLayer(FullSmooth):
    """x is the norm of what a product makes, as in every layer but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(HE, HE, bias=False, dtype=torch.bfloat16)
        self.input_layernorm = HfNorm(HE)

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(self.input_layernorm(self.before(x)), *args)


@torch.library.custom_op("mla_fusion_tests::norm_and_quantise", mutates_args=())
def norm_and_quantise(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return npu.npu_dynamic_quant(F.rms_norm(x, x.shape[-1:], gamma, 1e-6))


@norm_and_quantise.register_fake
def _(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:1], dtype=torch.float32)


class OfBoth(QuantLinear):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x) if isinstance(x, Tensor) else self.product(*x)


@int8(IN_PLACE, tags="int8, weights")
class QuantisedByTheNorm(SecondLayer):
    """By an operator that the pass does not know, as npu_add_rms_norm_dynamic_quant is."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.kv_a_proj_with_mqa = OfBoth(HE, HCQ), OfBoth(HE, HCKV + DR)

    def forward(self, x: Any, *args: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return super().forward(x, *args)
        rows = norm_and_quantise(self.before(x), self.input_layernorm.weight)
        return Full.forward(self, rows, *args)


@int8(IN_PLACE)
class FullTransposed(Full):
    linear = TransposedLinear


@int8(IN_PLACE, source="cann-recipes")
class FullFlattened(Full):
    linear = FlattenedLinear


int8(IN_PLACE, source="vLLM")(MergedDown)
int8(IN_PLACE, source="vllm-ascend")(Chunked)
int8(IN_PLACE, tags="int8, operators, device, portable, rope")(HalfRope)
int8(STAGED, tags="int8, operators, device, portable, rope")(InterleavedRope)
int8(
    IN_PLACE, source="DeepSeek's own code, V3.2", tags="int8, operators, device, portable, readers"
)(IndexerReads)
