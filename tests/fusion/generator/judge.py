"""Is the fused graph as right as the graph it was made of? Both are held against a float64 run, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.fx import Node

import mla_fusion as mf

from .graphs import Case, Result, run


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


# Two bfloat16 runs of one prologue err 2e-3 to 6e-3 in a row of many columns. One rounding more (4e-3) is allowed,
# for tables that the model holds in float32 and the kernel in bfloat16; rows of few columns scatter more.
# A value on the border of two float8 or integer steps may go either way, so graphs with such casts may err by a step.
SLACK, ROUNDING, MANY, STEP = 2.0, 4e-3, 64, 5e-2


def judge(case: Case, verify: str = "first") -> Judgement:
    """Fuse a copy of the graph; run both, and the graph in float64."""
    try:
        exact = case.exact
        plain = run(case.graph, case.inputs())
    except Exception as error:  # a mutant may be any graph at all
        return Judgement(Verdict.INVALID, f"does not run: {type(error).__name__}: {error}")
    if not all(_is_finite(value) for value in (*exact.outputs, *exact.caches.values(), *plain.outputs)):
        return Judgement(Verdict.INVALID, "not finite")
    copy = case.copy()
    try:
        report = mf.fuse(copy.graph, mf.Config(verify=verify))
    except Exception as error:  # the pass must never break a compilation
        return Judgement(Verdict.CRASHED, f"{type(error).__name__}: {error}")
    if not report.fused:
        if any(rejection.code == "verify.mismatch" for rejection in report.rejected):
            return Judgement(Verdict.MISREAD, _reason(report))
        return Judgement(Verdict.DECLINED, _reason(report))
    fused = run(copy.graph, case.inputs())
    wrong = compare(case, exact, plain, fused)
    if wrong:
        return Judgement(Verdict.WRONG, wrong)
    return Judgement(Verdict.FUSED, report.fused[0].placement)


def _reason(report: mf.Report) -> str:
    return "; ".join(f"[{rejection.code}] {rejection.message}" for rejection in report.rejected) or "nothing found"


def compare(case: Case, exact: Result, plain: Result, fused: Result) -> str:
    """What differs beyond rounding, or ""."""
    if len(exact.outputs) != len(fused.outputs):
        return "the number of outputs changed"
    rounding = STEP if any(_has_steps(node) for node in case.graph.graph.nodes) else ROUNDING
    for index, (want, unfused, got) in enumerate(zip(exact.outputs, plain.outputs, fused.outputs, strict=True)):
        wrong = _differs(want, unfused, got, rounding)
        if wrong:
            return f"output {index}: {wrong}"
    before = case.inputs()
    for name, want in exact.caches.items():
        unfused, got, was = (result[name] for result in (plain.caches, fused.caches, before))
        kept = rows(unfused).eq(rows(was)).all(-1)
        if not torch.equal(rows(got)[kept], rows(was)[kept]):
            return f"{name}: rows changed that the model leaves alone"
        wrong = _differs(rows(want)[~kept], rows(unfused)[~kept], rows(got)[~kept], rounding)
        if wrong:
            return f"{name}: {wrong}"
    return ""


_SMOOTH = (torch.bfloat16, torch.float32, torch.float64)


def _has_steps(node: Node) -> bool:
    """Does the node round to few values?"""
    if "round" in str(node.target):
        return True
    made = node.meta.get("val")
    from_smooth = any(getattr(arg.meta.get("val"), "dtype", None) in _SMOOTH for arg in node.all_input_nodes)
    return "_to_copy" in str(node.target) and from_smooth and isinstance(made, Tensor) and made.dtype not in _SMOOTH


def rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def _differs(want: Tensor, unfused: Tensor, got: Tensor, rounding: float) -> str:
    if got.shape != unfused.shape or got.dtype != unfused.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {unfused.dtype} {list(unfused.shape)}"
    if not want.is_floating_point():
        return "" if torch.equal(unfused, got) else "integers differ"
    if not want.numel():
        return ""
    want, unfused, got = (_by_longest(value) for value in (want, unfused, got))
    error, usual = row_errors(got, want), row_errors(unfused, want)
    excess = error - (SLACK * usual + rounding * max(1.0, (MANY / want.shape[-1]) ** 0.5))
    worst = int(excess.argmax())
    if bool((excess <= 0).all()):
        return ""
    return f"row {worst}: error {float(error[worst]):.3e}, unfused {float(usual[worst]):.3e}"


def _by_longest(tensor: Tensor) -> Tensor:
    """Rows along the longest axis: heads or tokens may stand last, and of few numbers one may cancel out."""
    if not tensor.dim():
        return tensor
    longest = max(reversed(range(tensor.dim())), key=lambda axis: tensor.shape[axis])
    return rows(tensor.movedim(longest, -1))


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 error of every row; NaN counts as infinite."""
    difference = (rows(got).double() - rows(want).double()).norm(dim=-1)
    return (difference / rows(want).double().norm(dim=-1).clamp(min=1e-30)).nan_to_num(nan=torch.inf)


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value).all())
