"""Columns taken by a list of numbers are moved, as by slices; by those of an input they are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args, rotate_half
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, both_ways, clones, compiled, run_fused

HALVES = [*range(0, DR, 2), *range(1, DR, 2)]
SWAPPED = [HALVES[1], HALVES[0], *HALVES[2:]]
REPEATED = [HALVES[1], HALVES[1], *HALVES[2:]]
FROM_THE_END = [place - DR for place in HALVES]


class Listed(Base):
    def __init__(self, query: Sequence[int] = HALVES, key: Sequence[int] | None = None) -> None:
        super().__init__()
        self.order = list(query), list(key or query)

    def turned(self, x: Tensor, order: list[int], c: Tensor, s: Tensor) -> Tensor:
        x = x[..., order]
        return x * c + rotate_half(x) * s

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.turned(q_pe, self.order[0], c, s)

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.turned(k_pe, self.order[1], c, s)


@pytest.mark.parametrize("order", [HALVES, FROM_THE_END], ids=["halves", "from the end"])
def test_a_list_that_parts_pairs_is_the_rotation(order: list[int]) -> None:
    torch.manual_seed(0)
    model, args = Listed(order), paged_args()
    for report, values in both_ways(model, args):
        assert report.fused, str(report)
        assert_as_exact(model, args, values)


def test_of_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    model, args = Listed(), paged_args()
    fused = compiled(model, clones(args), mf.backend(), dynamic=True)
    assert mf.reports()[-1].fused
    assert_as_exact(model, args, fused)


@pytest.mark.parametrize(
    ("query", "key", "fuses"),
    one_in(
        1,
        [
            (
                SWAPPED,
                SWAPPED,
                True,
            ),  # pairs of other columns: those of the weight are put in order
            (HALVES, [*range(DR)], True),
            (HALVES, SWAPPED, True),
            (SWAPPED, HALVES, True),
            (HALVES, HALVES[::-1], True),
            (REPEATED, REPEATED, False),
        ],
    ),
)
def test_another_order_is_the_models_own(query: list[int], key: list[int], fuses: bool) -> None:
    """Also where nothing is run to compare."""
    torch.manual_seed(0)
    model, args = Listed(query, key), paged_args()
    for config in (mf.Config(), mf.Config(verify="off")):
        fused = run_fused(model, clones(args), config)
        assert_as_exact(model, args, fused)
        assert bool(mf.reports()[-1].fused) == fuses


class Held(Listed):
    """The order lies in a buffer, which somebody may load anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor(HALVES))

    def turned(self, x: Tensor, order: list[int], c: Tensor, s: Tensor) -> Tensor:
        x = x.index_select(-1, self.places)
        return x * c + rotate_half(x) * s


def test_an_order_that_an_input_holds_is_no_rotation() -> None:
    torch.manual_seed(0)
    model, args = Held(), paged_args()
    values = run_fused(model, clones(args))
    (rejection,) = mf.reports()[-1].rejected
    assert rejection.code == "rope.absent"
    assert_as_exact(model, args, values)


class Rows(Base):
    """Rows at places that a list says."""

    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.places = places

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv_cache.view(-1, HCKV)[self.places] = c_kv
        kr_cache.view(-1, DR)[self.places] = k_pe


@pytest.mark.parametrize(
    "places", [[9, 2, 33, 4, 61, 0, 7, 8], [9, 2, 33, 4, 9, 0, 7, 8], [9, 2, -3, 4, 61, 0, 7, 8]]
)
def test_rows_at_listed_places(places: list[int]) -> None:
    torch.manual_seed(0)
    model, args = Rows(places), paged_args(8)
    fused = run_fused(model, clones(args))
    (fusion,) = mf.reports()[-1].fused
    if len(set(places)) < len(places) or min(places) < 0:
        assert fusion.placement.startswith("staged")
    assert_as_exact(model, args, fused)


class OfTokens(Listed):
    """A list that swaps tokens of the key."""

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate_k(k_pe[[1, 0, 2, 3, 4, 5, 6, 7]], c, s)


def test_tokens_that_a_list_swaps_stay_swapped() -> None:
    torch.manual_seed(0)
    model, args = OfTokens(), paged_args(8)
    for config in (mf.Config(), mf.Config(verify="off")):
        fused = run_fused(model, clones(args), config)
        assert_as_exact(model, args, fused)
        assert not mf.reports()[-1].fused
