"""Estimates what a fusion saves for a call: launches of kernels, and bytes that are not moved.

``record.py`` asks this for the report, and leaves staged plans that save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any

import torch

from mla_fusion.fx.sizes import has_symbols
from mla_fusion.machine import Machine
from mla_fusion.meta import CallExplanation, ContractError, explain_call
from mla_fusion.observe.outline import outline
from mla_fusion.plan.plan import Plan
from mla_fusion.report.staging import Leftover

# No figure for a launch is published. A small fused vector kernel that moves hardly any bytes
# is one launch and little more: it took this time in vllm-ascend's pull request 10730.
LAUNCH = 3.5e-6
# One die of a 910C (Serving LLMs on CloudMatrix384, arXiv 2506.12708). The figures of A2 are not
# published, and those of A5 differ by chip: without a figure only launches count.
BYTES_PER_SECOND = {"A3": 1.6e12}


def seconds_saved(plan: Plan, leaves: Sequence[Leftover], machine: Machine) -> float | None:
    """Returns the estimated seconds that a call saves, or None if the call cannot be explained.

    leaves  what a staged plan leaves in the graph; it runs unfused too
    """
    tokens = 1 if has_symbols([plan.tokens]) else plan.proposal.x.shape[0]
    axes = plan.dims | {"N": plan.dims.get("N_padded", plan.dims["N"])}
    call = _explain_call(machine, tokens, *plan.modes, **axes)
    if call is None:
        return None
    launches = call.unfused.kernels - call.fused.kernels
    bytes_saved = call.unfused.bytes - call.fused.bytes
    if leaves:
        launches -= 2  # the cache writes of an unfused call stay
        bytes_saved -= call.unfused.cache_bytes
    for item in leaves:
        if item.what != "cache writes":
            launches -= item.launches
            bytes_saved -= tokens * item.bytes_per_token
    if plan.proposal.identity_reason is not None:  # only the kernel multiplies by W_uk
        launches -= 1
        row_size = axes["D"] + axes["Hckv"]
        bytes_saved -= 2 * axes["N"] * (axes["D"] * axes["Hckv"] + tokens * row_size)
    return launches * LAUNCH + bytes_saved / BYTES_PER_SECOND.get(machine.soc, inf)


@cache
def _explain_call(
    machine: Machine, tokens: int, weights: int, caches: int, **axes: Any
) -> CallExplanation | None:
    """Returns what the call costs, fused and unfused, or None if it is not legal."""
    try:
        sizes = axes | {"Nkv": 1, "BlockNum": tokens, "BlockSize": 16}
        tensors, modes = outline(weights, caches, (tokens,), sizes)
        slots = torch.empty(tokens, dtype=torch.int64, device="meta")
        operands = {**tensors, **modes, "cache_index": slots}
        name = "npu_mla_prolog_v3_functional"
        return explain_call(name, soc=machine.soc, cann=machine.cann, path="graph", **operands)
    except ContractError:
        return None
