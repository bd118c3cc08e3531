"""What prologues of quantised layers have in common, whatever the format: int8 unless said."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, HE, Base, D, npu, rotate_half


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


class Full(Base):
    """All three; each projection quantises x itself, as AscendW8A8Dynamic and cann-recipes do."""

    linear: type[nn.Module] = QuantLinear

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = self.linear(HE, HCQ)  # type: ignore[assignment]
        self.q_b_proj = self.linear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]
        self.kv_a_proj_with_mqa = self.linear(HE, HCKV + DR)  # type: ignore[assignment]


class FullSmooth(Full):
    """One tensor of smooth scales for x, one for c_q."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth_x, self.smooth_cq = (
            nn.Parameter(0.5 + torch.rand(width)) for width in (HE, HCQ)
        )
        self.q_a_proj.smooth = self.kv_a_proj_with_mqa.smooth = self.smooth_x  # type: ignore[assignment]
        self.q_b_proj.smooth = self.smooth_cq  # type: ignore[assignment]


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


class Chunked(Full):
    """vllm-ascend's chunked W8A8: two products of one quantised c_q, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(self.linear(HCQ, self.heads // 2 * (D + DR)) for _ in range(2))
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(torch.cat([half(c_q) for half in self.halves], -1))


class HalfRope(Full):
    """Half-layout RoPE: columns of int8 weights and of their scales are permuted together."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + rotate_half(x) * s


class InterleavedRope(Full):
    """Pairs in, pairs out: staged."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (t[..., : DR // 2].repeat_interleave(2, -1) for t in (c, s))
        return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s


class IndexerReads(Full):
    """The indexer projects c_q too, by a quantisation of its own that equals the first."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_b = self.linear(HCQ, 128)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.wq_b(c_q)
