"""A report as one self-contained HTML page: no network, light and dark, printable, usable without a
mouse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mla_fusion._version import __version__
from mla_fusion.report import text_tables
from mla_fusion.report.picture import INPUTS, ROLES
from mla_fusion.report.text_tables import is_number
from mla_fusion.tools.page import drawing
from mla_fusion.tools.page.cost import Part, Roofline, roofline, stretches

if TYPE_CHECKING:
    from mla_fusion.report.report import Fusion, Report

_IN_FULL = 12  # cards with a drawing of every node; more would make a page that nobody can load
STAGES = ("view", "match", "plan", "verify", "rewrite")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Section:
    """A table that a caller adds to the page."""

    title: str
    text: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def right(self) -> list[bool]:
        """Which columns hold numbers."""
        return [all(is_number(row[i]) for row in self.rows) for i in range(len(self.header))]


@dataclass(frozen=True)
class Plate:
    """One drawing with what stands around it; ``roles`` are those that occur, for the key."""

    title: str
    text: str
    svg: str
    roles: list[str]


@dataclass
class Card:
    """Prologues that differ only in their layer, shown once."""

    item: Any
    members: list[Any] = field(default_factory=list)
    dims: str = ""
    plates: list[Plate] = field(default_factory=list)
    roofline: Roofline | None = None

    @property
    def layers(self) -> list[str]:
        return [one.layer or ", ".join(one.nodes[:2]) or "unnamed" for one in self.members]

    @property
    def title(self) -> str:
        layers = self.layers
        return (
            layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"
        )


def write(report: Report, path: str | Path, sections: Sequence[Section] = ()) -> Path:
    """Write the page of ``report``, with further tables where given; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report, sections), encoding="utf-8")
    return path


def render(report: Report, sections: Sequence[Section] = ()) -> str:
    """The page as text. Everything that comes from a graph or a model is escaped."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("HTML reports need jinja2: pip install 'mla-fusion[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource), autoescape=True, undefined=jinja2.StrictUndefined
    )
    operators = text_tables.operators(
        report.operators.get("before", {}), report.operators.get("after", {})
    )
    verb = "fused" if report.committed else "to be fused"
    template = environment.get_template("page.html")
    return str(
        template.render(
            css=_resource("page.css"),
            js=_resource("page.js"),
            summary=f"{len(report.fused)} {verb}, {len(report.rejected)} left, in "
            f"{duration(report.seconds)}",
            numbers=_numbers(report),
            stages=_stages(report),
            report=report,
            fused=fused_cards(report),
            rejected=rejected_cards(report),
            sections=sections,
            operators=operators,
            config=[*asdict(report.config).items(), ("machine", str(report.config.machine))],
            data=embeddable(report.to_json()),
            version=__version__,
            size=text_tables.size,
            counted=text_tables.counted,
        )
    )


def duration(seconds: float) -> str:
    """Three figures and a unit."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def embeddable(text: str) -> str:
    """JSON text that no HTML parser takes for markup; still the same JSON."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def fold(items: Iterable[Item], key: Callable[[Item], object]) -> list[Card]:
    """One card per key, in order of first occurrence. Its item is the first."""
    cards: dict[object, Card] = {}
    for item in items:
        cards.setdefault(key(item), Card(item)).members.append(item)
    return list(cards.values())


def fused_cards(report: Report) -> list[Card]:
    """Cards of prologues with equal dims, caches and attributes; figures are those of the verified
    one.
    """
    cards = fold(report.fused, _fusion_key)
    for index, card in enumerate(cards):
        card.item = next((one for one in card.members if one.figures), card.item)
        card.dims = ", ".join(f"{name} {value}" for name, value in card.item.dims.items())
        card.roofline = roofline(card.item, report.config.machine)
        if card.item.picture is not None:
            card.plates = _before_and_after(report, card.item, every=index < _IN_FULL)
    return cards


def rejected_cards(report: Report) -> list[Card]:
    """Cards of prologues that were left for the same reason at the same line."""
    cards = fold(report.rejected, lambda one: (one.code, one.source, one.source or one.message))
    for card in cards:
        if card.item.picture is not None:
            picture = report.pictures[card.item.picture]
            failing = sum(arrow.failing for arrow in picture.before.arrows)
            text = (
                f"{picture.layer or 'this prologue'}; in red, why it is left"
                if failing
                else picture.layer
            )
            card.plates = [
                _plate("What was found", text, drawing.steps(picture.before), card.item.picture)
            ]
    return cards


def _before_and_after(report: Report, item: Fusion, every: bool) -> list[Plate]:
    assert item.picture is not None
    number, picture = item.picture, report.pictures[item.picture]
    count = sum(bool(dot.op) and dot.role not in INPUTS for dot in picture.before.dots)
    whose = f" of {picture.layer}" if picture.layer else ""
    plates = [
        _plate("Before", f"{count} nodes{whose}, by step", drawing.steps(picture.before), number)
    ]
    if picture.after is not None:
        call = drawing.steps(picture.after)
        beside = (
            f"one call, and {item.launches_left} launches beside it" if item.leaves else "one call"
        )
        plates.append(_plate("After", beside, call, number, side="after"))
    if every:
        nodes = drawing.nodes(picture.before)
        plates.append(_plate("Before", f"every node{whose}", nodes, number, across=False))
    return plates


def _plate(
    title: str,
    text: str,
    drawn: drawing.Drawn,
    number: int,
    side: str = "before",
    across: bool = True,
) -> Plate:
    boxes, lines = drawn
    label = f"{title}: {text}. {len(boxes)} boxes; arrow keys move between them."
    occurring = {box.role for box in boxes}
    svg = drawing.svg(boxes, lines, f"{number}.{side}", label, across)
    return Plate(title, text, svg, [role for role in ROLES if role in occurring])


def _fusion_key(item: Fusion) -> object:
    # the code; not the line, which unrolled loops may repeat
    where = item.source.partition(" in ")[2]
    call = (
        item.dims,
        item.cache_mode,
        item.placement,
        item.rope,
        item.attributes,
        item.assumptions,
    )
    staging = [one.code for one in item.staged_by], [asdict(one) for one in item.leaves]
    return json.dumps((*call, *staging, item.picture, where), default=str, sort_keys=True)


def _numbers(report: Report) -> list[tuple[str, str]]:
    """Rows of text; a row that says nothing of this report is left out."""
    figures = [figure.relative for fusion in report.fused for figure in fusion.figures]
    before = sum(item.operators_before for item in report.fused)
    after = sum(item.operators_after for item in report.fused)
    done, on_npu = report.committed, report.bytes_on_npu
    rows = {
        "fused" if done else "would fuse": str(len(report.fused)),
        "left": str(len(report.rejected)),
        "operators of these prologues": f"{before:,} to {after:,}" if before else "",
        "nodes before": f"{report.nodes_before:,}" if done else "",
        "nodes after": f"{report.nodes_after:,}" if done else "",
        "pass time": duration(report.seconds),
        "weights added": text_tables.size(report.bytes_added) if done else "",
        "weights added on an NPU": "" if on_npu is None else text_tables.size(on_npu),
        "differs from unfused by": f"{max(figures):.1e}" if figures else "",
    }
    return [(name, text) for name, text in rows.items() if text]


def _stages(report: Report) -> list[Part]:
    """Bars one after the other, in percent of the total."""
    seconds = {name: report.timings.get(name, 0.0) for name in STAGES}
    total = sum(seconds.values())
    return stretches(seconds, total, duration) if total > 0 else []


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
