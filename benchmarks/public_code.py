"""Public MLA code on the pass: what becomes of each implementation, where rows are written, how far
it errs.

    python benchmarks/public_code.py [--write] [--only NAME]

Implementations are the entries of tests/catalogue that name who writes them so, and Hugging Face's
own models converted by `hf.optimize`, at sizes that the kernel takes. *ratio*: the largest relative
L2 error of an output (caches included) against a run in float64 (Hugging Face: float32), fused,
over that of the unfused run. *symbolic*: the verdict with dynamic=True. Exit status 1 where a
verdict is not the one that the catalogue, or the table below, has; where an error is larger than
allowed; or where nothing is said of a prologue that stays. `--write` puts the tables into
docs/public-code.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import mla_fusion as mf  # noqa: E402
from mla_fusion.models import hf  # noqa: E402
from tests.catalogue import ENTRIES, Entry  # noqa: E402
from tests.catalogue.entry import OURS  # noqa: E402
from tests.harness import assert_no_worse, clones, compiled, distance, eager, exact, outcome  # noqa: E402
from tests.models.hf_models import KERNEL, MODELS, WITH_SINKS, build  # noqa: E402

PAGE = ROOT / "docs" / "public-code.md"
BEGIN, END = "<!-- {}: written by benchmarks/public_code.py -->\n", "<!-- /{} -->"

# name: what is to become of each attention of the model, with the size of its query's latent where
# it needs one
HUGGING_FACE: dict[str, str] = {
    **dict.fromkeys(MODELS, "in place"),
    **dict.fromkeys(("deepseek_v2",), "staged"),
    "deepseek_v2_lite": "q_lora.absent",
    "deepseek_v3_bias": "linear.bias",
    "axk2": "q_lora.interrupted",
    "bailing_hybrid": "q_lora.absent",
    "kimi_linear": "q_lora.absent",
    "kimi_linear, with a query LoRA": "in place",
    "hy_v4": "attention.differs",
}
LORA = {"q_lora_rank": 1536}
DIRECT = {"q_lora_rank": None}


class Row(NamedTuple):
    implementation: str
    form: str
    verdict: str
    symbolic: str
    ratio: str
    is_right: bool


def public() -> list[Entry]:
    return [entry for entry in ENTRIES.values() if not entry.source.startswith(OURS)]


def of_entry(entry: Entry) -> Row:
    torch.manual_seed(0)
    model, args = entry.model(), entry.args()
    config = entry.config(verify="all")
    # rows of bytes have no form in float64: tests compare them otherwise
    by_bytes = "cache" in entry.tags and bool({"int8", "floats"} & entry.tags)
    wanted, unfused = ([], []) if by_bytes else (exact(model, args), eager(model, clones(args)))
    fused = compiled(model, clones(args), mf.backend(config))
    report = mf.reports()[-1]
    symbolic = _symbolic(model, args, config)
    right = outcome(report) == entry.outcome and (
        "symbolic" not in entry.tags or symbolic == entry.outcome
    )
    row = entry.source, entry.name, _words(outcome(report)), _words(symbolic)
    if not report.fused:
        return Row(*row, "", right and bool(report.rejected))
    if by_bytes:
        return Row(*row, "", right)
    try:
        assert_no_worse(wanted, unfused, fused, entry.slack)
    except AssertionError:
        right = False
    ratio = max(_ratios(wanted, unfused, fused), default=1.0)
    return Row(*row, f"{ratio:.2f}", right)


def _symbolic(model: Any, args: tuple[torch.Tensor, ...], config: mf.Config) -> tuple[str, ...]:
    """The verdict with symbolic sizes; that of a graph that torch does not make is empty."""
    known = mf.reports()
    try:
        compiled(model, clones(args), mf.backend(config), dynamic=True)
    except Exception as error:  # an operator without a kernel for symbolic sizes
        return (type(error).__name__,)
    return outcome(mf.reports()[-1]) if _since(known) else ()


def _since(known: list[mf.Report]) -> list[mf.Report]:
    """The reports that are new; only the last ones of a process are kept."""
    return [report for report in mf.reports() if not any(report is one for one in known)]


def _ratios(wanted: list[Any], unfused: list[Any], fused: list[Any]) -> Iterable[float]:
    for exactly, plain, got in zip(wanted, unfused, fused, strict=True):
        if exactly.is_floating_point() and distance(plain, exactly) > 0:
            yield distance(got, exactly) / distance(plain, exactly)


def _words(found: tuple[str, ...]) -> str:
    return (
        ", ".join(word if word in ("in place", "staged") else f"`{word}`" for word in found)
        or "silent"
    )


def of_model(name: str) -> Row:
    kind = name.partition(",")[0]
    changes = KERNEL | {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    if kind in MODELS:
        own = MODELS[kind][1]
        changes |= (
            {"num_hidden_layers": own["num_hidden_layers"]} if "num_hidden_layers" in own else {}
        )
        changes |= DIRECT if own.get("q_lora_rank", 0) is None else {}
        # one layer has two attentions
        changes |= {"num_hidden_layers": 2} if kind == "longcat_flash" else {}
        changes |= LORA if "," in name else {}
        changes["first_k_dense_replace"] = changes["num_hidden_layers"]
    attention = "eager" if kind == WITH_SINKS[0] else "sdpa"
    model = build(
        kind, {} if kind == WITH_SINKS[0] else changes, dtype=torch.bfloat16, attention=attention
    )
    summary = hf.optimize(model)
    wanted = HUGGING_FACE[name]
    if not summary.converted:
        found = {item.code for item in summary.skipped}
        return Row("transformers", name, _words(tuple(sorted(found))), "", "", found == {wanted})
    promised = {item.placement or item.kernel.partition(":")[0] for item in summary.converted}
    ids = torch.randint(3, 120, (2, 7), generator=torch.Generator().manual_seed(3))
    known = mf.reports()
    logits = [_step(model, ids, True), _step(model, ids, False), _step(model.float(), ids, False)]
    reports = _since(known)
    fused = [fusion.placement.partition(":")[0] for report in reports for fusion in report.fused]
    left = [item.code for report in reports for item in report.rejected]
    found = set(fused) | set(left)
    right = found == promised == {wanted} and len(fused) + len(left) == len(summary.converted)
    first, plain, exactly = logits
    ratio = distance(first, exactly) / distance(plain, exactly)
    return Row(
        "transformers",
        name,
        _words(tuple(sorted(found))),
        "",
        f"{ratio:.2f}" if fused else "",
        right,
    )


def _step(model: Any, ids: torch.Tensor, is_compiled: bool) -> torch.Tensor:
    """Logits of one token of each of two sequences, over a cache that holds six."""
    cache = hf.MlaPagedCache(model, max_cache_len=32)
    torch._dynamo.reset()
    step = (
        torch.compile(model.forward, backend="mla_fusion", dynamic=False) if is_compiled else model
    )
    with torch.no_grad():
        model(input_ids=ids[:, :6], past_key_values=cache)
        logits: torch.Tensor = step(input_ids=ids[:, 6:], past_key_values=cache).logits
    return logits


def table(header: tuple[str, ...], rows: Iterable[Row]) -> str:
    shown = (
        [getattr(row, name) for name in header]
        for row in sorted(rows, key=lambda row: row[0].lower())
    )
    lines = [header, ("---",) * len(header), *shown]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def written(text: str, tables: dict[str, str]) -> str:
    for name, made in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the tables to docs/public-code.md"
    )
    parser.add_argument("--only", default="", help="entries and models with this in their name")
    arguments = parser.parse_args()
    graphs = [of_entry(entry) for entry in public() if arguments.only in entry.name]
    models = [of_model(name) for name in HUGGING_FACE if arguments.only in name]
    header = ("implementation", "form", "verdict", "ratio")
    tables = {
        "graphs": table((*header[:3], "symbolic", "ratio"), graphs),
        "models": table(header, models),
    }
    for made in tables.values():
        print(made)
    rows = [*graphs, *models]
    fuse = [row for row in rows if "`" not in row.verdict]
    print(f"{len(rows)} forms, {sum(row.is_right for row in rows)} verdicts right, {len(fuse)} "
          "fused, "
          f"{sum(row.verdict == 'silent' for row in rows)} silent")  # fmt: skip
    wrong = [row for row in rows if not row.is_right]
    print(*(f"wrong: {row}" for row in wrong), sep="\n")
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(), tables))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
