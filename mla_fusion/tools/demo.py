"""``mla-fusion demo``: Hugging Face's DeepSeek-V3 decoded fused and unfused, compared, lowered and
written out.

Runs on a CPU. What an NPU would execute is taken from the real torchair, which needs no device to
lower a graph.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import mla_fusion as mf
from mla_fusion.models.absorbed import AbsorbedDecoder
from mla_fusion.models.hf import random_decoder
from mla_fusion.report import text_tables
from mla_fusion.report.report import Report
from mla_fusion.tools import accuracy
from mla_fusion.tools.accuracy import DEVIATIONS, LARGEST_RATIO, Measurement
from mla_fusion.tools.page import page
from mla_fusion.tools.paged import PagedBatch, random_batch

KERNEL = "MlaPrologV3"
MOVES = ("TensorMove", "Assign")


@dataclass(frozen=True)
class Options:
    """Sizes of the demo; the defaults are DeepSeek-V3's, with the heads of one rank of eight."""

    out: Path = Path("out")
    layers: int = 2
    heads: int = 16
    batch: int = 8
    hidden: int = 7168
    intermediate: int = 2048
    history: int = 1000

    def quick(self) -> Options:
        """Small sizes that the kernel still takes; heads, layers and batch stay as asked."""
        return replace(self, hidden=1024, intermediate=256, history=200)


@dataclass
class Lowered:
    """What torchair makes of the model: GE operators of the fused and of the unfused one.

    refusal   what torchair alone says to the unfused one; its operators are then those with our
              converters added
    """

    missing: str = ""
    operators: dict[str, int] = field(default_factory=dict)
    unfused: dict[str, int] = field(default_factory=dict)
    refusal: str = ""

    def problems(self, layers: int) -> Iterator[str]:
        count = self.operators.get(KERNEL, 0)
        if not self.missing and count != layers:
            yield f"the GE graph holds {count} {KERNEL}, expected {layers}"
        moved = {name: self.operators[name] for name in MOVES if name in self.operators}
        if moved:
            yield f"the GE graph copies caches: {moved}"

    def table(self) -> tuple[Sequence[str], list[tuple[str, int, int]]]:
        rows = text_tables.operators(self.unfused, self.operators)
        return ("GE operator", "unfused", "fused"), rows

    @property
    def how(self) -> str:
        if not self.refusal:
            return "Both sides as torchair lowers them."
        return (
            f"torchair alone refuses the unfused model ({self.refusal}); it is lowered with our "
            "converters added."
        )

    def __str__(self) -> str:
        if self.missing:
            return f"GE graph: {self.missing}"
        return f"GE operators, by torchair\n{text_tables.render(*self.table())}\n{self.how}"


@dataclass
class Outcome:
    """Everything the demo found. ``problems`` is empty where every check passed."""

    options: Options
    report: Report
    measurements: list[Measurement]
    lowered: Lowered
    seconds: float = 0.0
    peak_gib: float = 0.0
    files: list[Path] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        layers, fused = self.options.layers, len(self.report.fused)
        found = [] if fused == layers else [f"{fused} of {layers} prologues were fused"]
        for item in self.measurements:
            found += [f"{item.where}, {item.output}: {problem}" for problem in item.problems]
        return [*found, *self.lowered.problems(layers)]

    def to_json(self) -> str:
        """The demo's numbers beside the pass's own report."""
        rows = [
            {
                **asdict(item),
                "ratio": item.ratio,
                "largest_ratio_allowed": item.allowed,
                "passed": not item.problems,
            }
            for item in self.measurements
        ]
        data = {
            "options": asdict(self.options),
            "measurements": rows,
            "ge": asdict(self.lowered),
            "problems": self.problems,
            "seconds": round(self.seconds, 2),
            "peak_gib": round(self.peak_gib, 2),
            "files": self.files,
            "report": json.loads(self.report.to_json()),
        }
        return text_tables.as_json(data)

    def __str__(self) -> str:
        operators = self.report.operators
        changed = text_tables.operators(operators.get("before", {}), operators.get("after", {}))
        problems = "\n".join(f"FAILED: {line}" for line in self.problems)
        parts = [
            str(self.report),
            "Relative L2 error against float64 (layer n: its prologue alone; model: the whole "
            "step)\n" + text_tables.render(*measurement_table(self.measurements)),
            "FX operators of the compiled graph\n"
            + text_tables.render(("operator", "before", "after"), changed),
            str(self.lowered),
            "Written: " + ", ".join(map(str, self.files)),
            f"{self.seconds:.0f} s, peak memory {self.peak_gib:.1f} GiB",
            problems or "All checks passed.",
        ]
        return "\n\n".join(parts)


