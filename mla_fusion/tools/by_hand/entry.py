"""``mf.audit``: does a hand-written call equal the model, and if not, where do they part, and which
usual slip explains it?
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch.export import ExportedProgram

from mla_fusion._gone import without_gone_options
from mla_fusion.meta import check, preprocess
from mla_fusion.tools.by_hand import exact, memory
from mla_fusion.tools.by_hand.calls import Arguments, Call, Refused, Watch
from mla_fusion.tools.by_hand.memory import Target, values_of
from mla_fusion.tools.by_hand.outcome import Audit, Finding
from mla_fusion.tools.by_hand.slips import EPSILONS, slips

_ROUNDING = 2e-2  # two bfloat16 evaluations of one prologue, as Config.verify has it
_ROUNDING_INT8 = 6e-2
_PER_TILE = 3  # of kv_cache_quant_mode
# of x, at which latents of usual size are so small that an epsilon of 1e-6 counts
_SMALL = 1e-3
Errors = Mapping[str, float]


@without_gone_options
def audit(
    fused: Callable[..., Any] | ExportedProgram,
    reference: Callable[..., Any] | ExportedProgram | None = None,
    *inputs: Any,
    soc: str = "A3",
    cann: str = "latest",
    path: str = "eager",
    tolerance: float | None = None,
) -> Audit:
    """Check what ``fused`` calls by hand: ``npu_mla_prolog*``, ``npu_kv_rmsnorm_rope_cache*``,
    ``npu_mla_preprocess``.

    fused            a module, a method of one, a function, an FX graph or an exported program
    reference        the unfused model, in any of these forms, over the same weights; None: the
                     contract alone is looked at, and the numbers of slots and lengths
    inputs           what both are called with, copied before each run
    soc, cann, path  whose limits hold, as in `mla_fusion.meta.check`
    tolerance        the relative error that counts as rounding; by default 2e-2 (6e-2 with int8);
                     many layers in a row need more

    A call that the contract refuses ends the audit. Else results are compared on the inputs as
    given, and on a thousandth of x, where an epsilon counts. What either writes is compared too:
    arguments, also in lists and dicts, buffers, and tensors that modules hold as attributes.
    Everything runs on the CPU, on the reference kernels.

    Where results differ, the audit says which output is the first, by how much, and at which call
    the two part (the module's path, the caller's line). Each slip of a short table is undone alone;
    those that mend something are named.

    Where ``fused`` calls none of the operators, both functions are run in exact arithmetic instead:
    they are proved equal over the real numbers (rounding left out), or shown to differ
    (``witness``: inputs that show it), or not decided (``equal`` is None), with the step at which
    the two part. Raises ValueError where there is no reference.
    """
    fused, reference = _callable(fused), None if reference is None else _callable(reference)
    calls: list[Call] = []

    def checked(call: Call) -> Arguments:
        calls.append(call)
        arguments = {
            name: value
            for name, value in call.arguments.items()
            if value is not None and name not in preprocess.RESULTS
        }
        operator = call.operator.removesuffix(".out")
        check(operator, values=True, soc=soc, cann=cann, path=path, **arguments)
        return {}

    try:
        with Watch(checked, memory.modules_of(fused)):
            places = values_of(fused, inputs).places
    except Refused as error:
        return Audit(tuple(call.operator for call in calls), (error.finding,))
    operators = tuple(call.operator for call in calls)
    if reference is None and not calls:
        raise ValueError(
            "the function calls none of npu_mla_prolog*, npu_kv_rmsnorm_rope_cache*, "
            "npu_mla_preprocess, and there is no reference to compare it with"
        )
    if reference is None:
        return Audit(operators, ())
    if not calls:
        return exact.compare(fused, reference, inputs)
    arguments = calls[0].arguments
    x = next(arguments[name] for name in ("token_x", "input", "kv") if name in arguments)
    draws = {
        "the inputs as given": inputs,
        "a thousandth of x": memory.scaled(inputs, _SMALL, x.shape[-1]),
    }
    wanted = [values_of(reference, draw) for draw in draws.values()]
    dtypes = {value.dtype for call in calls for value in memory.tensors_in(call.arguments)}
    limit = tolerance
    if limit is None:
        limit = _ROUNDING_INT8 if torch.int8 in dtypes else _ROUNDING
    # bytes of int8 tiles, their scales and a bfloat16 key: rounding is no small error there
    tiles = {
        call.caches(places)["kv_cache"]
        for call in calls
        if call.arguments.get("kv_cache_quant_mode") == _PER_TILE
    }

    def measured(visit: Callable[[Call], Arguments]) -> dict[str, float]:
        """The largest error of each value over the draws."""
        largest = defaultdict[str, float](float)
        for want, draw in zip(wanted, draws.values(), strict=True):
            with Watch(visit):
                got = values_of(fused, draw)
            for name, error in memory.errors(want, got).items():
                largest[name] = max(largest[name], error)
        return dict(largest)

    def wrong(errors: Errors) -> set[str]:
        return {name for name, error in errors.items() if not error <= limit} - tiles

    before, epsilons = measured(lambda call: {}), _epsilons(reference)
    mended: list[tuple[int, float, Finding]] = []
    if off := wrong(before):
        # at the first call whose cache is wrong, or the last one where none is
        wrong_calls = (one.number for one in calls if off & {*one.caches(places).values()})
        parted = next(wrong_calls, len(calls) - 1)
        for scope in (None, parted, parted - 1) if len(calls) > 1 else (0,):
            for slip in slips(calls[scope or 0], dict.fromkeys((*epsilons, 1e-6))):

                def undone(call: Call, slip: Any = slip, scope: Any = scope) -> Arguments:
                    return slip.change(call) if scope in (None, call.number) else {}

                try:
                    after = measured(undone)
                except Refused:  # a shape that the change, or the operator, does not take
                    continue
                if (left := wrong(after)) < off:
                    finding = calls[scope or 0].finding(slip.code, slip.message, slip.argument)
                    most = max(after.values())
                    mended.append((len(left), most, replace(finding, call=scope, error=most)))
        mended.sort(key=itemgetter(0, 1))
        findings = [finding for left, _, finding in mended if left == mended[0][0]]
        if mended and not mended[0][0]:  # of those that mend all, the nearest
            findings = findings[:1]
        findings.append(_differs(calls[parted], places, before, limit, off))
    else:
        findings = _other_epsilons(calls, epsilons)
    apart = [
        call.finding(
            "cache.elsewhere",
            f"what is written to {argument} is not compared: it is memory of no argument and no "
            "module of both (a copy?), or holds int8 tiles",
            argument,
            certain=False,
        )
        for call in calls
        for argument, name in call.caches(places).items()
        if name not in wanted[0].after or name in tiles
    ]
    equal = False if off else None if apart else True
    rounding = {name: math.inf if name in tiles else limit for name in before}
    return Audit(operators, (*findings, *apart), equal, before, rounding, tuple(draws))


def _callable(target: Any) -> Target:
    if isinstance(target, ExportedProgram):
        return target.module()
    if not callable(target):
        raise TypeError(f"expected a module or a function, got {type(target).__name__}")
    return target


def _epsilons(reference: Target) -> list[float]:
    """What its modules hold under a name with "eps" in it."""
    return [
        value
        for module in memory.modules_of(reference).values()
        for name, value in vars(module).items()
        if "eps" in name and isinstance(value, float)
    ]


def _other_epsilons(calls: Sequence[Call], epsilons: Sequence[float]) -> list[Finding]:
    """Epsilons that the reference's modules do not hold; results need not show them."""
    theirs = " and ".join(f"{epsilon:g}" for epsilon in dict.fromkeys(epsilons))
    return [
        call.finding(
            "epsilon.differs",
            f"{name} is {call.arguments[name]:g}; the reference's modules hold {theirs}",
            name,
            certain=False,
        )
        for call in calls
        for name in EPSILONS
        if epsilons and name in call.arguments
        if not any(math.isclose(call.arguments[name], one, rel_tol=1e-6) for one in epsilons)
    ]


def _differs(
    call: Call, places: Mapping[int, str], errors: Errors, limit: float, off: set[str]
) -> Finding:
    first = next(name for name in errors if name in off)
    caches = [f"{one} ({name})" for one, name in call.caches(places).items() if name in off]
    where = (
        f"the two part at this call, which leaves other rows in {' and '.join(caches)}"
        if caches
        else "the caches are equal; the two part at a query"
    )
    text = f"{first} differs by {errors[first]:.2g} (rounding: up to {limit:.2g}); {where}"
    return call.finding("values.differ", text)
