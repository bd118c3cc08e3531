"""``mla-fusion bench``: how long the pass takes, on plain decoders of growing depth or on a graph
of one's own.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from mla_fusion.compile.device_graph import capture
from mla_fusion.config import Config
from mla_fusion.examples.fuse_your_model import DR, HE, Attention, N, example
from mla_fusion.pipeline import explain, fuse
from mla_fusion.report import text_tables


@dataclass(frozen=True)
class Timing:
    """Median wall seconds on fresh copies of one graph, after an untimed run: the whole pass as
    configured, without verification, and ``explain``; stages are those of the last whole pass.
    """

    graph: str
    nodes: int
    fused: int
    rejected: int
    fuse: float
    unverified: float
    explain: float
    stages: dict[str, float]


class Decoder(nn.Module):
    """The example's prologue as layers, each with caches and an output projection of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention().to(torch.bfloat16) for _ in range(layers))
        self.outputs = nn.ModuleList(
            nn.Linear(N * DR, HE, bias=False, dtype=torch.bfloat16) for _ in range(layers)
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *caches: Tensor
    ) -> Tensor:
        pairs = zip(caches[::2], caches[1::2], strict=True)
        for layer, output, pair in zip(self.layers, self.outputs, pairs, strict=True):
            query, query_rope = layer(x, cos, sin, slots, *pair)
            x = x + output((query_rope + query.mean(-1, keepdim=True)).flatten(1))
        return x


def decoder(layers: int) -> tuple[GraphModule, list[Any]]:
    """The AOT graph of a decoder on meta tensors, and its inputs."""
    with torch.device("meta"):
        model = Decoder(layers)
    *inputs, kv_cache, kr_cache = (tensor.to("meta") for tensor in example()[1])
    caches = [torch.empty_like(cache) for _ in range(layers) for cache in (kv_cache, kr_cache)]
    return capture(model, *inputs, *caches, device="cpu")


def measure(name: str, gm: GraphModule, config: Config, repeats: int) -> Timing:
    """Time the pass on ``gm``, which stays as it is."""
    quick = replace(config, verify="off")
    seconds, report = median_seconds(gm, repeats, lambda graph: fuse(graph, config))
    unverified, _ = median_seconds(gm, repeats, lambda graph: fuse(graph, quick))
    explained, _ = median_seconds(gm, repeats, lambda graph: explain(graph, config))
    counts = len(gm.graph.nodes), len(report.fused), len(report.rejected)
    return Timing(name, *counts, seconds, unverified, explained, dict(report.timings))


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


@dataclass(frozen=True)
class Timings:
    """Of graphs of growing size."""

    graphs: Sequence[Timing]

    def __str__(self) -> str:
        """The table, and the stages of the largest graph."""
        header = ("graph", "nodes", "fused", "rejected", "fuse s", "unverified s", "explain s")
        rows = [
            (t.graph, t.nodes, t.fused, t.rejected, *map(_text, (t.fuse, t.unverified, t.explain)))
            for t in self.graphs
        ]
        last = self.graphs[-1].stages
        stages = ", ".join(f"{stage} {_text(seconds)}" for stage, seconds in last.items())
        return f"{text_tables.render(header, rows, indent='')}\nstages of the last: {stages}"

    def to_json(self) -> str:
        """All figures as JSON text."""
        return text_tables.as_json([asdict(timing) for timing in self.graphs])


def _text(seconds: float) -> str:
    return f"{seconds:.3f}"
