"""Copies of whole caches: each cache followed from where it comes in to where the graph leaves it.

A cache is an input of the graph that is written (by a kernel, a scatter, ``copy_`` or Assign), or
returned with other rows in it. What lies between keeps the memory, makes a second tensor of it, or
only reads it (:mod:`mla_fusion.tools.inspect.operator_kinds`). Whatever makes a tensor as large as
the cache, or as its layer of a pool, copies it. An operator that is not known is named, and nothing
is said of that cache.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod

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
    source: str = ""


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
            path = _Followed(dump, cache, min(layers, key=lambda layer: _size(layer)[0]))
        if not path.is_cache:
            continue
        if path.lost:
            found.not_followed[cache.name] = ", ".join(path.lost)
        else:
            found.followed.append(cache.name)
        leaving = {edge.producer for edge in reached(path.ends, path.made_of)}
        parts = {name: "rebuilt" for name in path.parts if name in leaving}
        for name, what in (parts | path.copies).items():
            operator = dump.by_name[name]
            is_kept = name in leaving or what == "write back"
            count = operator.output.bytes
            if operator.type == "Assign" or count is None or kinds.written(operator):
                count = cache.output.bytes
            role = "cache" if is_kept else "cache, to read it"
            copy = Copy(name, operator.type, what, cache.name, role, count, operator.source)
            found.copies.append(copy)
    place = {operator.name: index for index, operator in enumerate(dump.operators)}
    found.copies.sort(key=lambda copy: place[copy.operator])
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
    ends      values that are written back or returned
    parts     operators that rebuild a part of it, which may be put back into the whole
    lost      operators of which nobody knows whether they copy it
    """

    def __init__(self, dump: Dump, source: Operator, unit: Value) -> None:
        self.dump, self.unit, self.is_cache = dump, unit, False
        self.copies: dict[str, str] = {}
        self.lost: list[str] = []
        self.parts: list[str] = []
        self.targets: list[Edge] = []
        self.ends: list[Edge] = []
        self._from: dict[Edge, list[Edge]] = {}
        self._held = {Edge(source.name): _Held()}

        def readers(name: str) -> list[str]:
            return [reader.name for reader, _ in dump.readers[name]]

        self._below = {*reached([source.name], readers)}
        for operator in dump.ordered:
            if operator.name in self._below and operator is not source:
                self._take(operator)

    def made_of(self, edge: Edge) -> list[Edge]:
        return self._from.get(edge, [])

    def _take(self, operator: Operator) -> None:
        places = {place: edge for place, edge in operator.reads if edge in self._held}
        if not places:
            return
        edges, kind = [*places.values()], kinds.kind_of(operator)
        given = {place: self._held[edge] for place, edge in places.items()}
        first = given.get(0)
        changed = any(one.changed for one in given.values())
        if kernel := kinds.written(operator):
            self._write_by_kernel(operator, kernel, places)
        elif operator.type in kinds.ENDS:
            self.ends += edges
            self.is_cache |= any(
                self._held[edge].changed and not self._held[edge].own and self._is_whole(edge)
                for edge in edges
            )
        elif kinds.plain(operator.type) in kinds.BACK:
            self._write_back(operator, places)
        elif kind == "in place":
            if first is not None:
                self.is_cache |= first.own
                self.targets += [places[0]] * first.own
                self._hold(operator, edges, replace(first, changed=True))
        elif kind == "view" or (kind == "part" and self.dump.is_fx):
            self._view(operator, edges, given)
        elif kind in ("product", "read") or (kind == "transpose" and self._in_products(operator)):
            pass  # a product reads its operand transposed
        elif kind in ("computed", ""):
            self._compute(operator, edges, kind)
        else:
            large = self._is_large(operator)
            if large is None:
                large = kind not in ("part", "gathered") and any(map(self._is_whole, edges))
                if kind == "gathered" and any(map(self._is_whole, edges)):
                    self.lost.append(f"{operator.type} {operator.name}")
            if large:
                how = {"part": "sliced", "joined": "rebuilt"}.get(kind, kind)
                self.copies.setdefault(operator.name, how)
            if kind == "joined" or (kind == "rebuilt" and first is not None):
                rows = self._gets_rows(operator, edges)
                changed |= rows
                self.parts += [operator.name] * (rows or kind == "rebuilt")
            self._hold(operator, edges, _Held(False, changed))

    def _hold(self, operator: Operator, edges: list[Edge], held: _Held) -> None:
        """Each result holds this of the input."""
        for index in range(max(1, len(operator.outputs))):
            result = Edge(operator.name, index)
            self._held[result], self._from[result] = held, edges

    def _view(self, operator: Operator, edges: list[Edge], given: dict[int, _Held]) -> None:
        if 0 not in given:
            return
        above = self.dump.producer(edges[0])
        results = [
            result for result, place in kinds.written(above) if above.inputs[place] in self._held
        ]
        args = operator.call[0]
        if operator.type != "getitem" or not results or args[1] in results:
            self._hold(operator, edges, given[0])

    def _write_by_kernel(
        self, operator: Operator, kernel: list[tuple[int | None, int]], places: dict[int, Edge]
    ) -> None:
        functional = "functional" in operator.type
        for result, place in kernel:
            if place not in places:
                continue
            held = self._held[places[place]]
            self.targets += [places[place]]
            self.is_cache |= held.own and not functional
            if functional:
                self.copies.setdefault(operator.name, "rebuilt")
            if result is not None:
                edge = Edge(operator.name, 0 if self.dump.is_fx else result)
                self._held[edge] = _Held(held.own and not functional, True)
                self._from[edge] = [places[place]]

    def _write_back(self, operator: Operator, places: dict[int, Edge]) -> None:
        """``copy_`` and Assign: into the input itself, or of it into another."""
        target = self._held[places[0]] if 0 in places else _Held(False)
        value = places.get(1)
        from_own = value is not None and self._held[value].own
        self.is_cache |= target.own
        written = (
            target.own and not from_own and self._is_whole(places[0])
            if 0 in places
            else (value is not None and self._is_whole(value))
        )
        if written:
            self.copies.setdefault(operator.name, "write back")
            self.ends += [edge for edge in operator.inputs[1:2] if edge is not None]
        if 0 in places:
            self._hold(operator, [*places.values()], replace(target, changed=True))

    def _compute(self, operator: Operator, edges: list[Edge], kind: str) -> None:
        """What computes other numbers of it, and what is not known."""
        if not any(map(self._is_whole, edges)) or self._is_large(operator) is False:
            return
        if kind:
            self.copies.setdefault(operator.name, "computed from it")
            self._from[Edge(operator.name)] = edges
        else:
            self.lost.append(f"{operator.type} {operator.name}")

    def _in_products(self, operator: Operator) -> bool:
        readers = self.dump.readers[operator.name]
        return bool(readers) and all(kinds.kind_of(one) == "product" for one, _ in readers)

    def _gets_rows(self, operator: Operator, edges: list[Edge]) -> bool:
        """Are the others of its operands rows that do not depend on the input? (A hidden state is
        made anew.)
        """
        others = [edge for _, edge in operator.reads if edge not in edges]
        rows = [edge for edge in others if self.dump.producer(edge).type not in kinds.CONSTANTS]
        values = map(self.dump.value, rows)
        return (
            bool(rows)
            and not any(edge.producer in self._below for edge in rows)
            and all(_as_large(self.unit, value) is not False for value in values)
        )

    def _is_whole(self, edge: Edge) -> bool:
        """Does a value hold all of it, as far as the dump tells?"""
        return _as_large(self.dump.value(edge), self.unit) is not False

    def _is_large(self, operator: Operator) -> bool | None:
        """Has a result as many elements as the cache? None where the dump does not say."""
        answers = [_as_large(value, self.unit) for value in operator.outputs]
        return True if True in answers else None if None in answers or not answers else False


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
