"""A join, or an assignment, of all that an input holds is a copy of it: of memory that the graph
writes it is another tensor, however equal the numbers are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.exhaustive import one_in
from tests.harness import both_ways, clones, distance, eager, flat

Copy = Callable[[Tensor], Tensor]
COPIES: dict[str, Copy] = {
    "join": lambda t: torch.cat((t, t[:0])),
    "assignment": lambda t: torch.slice_scatter(torch.zeros_like(t), t, 0, 0, t.shape[0]),
    "clone": torch.clone,
}


class Before(Base):
    """Gives out a cache as it was before the write."""

    def __init__(self, copy: Copy) -> None:
        super().__init__()
        self.copy = copy

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        old = self.copy(kv_cache)
        return *super().forward(x, cos, sin, kv_cache, kr_cache, slots), old


class OfItsOwn(Before):
    """Writes its rows into copies, and leaves what it was given as it was."""

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        super().write(self.copy(kv_cache), self.copy(kr_cache), slots, c_kv, k_pe)


class Two(Before):
    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        """Into a copy, and then all of that back."""
        for cache, rows, width in ((kv_cache, c_kv, HCKV), (kr_cache, k_pe, DR)):
            own = self.copy(cache)
            own.view(-1, width)[slots] = rows
            cache.copy_(own)
            own.zero_()


@pytest.mark.parametrize("model", [Before, OfItsOwn, Two])
@pytest.mark.parametrize("copy", one_in(1, COPIES.values()), ids=COPIES)
def test_a_copy_of_a_cache_stays_as_it_was(model: type[Before], copy: Copy) -> None:
    torch.manual_seed(0)
    module, args = model(copy), paged_args()
    want = eager(module, clones(args))
    given = clones(args)
    with torch.no_grad():
        gm = make_fx(lambda *values: module(*values))(*clones(args))
        mf.fuse(gm)
        made = [*flat(gm(*given)), *given]
    for found in (made, *(values for _, values in both_ways(module, args))):
        for one, other in zip(found, want, strict=True):  # bfloat16
            assert distance(one, other) <= 1e-2
