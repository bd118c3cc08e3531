"""What is made of an operator's results: shape, order and dtype of the nodes that they replace."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.build import Builder
from mla_fusion.fx.kinds import argument, word
from mla_fusion.operators.known import dtype_of
from mla_fusion.plan.outputs import Replacement
from mla_fusion.plan.plan import Plan

aten = torch.ops.aten


def result_of(b: Builder, results: Any, place: int) -> Any:
    """One of several results."""
    return b.call(operator.getitem, results, place)


def fit(b: Builder, replacement: Replacement, result: Any) -> Any:
    """The kernel's result in the shape, order and dtype of the node that it replaces."""
    return b.cast(arrange(b, replacement, result), dtype_of(replacement.node))


def arrange(b: Builder, replacement: Replacement, result: Any) -> Any:
    """The kernel's result in the shape and order of the node that it replaces."""
    wanted = replacement.node.meta["val"]
    order = replacement.order
    # the codes of the same scales
    if b.dtype(result) == torch.float8_e8m0fnu and wanted.dtype == torch.uint8:
        result = b.call(aten.view.dtype, result, torch.uint8)
    if order is not None:
        result = b.reshape(b.permuted(result, order), wanted.shape)
    return result


_MADE_FROM = {  # of what a borrower is called with, the sizes and the number are given anew
    "new_zeros": aten.new_zeros,
    "zeros_like": aten.new_zeros,
    "new_ones": aten.new_ones,
    "ones_like": aten.new_ones,
    "new_full": aten.new_full,
    "full_like": aten.new_full,
}


def lend(b: Builder, plan: Plan, borrower: Node) -> Any:
    """What the borrower makes, with its device taken from x instead of from a value that is
    replaced.
    """
    value = borrower.meta["val"]
    new = _MADE_FROM.get(word(borrower), aten.new_empty)
    fill = argument(borrower, "fill_value")
    number = [b.value(fill) if isinstance(fill, Node) else fill] if new is aten.new_full else []
    x = b.value(plan.candidate.down.origin)
    return b.call(new.default, x, b.sizes(value.shape, of=x), *number, dtype=value.dtype)
