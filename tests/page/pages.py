"""Reports of real graphs, for the tests that look at their pages."""

from __future__ import annotations

from functools import cache

from mla_fusion.examples.fuse_your_model import example
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import ENTRIES
from tests.harness import graph_of


@cache
def report_of(name: str, **config: str) -> mf.Report:
    """What would become of a prologue of the catalogue."""
    found = ENTRIES[name]
    given = found.config(**config)
    return mf.explain(graph_of(found.model(), *found.args()), given, boundary=True)


class Layers(nn.Module):
    """Equal prologues of the example, each with caches of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(example()[0] for _ in range(count))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *caches: Tensor) -> list:
        pairs = zip(self.layers, caches[::2], caches[1::2], strict=True)
        return [layer(x * at, cos, sin, slots, *pair) for at, (layer, *pair) in enumerate(pairs, 1)]


@cache
def fused(layers: int) -> mf.Report:
    *inputs, kv_cache, kr_cache = example()[1]
    caches = [cache.clone() for _ in range(layers) for cache in (kv_cache, kr_cache)]
    return mf.fuse(graph_of(Layers(layers), *inputs, *caches))
