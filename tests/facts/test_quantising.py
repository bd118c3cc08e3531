"""Choices that a quantisation to int8 is made of; any other choice, or one with other bounds, ends
the proof.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.facts.quantising import only_quantises
from mla_fusion.fx.program import nodes_between
from tests.facts.reading import behind
from tests.fx.tracing import outputs

Step = Callable[[Tensor], Tensor]

STEPS: dict[str, Step] = {
    "rounded": lambda x: x.round(),
    "clamped to int8": lambda x: x.clamp(-128, 127),
    "symmetric": lambda x: x.clamp(-127, 127),
    "above alone": lambda x: x.clamp(max=127),
    "below alone": lambda x: x.clamp(min=-128),
    "one above, before it is rounded": lambda x: x.clamp(-128, 128).round(),
    "a floor": lambda x: x.clamp(min=1e-8),
    "a floor by maximum": lambda x: torch.maximum(x, torch.full((), 1e-6)),
    "largest of a row": lambda x: x.abs().amax(-1, keepdim=True),
    "largest of a row by max": lambda x: x.abs().max(-1, keepdim=True).values,
    "cast": lambda x: x.to(torch.int8),
    "divided by the largest": lambda x: x / x.abs().amax(-1, keepdim=True),
    "half away from zero": lambda x: x.sign() * (x.abs() + 0.5).floor(),
    "moved": lambda x: x.view(-1, 2, 4).transpose(1, 2) * 3,
}

MISSES: dict[str, Step] = {
    "clamped elsewhere": lambda x: x.clamp(-100, 100),
    "clamped at 126": lambda x: x.clamp(-126, 126),
    "unsigned": lambda x: x.clamp(0, 255),
    "high floor": lambda x: x.clamp(min=0.5),
    "high floor by maximum": lambda x: torch.maximum(x, torch.full((), 0.5)),
    "rounded to decimals": lambda x: x.round(decimals=1),
    "to float8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "to uint8": lambda x: x.to(torch.uint8),
    "where": lambda x: torch.where(x > 50, x, 0 * x),
    "relu": lambda x: x.relu(),
    "sorted": lambda x: x.sort(-1).values,
    "random": lambda x: x + torch.rand_like(x),
}


def proves(step: Step) -> bool:
    graph = behind(step, 8)
    (product,) = (node for node in graph.nodes if "mm" in str(node.target))
    return only_quantises(graph, nodes_between((product,), outputs(graph)[0]))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_quantisation(name: str) -> None:
    assert proves(STEPS[name])


@pytest.mark.parametrize("name", MISSES)
def test_another_choice(name: str) -> None:
    assert not proves(MISSES[name])


@pytest.mark.parametrize("name", MISSES)
def test_one_other_choice_among_right_steps(name: str) -> None:
    miss = MISSES[name]
    assert not proves(lambda x: miss(x.round().clamp(-128, 127)))
