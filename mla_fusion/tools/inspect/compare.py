"""Compares two dumps by what their operators are and how they are wired, not by names.

Runs of operators with equal types and attributes are paired, in the order of the files. The other
operators were added or removed. Graphs are equal if all are paired and read each other alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher

from mla_fusion.report import text_tables
from mla_fusion.tools.dumps import Dump, Edge, Operator, checked
from mla_fusion.tools.inspect.operator_kinds import ENDS, INPUTS


@dataclass(frozen=True)
class Change:
    """One operator of a dump without a partner in the other dump."""

    name: str
    type: str
    inputs: tuple[str, ...]
    line: int

    def __str__(self) -> str:
        return f"{self.type} {self.name}({', '.join(self.inputs)})  line {self.line}"


@dataclass
class Difference:
    """What differs between two dumps.

    removed  operators of the first dump only
    added    operators of the second dump only
    rewired  partners with other inputs: type, name in the first dump, name in the second
    """

    first: str
    second: str
    removed: list[Change]
    added: list[Change]
    rewired: list[tuple[str, str, str]]

    @property
    def equal(self) -> bool:
        """True if nothing differs."""
        return not (self.removed or self.added or self.rewired)

    def to_json(self) -> str:
        """Returns the changes as JSON text."""
        return text_tables.as_json({"equal": self.equal, **asdict(self)})

    def __str__(self) -> str:
        if self.equal:
            return f"{self.first} and {self.second}: equal"
        removed = Counter(change.type for change in self.removed)
        added = Counter(change.type for change in self.added)
        parts = [
            f"{self.first} -> {self.second}: {len(self.removed)} removed, {len(self.added)} added"
        ]
        if rows := [(kind, removed[kind], added[kind]) for kind in removed | added]:
            parts.append(text_tables.render(("operator", "removed", "added"), rows))
        lines = [
            *(f"  - {change}" for change in self.removed),
            *(f"  + {change}" for change in self.added),
            *(f"  ~ {kind} {old}: other inputs than {new}" for kind, old, new in self.rewired),
        ]
        return "\n\n".join([*parts, "\n".join(lines)])


def diff(first: Dump, second: Dump) -> Difference:
    """Returns what changes from one graph to the other.

    first, second  as :func:`read` returns them

    Raises ValueError for an FX and a GE graph, TypeError for anything else.
    """
    if checked(first).is_fx != checked(second).is_fx:
        raise ValueError("an FX graph and a GE graph have no operators in common")
    # Generated Python leaves out attributes that have their defaults.
    by_attributes = (first.format == "python") == (second.format == "python")
    keys, other_keys = (
        [_key(operator, by_attributes) for operator in dump.operators] for dump in (first, second)
    )
    pairs: list[tuple[Operator, Operator]] = []
    matcher = SequenceMatcher(None, keys, other_keys, autojunk=False)
    for start, place, size in matcher.get_matching_blocks():
        blocks = first.operators[start : start + size], second.operators[place : place + size]
        pairs += zip(*blocks, strict=True)
    partners = {old.name: new.name for old, new in pairs}
    paired = set(partners.values())

    def is_rewired(old: Operator, new: Operator) -> bool:
        """Returns True if partners differ in inputs that have partners themselves."""
        reads = {
            place: Edge(partners[edge.producer], edge.index)
            for place, edge in old.reads
            if edge.producer in partners
        }
        return len(old.inputs) != len(new.inputs) or any(
            reads.get(place, edge) != edge for place, edge in new.reads if edge.producer in paired
        )

    return Difference(
        str(first),
        str(second),
        [_change(operator) for operator in first.operators if operator.name not in partners],
        [_change(operator) for operator in second.operators if operator.name not in paired],
        [(old.type, old.name, new.name) for old, new in pairs if is_rewired(old, new)],
    )


def _change(operator: Operator) -> Change:
    """Returns the entry of an operator without a partner."""
    inputs = tuple("-" if edge is None else str(edge) for edge in operator.inputs)
    return Change(operator.name, operator.type, inputs, operator.line)


def _key(operator: Operator, by_attributes: bool) -> str:
    """Returns what partners have in common: type and attributes, but for notes of the writer.

    An input of the graph has its dtype and shape, without its number and name.
    """
    if operator.type in INPUTS | ENDS:
        return f"{operator.type} {[str(value) for value in operator.outputs]}"
    attributes = sorted(
        (name, str(value)) for name, value in operator.attributes.items() if name[:1] != "_"
    )
    return f"{operator.type} {attributes if by_attributes else ''}"
