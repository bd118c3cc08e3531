"""Numbers that get into float16 without a cast: by a copy, or by the dtype that an operator is
given. Float16 ends at 65504 and has nothing below 6e-8, so they are other numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import base, int8_attention, int8_caches, int8_plain, static
from tests.catalogue.base import paged_args
from tests.harness import traced_graph

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
DTYPES = [(FLOAT16, False), (BFLOAT16, True)]


def report_of(model: nn.Module, *args: Tensor, **options: object) -> mf.Report:
    config = mf.Config(verify="off", **options)  # type: ignore[arg-type]
    return mf.explain(traced_graph(model, *args), config, boundary=True)


def changed(kind: type[nn.Module], **methods: object) -> nn.Module:
    torch.manual_seed(0)
    return type("Changed", (kind,), methods)()


def copied(value: Tensor, dtype: torch.dtype) -> Tensor:
    held = torch.empty_like(value, dtype=dtype)
    held.copy_(value)
    return held.float()


MEANS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "mean": lambda x, dtype: x.pow(2).mean(-1, keepdim=True, dtype=dtype).float(),
    "sum": lambda x, dtype: x.pow(2).sum(-1, keepdim=True, dtype=dtype).float() / x.shape[-1],
    "copy": lambda x, dtype: copied(x.pow(2).mean(-1, keepdim=True), dtype),
}


@pytest.mark.parametrize(("dtype", "is_fused"), DTYPES)
@pytest.mark.parametrize("mean", MEANS)
def test_a_mean_of_squares(mean: str, dtype: torch.dtype, is_fused: bool) -> None:
    """Rows of the hidden state beyond 256 have none in float16."""

    class Norm(base.HfNorm):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            normed = wide * torch.rsqrt(MEANS[mean](wide, dtype) + self.eps)
            return self.weight * normed.to(x.dtype)

    torch.manual_seed(0)
    model = static.Static()
    model.input_layernorm = Norm(static.H)
    report = report_of(model, *static.static_args(), targets=("preprocess",))
    codes = [item.code for item in report.rejected]
    assert codes == ([] if is_fused else ["norm.of_input"]), str(report)


@pytest.mark.parametrize(("dtype", "is_fused"), DTYPES)
def test_a_token_scale(dtype: torch.dtype, is_fused: bool) -> None:
    """Of rows near zero it is 0 in float16."""

    def quantise(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = int8_plain.largest(x.float()) / 127
        return int8_plain.to_int8(x.float() / scale), copied(scale, dtype)

    linear = type("Changed", (int8_plain.PlainLinear,), {"quantise": quantise})
    report = report_of(int8_plain.model_of(int8_plain.PlainPartial, linear), *paged_args())
    codes = [item.code for item in report.rejected]
    assert codes == ([] if is_fused else ["quant.dynamic"]), str(report)


@pytest.mark.parametrize(("dtype", "is_in_cache"), DTYPES)
def test_packed_keys(dtype: torch.dtype, is_in_cache: bool) -> None:
    def write(
        self: nn.Module, kv: Tensor, kr: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        through = copied(k_pe, dtype).to(k_pe.dtype)
        int8_caches.PackedRows.write(self, kv, kr, slots, c_kv, through)  # type: ignore[arg-type]

    report = report_of(changed(int8_caches.PackedRows, write=write), *int8_caches.packed_args())
    modes = [item.attributes.get("kv_cache_quant_mode", 0) for item in report.fused]
    assert modes == [3 if is_in_cache else 0], str(report)


@pytest.mark.parametrize(("dtype", "is_in_cache"), DTYPES)
def test_the_scale_of_an_int8_query(dtype: torch.dtype, is_in_cache: bool) -> None:
    """25 over the scale of a query below 0.05 is beyond float16."""

    def to_scale(self: nn.Module, query_rope: Tensor, scale: Tensor) -> Tensor:
        factor = copied(25.0 / scale.unsqueeze(-1), dtype)
        return (query_rope.float() * factor).to(query_rope.dtype)

    model = changed(int8_attention.Int8Attention, to_scale=to_scale)
    report = report_of(model, *int8_attention.int8_latent_args())
    assert bool(report.fused) is is_in_cache, str(report)
    assert is_in_cache or report.rejected[0].code == "proof.differs"


@pytest.mark.parametrize(("number", "is_fused"), [(0.25, True), (1e-9, False)])
def test_a_literal_that_float16_has_not(number: float, is_fused: bool) -> None:
    """1e-9 is 0 in float16."""

    class Norm(base.HfNorm):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            mean = wide.pow(2).mean(-1, keepdim=True)
            mean = mean * torch.full_like(mean, number, dtype=FLOAT16).float() * (1 / number)
            return self.weight * (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)

    torch.manual_seed(0)
    model = static.Static()
    model.input_layernorm = Norm(static.H)
    report = report_of(model, *static.static_args(), targets=("preprocess",))
    assert bool(report.fused) is is_fused, str(report)
