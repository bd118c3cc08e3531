"""Finds copies of whole caches, on the way of each cache from its input to the graph's results.

A cache is an input of the graph that is written (by a kernel, a scatter, ``copy_`` or Assign), or
returned with other rows in it. An operator on the way keeps its memory, makes a second tensor of
it, or only reads it (:mod:`mla_fusion.tools.inspect.operator_kinds`). An operator that makes a
tensor as large as the cache, or as its layer of a pool, copies it. An unknown operator is named,
and nothing is said of that cache.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from mla_fusion.fx.walk import reached
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value
from mla_fusion.tools.inspect import operator_kinds as kinds


@dataclass(frozen=True)
class Copy:
    """A cache that the graph copies at every run.

    role   "cache", or "cache, to read it" if the copy does not reach a result
    bytes  None if the shape is not known
    """

    operator: str
    type: str
    what: str
    of: str
    role: str
    bytes: int | None


@dataclass
class Copies:
    """The copies of a graph, in order.

    followed      caches that were followed from input to result
    not_followed  the other caches, with the operators that are not known
    """

    copies: list[Copy] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)
    not_followed: dict[str, str] = field(default_factory=dict)


def find_copies(dump: Dump) -> Copies:
    """Returns the copies of whole caches in a graph."""
    result = Copies()
    for cache in dump.of_type(*kinds.INPUTS):
        if cache.output.shape is not None and len(cache.output.shape) < 2:
            continue
        path = _Path(dump, cache, cache.output)
        layers = [dump.value(edge) for edge in path.targets]
        if layers and not any(_is_as_large(layer, cache.output) for layer in layers):
            path = _Path(dump, cache, min(layers, key=lambda layer: layer.elements or (0, [])))
        if not path.is_cache:
            continue
        if path.unknown:
            result.not_followed[cache.name] = ", ".join(path.unknown)
        else:
            result.followed.append(cache.name)
        leaving = {edge.producer for edge in reached(path.ends, path.sources.__getitem__)}
        parts = {name: "rebuilt" for name in path.parts if name in leaving}
        for name, what in (parts | path.copies).items():
            operator = dump.by_name[name]
            role = "cache" if name in leaving or what == "write back" else "cache, to read it"
            size = operator.output.bytes
            if operator.type == "Assign" or size is None or kinds.written(operator):
                size = cache.output.bytes
            result.copies.append(Copy(name, operator.type, what, cache.name, role, size))
    result.copies.sort(key=lambda copy: dump.by_name[copy.operator].line)
    return result


class _Path:
    """What operators do with an input of the graph.

    unit      a copy is as large as this: the input, or a layer of it
    is_cache  True if the input is written, or returned with other rows
    targets   values with elements of the input that are written in place
    copies    operators that make another tensor of it, with how
    parts     operators that rebuild a part of it, which may be put back into the whole
    ends      values that are written back or returned
    unknown   operators of which it is not known whether they copy the input
    sources   for each value, those with elements of the input that it is computed from
    holding   values that hold elements of the input
    own       those of them in the input's own memory
    changed   those of them with rows that the input did not have
    """

    def __init__(self, dump: Dump, source: Operator, unit: Value) -> None:
        self.dump, self.unit, self.is_cache = dump, unit, False
        self.copies: dict[str, str] = {}
        self.parts, self.unknown = list[str](), list[str]()
        self.targets, self.ends = list[Edge](), list[Edge]()
        self.holding, self.own, self.changed = {Edge(source.name)}, {Edge(source.name)}, set[Edge]()
        self.sources = defaultdict[Edge, list[Edge]](list)
        self._below = {*reached([source], lambda operator: dump.readers[operator.name])}
        for operator in dump.ordered:
            places = {place: edge for place, edge in operator.reads if edge in self.holding}
            if places:
                self._take(operator, places)

    def _take(self, operator: Operator, places: dict[int, Edge]) -> None:
        """Adds what one operator does.

        places  the inputs that hold elements of the input, by place
        """
        name, edges, kind = operator.name, [*places.values()], kinds.kind_of(operator)
        reads_all = any(
            _is_as_large(self.dump.value(edge), self.unit) is not False for edge in edges
        )
        sizes = [_is_as_large(value, self.unit) for value in operator.outputs]
        is_large = True if True in sizes else None if None in sizes or not sizes else False
        target, is_changed = places.get(0), not self.changed.isdisjoint(edges)
        results = [Edge(name, index) for index in range(max(1, len(operator.outputs)))]
        if kind == "transpose" and self._in_products(operator):
            kind = "read"  # a product reads its operand transposed
        elif kind == "part" and self.dump.is_fx:
            kind = "view"
        elif kind == "gathered" and is_large is None:
            kind = ""
        if kernel := kinds.written(operator):
            self._write(operator, kernel, places)
        elif kind == "end":
            self.ends += edges
            self.is_cache |= reads_all and not (self.changed - self.own).isdisjoint(edges)
        elif kind in ("back", "in place", "view"):
            writes, is_own = kind in ("back", "in place"), target in self.own
            self.is_cache |= writes and is_own
            # copy_ and Assign: into the input itself, or of it into another
            value = operator.input(1)
            if kind == "back" and reads_all and value and not (target and value in self.own):
                self.copies.setdefault(name, "write back")
                self.ends.append(value)
            if target:
                self.targets += [target] * (kind == "in place" and is_own)
                self._hold(results, edges, is_own, writes or target in self.changed)
        elif kind in ("computed", ""):
            if not reads_all or is_large is False:
                return
            if kind == "computed":
                self.copies.setdefault(name, "computed from it")
                self.sources[Edge(name)] = edges
            else:
                self.unknown.append(f"{operator.type} {name}")
        elif kind not in ("product", "read"):
            if is_large or (is_large is None and reads_all and kind != "part"):
                self.copies.setdefault(name, "rebuilt" if kind == "joined" else kind)
            if kind == "joined" or (kind == "rebuilt" and target):
                gets_rows = self._gets_rows(operator, places)
                is_changed |= gets_rows
                self.parts += [name] * (gets_rows or kind == "rebuilt")
            self._hold(results, edges, False, is_changed)

    def _hold(self, results: list[Edge], edges: list[Edge], is_own: bool, is_changed: bool) -> None:
        """Adds results that hold elements of the input, computed from ``edges``."""
        self.holding.update(results)
        self.sources |= dict.fromkeys(results, edges)
        if is_own:
            self.own.update(results)
        if is_changed:
            self.changed.update(results)

    def _write(self, operator: Operator, kernel: Any, places: dict[int, Edge]) -> None:
        """Adds what a kernel writes, and the results that are a cache afterwards."""
        is_functional = "functional" in operator.type
        for result, place in kernel:
            if place not in places:
                continue
            is_own = places[place] in self.own and not is_functional
            self.targets.append(places[place])
            self.is_cache |= is_own
            if is_functional:
                self.copies.setdefault(operator.name, "rebuilt")
            results = [Edge(operator.name, result)]
            if self.dump.is_fx:
                results = [
                    Edge(reader.name)
                    for reader in self.dump.readers[operator.name]
                    if reader.type == "getitem" and reader.call[0][1] == result
                ]
            self._hold(results, [places[place]], is_own, True)

    def _in_products(self, operator: Operator) -> bool:
        """Returns True if only products read an operator."""
        readers = self.dump.readers[operator.name]
        return bool(readers) and all(kinds.kind_of(reader) == "product" for reader in readers)

    def _gets_rows(self, operator: Operator, places: dict[int, Edge]) -> bool:
        """Returns True if the other operands are rows that do not depend on the input.

        A hidden state depends on it.
        """
        edges = (edge for place, edge in operator.reads if place not in places)
        operands = [self.dump.by_name[edge.producer] for edge in edges]
        rows = [operand for operand in operands if operand.type not in kinds.CONSTANTS]
        return bool(rows) and self._below.isdisjoint(rows)


def _is_as_large(value: Value, unit: Value) -> bool | None:
    """Returns True if a value has at least as many elements as the unit; None if not known."""
    elements, unit_elements = value.elements, unit.elements
    if elements is None or unit_elements is None or elements[1] != unit_elements[1]:
        return None
    return elements[0] >= unit_elements[0]
