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


@pytest.mark.parametrize("form", ["NSD", "NZ"])
@pytest.mark.parametrize("block", [16, 48, 1024])
def test_other_forms_of_the_caches(form: str, block: int) -> None:
    latents = Latents(form=form, block=block, new=(3, 1, 16, 2))
    out, lse = run(latents.call())
    exact, exact_lse = latents.exact()
    assert error(out, exact) < 2**-8
    assert error(lse.squeeze(-1), exact_lse) < 1e-6


def test_shapes_are_those_of_torch_npus_meta_function() -> None:
    for layout in LAYOUTS:
        call = Latents(**TWO_EACH).call(layout)
        fake = {
            name: item.to("meta") if isinstance(item, Tensor) else item
            for name, item in call.items()
        }
        for real, inferred in zip(run(call), run(fake), strict=True):
            assert (real.shape, real.dtype) == (inferred.shape, inferred.dtype), layout
            assert real.is_contiguous()


def test_no_key_is_nothing_and_lse_is_given_when_asked() -> None:
    call = Latents(lengths=(5, 7), new=(1, 1)).call("BSND") | {"actual_seq_kvlen": [5, 0]}
    out, lse = run(call)
    assert not out[1].any() and (lse[1] == float("-inf")).all()
    assert out[0].isfinite().all() and lse[0].isfinite().all()
    again, nothing = run(call | {"return_softmax_lse": False})
    assert nothing.shape == (0,)
    assert torch.equal(again, out)


def test_shorter_sequences_of_a_padded_query() -> None:
    """Two rows a sequence, of which the second sequence has one."""
    latents = Latents(lengths=(9, 6), new=(2, 2))
    out, _ = run(latents.call("BSND") | {"actual_seq_qlen": [2, 1]})
    latents.new, latents.query, latents.query_rope = (
        (2, 1),
        latents.query[:3],
        latents.query_rope[:3],
    )
    assert error(out.flatten(0, 1)[:3], latents.exact()[0]) < 2**-8
    assert not out[1, 1].any()


def test_what_it_does_not_do() -> None:
    call = Latents().call()
    with pytest.raises(ValueError, match="no sparse_mode 4"):
        run(call | {"sparse_mode": 4})
    with pytest.raises(ContractError, match="prefix sums"):
        run(call | {"actual_seq_qlen": [1, 1, 1, 1]})
