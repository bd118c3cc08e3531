"""Integers as terms: positions, slots, block tables and masks are compared by what they are
computed from.

Two values are equal where their terms are: the same operators on the same inputs, after a short
list of exact rules. What no rule makes equal counts as different, whatever numbers a probe would
show. A float made of an integer is a term too.

    (s // b) * b + s % b = s            s - (s // b) * b = s % b              for b > 0
    s >> k = s // 2 ** k                s & (2 ** k - 1) = s % 2 ** k         s << k = s * 2 ** k
    s + 0 = s * 1 = s                   a + b = b + a, a * b = b * a
    reshapes, and casts that keep every number, change nothing

A symbolic size is a literal, of the number that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.indexed import Indexed
from mla_fusion.fx.kinds import argument, is_cast, is_reshape, one_dtype, word
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.ranges import Ranges, keeps_integers
from mla_fusion.fx.sizes import is_positive, is_symbolic
from mla_fusion.fx.walk import INPUTS, origin, reshapes
from mla_fusion.operators.forms import join_of, run_of
from mla_fusion.operators.known import ELEMENTWISE, value_of

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_WIDENINGS = {torch.bfloat16: (torch.float32, torch.float64), torch.float32: (torch.float64,)}

Term = tuple[Any, ...]


class Terms:
    """The terms of one view's nodes. A term stands for the elements in their order; the shape is
    the node's.
    """

    def __init__(self, view: Indexed, ranges: Ranges) -> None:
        self._view = view
        self._ranges = ranges
        self._numbers: dict[Term, int] = {}
        self._terms: list[Term] = []
        self.narrowed: dict[Node, None] = {}  # casts that are taken to keep every number
        self._of: dict[Node, int] = {}

    def same(self, a: Node, b: Node) -> bool:
        """Do the nodes hold the same elements in the same order (in whatever shapes)?"""
        return self.number(a) == self.number(b)

    def number(self, node: Node) -> int:
        """Equal for nodes of equal terms."""
        known = self._of.get(node)
        if known is None:
            for above in nodes_between(list(self._of), node):
                if above not in self._of:
                    self._of[above] = self._read(above)
            known = self._of[node]
        return known

    def term(self, node: Node) -> Term:
        return self._terms[self.number(node)]

    def quotient_and_remainder(self, block: Node, offset: Node, size: Any) -> int | None:
        """The number of ``s`` where the nodes are ``s // size`` and ``s % size``."""
        quotient, remainder = self.term(block), self.term(offset)
        fit = (
            quotient[:1] == ("floordiv",)
            and remainder[:1] == ("mod",)
            and quotient[1:] == remainder[1:]
        )
        return quotient[1] if fit and quotient[2] == self._view.binding.meaning(size) else None

    def are_entry_and_place(self, entry: Node, place: Node) -> bool:
        """Are the nodes ``e * b`` and ``s % b``, of which any two that differ have another sum?"""
        product, remainder = self.term(entry), self.term(place)
        if product[0] != "mul" or remainder[0] != "mod":
            return False
        return ("literal", remainder[2]) in (self._terms[part] for part in product[1:3])

    def are_apart(self, block: Node, place: Node) -> bool:
        """Are the nodes ``s // b`` and ``(s + k) % b``, either first, which tell any two different
        ``s`` apart?
        """
        quotient, remainder = self.term(block), self.term(place)
        if quotient[0] == "mod":
            quotient, remainder = remainder, quotient
        if quotient[0] != "floordiv" or remainder[0] != "mod" or quotient[2] != remainder[2]:
            return False
        shifted = self._terms[remainder[1]]
        parts = list(shifted[1:3]) if shifted[0] in ("add", "sub") else []
        by_literal = any(self._terms[part][0] == "literal" for part in parts)
        of = parts if shifted[0] == "add" else parts[:1]
        return bool(remainder[1] == quotient[1] or (by_literal and quotient[1] in of))

    # -- reading

    def _intern(self, term: Term) -> int:
        number = self._numbers.setdefault(term, len(self._terms))
        if number == len(self._terms):
            self._terms.append(term)
        return number

    def _read(self, node: Node) -> int:
        literal = self._literal(node)
        if literal is not None:
            return self._intern(("literal", literal))
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and (
            is_reshape(node) or (is_cast(node) and self._keeps_numbers(node, source))
        ):
            return self._given(source)
        part = _part_of_stack(node)
        if part is not None and part in self._of:
            return self._of[part]
        looked_up = _rows_of_table(node)
        if looked_up is not None:
            table, index = looked_up
            return self._intern(("rows", self._given(table), self._given(index), _shape(table)))
        if _is_integer(node):
            made = self._arithmetic(node, word(node))
            if made is not None:
                return made
        return self._call(node)

    def _given(self, node: Node) -> int:
        """The number of an operand; what a fill borrows its shape from is not walked."""
        known = self._of.get(node)
        return known if known is not None else self._intern(("node", self._view.number(node)))

    def _call(self, node: Node) -> int:
        """The same operator with the same literals, in one dtype, on inputs of the same terms and
        shapes.
        """
        call, inputs = self._view.call(node)
        shapes = [_shape(given) for given in inputs]
        aligned = word(node) in ELEMENTWISE and len(set(shapes)) == 1
        named = tuple(
            (self._given(given), None if aligned else shape)
            for given, shape in zip(inputs, shapes, strict=True)
        )
        return self._intern(("call", call, _width(node), *named))

    def _arithmetic(self, node: Node, name: str) -> int | None:
        """Sums, products, quotients and remainders of integers, where nothing is broadcast but a
        single number.
        """
        if len(node.args) < 2:
            return None
        left, right = (self._operand(node, value) for value in node.args[:2])
        if left is None or right is None:
            return None
        (a, first), (b, second) = left, right
        if name == "add" and argument(node, "alpha", 1) == 1:
            return self._sum(a, first, b, second, node)
        if name == "sub" and argument(node, "alpha", 1) == 1:
            return self._difference(a, b, second, node)
        if name == "mul":
            return self._product(a, first, b, second, node)
        if name == _SHIFT and isinstance(second, int) and 0 <= second < 62:
            return self._product(
                a, first, self._intern(("literal", 1 << second)), 1 << second, node
            )
        if second is None or not is_positive(second):
            return None
        if isinstance(second, int):
            if name == "bitwise_right_shift" and second < 62:
                return self._intern(("floordiv", a, 1 << second))
            if name == "bitwise_and" and second & (second + 1) == 0:
                return self._intern(("mod", a, second + 1))
        if name == "floor_divide" or self._floors(node, name):
            return self._intern(("floordiv", a, second))
        if name == "remainder" or (name == "fmod" and self._ranges.of(node.args[0])[0] >= 0):
            return self._intern(("mod", a, second))
        return None

    def _floors(self, node: Node, name: str) -> bool:
        if name != "div":
            return False
        mode = argument(node, "rounding_mode")
        return mode == "floor" or (mode == "trunc" and self._ranges.of(node.args[0])[0] >= 0)

    def _operand(self, node: Node, value: Any) -> tuple[int, Any] | None:
        """The number of an operand's term, and its value where it is a literal or a size; None
        where it is broadcast.
        """
        if isinstance(value, bool) or not isinstance(value, (int, Node)):
            return None
        if isinstance(value, int):
            return self._intern(("literal", value)), value
        meaning = value_of(value)
        if isinstance(meaning, (int, torch.SymInt)):
            meaning = self._view.binding.meaning(meaning)
            return self._intern(("literal", meaning)), meaning
        number = self._of.get(value)
        if number is None or not _is_integer(value):
            return None
        term = self._terms[number]
        if term[0] == "literal":
            return number, term[1]
        return (number, None) if _count(value) == _count(node) else None

    def _sum(self, a: int, first: Any, b: int, second: Any, node: Node) -> int:
        if second == 0:
            return a
        if first == 0:
            return b
        for whole, part in ((a, b), (b, a)):
            remainder = self._terms[part]
            if remainder[0] == "mod" and self._is_multiple(whole, remainder[1], remainder[2]):
                return remainder[1]
        return self._intern(("add", *sorted((a, b)), _width(node)))

    def _difference(self, a: int, b: int, second: Any, node: Node) -> int:
        term = self._terms[b]
        if second == 0:
            return a
        if term[0] == "mul":
            for quotient, size in ((term[1], term[2]), (term[2], term[1])):
                by = self._terms[size]
                if by[0] == "literal" and self._terms[quotient] == ("floordiv", a, by[1]):
                    return self._intern(("mod", a, by[1]))
        return self._intern(("sub", a, b, _width(node)))

    def _is_multiple(self, number: int, of: int, size: int) -> bool:
        """Is it ``(of // size) * size``?"""
        term = self._terms[number]
        if term[0] != "mul":
            return False
        parts = {self._terms[part] for part in term[1:3]}
        return parts == {("floordiv", of, size), ("literal", size)}

    def _product(self, a: int, first: Any, b: int, second: Any, node: Node) -> int:
        if second == 1:
            return a
        if first == 1:
            return b
        return self._intern(("mul", *sorted((a, b)), _width(node)))

    def _keeps_numbers(self, node: Node, source: Node) -> bool:
        """Does the cast keep every number that its input can be?"""
        dtype, before = one_dtype(node), one_dtype(source)
        if dtype is None or before is None:
            return False
        if dtype == before or dtype in _WIDENINGS.get(before, ()):
            return True
        if dtype not in _INTEGERS or before not in _INTEGERS:
            return False
        if keeps_integers(dtype, before, self._ranges.of(source)):
            return True
        if dtype == torch.int32 and _is_input(source):
            self.narrowed[node] = None  # positions, slots and entries of tables are below 2 ** 31
            return True
        return False

    def _literal(self, node: Node) -> int | None:
        """The one number that a node of literals holds."""
        value = value_of(node)
        if isinstance(value, int) and not isinstance(value, bool) and not is_symbolic(value):
            return value
        if not _is_integer(node) or not self._view.is_constant(node) or _count(node) != 1:
            return None
        program = Program([], nodes_between((), node), self._view.binding, exact=True)
        found = program.run([])[program.slot(node)]
        return (
            int(found.reshape(()))
            if isinstance(found, torch.Tensor) and found.numel() == 1
            else None
        )


