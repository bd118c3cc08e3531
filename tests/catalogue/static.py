"""Prologues in W8A8 by scales fixed ahead of time, their input's norm in the graph, for
npu_mla_preprocess.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, Base, D, HfNorm, Parts, npu, paged_args, rotate_half
from .entry import IN_PLACE, OURS, STAGED
from .entry import entry as any_entry
from .entry import miss as any_miss
from .prologues import NpuNorm
from .public_serving import Float32Norm

H = 2048  # the narrowest that the operator takes
BOTH = ("v3", "preprocess")
_given = {"targets": BOTH, "instead_of": "quant.static", "slack": 1.1}


class StaticLinear(nn.Module):
    """int8 weight, a scale for each column, an int32 bias; one scale and one offset for what it
    multiplies.

    In float64 the same maths without any rounding.
    """

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (width_in, width_out), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(
            (0.5 + torch.rand(width_out)) / (73 * 32 * width_in**0.5), requires_grad=False
        )
        self.bias = nn.Parameter(
            torch.randint(-9, 9, (width_out,), dtype=torch.int32), requires_grad=False
        )
        self.input_scale = nn.Parameter(torch.tensor([0.03125]).bfloat16(), requires_grad=False)
        self.input_offset = nn.Parameter(torch.tensor([3], dtype=torch.int8), requires_grad=False)

    def quantised(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return x / self.input_scale + self.input_offset
        return npu.npu_quantize(x, self.input_scale, self.input_offset, 1, -1, True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quantised(x)
        if x.dtype == torch.float64:
            return (x @ self.weight.double() + self.bias) * self.scale
        return npu.npu_quant_matmul(
            x, self.weight, self.scale, bias=self.bias, output_dtype=torch.bfloat16
        )


class Static(Base):
    """x is the hidden state; its norm is quantised once for W_dq and W_dkv_kr."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.input_layernorm = self.norm(H)
        self.q_a_proj, self.kv_a_proj_with_mqa = StaticLinear(H, HCQ), StaticLinear(H, HCKV + DR)  # type: ignore[assignment]
        self.q_b_proj = StaticLinear(HCQ, heads * (D + DR))  # type: ignore[assignment]
        self.kv_a_proj_with_mqa.input_scale = self.q_a_proj.input_scale
        self.kv_a_proj_with_mqa.input_offset = self.q_a_proj.input_offset

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(self.input_layernorm(x), *args)


def static_args(tokens: int = 8) -> tuple[Tensor, ...]:
    return torch.randn(tokens, H).bfloat16(), *paged_args(tokens)[1:]


entry = partial(any_entry, args=static_args, **_given)


@entry(
    IN_PLACE, source="W8A8 checkpoints, as ModelSlim writes them", tags="static, int8, operators"
)
class StaticW8A8(Static):
    """Norms by plain nodes, RoPE from pairs to halves."""


@entry(IN_PLACE, source="vllm-ascend", tags="static, int8, operators")
class StaticByOperators(Static):
    norm = NpuNorm


@entry(IN_PLACE, source="vllm-ascend", tags="static, int8, operators")
class StaticAfterResidual(Static):
    """The input's norm adds the residual first: npu_add_rms_norm."""

    norm = NpuNorm

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        normed, _, total = npu.npu_add_rms_norm(x, x * 0.5, self.input_layernorm.weight, 1e-6)
        scores, extra = Base.forward(self, normed, *args)
        return scores, extra + total.float().sum()


