"""Defines the report of one graph: what the pass fused, what it left, and why.

``observe/record.py`` fills it; ``store.py`` keeps it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mla_fusion import _lazy
from mla_fusion.config import Config
from mla_fusion.report import text_tables
from mla_fusion.report.rejection import Rejection
from mla_fusion.report.staging import Leftover, StagedBy

SCHEMA = 1  # of the JSON; docs/stability.md says when it changes


@dataclass(frozen=True)
class Figure:
    """Compares one output, fused against unfused, over all draws.

    output    the name of the output
    relative  the relative L2 error
    largest   the largest difference
    elements  how many elements the output has
    row       the relative L2 error of the worst row (of a token, or of a cache)
    float64   relative L2 errors of the fused and of the unfused values, against the unfused run in
              float64 on ordinary inputs; None if that does not run
    """

    output: str
    relative: float
    largest: float
    elements: int
    row: float = 0.0
    float64: tuple[float, float] | None = None


@dataclass(frozen=True)
class Fusion:
    """One prologue that became one kernel call (or, from ``explain``, would).

    layer       module path of the prologue; if the model is one layer, its class
    source      the line of the model that its first product came from
    nodes       names of the nodes that recognition rests on
    dims        sizes by the kernel's names of them
    cache_mode  the operator's cache_mode
    attributes  the attributes of the call, cache_mode among them
    rope        element order of the rotation, in and out
    replaced    names of nodes, and the result of the kernel that stands for each
    assumptions  what is taken for granted, a line for each
    warnings    lines about caches that hold other numbers than the model's, or that GE copies at
                every step
    verified    what verification found, in words
    target      the one of ``Config.targets`` that took the prologue
    operator    the operator that is called
    instead_of  why the target above did not take the prologue, ``[code] message``; empty for the
                first target
    placement   "in place" (the kernel writes the model's caches), "staged: <the first of
                staged_by>", or "written by the kernel into new caches .." (the model returns new
                ones)
    staged_by   what stands between a staged fusion and a write in place, as far as it was found,
                with what to write instead
    leaves      what a staged fusion leaves in the graph, and what a step pays for it
    operators_before, operators_after  operators of the prologue and its cache writes, without views
    saves       an estimate of what a call saves, in words; "" if none can be made
    figures     per output, fused against unfused on seeded inputs; empty if ``verified`` says that
                another layer of equal structure stood for this one, or that verification was off
    proof       why the fusion is exact, a line for each fact, and last what verification compared
    compared    what verification ran: at how many tokens, on how many draws, how many outputs;
                empty if figures is
    steps       each node of the prologue: name, operator, value, line of the model; empty if
                figures is
    """

    layer: str
    nodes: tuple[str, ...]
    dims: dict[str, Any]
    cache_mode: str
    placement: str
    rope: str
    attributes: dict[str, Any]
    replaced: dict[str, str]
    assumptions: tuple[str, ...]
    verified: str
    figures: tuple[Figure, ...]
    source: str = ""
    steps: tuple[tuple[str, str, str, str], ...] = ()
    compared: str = ""
    proof: tuple[str, ...] = ()
    target: str = "v3"
    operator: str = ""
    instead_of: str = ""
    warnings: tuple[str, ...] = ()
    staged_by: tuple[StagedBy, ...] = ()
    leaves: tuple[Leftover, ...] = ()
    operators_before: int = 0
    operators_after: int = 0
    saves: str = ""

    @property
    def gain(self) -> str:
        """Returns what the fusion changes, in words; "" if it was not counted."""
        if not self.operators_before:
            return ""
        return f"{self.operators_before} operators become {self.operators_after}"

    @property
    def launches_left(self) -> int:
        """Returns how many kernels, besides the fused one, staging costs a step."""
        return sum(item.launches for item in self.leaves)

    @property
    def cost_of_staging(self) -> str:
        """Returns launches and bytes of a step, in words; "" for a fusion in place."""
        if not self.leaves:
            return ""
        tokens = sum(item.bytes_per_token for item in self.leaves)
        cost = f"{self.launches_left} launches, {text_tables.size(tokens)} a token"
        sizes = [item.bytes for item in self.leaves]
        if None in sizes:  # the sizes of a cache are symbolic
            return f"{cost}, and whole caches if the compiler rebuilds them"
        if whole_bytes := sum(size or 0 for size in sizes):
            size = text_tables.size(whole_bytes)
            return f"{cost}, and whole caches ({size}) if the compiler rebuilds them"
        return cost


@dataclass(repr=False, eq=False)
class Report:
    """What the pass did to one graph. Printing it gives a summary.

    config           the options the pass ran under
    fused, rejected  one entry per prologue, in graph order
    timings          wall time by stage in seconds, "total" among them
    nodes_before, nodes_after  how many nodes the graph has
    committed        False if nothing was to be changed (:func:`explain`)
    bytes_added      bytes of packed weights, in this process
    operators        how often each operator stands in the graph, before and after
    absent           for a graph without a prologue: what one is made of, and how much of it is
                     there
    notes            what else is known of the graph: that dynamo broke it in pieces, that changes
                     of its weights are not counted
    """

    config: Config
    fused: list[Fusion] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    committed: bool = True
    bytes_added: int = 0
    operators: dict[str, dict[str, int]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Returns the wall time of the pass."""
        return self.timings.get("total", 0.0)

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        data = asdict(self)
        data["config"]["skip"] = [str(entry) for entry in self.config.skip]
        data["seconds"] = self.seconds
        data["machine"] = str(self.config.machine)
        data["schema"] = SCHEMA
        for row, rejection in zip(data["rejected"], self.rejected, strict=True):
            row["remedy"] = rejection.remedy
        return text_tables.as_json(data)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained HTML page. Returns its path.

        path  of the page
        """
        return _lazy.write_page(self, Path(path))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._summary()}>"

    def _summary(self) -> str:
        """Returns how many prologues were fused and left, and for which machine."""
        verb = "fused" if self.committed else "would fuse"
        return (
            f"{verb} {len(self.fused)}, left {len(self.rejected)}, in {self.seconds * 1e3:.0f} ms, "
            f"for {self.config.machine}"
        )

    def __str__(self) -> str:
        lines = [f"mla_fusion: {self._summary()}"]
        for fusion in self.fused:
            lines += _fusion_lines(fusion)
        for rejection in self.rejected:
            lines.append(f"  - {rejection.where}: [{rejection.code}] {rejection.message}")
            lines.append(f"      to fuse: {rejection.remedy}")
            if rejection.source:
                lines.append(f"      at {rejection.source}")
        if not self.fused and not self.rejected:
            lines += [f"  {line}" for line in self.absent]
        lines += [f"  note: {line}" for line in self.notes]
        return "\n".join(lines)


def _fusion_lines(fusion: Fusion) -> list[str]:
    """Returns the lines that the report prints of one fusion."""
    parts = ["staged" if fusion.staged_by else fusion.placement, fusion.gain, fusion.saves]
    if "N_padded" in fusion.dims:
        parts.append(f"{fusion.dims['N']} heads computed as {fusion.dims['N_padded']}")
    facts = ", ".join(filter(None, parts))
    lines = [f"  + {fusion.layer or fusion.nodes[0]}: {facts}; {_error_text(fusion)}"]
    if fusion.instead_of:
        lines.append(f"      not by the target above: {fusion.instead_of}")
    lines += [f"      warning: {warning}" for warning in fusion.warnings]
    lines += [f"      assumed: {text}" for text in fusion.assumptions]
    if fusion.leaves:
        leftovers = ", ".join(
            f"{item.what} ({text_tables.format_counts(item.operators)})" for item in fusion.leaves
        )
        lines.append(f"      stays in the graph: {leftovers}")
        lines.append(f"      each step pays: {fusion.cost_of_staging}")
    if fusion.staged_by:
        lines.append("      to write in place:")
    messages: dict[tuple[str, str], list[str]] = {}
    for item in fusion.staged_by:
        messages.setdefault((item.code, item.remedy), []).append(item.message)
    for (code, remedy), texts in messages.items():
        lines.append(f"        [{code}] {'; '.join(texts)}. {remedy}")
    return lines


def _error_text(fusion: Fusion) -> str:
    """Returns the error of the compared output with the largest error, as text."""
    errors = [figure.float64 for figure in fusion.figures if figure.float64 is not None]
    if errors:
        fused, unfused = max(errors)
        return f"error against float64 {fused:.1e}, unfused {unfused:.1e}"
    if fusion.figures:
        worst = max(figure.relative for figure in fusion.figures)
        return f"differs by {worst:.1e} from unfused"
    return fusion.verified
