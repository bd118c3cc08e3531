"""What a fusion saves a call, estimated: kernels that need no launch, bytes that need not move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from mla_fusion.emit.targets import target_of
from mla_fusion.machine import Machine
from mla_fusion.meta import ContractError, explain_call
from mla_fusion.meta.explain import CallExplanation
from mla_fusion.meta.roofline import LAUNCH
from mla_fusion.plan.plan import Plan
from mla_fusion.reference.sample import sample_call
from mla_fusion.report.staging import Leftover

_CHIPS = {"A3": "910C"}  # whose peaks are published
_BLOCK = 128
_AXES = ("He", "Hcq", "Hckv", "D", "Dr")


class Gain(NamedTuple):
    """Kernels of a call unfused and fused, and the seconds that the fusion saves at most."""

    before: int
    after: int
    seconds: float

    def __str__(self) -> str:
        return f"up to {max(self.seconds, 0) * 1e6:.0f} us less a call"


def estimated(plan: Plan, leaves: Sequence[Leftover], machine: Machine) -> Gain | None:
    """For the plan's tokens, for one where their number is symbolic. None for a call whose cost is
    not known.
    """
    if plan.target not in ("v3", "identity"):
        return None
    dims, given = plan.dims, target_of(plan).attributes(plan)
    sizes = dims["T"].split("*")
    tokens = prod(map(int, sizes)) if all(size.isdecimal() for size in sizes) else 1
    axes = [(axis, int(dims[axis])) for axis in _AXES]
    heads = int(dims.get("N_padded", dims["N"]))
    modes = tuple(int(given.get(f"{one}_quant_mode", 0)) for one in ("weight", "kv_cache"))
    mode = given.get("cache_mode", "")
    call = _explained(tokens, (*axes, ("N", heads)), modes, mode if "PA" in mode else "TND", machine)
    if call is None:
        return None
    after = call.fused.kernels + sum(item.launches for item in leaves)
    moved = call.fused.bytes + tokens * sum(item.bytes_per_token for item in leaves)
    seconds = (call.unfused.kernels - after) * LAUNCH
    if call.chip is not None:
        seconds += (call.unfused.bytes - moved) / call.chip.bytes_per_second
    return Gain(call.unfused.kernels, after, seconds)


@cache
def _explained(
    tokens: int,
    axes: tuple[tuple[str, int], ...],
    modes: tuple[int, ...],
    cache_mode: str,
    machine: Machine,
) -> CallExplanation | None:
    blocks = {"Nkv": 1, "BlockNum": -(-tokens // _BLOCK), "BlockSize": _BLOCK}
    dims: Mapping[str, Any] = {**dict(axes), **blocks}
    try:
        given = sample_call(
            weight_quant_mode=modes[0],
            kv_cache_quant_mode=modes[1],
            cache_mode=cache_mode,
            lead=(tokens,),
            dims=dims,
            device="meta",
        )
        where = {"soc": machine.soc, "cann": machine.cann, "chip": _CHIPS.get(machine.soc)}
        return explain_call("npu_mla_prolog_v3_functional", path="graph", **where, **given)
    except ContractError:
        return None
