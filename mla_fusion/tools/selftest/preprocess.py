"""Calls of ATB's MlaPreprocess for the self-test, in the ``out`` form that writes the caches in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mla_fusion.meta import preprocess as contract
from mla_fusion.reference import mla_preprocess
from mla_fusion.reference.sample_preprocess import LEGAL, sample_preprocess
from mla_fusion.tools.selftest.operator import Call


@dataclass(frozen=True)
class Scenario(Call):
    """One call of ``torch.ops.atb.npu_mla_preprocess.out``: 4 tokens, H 7168."""

    cache_mode: str
    quant_mode: str
    dtype: torch.dtype
    heads: int = 2
    op, caches, nz = contract.OP, contract.CACHES, ("wdqkv", "wuq")
    results = "q_out0", "kv_cache", "q_out1", "kv_cache_rope"
    reference = staticmethod(mla_preprocess)

    @property
    def name(self) -> str:
        """As ``npu_mla_preprocess per_token_quant_symm krope_ctkv bfloat16``."""
        return (
            f"{self.op} {self.quant_mode} {self.cache_mode} "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    @property
    def operator(self) -> Callable[..., Any]:
        return torch.ops.atb.npu_mla_preprocess.out

    def call(self) -> dict[str, Any]:
        return sample_preprocess(
            cache_mode=self.cache_mode,
            quant_mode=self.quant_mode,
            dtype=self.dtype,
            dims=dict(LEGAL, N=self.heads),
        )

    def outs(self, placed: Mapping[str, Any]) -> dict[str, Any]:
        """Room for the queries; the caches themselves as the other two results."""
        heads, _, latent = placed["wuk"].shape
        tokens, rope = placed["cos"].shape
        x, kv_cache = placed["input"], placed["kv_cache"]
        query_dtype = torch.int8 if kv_cache.dtype == torch.int8 else x.dtype
        queries = (
            x.new_empty(tokens, heads, latent, dtype=query_dtype),
            x.new_empty(tokens, heads, rope),
        )
        given = (queries[0], kv_cache, queries[1], placed["kv_cache_rope"])
        return dict(zip(contract.RESULTS, given, strict=True))


def scenarios(soc: str, heads: int = 2) -> Iterator[Scenario]:
    """Every cache mode that torch offers with every quantisation mode, in both activation
    dtypes.
    """
    if soc not in contract.SOCS:
        return
    for quant_mode in contract.QUANT_MODES:
        for cache_mode in (
            mode for mode, form in contract.CACHE_FORMS.items() if form.kr is not None
        ):
            for dtype in (torch.bfloat16, torch.float16):
                # the kernel knows bfloat16 there
                if (quant_mode, dtype) != ("per_token_quant_symm", torch.float16):
                    yield Scenario(cache_mode, quant_mode, dtype, heads)