@entry(IN_PLACE, source="SGLang's fused_qkv_a_proj", tags="static, int8, operators, weights")
class StaticFused(Static):
    """One projection [q | kv], halves in and out, F.rms_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = StaticLinear(H, HCQ + HCKV + DR)

    def down(self, x: Tensor) -> Tensor:
        self.both = self.fused(x)
        return self.both[..., :HCQ]

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.both[..., HCQ:].split([HCKV, DR], -1)
        return F.rms_norm(c_kv, (HCKV,), self.kv_a_layernorm.weight, 1e-6), k_pe

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + rotate_half(x) * s


class NoBiasLinear(StaticLinear):
    """Symmetric: no offset, no bias; the scale's reciprocal is multiplied."""

    def quantised(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return x / self.input_scale
        return npu.npu_quantize(
            x, torch.reciprocal(self.input_scale).expand(x.shape[-1]), None, 1, -1, False
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.quantised(x)
        if x.dtype == torch.float64:
            return (x @ self.weight.double()) * self.scale
        return npu.npu_quant_matmul(x, self.weight, self.scale, output_dtype=torch.bfloat16)


@entry(STAGED, source="compressed-tensors, symmetric", tags="static, int8, operators, rope")
class StaticSymmetric(Static):
    """RoPE leaves pairs, so that the rows are staged."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.kv_a_proj_with_mqa = NoBiasLinear(H, HCQ), NoBiasLinear(H, HCKV + DR)  # type: ignore[assignment]
        self.q_b_proj = NoBiasLinear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]
        self.kv_a_proj_with_mqa.input_scale = self.q_a_proj.input_scale

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd, c, s = x[..., ::2], x[..., 1::2], c[..., : DR // 2], s[..., : DR // 2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)


class RepeatedLinear(StaticLinear):
    """Loaded with scale, reciprocal and offset repeated for every channel, in the activation's
    dtype.
    """

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        # whose reciprocal bfloat16 does not hold
        scale = torch.tensor([0.0311]).bfloat16().repeat(width_in)
        self.input_scale = nn.Parameter(scale, requires_grad=False)
        self.input_scale_reciprocal = nn.Parameter(1.0 / scale, requires_grad=False)
        self.input_offset = nn.Parameter(
            self.input_offset.repeat(width_in).bfloat16(), requires_grad=False
        )

    def quantised(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return x * self.input_scale_reciprocal + self.input_offset
        return npu.npu_quantize(x, self.input_scale_reciprocal, self.input_offset, 1, -1, False)


@entry(
    IN_PLACE,
    source="SGLang, vllm-ascend",
    tags="static, int8, operators, weights",
    alone=("quant.not_static",),
)
class RepeatedScales(StaticFused):
    """What every vector of scales and offsets repeats is seen in its numbers alone, which the
    backend looks at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused = RepeatedLinear(H, HCQ + HCKV + DR)
        self.q_b_proj = RepeatedLinear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


class BufferLinear(StaticLinear):
    """Vectors as buffers, as they are divided by; the offset in int8."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        scale, offset = self.input_scale.data, self.input_offset.data
        del self.input_scale, self.input_offset
        self.register_buffer("input_scale", scale.repeat(width_in).float())
        self.register_buffer("input_offset", offset.repeat(width_in))


@entry(IN_PLACE, source=OURS, tags="static, int8, operators, weights", alone=("quant.not_static",))
class RepeatedBuffers(Static):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.kv_a_proj_with_mqa = BufferLinear(H, HCQ), BufferLinear(H, HCKV + DR)  # type: ignore[assignment]
        self.kv_a_proj_with_mqa.input_scale = self.q_a_proj.input_scale
        self.kv_a_proj_with_mqa.input_offset = self.q_a_proj.input_offset


# -- near misses

miss = partial(any_miss, of="Static", targets=("preprocess",), args=static_args)


@miss("norm.of_input", tags="static, int8, operators")
class AlreadyNormed(Static):
    """The graph begins behind the input's norm."""

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return Base.forward(self, x, *args)


@miss(IN_PLACE, tags="static, int8, operators, run")
class LayerNormed(Static):
    """A layer norm is the RMSNorm of what is left of x without its mean, which is then the hidden
    state.
    """

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return Base.forward(self, self.input_layernorm(x - x.mean(-1, keepdim=True)), *args)


@entry(IN_PLACE, source=OURS, tags="static, int8, operators, norm", alone=("norm.gamma_dtype",))
class StaticFloat32Norms(Static):
    """Weights of float32 that hold bfloat16 numbers, that of x's norm among them."""

    norm = Float32Norm


class WideWeightNorm(HfNorm):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps)
        self.weight = nn.Parameter(self.weight.detach().float() * 1.001, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


@miss("norm.gamma_dtype", tags="static, int8, operators")
class WideWeightOfInput(Static):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = WideWeightNorm(H)


@miss("norm.epsilon", tags="static, int8, operators")
class OtherEpsilon(Static):
    def __init__(self) -> None:
        super().__init__()
        self.kv_a_layernorm.eps = 1e-5


@miss("norm.of_input", tags="static, int8, operators")
class OtherEpsilonOfInput(Static):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm.eps = 1e-5


@miss("quant.tokens_differ", tags="static, int8, operators")
class TwoScales(Static):
    """x is quantised by one scale for W_dq, by another for W_dkv_kr."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa.input_scale = nn.Parameter(
            torch.tensor([0.0625]).bfloat16(), requires_grad=False
        )


@miss("quant.not_static", tags="static, int8, operators")
class ScaleOfEachChannel(Static):
    """A scale for each channel of x: one of them is another."""

    def __init__(self) -> None:
        super().__init__()
        scales = nn.Parameter(torch.full((H,), 0.03125).bfloat16(), requires_grad=False)
        scales[7] *= 2
        self.q_a_proj.input_scale = self.kv_a_proj_with_mqa.input_scale = scales


class ComputedLinear(StaticLinear):
    """A scale for each channel is made of x; they are all the same, whatever x is."""

    def quantised(self, x: Tensor) -> Tensor:
        return npu.npu_quantize(
            x, self.input_scale + 0 * x[0].square(), self.input_offset, 1, -1, True
        )


@miss("quant.not_static", tags="static, int8, operators")
class ScaleOfX(Static):
    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = ComputedLinear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


class FloatBiasLinear(StaticLinear):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.bias = nn.Parameter(torch.randn(width_out).bfloat16(), requires_grad=False)


@miss("linear.bias", tags="static, int8, operators")
class FloatBias(Static):
    """A bias behind the scales."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = FloatBiasLinear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


@miss("reader.latent", tags="static, int8, operators, readers")
class LatentRead(Static):
    """c_q is read beside its product: the operator keeps it."""

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return c_q.float().sum(-1)


@miss(STAGED, tags="static, int8, operators, cache, run")
class StaticSlotsDiffer(Static):
    """The key goes one row further than the latent."""

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[(slots + 1) % 64] = k_pe


@miss(STAGED, tags="static, int8, operators, cache, run")
class StaticRowsNotStored(Static, Parts):
    """The scores read the new rows, and the latent cache keeps its old ones."""

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        self.kv = kv_cache.view(-1, HCKV).index_put((slots,), c_kv)
        kr_cache.view(-1, DR)[slots] = k_pe

    def scores(self, q_nope: Tensor, q_pe: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
        return super().scores(q_nope, q_pe, self.kv, kr_rows)