def run(options: Options) -> Outcome:
    """The whole demo; writes ``options.out``. Raises TransformersMissing without Hugging Face's
    modules.
    """
    started = perf_counter()

    def say(message: str) -> None:
        seconds = perf_counter() - started
        print(f"[{seconds:6.1f} s] {message}", file=sys.stderr, flush=True)

    options.out.mkdir(parents=True, exist_ok=True)
    say(f"random bfloat16 weights: {options.layers} layers, He {options.hidden}, N {options.heads}")
    model = random_decoder(
        layers=options.layers,
        heads=options.heads,
        hidden=options.hidden,
        intermediate=options.intermediate,
    )
    batch = random_batch(
        layers=options.layers, batch=options.batch, hidden=options.hidden, history=options.history
    )
    with torch.no_grad():
        say("each layer's prologue: unfused, fused, float64")
        measurements = accuracy.measure_prologues(model, batch, _compile)
        say(f"a decode step of {options.batch} sequences: unfused, fused, float64")
        measurements += accuracy.measure_model(model, batch, _compile)
    report = mf.reports()[-1]
    say("lowering with torchair")
    lowered, files = _lower(model, batch, options.out)
    outcome = Outcome(options, report, measurements, lowered)
    outcome.seconds = perf_counter() - started
    outcome.peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    outcome.files = sorted({*files, options.out / "report.html", options.out / "report.json"})
    page.write(report, options.out / "report.html", sections(outcome))
    (options.out / "report.json").write_text(outcome.to_json(), encoding="utf-8")
    say("done")
    return outcome


def measurement_table(
    measurements: Sequence[Measurement],
) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows of the errors."""
    words = {None: "-", True: "yes", False: "NO"}
    header = "where output unfused fused ratio allowed".split()
    return [*header, "other rows identical", "check"], [
        (
            item.where,
            item.output,
            f"{item.unfused:.3e}",
            f"{item.fused:.3e}",
            f"{item.ratio:.2f}",
            f"{item.allowed:.2f}",
            words[item.untouched],
            "FAILED" if item.problems else "ok",
        )
        for item in measurements
    ]


def sections(outcome: Outcome) -> list[page.Section]:
    """What the demo adds to the page of the report."""
    errors = page.Section(
        "Accuracy",
        "Relative L2 error against float64. A layer's rows are its prologue alone, from the same "
        "bfloat16 input; the model's rows carry the errors of earlier layers. "
        f"Passed where fused is at most {LARGEST_RATIO} x unfused, and {DEVIATIONS} / sqrt(n) for "
        "chance: the errors are those of n rounded numbers.",
        *measurement_table(outcome.measurements),
    )
    lowered = outcome.lowered
    header, counts = lowered.table()
    rows = [(name, str(before), str(after)) for name, before, after in counts]
    ge = page.Section("GE graph", lowered.missing or lowered.how, header if rows else (), rows)
    return [errors, ge]


def _compile(module: torch.nn.Module) -> Callable[..., Any]:
    return torch.compile(module, backend=mf.backend(), fullgraph=True)


def _lower(model: AbsorbedDecoder, batch: PagedBatch, out: Path) -> tuple[Lowered, list[Path]]:
    if find_spec("torch_npu") is None:
        missing = (
            "torch_npu is not installed, so nothing was lowered to GE; the FX graphs are those of "
            "the CPU."
        )
        return Lowered(missing), _save_cpu_graphs(model, batch, out)
    from mla_fusion import converters
    from mla_fusion.tools.lowering import LoweringError

    fused = mf.lower(model, *batch)
    files = fused.save(out)
    refusal, off = "", mf.Config(enable=False)
    try:
        unfused = mf.lower(model, *batch, config=off)
    except LoweringError as error:
        refusal = str(error)
        with converters.unfused_registered():
            unfused = mf.lower(model, *batch, config=off)
    return Lowered("", dict(fused.ge_ops), dict(unfused.ge_ops), refusal), files


def _save_cpu_graphs(model: AbsorbedDecoder, batch: PagedBatch, out: Path) -> list[Path]:
    from mla_fusion.compile.device_graph import capture

    gm, _ = capture(model, *batch, device="cpu")
    files = [out / "fx_before.txt", out / "fx_after.txt"]
    files[0].write_text(gm.print_readable(print_output=False))
    mf.fuse(gm)
    files[1].write_text(gm.print_readable(print_output=False))
    return files
