"""Rows assigned by slices of a view of the cache, read besides in the graph or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, both_ways, clones, run_fused

Write = Callable[[Tensor, Tensor], None]  # of a cache and the rows


class Prologue(Base):
    def __init__(self, kv: Write, kr: Write | None = None) -> None:
        super().__init__()
        self.put = kv, kr or kv

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        for put, cache, rows in zip(self.put, (kv_cache, kr_cache), (c_kv, k_pe), strict=True):
            put(cache, rows)


class Alone(Prologue):
    """Nothing but the write touches the caches."""

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        x, cos, sin, kv_cache, kr_cache, slots = args
        query, rotated = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        c_kv, k_pe = self.latent(x)
        key = self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1)
        self.write(kv_cache, kr_cache, slots, c_kv, key)
        return self.absorb(query), self.rotate(rotated, c, s)


def flat(cache: Tensor) -> Tensor:
    return cache.view(-1, cache.shape[-1])


def from_three(cache: Tensor, rows: Tensor) -> None:
    flat(cache)[3 : 3 + rows.shape[0]] = rows


def last(cache: Tensor, rows: Tensor) -> None:
    flat(cache)[-8:] = rows


def of_a_slice(cache: Tensor, rows: Tensor) -> None:
    flat(cache)[2:60][-20:][3:11] = rows


def of_a_block(cache: Tensor, rows: Tensor) -> None:
    cache.squeeze(2)[2:3, 3:11] = rows


def from_four(cache: Tensor, rows: Tensor) -> None:
    flat(cache)[4:12] = rows


def all_of_a_block(cache: Tensor, rows: Tensor) -> None:
    cache[1] = rows.unsqueeze(1)


WRITES = {
    "from three": from_three,
    "last": last,
    "of a slice": of_a_slice,
    "of a block": of_a_block,
}


@pytest.mark.parametrize("kind", [Alone, Prologue])
@pytest.mark.parametrize("name", one_in(1, WRITES))
def test_rows_go_where_the_model_puts_them(kind: type[Prologue], name: str) -> None:
    torch.manual_seed(0)
    model, args = kind(WRITES[name]), paged_args(8)
    fused = run_fused(model, clones(args))
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place", fusion.staged_by
    assert_as_exact(model, args, fused)


def test_of_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    model = Alone(from_three)
    torch._dynamo.reset()
    run = torch.compile(model, backend=mf.backend(), fullgraph=True, dynamic=True)
    for tokens in (8, 5):
        args = paged_args(tokens)
        given = clones(args)
        for cache in given[3:5]:
            torch._dynamo.mark_static(cache)
        with torch.no_grad():
            found = [*run(*given), *given]
        assert_as_exact(model, args, found)
    assert mf.reports()[-1].fused


@pytest.mark.parametrize(
    ("kv", "kr", "tokens", "why"),
    [
        (from_three, from_four, 8, "are written at different slots"),
        (all_of_a_block, None, 16, "elsewhere than at a number for each token"),
    ],
)
def test_what_stays_with_the_model_has_its_reason(
    kv: Write, kr: Write | None, tokens: int, why: str
) -> None:
    torch.manual_seed(0)
    model, args = Alone(kv, kr), paged_args(tokens)
    for report, values in both_ways(model, args):
        (fusion,) = report.fused
        assert fusion.placement.startswith("staged")
        assert "not functional" not in str(fusion.staged_by)
        assert_as_exact(model, args, values)
    fused = run_fused(model, clones(args))
    (fusion,) = mf.reports()[-1].fused
    assert why in str([one.message for one in fusion.staged_by])
    assert_as_exact(model, args, fused)


class Layers(Alone):
    """A pool of two layers: rows of one are assigned by a slice, rows of the other by number."""

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        *others, kv_pool, kr_pool, slots = args
        first = super().forward(*others, kv_pool[0], kr_pool[0], slots)
        flat(kv_pool[1])[slots] = 1.0
        return first


def test_a_layer_of_a_pool_is_the_cache() -> None:
    torch.manual_seed(0)
    x, cos, sin, _, _, slots = paged_args(8)
    pools = (torch.randn(2, 4, 16, 1, width).bfloat16() for width in (HCKV, DR))
    model, args = Layers(from_three), (x, cos, sin, *pools, slots)
    fused = run_fused(model, clones(args))
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place", fusion.staged_by
    assert_as_exact(model, args, fused)
