"""What stands in a dump: operators, MLA prologues, copies of whole caches, dynamic inputs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from mla_fusion.compat import OpOverload
from mla_fusion.config import Config
from mla_fusion.graph.decompose import is_known
from mla_fusion.report import text_tables
from mla_fusion.tools.dumps import Dump, names, prologues
from mla_fusion.tools.dumps.prologues import Prologue
from mla_fusion.tools.inspect.copies import Copy, find_copies
from mla_fusion.tools.inspect.explain import NotRebuilt, explain_dump
from mla_fusion.tools.inspect.operator_kinds import INPUTS


@dataclass
class Summary:
    """See the module.

    prologues     kernels
    unknown       operators of an FX graph that the pass does not know, with how many calls
    unfused       the lines of the report of ``explain``, in an FX graph
    followed      caches that were followed from input to output
    not_followed  the others, and the operators at which they were lost
    """

    dump: str
    graph: str
    operators: dict[str, int]
    prologues: list[Prologue]
    unknown: dict[str, int]
    unfused: list[str]
    copies: list[Copy]
    followed: list[str]
    not_followed: dict[str, str]
    dynamic: dict[str, str]
    remarks: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The whole summary as JSON text."""
        return text_tables.as_json(asdict(self))

    def __str__(self) -> str:
        parts = [
            f"{self.dump}: {sum(self.operators.values())} operators",
            text_tables.render(("operator", "count"), list(self.operators.items())),
            *(["\n".join(self.unfused)] if self.unfused else []),
            *_kernels(self.prologues),
            _copies(self),
        ]
        tables: dict[str, dict[str, Any]] = {
            "Operators that the pass does not know": self.unknown,
            "Dynamic inputs": self.dynamic,
        }
        for title, found in tables.items():
            if found:
                parts.append(f"{title}\n{text_tables.render(('', ''), list(found.items()))}")
        parts += [f"note: {remark}" for remark in self.remarks]
        return "\n\n".join(parts)


def summarise(dump: Dump) -> Summary:
    """What stands in a dump; the unfused prologues are those that ``explain`` finds, without
    running them.

    dump  as :func:`read` gives it
    """
    remarks = [
        "this form is written while converting: GE's passes may have removed copies that stand here"
    ]
    inputs = {operator.name: operator.output for operator in dump.of_type(*INPUTS)}
    return Summary(
        dump=str(dump),
        graph=dump.graph,
        operators=dict(dump.counts.most_common()),
        prologues=prologues.find(dump),
        unknown={kind: count for kind, count in dump.counts.items() if _is_unknown(dump, kind)},
        unfused=_unfused(dump) if dump.is_fx else [],
        **vars(find_copies(dump)),
        dynamic={
            name: str(value)
            for name, value in inputs.items()
            if any(isinstance(size, str) or size < 0 for size in value.shape or ())
        },
        remarks=remarks if dump.format == "python" else [],
    )


def _is_unknown(dump: Dump, kind: str) -> bool:
    if not dump.is_fx or "." not in kind or prologues.is_prologue(kind):
        return False
    target = names.target(kind)
    return not isinstance(target, OpOverload) or not is_known(target)


def _unfused(dump: Dump) -> list[str]:
    try:
        return str(explain_dump(dump, Config(verify="off"))).splitlines()
    except NotRebuilt as error:
        return [f"note: unfused prologues were not looked for: {error}"]


def _kernels(found: list[Prologue]) -> list[str]:
    """Equal prologues once, with how many layers share them."""
    groups = defaultdict[str, list[Prologue]](list)
    for item in found:
        shapes = [(one.role, str(one.value)) for one in item.inputs]
        groups[str((item.type, shapes, item.attributes))].append(item)
    parts = []
    for first, *others in groups.values():
        places = f"layer {first.place}"
        if others:
            places = f"{len(others) + 1} layers, {first.place} to {others[-1].place}"
        rows = [(item.role, item.producer, str(item.value)) for item in first.inputs]
        table = text_tables.render(("input", "from", "tensor"), rows)
        attributes = ", ".join(f"{name} {value}" for name, value in first.attributes.items())
        title = f"{text_tables.short_name(first.type)} {first.name}: {places}"
        parts.append(f"{title}\n{table}\n  {attributes}")
    return parts


def _copies(summary: Summary) -> str:
    found = summary.copies
    parts = [_copied(found)] if found else []
    parts += [
        f"{cache}: not followed through {where}; whether it is copied is not known"
        for cache, where in summary.not_followed.items()
    ]
    copied = {item.of for item in found if item.role == "cache"}
    clean = ", ".join(cache for cache in summary.followed if cache not in copied)
    if clean:
        parts.append(f"Followed from input to output, and not copied: {clean}.")
    if not summary.followed and not summary.not_followed:
        parts.append(
            "No cache was found: no operator known here writes an input, or returns one "
            "with other rows."
        )
    return "\n\n".join(parts)


def _copied(found: list[Copy]) -> str:
    groups = defaultdict[Any, list[Copy]](list)
    for item in found:
        groups[item.role, item.type, item.what, item.bytes].append(item)
    rows = [
        (*how, len(items), "?" if each is None else text_tables.size(each), items[0].of)
        for (*how, each), items in groups.items()
    ]
    whole = sum(item.bytes for item in found if item.bytes is not None)
    header = ("copied", "operator", "how", "count", "each", "first of")
    return f"Copies at every run: {text_tables.size(whole)}\n{text_tables.render(header, rows)}"
