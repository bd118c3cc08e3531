"""What the boundary of a compiled graph costs at a step where no weight has changed.

    python benchmarks/step_cost.py [--layers 1 8 61] [--turns 40] [--json FILE]

The pass fuses a decoder of small dims, and the graph inside is replaced by a function that returns
at once, so that what remains is the work on the inputs: weights looked up and checked, caches
viewed. Four weights a layer; microseconds are medians, and means beside them: one step of 64 reads
a share of the weights' bytes. ``of first``: the whole step, relative to the first setting's in the
same turn. Settings:

* views: on a CPU most packed weights are views of their parameters, which are current by themselves
* counted: packed copies, of which version counter and address are compared
  (``Config(updates="counted")``)
* rounds: the same, the default; a share of the bytes is read besides
* wide: the same at eight times the width, and so eight times the bytes
* manager: rounds, in a graph that :func:`mla_fusion.serving.vllm_ascend_pass` has edited; its one
  call for all weights
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

CALLS = 64  # a turn; one of them looks at bytes
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
    heads = f"{'call':>8} {'boundary':>10} {'mean':>8} {'of first':>9} {'a weight':>9}  us"
    print(f"{'layers':>6} {'weights':>8} {'setting':>8} {'MiB':>8} {heads}")
    rows = [row for layers in options.layers for row in _measure(layers, options)]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 61])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _measure(layers: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All settings by turns, so that whatever else the machine does falls on each of them."""
    made = {name: _made(name, layers) for name in options.settings}
    whole: dict[str, list[list[float]]] = {name: [] for name in made}
    bare: dict[str, list[list[float]]] = {name: [] for name in made}
    for step, *_ in made.values():
        step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(options.turns):
            for name, (step, bare_step, *_) in made.items():
                whole[name].append(_microseconds(step))
                bare[name].append(_microseconds(bare_step))
    finally:
        gc.enable()
    return [
        _row(layers, name, whole[name], bare[name], whole[options.settings[0]], *made[name][2:])
        for name in made
    ]


Turns = list[list[float]]


def _row(
    layers: int,
    name: str,
    whole: Turns,
    bare: Turns,
    first: Turns,
    args: list[Any],
    weights: Weights,
) -> dict[str, Any]:
    entries = {*(weights.entries(args) or ())}
    call = median(map(median, bare))
    boundary = median(map(median, whole)) - call
    row = {
        "layers": layers,
        "setting": name,
        "weights": len(entries),
        "copied_bytes": sum(entry.bytes for entry in entries),
        "call_us": round(call, 1),
        "boundary_us": round(boundary, 1),
        "mean_us": round(mean(map(mean, whole)) - call, 1),
        "of_first": round(
            median(median(mine) / median(other) for mine, other in zip(whole, first, strict=True)),
            2,
        ),
    }
    print(
        f"{layers:>6} {row['weights']:>8} {name:>8} {row['copied_bytes'] / 2**20:>8.1f} "
        f"{call:>8.1f}"
        f" {boundary:>10.1f} {row['mean_us']:>8.1f} {row['of_first']:>9.2f} "
        f"{boundary / len(entries):>9.2f}",
        flush=True,
    )
    return row


# a step, the step without what is measured
Made = tuple[Callable[[], Any], Callable[[], Any], list[Any], Weights]


def _made(name: str, layers: int) -> Made:
    config, device, sizes = SETTINGS[name]
    return (_managed if name == "manager" else _adapted)(layers, config, device, sizes)


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


def _microseconds(function: Any) -> list[float]:
    """Of each call of one turn."""
    times = []
    for _ in range(CALLS):
        started = perf_counter()
        function()
        times.append((perf_counter() - started) * 1e6)
    return times


if __name__ == "__main__":
    sys.exit(main())
