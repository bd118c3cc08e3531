"""Can two tokens have one slot? Which of their rows stays depends on the order of writing, and the
kernel has its own.

The elements of one integer input are assumed to be distinct. This module follows which steps keep
different numbers different: sums with literals, products with them, (s // b) * b + s % b, an entry
of a block table beside a place in the block. A remainder or a quotient alone may map two numbers to
one.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from mla_fusion.fx.analytic import Steps
from mla_fusion.fx.kinds import argument, is_cast, is_float, is_view, tensor_held, word
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.ranges import Ranges, keeps_integers
from mla_fusion.fx.sizes import broadcast, has_symbols, is_size, same, same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import INPUTS, origin, views_and_casts
from mla_fusion.operators.known import COUNTS, EXPANDS, GATHER, dtype_of, rule_named, shape_of

_LONGEST = 24  # steps from the slots to the input
_KEEP_APART = GATHER | {"neg", "flip", "roll"}
_COUNTS = frozenset("add sub cumsum cat stack arange repeat".split())
_SHIFT = "bitwise_left_shift"
_SUMS = frozenset((_SHIFT, "add", "sub", "mul"))


def repeats(view: View, slots: list[Node], trusting: Ranges) -> str:
    """Why two tokens may have one slot, given that no two elements of an input are the same; ""
    where they may not.

    ``slots``: the slots, or (block, place in it); ``trusting``: ranges that take inputs at their
    word.
    """
    if all(same(math.prod(shape_of(node)), 1) for node in slots):
        return ""
    if len(slots) == 1:
        step = _merging_step(view, slots[0], trusting)
        return f"{step.name} may give two tokens one slot" if step is not None else ""
    block, place = slots
    if not same_shape(shape_of(block), shape_of(place)):
        return _spread_over_each_other(view, slots, trusting)
    if view.terms.are_apart(block, place):
        return ""
    decides = _deciding(view, block, place)
    step = block if decides is None else _merging_step(view, decides, trusting)
    places = f"nothing shows that {place.name} gives them two places in it"
    return f"{step.name} may give two tokens one block, and {places}" if step is not None else ""


def _spread_over_each_other(view: View, slots: list[Node], trusting: Ranges) -> str:
    """As of blocks [B, 1] and places [B, S] or [S]: two tokens are at other indices of one of
    them, along which no number stands twice.
    """
    shapes = [shape_of(node) for node in slots]
    whole = broadcast(*shapes)
    missed = set(range(-len(whole), 0))
    for shape in shapes:
        missed -= {axis for axis in range(-len(shape), 0) if same(shape[axis], whole[axis])}
    steps = [_merging_step(view, node, trusting) for node in slots]
    step = next((step for step in steps if step is not None), None)
    if step is None and not missed:
        return ""
    return f"{(step or slots[0]).name} may give two tokens one slot"


def _deciding(view: View, block: Node, place: Node) -> Node | None:
    """Of blocks and places in them, what decides whether two tokens have both alike: the table in
    which the blocks are looked up, or the blocks. None where two tokens may look up one entry for
    one place.
    """
    entry = origin(block, _each_once)
    if word(entry) not in GATHER:
        return block
    table, *indices = _operands(entry)
    return table if any(_picks_apart(view, index, place) for index in indices) else None


def _picks_apart(view: View, index: Node, place: Node) -> bool:
    """Have tokens of one place different entries, as where both are given, or quotient and
    remainder of positions?
    """
    if not _keeps_count(place, index):
        return False
    if all(origin(node, _each_once).op in INPUTS for node in (index, place)):
        return True
    return view.terms.are_apart(index, place) and not _counts_twice(view, index)


def _counts_twice(view: View, index: Node) -> bool:
    """Of the quotient of positions: may these, which are distinct where they come in, be the same
    for two tokens?
    """
    quotient = origin(index, views_and_casts)
    positions = nodes_between((), quotient.all_input_nodes[0]) if quotient.all_input_nodes else []
    computed = (
        node for node in positions if node.op == "call_function" and not view.is_constant(node)
    )
    return not all(_keeps_positions(node) for node in computed)


def _keeps_positions(node: Node) -> bool:
    name = word(node)
    return is_size(node) or is_view(node) or is_cast(node) or name in _KEEP_APART | _COUNTS


def _merging_step(view: View, node: Node, trusting: Ranges) -> Node | None:
    """The first step above the node that may make two different numbers one; None where there is
    none.
    """
    for _ in range(_LONGEST):
        if node.op in INPUTS:
            return node if _holds_repeats(node) else None
        if view.is_constant(node):
            return None if _are_distinct(view, node, trusting) else node
        if word(node) in GATHER:
            *_, index = node.all_input_nodes
            is_whole = index is not node.args[0] and _is_whole(node, index)
            step = _merging_step(view, index, trusting) if is_whole else node
            if step is not None:
                return step  # the same entry may be read for two tokens
        following = _following(view, node, trusting)
        if following is None:
            return node
        node = following
    return node


def _holds_repeats(node: Node) -> bool:
    """Is it a literal that a tracer lifted, with a number twice?"""
    value = tensor_held(node)
    return value is not None and value.unique().numel() != value.numel()


def _following(view: View, node: Node, trusting: Ranges) -> Node | None:
    """The operand whose different numbers the step keeps different."""
    name, operands = word(node), _operands(node)
    if not operands:
        return None
    if is_cast(node) and not _keeps_numbers(node, operands[0], trusting):
        return None
    if is_view(node) or is_cast(node):
        return _each_once(node)
    if name in _KEEP_APART:
        return operands[0]
    if rule_named(node, "inert"):
        # where no value of the bound is within those of the operand
        kept = Steps(view, trusting).kept(node)
        return kept if kept is not None and _keeps_count(node, kept) else None
    return _of_sum(view, node, operands) if name in _SUMS else None


def _each_once(node: Node) -> Node | None:
    """Above a view or cast that holds no element of it twice."""
    source = views_and_casts(node)
    repeats = word(node) in EXPANDS and source is not None and not _keeps_count(node, source)
    return None if repeats else source


def _is_whole(entries: Node, index: Node) -> bool:
    """Has the last index of a look-up a number for each entry, whatever the others are spread
    over?
    """
    indices = argument(entries, "indices")
    others = indices if isinstance(indices, (list, tuple)) else ()
    spread = broadcast(*(shape_of(one) for one in others if one is not None), (1,))
    return not others or same(math.prod(spread), math.prod(shape_of(index)))


def _operands(node: Node) -> list[Node]:
    return [arg for arg in node.all_input_nodes if not is_size(arg)]


def _keeps_numbers(node: Node, source: Node, trusting: Ranges) -> bool:
    """Is every integer that comes in one that the cast's dtype holds? A float holds some of them
    alone.
    """
    dtypes = dtype_of(node), dtype_of(source)
    if any(is_float(dtype) or dtype == torch.bool for dtype in dtypes):
        return False
    return keeps_integers(*dtypes, trusting.of(source))


def _is_exact(node: Node, trusting: Ranges) -> bool:
    """Does a step give integers, all that it makes?"""
    if is_size(node):
        return True
    source = next(iter(_operands(node)), None)
    is_kept = source is None or not is_cast(node) or _keeps_numbers(node, source, trusting)
    return is_kept and not is_float(dtype_of(node))


def _keeps_count(node: Node, source: Node) -> bool:
    return same(math.prod(shape_of(node)), math.prod(shape_of(source)))


def _of_sum(view: View, node: Node, operands: list[Node]) -> Node | None:
    """Of a sum or product, the operand that decides whether two results differ."""
    name = word(node)
    varying = [arg for arg in operands if not view.is_constant(arg)]
    if len(varying) == 1 and not any(_is_vector(arg) for arg in operands if arg is not varying[0]):
        by = next((arg for arg in node.args if arg is not varying[0]), 0)
        low, high = view.ranges.of(by)
        return None if name == "mul" and low <= 0 <= high else varying[0]
    if len(varying) == 1 and name == "add" and not _is_vector(varying[0]):
        # a start, and a count from there
        return next(arg for arg in operands if arg is not varying[0])
    if name != "add" or len(varying) != 2:
        return None
    number = view.terms.number(node)
    for above in nodes_between((), node):  # (s // 16) * 16 + s % 16 is s
        if above is not node and view.terms.number(above) == number and _keeps_count(node, above):
            return above
    if not all(_keeps_count(node, arg) for arg in varying):
        return None
    # an entry of a table times the size of a block, a place in it
    for whole, place in (varying, varying[::-1]):
        size = _literal_factor(view, whole)
        low, high = view.ranges.of(place)
        is_within = size is not None and low >= 0 and high < size
        if is_within or view.terms.are_entry_and_place(whole, place):
            return _deciding(view, _operands(origin(whole, views_and_casts))[0], place)
    return None


def _is_vector(node: Node) -> bool:
    return not same(math.prod(shape_of(node)), 1)


def _literal_factor(view: View, node: Node) -> float | None:
    """The number by which the node is multiplied."""
    node = origin(node, views_and_casts)
    low, high = view.ranges.of(node.args[1]) if len(node.args) > 1 else (0.0, 1.0)
    if low != high or low < 0:
        return None
    if word(node) == "mul":
        return low or None
    return 2.0**low if word(node) == _SHIFT else None


def _are_distinct(view: View, node: Node, trusting: Ranges) -> bool:
    """Of what is made of literals; a count of symbolic length is read off at no one length. No
    narrower dtype on the way may round two numbers to one.
    """
    made = nodes_between((), node)
    if not all(_is_exact(step, trusting) for step in made if view.is_constant(step)):
        return False
    if has_symbols(shape_of(node)):
        counted = origin(node, _each_once)
        step = argument(counted, "step", 1)
        return word(counted) in COUNTS and isinstance(step, int) and step != 0
    program = Program([], made, view.binding)
    value = program.run([])[program.slot(node)]
    return isinstance(value, torch.Tensor) and value.unique().numel() == value.numel()
