"""Quantisation to int8 by one scale fixed ahead of time: ``int8(sat(round(x / scale + offset)))``,
by npu_quantize.

That the scale is one is seen in the graph (one element, or an expansion of one), or in a vector of
the model's whose numbers were looked at and are all the same: checkpoints are loaded so, each scale
and offset repeated for every channel (:mod:`mla_fusion.fx.held` says what such a fact rests on).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from mla_fusion.fx.held import Exact, narrowed, numbers
from mla_fusion.fx.kinds import argument, is_cast, reads_by_strides, word
from mla_fusion.fx.module_path import label
from mla_fusion.fx.sizes import same
from mla_fusion.fx.walk import INPUTS, input_of, origin, upward, views_and_exact_casts
from mla_fusion.operators.known import EXPANDS, dtype_of, shape_of


@dataclass(frozen=True, kw_only=True)
class One:
    """One number, of ``dtype``.

    node       holds it: as its only element, or, ``repeated``, as every element of an input of the
               graph
    inverse    what is repeated is its reciprocal
    """

    node: Node
    dtype: torch.dtype
    repeated: bool = False
    inverse: bool = False

    @property
    def part(self) -> str:
        """What a drawn value plays, where it must suit."""
        if self.dtype == torch.int8:
            return "one_offset"
        return (
            "token_scale" if not self.repeated else "one_inverse" if self.inverse else "one_scale"
        )

    @property
    def exact(self) -> Exact:
        """What must be seen of the number whenever it is taken from what repeats it."""
        kind = str(self.dtype).removeprefix("torch.")
        kind = (
            "the reciprocal of one " + kind + " number"
            if self.inverse
            else "one " + kind + " number"
        )
        return Exact(
            "quant.not_static",
            f"the numbers of {label(self.node)} are not all {kind}",
            True,
            self.inverse,
        )


@dataclass(frozen=True, kw_only=True)
class StaticQuant:
    """``node`` quantises ``source``.

    scale    a bfloat16 number
    offset   an int8 number; None: 0
    """

    node: Node
    source: Node
    scale: One
    offset: One | None


class NotStatic(Exception):
    """Why an operator is none that quantises by one scale and one offset."""


def by_operator(operator: Node | None) -> StaticQuant | None:
    """What ``operator`` does, where it is npu_quantize with one scale, and one offset, for all that
    it is given.
    """
    try:
        return _read(operator)
    except NotStatic:
        return None


def why_not(operator: Node | None) -> str:
    """Why :func:`by_operator` has nothing to say; "" where it has, or where there is nothing that
    quantises.
    """
    try:
        _read(operator)
    except NotStatic as reason:
        return str(reason)
    return ""


def _read(operator: Node | None) -> StaticQuant:
    if operator is None:
        raise NotStatic
    source, scales, zero = (
        operator.args[0],
        argument(operator, "scales"),
        argument(operator, "zero_points"),
    )
    is_known = word(operator) == "npu_quantize" and dtype_of(operator) == torch.int8
    if not is_known or not isinstance(source, Node) or not isinstance(scales, Node):
        raise NotStatic(f"{operator.name} ({operator.target}) is not npu_quantize to int8")
    width = shape_of(source)[int(argument(operator, "axis", 1))]
    divides = bool(argument(operator, "div_mode", True))
    scale = _one(scales, torch.bfloat16, width) if divides else _inverse(scales, width)
    offset = _one(zero, torch.int8, width) if isinstance(zero, Node) else None
    return StaticQuant(node=operator, source=source, scale=scale, offset=offset)


def _inverse(node: Node, width: object) -> One:
    """The scale of which ``node`` holds the reciprocal."""
    base = origin(node, _repeated)
    if word(base) == "reciprocal" and isinstance(base.args[0], Node):
        return _one(base.args[0], torch.bfloat16, width)
    return _one(node, torch.bfloat16, width, inverse=True)


def _one(node: Node, dtype: torch.dtype, width: object, inverse: bool = False) -> One:
    """The number of ``dtype`` that ``node`` is, or repeats; with ``inverse``, of which it holds the
    reciprocal.
    """
    for above in upward(node, _repeated):
        if not inverse and dtype_of(above) == dtype and same(_count(above), 1):
            return One(node=above, dtype=dtype)
    held = origin(node, _repeated)
    if held.op not in INPUTS:
        raise NotStatic(f"{node.name} is computed in the graph, and not seen to hold one number")
    known, count = numbers(held), _count(held)
    if inverse and not _is_wider(node, held):
        raise NotStatic(f"{node.name} is a narrower form of the reciprocal {held.name}")
    if known is None:
        raise NotStatic(f"the numbers of {held.name} cannot be looked at here")
    if known.one is None:
        raise NotStatic(f"the numbers of {held.name} differ")
    if not same(count, 1) and not same(count, width):
        raise NotStatic(f"{held.name} has {count} numbers for {width} channels")
    found = One(node=held, dtype=dtype, repeated=True, inverse=inverse)
    vector = torch.tensor([known.one], dtype=dtype_of(held))
    if not found.exact.holds(narrowed(vector, dtype, inverse), vector):
        raise NotStatic(f"{found.exact.what}: {known.one:g}")
    return found


def _count(node: Node) -> object:
    return prod(shape_of(node))


def _repeated(node: Node) -> Node | None:
    """Up through views, copies that repeat, and casts that keep every number, those of int8 among
    them: what holds no other numbers.
    """
    if reads_by_strides(node):
        return None
    above = views_and_exact_casts(node)
    if above is None and (word(node) in _REPEATS or _holds_int8(node)):
        above = input_of(node)
    return above


_REPEATS = (*EXPANDS, "repeat")


def _holds_int8(node: Node) -> bool:
    """Is it a cast of int8 to a dtype that has each of its numbers?"""
    source = input_of(node) if is_cast(node) else None
    if source is None or dtype_of(source) != torch.int8:
        return False
    return dtype_of(node) in (torch.int16, torch.int32, torch.int64, *_FLOATS)


def _is_wider(node: Node, held: Node) -> bool:
    """Has no cast from ``held`` down to the node rounded its numbers?"""
    dtypes = [dtype_of(above) for above in (node, *upward(node, _repeated))]
    return all(torch.promote_types(dtype, dtype_of(held)) == dtype for dtype in dtypes)


_FLOATS = (torch.bfloat16, torch.float32, torch.float64)
