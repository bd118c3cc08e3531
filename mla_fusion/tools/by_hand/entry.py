"""``mf.audit``: does a hand-written call equal the model, and if not, why?"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mla_fusion.commit.interpreter import widened
from mla_fusion.compat import tree_map_only
from mla_fusion.tools.by_hand import exact, memory, wiring
from mla_fusion.tools.by_hand.calls import AsModule, Call, Repair, Target, Watch, callers_line
from mla_fusion.tools.by_hand.draws import draws_of
from mla_fusion.tools.by_hand.memory import Inputs
from mla_fusion.tools.by_hand.outcome import Audit, Errors, Finding
from mla_fusion.tools.by_hand.repairs import parameters_of
from mla_fusion.tools.by_hand.search import Subject, options_of, search
from mla_fusion.tools.by_hand.values import Values, errors, values_of, worst

_ROUNDING = 2e-2  # two bfloat16 evaluations of one prologue, as Config.verify has it
_ROUNDING_INT8 = 6e-2
_NOISE = 4.0  # times the reference's own distance from float64
_PER_TILE = 3  # of kv_cache_quant_mode
# a reference further off than this computes something else in float64, and tells nothing
_MOST_NOISE = 0.2


def audit(
    fused: Callable[..., Any] | ExportedProgram,
    reference: Callable[..., Any] | ExportedProgram | None = None,
    *inputs: Any,
    soc: str = "A3",
    cann: str = "latest",
    path: str = "eager",
    tolerance: float | None = None,
    tries: int = 4000,
    seconds: float = 45.0,
) -> Audit:
    """Check what ``fused`` calls by hand: ``npu_mla_prolog*``, ``npu_kv_rmsnorm_rope_cache*``,
    ``npu_mla_preprocess``.

    fused            a module, a method of one, a function, an FX graph or an exported program
    reference        the unfused model, in any of these forms, over the same weights; None: the
                     contract and the arguments' values alone are looked at
    inputs           what both are called with, copied before each run
    soc, cann, path  whose limits hold, as in `mla_fusion.meta.check`
    tolerance        the relative error that counts as rounding; by default 2e-2 (6e-2 with int8),
                     or four times what the reference itself is off from a float64 run of it, value
                     by value
    tries            the most runs of the repaired function, reached only where nothing explains a
                     difference
    seconds          the longest search, reached only then

    What either writes is compared too: arguments, also in lists and dicts, buffers, and tensors
    that modules hold as attributes.

    Where results differ, the mistakes that are usual in such calls are undone one by one, two and
    three together, and those that make the results equal are named with the caller's line.
    Everything runs on the CPU, on the reference kernels.

    Where ``fused`` calls none of the operators, both functions are run in exact arithmetic instead:
    they are proved equal over the real numbers (rounding left out), or shown to differ
    (``witness``: inputs that show it), or not decided (``equal`` is None), with the steps at which
    the two part. Raises ValueError where there is no reference.
    """
    fused, reference = _callable(fused), None if reference is None else _callable(reference)
    names = memory.paired(fused, reference)
    watch = _watched(fused, inputs, names)
    calls, places = watch.calls, memory.places(watch.held) | memory.places(watch.bound)
    if not calls and reference is not None:
        return exact.compare(fused, reference, inputs)
    if not calls:
        raise ValueError(
            "the function calls none of npu_mla_prolog*, npu_kv_rmsnorm_rope_cache*, "
            "npu_mla_preprocess, and there is"
            " no reference to compare it with"
        )
    limits = {"soc": soc, "cann": cann, "path": path}
    seen = [finding for call in calls for finding in wiring.findings(call, **limits)]
    if watch.refused and not any(item.code.startswith("contract:") for item in seen):
        seen.append(calls[-1].finding("call.fails", str(watch.refused)))
    operators = tuple(call.short for call in calls)
    if reference is None:
        return Audit(operators, tuple(seen))
    seen += _not_compared(calls, places)
    draws = draws_of(calls, inputs, reference)
    wanted = []
    for draw in draws:
        with draw.of_reference():
            wanted.append(values_of(reference, draw.inputs, Watch()))
    rounding = _rounding(reference, inputs, calls, wanted[0], tolerance)
    until, tiles = perf_counter() + seconds, _tiles(calls, places)
    subject = Subject(fused, draws, wanted, rounding, calls, places, names, tiles, tries, until)
    before = subject.errors(())
    kept, said = {name: rounding[name] for name in before}, tuple(draw.name for draw in draws)
    is_right = not subject.wrong(before)
    chosen: list[Repair] = []
    after = None
    if not is_right:
        held = parameters_of(fused, reference), _epsilons(fused, reference)
        chosen, after = search(subject, options_of(calls, *held))
    mended = [_mended(subject, chosen[:count]) for count in range(1, len(chosen) + 1)]
    seen += _other_epsilons(calls, reference, [item.argument for item in mended])
    copies = [item.argument for item in mended if item.code == "cache.other"]
    seen = [item for item in seen if item.code != "cache.elsewhere" or item.argument not in copies]
    tried = 0 if is_right else subject.runs
    return Audit(operators, (*mended, *seen), is_right, before, after, kept, said, tried)


def _callable(target: Any) -> Target:
    if isinstance(target, ExportedProgram):
        return target.module()
    if not callable(target):
        raise TypeError(
            "expected a module, a function, a graph or an exported program, got "
            f"{type(target).__name__}"
        )
    is_method = isinstance(getattr(target, "__self__", None), nn.Module)
    return AsModule(target) if is_method else target


def _watched(fused: Target, inputs: Inputs, names: dict[str, str]) -> Watch:
    """The calls of one run, what that could write, and what ended it early."""
    watch = Watch(line=callers_line)
    try:
        values_of(fused, inputs, watch, names)
    except Exception:
        if watch.refused is None:  # a call that the operator refuses is a finding
            raise
    return watch


def _tiles(calls: Sequence[Call], places: dict[int, str]) -> dict[str, tuple[int, int]]:
    """The caches whose rows are int8 tiles, their scales and a bfloat16 key: Hckv and the tile's
    size.
    """
    found = {}
    for call in calls:
        cache, given = call.tensor(call.roles.kv_cache), call.arguments
        if cache is not None and given.get("kv_cache_quant_mode") == _PER_TILE:
            hckv = given["rmsnorm_gamma_ckv"].shape[-1]
            found[places.get(memory.place(cache), "")] = hckv, given["tile_size"]
    return found


def _not_compared(calls: Sequence[Call], places: dict[int, str]) -> Iterator[Finding]:
    """Caches that are nobody's: what is written there is lost, or seen by nobody here."""
    for call in calls:
        for name, cache, _ in call.caches():
            if memory.place(cache) not in places:
                said = (
                    f"{name} is memory of no argument and no module (a copy?): what is written "
                    "there is not compared"
                )
                yield call.finding("cache.elsewhere", said, name, certain=False)


