"""Every operator that has a rule, read into Values, is what eager torch computes.

The calls are the lines of ``calls.txt``. Activations are products with a weight; in another setting
they are inputs, and in a third the number of tokens is a symbol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import mla_fusion  # noqa: F401  # operators of npu
from mla_fusion.fx.module_path import ARGUMENT
from mla_fusion.graph.call import RULES, Pair
from mla_fusion.graph.form import order
from mla_fusion.graph.read import Graph, values_of
from tests.graph.calls import ACTIVATIONS, LINES, Line, Names, sizes_of, tensors_of
from tests.graph.real import Real, is_known, is_known_alone, wide

# rules of operators that no call above can be of
ELSEWHERE = {
    "scalar_tensor": "a literal is folded",
    "lift_fresh": "a trace has lift_fresh_copy",
    "npu::npu_linear": "torch_npu defines it",
    "npu::npu_dtype_cast": "torch_npu defines it",
    "npu::_npu_dtype_cast": "torch_npu defines it",
}
# of these calls only the first result is more than a name
PARTS = ("max.dim", "min.dim")
SYMBOL = 10007  # what the first symbol of a graph is bound to


@dataclass(frozen=True)
class Traced:
    """
    lines        of each call, its results
    activations  by name
    """

    gm: GraphModule
    lines: dict[Line, list[Node]]
    activations: dict[str, Node]
    leaves: dict[str, Tensor]
    names: Names


def symbolic_lines() -> list[Line]:
    """Of each operator the first call, and those that name the number of tokens."""
    lines = [line for line in LINES if not line.is_static]
    first = {line.operator: line for line in reversed(lines)}
    return [
        line for line in lines if first[line.operator] is line or re.search(r"\bT\b", line.call)
    ]


def traced(is_symbolic: bool) -> Traced:
    """All calls as one graph."""
    seed = int(is_symbolic)
    sizes = sizes_of(seed, SYMBOL if is_symbolic else None)
    tensors = tensors_of(seed, sizes)
    lines = symbolic_lines() if is_symbolic else LINES
    counts = list[int]()

    def run(*given: Tensor) -> list[Tensor]:
        names = Names(sizes, dict(zip(tensors.given, given, strict=True)), True)
        found = [names[name] for name in ACTIVATIONS]
        for line in lines:
            results = listed(names.run(line.call))
            counts.append(len(results))
            found += results
        return found

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def traceable(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
        if not is_symbolic:
            return tensor
        shape = tensors.shapes[name]
        kinds = [DimDynamic.DUCK if one == "T" else DimDynamic.STATIC for one in shape]
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))

    given = [traceable(name, tensor) for name, tensor in tensors.given.items()]
    with mode if is_symbolic else nullcontext(), torch.no_grad():
        gm = make_fx(run, pre_dispatch=True)(*given)
    assert mode.shape_env is not None and not mode.shape_env.replacements  # a symbol is none
    leaves = {}
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), tensors.given, strict=True):
        node.meta[ARGUMENT] = name not in tensors.model
        leaves[node.name] = tensors.given[name]
    results = iter(gm.graph.output_node().args[0])
    activations = {name: next(results) for name in ACTIVATIONS}
    nodes = {
        line: [next(results) for _ in range(count)]
        for line, count in zip(lines, counts, strict=True)
    }
    return Traced(gm, nodes, activations, leaves, Names(sizes, tensors.given, False))


def beside(call: Traced) -> Traced:
    """The same graph with inputs for activations."""
    graph, copies = FxGraph(), dict[Node, Node]()
    leaves = dict(call.leaves)
    for name, node in call.activations.items():
        copies[node] = graph.placeholder(f"given_{name}")
        copies[node].meta = dict(node.meta, **{ARGUMENT: True})
        leaves[f"given_{name}"] = call.names[name]
    for node in call.gm.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    lines = {line: [copies[node] for node in nodes] for line, nodes in call.lines.items()}
    return Traced(GraphModule(call.gm, graph), lines, {}, leaves, call.names)


@dataclass(frozen=True)
class Read:
    """
    answers  names of the rules that had an answer
    """

    traced: Traced
    graph: Graph
    answers: set[str]
    real: Real
    is_active: bool


@pytest.fixture(scope="module")
def readings() -> dict[str, Read]:
    """By setting."""
    active = traced(is_symbolic=False)
    graphs = {"active": active, "beside": beside(active), "symbolic": traced(is_symbolic=True)}
    found = {}
    for setting, one in graphs.items():
        with answers_of_rules() as answers:
            graph = Graph(one.gm)
        assert list(graph.symbols.values()) == [SYMBOL] * (setting == "symbolic")
        found[setting] = Read(one, graph, answers, Real(one.leaves), setting != "beside")
    return found


def listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


@contextmanager
def answers_of_rules() -> Iterator[set[str]]:
    found, rules = set[str](), dict(RULES)

    def noted(name: str) -> Callable[..., Any]:
        def rule(*args: Any, **options: Any) -> Any:
            answer = rules[name](*args, **options)
            found.add(name)
            return answer

        return rule

    RULES.update({name: noted(name) for name in rules})
    try:
        yield found
    finally:
        RULES.update(rules)


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    wanted = wide(wanted)
    found = wide(found).to(wanted.dtype) if wanted.is_floating_point() else wide(found)
    assert found.shape == wanted.shape
    if not wanted.is_floating_point():
        assert torch.equal(found.long(), wanted.long())
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9, equal_nan=True)


def assert_is_right(found: Read, line: Line) -> None:
    with float64_by_default():  # of numbers in a call
        results = listed(found.traced.names.run(line.wanted))
    for place, (node, result) in enumerate(zip(found.traced.lines[line], results, strict=True)):
        reading = found.graph.readings[node]
        if not is_known(values_of(reading)):
            unknown = [one for one in order(values_of(reading)) if not is_known_alone(one)]
            is_part = place > 0 and line.call.startswith(PARTS)
            assert line.may_be_opaque or is_part or not found.is_active, unknown
        elif isinstance(reading, Pair):
            assert_equal(found.real(reading.real), result.real)
            assert_equal(found.real(reading.imag), result.imag)
        else:
            assert reading.dtype == node.meta["val"].dtype or reading.active
            assert_equal(found.real(reading), result)


@pytest.mark.parametrize("name", sorted({line.operator for line in LINES}))
def test_an_operator_is_what_torch_computes(name: str, readings: dict[str, Read]) -> None:
    failures = []
    for setting, found in readings.items():
        for line in found.traced.lines:
            if line.operator == name:
                try:
                    assert_is_right(found, line)
                except Exception as error:
                    failures.append(f"{setting}: {line.call}: {error}")
    assert not failures, "\n".join(failures)


def test_every_rule_has_a_call(readings: dict[str, Read]) -> None:
    answers = readings["active"].answers | readings["symbolic"].answers
    assert set(RULES) - answers == set(ELSEWHERE)
