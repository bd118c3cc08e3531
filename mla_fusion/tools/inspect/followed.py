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

from mla_fusion.fx.walk import reached
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value
from mla_fusion.tools.dumps.model import Dim, Shape
from mla_fusion.tools.inspect import operator_kinds as kinds
from mla_fusion.tools.inspect.operator_kinds import plain

Order = tuple[int, ...] | None  # of a value's axes in memory


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
    order: Order = None


Holders = dict[Edge, Held]


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
        self.unit = source.output
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
        self._parts: list[str] = []
        places, seen = self.dump.places, {self.source.name}
        todo: list[tuple[int, str]] = []

        def push(name: str) -> None:
            for reader, _ in self.dump.readers[name]:
                if reader.name not in seen:
                    seen.add(reader.name)
                    heappush(todo, (places[reader.name], reader.name))

        push(self.source.name)
        while todo:
            name = heappop(todo)[1]
            if found := self._results_of(self.dump.by_name[name]):
                self._held |= found
                push(name)
        self.visited = len(seen)
        behind_ends = reached(self._ends, lambda edge: self._made_of.get(edge, ()))
        self.leaving = {edge.producer for edge in behind_ends}
        for name in self._parts:  # rebuilt, and then put back into the whole
            if name in self.leaving:
                self.copies.setdefault(name, "rebuilt")

    # -- one operator

    def _results_of(self, operator: Operator) -> Holders:
        """Those of its results that hold the input."""
        self._operator = operator
        self._edges = {  # that hold the input, by place
            place: edge for place, edge in operator.reads if edge in self._held
        }
        self._given = {place: self._held[edge] for place, edge in self._edges.items()}
        if not self._given:
            return {}
        kind, first = plain(operator.type), self._given.get(0)
        if kernel := kinds.written(operator):
            return self._kernel(kernel)
        if kind in kinds.ENDS:
            self._ends += self._edges.values()
            given = self._given.values()
            self.is_cache |= any(held.whole and held.changed and not held.own for held in given)
            return {}
        if kind in kinds.BACK:
            return self._back()
        if kinds.is_in_place(operator):
            if first is None:
                return {}
            if first.own:
                self.is_cache = True
                self._note_target(kind)
            return self._all(replace(first, changed=True))
        if first is not None and kind == "getitem":
            return self._picked(first)
        if first is not None and self._is_view(kind, first):
            return self._viewed(kind, first)
        if kinds.is_reader(kind):
            return {}
        if kind in kinds.PARTS:
            return self._moved("sliced")  # of a GE graph: in memory of its own
        if kind in kinds.COPIES:
            return self._moved(kinds.COPIES[kind])
        if kind in kinds.REBUILT or kind in kinds.JOINED or kind == "aten.copy":
            if first is not None:
                self._note_target(kind)
            may_be_it = kind in kinds.JOINED or (first is not None and kind in kinds.REBUILT)
            return self._moved("rebuilt", may_be_it and self._gets_rows())
        return self._other(kind)

    def _note_target(self, kind: str) -> None:
        if kinds.writes_by_index(kind):
            self._targets.append(self._edges[0])

    def _is_view(self, kind: str, held: Held) -> bool:
        if kind in kinds.VIEWS or not self.dump.is_fx:
            return kind in kinds.VIEWS
        if kind in kinds.RESHAPES:
            before, after = (
                self.dump.value(edge).shape for edge in (self._edges[0], Edge(self._operator.name))
            )
            same = before is not None and after is not None and _real(before) == _real(after)
            return held.order is None or (same and kind != "aten.contiguous")
        return kind in kinds.PARTS or kind in kinds.TURNED

    def _viewed(self, kind: str, held: Held) -> Holders:
        if kind in kinds.TURNED:
            held = replace(held, order=self._order(kind, held.order))
        elif kind in kinds.PARTS:
            if self._as_large() is not True:
                held = replace(held, whole=False, order=())
        elif held.order is not None:
            held = replace(held, order=())
        return self._all(held)

    def _order(self, kind: str, before: Order) -> Order:
        """The axes of the value, where a permutation is known and moves more than axes of one
        element.
        """
        operator = self._operator
        shape = self.dump.value(self._edges[0]).shape
        axes = list(range(len(shape or ())) if before is None else before)
        if shape is None or not axes or len(axes) != len(shape):  # a dump may say anything
            return ()
        rank = range(-len(axes), len(axes))
        match kind, operator.call[0][1:]:
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

    def _picked(self, held: Held) -> Holders:
        edge = self._edges[0]
        above = self.dump.producer(edge)
        kernel = kinds.written(above)
        caches = [result for result, place in kernel if above.inputs[place] in self._held]
        picked = kinds.result_of_getitem(self._operator, edge)
        return self._all(held) if not kernel or picked in caches else {}

    def _kernel(self, kernel: list[tuple[int | None, int]]) -> Holders:
        name, functional = self._operator.name, "functional" in self._operator.type
        found = {}
        for result, place in kernel:
            if place not in self._given:
                continue
            held = replace(self._given[place], changed=True)
            if functional:
                held = replace(held, own=False, order=None)
                self.copies.setdefault(name, "rebuilt")
            self.is_cache |= held.own
            self._targets.append(self._edges[place])
            if result is not None:
                edge = Edge(name, 0 if self.dump.is_fx else result)
                found[edge] = held
                self._made_of[edge] = [self._edges[place]]
        return found

    def _back(self) -> Holders:
        """``copy_`` and Assign: into the input itself, or of it into another."""
        nothing = Held(whole=False, own=False)
        target, value = (self._given.get(place, nothing) for place in range(2))
        self.is_cache |= target.own
        written = target.own and target.whole and not value.own
        if written if 0 in self._given else value.whole:
            self.copies.setdefault(self._operator.name, "write back")
            self._ends += [edge for place, edge in self._operator.reads if place == 1]
        return self._all(replace(target, changed=True)) if 0 in self._given else {}

    def _moved(self, how: str, changes: bool = False) -> Holders:
        """Another tensor of the same elements, and perhaps others: a copy where it is as large as
        the cache.
        """
        operator, large = self._operator, self._as_large()
        of_whole = any(held.whole for held in self._given.values())
        if large is None and how in ("sliced", "gathered"):
            large = False
            if how == "gathered" and of_whole:
                self.lost.append(f"{operator.type} {operator.name}")
        whole = of_whole if large is None else large
        if whole:
            self.copies.setdefault(operator.name, how)
        elif plain(operator.type) in kinds.REBUILT or changes:
            self._parts.append(operator.name)
        changed = changes or any(held.changed for held in self._given.values())
        return self._all(Held(whole, own=False, changed=changed))

    def _gets_rows(self) -> bool:
        """Are the others of its operands rows that do not depend on the input? (A hidden state is
        made anew.)
        """
        others = [
            edge
            for place, edge in self._operator.reads
            if place not in self._given and self.dump.producer(edge).type not in kinds.CONSTANTS
        ]
        values = map(self.dump.value, others)
        if not others or any(_as_large(self.unit, value) is False for value in values):
            return False  # what is put into another, larger one
        return not any(edge.producer in self._below for edge in others)

    @cached_property
    def _below(self) -> set[str]:
        """The input, and the operators that depend on it."""
        readers = self.dump.readers
        return {*reached([self.source.name], lambda name: [one.name for one, _ in readers[name]])}

    def _other(self, kind: str) -> Holders:
        """What computes other numbers of it, and what is not known."""
        name, whole = self._operator.name, any(held.whole for held in self._given.values())
        if not whole or self._as_large() is False:
            return {}
        if kind.removesuffix("_") in kinds.COMPUTES:
            self.copies.setdefault(name, "computed from it")
            self._made_of[Edge(name)] = list(self._edges.values())
            return {}
        # does one result look like the input as an operator in place gives it out?
        if any(held.own for held in self._given.values()) and any(
            (value.bytes, value.dtype) == (self.unit.bytes, self.unit.dtype)
            for value in self._operator.outputs
        ):
            self.is_cache |= not kinds.is_pure(self._operator)
        self.lost.append(f"{self._operator.type} {name}")
        return {}

    def _as_large(self) -> bool | None:
        """Has a result as many elements as the cache? None where the dump does not say."""
        answers = [_as_large(value, self.unit) for value in self._operator.outputs]
        return True if True in answers else None if None in answers or not answers else False

    def _all(self, held: Held) -> Holders:
        """Each result holds this of the input."""
        count = max(1, len(self._operator.outputs))
        edges = [Edge(self._operator.name, index) for index in range(count)]
        self._made_of |= {edge: list(self._edges.values()) for edge in edges}
        return dict.fromkeys(edges, held)


def _real(shape: Shape) -> list[Dim]:
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
    return True if not theirs - symbols and mine >= others else None
