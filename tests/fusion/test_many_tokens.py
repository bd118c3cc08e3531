"""Static graphs of many tokens: the facts are read on few, the verdict is the same, the numbers are
checked on all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import ENTRIES, base, layouts, prologues
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, run_fused, traced_graph


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCKS", 64)


def prefill_args() -> tuple[Tensor, ...]:
    freqs = torch.view_as_real(
        torch.polar(torch.ones(128, base.DR // 2), torch.rand(128, base.DR // 2) * 6.28)
    )
    x = torch.randn(2, 64, base.HE).bfloat16()
    return (
        x,
        freqs,
        torch.randn(4, 128, base.HCKV).bfloat16(),
        torch.randn(4, 128, base.DR).bfloat16(),
    )


CASES = {
    "64 tokens": (prologues.PagedRotateHalf, lambda: base.paged_args(64)),
    "512 tokens, as many as the latent is wide": (
        prologues.PagedRotateHalf,
        lambda: base.paged_args(512),
    ),
    "128 tokens, as many as D": (prologues.FusedQkvA, lambda: base.paged_args(128)),
    "4 sequences of 32": (layouts.Sequences, lambda: layouts.sequence_args(4, 32)),
    "64 sequences of 2": (layouts.Sequences, lambda: layouts.sequence_args(64, 2)),
    "16 sequences of 16": (layouts.Sequences, lambda: layouts.sequence_args(16, 16)),
    "dense prefill": (prologues.ComplexDense, prefill_args),
    "npu operators": (prologues.NpuOperators, lambda: base.paged_args(128)),
}


@pytest.mark.parametrize(("device", "name"), one_in(3, itertools.product(("cpu", "npu"), CASES)))
def test_fuses(device: str, name: str) -> None:
    model, args = CASES[name]
    gm, _ = capture(model(), *args(), device=device)
    report = mf.fuse(gm)
    assert len(report.fused) == 1, str(report)


@pytest.mark.exhaustive
def test_batches_of_any_number_of_long_sequences() -> None:
    """Only the length is static: it is shrunk, and every token of the verified call has a slot of
    its own.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = layouts.sequence_args(3, 96)
    for given in args[:3] + args[5:]:
        torch._dynamo.mark_dynamic(given, 0)
    for cache in args[3:5]:
        torch._dynamo.mark_dynamic(cache, 0)
    with torch.no_grad():
        torch.compile(layouts.Sequences(), backend="mla_fusion", fullgraph=True)(*args)
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place" and fusion.verified == "verified"
    assert {figure.output for figure in fusion.figures} == {
        "query",
        "query_rope",
        "kv_cache",
        "kr_cache",
    }


@pytest.mark.parametrize(
    "name", ["Bias", "TablesSwappedOnKey", "RopeMixesHeads", "LowPrecision", "RawLatentRead"]
)
def test_near_misses_get_the_same_code(name: str) -> None:
    entry = ENTRIES[name]
    gm = traced_graph(entry.model(), *base.paged_args(128))
    assert tuple(r.code for r in mf.fuse(gm).rejected) == entry.outcome


class TwoBatches(base.Base):
    """The second batch's rows may pass a step of their own on the way to its cache."""

    step = staticmethod(lambda c_kv: c_kv)

    def forward(self, first: Tensor, second: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        *tables, kv, kr, other_kv, other_kr, slots, other_slots = rest
        scores, _ = super().forward(first.flatten(0, 1), *tables, kv, kr, slots)
        self.is_second = True
        others, _ = super().forward(second.flatten(0, 1), *tables, other_kv, other_kr, other_slots)
        self.is_second = False
        return scores, others

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return (self.step(c_kv) if getattr(self, "is_second", False) else c_kv), k_pe


@pytest.mark.parametrize(
    ("step", "is_plain"),
    [
        (lambda c: c, True),
        (lambda c: c.roll(5, 0), False),
        (lambda c: torch.cat([c[:16], c[16:] / 2]), False),
    ],
)
def test_a_batch_with_as_many_rows_as_another_is_long(
    step: Callable[[Tensor], Tensor], is_plain: bool
) -> None:
    """[2, 64] and [2, 32]: the 64 rows of the second are no token axis that is followed; all of
    them are probed.
    """
    torch.manual_seed(0)
    model, (_, _, _, *caches, _) = TwoBatches(), base.paged_args(128)
    model.step = step  # type: ignore[method-assign]
    rows = torch.randperm(64 * base.BLOCK_SIZE)
    batches = (torch.randn(2, length, base.HE).bfloat16() for length in (64, 32))
    args = (*batches, *base.tables(1), *caches, *clones(tuple(caches)), rows[:128], rows[:64])
    fused = run_fused(model, clones(args), mf.Config(verify="off"))
    placements = [fusion.placement.partition(":")[0] for fusion in mf.reports()[-1].fused]
    assert placements == ["in place", "in place" if is_plain else "staged"]
    assert_as_exact(model, args, fused)


class TwoLikeBatches(base.Base):
    """Each with tables and caches of its own."""

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        first, _ = super().forward(args[0].flatten(0, 1), *args[1:6])
        second, _ = super().forward(args[6].flatten(0, 1), *args[7:])
        return first, second


def test_like_batches_with_tables_of_their_own() -> None:
    torch.manual_seed(0)
    both = [
        (
            torch.randn(2, 32, base.HE).bfloat16(),
            *base.tables(64),
            *base.paged_args(1)[3:5],
            torch.randperm(256)[:64],
        )
        for _ in range(2)
    ]
    model, args = TwoLikeBatches(), (*both[0], *both[1])
    fused = run_fused(model, clones(args), mf.Config(verify="off"))
    assert [fusion.placement for fusion in mf.reports()[-1].fused] == ["in place"] * 2
    assert_as_exact(model, args, fused)
