"""Each reason for staging: a model of it, and the fusion in place once its remedy is followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.report.staging import REMEDIES, Leftover
from tests.catalogue import ENTRIES, base, prologues, rotations
from tests.catalogue.base import BLOCK_SIZE, BLOCKS, DR, HCKV, Base, paged_args
from tests.exhaustive import one_in
from tests.harness import traced_graph

from .walks import Told, changed

Args = Callable[[], tuple[Tensor, ...]]


def of(model: Callable[[], nn.Module], args: Args = paged_args, **config: Any) -> Told:
    """As the backend has it, with the names of the model."""
    given = mf.Config(verify="off", **config)
    return cache(lambda: mf.explain(traced_graph(model(), *args()), given, boundary=True))


def entry(name: str, **config: Any) -> Told:
    found = ENTRIES[name]
    return of(found.model, found.args, **{"targets": found.targets, "soc": found.soc, **config})


def by(
    write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any], args: Args = paged_args
) -> Told:
    """The base prologue with another write of its two caches."""
    return of(changed(write=lambda self, *given: write(*given)), args)


def one_cache(write: Callable[[Tensor, Tensor, Tensor], Any]) -> Told:
    """Another write of the latent's cache alone."""

    def both(kv: Tensor, kr: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        write(kv, slots, c_kv)
        kr.view(-1, DR)[slots] = k_pe

    return by(both)


def with_caches(make: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], **config: Any) -> Told:
    def given() -> tuple[Tensor, ...]:
        x, cos, sin, kv, kr, slots = paged_args()
        return (x, cos, sin, *make(kv, kr), slots)

    return of(Base, given, **config)


