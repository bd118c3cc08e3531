"""``Config(slots="checked")``: bad slots raise before anything is written, good ones run as
ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary

from .. import captures, inputs
from ..compare import differs
from ..member import Attack, Family, Member, Outcome, Verdict
from ..program import STYLES, Named, prologue
from ..running import on, run_seeded, verdict

BAD = {
    "minus_one": -1,
    "far_below": -(1 << 40),
    "one_beyond": inputs.ROWS,
    "far_beyond": 1 << 40,
    "repeated": None,
}


def _judge(member: Member) -> Outcome:
    style, tokens = STYLES[member.style], 5

    def program(i: Named) -> tuple[Tensor, ...]:
        return prologue(i, style)

    example = inputs.ordinary(tokens)
    captured = (captures.symbolic if member.regime == "sym" else captures.static)(program, example)
    report, _, wrap = fuse_with_boundary(
        captured.graph, captured.inputs, mf.Config(slots="checked")
    )
    run = on(captured, wrap(captured.graph.forward))
    wrong = differs(run_seeded(run, example), run_seeded(program, example))
    if wrong:
        return Outcome(member, Verdict.WRONG, f"good slots: {wrong}")
    if member.control:
        return verdict(member, [report], None, 1)
    slots = example["slots"].clone()
    place = int(member.place)
    bad = BAD[member.attack]
    slots[place] = slots[place - 1] if bad is None else bad
    given = {**inputs.fresh(example), "slots": slots}
    try:
        with torch.no_grad():
            run(given)
    except Exception as error:
        touched = [name for name in inputs.CACHES if not torch.equal(given[name], example[name])]
        if touched:
            return Outcome(
                member, Verdict.WRONG, f"{', '.join(touched)} was written before the error"
            )
        if bad is not None and str(bad) not in str(error):
            return Outcome(
                member, Verdict.WRONG, f"the error does not name the slot {bad}: {error}"
            )
        return Outcome(member, Verdict.REFUSED, f"raised {type(error).__name__}")
    return Outcome(member, Verdict.WRONG, "a bad slot was taken without a word")


def _nothing(*_: Any) -> None:
    """Members are told by their names alone."""


_CASES = tuple(
    Attack(name, _nothing, ("1", "4"), ("T5", "sym"), ("paged", "neox", "blocks")) for name in BAD
)
FAMILIES = [
    Family(
        "checked.slots",
        "bad slots of an input, under Config(slots='checked')",
        _CASES,
        (Attack("good", _nothing, ("1",), ("T5", "sym"), ("paged", "blocks")),),
        judge=_judge,
    ),
]
