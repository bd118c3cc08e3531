"""The kernel returns a value once. Who reads it, and the same value rounded, gets both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.harness import traced_graph


class Norm(base.HfNorm):
    """Keeps the normed rows as they are before they are rounded."""

    wide: Tensor

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        self.wide = self.weight.float() * (wide * scale)
        return self.wide.to(x.dtype)


class Reads(prologues.PagedRotateHalf):
    norm = Norm

    def __init__(self, read: Callable[[Tensor, Tensor], Any], of: str) -> None:
        super().__init__()
        self.read, self.of = read, of

    def forward(self, *args: Tensor) -> Any:
        found = super().forward(*args)
        wide = getattr(self, self.of).wide
        return found, self.read(wide, wide.to(torch.bfloat16))


KEPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "both": lambda wide, narrow: (wide, narrow),
    "side by side": lambda wide, narrow: torch.cat((wide, narrow.float()), -1),
    "each by itself": lambda wide, narrow: (wide * 2, narrow.float().sum(-1)),
    "a narrow one in float16": lambda wide, narrow: narrow.half() - narrow,
    "the narrow one twice": lambda wide, narrow: narrow.float() - narrow * 2,
}


@pytest.mark.parametrize("read", KEPT.values(), ids=KEPT)
def test_wide_and_rounded_rows_are_read(read: Callable[..., Any]) -> None:
    report = mf.explain(traced_graph(Reads(read, "kv_a_layernorm"), *base.paged_args()))
    assert len(report.fused) == 1, str(report)