def _part_of_stack(node: Node) -> Node | None:
    """``stack([a, b])[0]`` is ``a``."""
    taken = run_of(node)
    stack = join_of(taken.whole, "stack") if taken is not None and taken.drops else None
    if taken is None or stack is None or taken.axis != stack[0]:
        return None
    part = stack[1][taken.start] if isinstance(taken.start, int) else None
    return part if isinstance(part, Node) else None


def _rows_of_table(node: Node) -> tuple[Node, Node] | None:
    """The table and the index of ``table[index]``, however it is written: whole rows, by one tensor
    of integers.
    """
    name = word(node)
    if name == "index" and isinstance(node.args[1], (list, tuple)):
        table, index = node.args[0], node.args[1][0] if len(node.args[1]) == 1 else None
    elif name == "embedding":
        table, index = node.args[:2]
    elif name == "index_select" and argument(node, "dim") == 0:
        table, index = node.args[0], argument(node, "index")
    else:
        return None
    if not isinstance(table, Node) or not isinstance(index, Node) or not _is_integer(index):
        return None
    return table, index


_SHIFT = "bitwise_left_shift"


def _is_integer(node: Node) -> bool:
    return one_dtype(node) in _INTEGERS


def _is_input(node: Node) -> bool:
    return origin(node, reshapes).op in INPUTS


def _width(node: Node) -> str:
    """Narrow integers wrap around where wide ones do not, and narrow floats round."""
    return str(getattr(value_of(node), "dtype", ""))


def _shape(node: Node) -> tuple[str, ...]:
    value = value_of(node)
    return tuple(map(str, value.shape)) if isinstance(value, torch.Tensor) else ()


def _count(node: Node) -> Any:
    """How many elements, comparable where symbolic."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    count: Any = 1
    symbolic: Sequence[Any] = sorted((size for size in value.shape if is_symbolic(size)), key=str)
    for size in value.shape:
        count = count if is_symbolic(size) else count * int(size)
    return (count, *map(str, symbolic)) if symbolic else count
