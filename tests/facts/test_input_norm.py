"""RMSNorm of the hidden state itself, with 1e-6: many spellings, and what differs in one detail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_fusion.facts import input_norm
from mla_fusion.fx.view import View
from tests.harness import traced_graph

npu = torch.ops.npu
Spelling = Callable[[Tensor, Tensor], Tensor]


def by_hand(x: Tensor, g: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


SPELLINGS: dict[str, Spelling] = {
    "by hand": by_hand,
    "a root and a quotient": lambda x, g: (
        (x / x.float().square().mean(-1, True).add(1e-6).sqrt()).bfloat16() * g
    ),
    "F.rms_norm": lambda x, g: F.rms_norm(x, (8,), g, 1e-6),
    "npu_rms_norm": lambda x, g: npu.npu_rms_norm(x, g, 1e-6)[0],
    "npu_add_rms_norm": lambda x, g: sum_and_norm(x, g)[1],
    "of a residual sum": lambda x, g: by_hand(x + x.sin(), g),
    "of halves": lambda x, g: torch.cat([by_hand(x, g)[:, :4], by_hand(x, g)[:, 4:]], -1),
    "a sum over eight": lambda x, g: (
        x.float() * (x.float().square().sum(-1, True) / 8 + 1e-6) ** -0.5 * g
    ).bfloat16(),
}
OTHERS: dict[str, Spelling] = {
    "another epsilon": lambda x, g: by_hand(x, g, 1e-5),
    "npu_rms_norm, another epsilon": lambda x, g: npu.npu_rms_norm(x, g, 1e-5)[0],
    "no weight": lambda x, g: by_hand(x, torch.ones_like(g)),
    "a weight of one more": lambda x, g: by_hand(x, g + 1),
    "half of the columns": lambda x, g: (
        x * torch.rsqrt(x[:, :4].float().pow(2).mean(-1, True) + 1e-6) * g
    ).bfloat16(),
    "a clamp": lambda x, g: by_hand(x.clamp(-8, 8), g).clamp(-8, 8),
    "bounded far out": lambda x, g: by_hand(x, g).clamp(-1e4, 1e4),
    "a layer norm": lambda x, g: F.layer_norm(x, (8,), g),
    "twice the norm": lambda x, g: 2 * by_hand(x, g),
    "another token's mean": lambda x, g: (
        x * torch.rsqrt(x.float().square().mean(-1, True) + 1e-6).flip(0) * g
    ),
    "a root that changes sign": lambda x, g: (
        by_hand(x, g) + (x - 100).float().pow(2).sqrt().bfloat16() - (100 - x)
    ),
}


def sum_and_norm(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    normed, _, total = npu.npu_add_rms_norm(x, x, g, 1e-6)
    return total, normed


def read(spelling: Spelling) -> input_norm.InputNorm | None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8).bfloat16())

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            if spelling is SPELLINGS["npu_add_rms_norm"]:
                return sum_and_norm(x, self.weight)
            return (spelling(x, self.weight),)

    gm = traced_graph(Model(), torch.randn(4, 8).bfloat16())
    view = View(gm)
    (output,) = gm.graph.find_nodes(op="output")
    return input_norm.find(view, output.args[0][-1])


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_norm(name: str) -> None:
    fact = read(SPELLINGS[name])
    assert fact is not None and fact.gamma.op == "placeholder"
    assert len(fact.begins) == (2 if name == "npu_add_rms_norm" else 1)


@pytest.mark.parametrize("name", OTHERS)
def test_another_norm(name: str) -> None:
    assert read(OTHERS[name]) is None
