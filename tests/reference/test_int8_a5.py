"""int8 as A5 rounds it: order of the scales, dynamic quantisation, the cast through half to odd."""

from __future__ import annotations

import pytest
import torch

from mla_fusion import meta, reference
from mla_fusion.reference import formats, quantize
from tests.samples import sample_call


def noise(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def half_to_odd(x: torch.Tensor) -> torch.Tensor:
    """CAST_ODD: truncate to half; where that lost something and the last bit is even, the neighbour
    away from zero.
    """
    nearest = x.to(torch.float16)
    below = torch.where(
        nearest.float().abs() > x.abs(),
        (nearest.view(torch.int16) - 1).view(torch.float16),
        nearest,
    )
    bits = below.view(torch.int16)
    return torch.where(below.float() == x, bits, bits | 1).view(torch.float16)


def test_half_to_odd_then_half_to_even_rounds_once() -> None:
    ties = torch.arange(-140, 140) + 0.5
    near = torch.cat(
        (ties, torch.nextafter(ties, torch.tensor(1e9)), torch.nextafter(ties, torch.tensor(-1e9)))
    )
    x = torch.cat(
        (near, noise(200_000) * 60, noise(1000) * 1e-6, torch.tensor([0.0, 300.0, -300.0]))
    )
    through_half = half_to_odd(x).float().round().clamp(-128, 127).to(torch.int8)
    assert torch.equal(quantize.to_int8(x), through_half)
    assert not torch.equal(quantize.to_int8(x), quantize.to_int8_through_half(x)), (
        "A2 and A3 round the query twice"
    )


def test_dynamic_quantisation_divides_by_the_scale() -> None:
    x = noise(500, 64)
    data, scale = formats.INT8_A5.dynamic_quant(x)
    wanted = x.abs().amax(-1, keepdim=True) * torch.tensor(1.0).div(127.0)
    assert torch.equal(scale, wanted) and torch.equal(data, (x / wanted).round().to(torch.int8))
    assert not torch.equal(scale, formats.INT8.dynamic_quant(x)[1]), (
        "A2 and A3 divide the maximum by 127"
    )
    zeros, zero_scale = formats.INT8_A5.quant_query(torch.zeros(1, 2, 8))
    assert not zeros.any() and zero_scale.tolist() == [[[0.0], [0.0]]]


def test_the_channel_scale_comes_first() -> None:
    x, weight = (torch.randint(-127, 128, sizes, dtype=torch.int8) for sizes in ((9, 40), (40, 30)))
    token, channel = noise(9, 1).abs(), noise(1, 30, seed=1).abs()
    total = (x.int() @ weight.int()).float()
    assert torch.equal(formats.INT8_A5.product(x, weight, token, channel), total * channel * token)
    assert torch.equal(formats.INT8.product(x, weight, token, channel), total * token * channel)


@pytest.mark.parametrize(("wq", "kv"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)])
def test_the_prologue_on_a5_is_a_rounding_away_from_a3(wq: int, kv: int) -> None:
    call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, lead=(16,)) | {
        "query_norm_flag": True
    }
    on_a3 = reference.npu_mla_prolog_v3_functional(**call)
    with reference.chip("A5"):
        on_a5 = reference.npu_mla_prolog_v3_functional(**call)
    with reference.chip("A2"):
        assert all(map(torch.equal, reference.npu_mla_prolog_v3_functional(**call), on_a3))
    assert all(map(torch.equal, reference.npu_mla_prolog_v3_functional(**call), on_a3)), (
        "the chip is left again"
    )
    assert any(not torch.equal(a, b) for a, b in zip(on_a3, on_a5, strict=True))
    for a, b in zip(on_a3[:6], on_a5[:6], strict=True):
        if a.dtype == torch.int8:
            if kv != 3 or a is not on_a3[5]:  # a per-tile row holds bfloat16 and float32 bytes too
                assert (a.int() - b.int()).abs().max() <= 1
        elif a.numel():
            assert (a.float() - b.float()).norm() <= 0.02 * a.float().norm()


def test_a_chip_that_does_not_exist_is_refused_and_an_exception_leaves_the_chip() -> None:
    with pytest.raises(meta.ContractError) as refusal, reference.chip("910B"):
        pass
    assert refusal.value.code == "soc"
    x = sample_call(weight_quant_mode=2)
    before = reference.npu_mla_prolog_v3_functional(**x)
    with pytest.raises(ZeroDivisionError), reference.chip("A5"):
        _ = 1 / 0
    assert all(map(torch.equal, reference.npu_mla_prolog_v3_functional(**x), before))
