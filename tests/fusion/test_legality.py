"""Order, aliases and mutation: the fused run leaves and returns what it should."""

from __future__ import annotations

import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import Base, paged_args
from tests.harness import assert_as_exact, clones, run_fused


def aliased(args: tuple[Tensor, ...], wide: bool = False) -> tuple[Tensor, ...]:
    """The arguments with both caches in one storage, as a serving stack's pool hands them out."""
    x, cos, sin, kv_cache, kr_cache, slots = clones(args, wide)
    pool = torch.cat([kv_cache.reshape(-1), kr_cache.reshape(-1)])
    kv_cache, kr_cache = (
        part.view_as(c)
        for part, c in zip(
            pool.split([kv_cache.numel(), kr_cache.numel()]), (kv_cache, kr_cache), strict=True
        )
    )
    return x, cos, sin, kv_cache, kr_cache, slots


def test_arguments_that_share_storage() -> None:
    torch.manual_seed(0)
    model, given = Base(), paged_args()
    fused = run_fused(model, aliased(given))
    assert len(mf.reports()[-1].fused) == 1
    assert fused[-3].untyped_storage().data_ptr() == fused[-2].untyped_storage().data_ptr()
    assert_as_exact(model, given, fused)
