"""A cache that has no rows yet, as a placeholder in its stead has none."""

from __future__ import annotations

import pytest

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.harness import traced_graph


@pytest.mark.parametrize("width_too", [False, True], ids=["no blocks", "rows of no block"])
def test_it_is_staged(width_too: bool) -> None:
    x, cos, sin, kv, kr, slots = base.paged_args()
    caches = (kv[:, :0], kr[:, :0]) if width_too else (kv[:0], kr[:0])
    gm = traced_graph(prologues.PagedRotateHalf(), x, cos, sin, *caches, slots)
    (fusion,) = mf.fuse(gm, mf.Config(strict=True)).fused
    assert {item.code for item in fusion.staged_by} == {"cache.no_input"}
    assert all("has no elements" in item.message for item in fusion.staged_by)


def test_weights_are_laid_out_with_it() -> None:
    model = prologues.PagedRotateHalf().requires_grad_(False)
    x, cos, sin, kv, kr, slots = base.paged_args()
    mf.prepack(model, x, cos, sin, kv[:0], kr[:0], slots)
    mf.release(model)
