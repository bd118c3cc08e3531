"""Which elements of a product a node is made of, read off from values however the node is
written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.facts.decode import Decoder, Reading
from tests.facts.reading import T, behind, read
from tests.fx.tracing import floats, outputs

W = 8
Step = Callable[..., Tensor]
CODES = torch.arange(T * W).reshape(T, W)


def reading(step: Step, *others: Tensor) -> Reading | None:
    """Of the last node behind a product [T, W]."""
    graph = behind(step, W, *others)
    decoder = Decoder(read(graph)[1][0].cone)
    last = outputs(graph)[0]
    return decoder.read(decoder.degrees(), lambda node: node is last).get(last)


# each takes elements of the product, as the same function takes their codes
MOVES: dict[str, Step] = {
    "sliced": lambda y: y[:, 2:6],
    "transposed": lambda y: y.t(),
    "in pairs": lambda y: y.view(T, W // 2, 2).transpose(1, 2),
    "every other": lambda y: y[:, ::2],
    "rolled": lambda y: y.roll(3, -1),
    "rows flipped": lambda y: y.flip(0),
    "halves exchanged": lambda y: torch.cat([y[:, 4:], y[:, :4]], -1),
    "repeated": lambda y: y.repeat_interleave(2, -1),
}


@pytest.mark.parametrize("factor", [1.0, -0.5])
@pytest.mark.parametrize("name", MOVES)
def test_moved_elements(name: str, factor: float) -> None:
    step = MOVES[name]
    found = reading(lambda y: step(y) * factor + 0)
    assert found is not None and (found.degree, found.single) == (1, True)
    assert torch.equal(found.first, step(CODES))


def test_sums_of_two_elements() -> None:
    found = reading(lambda y: y[:, : W // 2] * 3 - y[:, W // 2 :])
    assert found is not None and found.degree == 1 and not found.single
    both = torch.stack([found.first, found.second]).sort(0).values
    assert torch.equal(both, torch.stack([CODES[:, : W // 2], CODES[:, W // 2 :]]))


def test_two_elements_by_tables() -> None:
    step = lambda y, c, s: y * c + torch.cat([-y[:, W // 2 :], y[:, : W // 2]], -1) * s  # noqa: E731
    found = reading(step, floats(T, W), floats(T, W))
    assert found is not None and not found.single and not found.steady


def test_what_scaling_leaves_alone() -> None:
    found = reading(lambda y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert found is not None and found.degree == 0
    assert torch.equal(found.first, CODES)


def test_what_does_not_depend_on_the_tables_is_steady() -> None:
    found = reading(lambda y, c: torch.cat([y * 2, 0 * c + 1], -1)[:, :W], floats(T, W))
    assert found is not None and found.steady


@pytest.mark.parametrize(
    "step",
    [
        lambda y: y[:, :4] + y[:, 2:6] + y[:, 4:],  # three elements
        lambda y: y.pow(2),
        lambda y: y + 1,
        lambda y: y.sum(-1, keepdim=True).expand(T, W),
    ],
)
def test_what_is_made_of_more_than_two_or_not_linear(step: Step) -> None:
    assert reading(step) is None
