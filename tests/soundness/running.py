"""Runs of programs and graphs on named inputs, and the verdict on what a compiled one gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import mla_fusion as mf

from . import captures, inputs
from .compare import Witness, differs
from .member import COMPILED_AT, Member, Outcome, Verdict, tokens_of
from .program import Named

Program = Callable[[Named], tuple[Tensor, ...]]
Run = Callable[[Named], Any]
Results = tuple[Tensor, ...]
# bfloat16 rounds by 2^-9, and sums add up
NUDGES = tuple(2.0**-bits for bits in (8, 7, 6) for _ in range(3))


class Invalid(Exception):
    """The generator's fault, not the pass's."""


@lru_cache(maxsize=12)
def all_inputs(regime: str) -> list[tuple[str, Named]]:
    """What a graph is compiled on, then what exposes it. None is written (``inputs.fresh``)."""
    tokens = tokens_of(regime)
    compiled_on = inputs.ordinary(COMPILED_AT if len(tokens) > 1 else tokens[0])
    return [("as compiled", compiled_on), *inputs.exposing(tokens)]


def attempt(program: Run, named: Named) -> Results | None:
    """Outputs and caches, or None where the run raises."""
    try:
        return run_seeded(program, named)
    except Exception:
        return None


def run_seeded(run: Run, named: Named) -> Results:
    """Results of one call, then the caches as it leaves them."""
    given = inputs.fresh(named)
    torch.manual_seed(named["seed"])
    with torch.no_grad():
        results = run(given)
    return (*(value.clone() for value in results), *(given[name] for name in inputs.CACHES))


def on(captured: captures.Captured, function: Callable[..., Any]) -> Run:
    """A graph as a function of named inputs."""
    return lambda named: function(*captured.args(named))


def require_another_meaning(
    unchanged: Program, draws: list[tuple[str, Named]], wanted: dict[str, Results | None]
) -> None:
    """An attack that gives what the unchanged prologue gives, everywhere, attacks nothing."""
    for label, named in draws:
        want = wanted[label]
        if want is None:
            continue
        usual = attempt(unchanged, named)
        if usual is None or differs(want, usual):
            return
    raise Invalid("it means what its control means on every input")


def against_eager(
    member: Member,
    reports: Callable[[], list[mf.Report]],
    run: Run,
    program: Program,
    draws: list[tuple[str, Named]],
    wanted: dict[str, Results | None],
    random: bool,
) -> Outcome:
    """The verdict on a compiled program; ``reports`` are asked for when every input was seen."""
    wrong, compared = None, 0
    for label, named in draws:
        want = wanted[label]
        if want is None:
            continue
        try:
            got = run_seeded(run, named)
        except Exception as error:
            wrong = wrong or (Verdict.RAISED, f"on {label}: {type(error).__name__}: {error}")
            continue
        compared += 1
        detail = differs(got, want, witness(program, named, random))
        if detail:
            wrong = wrong or (Verdict.WRONG, f"on {label}: {detail}")
    return verdict(member, reports(), wrong, compared)


def witness(program: Program, named: Named, random: bool) -> Witness:
    """Random numbers in float64 are others; on other inputs, of one seed, they are the same."""

    def nudged() -> list[Results]:
        generator = torch.Generator().manual_seed(0)
        x, found = named["x"], []
        for size in NUDGES:
            noise = 1 + size * torch.randn(x.shape, generator=generator)
            found.append(run_seeded(program, {**named, "x": (x * noise).to(x.dtype)}))
            # noise in x averages out; here all values grow, or shrink
            for by in (1 - 2 * size, 1 + 2 * size):
                gammas = {name: (named[name] * by).to(x.dtype) for name in ("gamma_q", "gamma_kv")}
                found.append(run_seeded(program, {**named, **gammas}))
        return found

    def exact() -> Results:
        if random:
            raise Invalid("no float64 run draws the same numbers")
        return run_seeded(program, wide(named))

    return Witness(exact, nudged)


def verdict(
    member: Member, reports: list[mf.Report], wrong: tuple[Verdict, str] | None, compared: int
) -> Outcome:
    fused = [fusion for report in reports for fusion in report.fused]
    codes = [
        (rejection.code, rejection.message) for report in reports for rejection in report.rejected
    ]
    failed = [message for code, message in codes if code == "pass.failed"]
    said = "; ".join(f"[{code}] {message}" for code, message in codes) or "nothing found"
    if failed:
        return Outcome(member, Verdict.RAISED, f"the pass failed: {failed[0]}")
    if wrong is not None:
        return Outcome(member, wrong[0], wrong[1] + ("" if fused else f" (not fused: {said})"))
    if not fused:
        misread = any(code == "verify.mismatch" for code, _ in codes)
        return Outcome(member, Verdict.MISREAD if misread else Verdict.REFUSED, said)
    if not compared:
        raise Invalid("fused, and no input to compare on")
    in_place = all(fusion.placement == "in place" for fusion in fused)
    return Outcome(member, Verdict.FUSED if in_place else Verdict.STAGED, fused[0].placement)


def wide(named: Named) -> Named:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in named.items()
    }


def random_steps(gm: GraphModule) -> int:
    return sum(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and bool(node.users)
        for node in gm.graph.nodes
    )
