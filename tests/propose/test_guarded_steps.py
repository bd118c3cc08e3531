"""A guard against rows of zeros: the step of such a row is replaced, by any number. No row of a
model is 0 throughout, which the fusion lists as assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.catalogue.int8_caches import PackedRows, packed_args
from tests.catalogue.int8_plain import PlainFull, PlainLinear, PlainPartial, largest, to_int8
from tests.catalogue.int8_plain_models import model_of
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, run_fused, traced_graph

Guard = Callable[[Tensor], Tensor]
one = torch.ones_like


def filled(steps: Tensor) -> Tensor:
    steps = steps.clone()
    steps[steps == 0] = 1.0
    return steps


# of the largest of each row, its step
GUARDS: dict[str, Guard] = {
    "where it is 0": lambda m: torch.where(m / 127 == 0, one(m), m / 127),
    "where it is not": lambda m: torch.where(m / 127 != 0, m / 127, one(m)),
    "where it is above 0": lambda m: torch.where(m > 0, m / 127, 0.5),
    "where it is no more": lambda m: torch.where(m <= 0, one(m), m) / 127,
    "masked_fill": lambda m: (m / 127).masked_fill(m == 0, 1.0),
    "by a copy of the mask": lambda m: torch.where((m == 0).clone(), one(m), m) / 127,
    "by a mask": lambda m: filled(m / 127),
    "of the largest, by a mask": lambda m: filled(m) / 127,
}
WRONG: dict[str, Guard] = {
    "the other branch": lambda m: torch.where(m == 0, m, one(m)) / 127,
    "another step": lambda m: torch.where(m == 0, one(m), 2 * m) / 127,
    "of small rows": lambda m: torch.where(m <= 3.0, one(m), m) / 127,
    "of all rows": lambda m: torch.where(m >= 0, one(m), m) / 127,
    "of the next row": lambda m: torch.where(m == 0, one(m), m.roll(1, 0)) / 127,
    "where it is 1": lambda m: torch.where(m == 1, 2 * one(m), m) / 127,
    "always": lambda m: torch.where(m * 0 == 0, one(m), m) / 127,
    "of another number": lambda m: torch.where(m - 1 == 0, one(m), m) / 127,
}


def guarded(guard: Guard) -> type[PlainLinear]:
    class Guarded(PlainLinear):
        def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scale = guard(largest(x.float()))
            return to_int8(x.float() / scale), scale

    return Guarded


def is_listed(fusion: mf.Fusion) -> bool:
    return any(text.startswith("no row is 0 throughout") for text in fusion.assumptions)


@pytest.mark.parametrize(
    ("name", "kind"),
    one_in(1, [*((name, PlainPartial) for name in GUARDS), ("where it is 0", PlainFull)]),
)
def test_of_rows(name: str, kind: Any) -> None:
    gm = traced_graph(model_of(kind, guarded(GUARDS[name])), *paged_args())
    (fusion,) = mf.fuse(gm).fused
    assert is_listed(fusion) and fusion.attributes["weight_quant_mode"] in (1, 2)


def test_of_x_alone() -> None:
    """The kernel is given what the model makes: nothing is assumed."""
    model = PlainFull()
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        getattr(model, name).__class__ = guarded(GUARDS["masked_fill"])
    (fusion,) = mf.fuse(traced_graph(model, *paged_args())).fused
    assert not is_listed(fusion)


@pytest.mark.parametrize("name", one_in(3, GUARDS))
def test_it_is_as_exact(name: str) -> None:
    torch.manual_seed(0)
    model, args = model_of(PlainFull, guarded(GUARDS[name])), paged_args()
    got = run_fused(model, clones(args), mf.Config(verify="all"))
    assert mf.reports()[-1].fused
    assert_as_exact(model, args, got, slack=1.2)


@pytest.mark.parametrize("name", WRONG)
def test_another_step_is_refused(name: str) -> None:
    gm = traced_graph(model_of(PlainPartial, guarded(WRONG[name])), *paged_args())
    report = mf.fuse(gm)
    assert not report.fused and [item.code for item in report.rejected] == ["quant.dynamic"]


def test_without_a_guard_nothing_is_assumed() -> None:
    (fusion,) = mf.fuse(traced_graph(PlainPartial(), *paged_args())).fused
    assert not is_listed(fusion)


@pytest.mark.parametrize(
    ("guard", "in_kernel"), [(GUARDS["masked_fill"], True), (WRONG["of small rows"], False)]
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
