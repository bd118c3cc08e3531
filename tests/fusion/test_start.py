"""Positions from an int argument: the first value is a number of the graph, the second makes it a
symbol, which may be below 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import DR, paged_args
from tests.catalogue.prologues import PagedRotateHalf
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, flat, run_fused

Positions = Callable[[int, int], Tensor]  # of the number of tokens and the first position


class Decode(PagedRotateHalf):
    def __init__(self, positions: Positions) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(64.0), 1 / 1e4 ** (torch.arange(0, DR, 2) / DR))
        angles = torch.cat([angles, angles], -1)
        self.positions = positions
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, x: Tensor, kv: Tensor, kr: Tensor, slots: Tensor, start: int) -> Tensor:
        rows = self.positions(len(x), start)
        return super().forward(x, self.cos[rows], self.sin[rows], kv, kr, slots)


class From(nn.Module):
    """The model at one step."""

    def __init__(self, model: Decode, start: int) -> None:
        super().__init__()
        self.model, self.start = model, start

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args, self.start)


POSITIONS: dict[str, Positions] = {
    "arange + start": lambda n, start: torch.arange(n) + start,
    "arange from start": lambda n, start: torch.arange(start, start + n),
    "full": lambda n, start: torch.full((n,), start),
    "back and forth": lambda n, start: torch.arange(n) + start - 2 + 2,
    "in blocks": lambda n, start: torch.arange(n) // start * start + torch.arange(n) % start,
}


def assert_placed(model: Decode, steps: Iterable[tuple[int, str]]) -> None:
    """
    steps  the start of each step, and its placement without the reason
    """
    torch._dynamo.reset()
    run = torch.compile(model, backend=mf.backend(), fullgraph=True)
    for start, placement in steps:
        x, _, _, *caches = paged_args(8)
        args = (x, *caches)
        given = clones(args)
        with torch.no_grad():
            found = [*flat(run(*given, start)), *given]
        (fusion,) = mf.reports()[-1].fused
        assert fusion.placement.partition(":")[0] == placement
        assert_as_exact(From(model, start), args, found)


@pytest.mark.parametrize("name", one_in(1, POSITIONS))
def test_each_step_fuses(name: str) -> None:
    torch.manual_seed(0)
    assert_placed(Decode(POSITIONS[name]), [(start, "in place") for start in (3, 5, 11)])


class Appended(Decode):
    """The rows are written where the positions say."""

    def forward(self, x: Tensor, kv: Tensor, kr: Tensor, slots: Tensor, start: int) -> Tensor:
        cos, sin = self.cos[: len(x)], self.sin[: len(x)]
        return PagedRotateHalf.forward(self, x, cos, sin, kv, kr, self.positions(len(x), start))


APPENDED: dict[str, tuple[Positions, str]] = {
    "arange from start": (POSITIONS["arange from start"], "in place"),
    "arange + start": (POSITIONS["arange + start"], "in place"),
    "slice": (lambda n, start: slice(start, start + n), "in place"),  # type: ignore[dict-item,return-value]
    "before": (lambda n, start: torch.arange(start - 4, start - 4 + n), "staged"),
    "times": (lambda n, start: torch.arange(n) * start, "staged"),
    "back from start": (lambda n, start: torch.arange(start, start - n, -1), "staged"),
}


@pytest.mark.parametrize("name", one_in(1, APPENDED))
def test_rows_are_appended_at_a_start(name: str) -> None:
    """A start below 0 is another graph: the model counts from the end, the kernel skips it."""
    positions, placement = APPENDED[name]
    torch.manual_seed(0)
    steps = (8, "in place"), (9, placement), (8, placement), (-9, "staged")
    assert_placed(Appended(positions), steps)


def test_a_size_that_the_model_divides_by() -> None:
    """Verification draws numbers for it, 0 among them, which the model does not take."""

    torch.manual_seed(0)
    model = Decode(POSITIONS["in blocks"])
    x, _, _, *caches = paged_args(8)
    args = (x, *caches, torch.tensor(16))
    fused = run_fused(model, clones(args))
    (fusion,) = mf.reports()[-1].fused
    assert fusion.verified == "verified"
    assert_as_exact(model, args, fused)


@pytest.mark.parametrize(("size", "placement"), [(4, "in place"), (2, "staged"), (0, "staged")])
def test_places_that_are_counted_in_blocks(size: int, placement: str) -> None:
    """Place 2 of a block of two rows is a row of the next block."""

    def positions(n: int, start: int) -> Tensor:
        if not size:
            return torch.arange(n).repeat_interleave(2)[:n] + 1
        return (torch.arange(n // 2)[:, None] * size + 2 * torch.arange(2)).flatten()

    x, _, _, *caches = paged_args(8)
    torch._dynamo.reset()
    model = torch.compile(Appended(positions), backend=mf.backend(), dynamic=True)
    with torch.no_grad():
        model(x, *caches, 0)
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement.startswith(placement)
