"""Two dumps compared by what their operators are and how they are wired; names count for nothing.

Every operator gets a digest of its type, attributes and inputs' digests (what it computes), refined
by those of its readers (what it is for) until no more operators are told apart. Operators with
equal digests are paired off; the rest was added or removed. Where one operator changed, everything
behind it computes something else too: so what is left is paired again by type, attributes and the
pairs among its neighbours, and reported only if no partner is found.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Set
from dataclasses import asdict, dataclass
from typing import Any

from mla_fusion.report import text_tables
from mla_fusion.tools.dumps import Dump, Operator
from mla_fusion.tools.inspect.operator_kinds import ENDS, INPUTS

_ROUNDS = 64
Digests = dict[str, str]  # of operators, by name
Pairs = dict[str, str]  # names in the first dump, with their partners'


@dataclass(frozen=True)
class Change:
    """One operator of one side without a partner on the other."""

    name: str
    type: str
    inputs: tuple[str, ...]
    line: int

    def __str__(self) -> str:
        return f"{self.type} {self.name}({', '.join(self.inputs)})  line {self.line}"


@dataclass
class Difference:
    """removed: in the first dump only; added: in the second only; rewired: (type, from, to) of
    partners.
    """

    first: str
    second: str
    removed: list[Change]
    added: list[Change]
    rewired: list[tuple[str, str, str]]

    @property
    def equal(self) -> bool:
        return not (self.removed or self.added or self.rewired)

    def to_json(self) -> str:
        """Both sides' changes as JSON text."""
        return text_tables.as_json({"equal": self.equal, **asdict(self)})

    def __str__(self) -> str:
        if self.equal:
            return f"{self.first} and {self.second}: equal"
        sides = self.removed, self.added
        removed, added = (Counter(change.type for change in side) for side in sides)
        parts = [
            f"{self.first} -> {self.second}: {len(self.removed)} removed, {len(self.added)} added"
        ]
        if removed or added:
            rows = [(kind, removed[kind], added[kind]) for kind in removed | added]
            parts.append(text_tables.render(("operator", "removed", "added"), rows))
        lines = [
            *(f"  - {change}" for change in self.removed),
            *(f"  + {change}" for change in self.added),
            *(f"  ~ {kind} {one}: other inputs than {other}" for kind, one, other in self.rewired),
        ]
        return "\n\n".join([*parts, "\n".join(lines)])


def diff(first: Dump, second: Dump) -> Difference:
    """What changes from one graph to the other.

    first, second  as :func:`read` gives them

    Raises ValueError for an FX and a GE graph.
    """
    if first.is_fx != second.is_fx:
        raise ValueError("an FX graph and a GE graph have no operators in common")
    # Generated Python leaves out attributes that have their defaults.
    by_attributes = (first.format == "python") == (second.format == "python")
    sides = [_Side(first, by_attributes), _Side(second, by_attributes)]
    pairs = _pair(*sides)
    partners = set(pairs.values())
    rewired = [
        (first.by_name[before].type, before, after)
        for before, after in pairs.items()
        if not _wired_alike(first.by_name[before], second.by_name[after], pairs, partners)
    ]
    return Difference(
        _name(first),
        _name(second),
        [_change(op) for op in first.operators if op.name not in pairs],
        [_change(op) for op in second.operators if op.name not in partners],
        rewired,
    )


def _name(dump: Dump) -> str:
    return str(dump.path) + (f", graph {dump.number} of {dump.graphs}" if dump.graphs > 1 else "")


def _change(operator: Operator) -> Change:
    inputs = tuple("-" if edge is None else str(edge) for edge in operator.inputs)
    return Change(operator.name, operator.type, inputs, operator.line)


