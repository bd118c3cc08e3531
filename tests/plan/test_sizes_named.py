"""Messages name the sizes of the graph, never the small numbers that symbols are probed with."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import Base, paged_args
from tests.harness import clones, compiled


@torch.library.custom_op("mla_fusion_tests::with_rows", mutates_args=())
def with_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    return put(cache, rows, slots)


@with_rows.register_fake
def _(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    return torch.empty_like(cache)  # says nothing of the width


def put(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    flat = cache.reshape(-1, cache.shape[-1])
    return flat.index_put((slots,), rows).view(cache.shape)


class ByLibrary(Base):
    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.copy_(with_rows(kv_cache, c_kv, slots))
        kr_cache.copy_(with_rows(kr_cache, k_pe, slots))

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        x, cos, sin, kv_cache, kr_cache, slots = args
        query, rotated = self.query(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        c_kv, k_pe = self.latent(x)
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1))
        return self.absorb(query), self.rotate(rotated, c, s)


@pytest.fixture
def registered() -> Iterator[None]:
    mf.register_operator(with_rows, put)
    yield
    mf.register_operator(with_rows, None)


@pytest.mark.usefixtures("registered")
def test_a_width_that_the_graph_leaves_open_is_named_by_its_symbol() -> None:
    torch.manual_seed(0)
    compiled(ByLibrary(), clones(paged_args()), mf.backend(), dynamic=True)
    (fusion,) = mf.reports()[-1].fused
    width = [one.message for one in fusion.staged_by if one.code == "cache.width"]
    assert width
    assert re.search(r"a cache that is s\d+ wide$", width[0])
