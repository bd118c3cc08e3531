"""Copies of whole caches and weights: each cache followed from where it comes in to where the graph
leaves it.

A cache is an input of the graph that is written (by a kernel, a scatter, ``copy_`` or Assign), or
returned with other rows in it. What lies between keeps the memory, makes a second tensor of it, or
only reads it (:mod:`mla_fusion.tools.inspect.followed`). An operator that is neither is named, and
nothing is said of that cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mla_fusion.fx.walk import reached
from mla_fusion.tools.dumps import Dump, Edge, Operator, prologues
from mla_fusion.tools.inspect import operator_kinds as kinds
from mla_fusion.tools.inspect.followed import Followed
from mla_fusion.tools.inspect.operator_kinds import plain

# operators below inputs, all inputs together; 61 layers have less than half as many
_MOST_VISITED = 500_000


@dataclass(frozen=True)
class Copy:
    """A cache or weight that the graph copies at every run. ``bytes`` is None where the shape is
    not known.

    role    "cache", "cache, to read it" (on no way to an output), or "weight"
    folded  why GE may make no copy of it after all, "" where the copy is certain
    """

    operator: str
    type: str
    what: str
    of: str
    role: str
    bytes: int | None
    source: str = ""
    folded: str = ""


@dataclass
class Copies:
    """``copies``: in order; ``followed``: caches from input to output; ``not_followed``: the
    others, and the operators at which they were lost.
    """

    copies: list[Copy] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)
    not_followed: dict[str, str] = field(default_factory=dict)
    weights_followed: int = 0


def find_copies(dump: Dump) -> Copies:
    """Copies of whole caches and of weights; other copies are nobody's loss."""
    found, visited = Copies(), 0
    for cache in dump.of_type(*kinds.INPUTS):
        shape = cache.output.shape
        if shape is not None and len(shape) < 2:
            continue
        if visited > _MOST_VISITED:
            found.not_followed[cache.name] = f"more than {_MOST_VISITED:,} steps"
            continue
        path = Followed(dump, cache)
        visited += path.visited
        if not path.is_cache:
            continue
        if path.lost:
            found.not_followed[cache.name] = ", ".join(path.lost)
        else:
            found.followed.append(cache.name)
        for name, what in path.copies.items():
            role = "cache" if name in path.leaving or what == "write back" else "cache, to read it"
            found.copies.append(_copy(dump, dump.by_name[name], cache, what, role))
    weights = set()
    for operator in dump.operators:
        kind = plain(operator.type)
        for edge in operator.inputs if kind in kinds.JOINED else operator.inputs[:1]:
            held = _root(dump, edge)
            if held is None or held.name in found.not_followed or held.name in found.followed:
                continue
            if not _is_weight(dump, operator, held):
                continue
            weights.add(held.name)
            how = "joined" if kind in kinds.JOINED else kinds.COPIES.get(kind)
            if how is not None:
                found.copies.append(_copy(dump, operator, held, how, "weight"))
    place = {operator.name: index for index, operator in enumerate(dump.operators)}
    found.copies.sort(key=lambda copy: place[copy.operator])
    found.weights_followed = len(weights)
    return found


def _copy(dump: Dump, operator: Operator, held: Operator, what: str, role: str) -> Copy:
    """Of what is written: the result where the dump describes it, else the whole of what is
    copied.
    """
    count = operator.output.bytes
    if operator.type == "Assign" or count is None or kinds.written(operator):
        count = held.output.bytes
    folded = _folded(dump, operator, held)
    return Copy(operator.name, operator.type, what, held.name, role, count, operator.source, folded)


def _folded(dump: Dump, operator: Operator, held: Operator) -> str:
    """GE computes what is made of constants when it compiles, and a product can read its operand
    transposed.
    """
    if held.type in kinds.CONSTANTS:
        return "made of a constant when GE compiles"
    readers = [reader for reader, _ in dump.readers[operator.name]]
    in_product = bool(readers) and all(plain(one.type) in kinds.PRODUCTS for one in readers)
    if operator.type in ("Transpose", "TransposeD") and in_product:
        return "part of the product that reads it"
    return "an Identity, which GE drops where it can" if operator.type == "Identity" else ""


def _root(dump: Dump, edge: Edge | None) -> Operator | None:
    """The input or constant that the value is a view, or a part, of."""
    for _ in dump.operators:  # a damaged dump may go in a circle
        if edge is None:
            return None
        operator = dump.producer(edge)
        if operator.type in kinds.HELD:
            return operator
        if plain(operator.type) not in _LOOKED_THROUGH:
            return None
        edge = operator.input(0)
    return None


_LOOKED_THROUGH = kinds.VIEWS | kinds.PARTS | kinds.TURNED
_PASSED = _LOOKED_THROUGH | kinds.JOINED | kinds.COPIES.keys()


def _is_weight(dump: Dump, operator: Operator, held: Operator) -> bool:
    """A constant, or a static input of two dims or more, that meets a matrix product on its right
    side.
    """
    value = held.output
    if value.shape is None or len(value.shape) < 2 or value.dynamic:
        return False

    def passing(name: str) -> Iterator[str]:
        readers = dump.readers[name]
        return (reader.name for reader, _ in readers if plain(reader.type) in _PASSED)

    return any(
        _takes_weight(reader, place)
        for name in reached([operator.name], passing)
        for reader, place in dump.readers[name]
    )


def _takes_weight(reader: Operator, place: int) -> bool:
    if plain(reader.type) in kinds.PRODUCTS:
        return place == 1
    roles = prologues.roles_of(reader) if prologues.is_prologue(reader.type) else []
    return place < len(roles) and roles[place].startswith("weight")
