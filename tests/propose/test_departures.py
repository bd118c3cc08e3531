"""Why near misses stay as they are, in the next core: the code of the entry or one that is as true,
one reason for each prologue, and no reason where there is no prologue.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import ENTRIES, Entry
from tests.catalogue.base import HE, HfNorm, linear, rotate_half, tables
from tests.harness import as_for_backend, graph_of


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def explained(entry: Entry) -> mf.Report:
    gm, _ = as_for_backend(entry.model(), entry.args())
    return mf.explain(gm, entry.config(verify="off", strict=True), boundary=True)


def test_two_nodes_with_one_name_are_told_apart() -> None:
    entry = ENTRIES["QueryInChunks"]
    report = mf.explain(graph_of(entry.model(), *entry.args()), entry.config(verify="off"))
    (rejection,) = report.rejected
    name = re.escape("q_nope_proj's mm [4, 256]")
    assert re.search(f"{name} and another {name}", rejection.message), rejection.message


@pytest.mark.parametrize("name", ["weights_swapped", "one_head_rounded", "one_weight_for_both"])
def test_a_fused_prologue_has_no_reason_beside_it(name: str) -> None:
    report = explained(ENTRIES[name])
    assert report.fused and not report.rejected


class Gqa(nn.Module):
    """Attention with grouped heads, and a gated layer: no latents.

    ``has_norms``: heads are normed before they are rotated
    """

    def __init__(self, has_norms: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = linear(HE, 512), linear(HE, 128), linear(HE, 128)
        self.o, self.gate, self.down = linear(512, HE), linear(HE, 2048), linear(1024, HE)
        self.norm = HfNorm(HE)
        self.of_heads = HfNorm(64) if has_norms else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 64)) for one in (self.q, self.k, self.v))
        q, k = (
            one * cos[:, None] + rotate_half(one) * sin[:, None]
            for one in (self.of_heads(q), self.of_heads(k))
        )
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        scores = torch.einsum("thd,shd->hts", q, k).softmax(-1)
        x = x + self.o(torch.einsum("hts,shd->thd", scores, v).flatten(1))
        gate, up = self.gate(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class RelativePositions(nn.Module):
    """Two layers whose queries meet weights head by head, beside keys that are cached."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = HfNorm(HE), linear(HE, 512), linear(HE, 512)
        self.o, self.by_head = linear(64, HE), nn.Parameter(torch.randn(8, 64, 64).bfloat16())

    def forward(self, x: Tensor, keys: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            q, k = (one(self.norm(x)).unflatten(-1, (8, 64)) for one in (self.q, self.k))
            keys = keys.index_put((slots,), k)
            query = torch.bmm(q.transpose(0, 1), self.by_head)
            x = x + self.o(torch.einsum("htd,shd->hts", query, keys)[0])
        return x, keys


WITHOUT = {
    "grouped": lambda: (Gqa(False), *tables(8)),
    "grouped, normed": lambda: (Gqa(True), *tables(8)),
    "relative": lambda: (RelativePositions(), torch.randn(64, 8, 64).bfloat16(), torch.arange(8)),
}


@pytest.mark.parametrize("make", WITHOUT.values(), ids=WITHOUT)
def test_of_a_graph_without_a_prologue_nothing_is_said_but_what_it_has(
    make: Callable[[], tuple[Any, ...]],
) -> None:
    model, *args = make()
    gm, _ = as_for_backend(model, (torch.randn(8, HE).bfloat16(), *args))
    report = mf.explain(gm, mf.Config(verify="off"), boundary=True)
    assert not report.fused and not report.rejected
    assert "no MLA prologue in this graph" in report.absent[0]
