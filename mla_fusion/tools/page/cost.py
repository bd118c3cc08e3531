"""What a fused prologue costs at least, fused and unfused, from the figures in a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.machine import Machine
from mla_fusion.meta import ContractError, explain_call
from mla_fusion.meta.explain import CallExplanation
from mla_fusion.meta.roofline import LAUNCH, LAUNCH_SOURCE, Chip, Cost
from mla_fusion.meta.spec import ACTIVATION, CACHE_QUANTS, DERIVED, ELEMENT, TILE_SIZE, Dtype
from mla_fusion.plan import cache_modes, weight_modes

if TYPE_CHECKING:
    from mla_fusion.report.report import Fusion

# Whose peaks are published; the others are counted in bytes alone.
CHIP_OF_SOC = {"A3": "910C"}
_TOKENS = (1, 16, 64, 256)  # where the graph leaves their number open
_BLOCK = 128


@dataclass(frozen=True)
class Part:
    """A stretch of a bar, in percent of the longest."""

    name: str
    left: float
    width: float
    text: str


@dataclass(frozen=True)
class Bar:
    name: str
    parts: list[Part]
    text: str


@dataclass(frozen=True)
class Roofline:
    """A table, bars of its first row's bytes, and what both rest on."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    bars: list[Bar]
    note: str
    estimate: str = ""

    @property
    def right(self) -> list[bool]:
        return [False, *(True for _ in self.header[1:])]


def roofline(fusion: Fusion, machine: Machine) -> Roofline | None:
    """For the call's tokens, or a few numbers of them where they are symbolic; None for a call the
    contract refuses.
    """
    counts = _tokens(str(fusion.dims.get("T", "")))
    try:
        found = [_explained(fusion, count, machine) for count in counts]
    except (ContractError, KeyError, TypeError, ValueError):
        return None
    chip, soc = found[0].chip, machine.soc
    name = "staged" if fusion.leaves else "fused"
    costs = [
        (item.unfused, _with_staging(item.fused, fusion, count, chip))
        for count, item in zip(counts, found, strict=True)
    ]
    rows = [
        _row(count, label, cost)
        for count, pair in zip(counts, costs, strict=True)
        for label, cost in zip(("unfused", name), pair, strict=True)
    ]
    longest = max(cost.bytes for cost in costs[0])
    bars = [
        _bar(label, cost, longest) for label, cost in zip(("unfused", name), costs[0], strict=True)
    ]
    timed = (
        f"Lower bounds on {chip.name}: {chip.source}" if chip else f"No peaks are known for {soc}"
    )
    note = (
        f"Each byte and product counted once; unfused is one kernel a step. {timed}, without "
        "launches. What these "
        f"may add is an estimate: {LAUNCH * 1e6:.1f} us a kernel, {LAUNCH_SOURCE}; captured "
        "graphs hide a part of it."
    )
    if fusion.leaves:
        kept = ", ".join(item.what for item in fusion.leaves)
        note += f" Staged is the kernel and what stays beside it: {kept}."
        if any(item.bytes != 0 for item in fusion.leaves):
            note += (
                " Whole caches that a compiler rebuilds are not counted: mla-fusion inspect "
                "counts them."
            )
    return Roofline(
        ("T", "kernels", "GFLOP", "MB moved", "FLOP/byte", "at least", "launches, up to"),
        rows,
        bars,
        note,
        _estimate(counts[0], *costs[0], chip),
    )


def _estimate(tokens: int, unfused: Cost, fused: Cost, chip: Chip | None) -> str:
    """What the first row's costs say of the gain, in a sentence."""
    kernels = f"{unfused.kernels} kernels become {fused.kernels}"
    seconds = (unfused.kernels - fused.kernels) * LAUNCH
    if chip is not None:
        seconds += (unfused.bytes - fused.bytes) / chip.bytes_per_second
    on = f" on {chip.name}" if chip is not None else ""
    gain = f"up to {seconds * 1e6:.0f} us less" if seconds > 0 else "nothing is gained"
    return f"Estimate{on}, {tokens} tokens: {kernels}, {gain} a call."


def _with_staging(cost: Cost, fusion: Fusion, tokens: int, chip: Chip | None) -> Cost:
    """The kernel, and what a staged fusion leaves beside it."""
    moved = tokens * sum(item.bytes_per_token for item in fusion.leaves)
    seconds = cost.seconds
    if seconds is not None and chip is not None:
        seconds += moved / chip.bytes_per_second
    kernels, activations = cost.kernels + fusion.launches_left, cost.activation_bytes + moved
    return replace(cost, kernels=kernels, activation_bytes=activations, seconds=seconds)