def _other_epsilons(
    calls: Sequence[Call], reference: object, named: Sequence[str]
) -> Iterator[Finding]:
    """Epsilons that the reference's modules do not hold; results need not show them."""
    held = _epsilons(reference)
    theirs = " and ".join(f"{other:g}" for other in held)
    for call in calls if held else ():
        for name in call.roles.epsilons:
            value = call.arguments[name]
            is_held = any(math.isclose(value, other, rel_tol=1e-6) for other in held)
            if name not in named and not is_held:
                said = f"{name} is {value:g}; the reference's modules hold {theirs}"
                yield call.finding("epsilon.differs", said, name, certain=False)


def _rounding(
    reference: Target,
    inputs: Inputs,
    calls: Sequence[Call],
    wanted: Values,
    tolerance: float | None,
) -> Errors:
    """Of each value, what is rounding."""
    held = [value for call in calls for value in call.arguments.values()]
    int8 = any(isinstance(value, Tensor) and value.dtype == torch.int8 for value in held)
    usual = tolerance if tolerance is not None else _ROUNDING_INT8 if int8 else _ROUNDING
    limits: Errors = defaultdict(lambda: usual)
    if tolerance is not None or not isinstance(reference, nn.Module):
        return limits
    try:
        wide = copy.deepcopy(reference).double()
        given = tree_map_only(Tensor, widened, list(inputs))
        noise = errors(values_of(wide, given, Watch()), wanted)
    except Exception:  # a model that runs in its own dtypes alone
        return limits
    return limits | {
        name: _NOISE * error
        for name, error in noise.items()
        if usual < _NOISE * error < _MOST_NOISE
    }


def _epsilons(*models: object) -> list[float]:
    """What the models' modules hold under a name with "eps" in it."""
    found = {
        value: name
        for model in models
        if isinstance(model, nn.Module)
        for module in model.modules()
        for name, value in vars(module).items()
        if "eps" in name and isinstance(value, float)
    }
    return list(found)


def _mended(subject: Subject, chosen: Sequence[Repair]) -> Finding:
    """The last of these repairs, with the largest error that they leave."""
    repair, left = chosen[-1], worst(subject.errors(chosen))
    found = subject.calls[repair.place or 0].finding(repair.code, repair.text, repair.argument)
    return replace(found, call=repair.place, error=left)
