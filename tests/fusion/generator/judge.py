"""Is the fused graph as right as the graph it was made of? Both are held against a float64 run, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

import mla_fusion as mf

from .graphs import Case, Result, run


class Verdict(Enum):
    """What became of a graph."""

    FUSED = "fused, and as exact"
    DECLINED = "declined"
    WRONG = "wrongly fused"
    CRASHED = "the pass raised"
    INVALID = "invalid graph"


@dataclass(frozen=True)
class Judgement:
    """A verdict, and what the report (or the comparison) said."""

    verdict: Verdict
    detail: str
    exact: Result | None = None


# Two bfloat16 runs of one prologue err 2e-3 to 6e-3 in a row of many columns. One rounding more (4e-3) is allowed,
# for tables that the model holds in float32 and the kernel in bfloat16; rows of few columns scatter more.
SLACK, ROUNDING, MANY = 2.0, 4e-3, 64


def judge(case: Case, verify: str = "first") -> Judgement:
    """Fuse a copy of the graph; run both, and the graph in float64."""
    try:
        exact = run(case.graph, case.inputs(), wide=True)
        plain = run(case.graph, case.inputs())
    except Exception as error:  # a mutant may be any graph at all
        return Judgement(Verdict.INVALID, f"does not run: {type(error).__name__}: {error}")
    if not all(_is_finite(value) for value in (*exact.outputs, *exact.caches.values(), *plain.outputs)):
        return Judgement(Verdict.INVALID, "not finite")
    copy = case.copy()
    try:
        report = mf.fuse(copy.graph, mf.Config(verify=verify))
    except Exception as error:  # the pass must never break a compilation
        return Judgement(Verdict.CRASHED, f"{type(error).__name__}: {error}", exact)
    if not report.fused:
        return Judgement(Verdict.DECLINED, _reason(report), exact)
    fused = run(copy.graph, case.inputs())
    wrong = compare(case, exact, plain, fused)
    if wrong:
        return Judgement(Verdict.WRONG, wrong, exact)
    return Judgement(Verdict.FUSED, report.fused[0].placement, exact)


def _reason(report: mf.Report) -> str:
    return "; ".join(f"[{rejection.code}] {rejection.message}" for rejection in report.rejected) or "nothing found"


def compare(case: Case, exact: Result, plain: Result, fused: Result) -> str:
    """What differs beyond rounding, or ""."""
    if len(exact.outputs) != len(fused.outputs):
        return "the number of outputs changed"
    for index, (want, unfused, got) in enumerate(zip(exact.outputs, plain.outputs, fused.outputs, strict=True)):
        wrong = _differs(want, unfused, got)
        if wrong:
            return f"output {index}: {wrong}"
    before = case.inputs()
    for name, want in exact.caches.items():
        unfused, got, was = (result[name] for result in (plain.caches, fused.caches, before))
        kept = rows(unfused).eq(rows(was)).all(-1)
        if not torch.equal(rows(got)[kept], rows(was)[kept]):
            return f"{name}: rows changed that the model leaves alone"
        wrong = _differs(rows(want)[~kept], rows(unfused)[~kept], rows(got)[~kept])
        if wrong:
            return f"{name}: {wrong}"
    return ""


def rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def _differs(want: Tensor, unfused: Tensor, got: Tensor) -> str:
    if got.shape != unfused.shape or got.dtype != unfused.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {unfused.dtype} {list(unfused.shape)}"
    if not want.is_floating_point():
        return "" if torch.equal(unfused, got) else "integers differ"
    if not want.numel():
        return ""
    error, usual = row_errors(got, want), row_errors(unfused, want)
    excess = error - (SLACK * usual + ROUNDING * max(1.0, (MANY / rows(want).shape[-1]) ** 0.5))
    worst = int(excess.argmax())
    if bool((excess <= 0).all()):
        return ""
    return f"row {worst}: error {float(error[worst]):.3e}, unfused {float(usual[worst]):.3e}"


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 error of every row; NaN counts as infinite."""
    difference = (rows(got).double() - rows(want).double()).norm(dim=-1)
    return (difference / rows(want).double().norm(dim=-1).clamp(min=1e-30)).nan_to_num(nan=torch.inf)


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value).all())
