"""Compile a member at the default configuration, and hold it against eager on inputs that expose
what it does.

A member is WRONG where the pass fused it and any input, the compile-time one or an exposing one,
gives other numbers than the model; RAISED where the pass, or the fused graph, raises where the
model does not.
"""

from __future__ import annotations

from time import perf_counter

from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary

from . import captures, dynamo
from .compare import differs
from .families import FAMILIES
from .member import Family, Member, Outcome, Verdict, tokens_of
from .program import STYLES, Change, Named, prologue
from .running import (
    Invalid,
    against_eager,
    all_inputs,
    attempt,
    on,
    random_steps,
    require_another_meaning,
)


def judge(member: Member) -> Outcome:
    started = perf_counter()
    family = FAMILIES[member.family]
    try:
        outcome = family.judge(member) if family.judge is not None else _judge(family, member)
    except Invalid as error:
        outcome = Outcome(member, Verdict.INVALID, str(error))
    except Exception as error:  # a defect of this generator must not end a campaign of hours
        outcome = Outcome(
            member, Verdict.INVALID, f"the judge raised {type(error).__name__}: {error}"
        )
    return Outcome(outcome.member, outcome.verdict, outcome.detail, perf_counter() - started)


def _judge(family: Family, member: Member) -> Outcome:
    attack, style = family.attack(member), STYLES[member.style]
    change = Change(tuple(member.place.split("+")), attack.step)
    draws = all_inputs(member.regime)
    if family.extra is not None:
        draws = draws + family.extra(tokens_of(member.regime))

    def program(i: Named) -> tuple[Tensor, ...]:
        if member.place == "program":
            return tuple(attack.step(i, style))
        return prologue(i, style, change)

    def unchanged(i: Named) -> tuple[Tensor, ...]:
        return prologue(i, style)

    wanted = {label: attempt(program, named) for label, named in draws}
    if wanted["as compiled"] is None:
        raise Invalid("it does not run at all")
    if not member.control and not family.random:
        require_another_meaning(unchanged, draws, wanted)
    if member.regime == "dynamo":
        made = dynamo.compiled(program, draws[0][1], mf.Config())
        return against_eager(member, *made, program, draws, wanted, family.random)
    example = draws[0][1]
    try:
        make = captures.symbolic if member.regime == "sym" else captures.static
        captured = make(program, example)
    except Exception as error:
        raise Invalid(f"it is not captured: {type(error).__name__}: {error}") from error
    if member.regime == "sym" or family.random:
        for label, named in draws:
            plain = attempt(on(captured, captured.plain), named) if captured.serves(named) else None
            known = wanted[label]
            # the graph draws its random numbers in an order of its own
            if plain is None or family.random:
                wanted[label] = plain
            elif known is not None and differs(plain, known):
                wanted[label] = None  # torch would compile another graph for this input
    served = [captured.serves(named) for _, named in draws]
    try:
        report, _, wrap = fuse_with_boundary(captured.graph, captured.inputs, mf.Config())
    except Exception as error:
        return Outcome(member, Verdict.RAISED, f"the pass: {type(error).__name__}: {error}")
    if served != [captured.serves(named) for _, named in draws]:
        return Outcome(member, Verdict.WRONG, "the pass guards a size of the graph")
    run = on(captured, wrap(captured.graph.forward))
    outcome = against_eager(member, lambda: [report], run, program, draws, wanted, family.random)
    if family.staged and outcome.verdict is Verdict.FUSED:
        return Outcome(
            member, Verdict.WRONG, "in place, though the slots are not shown to be distinct"
        )
    if family.random and outcome.verdict in (Verdict.FUSED, Verdict.STAGED):
        lost = random_steps(captured.plain) - random_steps(captured.graph)
        if lost:
            return Outcome(
                member, Verdict.WRONG, f"{lost} random steps are inside what was replaced"
            )
    return outcome
