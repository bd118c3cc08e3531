"""Caches of layers that are stacked in one tensor: layer i writes to ``pool[i]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import BLOCK_SIZE, BLOCKS, DR, HCKV, Base, npu, paged_args
from .entry import IN_PLACE, OURS, STAGED, entry, miss
from .prologues import NpuOperators

LAYERS = 2


def pool_args(layers: int = LAYERS) -> tuple[Tensor, ...]:
    x, cos, sin, _, _, slots = paged_args()
    pools = (torch.randn(layers, BLOCKS, BLOCK_SIZE, 1, width).bfloat16() for width in (HCKV, DR))
    return (x, cos, sin, *pools, slots)


BOTH, NEITHER = (IN_PLACE, IN_PLACE), (STAGED, STAGED)
COMMON: dict[str, Any] = {"tags": "cache, layout", "args": pool_args, "alone": NEITHER}


@entry(*BOTH, source="SGLang", **COMMON | {"tags": "cache, layout, symbolic"})
class LayersOfAPool(Base):
    """Two layers, each over its part of both pools; the second reads the first's attention."""

    places = 0, 1

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_pool: Tensor, kr_pool: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = []
        for place in self.places:
            caches = self.layer(kv_pool, place), self.layer(kr_pool, place)
            scores, _ = super().forward(x, cos, sin, *caches, slots)
            outputs.append(scores)
            x = x + self.between(kv_pool, scores).to(x.dtype)
        return tuple(outputs)

    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool[place]

    def between(self, kv_pool: Tensor, scores: Tensor) -> Tensor:
        return scores.mean((1, 2)).unsqueeze(-1).tanh()


@entry(*BOTH, source=OURS, **COMMON)
class UnboundLayers(LayersOfAPool):
    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool.unbind(0)[place]

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV).index_copy_(0, slots, c_kv)
        kr_cache.view(-1, DR).index_copy_(0, slots, k_pe)


@entry(*BOTH, source=OURS, **COMMON | {"tags": "cache, layout, operators"})
class LayersAsRows(LayersOfAPool):
    """The pool is seen as rows of each layer; npu_scatter_nd_update_ and scatter_ write them."""

    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool.view(LAYERS, -1, pool.shape[-1]).select(0, place)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        npu.npu_scatter_nd_update_(kv_cache, slots.view(-1, 1), c_kv)
        kr_cache.scatter_(0, slots.unsqueeze(1).expand(-1, DR), k_pe)


@entry(*BOTH, source=OURS, **COMMON)
class CountedFromTheEnd(LayersOfAPool):
    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool[place - LAYERS]


@entry(*BOTH, source=OURS, **COMMON | {"tags": "cache, layout, symbolic"})
class LayersOfSlices(LayersOfAPool):
    """Of a part of the pool, its first layer."""

    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool[place : place + 2][0]


@entry(*BOTH, source=OURS, **COMMON | {"tags": "cache, layout, symbolic"})
class SplitLayers(LayersOfAPool):
    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool.split(1)[place].squeeze(0)


@entry(*BOTH, source=OURS, **COMMON)
class BlocksOfLayers(LayersOfAPool):
    """The blocks of all layers, one after the other."""

    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool.flatten(0, 1)[place * BLOCKS : (place + 1) * BLOCKS]


@entry(*BOTH, source=OURS, **COMMON)
class RowsOfLayers(LayersOfAPool):
    """The rows of all layers, one after the other."""

    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool.view(-1, pool.shape[-1]).narrow(
            0, (place - LAYERS) * BLOCKS * BLOCK_SIZE, BLOCKS * BLOCK_SIZE
        )


@entry(IN_PLACE, source=OURS, **COMMON | {"args": lambda: pool_args(1), "alone": (STAGED,)})
class PoolOfOne(LayersOfAPool):
    places = (-1,)


class _OfOperator(NpuOperators):
    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_pool: Tensor, kr_pool: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = []
        for kv_cache, kr_cache in zip(kv_pool.unbind(), kr_pool, strict=True):
            outputs.append(super().forward(x, cos, sin, kv_cache, kr_cache, slots))
            x = x + 1
        return tuple(outputs)


@entry(
    *BOTH,
    source="vllm-ascend",
    **COMMON | {"tags": "cache, layout, operators", "alone": ("reader.latent",)},
)
class LayersByOperator(_OfOperator):
    """npu_kv_rmsnorm_rope_cache, whose schema does not say that it writes."""

    def __init__(self) -> None:
        super().__init__(version=1)


@entry(
    *BOTH,
    source="vllm-ascend",
    **COMMON | {"tags": "cache, layout, operators", "alone": ("reader.latent",)},
)
class LayersByOperatorV2(_OfOperator):
    pass


@miss(IN_PLACE, STAGED, of="LayersOfAPool", **COMMON | {"tags": "cache, run"})
class OneLayerForTwo(LayersOfAPool):
    """The second writes to what the first has written."""

    places = 1, 1


@miss(*NEITHER, of="LayersOfAPool", **COMMON | {"tags": "cache, run"})
class PoolReadBetween(LayersOfAPool):
    """Somebody reads all layers at once."""

    def between(self, kv_pool: Tensor, scores: Tensor) -> Tensor:
        return super().between(kv_pool, scores) + kv_pool.float().mean((0, 2, 3, 4))[0]