def _explained(fusion: Fusion, tokens: int, machine: Machine) -> CallExplanation:
    chip, of = (
        CHIP_OF_SOC.get(machine.soc),
        {"soc": machine.soc, "cann": machine.cann, "path": "graph"},
    )
    return explain_call("npu_mla_prolog_v3_functional", chip=chip, **of, **_call(fusion, tokens))


def _tokens(text: str) -> tuple[int, ...]:
    sizes = text.split("*")
    return (prod(map(int, sizes)),) if all(size.isdecimal() for size in sizes) else _TOKENS


def _call(fusion: Fusion, tokens: int) -> dict[str, Any]:
    """The call's tensors without their numbers; caches as many blocks as the tokens need."""
    dims = fusion.dims
    he, hcq, hckv, nope, rope = (int(dims[name]) for name in ("He", "Hcq", "Hckv", "D", "Dr"))
    heads = int(dims.get("N_padded", dims["N"]))
    quant, kv_quant = (
        int(fusion.attributes.get(name, 0)) for name in ("weight_quant_mode", "kv_cache_quant_mode")
    )

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    element = weight_modes.elements(quant)
    cache = CACHE_QUANTS[kv_quant]
    of_kind = {ACTIVATION: torch.bfloat16, ELEMENT: element["weight_uq_qr"]}
    packed = DERIVED["Dtile"]({"Hckv": hckv, "Dr": rope, "tile": TILE_SIZE})
    paged = fusion.cache_mode.startswith("PA")
    lead = (-(-tokens // _BLOCK), _BLOCK) if paged else (tokens,)
    call: dict[str, Any] = {
        "token_x": empty(tokens, he, dtype=element["token_x"]),
        "weight_dq": empty(he, hcq, dtype=element["weight_dq"]),
        "weight_uq_qr": empty(hcq, heads * (nope + rope), dtype=element["weight_uq_qr"]),
        "weight_uk": empty(heads, nope, hckv),
        "weight_dkv_kr": empty(he, hckv + rope, dtype=element["weight_dkv_kr"]),
        "rmsnorm_gamma_cq": empty(hcq),
        "rmsnorm_gamma_ckv": empty(hckv),
        "rope_sin": empty(tokens, rope),
        "rope_cos": empty(tokens, rope),
        "kv_cache": empty(
            *lead, 1, packed if cache.kr is None else hckv, dtype=_dtype(cache.kv, of_kind)
        ),
        "kr_cache": empty(0)
        if cache.kr is None
        else empty(*lead, 1, rope, dtype=_dtype(cache.kr, of_kind)),
        "cache_mode": fusion.cache_mode if paged else "TND",
        **weight_modes.attributes(quant, kv_quant),
        **cache_modes.attributes(kv_quant),
    }
    sizes = {
        "He": he,
        "Hcq": hcq,
        "Hckv": hckv,
        "N": heads,
        "D": nope,
        "Dr": rope,
        "tokens": tokens,
    }
    for name, (shape, dtype) in weight_modes.scales(quant, sizes).items():
        call[name] = empty(*shape, dtype=dtype)
    for name, shape in cache_modes.scale_shapes(kv_quant, hckv, rope, quant).items():
        call[name] = empty(*shape, dtype=torch.float32)
    return call | ({"cache_index": empty(tokens, dtype=torch.int64)} if paged else {})


def _dtype(kind: Dtype, of_kind: dict[str, torch.dtype]) -> torch.dtype:
    return of_kind[kind] if isinstance(kind, str) else kind


def _row(tokens: int, name: str, cost: Cost) -> tuple[str, ...]:
    seconds = "" if cost.seconds is None else f"{cost.seconds * 1e6:.1f} us"
    return (
        f"{tokens} {name}",
        str(cost.kernels),
        f"{cost.flops / 1e9:.2f}",
        f"{cost.bytes / 1e6:.2f}",
        f"{cost.intensity:.1f}",
        seconds,
        f"{cost.kernels * LAUNCH * 1e6:.0f} us",
    )


def _bar(name: str, cost: Cost, longest: int) -> Bar:
    parts, done = [], 0
    sizes = (
        ("weights", cost.weight_bytes),
        ("activations", cost.activation_bytes),
        ("cache", cost.cache_bytes),
    )
    for part, size in sizes:
        left, width = (round(100 * value / longest, 2) for value in (done, size))
        parts.append(Part(part, min(left, 99.6), width, f"{size / 1e6:.2f} MB"))
        done += size
    return Bar(name, parts, f"{cost.bytes / 1e6:.1f} MB")
