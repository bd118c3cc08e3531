"""The witness's interpreter: as torch runs a graph, or with every float in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion.commit.interpreter import Interpreter, Unrunnable
from tests.fx.tracing import TOKENS, inputs, outputs, view

X = torch.randn(
    TOKENS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
).bfloat16()


def value(fn: Callable[..., Tensor], *given: Tensor, symbolic: bool = False, **options: Any) -> Any:
    graph = view(fn, *(torch.zeros_like(arg) for arg in given), symbolic=symbolic)
    leaves = inputs(graph)
    (sink,) = outputs(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    run = Interpreter(nodes, graph.binding, **options)
    return run.run(dict(zip(leaves, given, strict=True)), [sink])[sink]


def test_dtypes_and_casts_are_the_graphs() -> None:
    fn = lambda x: (x.float() * 3).bfloat16() + 1  # noqa: E731
    found = value(fn, X)
    assert found.dtype == torch.bfloat16 and torch.equal(found, fn(X))


def test_floats_are_float64_where_asked() -> None:
    found = value(lambda x: (x.float() * 3).bfloat16() + 1, X.double(), wide=True)
    assert found.dtype == torch.float64 and torch.equal(found, X.double() * 3 + 1)
    joined = value(
        lambda x: torch.cat([x.float(), x.float() + 1e-12]).bfloat16(), X.double(), wide=True
    )
    assert torch.equal(joined[TOKENS:], X.double() + 1e-12)
    numbers = value(lambda x: x + torch.ones(4) * (torch.arange(4) / 3), X.double(), wide=True)
    assert numbers.dtype == torch.float64


def test_numbers_of_one_byte_are_rounded() -> None:
    fn = lambda x: x.to(torch.float8_e4m3fn).to(torch.float32)  # noqa: E731
    assert torch.equal(value(fn, X), fn(X))
    assert torch.equal(value(fn, X.double(), wide=True), fn(X).double())


def test_what_does_not_run_is_named() -> None:
    with pytest.raises(Unrunnable, match=r"index_select does not run on CPU: .*out of range"):
        value(lambda x, i: x.index_select(0, i) * 2, X, torch.tensor([10**6]))


def test_what_is_given_is_not_written() -> None:
    given = X.clone()
    found = value(lambda x: x.mul_(2) + 1, given)
    assert torch.equal(found, X * 2 + 1) and torch.equal(given, X)


def test_sizes_are_those_of_the_binding() -> None:
    found = value(lambda x: x[: x.shape[0] // 2] * 2, X, symbolic=True)
    assert torch.equal(found, X[:2] * 2), "half of five tokens, which the graph is bound to"


def test_a_cache_of_fewer_blocks_is_viewed_as_far_as_it_goes() -> None:
    graph = view(lambda c: c.view(1, 64, 4).expand(2, 64, 4) + 1, torch.zeros(16, 4, 4))
    (leaf,), (sink,) = inputs(graph), outputs(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    found = Interpreter(nodes, graph.binding).run({leaf: torch.zeros(3, 4, 4)}, [sink])[sink]
    assert torch.equal(found, torch.ones(2, 12, 4))
