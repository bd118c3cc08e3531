"""What the boundary of a compiled graph costs at a step where no weight has changed.

    python benchmarks/step_cost.py [--layers 1 8 61] [--repeat 300] [--json FILE]

The pass fuses a decoder of small dims, and the graph inside is replaced by a function that returns at once, so that
what remains is the work on the inputs: weights looked up and checked, caches viewed. Four weights a layer; microseconds
are medians, and means beside them: one step of sixteen reads a share of the weights' bytes. Settings:

* views: on a CPU most packed weights are views of their parameters, which are current by themselves
* counted: packed copies, of which version counter and address are compared (``Config(updates="counted")``)
* rounds: the same, the default; a share of the bytes is read besides
* wide: the same at eight times the width, and so eight times the bytes
* manager: rounds, in a graph that :func:`mla_fusion.serving.vllm_ascend_pass` has edited; its one call for all weights
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from model import Decoder, Sizes, model_arguments
from torch import nn

from mla_fusion.compile.boundary import fuse_with_boundary
from mla_fusion.compile.device_graph import capture
from mla_fusion.serving.prepack import NAME
from mla_fusion.serving.vllm_ascend import vllm_ascend_pass
from mla_fusion.weights.current import Weights

WIDE = Sizes(hidden=8192, heads=16)
SETTINGS = {  # name: configuration, device whose layouts are asked for, sizes
    "views": (mf.Config(), "cpu", Sizes()),
    "counted": (mf.Config(updates="counted"), "npu", Sizes()),
    "rounds": (mf.Config(), "npu", Sizes()),
    "wide": (mf.Config(), "npu", WIDE),
    "manager": (mf.Config(), "npu", Sizes()),
}


def main() -> int:
    options = _options()
    heads = f"{'call':>10} {'boundary':>10} {'mean':>8} {'a weight':>9}  us"
    print(f"{'layers':>6} {'weights':>8} {'setting':>8} {'MiB':>8} {heads}")
    rows = [
        _measure(layers, name, options.repeat) for layers in options.layers for name in options.settings
    ]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 61])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--repeat", type=int, default=300)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _measure(layers: int, name: str, repeat: int) -> dict[str, Any]:
    config, device, sizes = SETTINGS[name]
    made = _managed if name == "manager" else _adapted
    step, direct_call, args, weights = made(layers, config, device, sizes)
    step()
    gc.collect()
    gc.disable()
    try:
        whole, average = _microseconds(step, repeat)
        direct, _ = _microseconds(direct_call, repeat)
    finally:
        gc.enable()
    entries = {*(weights.entries(args) or ())}
    row = {
        "layers": layers,
        "setting": name,
        "weights": len(entries),
        "copied_bytes": sum(entry.bytes for entry in entries),
        "call_us": round(direct, 1),
        "boundary_us": round(whole - direct, 1),
        "mean_us": round(average - direct, 1),
    }
    each = row["boundary_us"] / row["weights"]
    print(
        f"{layers:>6} {row['weights']:>8} {name:>8} {row['copied_bytes'] / 2**20:>8.1f} {direct:>10.1f}"
        f" {row['boundary_us']:>10.1f} {row['mean_us']:>8.1f} {each:>9.2f}",
        flush=True,
    )
    return row


Made = tuple[Callable[[], Any], Callable[[], Any], list[Any], Weights]  # a step, the step without what is measured


def _adapted(layers: int, config: mf.Config, device: str, sizes: Sizes) -> Made:
    """The fused graph's boundary around nothing, and arguments for it with real weights."""
    with torch.device("meta"):
        model = Decoder(sizes, layers)
    gm, inputs = capture(model, *model_arguments(sizes, layers), device=device)
    report, _, wrap = fuse_with_boundary(gm, inputs, config)
    assert len(report.fused) == layers, str(report)
    args = [_filled(value) for value in inputs]
    adapted: Any = wrap(lambda *inputs: None)
    inner = adapted.inputs(args)
    return lambda: adapted(*args), lambda: adapted.compiled(*inner), args, adapted.weights


def _managed(layers: int, config: mf.Config, device: str, sizes: Sizes) -> Made:
    with torch.device("meta"):
        model = Decoder(sizes, layers)
    gm, _ = capture(model, *model_arguments(sizes, layers), device=device)
    vllm_ascend_pass(config)(gm)
    (call,) = gm.graph.find_nodes(op="call_module", target=NAME)
    args = [_filled(node.meta["val"]) for node in call.args]
    once: Any = gm.get_submodule(NAME)
    return lambda: once(*args), lambda: None, args, once.weights


def _filled(value: torch.Tensor) -> torch.Tensor:
    """With real memory: a zero that was never written has none."""
    tensor = torch.ones(value.shape, dtype=value.dtype)
    return nn.Parameter(tensor, requires_grad=False) if tensor.is_floating_point() else tensor


def _microseconds(function: Any, repeat: int) -> tuple[float, float]:
    """Median and mean."""
    times = []
    budget = perf_counter() + 20.0
    for _ in range(repeat):
        started = perf_counter()
        function()
        times.append(perf_counter() - started)
        if perf_counter() > budget:
            break
    return median(times) * 1e6, mean(times) * 1e6


if __name__ == "__main__":
    sys.exit(main())
