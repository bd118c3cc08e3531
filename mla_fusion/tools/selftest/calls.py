"""The calls of the self-test: all modes that the specification has on one SoC, at one CANN
release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta import key_operator, preprocess, spec
from mla_fusion.meta.limits import VERSIONS
from mla_fusion.meta.prolog import CACHES, PROLOGS
from mla_fusion.reference import kernels, mla_preprocess
from mla_fusion.tools.selftest.samples import (
    DEEPSEEK_V3,
    LEGAL_PREPROCESS,
    as_operator,
    sample_call,
    sample_preprocess,
)

Arguments = dict[str, Any]  # of an operator, by name
_OLDER = ("npu_mla_prolog", "npu_mla_prolog_v2")
_KEY_TOKENS, _KEY_POOL = 8, (4, 32, 1)


@dataclass(frozen=True)
class Call:
    """One call of an operator that writes caches.

    name     unique among the calls of the self-test
    op       the operator, as `mla_fusion.meta.check` names it
    make     its seeded arguments, on the CPU
    results  names of what operator and reference return, in order
    caches   names of arguments
    nz       the weights that are in FRACTAL_NZ on an NPU
    kind     equal for calls that differ in more than the layout of caches and tokens
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
        if self.op == preprocess.OP:
            return torch.ops.atb.npu_mla_preprocess.out
        return getattr(torch.ops.npu, self.op)

    @property
    def reference(self) -> Callable[..., Any]:
        return mla_preprocess if self.op == preprocess.OP else getattr(kernels, self.op)

    def outs(self, placed: Arguments) -> Arguments:
        """The arguments that take the results; the caches are two of them."""
        if self.op != preprocess.OP:
            return {}
        heads, _, latent = placed["wuk"].shape
        tokens, rope = placed["cos"].shape
        x, kv_cache, kr_cache = (placed[name] for name in ("input", *self.caches))
        dtype = torch.int8 if kv_cache.dtype == torch.int8 else x.dtype
        query = x.new_empty(tokens, heads, latent, dtype=dtype)
        made = query, kv_cache, x.new_empty(tokens, heads, rope), kr_cache
        return dict(zip(preprocess.RESULTS, made, strict=True))


def calls(soc: str, cann: str, he: int | None = None, heads: int = 4) -> list[Call]:
    """Every mode of every operator, on few tokens. ``he``: by default the smallest that is legal.

    Raises ContractError for a ``soc`` or ``cann`` that is not in the tables.
    """
    return [
        *(call for op in VERSIONS for call in _of_prolog(op, soc, cann, he, heads)),
        *_of_preprocess(soc),
        *_of_key(soc),
    ]


def _of_prolog(op: str, soc: str, cann: str, he: int | None, heads: int) -> Iterator[Call]:
    limits = meta.limits(op, soc, cann)
    if not limits.cache_modes:  # the operator is not there on this SoC
        return
    dims = dict(DEEPSEEK_V3, BlockNum=8, N=heads, He=he or min(limits.dims["He"].listed))
    leads = ((8,), (4, 2) if 2 in limits.dims["S"] else (8, 1))
    for weight, cache in sorted(limits.quant_modes):
        modes = [one for one in limits.cache_modes if one in spec.CACHE_QUANTS[cache].cache_modes]
        for mode, lead in product(modes, leads):
            if len(lead) + 1 not in spec.CACHE_MODES[mode].index:
                continue
            rows = "T{}" if len(lead) == 1 else "B{}S{}"
            name = f"{op} w{weight} kv{cache} {mode} {rows.format(*lead)}"
            make = partial(_prolog, op, cann, weight, cache, mode, lead, dims)
            call = Call(name, op, make, PROLOGS[op].results, kind=(op, weight, cache))
            yield call
            if mode == "PA_BSND" and len(lead) == 1 and op not in _OLDER:
                norm = limits.gives_query_norm
                more = partial(make, query_norm_flag=norm, qc_qr_scale=1.25, kc_scale=0.75)
                yield replace(call, name=f"{name} extras", make=more)


def _prolog(
    op: str,
    cann: str,
    weight: int,
    cache: int,
    mode: str,
    lead: tuple[int, ...],
    dims: dict[str, int],
    **extras: Any,
) -> Arguments:
    """With extras everything optional at once, smoothing among it."""
    call = sample_call(
        weight_quant_mode=weight,
        kv_cache_quant_mode=cache,
        cache_mode=mode,
        lead=lead,
        dims=dims,
        smooth=bool(extras),
    )
    return as_operator(op, call | extras, cann)


def _of_preprocess(soc: str) -> Iterator[Call]:
    """Every cache mode that torch offers, with every quantisation mode."""
    modes = [mode for mode, form in preprocess.CACHE_FORMS.items() if form.kr is not None]
    for quant_mode in preprocess.QUANT_MODES if soc in preprocess.SOCS else ():
        for mode in modes:
            yield Call(
                f"{preprocess.OP} {quant_mode} {mode}",
                preprocess.OP,
                partial(
                    sample_preprocess,
                    cache_mode=mode,
                    quant_mode=quant_mode,
                    dims=LEGAL_PREPROCESS,
                ),
                ("q_out0", "kv_cache", "q_out1", "kv_cache_rope"),
                preprocess.CACHES,
                ("wdqkv", "wuq"),
            )


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

    batches = 2 if mode == "Norm" else 1
    lead = batches, 1, _KEY_TOKENS // batches
    pool = (2, 1, 16) if mode == "Norm" else _KEY_POOL
    rows = 16 if mode == "Norm" else _KEY_POOL[0] * _KEY_POOL[1]
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
