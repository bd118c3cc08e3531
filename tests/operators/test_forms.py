"""Runs as they are read, against what torch takes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from mla_fusion.operators.forms import Run, run_of

aten = torch.ops.aten
WHOLE = torch.arange(20).reshape(5, 4)

# ``narrow`` keeps its own operator in graphs from before dispatch
TAKERS: list[tuple[Any, ...]] = [
    *[(aten.narrow.default, 0, *run) for run in ((-1, 1), (-3, 2), (-5, 5), (0, 3), (2, 2))],
    *[(aten.slice.Tensor, 0, *ends) for ends in ((), (1,), (-2,), (1, 3), (-9, 2), (3, 9), (4, 1))],
    (aten.slice.Tensor, -1, 1, 2**63 - 1),
    (aten.select.int, 0, 2),
    (aten.select.int, -1, -1),
]
SPLITS: list[tuple[Any, ...]] = [
    (aten.split.Tensor, 2),
    (aten.split_with_sizes.default, [1, 3], -1),
    (aten.chunk.default, 3),
    (aten.unbind.int, 1),
]


def node_of(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    held = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    node.meta["val"] = target(*held)
    return node


def whole_of(graph: Graph) -> Node:
    node = graph.placeholder("whole")
    node.meta["val"] = WHOLE
    return node


def part_of(run: Run | None) -> torch.Tensor:
    assert run is not None and run.places is not None
    start, stop = run.places
    part = run.whole.meta["val"].narrow(run.axis, start, stop - start)
    return part.squeeze(run.axis) if run.drops else part


@pytest.mark.parametrize(("target", "args"), [(taker[0], taker[1:]) for taker in TAKERS], ids=str)
def test_what_is_taken(target: Any, args: tuple[Any, ...]) -> None:
    graph = Graph()
    node = node_of(graph, target, whole_of(graph), *args)
    assert part_of(run_of(node)).equal(node.meta["val"])


@pytest.mark.parametrize(("target", "args"), [(split[0], split[1:]) for split in SPLITS], ids=str)
def test_what_a_result_of_a_split_is(target: Any, args: tuple[Any, ...]) -> None:
    graph = Graph()
    split = node_of(graph, target, whole_of(graph), *args)
    assert run_of(split) is None
    for place, result in enumerate(split.meta["val"]):
        node = graph.call_function(operator.getitem, (split, place))
        node.meta["val"] = result
        assert part_of(run_of(node)).equal(result)


@pytest.mark.parametrize(
    ("target", "shape", "args"),
    [
        (aten.slice_scatter.default, (2, 4), (0, 1, 3)),
        (aten.slice_scatter.default, (5, 2), (-1, -2)),
        (aten.select_scatter.default, (4,), (0, -2)),
        (aten.select_scatter.default, (5,), (1, 3)),
    ],
    ids=str,
)
def test_what_is_put_back(target: Any, shape: tuple[int, ...], args: tuple[Any, ...]) -> None:
    graph = Graph()
    whole, rows = whole_of(graph), graph.placeholder("rows")
    rows.meta["val"] = -1 - torch.arange(torch.Size(shape).numel()).reshape(shape)
    run = run_of(put := node_of(graph, target, whole, rows, *args))
    assert run is not None and run.places is not None and run.part is rows
    start, stop = run.places
    taken = put.meta["val"].narrow(run.axis, start, stop - start)
    assert (taken.squeeze(run.axis) if run.drops else taken).equal(rows.meta["val"])


def test_every_second_place_is_no_run() -> None:
    graph = Graph()
    run = run_of(node_of(graph, aten.slice.Tensor, whole_of(graph), 0, 0, 5, 2))
    assert run is not None and run.places is None


def test_what_turns_axes_is_no_run() -> None:
    graph = Graph()
    assert run_of(node_of(graph, aten.permute.default, whole_of(graph), [1, 0])) is None
