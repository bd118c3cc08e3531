"""int8 caches whose rows, or whose query, are scaled in spellings beside the usual ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.catalogue.int8_attention import Int8Attention, int8_latent_args
from tests.catalogue.int8_caches import PlainCache, int8_cache_args
from tests.catalogue.int8_plain import to_int8
from tests.harness import both_ways


class ByInteger(PlainCache):
    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return to_int8(rows.float() * 25)


class ByIntegerOverScale(PlainCache):
    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return to_int8(rows.float() * 127 / scale)


@pytest.mark.parametrize("model", [ByInteger, ByIntegerOverScale])
def test_an_integer_is_a_factor_like_another(model: type[PlainCache]) -> None:
    for report, _ in both_ways(model(), int8_cache_args()):
        assert [item.placement for item in report.fused] == ["in place"], str(report)


class ScaleRounded(Int8Attention):
    """query_rope is divided by the query's scale in bfloat16, which is also read in float32."""

    def to_scale(self, rope: Tensor, scale: Tensor) -> Tensor:
        return rope / scale.unsqueeze(-1).to(rope.dtype) * 25.0


def test_a_scale_that_is_read_rounded_too_leaves_the_caches_to_the_model() -> None:
    torch.manual_seed(0)
    for report, _ in both_ways(ScaleRounded(), int8_latent_args()):
        (fused,) = report.fused
        assert fused.placement.startswith("staged"), str(report)
        assert "what rounding leaves of dequant_scale_q_nope" in fused.placement
