"""The proof: each claimed Value of a graph is the kernel's, at random points of the field.

Both sides are Values over one activation, which is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_fusion.exact import field
from mla_fusion.exact.evaluate import Evaluation, Undecided, layouts_of
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.layout import Binding, Layout, Mixed, cuts_of

# by Schwartz and Zippel, of a degree beyond that of any identity that is tested
CHANCE = 10.0 ** math.ceil(sum(math.log10(10_000 / at.p) for at in field.POINTS))


@dataclass(frozen=True)
class Claim:
    """``graph`` is ``kernel``: of one shape, in each element.

    part  what of the prologue it is, for a message
    """

    part: str
    graph: Value
    kernel: Value


def prove(given: dict[Value, Layout], tokens: int, claims: Sequence[Claim]) -> int:
    """How many elements were compared. Raises Departure where two differ, or tokens are mixed.

    given  the activations that are drawn, with their layouts
    """
    sides = [side for claim in claims for side in (claim.graph, claim.kernel)]
    try:
        layouts = layouts_of(sides, given)
        cuts = cuts_of(layouts.values())
        binding = Binding(cuts, tokens)
    except Mixed as mixed:
        raise _mixed(mixed, claims) from mixed
    compared, points = 0, [*field.POINTS]
    while points:
        count, refused = _at_a_point(binding, layouts, given, claims, points.pop())
        compared += count
        if refused is None:
            continue
        further = cuts | binding.missing  # what is beside x divides the tokens further
        if further == cuts or not _fits(further, tokens):
            raise refused
        cuts, compared, points = further, 0, [*field.POINTS]
        binding = Binding(cuts, tokens)
    return compared


def _fits(cuts: set[int], tokens: int) -> bool:
    try:
        Binding(cuts, tokens)
    except Mixed:
        return False
    return True


def _at_a_point(
    binding: Binding,
    layouts: dict[Value, Layout],
    given: dict[Value, Layout],
    claims: Sequence[Claim],
    at: field.Point,
) -> tuple[int, Departure | None]:
    """How many elements were compared, and the first claim that does not hold."""
    drawn = {
        value: field.random(field.word(at.seed, "given", value.serial), binding.shape(layout))
        for value, layout in given.items()
    }
    run, compared, refusal = Evaluation(binding, layouts, drawn, at), 0, None
    for claim in claims:
        try:
            compared += _compare(run, claim)
        except Departure as departure:
            refusal = refusal or departure
    return compared, refusal


def _compare(run: Evaluation, claim: Claim) -> int:
    one, other = claim.graph, claim.kernel
    if one.shape != other.shape:
        shapes = f"{list(one.shape)} and {list(other.shape)}"
        raise Departure("proof.differs", f"{claim.part}: shapes {shapes}", [one])
    if one is other:
        return 0
    try:
        run.run([one, other])
        if run.layouts[one] != run.layouts[other]:
            raise Mixed(one)
    except (Mixed, KeyError) as mixed:
        raise _mixed(mixed, [claim]) from mixed
    except Undecided as large:
        detail = f"{claim.part} is too large to be run"
        raise Departure("proof.differs", detail, large.args) from large
    sides = run.tensors[one], run.tensors[other]
    if not torch.equal(*sides):
        count = int((sides[0] != sides[1]).sum())
        detail = f"{claim.part} differs in {count} of {sides[0].numel()} elements"
        raise Departure("proof.differs", detail, [one])
    return sides[0].numel()


def _mixed(error: Exception, claims: Sequence[Claim]) -> Departure:
    at = [value for value in error.args if isinstance(value, Value)]
    return Departure("tokens.mixed", "tokens are mixed, or cut", at or [claims[0].graph])
