"""Prologues with int8 weights, as stacks write them: npu_dynamic_quant, npu_quant_matmul."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, HE, Base, D, HfNorm, npu, rotate_half
from .entry import IN_PLACE, OURS, STAGED, entry


class QuantLinear(nn.Module):
    """int8 weight [in, out] with a scale per column; quantises its input per token.

    In float64 it is the same weight without any quantisation of the input: the maths that both runs
    approximate.
    """

    def __init__(self, width_in: int, width_out: int, smooth: bool = False) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (width_in, width_out), dtype=torch.int8)
        scale = (0.5 + torch.rand(width_out)) / (73 * width_in**0.5)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.smooth = nn.Parameter(0.5 + torch.rand(width_in)) if smooth else None

    def matrix(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return (x if self.smooth is None else x * self.smooth) @ (self.matrix() * self.scale)
        x, x_scale = npu.npu_dynamic_quant(x, smooth_scales=self.smooth)
        return self.product(x, x_scale)

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(
            x, self.matrix(), self.scale, pertoken_scale=x_scale, output_dtype=torch.bfloat16
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


@int8(IN_PLACE, source="AscendW8A8Dynamic and cann-recipes")
class Full(Base):
    """All three; each projection quantises x itself, as AscendW8A8Dynamic and cann-recipes do."""

    linear: type[nn.Module] = QuantLinear

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = self.linear(HE, HCQ)  # type: ignore[assignment]
        self.q_b_proj = self.linear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]
        self.kv_a_proj_with_mqa = self.linear(HE, HCKV + DR)  # type: ignore[assignment]


@int8(IN_PLACE)
class FullBfloat16Scales(Full):
    def __init__(self) -> None:
        super().__init__()
        for module in (self.q_a_proj, self.q_b_proj, self.kv_a_proj_with_mqa):
            module.scale = nn.Parameter(module.scale.bfloat16(), requires_grad=False)  # type: ignore[union-attr]


@int8(IN_PLACE)
class FullSmooth(Full):
    """One tensor of smooth scales for x, one for c_q."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth_x, self.smooth_cq = (
            nn.Parameter(0.5 + torch.rand(width)) for width in (HE, HCQ)
        )
        self.q_a_proj.smooth = self.kv_a_proj_with_mqa.smooth = self.smooth_x  # type: ignore[assignment]
        self.q_b_proj.smooth = self.smooth_cq  # type: ignore[assignment]


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


@int8(IN_PLACE, source="vLLM")
class MergedDown(Full):
    """vLLM: one product for W_dq and W_dkv_kr, x quantised once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_a = self.linear(HE, HCQ + HCKV + DR)

    def down(self, x: Tensor) -> Tensor:
        return self.qkv_a(x)[..., :HCQ]

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, c_kv, k_pe = self.qkv_a(x).split([HCQ, HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


@int8(IN_PLACE, source="vllm-ascend")
class Chunked(Full):
    """vllm-ascend's chunked W8A8: two products of one quantised c_q, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(self.linear(HCQ, self.heads // 2 * (D + DR)) for _ in range(2))
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(torch.cat([half(c_q) for half in self.halves], -1))


@int8(IN_PLACE, tags="int8, operators, device, portable, rope")
class HalfRope(Full):
    """Half-layout RoPE: columns of int8 weights and of their scales are permuted together."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + rotate_half(x) * s


@int8(STAGED, tags="int8, operators, device, portable, rope")
class InterleavedRope(Full):
    """Pairs in, pairs out: staged."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (t[..., : DR // 2].repeat_interleave(2, -1) for t in (c, s))
        return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s


@int8(
    IN_PLACE, source="DeepSeek's own code, V3.2", tags="int8, operators, device, portable, readers"
)
class IndexerReads(Full):
    """The indexer projects c_q too, by a quantisation of its own that equals the first."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_b = self.linear(HCQ, 128)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.wq_b(c_q)
