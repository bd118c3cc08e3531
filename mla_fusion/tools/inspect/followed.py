"""One input of a graph, followed through every value that holds it to where the graph ends.

A view keeps the memory of what it reads, a kernel or a scatter writes into it, attention and
products read it. Whatever else makes a value as large as the cache copies it; where the size of
that value is not known, and the operator neither, it is named.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from math import prod

from mla_fusion.tools.dumps import Dump, Edge, Operator, Value
from mla_fusion.tools.dumps.model import Dim
from mla_fusion.tools.inspect import operator_kinds as kinds
from mla_fusion.tools.inspect.operator_kinds import plain


@dataclass(frozen=True)
class Held:
    """What a value holds of the input.

    whole    as many elements as the cache has: all of the input, or a layer of a pool
    own      in the input's own memory
    changed  with rows that the input did not have
    order    of its axes in memory, if that is known: None for theirs, () for an unknown one
    """

    whole: bool = True
    own: bool = True
    changed: bool = False
    order: tuple[int, ...] | None = None


class Followed:
    """What becomes of one input.

    is_cache  is it written, or returned with other rows?
    copies    operators that make another tensor of it, with how
    leaving   those of them whose tensor is what is written back or returned
    lost      operators of which nobody knows whether they copy it
    visited   how many operators were looked at
    """

    def __init__(self, dump: Dump, source: Operator) -> None:
        self.dump, self.source = dump, source
        self.unit = source.outputs[0] if source.outputs else Value()
        self._follow()
        layers = [dump.value(edge) for edge in self._targets if not self._held[edge].whole]
        if layers and all(_as_large(self.unit, layer) for layer in layers):
            self.unit = min(layers, key=lambda layer: _size(layer)[0])
            self._follow()

    def _follow(self) -> None:
        self.is_cache = False
        self.copies: dict[str, str] = {}
        self.lost: list[str] = []
        self._held = {Edge(self.source.name): Held()}
        self._made_of: dict[Edge, list[Edge]] = {}
        self._targets: list[Edge] = []  # what is written by an index, or by a kernel
        self._ends: list[Edge] = []
        self._parts: list[Operator] = []
        place, seen = _places(self.dump), {self.source.name}
        todo: list[tuple[int, str]] = []

        def push(name: str) -> None:
            for reader, _ in self.dump.readers[name]:
                if reader.name not in seen:
                    seen.add(reader.name)
                    heappush(todo, (place[reader.name], reader.name))

        push(self.source.name)
        while todo:
            operator = self.dump.by_name[heappop(todo)[1]]
            for edge, held in self._through(operator).items():
                self._held[edge] = held
                push(operator.name)
        self.visited = len(seen)
        self.leaving = self._behind_ends()
        for operator in self._parts:  # rebuilt, and then put back into the whole
            if operator.name in self.leaving:
                self._copied(operator, "rebuilt")

    def _behind_ends(self) -> set[str]:
        found: set[str] = set()
        stack, seen = list(self._ends), set(self._ends)
        while stack:
            edge = stack.pop()
            found.add(edge.producer)
            more = [one for one in self._made_of.get(edge, ()) if one not in seen]
            seen.update(more)
            stack += more
        return found

    # -- one operator

    def _through(self, operator: Operator) -> dict[Edge, Held]:
        """What it does with the values that hold the input; which of its results hold it."""
        given = {
            i: self._held[edge] for i, edge in enumerate(operator.inputs) if edge in self._held
        }
        if not given:
            return {}
        kind, first = plain(operator.type), given.get(0)
        if kernel := kinds.written(self.dump, operator):
            return self._kernel(operator, given, kernel)
        if kind in kinds.ENDS:
            for place, held in given.items():
                self._leaves(operator.inputs[place], held)
            return {}
        if kind in kinds.BACK:
            return self._back(operator, given)
        if kinds.is_in_place(self.dump, operator):
            if first is None:
                return {}
            if first.own:
                self.is_cache = True
                if kinds.writes_by_index(kind):
                    self._targets += [edge for edge in operator.inputs[:1] if edge is not None]
            return self._results(operator, replace(first, changed=True), given)
        if kind == "getitem" and first is not None:
            return self._picked(operator, first)
        if first is not None and self._is_view(operator, kind):
            return self._viewed(operator, kind, first)
        if kinds.is_reader(kind):
            return {}
        if kind in kinds.PARTS:
            return self._moved(operator, given, "sliced")  # of a GE graph: in memory of its own
        if kind in kinds.COPIES:
            return self._moved(operator, given, kinds.COPIES[kind])
        if kind in kinds.REBUILT or kind in kinds.JOINED or kind == "aten.copy":
            if kinds.writes_by_index(kind) and first is not None:
                self._targets += [edge for edge in operator.inputs[:1] if edge is not None]
            may_be_it = kind in kinds.JOINED or (first is not None and kind in kinds.REBUILT)
            changes = may_be_it and self._gets_rows(operator, given)
            return self._moved(operator, given, "rebuilt", changes)
        return self._other(operator, kind, given)

    def _is_view(self, operator: Operator, kind: str) -> bool:
        if kind in kinds.VIEWS:
            return True
        if not self.dump.is_fx:
            return False
        if kind in kinds.RESHAPES:
            before, after = (
                self.dump.value(edge).shape for edge in (operator.inputs[0], Edge(operator.name))
            )
            same = before is not None and after is not None and _real(before) == _real(after)
            held = self._held[operator.inputs[0]]  # type: ignore[index]  # asked of held ones
            return held.order is None or (same and kind != "aten.contiguous")
        return kind in kinds.PARTS or kind in kinds.TURNED

    def _viewed(self, operator: Operator, kind: str, held: Held) -> dict[Edge, Held]:
        if kind in kinds.TURNED:
            held = replace(held, order=self._order(operator, kind, held.order))
        elif kind in kinds.PARTS:
            smaller = self._as_large(operator) is not True
            held = replace(
                held, whole=held.whole and not smaller, order=() if smaller else held.order
            )
        elif held.order is not None:
            held = replace(held, order=())
        return self._results(operator, held, {0: held})

    def _order(
        self, operator: Operator, kind: str, before: tuple[int, ...] | None
    ) -> tuple[int, ...] | None:
        """The axes of the value, where a permutation is known and moves more than axes of one
        element.
        """
        shape = self.dump.value(operator.inputs[0]).shape
        args = operator.call[0] if operator.call is not None else ()
        axes = list(range(len(shape or ())) if before is None else before)
        if shape is None or not axes or len(axes) != len(shape):  # a dump may say anything
            return ()
        rank = range(-len(axes), len(axes))
        match kind, args[1:]:
            case "aten.t", ():
                axes.reverse()
            case "aten.transpose", (int(one), int(other)) if one in rank and other in rank:
                axes[one], axes[other] = axes[other], axes[one]
            case "aten.permute", (list() | tuple() as given,) if all(at in rank for at in given):
                axes = [axes[at] for at in given]
            case "aten.expand", _:
                return before if self.dump.value(Edge(operator.name)).shape == shape else ()
            case _:
                return ()
        shape_before = dict(zip(before or range(len(shape)), shape, strict=True))
        real = [axis for axis in axes if shape_before.get(axis) != 1]
        return tuple(axes) if real != sorted(real) else None

    def _picked(self, operator: Operator, held: Held) -> dict[Edge, Held]:
        above = self.dump.producer(operator.inputs[0])  # type: ignore[arg-type]  # it is held
        kernel = kinds.written(self.dump, above)
        if kernel and kinds.result_of_getitem(operator, operator.inputs[0]) not in [
            result for result, place in kernel if above.inputs[place] in self._held
        ]:
            return {}
        return self._results(operator, held, {0: held})

    def _kernel(
        self, operator: Operator, given: dict[int, Held], kernel: list[tuple[int | None, int]]
    ) -> dict[Edge, Held]:
        functional, found = "functional" in operator.type, {}
        for result, place in kernel:
            if place in given:
                self.is_cache = self.is_cache or (given[place].own and not functional)
                held = replace(given[place], changed=True)
                if functional:
                    held = replace(held, own=False, order=None)
                    self._copied(operator, "rebuilt")
                self._targets += [
                    edge for edge in operator.inputs[place : place + 1] if edge is not None
                ]
                if result is not None:
                    edge = Edge(operator.name, 0 if self.dump.is_fx else result)
                    found[edge] = held
                    self._made_of[edge] = [operator.inputs[place]]  # type: ignore[list-item]
        return found

    def _back(self, operator: Operator, given: dict[int, Held]) -> dict[Edge, Held]:
        """``copy_`` and Assign: into the input itself, or of it into another."""
        target, value = given.get(0), given.get(1)
        if target is not None and target.own:
            self.is_cache = True
            if target.whole and not (value is not None and value.own):
                self.copies.setdefault(operator.name, "write back")
                self._ends += [edge for edge in operator.inputs[1:2] if edge is not None]
        elif value is not None and value.whole and target is None:
            self.copies.setdefault(operator.name, "write back")
            self._ends += [edge for edge in operator.inputs[1:2] if edge is not None]
        return (
            self._results(operator, replace(target, changed=True), given)
            if target is not None
            else {}
        )

    def _leaves(self, edge: Edge | None, held: Held) -> None:
        if edge is not None:
            self.is_cache = self.is_cache or (held.whole and held.changed and not held.own)
            self._ends.append(edge)

    def _moved(
        self, operator: Operator, given: dict[int, Held], how: str, changes: bool = False
    ) -> dict[Edge, Held]:
        """Another tensor of the same elements, and perhaps others: a copy where it is as large as
        the cache.
        """
        large, of_whole = self._as_large(operator), any(held.whole for held in given.values())
        if large is None and how in ("sliced", "gathered"):
            large = False
            self.lost += (
                [f"{operator.type} {operator.name}"] if how == "gathered" and of_whole else []
            )
        whole = large is True or (large is None and of_whole)
        if whole:
            self._copied(operator, how)
        elif plain(operator.type) in kinds.REBUILT or changes:
            self._parts.append(operator)
        changed = changes or any(held.changed for held in given.values())
        return self._results(operator, Held(whole, own=False, changed=changed), given)

    def _gets_rows(self, operator: Operator, given: dict[int, Held]) -> bool:
        """Are the others of its operands rows that do not depend on the input? (A hidden state is
        made anew.)
        """
        others = [
            edge for i, edge in enumerate(operator.inputs) if i not in given and edge is not None
        ]
        others = [edge for edge in others if self.dump.producer(edge).type not in kinds.CONSTANTS]
        values = [self.dump.value(edge) for edge in others]
        if not others or any(_as_large(self.unit, value) is False for value in values):
            return False  # what is put into another, larger one
        return not any(edge.producer in self._below for edge in others)

    @cached_property
    def _below(self) -> set[str]:
        """The operators that depend on the input."""
        found: set[str] = set()
        stack = [self.source.name]
        while stack:
            readers = {reader.name for reader, _ in self.dump.readers[stack.pop()]} - found
            found |= readers
            stack += readers
        return found

    def _other(self, operator: Operator, kind: str, given: dict[int, Held]) -> dict[Edge, Held]:
        """What computes other numbers of it, and what is not known."""
        if not any(held.whole for held in given.values()):
            return {}
        large = self._as_large(operator)
        if kind.removesuffix("_") in kinds.COMPUTES:
            if large is not False:
                self._copied(operator, "computed from it")
                self._made_of[Edge(operator.name)] = [operator.inputs[place] for place in given]  # type: ignore[misc]
            return {}
        if large is not False:
            if any(held.own for held in given.values()) and self._may_write(operator):
                self.is_cache = True
            self.lost.append(f"{operator.type} {operator.name}")
        return {}

    def _may_write(self, operator: Operator) -> bool:
        """Does one result look like the input as an operator in place gives it out?"""
        if kinds.is_pure(self.dump, operator):
            return False
        return any(
            (value.bytes, value.dtype) == (self.unit.bytes, self.unit.dtype)
            for value in operator.outputs
        )

    def _as_large(self, operator: Operator) -> bool | None:
        """Has a result as many elements as the cache? None where the dump does not say."""
        if not operator.outputs:
            return None
        answers = [_as_large(value, self.unit) for value in operator.outputs]
        return True if True in answers else None if None in answers else False

    def _copied(self, operator: Operator, how: str) -> None:
        self.copies.setdefault(operator.name, how)

    def _results(self, operator: Operator, held: Held, given: dict[int, Held]) -> dict[Edge, Held]:
        edges = [Edge(operator.name, index) for index in range(max(1, len(operator.outputs)))]
        for edge in edges:
            self._made_of[edge] = [operator.inputs[place] for place in given]  # type: ignore[misc]
        return dict.fromkeys(edges, held)


def _places(dump: Dump) -> dict[str, int]:
    """Where each operator comes after all that it reads; a damaged dump, with circles, as far as
    that goes.
    """
    known: dict[str, int] | None = vars(dump).get("_places")
    if known is not None:
        return known
    missing = {one.name: sum(edge is not None for edge in one.inputs) for one in dump.operators}
    ready = [name for name, count in missing.items() if not count]
    found: dict[str, int] = {}
    while ready:
        name = ready.pop()
        found[name] = len(found)
        for reader, _ in dump.readers[name]:
            missing[reader.name] -= 1
            if not missing[reader.name]:
                ready.append(reader.name)
    for name in missing:
        found.setdefault(name, len(found))
    vars(dump)["_places"] = found
    return found


def _real(shape: tuple[Dim, ...]) -> list[Dim]:
    """Sizes of the axes that have more than one element."""
    return [size for size in shape if size != 1]


def _size(value: Value) -> tuple[int, Counter[str]]:
    """The product of the known sizes, and the symbols beside it."""
    shape = value.shape or ()
    symbols = Counter(str(dim) for dim in shape if not isinstance(dim, int) or dim < 0)
    return prod(dim for dim in shape if isinstance(dim, int) and dim >= 0), symbols


def _as_large(value: Value, other: Value) -> bool | None:
    """Has a value at least as many elements as another, whatever the symbols are? None where nobody
    can say.
    """
    if value.shape is None or other.shape is None:
        return None
    (mine, symbols), (others, theirs) = _size(value), _size(other)
    if "-1" in symbols or "-1" in theirs:
        return None
    if symbols == theirs:
        return mine >= others
    if not theirs - symbols and mine >= others:
        return True
    return None
