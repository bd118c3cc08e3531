"""One scale and one offset for all that npu_quantize is given: seen in the graph, or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mla_fusion.facts import static_quant
from mla_fusion.fx.kinds import op_name
from tests.harness import graph_of

npu = torch.ops.npu
Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [4, 8], scale [1], offset [1]

SPELLINGS: dict[str, Spelling] = {
    "one": lambda x, s, o: npu.npu_quantize(x, s, o, 1, -1, True),
    "expanded": lambda x, s, o: npu.npu_quantize(x, s.expand(8), o.to(x.dtype).expand(8), 1, -1, True),
    "a scalar viewed": lambda x, s, o: npu.npu_quantize(x, s[0].view(1), o, 1, -1, True),
    "widened": lambda x, s, o: npu.npu_quantize(x.float(), s.float(), o.float(), 1, -1, True),
    "by the reciprocal": lambda x, s, o: npu.npu_quantize(x, s.reciprocal().expand(8), o, 1, -1, False),
    "no offset": lambda x, s, o: npu.npu_quantize(x, s, None, 1, -1, True),
}
OTHERS: dict[str, Spelling] = {
    "a scale for each channel": lambda x, s, o: npu.npu_quantize(x, x[0].abs() + 1, o, 1, -1, True),
    "float32's scale": lambda x, s, o: npu.npu_quantize(x, s.float() * 1.001, o, 1, -1, True),
    "the reciprocal as given": lambda x, s, o: npu.npu_quantize(x, s, o, 1, -1, False),
    "an offset that is no integer": lambda x, s, o: npu.npu_quantize(x, s, s, 1, -1, True),
    "an offset for each channel": lambda x, s, o: npu.npu_quantize(x, s.expand(8), x[0], 1, -1, True),
    "a number": lambda x, s, o: npu.npu_quantize(x, torch.full((8,), 0.03), o, 1, -1, True),
    "by each token": lambda x, s, o: npu.npu_dynamic_quant(x)[0],
}


def read(spelling: Spelling) -> static_quant.StaticQuant | None:
    class Model(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
            return spelling(x, scale, offset)

    args = torch.randn(4, 8).bfloat16(), torch.tensor([0.5]).bfloat16(), torch.tensor([3], dtype=torch.int8)
    nodes = graph_of(Model(), *args).graph.nodes
    operators = [node for node in nodes if op_name(node) in ("npu::npu_quantize", "npu::npu_dynamic_quant")]
    return static_quant.by_operator(operators[-1])


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_scale(name: str) -> None:
    fact = read(SPELLINGS[name])
    assert fact is not None and (fact.offset is None) == (name == "no offset")
    assert fact.scale.meta["val"].numel() == 1 and fact.scale.meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", OTHERS)
def test_something_else(name: str) -> None:
    assert read(OTHERS[name]) is None


def test_nothing_at_all() -> None:
    assert static_quant.by_operator(None) is None
