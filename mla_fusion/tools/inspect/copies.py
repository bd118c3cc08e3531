"""Copies of whole caches: each cache followed from where it comes in to where the graph leaves it.

A cache is an input of the graph that is written (by a kernel, a scatter, ``copy_`` or Assign), or
returned with other rows in it. What lies between keeps the memory, makes a second tensor of it, or
only reads it (:mod:`mla_fusion.tools.inspect.operator_kinds`). Whatever makes a tensor as large as
the cache, or as its layer of a pool, copies it. An operator that is not known is named, and nothing
is said of that cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
        shape = cache.output.shape
        if shape is not None and len(shape) < 2:
            continue
        path = _Followed(dump, cache, cache.output)
        layers = [dump.value(edge) for edge in path.targets]
        if layers and not any(_as_large(layer, cache.output) for layer in layers):
            least = min(layers, key=lambda layer: layer.elements or (0, []))
            path = _Followed(dump, cache, least)
        if not path.is_cache:
            continue
        found.followed += [cache.name] * (not path.lost)
        found.not_followed |= {cache.name: ", ".join(path.lost)} if path.lost else {}
        leaving = {edge.producer for edge in reached(path.ends, path.made_of)}
        parts = {name: "rebuilt" for name in path.parts if name in leaving}
        for name, what in (parts | path.copies).items():
            operator = dump.by_name[name]
            is_kept = name in leaving or what == "write back"
            count = operator.output.bytes
            if operator.type == "Assign" or count is None or kinds.written(operator):
                count = cache.output.bytes
            role = "cache" if is_kept else "cache, to read it"
            copy = Copy(name, operator.type, what, cache.name, role, count)
            found.copies.append(copy)
    found.copies.sort(key=lambda copy: dump.by_name[copy.operator].line)
    return found


@dataclass(frozen=True)
class _Held:
    """What a value holds of the input.

    own      in the input's own memory
    changed  with rows that the input did not have
    """

    own: bool = True
    changed: bool = False


class _Followed:
    """What becomes of one input.

    unit      what a copy is as large as: the input, or a layer of it
    is_cache  is it written, or returned with other rows?
    targets   what is written of it in place
    copies    operators that make another tensor of it, with how
    parts     operators that rebuild a part of it, which may be put back into the whole
    ends      values that are written back or returned
    lost      operators of which nobody knows whether they copy it
    """

    def __init__(self, dump: Dump, source: Operator, unit: Value) -> None:
        self.dump, self.unit, self.is_cache = dump, unit, False
        self.copies: dict[str, str] = {}
        self.parts: list[str] = []
        self.targets: list[Edge] = []
        self.ends: list[Edge] = []
        self.lost: list[str] = []
        self._held: dict[Edge | None, _Held] = {Edge(source.name): _Held()}
        self._from: dict[Edge, list[Edge]] = {}

        def readers(name: str) -> list[str]:
            return [reader.name for reader, _ in dump.readers[name]]

        self._below = {*reached([source.name], readers)}
        for operator in dump.ordered:
            if operator.name in self._below:
                places = {place: edge for place, edge in operator.reads if edge in self._held}
                if places:
                    self._take(operator, places)

    def made_of(self, edge: Edge) -> list[Edge]:
        return self._from.get(edge, [])

    def _take(self, operator: Operator, places: dict[int, Edge]) -> None:
        name, edges, kind = operator.name, [*places.values()], kinds.kind_of(operator)
        whole = any(_as_large(self.dump.value(edge), self.unit) is not False for edge in edges)
        sizes = [_as_large(value, self.unit) for value in operator.outputs]
        large = True if True in sizes else None if None in sizes or not sizes else False
        target = self._held[places[0]] if 0 in places else _Held(own=False)
        changed = any(self._held[edge].changed for edge in edges)
        if kernel := kinds.written(operator):
            self._write(operator, kernel, places)
        elif kind == "end":
            self.ends += edges
            new = [edge for edge in edges if not self._held[edge].own and self._held[edge].changed]
            self.is_cache |= whole and bool(new)
        elif kind in ("back", "in place", "view") or (kind == "part" and self.dump.is_fx):
            writes = kind in ("back", "in place")
            self.is_cache |= writes and target.own
            if kind == "in place" and target.own:
                self.targets.append(places[0])
            # copy_ and Assign: into the input itself, or of it into another
            value = operator.input(1)
            is_own = 0 in places and self._held.get(value, _Held(own=False)).own
            if kind == "back" and whole and value is not None and not is_own:
                self.copies.setdefault(name, "write back")
                self.ends.append(value)
            if 0 in places:
                self._hold(operator, edges, replace(target, changed=target.changed or writes))
        elif kind in ("product", "read") or (kind == "transpose" and self._in_products(operator)):
            pass  # a product reads its operand transposed
        elif kind == "computed":
            if whole and large is not False:
                self.copies.setdefault(name, "computed from it")
                self._from[Edge(name)] = edges
        elif not kind or (kind == "gathered" and large is None):
            if whole and large is not False:
                self.lost.append(f"{operator.type} {name}")
        else:
            if large or (large is None and whole and kind != "part"):
                self.copies.setdefault(name, {"joined": "rebuilt"}.get(kind, kind))
            if kind == "joined" or (kind == "rebuilt" and 0 in places):
                rows = self._gets_rows(operator, places)
                changed |= rows
                self.parts += [name] * (rows or kind == "rebuilt")
            self._hold(operator, edges, _Held(False, changed))

    def _hold(self, operator: Operator, edges: list[Edge], held: _Held) -> None:
        """Each result holds this of the input."""
        for index in range(max(1, len(operator.outputs))):
            result = Edge(operator.name, index)
            self._held[result], self._from[result] = held, edges

    def _write(self, operator: Operator, kernel: Any, places: dict[int, Edge]) -> None:
        """By a kernel: those of its results that hold the input."""
        functional = "functional" in operator.type
        for result, place in kernel:
            if place not in places:
                continue
            own = self._held[places[place]].own and not functional
            self.targets.append(places[place])
            self.is_cache |= own
            if functional:
                self.copies.setdefault(operator.name, "rebuilt")
            picked = [
                Edge(reader.name)
                for reader, _ in self.dump.readers[operator.name]
                if reader.type == "getitem" and reader.call[0][1] == result
            ]
            for edge in picked if self.dump.is_fx else [Edge(operator.name, result)]:
                self._held[edge], self._from[edge] = _Held(own, True), [places[place]]

    def _in_products(self, operator: Operator) -> bool:
        readers = self.dump.readers[operator.name]
        return bool(readers) and all(kinds.kind_of(one) == "product" for one, _ in readers)

    def _gets_rows(self, operator: Operator, places: dict[int, Edge]) -> bool:
        """Are the others of its operands rows that do not depend on the input? (A hidden state is
        made anew.)
        """
        others = [edge.producer for place, edge in operator.reads if place not in places]
        rows = [one for one in others if self.dump.by_name[one].type not in kinds.CONSTANTS]
        return bool(rows) and not self._below & {*rows}


def _as_large(value: Value, unit: Value) -> bool | None:
    """Has a value at least as many elements as the unit? None where the dump does not say."""
    mine, other = value.elements, unit.elements
    if mine is None or other is None or mine[1] != other[1]:
        return None
    return mine[0] >= other[0]
