"""Which numbers count tokens, and which steps on them are no identities of the real numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fusion.prove.counted import Counted

X, POSITIONS = torch.randn(8, 4), torch.arange(8)
Step = Callable[[Tensor, Tensor], Tensor]


def in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of a product of bytes, which sums four of them."""
    return x.to(torch.int8).repeat(4, 1), x.t().to(torch.int8)


def last_of(step: Step) -> tuple[Counted, Node]:
    """The counts of a step of x and positions, and the node that it returns."""
    graph = make_fx(step)(X, POSITIONS).graph
    x, positions = (node for node in graph.nodes if node.op == "placeholder")
    (last,) = graph.output_node().all_input_nodes
    return Counted({x: "x", positions: ""}, frozenset(("constant",))), last


@pytest.mark.parametrize(
    "step",
    [
        lambda x, p: p + 1,
        lambda x, p: p.float() / 600,
        lambda x, p: torch.outer(p.float(), 1.0 / torch.ones(3)),
        lambda x, p: torch.arange(8).view(-1, 1).bfloat16(),
        lambda x, p: p.to(torch.int32) * 128,
        lambda x, p: p // 16,
        lambda x, p: torch.add(p.float(), p.float(), alpha=0.5) * 2**4,
    ],
)
def test_counts(step: Step) -> None:
    counted, node = last_of(step)
    assert node in counted and not counted.leaves_the_field(node)


@pytest.mark.parametrize(
    "step",
    [
        lambda x, p: x * p.view(-1, 1),
        lambda x, p: p.float().cos(),
        lambda x, p: 10000.0 ** (p / 8),
        lambda x, p: p > 3,
        lambda x, p: torch.ones(8) * 2,
        lambda x, p: x[p],
        lambda x, p: torch._int_mm(*in_int8(x)) * 2**14,
    ],
)
def test_no_counts(step: Step) -> None:
    counted, node = last_of(step)
    assert node not in counted and not counted.leaves_the_field(node)


@pytest.mark.parametrize(
    "step",
    [
        lambda x, p: x / p.view(-1, 1),
        lambda x, p: p.float().rsqrt(),
        lambda x, p: (p + 1.0).reciprocal(),
        lambda x, p: p.float() ** 20,
        lambda x, p: p.to(torch.int32) * 2**22,
        lambda x, p: p.to(torch.int32) ** 3,
        lambda x, p: p.to(torch.int32) << 20,
        lambda x, p: torch._int_mm(*in_int8(x)) * 2**17,
        lambda x, p: (lambda q: q @ q)(p.view(-1, 1).expand(8, 8).float()),
        lambda x, p: torch.outer(p.float(), p.float()),
    ],
)
def test_what_is_another_number_for_some_tokens(step: Step) -> None:
    counted, node = last_of(step)
    assert counted.leaves_the_field(node)
