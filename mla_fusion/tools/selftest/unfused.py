"""Plain prologues for the fused-against-unfused checks, from operators that torchair itself can
lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.meta.number_formats import BLOCK, E8M0_NUMBER, FORMATS, INT8, MXFP8, NumberFormat
from mla_fusion.reference import hifloat8
from mla_fusion.reference.formats import format_of

EPS = 1e-6
Dims = Mapping[str, int]  # by axis


@dataclass(frozen=True)
class Form:
    """How a prologue is written. ``rope``: layouts of its input and output columns, "half" or
    "pairs".

    target   of ``Config.targets``, the one that takes it: "key" has a query without a latent,
             "preprocess" static W8A8 and the norm of x
    format   of the weights of the projections, which the rows are quantised to; None: bfloat16
    """

    name: str
    rope: tuple[str, str] = ("half", "half")
    lead: tuple[int, ...] = (8,)
    reads_c_q: bool = False
    in_place: bool = True
    target: str = "v3"
    format: NumberFormat | None = None

    @property
    def mode(self) -> str | None:
        """Of torch.compile: npu_mla_preprocess has no GE converter, and is in captured graphs
        alone.
        """
        return "reduce-overhead" if self.target == "preprocess" else None

    def dims(self, dims: Dims) -> dict[str, int]:
        """These, the hidden size as wide as the operator takes it."""
        return (
            dict(dims, He=max(dims["He"], _NARROWEST))
            if self.target == "preprocess"
            else dict(dims)
        )


_NARROWEST = 2048  # hidden size of npu_mla_preprocess
FORMS = (
    Form("half RoPE"),
    Form("half RoPE, [B, S]", lead=(4, 2)),
    Form("RoPE from pairs to halves", rope=("pairs", "half")),
    Form("RoPE in pairs", rope=("pairs", "pairs"), in_place=False),
    Form("c_q read by an indexer", reads_c_q=True),
    *(Form(f"{form.name} weights", format=form) for form in FORMATS),
    Form("mxfp8 weights, c_q read by an indexer", reads_c_q=True, format=MXFP8),
    Form("key half", rope=("pairs", "half"), target="key"),
    Form("key half, RoPE in pairs", rope=("pairs", "pairs"), in_place=False, target="key"),
    Form("static W8A8", rope=("pairs", "half"), target="preprocess", format=INT8),
)


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Linear(nn.Module):
    """[out, in] in bfloat16, or in a format of one byte; then rows are quantised by an npu
    operator, each by its own scale, or all by ``x_scale``. In float64 the same weight as numbers,
    rows as they are.
    """

    def __init__(
        self, weight: Tensor, form: NumberFormat | None, x_scale: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.form, self.x_scale = form, x_scale
        kernel = format_of(form.full, "A5") if form is not None else None
        if form is None or kernel is None:
            self.weight = frozen(weight)
            return
        held, scale = kernel.dynamic_quant(weight.float())
        numbers = hifloat8.decode(held) if held.dtype == torch.uint8 else held.float()
        block = weight.shape[1] // scale.shape[1]
        self.wide = numbers.double() * scale.double().repeat_interleave(block, -1)
        if form.in_blocks:
            scale = scale.view(torch.uint8).unflatten(-1, (-1, 2)).transpose(0, 1)
        self.weight, self.scale = frozen(held), frozen(scale if form.in_blocks else scale.flatten())

    def forward(self, x: Tensor) -> Tensor:
        npu, form, weight = torch.ops.npu, self.form, self.weight.t()
        if form is None or x.dtype == torch.float64:
            return x @ (weight if form is None else self.wide.t())
        scale: Tensor = self.scale
        dst_type = form.number or form.element
        named: dict[str, Any] = {"x1_dtype": form.number, "x2_dtype": form.number}
        if self.x_scale is not None:
            x = npu.npu_quantize(x, self.x_scale, None, 1, -1, True)
            scale, named = scale * self.x_scale.float(), {}
        elif form.in_blocks:
            x, token = npu.npu_dynamic_mx_quant(x, dst_type=dst_type)
            kinds = dict.fromkeys(("scale_dtype", "pertoken_scale_dtype"), E8M0_NUMBER)
            named = {"pertoken_scale": token, "group_sizes": [1, 1, BLOCK], **kinds}
        else:
            x, token = npu.npu_dynamic_quant(x, dst_type=dst_type)
            named |= {"pertoken_scale": token}
        return npu.npu_quant_matmul(x, weight, scale, output_dtype=torch.bfloat16, **named)


class Prologue(nn.Module):
    """x to query and query_rope, and the new latents into paged caches; bfloat16 with float32
    norms.
    """

    def __init__(self, form: Form, dims: Dims, seed: int = 0) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.form, self.dims = form, dict(dims)
        he, hcq, hckv, n, d, dr = (dims[axis] for axis in ("He", "Hcq", "Hckv", "N", "D", "Dr"))

        def weight(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=make, dtype=torch.float32) * shape[-1] ** -0.5
            return values.bfloat16()

        def linear(*shape: int, x_scale: nn.Parameter | None = None) -> Linear:
            return Linear(weight(*shape), form.format, x_scale)

        def static_scale() -> nn.Parameter | None:
            scale = torch.tensor([2.0**-5], dtype=torch.bfloat16)
            return frozen(scale) if form.target == "preprocess" else None

        of_x = static_scale()
        self.q_a, self.kv_a = linear(hcq, he, x_scale=of_x), linear(hckv + dr, he, x_scale=of_x)
        of_query = he if form.target == "key" else hcq
        self.q_b = linear(n * (d + dr), of_query, x_scale=static_scale())
        self.indexer = linear(128, hcq) if form.reads_c_q and form.format is not None else None
        self.w_uk = frozen(weight(n, d, hckv))
        self.x_gamma, self.q_gamma, self.kv_gamma = (
            frozen(1 + weight(width)) for width in (he, hcq, hckv)
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: Tensor, kr_cache: Tensor
    ) -> tuple[Tensor, ...]:
        """x [.., He]; cos, sin [.., Dr]; slots [T]; caches [BlockNum, BlockSize, 1, Hckv or Dr]."""
        n, d, dr, hckv = (self.dims[axis] for axis in ("N", "D", "Dr", "Hckv"))
        lead = x.shape[:-1]
        if self.form.target == "preprocess":
            x = rms_norm(x, self.x_gamma)
        c_q = x if self.form.target == "key" else rms_norm(self.q_a(x), self.q_gamma)
        q_nope, q_pe = self.q_b(c_q).view(-1, n, d + dr).split([d, dr], -1)
        query = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        tables = [table.reshape(-1, 1, dr) for table in (cos, sin)]
        query_rope = self.rotate(q_pe, *tables)
        c_kv, k_pe = self.kv_a(x).view(-1, hckv + dr).split([hckv, dr], -1)
        rows = rms_norm(c_kv, self.kv_gamma), self.rotate(k_pe.unsqueeze(1), *tables).view(-1, dr)
        for cache, row in zip((kv_cache, kr_cache), rows, strict=True):
            torch.ops.npu.npu_scatter_nd_update_(
                cache.view(-1, row.shape[-1]), slots.view(-1, 1), row
            )
        outputs = query.reshape(*lead, n, hckv), query_rope.reshape(*lead, n, dr)
        if not self.form.reads_c_q:
            return outputs
        return *outputs, c_q if self.indexer is None else self.indexer(c_q)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE of the last axis; cos and sin hold each angle in both halves."""
        before, after = self.form.rope
        half = x.shape[-1] // 2
        left, right = (
            x.unflatten(-1, (half, 2)).unbind(-1) if before == "pairs" else x.split(half, -1)
        )
        cos, sin = cos[..., :half], sin[..., :half]
        turned = left * cos - right * sin, right * cos + left * sin
        return torch.stack(turned, -1).flatten(-2) if after == "pairs" else torch.cat(turned, -1)


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    """In float32 for bfloat16 inputs, in float64 for float64 ones."""
    wide = x.float() if x.dtype != torch.float64 else x
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * gamma


def arguments(form: Form, dims: Dims) -> tuple[Tensor, ...]:
    """Seeded inputs of `Prologue.forward`: tokens on scattered slots of caches full of noise."""
    make = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float32).bfloat16()

    tokens, half = torch.Size(form.lead).numel(), dims["Dr"] // 2
    frequencies = 10000.0 ** -torch.linspace(0, 1, half, dtype=torch.float32)
    angles = torch.randint(0, 4096, (*form.lead, 1), generator=make) * frequencies
    cos, sin = (torch.cat((t, t), -1).bfloat16() for t in (angles.cos(), angles.sin()))
    pool = (dims["BlockNum"], dims["BlockSize"], 1)
    slots = torch.randperm(pool[0] * pool[1], generator=make)[:tokens]
    return (
        noise(*form.lead, dims["He"]),
        cos,
        sin,
        slots,
        noise(*pool, dims["Hckv"]),
        noise(*pool, dims["Dr"]),
    )
