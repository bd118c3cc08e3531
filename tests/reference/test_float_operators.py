"""CPU kernels of operators that quantise to float formats or multiply in them, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion import reference as kernels
from mla_fusion.reference import formats, hifloat8

E8M0, HIF8 = 293, 290


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def powers(codes: Tensor) -> Tensor:
    """Of each element, from the scales [.., k/64, 2] of its block."""
    return (codes.flatten(-2).double() - 127).exp2().repeat_interleave(32, -1)


def rounded_once(found: Tensor, exact: Tensor) -> bool:
    return bool(((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all())


def test_dynamic_mx_quant_is_the_kernels_own() -> None:
    """Bit by bit what the prologue does to c_q; scales in pairs, padded with zeros."""
    x = noise(5, 128) * torch.logspace(-6, 6, 128)
    values, codes = kernels.npu_dynamic_mx_quant(x.bfloat16(), dst_type=24)
    wanted, scale = formats.mx_quant(x.bfloat16())
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(codes, scale.view(torch.uint8).view(5, 2, 2)) and codes.dtype == torch.uint8
    short, codes = kernels.npu_dynamic_mx_quant(noise(5, 96), dst_type=292)
    assert (short.shape, codes.shape) == ((5, 96), (5, 2, 2)) and not codes[:, 1, 1].any()


def test_mx_quantisation_errs_by_half_a_step() -> None:
    x = noise(16, 256)
    values, codes = kernels.npu_dynamic_mx_quant(x, dst_type=24)
    step = powers(codes) * 2.0 ** (values.double().abs().clamp(min=2.0**-6).log2().floor() - 3)
    error = (values.double() * powers(codes) - x.double()).abs()
    saturated = values.double().abs() == 448
    assert bool((error <= 0.5 * step)[~saturated].all()) and bool(
        (error <= 64 * powers(codes)).all()
    )


def test_mx_product() -> None:
    x, codes = kernels.npu_dynamic_mx_quant(noise(4, 192), dst_type=24)
    weight, columns = kernels.npu_dynamic_mx_quant(noise(8, 192, seed=1), dst_type=24)
    options: dict[str, Any] = {
        "scale_dtype": E8M0,
        "pertoken_scale_dtype": E8M0,
        "output_dtype": 15,
    }
    given = {"pertoken_scale": codes, "group_sizes": [1, 1, 32], **options}
    found = kernels.npu_quant_matmul(x, weight.t(), columns.transpose(0, 1), **given)
    exact = (x.double() * powers(codes)[:, :192]) @ (weight.double() * powers(columns)[:, :192]).t()
    assert rounded_once(found, exact)


@pytest.mark.parametrize("dst_type", [24, HIF8])
def test_scaled_product(dst_type: int) -> None:
    x, token = kernels.npu_dynamic_quant(noise(4, 64), dst_type=dst_type)
    weight, column = kernels.npu_dynamic_quant(noise(8, 64, seed=1), dst_type=dst_type)
    numbers = {"x1_dtype": HIF8, "x2_dtype": HIF8} if dst_type == HIF8 else {}
    found = kernels.npu_quant_matmul(
        x, weight.t(), column, pertoken_scale=token, output_dtype=15, **numbers
    )
    a, b = ((hifloat8.decode(v) if dst_type == HIF8 else v).double() for v in (x, weight))
    assert rounded_once(found, (a @ b.t()) * column.double() * token.double()[:, None])


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.npu_dynamic_quant(noise(2, 64), dst_type=23),
        lambda: kernels.npu_dynamic_mx_quant(noise(2, 64)),
        lambda: kernels.npu_dynamic_mx_quant(noise(2, 64), dst_type=24, axis=0),
        lambda: kernels.npu_dynamic_mx_quant(noise(2, 64), dst_type=24, round_mode="floor"),
        lambda: kernels.npu_dynamic_mx_quant(noise(2, 64), dst_type=24, block_size=64),
        lambda: kernels.npu_dynamic_block_quant(noise(2, 128), dst_type=HIF8),
        lambda: kernels.npu_quant_matmul(
            *(torch.zeros(64, 64).to(torch.float8_e5m2),) * 2, torch.ones(64)
        ),
        lambda: kernels.npu_quant_matmul(
            *(torch.zeros(64, 64, dtype=torch.uint8),) * 2, torch.ones(64)
        ),
    ],
)
def test_what_has_no_kernel_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="the CPU kernel"):
        call()


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (formats.FP8, {"dst_type": 24}),
        (formats.HIFLOAT8, {"dst_type": HIF8, "round_mode": "round"}),
    ],
)
def test_tiles_in_float_formats(form: formats.Format, named: dict[str, Any]) -> None:
    values, scale = kernels.npu_dynamic_block_quant(noise(3, 512), **named)
    wanted, of_tiles = form.per_tile(noise(3, 512).float(), None, 128)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(
        scale, of_tiles
    )
    bound = float(of_tiles.amin()) / 2
    _, bounded = kernels.npu_dynamic_block_quant(noise(3, 512), min_scale=1 / bound, **named)
    assert torch.equal(bounded, torch.full_like(scale, bound))
