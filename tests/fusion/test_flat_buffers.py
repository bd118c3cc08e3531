"""Caches cut out of one flat buffer, as serving systems allocate them: each is an input of its own
to the graph behind ``mf.backend``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import BLOCK_SIZE, BLOCKS, DR, HCKV, paged_args
from tests.catalogue.prologues import PagedRotateHalf
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, run_fused

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
}


class Flat(nn.Module):
    def __init__(self, take: Take) -> None:
        super().__init__()
        self.layer, self.take = PagedRotateHalf(), take

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, buffer: Tensor, slots: Tensor) -> Tensor:
        kv, kr = self.take(buffer)
        return self.layer(x, cos, sin, kv, kr, slots)


def args_of(tokens: int = 8) -> tuple[Tensor, ...]:
    x, cos, sin, _, _, slots = paged_args(tokens)
    return x, cos, sin, torch.randn(2 * LAYER).bfloat16(), slots


@pytest.mark.parametrize("name", one_in(1, TAKES))
def test_each_cache_is_written_in_its_place(name: str) -> None:
    torch.manual_seed(0)
    model, args = Flat(TAKES[name]), args_of()
    fused = run_fused(model, clones(args))
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place", fusion.staged_by
    assert_as_exact(model, args, fused)


def test_two_layers_of_one_buffer() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Flat(TAKES["slices"]), Flat(TAKES["of a slice"])

        def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(*args), self.second(*args)

    torch.manual_seed(0)
    model, args = Two(), args_of()
    fused = run_fused(model, clones(args))
    assert [one.placement for one in mf.reports()[-1].fused] == ["in place"] * 2
    assert_as_exact(model, args, fused)


def overlapping(buffer: Tensor) -> tuple[Tensor, Tensor]:
    return paged(buffer[:KV], buffer[KV - DR : LAYER - DR])


def by_every_second(buffer: Tensor) -> tuple[Tensor, Tensor]:
    return buffer[: 2 * KV : 2].unflatten(0, (BLOCKS, BLOCK_SIZE, 1, HCKV)), paged(
        buffer[:KV], buffer[-KR:]
    )[1]


@pytest.mark.parametrize("take", [overlapping, by_every_second])
def test_what_is_no_run_of_its_own_stays_with_the_model(take: Take) -> None:
    torch.manual_seed(0)
    model, args = Flat(take), args_of()
    fused = run_fused(model, clones(args))
    assert all(one.placement != "in place" for one in mf.reports()[-1].fused)
    assert_as_exact(model, args, fused)
