"""``mla-fusion demo``: decodes Hugging Face's DeepSeek-V3 fused and unfused, compares the outputs,
lowers both, and writes a report.

It runs on a CPU. The real torchair, which needs no device, lowers the graphs for an NPU.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch

import mla_fusion as mf
from mla_fusion.models import hf
from mla_fusion.report import text_tables
from mla_fusion.report.report import Report
from mla_fusion.tools.accuracy import distance
from mla_fusion.tools.page import page

KERNEL = "MlaPrologV3"
MOVES = ("TensorMove", "Assign")
MOST = 5e-2  # the largest distance between the outputs of two bfloat16 runs


@dataclass(frozen=True)
class Options:
    """The sizes of the demo. Defaults are DeepSeek-V3's."""

    out: Path
    layers: int
    heads: int
    batch: int
    hidden: int = 7168
    intermediate: int = 2048
    history: int = 100

    def quick(self) -> Options:
        """Returns the same heads, layers and batch with small sizes that the kernel takes."""
        return replace(self, hidden=1024, intermediate=256, history=20)


@dataclass(frozen=True)
class Lowered:
    """The GE operators of the unfused and of the fused model. ``how`` says how torchair lowered
    them, or why there are none.
    """

    how: str
    unfused: dict[str, int]
    fused: dict[str, int]


@dataclass
class Outcome:
    """The results of the demo.

    difference  the relative L2 distance of the fused output from the unfused output
    """

    options: Options
    report: Report
    difference: float
    lowered: Lowered
    files: list[Path]

    @property
    def problems(self) -> list[str]:
        """Returns a sentence for each check that fails."""
        layers, fused, operators = self.options.layers, len(self.report.fused), self.lowered.fused
        kernels = operators.get(KERNEL, 0)
        moves = {name: operators[name] for name in MOVES if name in operators}
        difference = f"{self.difference:.1e}, allowed {MOST:.0e}"
        is_fine = {
            f"{fused} of {layers} prologues were fused": fused == layers,
            f"the fused output differs by {difference}": self.difference <= MOST,
            f"the GE graph holds {kernels} {KERNEL}, expected {layers}": kernels == layers
            or not operators,
            f"the GE graph copies caches: {moves}": not moves,
        }
        return [problem for problem, passed in is_fine.items() if not passed]

    def to_json(self) -> str:
        """Returns the demo's numbers and the pass's report as JSON text."""
        data = asdict(replace(self, report=json.loads(self.report.to_json())))
        return text_tables.as_json(data | {"problems": self.problems})

    @property
    def section(self) -> page.Section:
        """Returns the demo's table for the page of the report."""
        counts = text_tables.operator_rows(self.lowered.unfused, self.lowered.fused)
        header = ("GE operator", "unfused", "fused")
        return page.Section("GE graph", self.lowered.how, header, counts)

    def __str__(self) -> str:
        problems = "\n".join(f"FAILED: {line}" for line in self.problems)
        ge = self.section
        return f"""{self.report}

A decode step in bfloat16: fused and unfused output differ by {self.difference:.1e}

{ge.title}: {ge.text}
{text_tables.render(ge.header, ge.rows)}

Written: {", ".join(map(str, self.files))}

{problems or "All checks passed."}"""


def run(options: Options) -> Outcome:
    """Runs the demo, and writes into ``options.out``. Raises TransformersMissing without Hugging
    Face's modules.
    """
    start = perf_counter()

    def say(message: str) -> None:
        """Prints a stage, with the seconds since the start."""
        print(f"[{perf_counter() - start:6.1f} s] {message}", file=sys.stderr, flush=True)

    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    say(f"random bfloat16 weights: {options.layers} layers, He {options.hidden}, N {options.heads}")
    step, ids = _decode_step(options)
    say(f"a decode step of {options.batch} sequences: unfused, fused")
    fused, unfused = (hf.DecodeStep(step.model, deepcopy(step.cache)) for _ in range(2))
    compiled = torch.compile(fused, backend=mf.backend(), fullgraph=True)
    with torch.no_grad():
        difference = distance(compiled(ids), unfused(ids))
    report = mf.reports()[-1]
    say("lowering with torchair")
    lowered, files = _lower(step, ids, out)
    files = sorted({*files, out / "report.html", out / "report.json"})
    outcome = Outcome(options, report, difference, lowered, files)
    page.write(report, out / "report.html", [outcome.section])
    (out / "report.json").write_text(outcome.to_json(), encoding="utf-8")
    return outcome


def _decode_step(options: Options) -> tuple[hf.DecodeStep, torch.Tensor]:
    """Returns a step of Hugging Face's DeepSeek-V3 over pages that hold a prompt, and the ids of
    the new tokens. Weights and ids are random; the MLPs are dense.
    """
    config = hf.modeling().DeepseekV3Config(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        first_k_dense_replace=options.layers,
    )
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    hf.optimize(model)
    cache = hf.MlaPagedCache(model, max_cache_len=options.history + 1)
    ids = torch.randint(config.vocab_size, (options.batch, options.history + 1))
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache)
    return hf.DecodeStep(model, cache), ids[:, -1:]


def _lower(step: hf.DecodeStep, ids: torch.Tensor, out: Path) -> tuple[Lowered, list[Path]]:
    """Lowers a step fused and unfused, and writes the stages of the fused step into ``out``."""
    if find_spec("torch_npu") is None:
        return Lowered("none: torch_npu is not installed", {}, {}), []
    fused = mf.lower(step, ids)
    unfused = mf.lower(step, ids, config=mf.Config(enable=False))
    how = "Both sides as torchair lowers them."
    return Lowered(how, dict(unfused.ge_ops), dict(fused.ge_ops)), fused.save(out)
