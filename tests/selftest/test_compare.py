"""The self-test's comparisons: what passes, what does not, and in which words."""

from __future__ import annotations

import pytest
import torch

from mla_fusion.reference import hifloat8
from mla_fusion.tools.by_hand.memory import same_bits
from mla_fusion.tools.selftest.compare import compare


def values(dtype: torch.dtype, rows: int = 64) -> torch.Tensor:
    noise = torch.randn(rows, 128, generator=torch.Generator().manual_seed(0))
    if dtype == torch.int8:
        return (40 * noise).clamp(-127, 127).to(dtype)
    return hifloat8.encode(noise) if dtype == torch.uint8 else noise.to(dtype)


DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int8,
    torch.float8_e4m3fn,
    torch.uint8,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_tensor_passes_and_its_reverse_does_not(dtype):
    wanted = values(dtype)
    assert not compare("query", wanted.clone(), wanted).problem
    assert "of the elements differ" in compare("query", wanted.flip(0), wanted).problem


@pytest.mark.parametrize("dtype", (torch.int8, torch.float8_e4m3fn, torch.uint8))
def test_codes_may_be_one_step_off_in_a_few_elements(dtype):
    wanted = values(dtype)
    found = wanted.clone().view(torch.uint8)
    found[0, :3] += torch.where(found[0, :3] % 128 == 127, 255, 1).to(torch.uint8)
    one = compare("query", found.view(dtype), wanted)
    assert (one.largest, one.problem) == (1.0, "")
    if dtype == torch.int8:
        found = wanted.clone()
        found[0, 0] = found[0, 0] - 2 if found[0, 0] > 0 else found[0, 0] + 2
        assert compare("query", found, wanted).problem == "off by 2 codes, allowed 1"


def test_zero_of_either_sign_is_one_value():
    wanted = torch.zeros(1, 128).to(torch.float8_e4m3fn)
    assert compare("query", (-wanted.float()).to(torch.float8_e4m3fn), wanted).largest == 0.0


def test_floats_are_judged_by_their_row():
    wanted = torch.ones(1, 256).bfloat16()
    wanted[0, 0] = 1e-6
    found = wanted.clone()
    found[0, 0] = 1e-3  # far off relative to itself, nothing beside its row
    assert not compare("query", found, wanted).problem
    found[0, :8] = 1.1
    assert "3.12% of the elements differ, allowed 0.50%" in compare("query", found, wanted).problem


def test_a_nan_differs():
    wanted = torch.ones(4)
    found = wanted.clone()
    found[1] = float("nan")
    assert compare("scale", found, wanted).problem == "25.00% of the elements differ, allowed 0.00%"


def test_another_shape_or_dtype():
    problem = compare("query", torch.ones(2, 3), torch.ones(2, 4).bfloat16()).problem
    assert problem == "is float32 [2, 3], expected bfloat16 [2, 4]"


def test_same_bits_tells_zeros_apart_and_nans_not():
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.empty(0), torch.empty(0))
