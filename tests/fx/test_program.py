"""Nodes as a program: in float64 with casts taken out, or exactly as they are; what cannot be run
fails by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion.fx.program import Failed, Program, nodes_between
from tests.fx.tracing import TOKENS, inputs, outputs, view


def value(fn: Callable[..., Tensor], *given: Tensor, symbolic: bool = False, **options: Any) -> Any:
    graph = view(fn, *(torch.zeros_like(arg) for arg in given), symbolic=symbolic)
    (sink,) = outputs(graph)
    program = Program(inputs(graph), nodes_between(inputs(graph), sink), graph.binding, **options)
    return program.run(list(given))[program.slot(sink)]


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_casts_are_taken_out() -> None:
    given = X.bfloat16()
    found = value(lambda x: (x.float() * 3).bfloat16() + 1, given.double())
    assert found.dtype == torch.float64 and torch.equal(found, given.double() * 3 + 1)


def test_casts_are_kept_where_asked() -> None:
    fn = lambda x: (x.float() * 3).bfloat16() + 1  # noqa: E731
    given = X.bfloat16()
    found = value(fn, given, exact=True)
    assert found.dtype == torch.bfloat16 and torch.equal(found, fn(given))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_through_float8_is_not_looked_through(dtype: torch.dtype) -> None:
    assert isinstance(value(lambda x: x.to(dtype).float() + 1, X.float()), Failed)
    assert isinstance(value(lambda x: x.to(dtype).float() + 1, X.float(), exact=True), Tensor)


def test_what_reads_a_step_that_failed_fails_with_its_reason() -> None:
    found = value(lambda x: x.to(torch.float8_e4m3fn).float() * 2, X.float())
    assert isinstance(found, Failed) and "float8" in found.reason


def test_a_part_of_symbolic_length_is_not_run() -> None:
    given = torch.zeros(TOKENS, 4, dtype=torch.float64)
    assert isinstance(value(lambda x: x[: x.shape[0] // 2] * 2, given, symbolic=True), Failed)
    assert isinstance(value(lambda x: x[: x.shape[0]] * 2, given, symbolic=True), Tensor)


def test_only_what_is_wanted_is_run() -> None:
    graph = view(lambda x: (x + 1, x * 2), X.float())
    one, other = outputs(graph)
    program = Program(inputs(graph), [one, other], graph.binding)
    found = program.run([X], [program.slot(one)])
    assert torch.equal(found[program.slot(one)], X + 1) and found[program.slot(other)] is None


def test_equal_steps_are_one_program() -> None:
    def signature(fn: Callable[[Tensor], Tensor]) -> object:
        graph = view(fn, X.float())
        return Program(
            inputs(graph), nodes_between(inputs(graph), outputs(graph)[0]), graph.binding
        ).signature

    assert signature(lambda x: (x + 1).t()) == signature(lambda y: (y + 1).t())
    assert signature(lambda x: (x + 1).t()) != signature(lambda x: (x + 2).t())
    assert signature(lambda x: (x + 1).t()) != signature(lambda x: (x * 1).t())


def test_nodes_between_a_source_and_a_sink() -> None:
    graph = view(lambda x, y: ((x + 1) * y).sum(-1), X.float(), X.float())
    sink = outputs(graph)[0]
    first = sink.args[0].args[0]
    assert [node.name for node in nodes_between([first, inputs(graph)[1]], sink)] == [
        sink.args[0].name,
        sink.name,
    ]
    assert nodes_between([sink], sink) == []


def test_literals() -> None:
    graph = view(lambda x: x * 0.5 + 3.0, X.float())
    program = Program(inputs(graph), nodes_between(inputs(graph), outputs(graph)[0]), graph.binding)
    assert sorted(program.literals) == [0.5, 3.0]
