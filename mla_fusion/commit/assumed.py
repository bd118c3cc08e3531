"""What a proof took for granted of numbers in a region: true of models, and shown by nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from mla_fusion.commit.region import Region
from mla_fusion.fx.kinds import argument, is_cast, is_view, word
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, reached, reshapes, views_and_casts
from mla_fusion.operators.known import dtype_of, value_of
from mla_fusion.prove.counted import TOKENS, Counted, is_number_of_call
from mla_fusion.prove.evaluate import OF_MODEL
from mla_fusion.prove.operators import OF_ZERO

_FLOORS = ("clamp", "clamp_min", "maximum")


def assumed_of_numbers(view: View, region: Region) -> tuple[str, ...]:
    """A line for each floor that no row is taken to come near, each guard against a row of zeros,
    and each cast that is taken to keep every number.
    """
    found = (
        *_floors(view, region),
        *_zeros(region),
        *_narrowed(view, region),
        *_whole(region),
        *_counted(region),
    )
    return tuple(dict.fromkeys(found))


def _floors(view: View, region: Region) -> Iterator[str]:
    for node in region.nodes:
        value = value_of(node) if word(node) in _FLOORS else None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        sides = [arg for arg in node.args[:2] if isinstance(arg, Node)]
        held = [side for side in sides if not view.is_constant(side)]
        given = argument(node, "min")
        least = float(given) if isinstance(given, (int, float)) else None
        if least is None and len(sides) == 2 and len(held) == 1:
            least = next(view.ranges.of(side)[0] for side in sides if side is not held[0])
        if least is not None and least > 0 and held and view.ranges.of(held[0])[0] < least:
            yield f"no row comes near the floor of {least:g} at {node.name}"


def _zeros(region: Region) -> Iterator[str]:
    """Of a row of zeros the step is replaced: whatever asks for it is named."""
    leaves = region.leaves
    for node in region.nodes:
        if word(node) in OF_ZERO and argument(node, "other") == 0:
            above = reached([node], lambda step: () if step in leaves else step.all_input_nodes)
            if any(leaves.get(step) == "x" for step in above):
                yield f"no row is 0 throughout, which {node.name} asks"


def _whole(region: Region) -> Iterator[str]:
    """Casts of rounded numbers to wide integers, which are bounded behind them."""
    for node in region.nodes:
        if is_cast(node) and dtype_of(node) in (torch.int32, torch.int64):
            source = origin(node.all_input_nodes[0], views_and_casts)
            if word(source) == "round":
                yield f"rounded rows are below 2**31 at {node.name}"


def _counted(region: Region) -> Iterator[str]:
    """Sums and products that their dtype holds as long as what comes in is small."""
    few, any_ = (Counted(region.leaves, OF_MODEL, most) for most in (TOKENS, 1 << 31))
    counts = {leaf for leaf, role in region.leaves.items() if role == "" and leaf in few}
    counts |= {
        read for node in region.nodes for read in node.all_input_nodes if is_number_of_call(read)
    }
    for node in region.nodes if counts else ():
        if not any_.leaves_the_field(node) or few.leaves_the_field(node):
            continue
        steps = nodes_between(region.leaves, node)
        if not all(is_cast(step) or is_view(step) for step in steps):
            inputs = counts.intersection(read for step in steps for read in step.all_input_nodes)
            names = ", ".join(sorted(leaf.name for leaf in inputs))
            yield f"input {names} holds numbers below 2**{TOKENS.bit_length() - 1} ({node.name})"


def _narrowed(view: View, region: Region) -> Iterator[str]:
    """Casts to int32 of int64 inputs, if something was shown to be equal by them."""
    inside = {*region.nodes, *(node for twin in region.twins for node in nodes_between((), twin))}
    for node in view.terms.narrowed:
        if node in inside:
            source = origin(node.all_input_nodes[0], reshapes).name
            yield f"input {source} holds numbers below 2**31 ({node.name})"
