"""What a fused prologue costs at least, fused and unfused, from the figures in a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from mla_fusion.machine import Machine
from mla_fusion.meta import ContractError, explain_call
from mla_fusion.meta.roofline import LAUNCH, LAUNCH_SOURCE, Chip, Cost
from mla_fusion.reference.sample import sample_call

if TYPE_CHECKING:
    from mla_fusion.report.report import Fusion

# Whose peaks are published; the others are counted in bytes alone.
CHIP_OF_SOC = {"A3": "910C"}
_TOKENS = (1, 16, 64, 256)  # where the graph leaves their number open
_BLOCK = 128


@dataclass(frozen=True)
class Part:
    """A stretch of a bar, in percent of the whole."""

    name: str
    left: float
    width: float
    text: str


def stretches(
    sizes: Mapping[str, float], whole: float, shown: Callable[[float], str]
) -> list[Part]:
    """One behind the other; ``shown`` writes a size."""
    parts, done = [], 0.0
    for name, size in sizes.items():
        left, width = (round(100 * value / whole, 2) for value in (done, size))
        parts.append(Part(name, min(left, 99.6), width, shown(size)))
        done += size
    return parts


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
    try:
        found = {
            count: explain_call(
                "npu_mla_prolog_v3_functional",
                soc=machine.soc,
                cann=machine.cann,
                path="graph",
                chip=CHIP_OF_SOC.get(machine.soc),
                **_call(fusion, count),
            )
            for count in _tokens(str(fusion.dims.get("T", "")))
        }
    except (ContractError, KeyError, TypeError, ValueError):
        return None
    first, fused_name = min(found), "staged" if fusion.leaves else "fused"
    chip = found[first].chip
    costs = {
        count: {"unfused": item.unfused, fused_name: _with_staging(item.fused, fusion, count, chip)}
        for count, item in found.items()
    }
    rows = [
        _row(count, label, cost) for count, pair in costs.items() for label, cost in pair.items()
    ]
    longest = max(cost.bytes for cost in costs[first].values())
    bars = [_bar(label, cost, longest) for label, cost in costs[first].items()]
    timed = (
        f"Lower bounds on {chip.name}: {chip.source}"
        if chip
        else f"No peaks are known for {machine.soc}"
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
        _estimate(first, costs[first], chip),
    )


def _estimate(tokens: int, costs: Mapping[str, Cost], chip: Chip | None) -> str:
    """What the first row's costs say of the gain, in a sentence."""
    unfused, fused = costs.values()
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


def _tokens(text: str) -> tuple[int, ...]:
    sizes = text.split("*")
    return (prod(map(int, sizes)),) if all(size.isdecimal() for size in sizes) else _TOKENS


def _call(fusion: Fusion, tokens: int) -> dict[str, Any]:
    """The call's tensors without their numbers; caches as many blocks as the tokens need."""
    dims = {axis: int(fusion.dims[axis]) for axis in ("He", "Hcq", "Hckv", "D", "Dr")}
    dims |= {"N": int(fusion.dims.get("N_padded", fusion.dims["N"])), "Nkv": 1}
    dims |= {"BlockNum": -(-tokens // _BLOCK), "BlockSize": _BLOCK}
    return sample_call(
        weight_quant_mode=int(fusion.attributes.get("weight_quant_mode", 0)),
        kv_cache_quant_mode=int(fusion.attributes.get("kv_cache_quant_mode", 0)),
        cache_mode=fusion.cache_mode if fusion.cache_mode.startswith("PA") else "TND",
        lead=(tokens,),
        dims=dims,
        device="meta",
    )


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
    sizes: dict[str, float] = {
        "weights": cost.weight_bytes,
        "activations": cost.activation_bytes,
        "cache": cost.cache_bytes,
    }
    parts = stretches(sizes, longest, lambda size: f"{size / 1e6:.2f} MB")
    return Bar(name, parts, f"{cost.bytes / 1e6:.1f} MB")
