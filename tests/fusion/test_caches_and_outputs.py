"""What a fused prologue writes and gives out: rows, values for other readers, shared probes."""

from __future__ import annotations

import torch

import mla_fusion as mf
from tests.catalogue import ENTRIES, assembled, base, prologues
from tests.harness import assert_as_exact, clones, compiled, run_fused


def test_layers_share_tables_and_probes() -> None:
    torch.manual_seed(0)
    model, args = prologues.Layers(), prologues.layers_args()
    fused = run_fused(model, clones(args))
    report = mf.reports()[-1]
    assert len(report.fused) == 3 and not report.rejected
    # the first layer reads an input, the others what products made
    assert [bool(f.figures) for f in report.fused] == [True, True, False]
    assert report.fused[2].verified.startswith("equal in structure to ")
    assert report.operators["after"]["npu.npu_mla_prolog_v3_functional.default"] == 3
    assert_as_exact(model, args, fused, 1.1)


def test_rows_without_a_slot_are_untouched() -> None:
    torch.manual_seed(0)
    model, args = prologues.PagedRotateHalf(), base.paged_args()
    *_, kv_cache, kr_cache, slots = run_fused(model, clones(args))
    written = torch.zeros(base.BLOCKS * base.BLOCK_SIZE, dtype=torch.bool)
    written[slots] = True
    for before, after in zip(args[3:5], (kv_cache, kr_cache), strict=True):
        rows, was = after.flatten(0, 2), before.flatten(0, 2)
        assert torch.equal(rows[~written], was[~written])
        assert not torch.equal(rows[written], was[written])


def test_rows_of_a_skipped_token_are_not_read_outside_the_cache() -> None:
    torch.manual_seed(0)
    module, (*given, slots) = assembled.RowsOfOperator(), base.paged_args()
    slots[3] = -1
    kept = torch.arange(8) != 3

    def scores(backend: object) -> torch.Tensor:
        out = compiled(module, clones((*given, slots)), backend)[0]
        return out[kept][..., kept]

    with_rows, plain = scores(mf.backend()), scores(mf.backend(mf.Config(enable=False)))
    assert mf.reports()[-2].fused[0].assumptions[-1].startswith("the new rows are read back")
    assert torch.allclose(with_rows, plain, rtol=2e-2, atol=2e-2 * float(plain.abs().max()))


def test_a_kept_view_is_the_cache_behind_the_write() -> None:
    torch.manual_seed(0)
    model, args = ENTRIES["KeptViews"].model(), ENTRIES["KeptViews"].args()
    compiled(model, args, mf.backend())
    assert [fusion.placement for fusion in mf.reports()[-1].fused] == ["in place"]
    for kept, cache in ((model.kv_cache, args[3]), (model.kr_cache, args[4])):
        assert kept.data_ptr() == cache.data_ptr() and torch.equal(kept.flatten(), cache.flatten())
