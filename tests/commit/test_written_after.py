"""Inputs that the model writes beside its caches. AOT autograd puts the copies into inputs in the
order of the inputs, so that one may stand in front of those into the caches.
"""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.catalogue.base import Base, paged_args
from tests.harness import assert_as_exact, both_ways


class Advanced(Base):
    """The slots of the next step."""

    def forward(self, slots: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        found = super().forward(*args, slots)
        slots.add_(1)
        return found


class Cleared(Base):
    """The hidden states are no longer needed."""

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        found = super().forward(x, *args)
        x.zero_()
        return found


class Both(Base):
    def forward(self, slots: Tensor, x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        found = super().forward(x, *args, slots)
        slots.add_(1)
        x.add_(found[0].flatten(1).repeat(1, 8))  # rows of 128 numbers to one of 1024
        return found


class Kept(Base):
    """The cache as it was is kept in another input, which comes first."""

    def forward(self, kept: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        kept.copy_(args[3])
        return super().forward(*args)


class KeptBehind(Base):
    """The cache as it is afterwards."""

    def forward(self, kept: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        found = super().forward(*args)
        kept.copy_(args[3])
        return found


def slots_first() -> tuple[Tensor, ...]:
    *args, slots = paged_args()
    return (slots, *args)


def with_another() -> tuple[Tensor, ...]:
    args = paged_args()
    return (args[3].clone() + 1, *args)


@pytest.mark.parametrize(
    "model, args",
    [
        (Advanced, slots_first),
        (Cleared, paged_args),
        (Both, slots_first),
        (KeptBehind, with_another),
    ],
)
def test_what_is_written_behind_is_no_obstacle(model: type[Base], args: object) -> None:
    assert callable(args)
    one, given = model(), args()
    for report, values in both_ways(one, given):
        assert [item.placement for item in report.fused] == ["in place"], str(report)
        assert_as_exact(one, given, values)


def test_what_is_kept_of_a_cache_is_kept_before_the_call() -> None:
    one, given = Kept(), with_another()
    for _, values in both_ways(one, given):
        assert_as_exact(one, given, values)
