"""``mf.audit``: compares hand-written calls with the model, and looks for the usual slip that
explains a difference.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch.export import ExportedProgram

from mla_fusion.meta import check, limits, preprocess
from mla_fusion.tools.by_hand import exact, memory
from mla_fusion.tools.by_hand.calls import Arguments, Call, Refused, Watch
from mla_fusion.tools.by_hand.memory import Target, values_of
from mla_fusion.tools.by_hand.outcome import Audit, Finding
from mla_fusion.tools.by_hand.slips import EPSILONS, Change, slips
from mla_fusion.witness.compare import TOLERANCE

_TOLERANCE_INT8 = 6e-2
_PER_TILE = 3  # of kv_cache_quant_mode
_SMALL = 1e-3  # times usual latents, an epsilon of 1e-6 counts
Errors = Mapping[str, float]


def audit(
    fused: Callable[..., Any] | ExportedProgram,
    reference: Callable[..., Any] | ExportedProgram | None = None,
    *inputs: Any,
    soc: str = "A3",
    cann: str = "latest",
    path: str = "eager",
    tolerance: float | None = None,
) -> Audit:
    """Checks what ``fused`` calls by hand: ``npu_mla_prolog*``, ``npu_kv_rmsnorm_rope_cache*``,
    ``npu_mla_preprocess``.

    fused            a module, a method of one, a function, an FX graph or an exported program
    reference        the unfused model, in any of these forms, over the same weights; None: only the
                     contract is checked, and the numbers of slots and lengths
    inputs           the arguments of both, copied before each run
    soc, cann, path  the limits to check, as in `mla_fusion.meta.check`
    tolerance        the relative error that counts as rounding; by default 2e-2 (6e-2 with int8);
                     many layers in a row need more

    A call that the contract refuses ends the audit. Else the audit compares the results, element by
    element in any shape, on the inputs, and on a thousandth of x, where an epsilon counts. Of a
    result that ``fused`` alone gives it says that it is not compared; then ``equal`` is None. It
    compares all that either writes, too: arguments, also in lists and dicts, buffers, and tensors
    that modules hold as attributes. Everything runs on the CPU, on the reference kernels.

    If results differ, the audit names the first output, its error, and the call at which the two
    part (the module's path, the caller's line). It undoes each slip of a short table alone, and
    names the slips that mend something.

    If ``fused`` calls none of the operators, the audit runs both functions in exact arithmetic. It
    proves them equal over the real numbers (without rounding), or shows that they differ
    (``witness``: inputs that show it), or does not decide (``equal`` is None), with the step at
    which the two part. Raises ValueError if there is no reference.

    Raises ContractError for limits that no table has, and ValueError for a tolerance that is no
    positive number, and for inputs on which the reference returns no finite number but 0.
    """
    limits("npu_mla_prolog_v3", soc, cann, path)  # knows the names
    is_number = isinstance(tolerance, (int, float))
    if tolerance is not None and not (is_number and 0 < tolerance < math.inf):
        raise ValueError(f"tolerance must be a positive number, got {tolerance!r}")
    fused, reference = _callable(fused), None if reference is None else _callable(reference)
    modules, calls, refusals = memory.modules_of(fused), list[Call](), list[Finding]()

    def check_call(call: Call) -> Arguments:
        """Checks a call against the contract, and changes nothing."""
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
        with Watch(check_call, modules):
            results = values_of(fused, inputs)
    except Refused as error:
        refusals.append(error.finding)
    operators = tuple(call.operator for call in calls)
    if reference is None and not calls:
        raise ValueError(
            "the function calls none of npu_mla_prolog*, npu_kv_rmsnorm_rope_cache*, "
            "npu_mla_preprocess, and there is no reference to compare it with"
        )
    if reference is None or refusals:
        return Audit(operators, tuple(refusals))
    if not calls:
        return exact.compare(fused, reference, inputs)
    arguments, addresses = calls[0].arguments, results.addresses
    x = next(arguments[name] for name in ("token_x", "input", "kv") if name in arguments)
    draws = {
        "the inputs as given": inputs,
        "a thousandth of x": memory.scale(inputs, _SMALL, x.shape[-1]),
    }
    expected = [values_of(reference, draw) for draw in draws.values()]
    outputs = [value for name, value in expected[0].after.items() if name.startswith("output")]
    if outputs and not any((value.isfinite() & (value != 0)).any() for value in outputs):
        raise ValueError(
            "inputs: the reference returns no finite number but 0 on them, which shows nothing"
        )
    dtypes = {value.dtype for call in calls for value in memory.tensors_in(call.arguments)}
    limit = tolerance
    if limit is None:
        limit = _TOLERANCE_INT8 if torch.int8 in dtypes else TOLERANCE
    # a rounding is no small error in rows of int8 tiles, scales and a bfloat16 key
    tiles = {
        call.caches(addresses)["kv_cache"]
        for call in calls
        if call.arguments.get("kv_cache_quant_mode") == _PER_TILE
    }

    def measured(visit: Callable[[Call], Arguments]) -> dict[str, float]:
        """Returns the largest error of each value over the draws."""
        largest = defaultdict[str, float](float)
        for reference_values, draw in zip(expected, draws.values(), strict=True):
            with Watch(visit, modules):
                values = values_of(fused, draw)
            for name, error in memory.relative_errors(reference_values, values).items():
                largest[name] = max(largest[name], error)
        return dict(largest)

    def wrong(errors: Errors) -> set[str]:
        """Returns the names of the values that differ by more than rounding."""
        return {name for name, error in errors.items() if not error <= limit} - tiles

    before, epsilons = measured(lambda call: {}), _epsilons(reference)
    mended = defaultdict[int, list[Finding]](list)  # by the number of values that stay wrong
    if off := wrong(before):
        # the first call whose cache is wrong; if all caches are right, the last call
        wrong_calls = (call.number for call in calls if off & {*call.caches(addresses).values()})
        parted = next(wrong_calls, len(calls) - 1)
        for scope in (None, parted, parted - 1) if len(calls) > 1 else (0,):
            for finding, change in slips(calls[scope or 0], dict.fromkeys((*epsilons, 1e-6))):

                def undo(call: Call, change: Change = change, scope: Any = scope) -> Arguments:
                    """Undoes the slip in the calls of the scope."""
                    return change(call.arguments) if scope in (None, call.number) else {}

                try:
                    after = measured(undo)
                except Refused:  # the change, or the operator, does not take a shape
                    continue
                if (left := wrong(after)) < off:
                    finding = replace(finding, call=scope, error=max(after.values()))
                    mended[len(left)].append(finding)
        fewest = min(mended, default=0)
        findings = sorted(mended[fewest], key=attrgetter("error"))
        if fewest == 0:  # all is mended: the slip that leaves the smallest error
            findings = findings[:1]
        findings.append(_difference(calls[parted], addresses, before, limit, off))
    else:
        findings = _other_epsilons(calls, epsilons)
    not_compared = [
        call.finding(
            "cache.elsewhere",
            f"what is written to {argument} is not compared: it is memory of no argument and no "
            "module of both (a copy?), or holds int8 tiles",
            argument,
            certain=False,
        )
        for call in calls
        for argument, name in call.caches(addresses).items()
        if name not in expected[0].after or name in tiles
    ]
    not_compared += [
        Finding(
            "results.differ",
            f"{name} is not compared: the reference gives no such result",
            certain=False,
        )
        for name in results.after
        if name.startswith("output") and name not in expected[0].after
    ]
    equal = False if off else None if not_compared else True
    rounding = {name: math.inf if name in tiles else limit for name in before}
    return Audit(operators, (*findings, *not_compared), equal, before, rounding, tuple(draws))


def _callable(target: Any) -> Target:
    """Returns a function that runs the target. Raises TypeError if it cannot run."""
    if isinstance(target, ExportedProgram):
        return target.module()
    if not callable(target):
        raise TypeError(f"expected a module or a function, got {type(target).__name__}")
    return target


def _epsilons(reference: Target) -> list[float]:
    """Returns the floats that the modules hold under a name with "eps" in it."""
    return [
        value
        for module in memory.modules_of(reference).values()
        for name, value in vars(module).items()
        if "eps" in name and isinstance(value, float)
    ]


def _other_epsilons(calls: Sequence[Call], epsilons: Sequence[float]) -> list[Finding]:
    """Returns a finding for each epsilon that no module of the reference holds."""
    text = " and ".join(f"{epsilon:g}" for epsilon in dict.fromkeys(epsilons))
    return [
        call.finding(
            "epsilon.differs",
            f"{name} is {call.arguments[name]:g}; the reference's modules hold {text}",
            name,
            certain=False,
        )
        for call in calls
        for name in EPSILONS
        if epsilons and name in call.arguments
        if not any(math.isclose(call.arguments[name], known, rel_tol=1e-6) for known in epsilons)
    ]


def _difference(
    call: Call, addresses: Mapping[int, str], errors: Errors, limit: float, off: set[str]
) -> Finding:
    """Returns the finding for values that differ, at the call where they part."""
    first = next(name for name in errors if name in off)
    caches = [f"{at} ({name})" for at, name in call.caches(addresses).items() if name in off]
    where = (
        f"the two part at this call, which leaves other rows in {' and '.join(caches)}"
        if caches
        else "the caches are equal; the two part at a query"
    )
    text = f"{first} differs by {errors[first]:.2g} (rounding: up to {limit:.2g}); {where}"
    return call.finding("values.differ", text)
