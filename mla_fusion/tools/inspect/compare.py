"""Two dumps compared by what their operators are and how they are wired; names count for nothing.

Every operator gets a digest of its type, attributes and inputs' digests (what it computes), refined
by those of its readers (what it is for) until no more operators are told apart. Operators with
equal digests are paired off; the rest was added or removed. Where one operator changed, everything
behind it computes something else too: so what is left is paired again by type, attributes and the
pairs among its neighbours, and reported only if no partner is found.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_fusion.report import text_tables
from mla_fusion.tools.dumps import Dump, Operator

_NUMBERED = frozenset(("Data", "RefData", "placeholder", "NetOutput", "output"))
_ROUNDS = 64


@dataclass(frozen=True)
class Change:
    """One operator of one side without a partner on the other."""

    name: str
    type: str
    inputs: tuple[str, ...]
    line: int


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
        data: dict[str, Any] = {"equal": self.equal, "first": self.first, "second": self.second}
        for side in ("removed", "added"):
            data[side] = [vars(change) for change in getattr(self, side)]
        data["rewired"] = self.rewired
        return json.dumps(data, indent=2, default=str)

    def __str__(self) -> str:
        if self.equal:
            return f"{self.first} and {self.second}: equal"
        removed, added = (
            Counter(change.type for change in side) for side in (self.removed, self.added)
        )
        parts = [
            f"{self.first} -> {self.second}: {len(self.removed)} removed, {len(self.added)} added"
        ]
        if removed or added:
            rows = [
                (kind, removed[kind], added[kind]) for kind in dict.fromkeys([*removed, *added])
            ]
            parts.append(text_tables.render(("operator", "removed", "added"), rows))
        lines = [f"  - {_line(change)}" for change in self.removed] + [
            f"  + {_line(change)}" for change in self.added
        ]
        lines += [
            f"  ~ {kind} {before}: other inputs than {after}"
            for kind, before, after in self.rewired
        ]
        return "\n\n".join([*parts, "\n".join(lines)])


def _line(change: Change) -> str:
    return f"{change.type} {change.name}({', '.join(change.inputs)})  line {change.line}"


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
    back = {after: before for before, after in pairs.items()}
    rewired = [
        (first.by_name[before].type, before, after)
        for before, after in pairs.items()
        if not _wired_alike(sides[0], sides[1], before, after, pairs)
    ]
    return Difference(
        str(first.path),
        str(second.path),
        [_change(op) for op in first.operators if op.name not in pairs],
        [_change(op) for op in second.operators if op.name not in back],
        rewired,
    )


def _change(operator: Operator) -> Change:
    inputs = tuple("-" if edge is None else str(edge) for edge in operator.inputs)
    return Change(operator.name, operator.type, inputs, operator.line)


class _Side:
    """One graph with the digests of its operators, from coarse to fine."""

    def __init__(self, dump: Dump, by_attributes: bool) -> None:
        self.dump = dump
        self.own = {operator.name: _own(operator, by_attributes) for operator in dump.operators}
        self.meant = self._downwards()

    def _downwards(self) -> dict[str, str]:
        """What each operator computes: inputs are settled before their readers."""
        waiting = {
            op.name: sum(edge is not None for edge in op.inputs) for op in self.dump.operators
        }
        ready = deque(name for name, count in waiting.items() if not count)
        found = dict(self.own)
        while ready:
            name = ready.popleft()
            operator = self.dump.by_name[name]
            inputs = [
                None if edge is None else (found[edge.producer], edge.index)
                for edge in operator.inputs
            ]
            found[name] = _digest(self.own[name], inputs)
            for reader, _ in self.dump.readers[name]:
                waiting[reader.name] -= 1
                if not waiting[reader.name]:
                    ready.append(reader.name)
        return found

    def refined(self, digests: dict[str, str]) -> dict[str, str]:
        """One round: the digest, those of the inputs in order, those of the readers in any
        order.
        """
        found = {}
        for operator in self.dump.operators:
            inputs = [
                None if edge is None else (digests[edge.producer], edge.index)
                for edge in operator.inputs
            ]
            readers = sorted(
                (digests[reader.name], place) for reader, place in self.dump.readers[operator.name]
            )
            found[operator.name] = _digest(digests[operator.name], inputs, readers)
        return found


def _own(operator: Operator, by_attributes: bool) -> str:
    """Type and attributes. Inputs are told apart by dtype and shape, never by their number or
    name.
    """
    if operator.type in _NUMBERED:
        return _digest(operator.type, [str(value) for value in operator.outputs])
    if not by_attributes and operator.type != "Const":
        return _digest(operator.type)
    given = sorted(
        (name, str(value))
        for name, value in operator.attributes.items()
        if not name.startswith("_")
    )
    return _digest(operator.type, given)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _pair(first: _Side, second: _Side) -> dict[str, str]:
    """Partners: first those that mean and serve the same, then ever less, and last by
    neighbours.
    """
    pairs: dict[str, str] = {}
    exact = [side.meant for side in (first, second)]
    both = [first.refined(exact[0]), second.refined(exact[1])]
    for _ in range(_ROUNDS):
        finer = [first.refined(both[0]), second.refined(both[1])]
        if all(
            len(set(a.values())) == len(set(b.values())) for a, b in zip(finer, both, strict=True)
        ):
            break
        both = finer
    for one, other in (both, exact):
        _match(first, second, pairs, one, other)
    _spread(first, second, pairs)
    return pairs


def _match(
    first: _Side, second: _Side, pairs: dict[str, str], one: dict[str, str], other: dict[str, str]
) -> None:
    """Pair what has equal digests, in order of the graphs."""
    taken = set(pairs.values())
    free: dict[str, deque[str]] = defaultdict(deque)
    for operator in second.dump.operators:
        if operator.name not in taken:
            free[other[operator.name]].append(operator.name)
    for operator in first.dump.operators:
        if operator.name not in pairs and free[one[operator.name]]:
            pairs[operator.name] = free[one[operator.name]].popleft()


def _spread(first: _Side, second: _Side, pairs: dict[str, str]) -> None:
    """Pair what is left with what has the same type and attributes and stands beside partners."""
    taken = set(pairs.values())
    pools: dict[str, list[str]] = defaultdict(list)
    for operator in second.dump.operators:
        if operator.name not in taken:
            pools[second.own[operator.name]].append(operator.name)
    neighbours = [_neighbours(side.dump) for side in (first, second)]
    for operator in first.dump.operators:
        pool = pools.get(first.own[operator.name]) if operator.name not in pairs else None
        if not pool:
            continue
        near = [(pairs.get(name), place) for name, place in neighbours[0](operator)]
        scores = [_score(near, neighbours[1](second.dump.by_name[name])) for name in pool[:_ROUNDS]]
        best = max(range(len(scores)), key=scores.__getitem__)
        if scores[best]:
            pairs[operator.name] = pool.pop(best)


def _score(near: list[tuple[str | None, Any]], other: list[tuple[str, Any]]) -> int:
    """How many neighbours are partners; at the same place they count twice."""
    return len(set(near) & set(other)) + len(
        {name for name, _ in near} & {name for name, _ in other}
    )


def _neighbours(dump: Dump) -> Callable[[Operator], list[tuple[str, Any]]]:
    def of(operator: Operator) -> list[tuple[str, Any]]:
        inputs = [
            (edge.producer, ("in", place))
            for place, edge in enumerate(operator.inputs)
            if edge is not None
        ]
        return [
            *inputs,
            *((reader.name, ("out", place)) for reader, place in dump.readers[operator.name]),
        ]

    return of


def _wired_alike(
    first: _Side, second: _Side, before: str, after: str, pairs: dict[str, str]
) -> bool:
    """Do partners read partners, each at the same place? What was added or removed is told
    already.
    """
    one, other = first.dump.by_name[before].inputs, second.dump.by_name[after].inputs
    if len(one) != len(other):
        return False
    partners = set(pairs.values())
    for a, b in zip(one, other, strict=True):
        if (a is None) != (b is None):
            return False
        if a is None or b is None or a.producer not in pairs or b.producer not in partners:
            continue
        if (pairs[a.producer], a.index) != (b.producer, b.index):
            return False
    return True
