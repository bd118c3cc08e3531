"""A report as one self-contained HTML page: no network, no script, light and dark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_fusion._version import __version__
from mla_fusion.report import text_tables

if TYPE_CHECKING:
    from mla_fusion.report.report import Report


@dataclass(frozen=True)
class Section:
    """A table that a caller adds to the page."""

    title: str
    text: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


def write(report: Report, path: str | Path, sections: Sequence[Section] = ()) -> Path:
    """Write the page of ``report``, with further tables where given; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report, sections), encoding="utf-8")
    return path


def render(report: Report, sections: Sequence[Section] = ()) -> str:
    """The page as text. Everything that comes from a graph or a model is escaped."""
    import jinja2  # torch requires it, and a process that writes no page need not load it

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    folder = resources.files(__package__)
    template, css = (
        folder.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css")
    )
    counts = text_tables.operator_rows(
        *(report.operators.get(at, {}) for at in ("before", "after"))
    )
    seconds = [(stage, f"{1e3 * time:,.1f}") for stage, time in report.timings.items()]
    return environment.from_string(template).render(
        css=css,
        report=report,
        summary=str(report).partition("\n")[0].removeprefix("mla_fusion: "),
        fused=_cards(report.fused, _call),
        rejected=_cards(report.rejected, lambda one: (one.code, one.source or one.message)),
        sections=[*sections],
        counts=counts,
        seconds=seconds,
        options=[*asdict(report.config).items()],
        version=__version__,
        size=text_tables.size,
        counted=text_tables.format_counts,
    )


def _cards(items: Iterable[Any], key: Callable[[Any], object]) -> list[dict[str, Any]]:
    """Prologues that differ only in their layer, shown once; ``item`` stands for them: the figures
    of a structure are with the layer that was verified.
    """
    cards = defaultdict[str, list[Any]](list)
    for item in items:
        cards[str(key(item))].append(item)
    return [
        {"item": max(layers, key=lambda one: bool(getattr(one, "figures", ()))), "layers": layers}
        for layers in cards.values()
    ]


def _call(one: Any) -> object:
    """What two fusions have in common whose call is the same, of the same code."""
    code = one.source.partition(" in ")[2]  # without the line, which unrolled loops may repeat
    facts = one.dims, one.placement, one.attributes, one.rope, one.assumptions, one.staged_by
    return *facts, one.leaves, code
