"""The proof: each claimed Value of a graph is the kernel's, at random points of the field.

Both sides are Values over one activation, which is drawn; equal claims of equal layers are proved
once, by their digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_fusion.exact import field
from mla_fusion.exact.evaluate import Evaluation, Undecided, layouts_of
from mla_fusion.graph.form import Value, digest
from mla_fusion.graph.layout import Binding, Layout, Mixed, cuts_of
from mla_fusion.propose.departure import Departure

POINTS = 3
DEGREE = 10_000  # more than that of any identity that is tested, roots and quotients multiplied out


@dataclass(frozen=True)
class Claim:
    """``graph`` is ``kernel``: of one shape, in each element.

    part  what of the prologue it is, for a message
    """

    part: str
    graph: Value
    kernel: Value


class Proofs:
    """What was proved, by the structure of both sides."""

    def __init__(self) -> None:
        self._compared: dict[object, int] = {}

    def prove(self, given: dict[Value, Layout], tokens: int, claims: Sequence[Claim]) -> int:
        """How many elements were compared. Raises Departure where two differ, or tokens are
        mixed.

        given  the activations that are drawn, with their layouts
        """
        sides = [side for claim in claims for side in (claim.graph, claim.kernel)]
        key = digest(sides, list(given))
        if key not in self._compared:
            self._compared[key] = _compared(given, tokens, claims, sides)
        return self._compared[key]


def _compared(
    given: dict[Value, Layout], tokens: int, claims: Sequence[Claim], sides: Sequence[Value]
) -> int:
    try:
        layouts = layouts_of(sides, given)
        binding = Binding(cuts_of(layouts.values()), tokens)
    except Mixed as mixed:
        raise _mixed(mixed, claims) from mixed
    compared = 0
    for seed in range(POINTS):
        drawn = {
            value: field.random(field.word(seed, "given", value.serial), binding.shape(layout))
            for value, layout in given.items()
        }
        run = Evaluation(binding, layouts, drawn, seed)
        for claim in claims:
            if claim.graph.shape != claim.kernel.shape:
                shapes = f"{list(claim.graph.shape)} and {list(claim.kernel.shape)}"
                raise Departure("proof.differs", f"{claim.part}: shapes {shapes}", [claim.graph])
            if claim.graph is claim.kernel:
                continue
            try:
                run.run([claim.graph, claim.kernel])
                if layouts[claim.graph] != layouts[claim.kernel]:
                    raise Mixed(claim.graph)
            except (Mixed, KeyError) as mixed:
                raise _mixed(mixed, [claim]) from mixed
            except Undecided as large:
                raise Departure("proof.differs", f"{claim.part} is too large to be run", large.args) from large
            one, other = run.tensors[claim.graph], run.tensors[claim.kernel]
            compared += one.numel()
            if not torch.equal(one, other):
                count = int((one != other).sum())
                raise Departure(
                    "proof.differs",
                    f"{claim.part} differs in {count} of {one.numel()} elements",
                    [claim.graph],
                )
    return compared


def _mixed(error: Exception, claims: Sequence[Claim]) -> Departure:
    at = [value for value in error.args if isinstance(value, Value)]
    return Departure("tokens.mixed", "tokens are mixed, or cut", at or [claims[0].graph])
