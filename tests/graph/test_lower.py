"""Values become tensors, or nodes of a graph: the arguments of the kernel, and every Value of a
graph from its inputs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from mla_fusion.compat import hint_of
from mla_fusion.fx import normalise
from mla_fusion.fx.build import Builder, GraphBuilder
from mla_fusion.graph import pools
from mla_fusion.graph.call import Call
from mla_fusion.graph.form import Value, order
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.propose.prologue import Proposal, proposals
from mla_fusion.propose.sites import Projections
from tests.catalogue import ENTRIES
from tests.harness import held_by, traced_graph

aten = torch.ops.aten
TOLERANCE = 0.05  # of the largest element, in bfloat16

GRAPHS = [
    ("PagedRotateHalf", False),
    ("ComplexDense", False),
    ("CountedPairs", False),
    ("columns_flipped", False),
    ("Sequences", True),
    ("NothingRotated", True),
    ("LightLlm", True),
]
COMPUTED = [
    ("PagedRotateHalf", True),
    ("ComplexConjugated", False),
    ("Functional", False),
    ("NormOfTensorSize", False),
    ("columns_flipped", False),
    ("TablesLookedUpTwice", False),
    ("by_matmul", False),
    ("HeadsFirst", True),
]


class Run(Interpreter):
    """Each node of a graph as it is before its inputs are written."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        is_copy = n.target is aten.copy_.default
        found = self.fetch_args_kwargs_from_env(n)[0][1] if is_copy else super().run_node(n)
        self.values[n] = found
        return found


