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
_WRITES = 2  # kernels of the cache writes in an unfused call
_AXES = ("He", "Hcq", "Hckv", "D", "Dr")


class Gain(NamedTuple):
    """Kernels of a call unfused and fused, and the seconds that the fusion saves at most."""

    before: int
    after: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.before} kernels become {self.after}, up to {max(self.seconds, 0) * 1e6:.0f} us "
            "less a call"
        )


def estimated(plan: Plan, leaves: Sequence[Leftover], machine: Machine) -> Gain | None:
    """For the plan's tokens, for one where their number is symbolic. None for a call whose cost is
    not known.

    What a staged plan leaves of the model's own cache writes runs unfused too.
    """
    if plan.target not in ("v3", "identity"):
        return None
    dims, given = plan.dims, target_of(plan).attributes(plan)
    sizes = dims["T"].split("*")
    tokens = prod(map(int, sizes)) if all(size.isdecimal() for size in sizes) else 1
    axes = {axis: int(dims[axis]) for axis in _AXES} | {"N": int(dims.get("N_padded", dims["N"]))}
    modes = tuple(int(given.get(f"{one}_quant_mode", 0)) for one in ("weight", "kv_cache"))
    mode = given.get("cache_mode", "")
    call = _explained(tokens, (*axes.items(),), modes, mode if "PA" in mode else "TND", machine)
    if call is None:
        return None
    own = [item for item in leaves if item.what == "cache writes"]
    launches, moved = (
        [sum(item.launches for item in some) for some in (own, leaves)],
        [tokens * sum(item.bytes_per_token for item in some) for some in (own, leaves)],
    )
    before, after = call.unfused.kernels, call.fused.kernels + launches[1]
    saved = call.unfused.bytes - call.fused.bytes - moved[1]
    if leaves:
        before += launches[0] - _WRITES
        saved += moved[0] - call.unfused.cache_bytes
    if plan.target == "identity":  # the product is the kernel's alone
        before -= 1
        weight, row = axes["D"] * axes["Hckv"], axes["D"] + axes["Hckv"]
        saved -= 2 * axes["N"] * (weight + tokens * row)
    seconds = (before - after) * LAUNCH
    seconds += saved / call.chip.bytes_per_second if call.chip is not None else 0.0
    return Gain(before, after, seconds)


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
