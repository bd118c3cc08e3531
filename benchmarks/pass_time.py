"""Time of the pass on graphs of 1 to 61 layers, beside Inductor's and torch.fx's matchers on the same graphs.

    python benchmarks/pass_time.py [--layers 1 8 32 61] [--hidden 1024] [--heads 2] [--repeat 3] [--json FILE]

Everything is timed in one run, in one process; a ratio is of medians. Inductor is given the functional part of the
prologue as a pattern (its matcher cannot express the cache writes), traced like the graph, with the same epsilon.
torch.fx's SubgraphMatcher gets the same pattern; it is quadratic, so it is left out above --subgraph-layers.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from model import Decoder, Sizes, functional_prologue, layer_arguments, model_arguments
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture


def main() -> int:
    options = _options()
    sizes = Sizes(hidden=options.hidden, heads=options.heads)
    pattern = _InductorPattern(sizes)
    rows = []
    for layers in options.layers:
        print(f"capturing {layers} layers", file=sys.stderr)
        gm = _graph(sizes, layers)
        row = {"layers": layers, "nodes": len(gm.graph.nodes)}
        for name, verify in (("pass", "first"), ("pass, unverified", "off")):
            config = mf.Config(verify=verify)
            row[name], reports = _median(options.repeat, gm, lambda graph, config=config: mf.fuse(graph, config))
            assert len(reports.fused) == layers, str(reports)
            row[f"stages of {name}"] = {stage: round(value, 4) for stage, value in reports.timings.items()}
        row["explain"], _ = _median(options.repeat, gm, lambda graph: mf.explain(graph, mf.Config(verify="off")))
        row["Inductor"], matches = _median(1, gm, pattern.apply)
        assert matches == layers, f"Inductor replaced {matches} of {layers}"
        if layers <= options.subgraph_layers:
            row["SubgraphMatcher"], found = _median(1, gm, lambda graph: _subgraph_matches(sizes, graph))
            row["SubgraphMatcher found"] = found
        rows.append(row)
        _print(row)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps({"sizes": vars(options), "rows": rows}, indent=2))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 32, 61])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--subgraph-layers", type=int, default=32)
    parser.add_argument("--json", default="")
    return parser.parse_args()


def _graph(sizes: Sizes, layers: int) -> GraphModule:
    """The AOT graph in its CPU form; weights are meta tensors, so nothing large is allocated."""
    with torch.device("meta"):
        model = Decoder(sizes, layers)
    gm, _ = capture(model, *model_arguments(sizes, layers), device="cpu")
    return gm


def _median(repeat: int, gm: GraphModule, run: Callable[[GraphModule], Any]) -> tuple[float, Any]:
    """Median wall seconds of ``run`` on fresh copies of the graph, after one untimed run; its last result."""
    run(_copy(gm))
    times, result = [], None
    for _ in range(repeat):
        graph = _copy(gm)
        started = perf_counter()
        result = run(graph)
        times.append(perf_counter() - started)
    return statistics.median(times), result


def _copy(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, copy.deepcopy(gm.graph))


def _traced(function: Callable[..., Any], args: Any, **_: Any) -> GraphModule:
    gm = make_fx(function, tracing_mode="real")(*args)
    gm.graph.eliminate_dead_code()
    return gm


class _InductorPattern:
    """The prologue's functional part as one ``register_replacement``."""

    def __init__(self, sizes: Sizes) -> None:
        from torch._inductor.pattern_matcher import PatternMatcherPass, register_replacement

        self._pass = PatternMatcherPass()

        def search(*args: Tensor) -> Any:
            return functional_prologue(sizes, *args)

        def replace(x: Tensor, *weights_and_tables: Tensor) -> Any:
            w_dq, g_q, w_uq, w_dkv, g_kv, cos, sin, kv_b = weights_and_tables
            w_uk = kv_b.view(sizes.heads, -1, sizes.latent)[:, : sizes.nope]
            caches = (x.new_empty(x.shape[0], 1, sizes.latent), x.new_empty(x.shape[0], 1, sizes.rope))
            weights = (w_dq.t(), w_uq.t(), w_uk, w_dkv.t(), g_q, g_kv)
            out = torch.ops.npu.npu_mla_prolog_v3_functional(x, *weights, sin, cos, *caches, cache_mode="TND")
            return out[0], out[1], out[5].view(-1, sizes.latent), out[6].view(-1, sizes.rope)

        example = layer_arguments(sizes)
        names = [f"input_{place}" for place in range(len(example))]
        register_replacement(_named(search, names), _named(replace, names), example, _traced, self._pass)

    def apply(self, gm: GraphModule) -> int:
        matches = self._pass.apply(gm.graph)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return int(matches)


def _named(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """The matcher reads the names of parameters, so a function of ``*args`` needs some."""
    namespace: dict[str, Any] = {"function": function}
    exec(f"def named({', '.join(names)}):\n    return function({', '.join(names)})", namespace)
    return namespace["named"]  # type: ignore[no-any-return]


def _subgraph_matches(sizes: Sizes, gm: GraphModule) -> int:
    from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

    pattern = _traced(lambda *args: functional_prologue(sizes, *args), layer_arguments(sizes))
    return len(SubgraphMatcher(pattern.graph, match_output=False, match_placeholder=False).match(gm.graph))


def _print(row: dict[str, Any]) -> None:
    if row["layers"] == 1 or not hasattr(_print, "headed"):
        names = ("nodes", "pass", "unverified", "explain", "Inductor", "fx", "ratio")
        print(f"{'layers':>6} " + " ".join(f"{name:>10}" for name in names))
        _print.headed = True  # type: ignore[attr-defined]
    timed = ("pass", "pass, unverified", "explain", "Inductor", "SubgraphMatcher")
    cells = [f"{row[name]:9.3f}s" if name in row else f"{'-':>10}" for name in timed]
    ratio = f"{row['Inductor'] / row['pass']:9.1f}x"
    print(f"{row['layers']:>6} {row['nodes']:>10} {' '.join(cells)} {ratio}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
