"""ATB's MlaPreprocess on the device against the reference, in the ``out`` form that writes the
caches in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta, reference
from mla_fusion.meta import preprocess as contract
from mla_fusion.reference.preprocess import scatter
from mla_fusion.reference.sample_preprocess import LEGAL, sample_preprocess
from mla_fusion.tools.selftest.compare import compare, same_bits
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.result import Result

_RESULTS = ("q_out0", "kv_cache", "q_out1", "kv_cache_rope")
_CACHES = ("kv_cache", "kv_cache_rope")
_NZ_WEIGHTS = ("wdqkv", "wuq")


@dataclass(frozen=True)
class Scenario:
    """One call of ``torch.ops.atb.npu_mla_preprocess.out``: 4 tokens, H 7168."""

    cache_mode: str
    quant_mode: str
    dtype: torch.dtype
    heads: int = 2
    op: str = field(default=contract.OP, init=False)

    @property
    def name(self) -> str:
        """As ``npu_mla_preprocess per_token_quant_symm krope_ctkv bfloat16``."""
        return (
            f"{self.op} {self.quant_mode} {self.cache_mode} "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    def call(self) -> dict[str, Any]:
        """Seeded arguments by name, on the CPU."""
        dims = dict(LEGAL, N=self.heads)
        return sample_preprocess(
            cache_mode=self.cache_mode,
            quant_mode=self.quant_mode,
            dtype=self.dtype,
            dims=dims,
        )


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


def run(scenario: Scenario, device: Device, *, repeats: int = 3) -> Result:
    """Call the operator and the reference on equal arguments, and compare results, caches and
    untouched rows.
    """
    call = scenario.call()
    result = Result(scenario.name, "eager")
    try:
        meta.check(scenario.op, soc=device.soc, cann=device.cann, values=True, **call)
        placed = device.place_all(call, _NZ_WEIGHTS)
        outs = _outs(placed)
        found = _step(placed, outs)
        after = {
            name: value.to("cpu", copy=True) for name, value in zip(_RESULTS, found, strict=True)
        }
        result.milliseconds = device.milliseconds(lambda: _step(placed, outs), repeats)
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    expected: dict[str, Any] = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()
    }
    wanted = dict(zip(_RESULTS, reference.mla_preprocess(**expected), strict=True))
    result.comparisons = [compare(name, after[name], wanted[name]) for name in _RESULTS]
    nz = contract.CACHE_FORMS[scenario.cache_mode].nz
    for name in _CACHES:
        covered = torch.zeros_like(call[name])
        width = _width(call, name)
        ones = torch.ones(len(call["slotmapping"]), width, dtype=torch.float32)
        scatter(covered, ones.to(covered.dtype), call["slotmapping"], nz=nz)
        others = covered == 0
        result.others_untouched &= same_bits(after[name][others], call[name][others])
    return result


def _width(call: dict[str, Any], name: str) -> int:
    """C of the latent cache, R of the rope cache."""
    return int(call["wuk"].shape[-1] if name == "kv_cache" else call["cos"].shape[-1])


def _outs(placed: dict[str, Any]) -> dict[str, Tensor]:
    """Room for the queries; the caches themselves as the other two results."""
    heads, latent = placed["wuk"].shape[0], placed["wuk"].shape[-1]
    tokens, rope = placed["cos"].shape
    x, kv_cache = placed["input"], placed["kv_cache"]
    query_dtype = torch.int8 if kv_cache.dtype == torch.int8 else x.dtype
    return {
        "q_out0": x.new_empty(tokens, heads, latent, dtype=query_dtype),
        "kv_cache_out0": kv_cache,
        "q_out1": x.new_empty(tokens, heads, rope),
        "kv_cache_out1": placed["kv_cache_rope"],
    }


def _step(placed: dict[str, Any], outs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    arguments: dict[str, Any] = {**placed, **outs}
    results: tuple[Tensor, ...] = torch.ops.atb.npu_mla_preprocess.out(**arguments)
    return results
