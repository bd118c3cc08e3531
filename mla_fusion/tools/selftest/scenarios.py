"""The calls of the self-test: every scenario that the specification allows on one SoC at one CANN
release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta import key_operator, preprocess, spec
from mla_fusion.meta.limits import VERSIONS
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.paging.tiles import unpack_rows
from mla_fusion.reference import mla_preprocess
from mla_fusion.reference.sample import DEEPSEEK_V3, as_operator, sample_call
from mla_fusion.reference.sample_preprocess import LEGAL, sample_preprocess
from mla_fusion.tools.selftest.operator import Arguments, Call

# everything optional at once: smoothing, the normalised c_q as an output, factors that are not one
_EXTRAS: Arguments = {"query_norm_flag": True, "qc_qr_scale": 1.25, "kc_scale": 0.75}
_OLDER = ("npu_mla_prolog", "npu_mla_prolog_v2")


@dataclass(frozen=True)
class Scenario(Call):
    """One call of a prologue operator, as CANN ``cann`` has it. ``lead`` is ``(T,)`` or ``(B, S)``;
    ``dims`` the other sizes by axis.
    """

    op: str
    weight_quant_mode: int
    kv_cache_quant_mode: int
    cache_mode: str
    lead: tuple[int, ...]
    dims: Mapping[str, int] = field(default_factory=lambda: DEEPSEEK_V3, hash=False)
    extras: bool = False
    cann: str = "latest"

    @property
    def name(self) -> str:
        """As ``npu_mla_prolog_v3 w2 kv1 PA_BSND T8``; unique within `scenarios`."""
        axes = ("T",) if len(self.lead) == 1 else ("B", "S")
        lead = "".join(f"{axis}{size}" for axis, size in zip(axes, self.lead, strict=True))
        quant = f"w{self.weight_quant_mode} kv{self.kv_cache_quant_mode}"
        return f"{self.op} {quant} {self.cache_mode} {lead}" + (" extras" if self.extras else "")

    def call(self) -> Arguments:
        call = sample_call(
            weight_quant_mode=self.weight_quant_mode,
            kv_cache_quant_mode=self.kv_cache_quant_mode,
            cache_mode=self.cache_mode,
            lead=self.lead,
            dims=self.dims,
            smooth=self.extras,
        )
        if self.extras:
            given = meta.limits(self.op, "A3", self.cann).gives_query_norm
            call |= _EXTRAS | {"query_norm_flag": given}
        return as_operator(self.op, call, self.cann)

    @property
    def results(self) -> tuple[str, ...]:
        return PROLOGS[self.op].results

    def parts(self, rows: Tensor) -> dict[str, Tensor]:
        """A packed row as latent, rope part and scales."""
        if self.kv_cache_quant_mode != 3:
            return super().parts(rows)
        hckv, dr = self.dims["Hckv"], self.dims["Dr"]
        pieces = unpack_rows(rows, hckv=hckv, dr=dr, tile=spec.TILE_SIZE)
        return dict(zip((".ckv", ".kr", ".scale"), pieces, strict=True))


def scenarios(
    soc: str, cann: str = "latest", *, he: int | None = None, heads: int = 4
) -> list[Scenario]:
    """Every legal pair of quantisation modes with every cache mode and rank of token_x, for each of
    the four operators that takes the sizes.

    ``he`` is the hidden size, by default the smallest that the release takes; small pools, 8
    tokens. Raises ContractError ``soc`` or ``cann`` for a name that is not in the tables,
    ``dims.he`` or ``dims.n`` for a size that none of the operators takes.
    """
    for axis, size in (("He", he), ("N", heads)):
        taken = [meta.limits(op, soc, cann).dims[axis] for op in VERSIONS]
        if size is not None and not any(size in sizes for sizes in taken):
            where = f"{axis} {taken[-1]} on {soc}, CANN {cann}"
            raise meta.ContractError(f"dims.{axis.lower()}", axis, where, f"{axis} {size}")
    return [item for op in VERSIONS for item in _of_operator(op, soc, cann, he, heads)]


def _of_operator(op: str, soc: str, cann: str, he: int | None, heads: int) -> Iterator[Scenario]:
    limits = meta.limits(op, soc, cann)
    if not limits.cache_modes:  # the operator is not there on this SoC
        return
    dims = dict(DEEPSEEK_V3, BlockNum=8, N=heads, He=he or min(limits.dims["He"].listed))
    if any(dims[axis] not in limits.dims[axis] for axis in ("He", "N")):
        return
    leads = ((8,), (4, 2) if 2 in limits.dims["S"] else (8, 1))
    for weight, cache in sorted(limits.quant_modes):
        legal = spec.CACHE_QUANTS[cache].cache_modes
        for mode in (mode for mode in limits.cache_modes if mode in legal):
            taken = [lead for lead in leads if len(lead) + 1 in spec.CACHE_MODES[mode].index]
            for lead in taken if op != "npu_mla_prolog_v3_functional" else taken[:1]:
                yield Scenario(op, weight, cache, mode, lead, dims, cann=cann)
        if op not in _OLDER and "PA_BSND" in limits.cache_modes:
            yield Scenario(op, weight, cache, "PA_BSND", leads[0], dims, True, cann)


# -- ATB's MlaPreprocess


@dataclass(frozen=True)
class PreprocessScenario(Call):
    """One call of ``torch.ops.atb.npu_mla_preprocess.out``: 4 tokens, H 7168."""

    cache_mode: str
    quant_mode: str
    dtype: torch.dtype
    heads: int = 2
    op, caches, nz = preprocess.OP, preprocess.CACHES, ("wdqkv", "wuq")
    results = "q_out0", "kv_cache", "q_out1", "kv_cache_rope"
    reference = staticmethod(mla_preprocess)

    @property
    def name(self) -> str:
        """As ``npu_mla_preprocess per_token_quant_symm krope_ctkv bfloat16``."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {self.quant_mode} {self.cache_mode} {kind}"

    @property
    def operator(self) -> Callable[..., Any]:
        return torch.ops.atb.npu_mla_preprocess.out

    def call(self) -> Arguments:
        return sample_preprocess(
            cache_mode=self.cache_mode,
            quant_mode=self.quant_mode,
            dtype=self.dtype,
            dims=dict(LEGAL, N=self.heads),
        )

    def outs(self, placed: Arguments) -> Arguments:
        """Room for the queries; the caches themselves as the other two results."""
        heads, _, latent = placed["wuk"].shape
        tokens, rope = placed["cos"].shape
        x, kv_cache = placed["input"], placed["kv_cache"]
        query_dtype = torch.int8 if kv_cache.dtype == torch.int8 else x.dtype
        given = (
            x.new_empty(tokens, heads, latent, dtype=query_dtype),
            kv_cache,
            x.new_empty(tokens, heads, rope),
            placed["kv_cache_rope"],
        )
        return dict(zip(preprocess.RESULTS, given, strict=True))


