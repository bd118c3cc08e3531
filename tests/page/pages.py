"""Reports of real graphs, for the tests that look at their pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from mla_fusion.reference.sample import DEEPSEEK_V3
from mla_fusion.tools.selftest.unfused import FORMS, Prologue, arguments

HE, HCQ, HCKV, N, D, DR = 1024, 1536, 512, 4, 128, 64


class Decoder(nn.Module):
    """Plain prologues one after the other, each with caches and an output projection of its own."""

    def __init__(self, layers: int, dims: dict[str, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Prologue(FORMS[0], dims).to("meta") for _ in range(layers))
        kind: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
        self.outputs = nn.ModuleList(nn.Linear(N * DR, HE, bias=False, **kind) for _ in self.layers)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *caches: Tensor
    ) -> Tensor:
        for index, (layer, output) in enumerate(zip(self.layers, self.outputs, strict=True)):
            query, query_rope = layer(x, cos, sin, slots, *caches[2 * index : 2 * index + 2])
            x = x + output((query_rope + query.mean(-1, keepdim=True)).flatten(1))
        return x


def decoder(layers: int) -> GraphModule:
    dims = dict(DEEPSEEK_V3, He=HE, N=N, BlockNum=8)
    *inputs, kv_cache, kr_cache = (tensor.to("meta") for tensor in arguments(FORMS[0], dims))
    caches = [torch.empty_like(cache) for _ in range(layers) for cache in (kv_cache, kr_cache)]
    return capture(Decoder(layers, dims), *inputs, *caches, device="cpu")[0]


@cache
def fused(layers: int) -> mf.Report:
    """Plain prologues of equal structure, fused."""
    return mf.fuse(decoder(layers))


@cache
def many(layers: int) -> mf.Report:
    """The report of a deeper model: that of two layers, the second said of all others."""
    report = fused(2)
    first, second = report.fused
    others = [replace(second, layer=f"layers.{place}") for place in range(1, layers)]
    return replace(report, fused=[first, *others])


class Biased(nn.Module):
    """A prologue whose W_uq_qr adds a bias."""

    def __init__(self) -> None:
        super().__init__()
        kind = {"device": "meta", "dtype": torch.bfloat16}
        self.q_a, self.kv_a = (
            nn.Linear(HE, HCQ, False, **kind),
            nn.Linear(HE, HCKV + DR, False, **kind),
        )
        self.q_b = nn.Linear(HCQ, N * (D + DR), True, **kind)
        self.q_norm, self.kv_norm = nn.RMSNorm(HCQ, 1e-6, **kind), nn.RMSNorm(HCKV, 1e-6, **kind)
        self.w_uk = nn.Parameter(torch.empty(N, D, HCKV, **kind))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor, kr: Tensor
    ) -> tuple[Tensor, ...]:
        q_nope, q_pe = self.q_b(self.q_norm(self.q_a(x))).view(-1, N, D + DR).split([D, DR], -1)
        c_kv, k_pe = self.kv_a(x).split([HCKV, DR], -1)
        kv.view(-1, HCKV)[slots] = self.kv_norm(c_kv)
        kr.view(-1, DR)[slots] = rotate(k_pe, cos, sin)
        query = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        return query, rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))


class Cut(Biased):
    """One that cuts off large values of the key's latent before its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b.bias = None
        self.kv_norm = nn.Sequential(nn.Hardtanh(-50, 50), self.kv_norm)  # type: ignore[assignment]


class Inside(nn.Module):
    """One of these as the layer of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Cut()])

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return self.layers[0](*given)


class Unabsorbed(Biased):
    """One that multiplies no W_uk."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b.bias = None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor, kr: Tensor
    ) -> tuple[Tensor, ...]:
        q = self.q_b(self.q_norm(self.q_a(x))).view(-1, N, D + DR)
        c_kv, k_pe = self.kv_a(x).split([HCKV, DR], -1)
        q_pe = rotate(q[..., D:], cos.unsqueeze(1), sin.unsqueeze(1))
        return q[..., :D], q_pe, self.kv_norm(c_kv), rotate(k_pe, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def left(model: type[nn.Module]) -> mf.Report:
    """The one prologue of the model, left as it is."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    slots = empty(8, dtype=torch.int64)
    caches = empty(8, 128, 1, HCKV), empty(8, 128, 1, DR)
    gm, _ = capture(model(), empty(8, HE), empty(8, DR), empty(8, DR), slots, *caches, device="cpu")
    return mf.explain(gm)
