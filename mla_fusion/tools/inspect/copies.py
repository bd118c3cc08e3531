"""Copies of whole caches: each cache followed from where it comes in to where the graph leaves it.

A cache is an input of the graph that is written (by a kernel, a scatter, ``copy_`` or Assign), or
returned with other rows in it. What lies between keeps the memory, makes a second tensor of it, or
only reads it (:mod:`mla_fusion.tools.inspect.operator_kinds`). Whatever makes a tensor as large as
the cache, or as its layer of a pool, copies it. An operator that is not known is named, and nothing
is said of that cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mla_fusion.fx.walk import reached
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value
from mla_fusion.tools.inspect import operator_kinds as kinds


@dataclass(frozen=True)
class Copy:
    """A cache that the graph copies at every run. ``bytes`` is None where the shape is not known.

    role  "cache", or "cache, to read it": the copy is on no way to an output
    """

    operator: str
    type: str
    what: str
    of: str
    role: str
    bytes: int | None


@dataclass
class Copies:
    """``copies``: in order; ``followed``: caches from input to output; ``not_followed``: the
    others, and the operators at which they were lost.
    """

    copies: list[Copy] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)
    not_followed: dict[str, str] = field(default_factory=dict)


def find_copies(dump: Dump) -> Copies:
    """Copies of whole caches; other copies are nobody's loss."""
    found = Copies()
    for cache in dump.of_type(*kinds.INPUTS):
        if cache.output.shape is not None and len(cache.output.shape) < 2:
            continue
        path = _Path(dump, cache, cache.output)
        layers = [dump.value(edge) for edge in path.targets]
        if layers and not any(_as_large(layer, cache.output) for layer in layers):
            path = _Path(dump, cache, min(layers, key=lambda layer: layer.elements or (0, [])))
        if not path.is_cache:
            continue
        if path.lost:
            found.not_followed[cache.name] = ", ".join(path.lost)
        else:
            found.followed.append(cache.name)
        leaving = {edge.producer for edge in reached(path.ends, path.sources)}
        parts = {name: "rebuilt" for name in path.parts if name in leaving}
        for name, what in (parts | path.copies).items():
            operator = dump.by_name[name]
            role = "cache" if name in leaving or what == "write back" else "cache, to read it"
            count = operator.output.bytes
            if operator.type == "Assign" or count is None or kinds.written(operator):
                count = cache.output.bytes
            found.copies.append(Copy(name, operator.type, what, cache.name, role, count))
    found.copies.sort(key=lambda copy: dump.by_name[copy.operator].line)
    return found


