"""What a fusion saves a call, estimated: kernels that need no launch, bytes that need not move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from mla_fusion.fx.sizes import has_symbols
from mla_fusion.machine import Machine
from mla_fusion.meta import ContractError, explain_call
from mla_fusion.meta.explain import CallExplanation
from mla_fusion.meta.roofline import LAUNCH
from mla_fusion.plan.plan import Plan, PrologPlan
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
        return f"up to {max(self.seconds, 0) * 1e6:.0f} us less a call"


def estimated(plan: Plan, leaves: Sequence[Leftover], machine: Machine) -> Gain | None:
    """For the plan's tokens, for one where their number is symbolic. None for a call whose cost is
    not known.

    What a staged plan leaves of the model's own cache writes runs unfused too.
    """
    if not isinstance(plan, PrologPlan) or plan.target == "preprocess":
        return None
    tokens = 1 if has_symbols(plan.lead) else prod(plan.lead)
    axes = {axis: int(plan.dims[axis]) for axis in _AXES} | {"N": plan.heads_of_call}
    modes = plan.candidate.weight_quant_mode, plan.kv_cache_quant_mode
    call = _explained(machine, tokens, *modes, **axes)
    if call is None:
        return None
    unfused, chip = call.unfused, call.chip
    before, whole = unfused.kernels, unfused.bytes
    after, moved = call.fused.kernels, call.fused.bytes
    for item in leaves:
        after += item.launches
        moved += tokens * item.bytes_per_token
        if item.what == "cache writes":
            before += item.launches
            whole += tokens * item.bytes_per_token
    if leaves:
        before -= _WRITES
        whole -= unfused.cache_bytes
    if plan.target == "identity":  # the product with W_uk is the kernel's alone
        before -= 1
        row = axes["D"] + axes["Hckv"]
        whole -= 2 * axes["N"] * (axes["D"] * axes["Hckv"] + tokens * row)
    saved = (whole - moved) / chip.bytes_per_second if chip is not None else 0.0
    return Gain(before, after, (before - after) * LAUNCH + saved)


@cache
def _explained(
    machine: Machine, tokens: int, weights: int, caches: int, **axes: int
) -> CallExplanation | None:
    blocks = {"Nkv": 1, "BlockNum": -(-tokens // _BLOCK), "BlockSize": _BLOCK}
    modes: dict[str, Any] = {"weight_quant_mode": weights, "kv_cache_quant_mode": caches}
    try:
        given = sample_call(**modes, lead=(tokens,), dims=axes | blocks, device="meta")
        name, chip = "npu_mla_prolog_v3_functional", _CHIPS.get(machine.soc)
        return explain_call(
            name, soc=machine.soc, cann=machine.cann, path="graph", chip=chip, **given
        )
    except ContractError:
        return None
