"""`explain_call`: what a call is, which kernel it selects, and what it costs at least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mla_fusion.meta.check import checked
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.infer import infer
from mla_fusion.meta.prolog import CACHES, PROLOGS
from mla_fusion.meta.roofline import CHIPS, LAUNCH, LAUNCH_SOURCE, Chip, Cost, Sizes, costs
from mla_fusion.meta.spec import CACHE_QUANTS, WEIGHT_MODES
from mla_fusion.meta.tiling_key import TilingKey, empty_tensor_mode, tiling_key


@dataclass(frozen=True)
class CallExplanation:
    """A legal call in words and numbers; ``str()`` of it is a report.

    ``dims`` are the axes of `mla_fusion.meta.spec`; ``fused`` is the operator, ``unfused`` the
    sequence of kernels that computes the same; their ``seconds`` are lower bounds on ``chip``, None
    without one.
    """

    op: str
    soc: str
    cann: str
    scenario: str
    dims: Mapping[str, int]
    tiling_key: TilingKey
    empty_tensor_mode: int
    fused: Cost
    unfused: Cost
    chip: Chip | None

    def __str__(self) -> str:
        fields = (
            f"    {field.low:>2}-{field.high:<2} {field.name} = {field.value}: {field.meaning}"
            for field in self.tiling_key.fields
        )
        where = "" if self.chip is None else f" on {self.chip.name} ({self.chip.source})"
        lines = [
            f"{self.op} on {self.soc}, CANN {self.cann}",
            f"  scenario   {self.scenario}",
            "  sizes      " + ", ".join(f"{axis} {size}" for axis, size in self.dims.items()),
            f"  tiling key {self.tiling_key.value:#x}",
            *fields,
            f"  at least{where}, matmuls and memory only",
            f"    fused    {self.fused}",
            f"    unfused  {self.unfused}",
            f"  a launch is an estimate: {LAUNCH * 1e6:.1f} us, {LAUNCH_SOURCE}",
        ]
        return "\n".join(lines)


def explain_call(
    op: str,
    *,
    soc: str = "A3",
    cann: str = "latest",
    path: str = "eager",
    chip: str | Chip | None = None,
    **arguments: Any,
) -> CallExplanation:
    """Explain one call: scenario, sizes, the tiling key that ``cann`` selects with its fields, and
    roofline.

    op, soc, cann, path, arguments  as `mla_fusion.meta.check` takes them, of concrete sizes; it
                refuses an illegal call first
    chip        a name in `mla_fusion.meta.CHIPS` or a `Chip` with numbers of your own; without it
                no times are given

    Raises ContractError: those of `check`, ``chip``, and ``explain.symbolic``.
    """
    if isinstance(chip, str) and chip not in CHIPS:
        expected = f"one of {', '.join(CHIPS)}, or a Chip(...) with numbers of your own"
        raise ContractError("chip", "chip", expected, repr(chip))
    device = CHIPS[chip] if isinstance(chip, str) else chip
    call = checked(op, soc, cann, arguments, path)
    dims, full = call.dims, call.full
    for axis, size in dims.items():
        if type(size) is not int:
            expected = "concrete sizes: a cost is a number"
            raise ContractError("explain.symbolic", axis, expected, str(size), dims, op=op)
    made = zip(PROLOGS[op].results, infer(op, cann=cann, path=path, **arguments), strict=True)
    fresh = (result for name, result in made if name not in CACHES)
    results = sum(prod(shape) * dtype.itemsize for shape, dtype in fresh if len(shape) > 1)
    modes, mode = (call.wq, call.kv), full["cache_mode"]
    of_lengths = full.get("actual_seq_len") is not None
    return CallExplanation(
        op,
        soc,
        cann,
        f"weights: {WEIGHT_MODES[call.wq].title}; cache: {CACHE_QUANTS[call.kv].title} "
        f"(weight_quant_mode {call.wq}, kv_cache_quant_mode {call.kv}), {mode}",
        dict(dims),
        tiling_key(cann, *modes, mode, dims, of_lengths),
        empty_tensor_mode(dims["tokens"], dims.get("BlockNum")),
        *costs(Sizes(full, dims, *modes), results, device),
        device,
    )
