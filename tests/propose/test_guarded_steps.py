"""A guard against rows of zeros: the step of such a row is replaced, by any number. No row of a
model is 0 throughout, which the fusion lists as assumed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import ENTRIES
from tests.catalogue.base import paged_args
from tests.catalogue.int8_caches import PackedRows, packed_args
from tests.catalogue.int8_plain import (
    GUARDS,
    Guard,
    PlainFull,
    PlainPartial,
    guarded,
    largest,
    linear_of,
    to_int8,
)
from tests.catalogue.int8_plain_misses import OTHER_STEPS
from tests.exhaustive import one_in
from tests.harness import traced_graph


def is_listed(fusion: mf.Fusion) -> bool:
    return any(text.startswith("no row is 0 throughout") for text in fusion.assumptions)


@pytest.mark.parametrize("name", one_in(1, GUARDS))
def test_of_rows(name: str) -> None:
    entry = ENTRIES[f"linear guarded {name}"]
    (fusion,) = mf.explain(traced_graph(entry.model(), *entry.args())).fused
    assert is_listed(fusion)


def test_of_x_alone() -> None:
    """The kernel is given what the model makes: nothing is assumed."""
    model = PlainFull()
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        getattr(model, name).__class__ = linear_of(
            "Guarded", quantise=guarded(GUARDS["masked_fill"])
        )
    (fusion,) = mf.fuse(traced_graph(model, *paged_args())).fused
    assert not is_listed(fusion)


def test_without_a_guard_nothing_is_assumed() -> None:
    (fusion,) = mf.fuse(traced_graph(PlainPartial(), *paged_args())).fused
    assert not is_listed(fusion)


@pytest.mark.parametrize(
    ("guard", "in_kernel"), [(GUARDS["masked_fill"], True), (OTHER_STEPS["of small rows"], False)]
)
def test_of_tiles(guard: Guard, in_kernel: bool) -> None:
    class Tiles(PackedRows):
        def write(
            self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
        ) -> None:
            tiles = c_kv.float().view(-1, 4, 128)
            scale = guard(largest(tiles))
            steps = scale.squeeze(-1).contiguous().view(torch.int8)
            row = [to_int8(tiles / scale).flatten(1), k_pe.contiguous().view(torch.int8), steps]
            kv_cache.view(-1, 656)[slots] = torch.cat(row, -1)

    (fusion,) = mf.explain(traced_graph(Tiles(), *packed_args())).fused
    assert (fusion.attributes.get("kv_cache_quant_mode") == 3) == in_kernel == is_listed(fusion)