class TensorBuilder(Builder):
    """Computes on the tensors of a run; sizes are as they were when the graph was traced."""

    def __init__(self, values: Mapping[Node, Any]) -> None:
        self.values = values

    def value(self, node: Node) -> Any:
        return self.values[node]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def call_again(self, key: object, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def sizes(self, shape: Sequence[Any], of: Any = None) -> list[int]:
        return [int(hint_of(size)) for size in shape]

    def constant(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor


class Whole(Lowering):
    """Computes products and sums along axes too. No argument or result of the kernel is one."""

    def _dot(self, value: Value, *sources: Value) -> Any:
        left, right = map(self.of, sources)
        wider = torch.promote_types(left.dtype, right.dtype)
        return left.to(wider) @ right.to(wider)

    def _reduce(self, value: Value, source: Value) -> Any:
        dtype = None if value.active else value.dtype
        return self.of(source).sum(value.literal, dtype=dtype)


class Case:
    def __init__(self, name: str, dynamic: bool) -> None:
        entry = ENTRIES[name]
        torch.manual_seed(0)
        model, args = entry.model(), entry.args()
        gm = traced_graph(model, *args, dynamic=dynamic)
        self.gm = pools.take_apart(normalise.normalised(gm))
        self.given = [*held_by(model).values(), *args]
        self.graph = Graph(self.gm)
        found = proposals(Projections(self.graph))
        self.proposals = [one for one in found if isinstance(one, Proposal)]

        self.given += [part.of(self.given[at]) for at, part in self.parts]

    @property
    def parts(self) -> list[tuple[int, Any]]:
        """Inputs that are parts of others come behind them."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        return [found for node in inputs if (found := pools.part_of(node)) is not None]

    @torch.no_grad()
    def run(self) -> dict[Node, Any]:
        runner = Run(self.gm)
        runner.run(*self.given)
        return runner.values


def kept(case: Case, proposal: Proposal) -> Any:
    """Is a node no part of what the kernel computes?"""
    made = set[Value]()
    for value in order(case.graph.nodes):
        is_product = value.op == "dot" and value.sources[0] is proposal.x
        if is_product or not made.isdisjoint(value.sources):
            made.add(value)
    return lambda node: made.isdisjoint(values_of(case.graph.readings[node]))


def arguments(lowering: Lowering, proposal: Proposal) -> dict[str, Any]:
    """The tensors that the kernel is given, by name."""
    return {
        name: lowering.of(one, torch.bfloat16)
        for name, one in proposal.arguments.items()
        if isinstance(one, Value)
    }


def is_near(one: Tensor, other: Tensor) -> bool:
    assert one.shape == other.shape and one.dtype == other.dtype
    distance, size = (one.double() - other.double()).abs(), other.double().abs()
    return not one.numel() or bool(distance.max() <= TOLERANCE * size.max())


@pytest.mark.parametrize(("name", "dynamic"), GRAPHS)
def test_arguments_become_nodes(name: str, dynamic: bool) -> None:
    case = Case(name, dynamic)
    tensors, builder = TensorBuilder(case.run()), GraphBuilder(case.gm)
    (output,) = case.gm.graph.find_nodes(op="output")
    builder.at(output, {})
    (proposal,) = case.proposals
    of_tensors, of_nodes = (
        Lowering(one, case.graph, usable=kept(case, proposal)) for one in (tensors, builder)
    )
    wanted, found = arguments(of_tensors, proposal), arguments(of_nodes, proposal)
    for part, node in found.items():
        held = node.meta["val"]
        assert held.dtype == torch.bfloat16
        assert case.graph.shape(held.shape) == proposal.arguments[part].shape
    output.args = (tuple(found.values()),)
    case.gm.graph.lint()
    case.gm.recompile()
    for one, tensor in zip(case.gm(*case.given), wanted.values(), strict=True):
        torch.testing.assert_close(one, tensor)


def test_nodes_that_hold_a_value_are_read() -> None:
    case = Case("PagedRotateHalf", False)
    (proposal,) = case.proposals
    builder = GraphBuilder(case.gm)
    given = arguments(Lowering(builder, case.graph, usable=kept(case, proposal)), proposal)
    assert builder.made == []
    assert given["rope_cos"].op == "placeholder" and given["rope_cos"].target == "arg2_1"
    for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr"):
        assert given[name].target in (aten.t.default, aten.permute.default)
        assert given[name].args[0].op == "placeholder"


@pytest.mark.parametrize(("name", "dynamic"), COMPUTED)
def test_values_are_computed_from_inputs(name: str, dynamic: bool) -> None:
    """Beside activations to the last bit."""
    case = Case(name, dynamic)
    values = case.run()
    builder = TensorBuilder(values)
    lowering = Whole(builder, case.graph, usable=lambda node: node.op == "placeholder")
    compared = set[str]()
    for value, (node, *_) in case.graph.nodes.items():
        tensor = values[node]
        if not isinstance(tensor, Tensor) or tensor.is_complex() or node.op == "placeholder":
            continue
        try:
            with torch.no_grad():
                found = lowering.of(value, tensor.dtype)
        except LookupError as error:
            (at,) = error.args
            assert at.op in ("write", "opaque", "function")
            continue
        assert is_near(found, tensor) if value.active else torch.equal(found, tensor), value
        compared.add(value.op)
    assert {"dot", "product", "sum", "reshape", "slice"} <= compared


def test_literals() -> None:
    case = Case("PagedRotateHalf", False)
    lowering = Lowering(TensorBuilder(case.run()), case.graph)
    form = case.graph.form
    for tensor in (
        torch.tensor([[0.3, -1.25e-4], [1e-7, 3.0]]),
        torch.tensor([0.1, -7.5], dtype=torch.float64),
        torch.tensor([0.1, -7.5], dtype=torch.bfloat16),
        torch.tensor([3, -1, 1 << 40]),
        torch.tensor([1e-30, float("inf")]),
        torch.tensor([True, False]),
        torch.full((2, 3), 0.7),
    ):
        torch.testing.assert_close(lowering.of(form.constant(tensor)), tensor, rtol=0, atol=0)
    numbers = Call(form, "add", (5,), torch.int64)
    odd = numbers.sum([(2, form.count(5))], 1)  # type: ignore[list-item]
    assert lowering.of(odd, torch.float32, (5, 1)).tolist() == [[1], [3], [5], [7], [9]]
    table = form.constant(torch.arange(22).reshape(11, 2))
    assert lowering.of(form.gather(table, 0, odd))[:, 1].tolist() == [3, 7, 11, 15, 19]
