"""Members that are models of the catalogue with a step of theirs exchanged, int8 on the way."""

from __future__ import annotations

import torch
from mla_fusion.meta.spec import TILE_SIZE
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary
from tests.catalogue.base import DR, HCKV

from . import captures, compare
from .member import Member, Outcome, Verdict
from .program import Named
from .running import Invalid, Program, Results, attempt, on, verdict


def judge(
    member: Member,
    program: Program,
    usual: Program,
    draws: list[tuple[str, Named]],
    config: mf.Config,
) -> Outcome:
    """``usual``: without the attack; ``draws``: inputs; the graph is captured on the first."""
    wanted = {label: attempt(program, named) for label, named in draws}
    if wanted["as compiled"] is None:
        raise Invalid("it does not run at all")
    if not member.control and not any(
        want is not None and differs(want, attempt(usual, named) or ())
        for (_, named), want in zip(draws, wanted.values(), strict=True)
    ):
        raise Invalid("it means what its control means on every input")
    try:
        captured = (captures.symbolic if member.regime == "sym" else captures.static)(
            program, draws[0][1]
        )
    except Exception as error:
        raise Invalid(f"it is not captured: {type(error).__name__}: {error}") from error
    try:
        report, _, wrap = fuse_with_boundary(captured.graph, captured.inputs, config)
    except Exception as error:
        return Outcome(member, Verdict.RAISED, f"the pass: {type(error).__name__}: {error}")
    run, wrong, compared = on(captured, wrap(captured.graph.forward)), None, 0
    for label, named in draws:
        want = wanted[label]
        if want is None or not captured.serves(named):
            continue
        compared += 1
        got = attempt(run, named)
        if got is None:
            wrong = wrong or (Verdict.RAISED, f"on {label}")
        elif differs(got, want):
            wrong = wrong or (Verdict.WRONG, f"on {label}: {differs(got, want)}")
    return verdict(member, [report], wrong, compared)


def differs(got: Results, want: Results) -> str:
    """A few int8 values differ by one step between two roundings of c_q: thrice the allowance."""
    for new, old in zip(map(_numbers, got), map(_numbers, want), strict=True):
        if new.shape != old.shape:
            return f"{list(new.shape)} instead of {list(old.shape)}"
        error, whole = compare.errors(new, old)
        if not whole <= 2 * compare.WHOLE or not float(error.max()) <= 3 * compare.ROW:
            return f"relative error {whole:.2e}, of the worst row {float(error.max()):.2e}"
    return ""


def _numbers(value: Tensor) -> Tensor:
    """Of rows packed for a cache the numbers that they hold, ``[.., Hckv + Dr]``."""
    width = HCKV + 2 * DR + 4 * HCKV // TILE_SIZE
    if value.dtype != torch.int8 or value.shape[-1] != width:
        return value
    codes, key, scales = value.split([HCKV, 2 * DR, width - HCKV - 2 * DR], -1)
    steps = scales.contiguous().view(torch.float32).repeat_interleave(TILE_SIZE, -1)
    return torch.cat([codes * steps, key.contiguous().view(torch.bfloat16).float()], -1)
