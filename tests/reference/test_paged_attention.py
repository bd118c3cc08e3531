"""The CPU kernel of the attention operator against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mla_fusion.meta import ContractError
from mla_fusion.meta.attention import INT8_LAYOUTS, LAYOUTS
from torch import Tensor

import mla_fusion as mf
from tests.attention_calls import Latents, error

TWO_EACH = {"new": (2, 2, 2, 2), "lengths": (37, 2, 60, 16)}
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 1e-12}


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    mf.offline.activate()  # torch_npu defines the operator; here it gets a CPU kernel


def run(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return torch.ops.npu.npu_fused_infer_attention_score_v2(**call)


def by_token(out: Tensor, lse: Tensor, layout: str, heads: int) -> tuple[Tensor, Tensor]:
    """out [T, N, 512] and lse [T, N] of the results in a layout."""
    axes = layout.split("_")[-1]
    if axes.endswith("H"):
        out, axes = out.unflatten(-1, (heads, -1)), "BSND"
    order = "TND" if "T" in axes else "BSND"
    out = out.permute([axes.index(axis) for axis in order])
    if "T" in axes:
        return out, lse.squeeze(-1)
    return out.flatten(0, 1), lse.squeeze(-1).transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_float64_in_every_layout(layout: str, several: bool, dtype: torch.dtype) -> None:
    latents = Latents(dtype=dtype, **(TWO_EACH if several else {}))
    out, lse = by_token(*run(latents.call(layout)), layout, latents.heads)
    exact, exact_lse = latents.exact()
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert error(out, exact) < ROUNDING[dtype]
    assert error(lse, exact_lse) < 1e-6


@pytest.mark.parametrize("layout", INT8_LAYOUTS)
@pytest.mark.parametrize("form", ["BSD", "NSD", "NZ"])
def test_equals_float64_of_the_int8_numbers(layout: str, form: str) -> None:
    latents = Latents(dtype=torch.int8, block=128, form=form, **TWO_EACH)
    out, lse = by_token(*run(latents.call(layout)), layout, latents.heads)
    exact, exact_lse = latents.exact()
    assert out.dtype == torch.bfloat16
    assert error(out, exact) < 2**-8
    assert error(lse, exact_lse) < 1e-6


def test_what_it_does_not_do() -> None:
    call = Latents().call()
    with pytest.raises(ValueError, match="no sparse_mode 4"):
        run(call | {"sparse_mode": 4})
    with pytest.raises(ContractError, match="prefix sums"):
        run(call | {"actual_seq_qlen": [1, 1, 1, 1]})
