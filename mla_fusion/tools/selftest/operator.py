"""One scenario: the operator on the device against the reference, called by itself or inside a
compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta, reference
from mla_fusion.compile.backend import backend
from mla_fusion.meta.prolog import CACHES, PROLOGS
from mla_fusion.paging import layout
from mla_fusion.reference import cache
from mla_fusion.tools.selftest.compare import Comparison, compare, parts, same_bits
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.result import Result
from mla_fusion.tools.selftest.scenarios import Scenario


def run(scenario: Scenario, device: Device, *, through: str = "eager", repeats: int = 3) -> Result:
    """Call the operator (``through`` "eager" or "graph") and the reference on equal arguments, and
    compare every output, both caches, the cache rows that belong to nobody, and which memory was
    written.

    What the call raises becomes the result's problem: a refusal by the device is a finding.
    """
    call = scenario.call()
    result = Result(scenario.name, through)
    try:
        meta.check(scenario.op, soc=device.soc, cann=device.cann, path=through, values=True, **call)
        placed = device.place_all(call)
        before = {name: placed[name].data_ptr() for name in CACHES}
        operator = _operator(scenario.op, placed, through)
        found = _by_name(scenario.op, operator(placed))
        # timing writes them again
        after = {name: placed[name].to("cpu", copy=True) for name in CACHES}
        moved = [name for name in CACHES if placed[name].data_ptr() != before[name]]
        result.milliseconds = device.milliseconds(lambda: operator(placed), repeats)
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    wanted_call = {name: v.clone() if isinstance(v, Tensor) else v for name, v in call.items()}
    wanted = _by_name(scenario.op, getattr(reference, scenario.op)(**wanted_call))
    result.comparisons = _outputs(scenario, found, wanted)
    result.problems += [f"{name} is another tensor after the call" for name in moved]
    if scenario.op.endswith("_functional"):
        changed = [name for name in CACHES if not same_bits(after[name], call[name])]
        result.problems += [
            f"the functional operator has written its argument {name}" for name in changed
        ]
        after = {name: found[name] for name in CACHES}
    for name in CACHES:
        expected = wanted.get(name, wanted_call[name])
        if expected.numel():
            covered = _covered(scenario, call, name)
            result.comparisons += _cache(scenario, name, after[name], expected, covered)
            result.others_untouched &= _same_outside(covered, after[name], call[name])
    return result


def _operator(op: str, placed: dict[str, Any], through: str) -> Callable[[dict[str, Any]], Any]:
    """The operator as a function of its arguments by name; in a graph they are the graph's
    inputs.
    """
    overload = getattr(torch.ops.npu, op)
    if through == "eager":
        return lambda arguments: overload(**arguments)
    names = [name for name, value in placed.items() if isinstance(value, Tensor)]
    attributes = {name: value for name, value in placed.items() if name not in names}

    def step(*tensors: Tensor) -> Any:
        return overload(**dict(zip(names, tensors, strict=True)), **attributes)

    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend(), fullgraph=True, dynamic=False)
    return lambda arguments: compiled(*(arguments[name] for name in names))


def _by_name(op: str, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in zip(PROLOGS[op].results, results, strict=True)}


def _outputs(
    scenario: Scenario, found: dict[str, Tensor], wanted: dict[str, Tensor]
) -> list[Comparison]:
    """The results that are no caches. An absent one is ``[0]`` or ``[1]``, by release, and its
    value is nobody's.
    """
    comparisons = []
    for name, value in wanted.items():
        if name in CACHES:
            continue
        if value.numel() <= 1 and found[name].numel() <= 1:
            continue
        comparisons.append(compare(name, found[name], value))
    return comparisons


def _covered(scenario: Scenario, call: dict[str, Any], name: str) -> Tensor:
    """Which elements of a cache the tokens' rows cover, as booleans, addressed as the cache mode
    addresses them.
    """
    ones, lead = torch.zeros_like(call[name]), call["token_x"].shape[:-1]
    rows = torch.ones(lead.numel(), ones.shape[-1], dtype=torch.float32).to(ones.dtype)
    cache.write(
        ones,
        rows,
        scenario.cache_mode,
        lead,
        call.get("cache_index"),
        call.get("actual_seq_len"),
        name,
    )
    return ones.view(torch.uint8).unflatten(-1, (-1, ones.element_size())).amax(-1) != 0


def _cache(
    scenario: Scenario, name: str, found: Tensor, wanted: Tensor, covered: Tensor
) -> list[Comparison]:
    """The written rows; a packed row as latent, rope part and scales."""
    tensors = [found, wanted, covered.to(wanted.dtype)]
    if scenario.cache_mode.endswith("NZ"):
        tensors = [layout.nz_to_nd(tensor) for tensor in tensors]
    found, wanted, covered = (tensor.flatten(0, -2) for tensor in tensors)
    chosen = covered[:, 0] != 0
    per_tile = scenario.kv_cache_quant_mode == 3
    tile = meta.spec.TILE_SIZE
    pieces = [
        parts(name, rows[chosen], per_tile=per_tile, dims=scenario.dims, tile=tile)
        for rows in (found, wanted)
    ]
    return [compare(piece, pieces[0][piece], pieces[1][piece]) for piece in pieces[1]]


def _same_outside(covered: Tensor, after: Tensor, before: Tensor) -> bool:
    """Whether every other element has the bits it had."""
    return same_bits(after[~covered], before[~covered])