def assigned(kv: Tensor, kr: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    """To caches [rows, width]."""
    kv[:8, :HCKV] = c_kv
    kr[:8, :DR] = k_pe


def wide_rows(cache: Tensor) -> Tensor:
    """Rows twice as wide, and half as many in a block."""
    return cache.reshape(BLOCKS, BLOCK_SIZE // 2, 1, -1)


def written_twice(kv: Tensor, slots: Tensor, rows: Tensor) -> None:
    kv.view(-1, HCKV)[slots] = rows
    kv.view(-1, HCKV)[slots + 8] = rows


def in_wider_rows(kv: Tensor, kr: Tensor) -> tuple[Tensor, Tensor]:
    wide = (torch.randn(*cache.shape[:-1], 576).bfloat16() for cache in (kv, kr))
    return tuple(rows[..., :width] for rows, width in zip(wide, (HCKV, DR), strict=True))  # type: ignore[return-value]


def row_args(times: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Caches [rows, width], or rows ``times`` as wide."""
    x, cos, sin, kv, kr, slots = paged_args()
    rows = (torch.cat([cache.flatten(0, 2)] * times, -1).to(dtype) for cache in (kv, kr))
    return (x, cos, sin, *rows, slots)


def scattered(kv: Tensor, kr: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    kv.scatter_(0, slots[:, None].expand(-1, HCKV), c_kv)
    kr.scatter_(0, slots[:, None].expand(-1, DR), k_pe)


def joined_and_doubled(
    self: Base, kv: Tensor, kr: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
) -> None:
    row = torch.cat([c_kv, k_pe], -1) * 2
    kv.view(-1, HCKV)[slots], kr.view(-1, DR)[slots] = row.split([HCKV, DR], -1)


def with_block_size(size: int) -> Told:
    def run() -> mf.Report:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "BLOCK_SIZE", size)
            return mf.explain(
                traced_graph(prologues.PagedRotateHalf(), *paged_args()), boundary=True
            )

    return run


PLAIN = of(prologues.PagedRotateHalf)
# code: a report that has it, and the report once its remedy is followed (None: tested with the
# mode's own models)
WALKS: dict[str, tuple[Told, Told | None]] = {
    "rope.pairs": (entry("GptjStack"), entry("GptjStack", kr_layout="half")),
    "cache.joined_row": (entry("SglangNeoxDecode"), PLAIN),
    "cache.not_written": (entry("RowReturned"), PLAIN),
    "cache.rows_changed": (of(changed(write=joined_and_doubled)), entry("CombinedCache")),
    "cache.writer": (by(scattered, lambda: row_args(2)), by(scattered, row_args)),
    "cache.not_functional": (
        lambda: mf.explain(torch.export.export(Base(), paged_args()).module()),
        of(Base),
    ),
    "cache.no_input": (entry("LayersReadTogether"), PLAIN),
    "cache.shape": (
        with_caches(lambda kv, kr: (kv.reshape(-1, HCKV)[:50], kr.reshape(-1, DR)[:50])),
        with_caches(
            lambda kv, kr: (kv.reshape(-1, HCKV)[:48].clone(), kr.reshape(-1, DR)[:48].clone())
        ),
    ),
    "cache.boundary": (
        lambda: mf.explain(traced_graph(Base(), *rows_of_blocks()), boundary=False),
        lambda: mf.explain(traced_graph(Base(), *rows_of_blocks()), boundary=True),
    ),
    "cache.strides": (
        lambda: mf.explain(traced_graph(Base(), *strided_args()), boundary=True),
        lambda: mf.explain(traced_graph(Base(), *paged_args()), boundary=True),
    ),
    "cache.width": (with_caches(lambda kv, kr: (wide_rows(kv), wide_rows(kr))), PLAIN),
    "cache.dtype": (by(assigned, lambda: row_args(dtype=torch.float32)), by(assigned, row_args)),
    "cache.old_rows_read": (entry("ReadsOldCache"), PLAIN),
    "cache.rows_read": (one_cache(written_twice), PLAIN),
    "cache.row_order": (entry("rows_shifted"), PLAIN),
    "cache.blocks_differ": (
        with_caches(lambda kv, kr: (kv, kr.reshape(BLOCKS // 2, 2 * BLOCK_SIZE, 1, DR))),
        PLAIN,
    ),
    "cache.slots_differ": (entry("kr_by_other_blocks"), PLAIN),
    "cache.slots_count": (entry("half_of_the_tokens"), PLAIN),
    "cache.refused": (with_block_size(8), with_block_size(16)),
    "slots.unproven": (entry("negative"), PLAIN),
    "config.staging": (of(prologues.PagedRotateHalf, staging="always"), PLAIN),
}


def rows_of_blocks() -> tuple[Tensor, ...]:
    x, cos, sin, kv, kr, slots = paged_args()
    return x, cos, sin, kv.squeeze(2), kr.squeeze(2), slots


def strided_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv, kr, slots = paged_args()
    return x, cos, sin, *in_wider_rows(kv, kr), slots


def test_every_reason_is_walked() -> None:
    assert WALKS.keys() | {"cache.rows"} == REMEDIES.keys()


@pytest.mark.parametrize("code", one_in(4, WALKS))
def test_what_the_remedy_says_writes_in_place(code: str) -> None:
    broken, repaired = WALKS[code]
    report = broken()
    fusion = report.fused[0]
    reasons = {one.code: one for one in fusion.staged_by}
    assert code in reasons, str(report)
    assert fusion.placement == f"staged: {fusion.staged_by[0].message}"
    assert reasons[code].remedy == REMEDIES[code] or code == "cache.no_input"
    assert f"[{code}] " in str(report)
    if repaired is not None:
        after = repaired()
        assert [item.placement for item in after.fused] == ["in place"] * len(after.fused) != [], (
            str(after)
        )
        assert not any(item.staged_by or item.leaves for item in after.fused)


def test_one_row_for_both_is_one_reason() -> None:
    """Pairs, and slots that may be -1, are told of once there are two caches."""

    class Three(prologues.PagedRotateHalf):
        def forward(  # type: ignore[override]
            self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
        ) -> tuple[Tensor, Tensor]:
            q_nope, q_pe = self.query(x)
            c_kv, k_pe = self.latent(x)

            def rotate(value: Tensor, c: Tensor, s: Tensor) -> Tensor:
                even, odd = value[..., ::2], value[..., 1::2]
                return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)

            c, s = cos[:, : DR // 2], sin[:, : DR // 2]
            rows = torch.cat([c_kv, rotate(k_pe, c, s)], -1)
            cache.view(-1, HCKV + DR)[slots - 1] = rows
            return self.absorb(q_nope), rotate(q_pe, c[:, None], s[:, None])

    x, cos, sin, kv, kr, slots = paged_args()
    report = mf.explain(
        traced_graph(Three(), x, cos, sin, torch.cat([kv, kr], -1), slots), boundary=True
    )
    (fusion,) = report.fused
    assert [one.code for one in fusion.staged_by] == ["cache.joined_row"]
    assert "to write in place:" in str(report)
    data = json.loads(report.to_json())["fused"][0]
    assert [one["code"] for one in data["staged_by"]] == [one.code for one in fusion.staged_by]
    assert all(one["message"] and one["remedy"] for one in data["staged_by"])


# -- what stays in the graph


def test_what_a_staged_fusion_leaves_is_counted() -> None:
    """By hand, T tokens of 2 heads: rows of 512 and 64 bfloat16, each read and written once."""
    (fusion,) = entry("GptjStack")().fused
    buffers, interleaved, written = fusion.leaves
    assert buffers == Leftover("staging buffers", ("aten.new_empty",) * 2, 2, 2 * (512 + 64) * 2)
    assert interleaved == Leftover(
        "re-interleaving", ("aten.transpose",) * 2, 2, 2 * (2 + 1) * 64 * 2
    )
    caches = BLOCKS * BLOCK_SIZE * (512 + 64) * 2
    assert written == Leftover(
        "cache writes", ("aten.index_put",) * 2, 2, 2 * (512 + 64) * 2, caches
    )
    assert fusion.launches_left == 6
    said = (
        "staging buffers (new_empty x2), re-interleaving (transpose x2), cache writes (index_put "
        "x2)\n      each step pays: 6 launches"
    )
    assert said in str(entry("GptjStack")())


def test_what_an_in_place_fusion_leaves_is_nothing() -> None:
    (fusion,) = PLAIN().fused
    assert (fusion.leaves, fusion.staged_by, fusion.cost_of_staging) == ((), (), "")


# -- dynamic sizes


class WholeBlocks(prologues.PagedRotateHalf):
    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        for held in args[3:5]:
            torch._check(held.shape[1] % 16 == 0)
        return super().forward(*args)


@pytest.mark.parametrize(
    "followed", ["", pytest.param("static", marks=pytest.mark.exhaustive), "checked"]
)
def test_rows_of_blocks_with_dynamic_sizes(followed: str) -> None:
    args = [arg.clone() for arg in rows_of_blocks()]
    if followed == "static":
        torch._dynamo.mark_static(args[3], 1)
        torch._dynamo.mark_static(args[4], 1)
    torch._dynamo.reset()
    wanted = [arg.clone() for arg in args]
    model = WholeBlocks() if followed == "checked" else prologues.PagedRotateHalf()
    with torch.no_grad():
        found = torch.compile(model, backend=mf.backend(), dynamic=True)(*args)
        expected = model(*wanted)
    (fusion,) = mf.reports()[-1].fused
    if followed:
        assert fusion.placement == "in place"
    else:
        assert (
            fusion.staged_by[0].code == "cache.shape"
            and "kv_cache has shape [s" in fusion.staged_by[0].message
        )
    for one, other in ((found, expected), *zip(args[3:5], wanted[3:5], strict=True)):
        assert (one.float() - other.float()).norm() / other.float().norm() < 2e-2


# -- the layout of the key cache


def test_half_rows_are_an_assumption_with_a_warning() -> None:
    report = entry("GptjStack", kr_layout="half")()
    (fusion,) = report.fused
    (warning,) = fusion.warnings
    assert warning in fusion.assumptions and warning.startswith(
        "kr_cache, its new rows and query_rope hold halves"
    )
    assert f"warning: {warning}" in str(report) and "stored as halves" in fusion.rope
    assert json.loads(report.to_json())["fused"][0]["warnings"] == [warning]


@pytest.mark.parametrize("kr_layout", ["exact", "half"])
def test_a_staged_fusion_stores_the_rows_of_the_model(kr_layout: str) -> None:
    """Nothing is gained by another layout where the model's own writes stay."""
    found = ENTRIES["SglangDecode"]
    model, wanted = found.model(), found.args()
    given = [arg.clone() for arg in wanted]
    torch._dynamo.reset()
    with torch.no_grad():
        model(*wanted)
        torch.compile(model, backend=mf.backend(found.config(kr_layout=kr_layout)))(*given)
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement.startswith("staged") and not fusion.warnings
    for one, other in zip(given, wanted, strict=True):
        assert (one.float() - other.float()).norm() <= 5e-3 * other.float().norm()


class ReadsOldKeys(rotations.GptjStack):
    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        old = given[4].float().sum()
        return super().forward(*given), old


def test_a_key_cache_that_is_read_before_keeps_the_layout_of_the_model() -> None:
    config = mf.Config(kr_layout="half", verify="all")
    (fusion,) = mf.explain(traced_graph(ReadsOldKeys(), *paged_args()), config, boundary=True).fused
    assert fusion.staged_by[0].code == "cache.old_rows_read" and not fusion.warnings
    assert fusion.verified == "verified"


def test_a_cache_that_is_read_before_its_write_is_staged() -> None:
    gm = traced_graph(ENTRIES["ReadsOldCache"].model(), *paged_args())
    (fusion,) = mf.explain(gm, mf.Config(verify="off"), boundary=True).fused
    assert fusion.staged_by[0].code == "cache.old_rows_read"
