"""The kernel returns a value once. Who computes with it and with the same value rounded, as with
two numbers, reads what rounding has left, and that is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
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


def written(rows: Tensor) -> Tensor:
    made = torch.zeros(len(rows) + 2, rows.shape[-1])
    made[1:-1] = rows
    return made


LEFT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a difference": lambda wide, narrow: wide - narrow.float(),
    "a difference, the other way": lambda wide, narrow: narrow.float() - wide,
    "of parts": lambda wide, narrow: wide[:, :8] - narrow[:, :8].float(),
    "multiplied": lambda wide, narrow: wide * 3 - narrow.float() * 3,
    "joined": lambda wide, narrow: torch.stack((wide, -narrow.float())).sum(0),
    "equal or not": lambda wide, narrow: (wide == narrow.float()).sum(),
    "of sums": lambda wide, narrow: wide.sum(-1) - narrow.float().sum(-1),
    "another dtype": lambda wide, narrow: wide.half().float() - narrow.float(),
    "of float16": lambda wide, narrow: wide - wide.half().float(),
    "of picked rows": lambda wide, narrow: wide[[2, 0]] - narrow[[2, 0]].float(),
    "of products": lambda wide, narrow: wide @ wide.T - (narrow @ narrow.T).float(),
    "of what was written": lambda wide, narrow: written(wide) - written(narrow.float()),
}
KEPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "both": lambda wide, narrow: (wide, narrow),
    "side by side": lambda wide, narrow: torch.cat((wide, narrow.float()), -1),
    "each by itself": lambda wide, narrow: (wide * 2, narrow.float().sum(-1)),
    "a narrow one in float16": lambda wide, narrow: narrow.half() - narrow,
    "the narrow one twice": lambda wide, narrow: narrow.float() - narrow * 2,
}


@pytest.mark.parametrize("of", ["kv_a_layernorm", "q_a_layernorm"])
@pytest.mark.parametrize("read", one_in(1, LEFT.values()), ids=LEFT)
def test_what_rounding_leaves_is_no_result(read: Callable[..., Any], of: str) -> None:
    report = mf.explain(traced_graph(Reads(read, of), *base.paged_args()))
    assert [item.code for item in report.rejected] == ["reader.latent"], str(report)


def test_what_rounding_leaves_of_a_row_read_back() -> None:
    class ReadsBack(prologues.PagedRotateHalf):
        norm = Norm

        def forward(self, *args: Tensor) -> Any:
            found = super().forward(*args)
            rows = args[3].view(-1, base.HCKV)[args[-1]]
            return found, self.kv_a_layernorm.wide - rows.float()

    report = mf.explain(traced_graph(ReadsBack(), *base.paged_args()))
    assert [item.code for item in report.rejected] == ["reader.latent"], str(report)


@pytest.mark.parametrize("read", KEPT.values(), ids=KEPT)
def test_wide_and_rounded_rows_are_read(read: Callable[..., Any]) -> None:
    report = mf.explain(traced_graph(Reads(read, "kv_a_layernorm"), *base.paged_args()))
    assert len(report.fused) == 1, str(report)
