"""Rows on their way into a cache of one byte: ``sat(rint(rows * scale))``, whatever operators say
it.

Read off by running the nodes between the rows and the int8 (or float8) tensor on float64 rows that
reach both ends of the range. A clamp at -127, a zero point or a truncation is another function, and
there is no fact then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from mla_fusion.facts.quantising import only_quantises
from mla_fusion.fx.kinds import argument
from mla_fusion.fx.measured import measured
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.sizes import is_symbolic
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import peel
from mla_fusion.meta.number_formats import FP8, INT8, NumberFormat
from mla_fusion.reference.formats import FP8_MAXIMUM, format_of

_LONGEST = 12  # nodes from the rows to the int8 tensor
_TYPICAL = 30.0
_FORMATS = {form.element: form for form in (INT8, FP8)}
_PEAKS = {INT8: 80, FP8: 300}  # four times which is out of range


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


@measured
def find(view: View, rows: Node) -> RowQuant | None:
    """The tensor of bytes that ``rows`` become by being scaled, rounded and saturated, or None."""
    chain = _to_bytes(rows)
    if chain is None:
        return None
    form = _FORMATS[chain[-1].meta["val"].dtype]
    if form is FP8 and not _clamps(chain):
        return None
    inside = {rows, *chain}
    sides = [arg for node in chain for arg in node.all_input_nodes if arg not in inside]
    bases = list(dict.fromkeys(peel(side) for side in sides if not view.is_constant(side)))
    width = rows.meta["val"].shape[-1]
    if len(bases) > 1 or any(not _is_scale(view, base, width) for base in bases):
        return None
    above = (nodes_between(bases if not view.is_constant(side) else (), side) for side in sides)
    order = dict.fromkeys([node for nodes in above for node in nodes] + chain)
    if not only_quantises(view, (node for node in order if node is not rows), form.element):
        return None
    program = Program([rows, *bases], list(order), view.binding, narrows=True)
    for scale in _candidates(program, bases, form):
        if _holds(view, program, rows, chain[-1], bases, scale):
            return RowQuant(chain[-1], rows, scale)
    return None


def _to_bytes(rows: Node) -> list[Node] | None:
    """The nodes from ``rows`` to the first tensor of bytes, each read by the next alone."""
    chain: list[Node] = []
    node = rows
    while len(chain) < _LONGEST:
        readers = [user for user in node.users if not is_symbolic(user.meta.get("val"))]
        if len(readers) != 1 or not isinstance(readers[0].meta.get("val"), torch.Tensor):
            return None
        node = readers[0]
        chain.append(node)
        if node.meta["val"].dtype in _FORMATS:
            return chain
    return None


def _clamps(chain: list[Node]) -> bool:
    """Is saturation written out? What a cast to float8 alone does with larger numbers differs from
    torch to torch.
    """
    ends = [argument(node, name) for node in chain for name in ("min", "max")]
    return FP8_MAXIMUM in ends and -FP8_MAXIMUM in ends


def _is_scale(view: View, base: Node, width: object) -> bool:
    value = base.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return prod(view.binding.shape(value.shape)) in (1, width)


def _candidates(program: Program, bases: list[Node], form: NumberFormat) -> Iterator[CacheScale]:
    numbers = [value for value in program.literals if value not in (0.0, 1.0)]
    factors = [1.0, *numbers, *(1 / value for value in numbers)]
    if not bases:
        yield from (CacheScale(None, False, factor, form) for factor in factors)
    for base in bases:
        yield from (
            CacheScale(base, inverse, factor, form)
            for inverse in (False, True)
            for factor in factors
        )


def _holds(
    view: View, program: Program, rows: Node, result: Node, bases: list[Node], scale: CacheScale
) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = view.binding.shape(rows.meta["val"].shape)
    shapes = [view.binding.shape(base.meta["val"].shape) for base in bases]
    drawn = [
        _TYPICAL * (1 + torch.rand(size, generator=generator, dtype=torch.float32))
        for size in shapes
    ]
    values = [value.double() for value in drawn]
    multiplier = torch.tensor(scale.factor, dtype=torch.float64)
    for value in values:
        row = value.reshape(-1) if value.numel() > 1 else value.reshape(())
        multiplier = multiplier * (1 / row if scale.inverse else row)
    peak = _PEAKS[scale.format] / multiplier.abs().max()
    probe = torch.randn(shape, generator=generator, dtype=torch.float64) * peak
    few = torch.rand(shape, generator=generator, dtype=torch.float32) < 0.1
    probe = torch.where(few, 4 * probe, probe)
    found = program.run([probe, *values])[program.slot(result)]
    kernel = format_of(scale.format.full, "A3")
    assert kernel is not None
    wanted = kernel.per_tensor(probe * multiplier)
    is_same = (
        isinstance(found, torch.Tensor)
        and found.shape == wanted.shape
        and found.dtype == wanted.dtype
    )
    return bool(is_same) and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
