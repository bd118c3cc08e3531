"""Proves that the results of a proposal are the kernel's: the last check before a plan is made.

``plan/planner.py`` passes claims. Each has two Values over one activation: one of the graph, one of
the kernel's definition (``targets/prolog.py``). The activation is random, and both sides are
evaluated at the points of ``exact/field.py``.
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

# chance of a wrong proof (Schwartz and Zippel), for polynomials of degree 10000
CHANCE = 10.0 ** math.ceil(sum(math.log10(10_000 / point.p) for point in field.POINTS))


@dataclass(frozen=True)
class Claim:
    """States that ``graph`` and ``kernel`` are equal: one shape, and each element.

    part  which result of the prologue it is, for messages
    """

    part: str
    graph: Value
    kernel: Value


def prove(activations: dict[Value, Layout], tokens: int, claims: Sequence[Claim]) -> int:
    """Returns how many elements were compared. Raises the Departure of a claim that does not hold.

    activations  the Values that are random, with their layouts
    tokens       how many tokens the graph has
    """
    compared = 0
    for outcome in outcomes(activations, tokens, claims):
        if isinstance(outcome, Departure):
            raise outcome
        compared += outcome
    return compared


def outcomes(
    activations: dict[Value, Layout], tokens: int, claims: Sequence[Claim]
) -> list[int | Departure]:
    """Returns for each claim how many elements were compared, or why it does not hold: two elements
    differ, tokens are mixed, or a Value is too large.
    """
    at_first, layouts = list[int | Departure](), dict(activations)
    for claim in claims:
        try:
            layouts |= layouts_of((claim.graph, claim.kernel), activations)
            at_first.append(0)
        except Mixed as mixed:
            at_first.append(_tokens_mixed(mixed, claim))
    binding: Binding | None = Binding(cuts_of(layouts.values()), tokens)
    while binding is not None:
        results, is_refuted = [*at_first], False
        for point in field.POINTS:
            drawn = {
                value: field.random(
                    field.word(point.seed, "given", value.serial), binding.shape(layout)
                )
                for value, layout in activations.items()
            }
            evaluation = Evaluation(binding, layouts, drawn, point)
            for place, claim in enumerate(claims):
                count = results[place]
                if isinstance(count, Departure):
                    continue
                try:
                    results[place] = count + _compare(evaluation, claim)
                except Departure as departure:
                    results[place], is_refuted = departure, True
        # Values beside x may divide the tokens at more places
        binding = binding.refined() if is_refuted else None
    return results


def _compare(evaluation: Evaluation, claim: Claim) -> int:
    """Compares the sides of one claim. Returns how many elements it has. Raises Departure."""
    graph_value, kernel_value = claim.graph, claim.kernel
    if graph_value.shape != kernel_value.shape:
        shapes = f"{list(graph_value.shape)} and {list(kernel_value.shape)}"
        raise Departure("proof.differs", f"{claim.part}: shapes {shapes}", [graph_value])
    if graph_value is kernel_value:
        return 0
    try:
        evaluation.run([graph_value, kernel_value])
        if evaluation.layouts[graph_value] != evaluation.layouts[kernel_value]:
            raise Mixed(graph_value)
    except (Mixed, KeyError) as mixed:
        raise _tokens_mixed(mixed, claim) from mixed
    except Undecided as large:
        detail = f"{claim.part} is too large to be run"
        raise Departure("proof.differs", detail, large.args) from large
    sides = evaluation.tensors[graph_value], evaluation.tensors[kernel_value]
    if not torch.equal(*sides):
        count = int((sides[0] != sides[1]).sum())
        detail = f"{claim.part} differs in {count} of {sides[0].numel()} elements"
        raise Departure("proof.differs", detail, [graph_value])
    return sides[0].numel()


def _tokens_mixed(error: Exception, claim: Claim) -> Departure:
    """The departure for mixed tokens."""
    mixing_values = [value for value in error.args if isinstance(value, Value)]
    return Departure("tokens.mixed", "tokens are mixed, or cut", mixing_values or [claim.graph])
