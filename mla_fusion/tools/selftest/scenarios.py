"""The calls of the self-test: every scenario that the specification allows on one SoC at one CANN
release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta import spec
from mla_fusion.meta.limits import VERSIONS
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.paging.tiles import unpack_rows
from mla_fusion.reference.sample import DEEPSEEK_V3, as_operator, sample_call
from mla_fusion.tools.selftest.operator import Call

# everything optional at once: smoothing, the normalised c_q as an output, factors that are not one
_EXTRAS: dict[str, Any] = {"query_norm_flag": True, "qc_qr_scale": 1.25, "kc_scale": 0.75}
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

    def call(self) -> dict[str, Any]:
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
    """Every legal pair of quantisation modes with every cache mode and rank of token_x, for all
    four operators.

    ``he`` is the hidden size, by default the smallest that the release takes; small pools, 8
    tokens. Raises ContractError ``soc`` or ``cann`` for a name that is not in the tables.
    """
    return [item for op in VERSIONS for item in _of_operator(op, soc, cann, he, heads)]


def _of_operator(op: str, soc: str, cann: str, he: int | None, heads: int) -> Iterator[Scenario]:
    limits = meta.limits(op, soc, cann)
    if not limits.cache_modes:  # the operator is not there on this SoC
        return
    dims = dict(DEEPSEEK_V3, BlockNum=8, N=heads, He=he or min(limits.dims["He"].listed))
    leads = ((8,), (4, 2) if 2 in limits.dims["S"] else (8, 1))
    for weight, cache in sorted(limits.quant_modes):
        legal = spec.CACHE_QUANTS[cache].cache_modes
        for mode in (mode for mode in limits.cache_modes if mode in legal):
            taken = [lead for lead in leads if len(lead) + 1 in spec.CACHE_MODES[mode].index]
            for lead in taken if op != "npu_mla_prolog_v3_functional" else taken[:1]:
                yield Scenario(op, weight, cache, mode, lead, dims, cann=cann)
        if op not in _OLDER and "PA_BSND" in limits.cache_modes:
            yield Scenario(op, weight, cache, "PA_BSND", leads[0], dims, True, cann)
