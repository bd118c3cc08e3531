"""Two dumps compared by what their operators are and how they are wired; names count for nothing.

Runs of operators that are alike in type and attributes are paired off, in the order of the files;
the rest was added or removed. Graphs are equal where all are paired and read one another alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher, unified_diff

from mla_fusion.report import text_tables
from mla_fusion.tools.dumps import Dump, Operator
from mla_fusion.tools.inspect.operator_kinds import ENDS, INPUTS


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
    found = Difference(str(first), str(second), [], [], [])
    # Generated Python leaves out attributes that have their defaults.
    by_attributes = (first.format == "python") == (second.format == "python")
    sides = [[_own(one, by_attributes) for one in dump.operators] for dump in (first, second)]
    pairs: dict[str, str] = {}
    matched = SequenceMatcher(None, sides[0], sides[1], autojunk=False).get_matching_blocks()
    for start, place, size in matched:
        alike = zip(first.operators[start:], second.operators[place : place + size], strict=False)
        pairs |= {one.name: partner.name for one, partner in alike}
    partners = {name: name for name in pairs.values()}
    found.removed = [_change(one) for one in first.operators if one.name not in pairs]
    found.added = [_change(one) for one in second.operators if one.name not in partners]
    for before, after in pairs.items():
        one, other = first.by_name[before], second.by_name[after]
        # an input that was added or removed is told already
        wired, wanted = _wiring(one, pairs), _wiring(other, partners)
        both = wired.keys() & wanted.keys()
        if len(one.inputs) != len(other.inputs) or any(wired[at] != wanted[at] for at in both):
            found.rewired.append((one.type, before, after))
    return found


def _wiring(operator: Operator, partners: dict[str, str]) -> dict[int, tuple[str, int]]:
    """By place, the partner that is read and which of its results."""
    return {
        place: (partners[edge.producer], edge.index)
        for place, edge in operator.reads
        if edge.producer in partners
    }


def _change(operator: Operator) -> Change:
    inputs = tuple("-" if edge is None else str(edge) for edge in operator.inputs)
    return Change(operator.name, operator.type, inputs, operator.line)


def _own(operator: Operator, by_attributes: bool) -> str:
    """Type and attributes; an input's dtype and shape, never its number or name."""
    if operator.type in INPUTS | ENDS:
        return f"{operator.type} {[str(value) for value in operator.outputs]}"
    given = sorted((name, str(value)) for name, value in operator.stated.items())
    return f"{operator.type} {given if by_attributes else ''}"


@dataclass(frozen=True)
class Lines:
    """The lines that two texts do not share: "-" before those of the first, "+" of the second."""

    changed: list[str]

    @property
    def equal(self) -> bool:
        return not self.changed

    def to_json(self) -> str:
        return text_tables.as_json({"equal": self.equal, **asdict(self)})

    def __str__(self) -> str:
        return "\n".join(self.changed) or "no line differs"


def diff_lines(first: str, second: str) -> Lines:
    """Compare two texts line by line."""
    found = list(unified_diff(first.splitlines(), second.splitlines(), n=0, lineterm=""))
    return Lines([line for line in found[2:] if not line.startswith("@@")])
