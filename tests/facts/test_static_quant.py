"""One scale and one offset for all that npu_quantize is given: seen in the graph, or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from mla_fusion.facts import static_quant
from mla_fusion.fx import module_path
from mla_fusion.fx.held import NUMBERS, Numbers, narrowed
from mla_fusion.fx.kinds import op_name
from tests.harness import traced_graph

npu = torch.ops.npu
Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [4, 8], scale [1], offset [1]

SPELLINGS: dict[str, Spelling] = {
    "one": lambda x, s, o: npu.npu_quantize(x, s, o, 1, -1, True),
    "expanded": lambda x, s, o: npu.npu_quantize(
        x, s.expand(8), o.to(x.dtype).expand(8), 1, -1, True
    ),
    "a scalar viewed": lambda x, s, o: npu.npu_quantize(x, s[0].view(1), o, 1, -1, True),
    "widened": lambda x, s, o: npu.npu_quantize(x.float(), s.float(), o.float(), 1, -1, True),
    "by the reciprocal": lambda x, s, o: npu.npu_quantize(
        x, s.reciprocal().expand(8), o, 1, -1, False
    ),
    "no offset": lambda x, s, o: npu.npu_quantize(x, s, None, 1, -1, True),
    "repeated": lambda x, s, o: npu.npu_quantize(
        x, s.repeat(8), o.repeat(8).to(x.dtype), 1, -1, True
    ),
}
OTHERS: dict[str, Spelling] = {
    "a scale for each channel": lambda x, s, o: npu.npu_quantize(x, x[0].abs() + 1, o, 1, -1, True),
    "float32's scale": lambda x, s, o: npu.npu_quantize(x, s.float() * 1.001, o, 1, -1, True),
    "the reciprocal as given": lambda x, s, o: npu.npu_quantize(x, s, o, 1, -1, False),
    "an offset that is no integer": lambda x, s, o: npu.npu_quantize(x, s, s, 1, -1, True),
    "an offset for each channel": lambda x, s, o: npu.npu_quantize(
        x, s.expand(8), x[0], 1, -1, True
    ),
    "narrowed on its way": lambda x, s, o: npu.npu_quantize(
        x, s.expand(8).half().bfloat16(), o, 1, -1, True
    ),
    "an offset that wraps": lambda x, s, o: npu.npu_quantize(x, s, o.to(torch.uint8), 1, -1, True),
    "an offset that is 0 or 1": lambda x, s, o: npu.npu_quantize(
        x, s, o.bool().expand(8), 1, -1, True
    ),
    "a number": lambda x, s, o: npu.npu_quantize(x, torch.full((8,), 0.03), o, 1, -1, True),
    "by each token": lambda x, s, o: npu.npu_dynamic_quant(x)[0],
}


def read(spelling: Spelling) -> static_quant.StaticQuant | None:
    class Model(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
            return spelling(x, scale, offset)

    args = (
        torch.randn(4, 8).bfloat16(),
        torch.tensor([0.5]).bfloat16(),
        torch.tensor([3], dtype=torch.int8),
    )
    nodes = traced_graph(Model(), *args).graph.nodes
    operators = [
        node for node in nodes if op_name(node) in ("npu::npu_quantize", "npu::npu_dynamic_quant")
    ]
    return static_quant.by_operator(operators[-1])


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_scale(name: str) -> None:
    fact = read(SPELLINGS[name])
    assert fact is not None and (fact.offset is None) == (name == "no offset")
    assert not fact.scale.repeated and fact.scale.node.meta["val"].numel() == 1
    assert fact.scale.node.meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", OTHERS)
def test_something_else(name: str) -> None:
    assert read(OTHERS[name]) is None


def test_nothing_at_all() -> None:
    assert static_quant.by_operator(None) is None and static_quant.why_not(None) == ""


# -- vectors of the model's, whose numbers were looked at


def vector(number: float, count: int = 8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((count,), number).to(dtype)


Call = tuple[Tensor, Tensor, bool]  # scale, offset, div_mode
THREE, SCALE = vector(3, dtype=torch.int8), vector(0.0311)
REPEATED: dict[str, Call] = {
    "scales": (SCALE, THREE, True),
    "float32 that holds bfloat16 numbers": (SCALE.float(), vector(3, dtype=torch.int32), True),
    "reciprocals, offsets in bfloat16": (1 / SCALE, THREE.bfloat16(), False),
    "reciprocals in float32": (1 / SCALE.float(), THREE.float(), False),
    "one element of another dtype": (SCALE[:1].float(), THREE[:1].bfloat16(), True),
    "no memory but for one": (SCALE[:1].expand(8), THREE, True),
}
DIFFERENT: dict[str, tuple[Call, str]] = {
    "one scale": ((torch.cat([SCALE[1:], vector(0.031, 1)]), THREE, True), "scale differ"),
    "one offset": (
        (SCALE, torch.cat([vector(4, 1, torch.int8), THREE[1:]]), True),
        "offset differ",
    ),
    "not a number": ((vector(float("nan")), THREE, True), "scale differ"),
    "no bfloat16 number": (
        (vector(0.0311, dtype=torch.float32), THREE, True),
        "one bfloat16 number: 0.0311",
    ),
    "no reciprocal": ((vector(1.484375), THREE, False), "the reciprocal of one bfloat16 number"),
    "reciprocal of no number": ((vector(0), THREE, False), "the reciprocal of one bfloat16 number"),
    "no integer": ((SCALE, vector(3.5), True), "one int8 number: 3.5"),
    "no int8 number": ((SCALE, vector(300), True), "one int8 number: 300"),
    "too few": ((vector(0.5, 7), THREE, True), "scale has 7 numbers for 8 channels"),
}


def read_vectors(
    call: Call, look: bool = True, step: Callable[[Tensor], Tensor] = lambda s: s
) -> Node:
    class Model(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
            return npu.npu_quantize(x, step(scale), offset, 1, -1, call[2])

    gm = traced_graph(Model(), torch.randn(4, 8).bfloat16(), *call[:2])
    inputs = (node for node in gm.graph.find_nodes(op="placeholder") if node.meta["val"].dim() == 1)
    for node, held, name in zip(inputs, call, ("scale", "offset"), strict=False):
        node.name = node.meta[module_path.NAME] = name
        if look:
            node.meta[NUMBERS] = Numbers.of(held)  # type: ignore[arg-type]
    (operator,) = (node for node in gm.graph.nodes if op_name(node) == "npu::npu_quantize")
    return operator


@pytest.mark.parametrize("name", REPEATED)
def test_a_vector_that_repeats_one(name: str) -> None:
    call = REPEATED[name]
    fact = static_quant.by_operator(read_vectors(call))
    assert fact is not None and fact.offset is not None
    for one, held in ((fact.scale, call[0]), (fact.offset, call[1])):
        packed = narrowed(held, one.dtype, one.inverse)
        assert one.exact.holds(packed, held) and packed.shape == (1,)
        if one.repeated and len(held) > 1:
            other = held.clone()
            other[-1] += 1
            assert not one.exact.holds(packed, other)
    assert fact.scale.inverse == (not call[2])


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_vector_that_does_not(name: str) -> None:
    call, why = DIFFERENT[name]
    operator = read_vectors(call)
    assert static_quant.by_operator(operator) is None
    assert why in static_quant.why_not(operator)


def test_a_vector_that_nobody_has_looked_at() -> None:
    assert "cannot be looked at" in static_quant.why_not(
        read_vectors(REPEATED["scales"], look=False)
    )


@pytest.mark.parametrize("step", [lambda s: s * 2, lambda s: s.cumsum(0), lambda s: s.sqrt()])
def test_a_vector_that_the_graph_computes(step: Callable[[Tensor], Tensor]) -> None:
    assert "computed in the graph" in static_quant.why_not(
        read_vectors(REPEATED["scales"], step=step)
    )


def test_views_of_one_number_are_that_number() -> None:
    for step in (
        lambda s: s[2:].repeat(2)[:8],
        lambda s: s.view(2, 4).t().contiguous().view(-1),
        lambda s: s[3:4],
    ):
        operator = read_vectors(REPEATED["scales"], step=step)
        assert static_quant.by_operator(operator) is not None, static_quant.why_not(operator)


@pytest.mark.parametrize("rounded", [False, True])
def test_reciprocals_that_the_graph_rounds(rounded: bool) -> None:
    operator = read_vectors(
        (1 / SCALE.float(), THREE, False),
        step=(lambda s: s.bfloat16()) if rounded else lambda s: s.double().float(),
    )
    assert (static_quant.by_operator(operator) is None) == rounded
    assert not rounded or "narrower form" in static_quant.why_not(operator)
