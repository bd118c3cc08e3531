"""Writes a report as one self-contained HTML page: no network, no script, light and dark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_fusion._version import __version__
from mla_fusion.report import text_tables

if TYPE_CHECKING:
    from mla_fusion.report.report import Report


@dataclass(frozen=True)
class Section:
    """A further table of the page."""

    title: str
    text: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


def write(report: Report, path: str | Path, sections: Sequence[Section] = ()) -> Path:
    """Writes the page of a report, with further tables, and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report, sections), encoding="utf-8")
    return path


def render(report: Report, sections: Sequence[Section] = ()) -> str:
    """Returns the page as text. Everything that comes from a graph or a model is escaped."""
    import jinja2  # torch requires it; only a process that writes a page loads it

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    folder = resources.files(__package__)
    template, css = (
        folder.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css")
    )
    before, after = (report.operators.get(side, {}) for side in ("before", "after"))
    seconds = [(stage, f"{1e3 * time:,.1f}") for stage, time in report.timings.items()]
    return environment.from_string(template).render(
        css=css,
        report=report,
        summary=str(report).partition("\n")[0].removeprefix("mla_fusion: "),
        fused=_cards(report.fused, _call),
        rejected=_cards(report.rejected, lambda left: (left.code, left.source or left.message)),
        sections=list(sections),
        counts=text_tables.operator_rows(before, after),
        seconds=seconds,
        options=[*asdict(report.config).items()],
        version=__version__,
        size=text_tables.size,
        counted=text_tables.format_counts,
    )


def _cards(items: Iterable[Any], key: Callable[[Any], object]) -> list[dict[str, Any]]:
    """Returns a card for each group of prologues that differ only in their layer.

    Its ``item`` is the layer that was verified, which has the figures of the structure.
    """
    cards = defaultdict[str, list[Any]](list)
    for item in items:
        cards[str(key(item))].append(item)
    return [
        {"item": max(layers, key=lambda item: bool(getattr(item, "figures", ()))), "layers": layers}
        for layers in cards.values()
    ]


def _call(fusion: Any) -> object:
    """Returns a key that two fusions share if the same code makes the same call."""
    code = fusion.source.partition(" in ")[2]  # without the line, which unrolled loops may repeat
    names = "dims placement attributes rope assumptions staged_by leaves"
    return code, attrgetter(*names.split())(fusion)
