"""What a fusion saves a call, estimated: kernels that need no launch, bytes that need not move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any

import torch

from mla_fusion.machine import Machine
from mla_fusion.meta import CallExplanation, ContractError, explain_call
from mla_fusion.observe.outline import outline
from mla_fusion.report.staging import Leftover

# No figure for a launch is published. A small fused vector kernel whose bytes take next to nothing
# is one launch and little more: it took this in all in vllm-ascend's pull request 10730.
LAUNCH = 3.5e-6
# One die of a 910C (Serving LLMs on CloudMatrix384, arXiv 2506.12708). Those of A2 are not
# published, those of A5 differ by chip: without one only launches count.
BYTES_PER_SECOND = {"A3": 1.6e12}


def seconds(
    tokens: int,
    axes: dict[str, Any],
    modes: tuple[int, int],
    leaves: Sequence[Leftover],
    machine: Machine,
    is_identity: bool = False,
) -> float | None:
    """Saved by a call. ``modes``: of weights and caches. ``is_identity``: the product with W_uk is
    the kernel's alone.

    What a staged plan leaves of the model's own cache writes runs unfused too.
    """
    call = _explained(machine, tokens, *modes, **axes)
    if call is None:
        return None
    launches = call.unfused.kernels - call.fused.kernels
    moved = call.unfused.bytes - call.fused.bytes
    if leaves:
        launches -= 2  # of the cache writes in an unfused call
        moved -= call.unfused.cache_bytes
    for item in leaves:
        if item.what != "cache writes":
            launches -= item.launches
            moved -= tokens * item.bytes_per_token
    if is_identity:
        launches -= 1
        row = axes["D"] + axes["Hckv"]
        moved -= 2 * axes["N"] * (axes["D"] * axes["Hckv"] + tokens * row)
    return launches * LAUNCH + moved / BYTES_PER_SECOND.get(machine.soc, inf)


@cache
def _explained(
    machine: Machine, tokens: int, weights: int, caches: int, **axes: Any
) -> CallExplanation | None:
    try:
        sizes = axes | {"Nkv": 1, "BlockNum": tokens, "BlockSize": 16}
        tensors, modes = outline(weights, caches, (tokens,), sizes)
        slots = torch.empty(tokens, dtype=torch.int64, device="meta")
        given = {**tensors, **modes, "cache_index": slots}
        name = "npu_mla_prolog_v3_functional"
        return explain_call(name, soc=machine.soc, cann=machine.cann, path="graph", **given)
    except ContractError:
        return None
