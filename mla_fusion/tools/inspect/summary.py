"""Sums up a dump: operators, MLA prologues, copies of whole caches, dynamic inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from mla_fusion.compat import OpOverload, given_by_name
from mla_fusion.config import Config
from mla_fusion.graph.decompose import is_known
from mla_fusion.report import text_tables
from mla_fusion.tools.dumps import Dump, Operator, Value, checked, names
from mla_fusion.tools.dumps.model import Attributes
from mla_fusion.tools.inspect.copies import Copy, find_copies
from mla_fusion.tools.inspect.explain import NotRebuilt, explain_dump
from mla_fusion.tools.inspect.operator_kinds import INPUTS, is_prologue, roles_of

_SHOWN = """
    cache_mode rmsnorm_epsilon_cq rmsnorm_epsilon_ckv weight_quant_mode kv_cache_quant_mode
    query_quant_mode query_norm_flag ckvkr_repo_mode quant_scale_repo_mode tile_size qc_qr_scale
    kc_scale
""".split()
_BEFORE_PASSES = (
    "this form is written while converting: GE's passes may have removed copies that stand here"
)


@dataclass(frozen=True)
class Input:
    """One input of a prologue operator: its role, its producer, and the tensor."""

    role: str
    producer: str
    value: Value


@dataclass(frozen=True)
class Prologue:
    """One prologue operator.

    place  its number in the order of the dump, which is that of the layers
    """

    place: int
    name: str
    type: str
    inputs: tuple[Input, ...]
    attributes: Attributes
    source: str


@dataclass
class Summary:
    """What is in a dump.

    prologues     prologue operators
    unknown       operators of an FX graph that the pass does not know, and their calls
    unfused       for an FX graph, the lines of the report of ``explain``
    followed      caches that were followed from input to result
    not_followed  the other caches, with the operators that are not known
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
        """Returns the summary as JSON text."""
        return text_tables.as_json(asdict(self))

    def __str__(self) -> str:
        tables: dict[str, dict[str, Any]] = {
            "Operators that the pass does not know": self.unknown,
            "Dynamic inputs": self.dynamic,
        }
        parts = [
            f"{self.dump}: {sum(self.operators.values())} operators",
            text_tables.render(("operator", "count"), [*self.operators.items()]),
            "\n".join(self.unfused),
            *_kernels(self.prologues),
            *_copies(self),
            *(
                f"{title}\n{text_tables.render(('', ''), [*table.items()])}"
                for title, table in tables.items()
                if table
            ),
            *(f"note: {remark}" for remark in self.remarks),
        ]
        return "\n\n".join(filter(None, parts))


def summarise(dump: Dump) -> Summary:
    """Returns what is in a dump. Unfused prologues are those that ``explain`` finds; nothing runs.

    dump  as :func:`read` returns it

    Raises TypeError for anything else.
    """
    kernels = [operator for operator in checked(dump).operators if is_prologue(operator.type)]
    return Summary(
        dump=str(dump),
        graph=dump.graph,
        operators=dict(dump.counts.most_common()),
        prologues=[_prologue(dump, place, kernel) for place, kernel in enumerate(kernels)],
        unknown={kind: count for kind, count in dump.counts.items() if _is_unknown(dump, kind)},
        unfused=_unfused(dump) if dump.is_fx else [],
        **vars(find_copies(dump)),
        dynamic={
            operator.name: str(operator.output)
            for operator in dump.of_type(*INPUTS)
            if any(isinstance(size, str) or size < 0 for size in operator.output.shape or ())
        },
        remarks=[_BEFORE_PASSES] if dump.format == "python" else [],
    )


def _is_unknown(dump: Dump, kind: str) -> bool:
    """Returns True for an operator of an FX graph that the pass does not know."""
    if not dump.is_fx or "." not in kind or is_prologue(kind):
        return False
    target = names.target(kind)
    return not isinstance(target, OpOverload) or not is_known(target)


def _prologue(dump: Dump, place: int, operator: Operator) -> Prologue:
    """Returns the entry of a prologue operator."""
    inputs = tuple(
        Input(role, str(edge), dump.value(edge))
        for role, edge in zip(roles_of(operator), operator.inputs, strict=False)
        if edge is not None
    )
    target, attributes = names.target(operator.type), operator.attributes
    if isinstance(target, OpOverload):  # an FX call leaves out the schema's defaults
        attributes = given_by_name(target, *operator.call)
    shown = {name: attributes[name] for name in _SHOWN if name in attributes}
    return Prologue(place, operator.name, operator.type, inputs, shown, operator.source)


def _unfused(dump: Dump) -> list[str]:
    """Returns the lines of the report on an FX graph."""
    try:
        return str(explain_dump(dump, Config(verify="off"))).splitlines()
    except NotRebuilt as error:
        return [f"note: unfused prologues were not looked for: {error}"]


def _kernels(prologues: list[Prologue]) -> Iterator[str]:
    """Yields a table for each prologue; equal prologues have one."""
    groups = defaultdict[str, list[Prologue]](list)
    for prologue in prologues:
        shapes = [(item.role, str(item.value)) for item in prologue.inputs]
        groups[str((prologue.type, shapes, prologue.attributes))].append(prologue)
    for first, *others in groups.values():
        places = f"layer {first.place}"
        if others:
            places = f"{len(others) + 1} layers, {first.place} to {others[-1].place}"
        rows = [(item.role, item.producer, item.value) for item in first.inputs]
        table = text_tables.render(("input", "from", "tensor"), rows)
        attributes = ", ".join(f"{name} {value}" for name, value in first.attributes.items())
        title = f"{text_tables.short_name(first.type)} {first.name}: {places}"
        yield f"{title}\n{table}\n  {attributes}"


def _copies(summary: Summary) -> Iterator[str]:
    """Yields what is known of copies of caches."""
    if summary.copies:
        yield _copied(summary.copies)
    for cache, where in summary.not_followed.items():
        yield f"{cache}: not followed through {where}; whether it is copied is not known"
    copied = {copy.of for copy in summary.copies if copy.role == "cache"}
    if clean := [cache for cache in summary.followed if cache not in copied]:
        yield f"Followed from input to output, and not copied: {', '.join(clean)}."
    if not summary.followed and not summary.not_followed:
        yield (
            "No cache was found: no operator known here writes an input, or returns one "
            "with other rows."
        )


def _copied(copies: list[Copy]) -> str:
    """Returns the table of copies; copies of equal kind and size have one row."""
    groups = defaultdict[Any, list[Copy]](list)
    for copy in copies:
        groups[copy.role, copy.type, copy.what, copy.bytes].append(copy)
    rows = [
        (*how, len(group), "?" if size is None else text_tables.size(size), group[0].of)
        for (*how, size), group in groups.items()
    ]
    total = sum(copy.bytes or 0 for copy in copies)
    header = ("copied", "operator", "how", "count", "each", "first of")
    return f"Copies at every run: {text_tables.size(total)}\n{text_tables.render(header, rows)}"
