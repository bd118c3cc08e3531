"""``mf.audit``: does a hand-written call equal the model, and if not, why?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mla_fusion.by_hand import wiring
from mla_fusion.by_hand.calls import Call, Watch, buffers_kept, callers_line, run
from mla_fusion.by_hand.outcome import Audit, Finding
from mla_fusion.by_hand.repair import Repair
from mla_fusion.by_hand.search import Subject, draws_of, options_of, search
from mla_fusion.by_hand.values import Values, errors, values_of, worst

_ROUNDING = 2e-2  # two bfloat16 evaluations of one prologue, as Config.verify has it
_ROUNDING_INT8 = 6e-2
_NOISE = 4.0  # times the reference's own distance from float64


def audit(
    fused: Callable[..., Any] | ExportedProgram,
    reference: Callable[..., Any] | ExportedProgram | None = None,
    *inputs: Any,
    soc: str = "A3",
    cann: str = "latest",
    path: str = "eager",
    tolerance: float | None = None,
    tries: int = 4000,
) -> Audit:
    """Check what ``fused`` calls by hand: ``npu_mla_prolog*``, ``npu_kv_rmsnorm_rope_cache*``, ``npu_mla_preprocess``.

    fused, reference   a module, a function, an FX graph or an exported program, over the same weights and called with
                       the same ``inputs`` (copied before each run; caches that they write are compared too)
    reference          the unfused model; None: the contract and the arguments' values alone are looked at
    soc, cann, path    whose limits hold, as in `mla_fusion.meta.check`
    tolerance          the relative error that counts as rounding; by default 2e-2 (6e-2 with int8), or four times
                       what the reference itself is off from a float64 run of it
    tries              the most runs of the repaired function; all are needed only where nothing explains a difference

    Where results differ, the mistakes that are usual in such calls are undone one by one, two and three together, and
    those that make the results equal are named with the caller's line. Everything runs on the CPU, on the reference
    kernels. Raises ValueError where ``fused`` calls none of the operators.
    """
    fused, reference = _callable(fused), None if reference is None else _callable(reference)
    calls, memory, stopped = _calls(fused, inputs)
    if not calls:
        raise ValueError("the function calls none of npu_mla_prolog*, npu_kv_rmsnorm_rope_cache*, npu_mla_preprocess")
    seen = [finding for call in calls for finding in wiring.findings(call, soc, cann, path)]
    if stopped is not None and not any(item.code.startswith("contract:") for item in seen):
        seen.append(Finding("call.fails", str(stopped), "", calls[-1].short, calls[-1].place, calls[-1].line))
    names = tuple(call.short for call in calls)
    if reference is None:
        return Audit(names, tuple(seen))
    draws = draws_of(calls, inputs)
    wanted = {name: values_of(reference, given, Watch()) for name, given in draws.items()}
    limit = tolerance if tolerance is not None else _limit(reference, inputs, calls, wanted)
    subject = Subject(fused, draws, wanted, limit, calls, memory, tries)
    before = subject.errors(())
    if subject.is_right(before):
        return Audit(names, tuple(seen), True, before, None, limit, tuple(draws))
    chosen, after = search(subject, options_of(calls, _vectors(fused, reference), _epsilons(fused, reference)))
    mended = [_mended(subject, chosen, place, calls) for place in range(len(chosen))]
    return Audit(names, (*mended, *seen), False, before, after, limit, tuple(draws), subject.runs)


def _callable(target: Any) -> Callable[..., Any]:
    if isinstance(target, ExportedProgram):
        return target.module()
    if not callable(target):
        raise TypeError(f"expected a module, a function, a graph or an exported program, got {type(target).__name__}")
    return target


def _calls(fused: Callable[..., Any], inputs: Sequence[Any]) -> tuple[list[Call], dict[int, str], Exception | None]:
    """The calls of one run, where its arguments lay, and what ended it early."""
    given = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    watch = Watch(line=callers_line)
    with buffers_kept(fused):
        try:
            run(fused, given, watch)
        except Exception:
            if watch.refused is None:  # a call that the operator refuses is a finding
                raise
    tensors = ((place, value) for place, value in enumerate(given) if isinstance(value, Tensor))
    memory = {value.untyped_storage().data_ptr(): f"argument {place}" for place, value in tensors}
    return watch.calls, memory, watch.refused


def _limit(
    reference: Callable[..., Any], inputs: Sequence[Any], calls: Sequence[Call], wanted: dict[str, Values]
) -> float:
    """What is rounding, for this model."""
    int8 = any(
        isinstance(value, Tensor) and value.dtype == torch.int8 for call in calls for value in call.arguments.values()
    )
    usual = _ROUNDING_INT8 if int8 else _ROUNDING
    if not isinstance(reference, nn.Module):
        return usual
    try:
        wide = copy.deepcopy(reference).double()
        given = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs]
        exact = values_of(wide, given, Watch())
    except Exception:  # a model that runs in its own dtypes alone
        return usual
    return max(usual, _NOISE * worst(errors(exact, next(iter(wanted.values())))))


def _vectors(*models: object) -> list[tuple[str, Tensor]]:
    """Parameters of one axis that a norm may have been meant to have."""
    found: dict[int, tuple[str, Tensor]] = {}
    for model in models:
        for name, value in model.named_parameters() if isinstance(model, nn.Module) else ():
            if value.dim() == 1:
                found.setdefault(value.data_ptr(), (name, value))
    return list(found.values())


def _epsilons(*models: object) -> list[float]:
    """What the models' modules hold under a name with "eps" in it."""
    found: dict[float, None] = {}
    for model in models:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            for name, value in vars(module).items():
                if "eps" in name and isinstance(value, float):
                    found[value] = None
    return list(found)


def _mended(subject: Subject, chosen: Sequence[Repair], place: int, calls: Sequence[Call]) -> Finding:
    repair = chosen[place]
    call = calls[repair.place or 0]
    left = worst(subject.errors(chosen[: place + 1]))
    return Finding(repair.code, repair.text, repair.argument, call.short, repair.place, call.line, True, left)
