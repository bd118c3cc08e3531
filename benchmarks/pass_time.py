"""Time of the pass on graphs of 1 to 61 layers, beside Inductor's and torch.fx's matchers on the
same graphs.

    python benchmarks/pass_time.py [--quick] [--layers 1 8 32 61] [--dims small v3] [--repeat 5]
    [--json FILE] [--write]

Everything is timed in one process, on fresh copies of one graph; figures are medians of wall time,
ratios are of medians. Inductor is given the functional part of the prologue as one pattern (its
matcher cannot express the cache writes), traced like the graph, once with the model's epsilon and
once with another, where nothing matches. torch.fx's SubgraphMatcher is given the same pattern; it
is quadratic, so it is run once and not on graphs where more than --patience seconds are to be
expected.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from model import Decoder, Sizes, model_arguments
from peers import InductorPattern, SubgraphPattern
from torch.fx import GraphModule

from mla_fusion.compile.device_graph import capture

# Dims matter to the pass because it runs the cut-out region once to verify it.
DIMS = {"small": Sizes(), "v3": Sizes(hidden=7168, heads=16)}
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- pass_time.py --write -->", "<!-- end of pass_time.py -->"
COLUMNS = {  # name of a measurement: heading
    "fuse": "fuse",
    "fuse, unverified": "unverified",
    "explain": "explain",
    "Inductor": "Inductor",
    "Inductor, no match": "no match",
    "SubgraphMatcher": "fx",
}


def main() -> int:
    options = _options()
    results: dict[str, Any] = {"machine": _machine(), "dims": {}}
    for name in options.dims:
        sizes = DIMS[name]
        print(
            f"\n{name}: hidden size {sizes.hidden}, {sizes.heads} heads, {sizes.tokens} tokens; "
            "seconds"
        )
        rows = _table(sizes, options)
        results["dims"][name] = {"sizes": vars(sizes), "rows": rows}
        print(_ratios(rows[-1]))
        if len(rows) > 1:
            print(_further_layer(rows[-2], rows[-1]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.write:
        before, _, rest = README.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        README.write_text(f"{before}{BEGIN}\n{_section(results, options)}\n{END}{after}")
    return 0


def median_seconds(
    gm: GraphModule, repeats: int, run: Callable[[GraphModule], Any]
) -> tuple[float, Any]:
    """Median wall seconds of ``run`` on fresh copies of the graph, after one untimed run; its last
    result.
    """
    times, result = [], run(_copy(gm))
    for _ in range(repeats):
        graph = _copy(gm)
        gc.collect()
        started = perf_counter()
        result = run(graph)
        times.append(perf_counter() - started)
    return median(times), result


def _copy(gm: GraphModule) -> GraphModule:
    """Of the same kind: AOT autograd's modules generate their Python code when they are first
    called, not before.
    """
    held = {id(tensor): tensor for tensor in (*gm.parameters(), *gm.buffers())}
    return copy.deepcopy(gm, held)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 32, 61])
    parser.add_argument("--dims", nargs="+", choices=DIMS, default=list(DIMS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds granted to SubgraphMatcher"
    )
    parser.add_argument(
        "--quick", action="store_true", help="1 and 8 layers, small dims, few repetitions"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.dims, options.repeat = [1, 8], ["small"], 2
    return options


def _table(sizes: Sizes, options: argparse.Namespace) -> list[dict[str, Any]]:
    inductor, other = InductorPattern(sizes), InductorPattern(replace(sizes, eps=1e-5))
    subgraph = SubgraphPattern(sizes)
    print(f"{'layers':>6} {'nodes':>6}" + "".join(f"{heading:>11}" for heading in COLUMNS.values()))
    rows: list[dict[str, Any]] = []
    for layers in options.layers:
        gm = _graph(sizes, layers)
        times: dict[str, float] = {}
        row: dict[str, Any] = {"layers": layers, "nodes": len(gm.graph.nodes), "seconds": times}
        for name, config in (("fuse", mf.Config()), ("fuse, unverified", mf.Config(verify="off"))):
            times[name], report = median_seconds(
                gm, options.repeat, partial(mf.fuse, config=config)
            )
            assert len(report.fused) == layers, str(report)
            stages = [timed.timings for timed in mf.reports()[-options.repeat :]]
            row[f"stages of {name}"] = {
                key: round(median(one[key] for one in stages), 4) for key in stages[0]
            }
        times["explain"], _ = median_seconds(gm, options.repeat, mf.explain)
        times["Inductor"], matches = median_seconds(gm, min(options.repeat, 3), inductor.apply)
        assert matches == layers, f"Inductor replaced {matches} of {layers}"
        times["Inductor, no match"], matches = median_seconds(
            gm, min(options.repeat, 3), other.apply
        )
        assert matches == 0
        if not rows or _expected(rows[-1], layers) < options.patience:
            times["SubgraphMatcher"], matches = median_seconds(gm, 1, subgraph.apply)
            assert matches == layers, f"SubgraphMatcher found {matches} of {layers}"
        rows.append(row)
        cells = (f"{times[name]:>11.3f}" if name in times else f"{'-':>11}" for name in COLUMNS)
        print(f"{layers:>6} {row['nodes']:>6}" + "".join(cells), flush=True)
    return rows


def _expected(row: dict[str, Any], layers: int) -> float:
    """What SubgraphMatcher would take, from the row before: it is quadratic."""
    return (
        float(row["seconds"].get("SubgraphMatcher", float("inf"))) * (layers / row["layers"]) ** 2
    )


def _graph(sizes: Sizes, layers: int) -> GraphModule:
    """The AOT graph in its CPU form; weights are meta tensors, so nothing large is allocated."""
    with torch.device("meta"):
        model = Decoder(sizes, layers)
    gm, _ = capture(model, *model_arguments(sizes, layers), device="cpu")
    return gm


def _ratios(row: dict[str, Any]) -> str:
    times = row["seconds"]
    parts = [
        f"{name} {times[name] / times['fuse']:.1f}x the time of fuse"
        for name in ("Inductor", "Inductor, no match", "SubgraphMatcher")
        if name in times
    ]
    stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in row["stages of fuse"].items())
    return f"at {row['layers']} layers: {'; '.join(parts)}\nstages of fuse: {stages}"


def _further_layer(row: dict[str, Any], larger: dict[str, Any]) -> str:
    """What one more layer costs, without verification and without what is done once for each
    structure.
    """
    stages, more = (entry["stages of fuse, unverified"] for entry in (row, larger))
    layers = larger["layers"] - row["layers"]
    costs = (
        f"{stage} {(more[stage] - stages[stage]) / layers * 1e3:.1f}"
        for stage in more
        if stage != "verify"
    )
    return f"a further layer, in milliseconds: {', '.join(costs)}"


def _section(results: dict[str, Any], options: argparse.Namespace) -> str:
    """The tables of one run, as README.md has them."""
    machine, headings = results["machine"], ["dims", "layers", "nodes", *COLUMNS.values()]
    described = ["git", "describe", "--always", "--dirty"]
    revision = subprocess.run(described, cwd=README.parent, capture_output=True, text=True).stdout
    lines = [
        f"One run at {revision.strip() or 'an unknown revision'} on {machine['cores']} cores "
        f"({machine['architecture']}), Python {machine['python']}, torch {machine['torch']}:",
        f"seconds, medians of {options.repeat}; a graph has 120 nodes a layer and 8 tokens.",
        "",
        f"| {' | '.join([*headings, 'Inductor / unverified'])} |",
        "|---|" + "---:|" * len(headings),
    ]
    for dims, of_dims in results["dims"].items():
        for row in of_dims["rows"]:
            times = row["seconds"]
            cells = (f"{times[name]:.3f}" if name in times else "-" for name in COLUMNS)
            ratio = times["Inductor"] / times["fuse, unverified"]
            lines.append(
                f"| {dims} | {row['layers']} | {row['nodes']:,} | {' | '.join(cells)} "
                f"| {ratio:.1f} |"
            )
    for dims, of_dims in results["dims"].items():
        rows = of_dims["rows"]
        stages = rows[-1]["stages of fuse, unverified"].items()
        parts = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in stages)
        lines += ["", f"{dims}, {rows[-1]['layers']} layers, unverified: {parts}"]
        lines += [_further_layer(rows[-2], rows[-1])] if len(rows) > 1 else []
    return "\n".join(lines)


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mla_fusion": mf.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