class _Side:
    """One graph with the digests of its operators: what each is, and what it computes."""

    def __init__(self, dump: Dump, by_attributes: bool) -> None:
        self.dump = dump
        self.own = {operator.name: _own(operator, by_attributes) for operator in dump.operators}
        self.meant = dict(self.own)
        for operator in dump.ordered:
            inputs = _inputs(operator, self.meant)
            self.meant[operator.name] = _digest(self.own[operator.name], inputs)

    def refined(self, digests: Digests) -> Digests:
        """One round: the digest, those of the inputs in order, those of the readers in any
        order.
        """
        found = {}
        for operator in self.dump.operators:
            readers = self.dump.readers[operator.name]
            read_by = sorted((digests[reader.name], place) for reader, place in readers)
            inputs = _inputs(operator, digests)
            found[operator.name] = _digest(digests[operator.name], inputs, read_by)
        return found

    def neighbours(self, name: str) -> list[tuple[str, tuple[str, int]]]:
        """What an operator reads and what reads it, each with the place."""
        return [
            *((edge.producer, ("in", place)) for place, edge in self.dump.by_name[name].reads),
            *((reader.name, ("out", place)) for reader, place in self.dump.readers[name]),
        ]


def _inputs(operator: Operator, digests: Digests) -> list[tuple[str, int] | None]:
    return [
        None if edge is None else (digests[edge.producer], edge.index) for edge in operator.inputs
    ]


def _own(operator: Operator, by_attributes: bool) -> str:
    """Type and attributes. Inputs are told apart by dtype and shape, never by their number or
    name.
    """
    if operator.type in INPUTS | ENDS:
        return _digest(operator.type, [str(value) for value in operator.outputs])
    if not by_attributes:
        return _digest(operator.type)
    given = sorted((name, str(value)) for name, value in operator.stated.items())
    return _digest(operator.type, given)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _pair(first: _Side, second: _Side) -> Pairs:
    """Partners: first those that mean and serve the same, then ever less, and last by
    neighbours.
    """
    sides = first, second
    exact = [side.meant for side in sides]
    both = [side.refined(side.meant) for side in sides]
    for _ in range(_ROUNDS):
        finer = [side.refined(digests) for side, digests in zip(sides, both, strict=True)]
        before, after = ([len({*one.values()}) for one in round] for round in (both, finer))
        if before == after:
            break
        both = finer
    pairs: Pairs = {}
    for one, other in (both, exact):
        free = _unpaired(second, set(pairs.values()), other)
        for digest, names in _unpaired(first, pairs.keys(), one).items():
            pairs |= zip(names, free[digest], strict=False)
    _spread(first, second, pairs)
    return pairs


def _unpaired(side: _Side, taken: Set[str], digests: Digests) -> defaultdict[str, list[str]]:
    """The operators without a partner, by their digest, in order of the graph."""
    found = defaultdict(list)
    for name in side.own:
        if name not in taken:
            found[digests[name]].append(name)
    return found


def _spread(first: _Side, second: _Side, pairs: Pairs) -> None:
    """Pair what is left with what has the same type and attributes and stands beside partners."""
    pools = _unpaired(second, set(pairs.values()), second.own)
    for name, own in first.own.items():
        pool = pools[own]
        if name in pairs or not pool:
            continue
        near = [(pairs.get(one), place) for one, place in first.neighbours(name)]
        scores = [_score(near, second.neighbours(one)) for one in pool[:_ROUNDS]]
        best = max(range(len(scores)), key=scores.__getitem__)
        if scores[best]:
            pairs[name] = pool.pop(best)


def _score(near: list[tuple[str | None, Any]], other: list[tuple[str, Any]]) -> int:
    """How many neighbours are partners; at the same place they count twice."""
    return len({*near} & {*other}) + len({name for name, _ in near} & {name for name, _ in other})


def _wired_alike(one: Operator, other: Operator, pairs: Pairs, partners: set[str]) -> bool:
    """Do partners read partners, each at the same place? What was added or removed is told
    already.
    """
    return len(one.inputs) == len(other.inputs) and all(
        a is b
        if a is None or b is None
        else a.producer not in pairs
        or b.producer not in partners
        or (pairs[a.producer], a.index) == (b.producer, b.index)
        for a, b in zip(one.inputs, other.inputs, strict=True)
    )
