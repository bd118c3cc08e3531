"""The calls of the self-test: all modes that the specification has on one SoC, at one CANN
release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta import key_operator, spec
from mla_fusion.meta.limits import VERSIONS
from mla_fusion.meta.prolog import CACHES, PROLOGS
from mla_fusion.reference import kernels
from mla_fusion.tools.selftest.samples import DEEPSEEK_V3, as_operator, sample_call

Arguments = dict[str, Any]  # of an operator, by name


@dataclass(frozen=True)
class Call:
    """One call of an operator that writes caches.

    name     unique among the calls of the self-test
    op       the operator, as `mla_fusion.meta.check` names it
    make     its seeded arguments, on the CPU
    results  names of what operator and reference return, in order
    caches   names of arguments
    nz       the weights that are in FRACTAL_NZ on an NPU
    kind     equal for calls that differ in the layout of caches alone
    """

    name: str
    op: str
    make: Callable[[], Arguments]
    results: Sequence[str]
    caches: Sequence[str] = CACHES
    nz: Sequence[str] = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
    kind: object = None

    @property
    def operator(self) -> Callable[..., Any]:
        return getattr(torch.ops.npu, self.op)

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(kernels, self.op)


def calls(soc: str, cann: str, small: bool = True) -> list[Call]:
    """Every mode of every operator, on few tokens, of DeepSeek-V3's sizes or ``small`` ones.

    Raises ContractError for a ``soc`` or ``cann`` that is not in the tables.
    """
    return [
        *(call for op in VERSIONS for call in _of_prolog(op, soc, cann, small)),
        *_of_key(soc),
    ]


def _of_prolog(op: str, soc: str, cann: str, small: bool) -> Iterator[Call]:
    limits = meta.limits(op, soc, cann)
    if not limits.cache_modes:  # the operator is not there on this SoC
        return
    dims = DEEPSEEK_V3 | {"BlockNum": 8}
    if small:
        dims |= {"N": 4, "He": min(limits.dims["He"].listed)}
    for weight, cache in sorted(limits.quant_modes):
        modes = [one for one in limits.cache_modes if one in spec.CACHE_QUANTS[cache].cache_modes]
        for mode in modes:
            # tokens of one axis, where the mode has a slot for each
            lead = (8,) if 2 in spec.CACHE_MODES[mode].index else (8, 1)
            name = f"{op} w{weight} kv{cache} {mode}"
            form = dict(weight_quant_mode=weight, kv_cache_quant_mode=cache, cache_mode=mode)
            make = partial(_prolog, op, cann, lead=lead, dims=dims, **form)
            yield Call(name, op, make, PROLOGS[op].results, kind=(op, weight, cache))


def _prolog(op: str, cann: str, **form: Any) -> Arguments:
    return as_operator(op, sample_call(**form), cann)


def _of_key(soc: str) -> Iterator[Call]:
    """The modes that the pass emits, and the NZ layout; int8 rows where the SoC has them."""
    op, caches = key_operator.V2.name, ("k_cache", "ckv_cache")
    for mode in ("PA_BNSD", "PA_NZ", "Norm"):
        for int8 in (False, True) if mode != "Norm" or soc == "A5" else (False,):
            make = partial(sample_key, mode, int8)
            results = ("k_embed", "y") if mode != "Norm" else ()
            yield Call(f"{op} {mode}{' int8' * int8}", op, make, results, caches, ())


def sample_key(mode: str = "PA_BNSD", int8: bool = False) -> Arguments:
    """8 tokens, as one sequence on scattered slots, or in mode "Norm" as two, on rows of their own
    caches.
    """
    make = torch.Generator().manual_seed(0)
    latent, rope = DEEPSEEK_V3["Hckv"], DEEPSEEK_V3["Dr"]

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float32).bfloat16()

    batches, pool = (2, (2, 1, 16)) if mode == "Norm" else (1, (4, 32, 1))
    lead, rows = (batches, 1, 8 // batches), prod(pool) // batches
    index = torch.stack([torch.randperm(rows, generator=make)[: lead[2]] for _ in range(batches)])
    given: Arguments = {
        "kv": noise(*lead, latent + rope),
        "gamma": 1 + noise(latent) / 8,
        "cos": noise(*lead, rope),
        "sin": noise(*lead, rope),
        "index": index if mode == "Norm" else index[0],
    }
    named = zip(("k_cache", "ckv_cache"), (rope, latent), key_operator.SCALES, strict=True)
    for name, width, scale in named:
        given[name] = noise(*pool, width)
        if int8:
            given[name] = (20 * given[name]).to(torch.int8)
            given[scale] = 20 + 10 * torch.rand(width, generator=make, dtype=torch.float32)
    return given | {"cache_mode": mode, "is_output_kv": mode != "Norm", "epsilon": 1e-6}