@miss(IN_PLACE, STAGED, of="LayersOfAPool", **COMMON | {"tags": "cache, run"})
class LayerCopiedToTheNext(LayersOfAPool):
    """A layer holds rows of another one, as they were when it was written."""

    def between(self, kv_pool: Tensor, scores: Tensor) -> Tensor:
        kv_pool[1].copy_(kv_pool[0])
        return super().between(kv_pool, scores)


@miss(*NEITHER, of="LayersOfSlices", **COMMON | {"tags": "cache, run"})
class SteppedLayers(LayersOfAPool):
    """Of every other layer the first."""

    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool[place::2][0]


@miss(*NEITHER, of="BlocksOfLayers", **COMMON | {"tags": "cache, run"})
class OverlappingLayers(LayersOfAPool):
    """The second cache begins in the middle of the first."""

    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool.flatten(0, 1)[place * 2 : place * 2 + BLOCKS]


THREE: dict[str, Any] = {"args": lambda: pool_args(3), "alone": (STAGED,) * 3}


@miss(IN_PLACE, STAGED, STAGED, of="BlocksOfLayers", **COMMON | {"tags": "cache, run"} | THREE)
class TwoOfThreeOverlap(LayersOfAPool):
    """The first layer has blocks of its own; those of the others overlap."""

    places = 0, 4, 6

    def layer(self, pool: Tensor, place: int) -> Tensor:
        return pool.flatten(0, 1)[place:][:BLOCKS]


@miss(STAGED, IN_PLACE, STAGED, of="LayersOfAPool", **COMMON | {"tags": "cache, run"} | THREE)
class LayersReadTogether(LayersOfAPool):
    """Somebody reads the first and the second layer at once."""

    places = 0, 2, 1

    def between(self, kv_pool: Tensor, scores: Tensor) -> Tensor:
        return super().between(kv_pool, scores) + kv_pool[:2].float().mean((0, 2, 3, 4))[0]


def place_args() -> tuple[Tensor, ...]:
    return (*pool_args(), torch.tensor([1]))


@miss(IN_PLACE, of="LayersOfAPool", **COMMON | {"tags": "cache, run", "args": place_args})
class LayerByTensor(Base):
    """Which layer it is, a tensor says."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_pool: Tensor,
        kr_pool: Tensor,
        slots: Tensor,
        place: Tensor,
    ) -> tuple[Tensor, Tensor]:
        self.place = place
        return super().forward(x, cos, sin, kv_pool, kr_pool, slots)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(LAYERS, -1, HCKV)[self.place, slots] = c_kv
        kr_cache.view(LAYERS, -1, DR)[self.place, slots] = k_pe


# -- caches cut out of one flat buffer, as serving systems allocate them

KV, KR = (BLOCKS * BLOCK_SIZE * width for width in (HCKV, DR))
LAYER = KV + KR
Take = Callable[[Tensor], tuple[Tensor, Tensor]]


def paged(kv: Tensor, kr: Tensor) -> tuple[Tensor, Tensor]:
    return kv.view(BLOCKS, BLOCK_SIZE, 1, HCKV), kr.view(BLOCKS, BLOCK_SIZE, 1, DR)


TAKES: dict[str, Take] = {
    "slices": lambda b: paged(b[:KV], b[KV:LAYER]),
    "of a slice": lambda b: paged(b[LAYER:][:KV], b[LAYER:][KV:]),
    "narrow": lambda b: paged(b.narrow(0, LAYER, KV), b.narrow(0, LAYER + KV, KR)),
    "split": lambda b: paged(*b.split([KV, KR, LAYER])[:2]),
    "from the end": lambda b: paged(b[-LAYER:-KR], b[-KR:]),
    "a row of layers": lambda b: paged(b.view(2, -1)[1, :KV], b.view(2, -1)[1, KV:]),
    "rows, tokens flat": lambda b: (b[:KV].view(-1, HCKV), b[KV:LAYER].view(-1, DR)),
    "overlapping": lambda b: paged(b[:KV], b[KV - DR : LAYER - DR]),
    "every second": lambda b: (
        b[: 2 * KV : 2].unflatten(0, (BLOCKS, BLOCK_SIZE, 1, HCKV)),
        paged(b[:KV], b[-KR:])[1],
    ),
}


def buffer_args() -> tuple[Tensor, ...]:
    x, cos, sin, _, _, slots = paged_args()
    return x, cos, sin, torch.randn(2 * LAYER).bfloat16(), slots


class FlatBuffer(Base):
    takes: tuple[str, ...]

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, buffer: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        found = []
        for place, name in enumerate(self.takes):
            caches = TAKES[name](buffer)
            found.append(super().forward(x + place, cos, sin, *caches, slots)[0])
        return tuple(found)


for name in TAKES:
    outcome = STAGED if name in ("overlapping", "every second") else IN_PLACE
    kind = type(f"flat buffer, {name}", (FlatBuffer,), {"takes": (name,)})
    entry(outcome, source=OURS, tags="cache, layout", args=buffer_args, alone=(STAGED,))(kind)


@entry(*BOTH, source=OURS, tags="cache, layout", args=buffer_args, alone=NEITHER)
class TwoLayersOfABuffer(FlatBuffer):
    takes = "slices", "of a slice"