class _Path:
    """What becomes of one input.

    unit      what a copy is as large as: the input, or a layer of it
    is_cache  is it written, or returned with other rows?
    targets   what is written of it in place
    copies    operators that make another tensor of it, with how
    parts     operators that rebuild a part of it, which may be put back into the whole
    ends      values that are written back or returned
    lost      operators of which nobody knows whether they copy it
    holding   values that hold elements of it
    own       those in the input's own memory
    changed   those with rows that the input did not have
    """

    def __init__(self, dump: Dump, source: Operator, unit: Value) -> None:
        self.dump, self.unit, self.is_cache = dump, unit, False
        self.copies: dict[str, str] = {}
        self.parts, self.lost = list[str](), list[str]()
        self.targets, self.ends = list[Edge](), list[Edge]()
        self.holding, self.own, self.changed = {Edge(source.name)}, {Edge(source.name)}, set[Edge]()
        self._sources: dict[Edge, list[Edge]] = {}
        self._below = {*reached([source], lambda operator: dump.readers[operator.name])}
        for operator in dump.ordered:
            if operator in self._below:
                places = {place: edge for place, edge in operator.reads if edge in self.holding}
                if places:
                    self._take(operator, places)

    def sources(self, edge: Edge) -> list[Edge]:
        """The values with elements of the input that a value is computed from."""
        return self._sources.get(edge, [])

    def _take(self, operator: Operator, places: dict[int, Edge]) -> None:
        """``places``: at which it reads which values that hold elements of the input."""
        name, edges, kind = operator.name, [*places.values()], kinds.kind_of(operator)
        reads_all = any(_as_large(self.dump.value(edge), self.unit) is not False for edge in edges)
        sizes = [_as_large(value, self.unit) for value in operator.outputs]
        large = True if True in sizes else None if None in sizes or not sizes else False
        target, is_changed = places.get(0), not self.changed.isdisjoint(edges)
        if kernel := kinds.written(operator):
            self._write(operator, kernel, places)
        elif kind == "end":
            self.ends += edges
            self.is_cache |= reads_all and not (self.changed - self.own).isdisjoint(edges)
        elif kind in ("back", "in place", "view") or (kind == "part" and self.dump.is_fx):
            writes, is_own = kind in ("back", "in place"), target in self.own
            self.is_cache |= writes and is_own
            # copy_ and Assign: into the input itself, or of it into another
            value = operator.input(1)
            if kind == "back" and reads_all and value and not (target and value in self.own):
                self.copies.setdefault(name, "write back")
                self.ends.append(value)
            if target:
                self.targets += [target] * (kind == "in place" and is_own)
                self._hold(_results(operator), edges, is_own, writes or target in self.changed)
        elif kind in ("product", "read") or (kind == "transpose" and self._in_products(operator)):
            pass  # a product reads its operand transposed
        elif kind == "computed" or not kind or (kind == "gathered" and large is None):
            if reads_all and large is not False:
                if kind == "computed":
                    self.copies.setdefault(name, "computed from it")
                    self._sources[Edge(name)] = edges
                else:
                    self.lost.append(f"{operator.type} {name}")
        else:
            if large or (large is None and reads_all and kind != "part"):
                self.copies.setdefault(name, {"joined": "rebuilt"}.get(kind, kind))
            if kind == "joined" or (kind == "rebuilt" and target):
                gets_rows = self._gets_rows(operator, places)
                is_changed |= gets_rows
                self.parts += [name] * (gets_rows or kind == "rebuilt")
            self._hold(_results(operator), edges, False, is_changed)

    def _hold(
        self, results: Iterable[Edge], edges: list[Edge], is_own: bool, is_changed: bool
    ) -> None:
        """Each result holds elements of the input."""
        for result in results:
            self.holding.add(result)
            self._sources[result] = edges
            self.own |= {result} if is_own else set()
            self.changed |= {result} if is_changed else set()

    def _write(self, operator: Operator, kernel: Any, places: dict[int, Edge]) -> None:
        """By a kernel: those of its results that hold the input."""
        is_functional = "functional" in operator.type
        for result, place in kernel:
            if place not in places:
                continue
            is_own = places[place] in self.own and not is_functional
            self.targets.append(places[place])
            self.is_cache |= is_own
            if is_functional:
                self.copies.setdefault(operator.name, "rebuilt")
            picked = [
                Edge(reader.name)
                for reader in self.dump.readers[operator.name]
                if reader.type == "getitem" and reader.call[0][1] == result
            ]
            results = picked if self.dump.is_fx else [Edge(operator.name, result)]
            self._hold(results, [places[place]], is_own, True)

    def _in_products(self, operator: Operator) -> bool:
        readers = self.dump.readers[operator.name]
        return bool(readers) and all(kinds.kind_of(reader) == "product" for reader in readers)

    def _gets_rows(self, operator: Operator, places: dict[int, Edge]) -> bool:
        """Are the others of its operands rows that do not depend on the input? (A hidden state is
        made anew.)
        """
        edges = (edge for place, edge in operator.reads if place not in places)
        others = [self.dump.by_name[edge.producer] for edge in edges]
        rows = [other for other in others if other.type not in kinds.CONSTANTS]
        return bool(rows) and self._below.isdisjoint(rows)


def _results(operator: Operator) -> Iterator[Edge]:
    return (Edge(operator.name, index) for index in range(max(1, len(operator.outputs))))


def _as_large(value: Value, unit: Value) -> bool | None:
    """Has a value at least as many elements as the unit? None where the dump does not say."""
    mine, other = value.elements, unit.elements
    if mine is None or other is None or mine[1] != other[1]:
        return None
    return mine[0] >= other[0]