def preprocess_scenarios(soc: str, heads: int = 2) -> Iterator[PreprocessScenario]:
    """Every cache mode that torch offers with every quantisation mode, in both activation
    dtypes.
    """
    if soc not in preprocess.SOCS:
        return
    for quant_mode in preprocess.QUANT_MODES:
        for cache_mode in (
            mode for mode, form in preprocess.CACHE_FORMS.items() if form.kr is not None
        ):
            for dtype in (torch.bfloat16, torch.float16):
                # the kernel knows bfloat16 there
                if (quant_mode, dtype) != ("per_token_quant_symm", torch.float16):
                    yield PreprocessScenario(cache_mode, quant_mode, dtype, heads)


# -- npu_kv_rmsnorm_rope_cache_v2

_C, _R, _TOKENS, _POOL = 512, 64, 8, (4, 32)  # sizes of the key's operator


@dataclass(frozen=True)
class KeyScenario(Call):
    """One call: 8 tokens, as one sequence on scattered slots, or in mode "Norm" as two, on rows of
    their own caches.
    """

    cache_mode: str
    dtype: torch.dtype
    int8: bool = False
    op, caches, nz = key_operator.V2.name, ("k_cache", "ckv_cache"), ()

    @property
    def results(self) -> tuple[str, ...]:
        return ("k_embed", "y") if self.cache_mode != "Norm" else ()

    @property
    def name(self) -> str:
        """As ``npu_kv_rmsnorm_rope_cache_v2 PA_BNSD bfloat16 int8``."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {self.cache_mode} {kind}" + (" int8" if self.int8 else "")

    def call(self) -> Arguments:
        make = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make, dtype=torch.float32).to(self.dtype)

        paged = self.cache_mode != "Norm"
        lead = (1, 1, _TOKENS) if paged else (2, 1, _TOKENS // 2)
        pool = (*_POOL, 1) if paged else (2, 1, 16)
        slots = torch.randperm(_POOL[0] * _POOL[1], generator=make)[:_TOKENS]
        index = (
            slots
            if paged
            else torch.stack([torch.randperm(16, generator=make)[: lead[2]] for _ in range(2)])
        )
        given: Arguments = {
            "kv": noise(*lead, _C + _R),
            "gamma": 1 + noise(_C) / 8,
            "cos": noise(*lead, _R),
            "sin": noise(*lead, _R),
            "index": index,
        }
        for name, width, scale in zip(self.caches, (_R, _C), key_operator.SCALES, strict=True):
            given[name] = noise(*pool, width)
            if self.int8:
                given[name] = (20 * given[name]).to(torch.int8)
                given[scale] = 20 + 10 * torch.rand(width, generator=make, dtype=torch.float32)
        return given | {"cache_mode": self.cache_mode, "is_output_kv": paged, "epsilon": 1e-6}


def key_scenarios(soc: str) -> Iterator[KeyScenario]:
    """The modes that the pass emits, and the NZ layout, in both dtypes, and as int8 where the SoC
    has it.
    """
    for mode in ("PA_BNSD", "PA_NZ", "Norm"):
        for dtype in (torch.bfloat16, torch.float16):
            yield KeyScenario(mode, dtype)
        if mode != "Norm" or soc == "A5":
            yield KeyScenario(mode, torch.bfloat16, int8=True)
