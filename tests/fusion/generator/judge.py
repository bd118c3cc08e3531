"""Is the fused graph as right as the graph it was made of? Both against float64, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.fx import Node

import mla_fusion as mf

from .graphs import Case, Result, run
from .inputs import Named


class Verdict(Enum):
    """What became of a graph."""

    FUSED = "fused, and as exact"
    DECLINED = "declined"
    MISREAD = "misread, declined by verification"
    WRONG = "wrongly fused"
    CRASHED = "the pass raised"
    INVALID = "invalid graph"


@dataclass(frozen=True)
class Judgement:
    """A verdict, and what the report (or the comparison) said."""

    verdict: Verdict
    detail: str


# Two bfloat16 runs of one prologue err 2e-3 to 6e-3 in a row of many columns. One rounding more
# (4e-3) is allowed, for tables that the model holds in float32 and the kernel in bfloat16; rows of
# few different numbers scatter more. A value on the border of two float8 or integer steps may go
# either way, and a sum that cancels holds little but roundings: there the graph is also run on
# inputs nudged by one bfloat16 rounding, and may err as those runs do.
SLACK, ROUNDING, MANY, STEP, NUDGES = 2.0, 4e-3, 64, 5e-2, 4


def judge(case: Case, verify: str = "first") -> Judgement:
    """Fuse a copy of the graph; run both, and the graph in float64."""
    try:
        exact = case.exact
        plain = [run(case.graph, case.inputs())]
    except Exception as error:  # a mutant may be any graph at all
        return Judgement(Verdict.INVALID, f"does not run: {type(error).__name__}: {error}")
    if not all(
        _is_finite(value) for value in (*exact.outputs, *exact.caches.values(), *plain[0].outputs)
    ):
        return Judgement(Verdict.INVALID, "not finite")
    copy = case.copy()
    try:
        report = mf.fuse(copy.graph, mf.Config(verify=verify))
    except Exception as error:  # the pass must never break a compilation
        return Judgement(Verdict.CRASHED, f"{type(error).__name__}: {error}")
    if any(rejection.code == "pass.failed" for rejection in report.rejected):
        return Judgement(Verdict.CRASHED, _reason(report))
    if not report.fused:
        if any(rejection.code == "verify.mismatch" for rejection in report.rejected):
            return Judgement(Verdict.MISREAD, _reason(report))
        return Judgement(Verdict.DECLINED, _reason(report))
    fused = run(copy.graph, case.inputs())
    wrong = compare(case, exact, plain, fused)
    if wrong:
        wrong = compare(
            case, exact, plain + [run(case.graph, inputs) for inputs in _nudged(case)], fused
        )
    if wrong:
        return Judgement(Verdict.WRONG, wrong)
    return Judgement(Verdict.FUSED, report.fused[0].placement)


def _reason(report: mf.Report) -> str:
    return (
        "; ".join(f"[{rejection.code}] {rejection.message}" for rejection in report.rejected)
        or "nothing found"
    )


def compare(case: Case, exact: Result, plain: list[Result], fused: Result) -> str:
    """What differs beyond rounding, or "". ``plain``: the unfused run, then on nudged inputs."""
    if len(exact.outputs) != len(fused.outputs):
        return "the number of outputs changed"
    rounding = STEP if any(map(_has_steps, case.graph.graph.nodes)) else ROUNDING
    for index, (want, got) in enumerate(zip(exact.outputs, fused.outputs, strict=True)):
        unfused = [result.outputs[index] for result in plain]
        wrong = _differs(want, unfused, got, rounding)
        if wrong:
            return f"output {index}: {wrong}"
    before = case.inputs()
    for name, want in exact.caches.items():
        unfused, got, was = (
            [result.caches[name] for result in plain],
            fused.caches[name],
            before[name],
        )
        kept = rows(unfused[0]).eq(rows(was)).all(-1)
        if not torch.equal(rows(got)[kept], rows(was)[kept]):
            return f"{name}: rows changed that the model leaves alone"
        wrong = _differs(
            rows(want)[~kept], [rows(run)[~kept] for run in unfused], rows(got)[~kept], rounding
        )
        if wrong:
            return f"{name}: {wrong}"
    return ""


_SMOOTH = (torch.bfloat16, torch.float32, torch.float64)


def _has_steps(node: Node) -> bool:
    """Does the node round to few values?"""
    if "round" in str(node.target):
        return True
    made = node.meta.get("val")
    from_smooth = any(
        getattr(arg.meta.get("val"), "dtype", None) in _SMOOTH for arg in node.all_input_nodes
    )
    return (
        "_to_copy" in str(node.target)
        and from_smooth
        and isinstance(made, Tensor)
        and made.dtype not in _SMOOTH
    )


def rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def _differs(want: Tensor, unfused: list[Tensor], got: Tensor, rounding: float) -> str:
    plain = unfused[0]
    if got.shape != plain.shape or got.dtype != plain.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {plain.dtype} {list(plain.shape)}"
    if not want.is_floating_point():
        return _integers_differ(unfused, got)
    if not want.numel():
        return ""
    want, got, *unfused = (_by_longest(value) for value in (want, got, *unfused))
    error, usual = (
        row_errors(got, want),
        torch.stack([row_errors(one, want) for one in unfused]).amax(0),
    )
    # that differ: a repeated one says no more
    numbers = 1 + want.sort(-1).values.diff(dim=-1).ne(0).sum(-1)
    excess = error - (SLACK * usual + rounding * (MANY / numbers).sqrt().clamp(min=1.0))
    worst = int(excess.argmax())
    if bool((excess <= 0).all()):
        return ""
    return f"row {worst}: error {float(error[worst]):.3e}, unfused {float(usual[worst]):.3e}"


def _integers_differ(unfused: list[Tensor], got: Tensor) -> str:
    """Integers that only move are equal. Those that a run on nudged inputs changes too come of a
    rounding: they may differ by as much, and in twice as many places.
    """
    if any(torch.equal(one, got) for one in unfused):
        return ""
    plain, *nudged = (one.long() for one in unfused)
    apart = (got.long() - plain).abs()
    usual = [(one - plain).abs() for one in nudged]
    places = max((int(one.count_nonzero()) for one in usual), default=0)
    furthest = max((int(one.max()) for one in usual if one.numel()), default=0)
    if int(apart.count_nonzero()) <= SLACK * places and int(apart.max()) <= furthest:
        return ""
    return "integers differ"


def _nudged(case: Case) -> Iterator[Named]:
    """Inputs a bfloat16 rounding away, the caches and slots as they are."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUDGES):
        inputs = case.inputs()
        x = inputs["x"]
        yield {
            **inputs,
            "x": x * (1 + 2**-8 * torch.randn(x.shape, generator=generator)).to(x.dtype),
        }


def _by_longest(tensor: Tensor) -> Tensor:
    """Rows along the longest axis: heads or tokens may stand last; of few, one may cancel out."""
    if not tensor.dim():
        return tensor
    longest = max(reversed(range(tensor.dim())), key=lambda axis: tensor.shape[axis])
    return rows(tensor.movedim(longest, -1))


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 error of every row; NaN counts as infinite."""
    difference = (rows(got).double() - rows(want).double()).norm(dim=-1)
    return (difference / rows(want).double().norm(dim=-1).clamp(min=1e-30)).nan_to_num(
        nan=torch.inf
    )


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value).all())
