"""Rows on their way into a cache of one byte: ``sat(rint(rows * scale))``, whatever operators say
it.

The scale is a tensor or a literal that the nodes between the rows and their bytes meet; exact
arithmetic says which. A clamp at -127, a zero point or a truncation is another function, and there
is no fact then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from mla_fusion.fx.program import literals, nodes_between
from mla_fusion.fx.sizes import is_size
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, views_and_model_casts
from mla_fusion.meta.number_formats import FP8, INT8, NumberFormat
from mla_fusion.operators.known import dtype_of, shape_of, value_of
from mla_fusion.prove import evaluate, field, quantising
from mla_fusion.prove.evaluate import Evaluation
from mla_fusion.prove.operators import real

_LONGEST = 12  # nodes from the rows to the int8 tensor
_FORMATS = {form.element: form for form in (INT8, FP8)}


@dataclass(frozen=True)
class CacheScale:
    """What rows are multiplied by before they are rounded: ``factor``, times ``node`` (over it with
    ``inverse``).

    ``node`` holds one value, or one a channel. ``format``: what they are rounded to.
    """

    node: Node | None
    inverse: bool = False
    factor: float = 1.0
    format: NumberFormat = INT8


@dataclass(frozen=True)
class RowQuant:
    """``node`` holds ``rows`` in one byte each."""

    node: Node
    rows: Node
    scale: CacheScale


def find(view: View, rows: Node) -> RowQuant | None:
    """The tensor of bytes that ``rows`` become by being scaled, rounded and saturated, or None."""
    chain = _to_bytes(rows)
    if chain is None:
        return None
    inside = {rows, *chain}
    sides = [arg for node in chain for arg in node.all_input_nodes if arg not in inside]
    of_sides = [_base(view, side) for side in sides if not view.is_constant(side)]
    bases = list(dict.fromkeys(of_sides))
    width = shape_of(rows)[-1]
    if len(bases) > 1 or any(not _is_scale(view, base, width) for base in bases):
        return None
    steps = [node for side in sides for node in nodes_between(bases, side)] + chain
    scale = evaluate.which(
        view,
        {rows: "x", **dict.fromkeys(bases, "scale")},
        _candidates(literals(steps), bases, _FORMATS[dtype_of(chain[-1])]),
        lambda run, scale: _holds(run, rows, chain[-1], scale),
    )
    return None if scale is None else RowQuant(chain[-1], rows, scale)


def _to_bytes(rows: Node) -> list[Node] | None:
    """The nodes from ``rows`` to the first tensor of bytes, each read by the next alone."""
    chain: list[Node] = []
    node = rows
    while len(chain) < _LONGEST:
        readers = [user for user in node.users if not is_size(user)]
        if len(readers) != 1 or not isinstance(value_of(readers[0]), torch.Tensor):
            return None
        node = readers[0]
        chain.append(node)
        if dtype_of(node) in _FORMATS:
            return chain
    return None


def _base(view: View, side: Node) -> Node:
    """As :func:`walk.peel`, but for a part of a tensor, which may be the scale of these rows
    alone.
    """
    count = view.binding.count_of

    def whole(node: Node) -> Node | None:
        above = views_and_model_casts(node)
        return None if above is None or count(above) > count(node) else above

    return origin(side, whole)


def _is_scale(view: View, base: Node, width: object) -> bool:
    value = value_of(base)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return prod(view.binding.shape(value.shape)) in (1, width)


def _candidates(met: list[float], bases: list[Node], form: NumberFormat) -> Iterator[CacheScale]:
    numbers = [
        value for value in dict.fromkeys(met) if math.isfinite(value) and value not in (0, 1)
    ]
    factors = [1.0, *numbers, *(1 / value for value in numbers)]
    if not bases:
        yield from (CacheScale(None, False, factor, form) for factor in factors)
    for base in bases:
        yield from (
            CacheScale(base, inverse, factor, form)
            for inverse in (False, True)
            for factor in factors
        )


def _holds(run: Evaluation, rows: Node, result: Node, scale: CacheScale) -> bool:
    value = real(run.value(rows))
    scaled = value * field.number(scale.factor)
    if scale.node is not None:
        times = real(run.value(scale.node)).reshape(-1)
        scaled = scaled * (field.inverse(times) if scale.inverse else times)
    return evaluate.is_same(run.value(result), quantising.saturated(scaled, scale.format))
