"""`explain_call`: what a call is, which kernel it selects, and what it costs at least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mla_fusion.meta import roofline
from mla_fusion.meta.check import checked
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.infer import infer
from mla_fusion.meta.prolog import CACHES, PROLOGS
from mla_fusion.meta.roofline import Chip, Cost
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
    weight_quant_mode: int
    kv_cache_quant_mode: int
    cache_mode: str
    scenario: str
    dims: Mapping[str, int]
    tiling_key: TilingKey
    empty_tensor_mode: int
    fused: Cost
    unfused: Cost
    chip: Chip | None

    def __str__(self) -> str:
        modes = (
            f"weight_quant_mode {self.weight_quant_mode}, kv_cache_quant_mode "
            f"{self.kv_cache_quant_mode}"
        )
        lines = [
            f"{self.op} on {self.soc}, CANN {self.cann}",
            f"  scenario   {self.scenario} ({modes}), cache {self.cache_mode}",
            "  sizes      " + ", ".join(f"{axis} {size}" for axis, size in self.dims.items()),
            f"  tiling key {self.tiling_key.value:#x}",
        ]
        for field in self.tiling_key.fields:
            bits = f"{field.low}-{field.high}" if field.low != field.high else str(field.low)
            lines.append(f"    {bits:>5}  {field.name} = {field.value}: {field.meaning}")
        where = "" if self.chip is None else f" on {self.chip.name} ({self.chip.source})"
        lines.append(f"  at least{where}, matmuls and memory only")
        lines += [_cost_line("fused", self.fused), _cost_line("unfused", self.unfused)]
        added = (
            f"{cost.kernels * roofline.LAUNCH * 1e6:.1f}" for cost in (self.fused, self.unfused)
        )
        each = f"{roofline.LAUNCH * 1e6:.1f} us a kernel, {roofline.LAUNCH_SOURCE}"
        lines.append(
            "  launches are not in it; an estimate of what they add: "
            f"{' and '.join(added)} us ({each})"
        )
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
    device = roofline.chip_named(chip)
    call = checked(op, soc, cann, arguments, path)
    dims = call.dims
    for axis, size in dims.items():
        if type(size) is not int:
            expected = "concrete sizes: a cost is a number"
            raise ContractError("explain.symbolic", axis, expected, str(size), dims, op=op)
    full = call.full
    sizes = roofline.Sizes(full, dims, call.wq, call.kv)
    made = zip(PROLOGS[op].results, infer(op, cann=cann, path=path, **arguments), strict=True)
    fresh = [result for name, result in made if name not in CACHES]
    results = sum(prod(shape) * dtype.itemsize for shape, dtype in fresh if len(shape) > 1)
    return CallExplanation(
        op,
        soc,
        cann,
        call.wq,
        call.kv,
        full["cache_mode"],
        f"weights: {WEIGHT_MODES[call.wq].title}; cache: {CACHE_QUANTS[call.kv].title}",
        dict(dims),
        tiling_key(
            cann, call.wq, call.kv, full["cache_mode"], dims, full.get("actual_seq_len") is not None
        ),
        empty_tensor_mode(dims["tokens"], dims.get("BlockNum")),
        roofline.fused_cost(sizes, results, device),
        roofline.unfused_cost(sizes, device),
        device,
    )


def _cost_line(name: str, cost: Cost) -> str:
    seconds = "" if cost.seconds is None else f", {cost.seconds * 1e6:.2f} us"
    kernels = f"{cost.kernels} kernel" + ("s" if cost.kernels > 1 else "")
    return (
        f"    {name:8} {kernels}, {cost.flops / 1e9:.3f} GFLOP, {cost.bytes / 1e6:.2f} MB "
        f"(weights {cost.weight_bytes / 1e6:.2f}, activations {cost.activation_bytes / 1e6:.2f}, "
        f"cache {cost.cache_bytes / 1e6:.3f}), {cost.intensity:.1f} FLOP/byte{seconds}"
    )
