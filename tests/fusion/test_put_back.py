"""Caches of one head, whose axis is selected away for the write and put back behind it. What keeps
every row in between, as torchair's graphs have it, is passed; what does not, is not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.catalogue.prologues import BlockOffset
from tests.harness import clones, distance, flat, outcome, traced

aten = torch.ops.aten
Step = tuple[Any, ...]
KEEP: dict[str, list[Step]] = {
    "nothing": [],
    "selected": [(aten.unsqueeze.default, 2), (aten.select.int, 2, 0)],
    "spread": [
        (aten.unsqueeze.default, 2),
        (aten.expand.default, [-1, -1, 1, -1]),
        (aten.select.int, 2, 0),
    ],
    "viewed": [(aten.unsqueeze.default, 0), (aten.squeeze.dim, 0)],
}
CHANGE: dict[str, list[Step]] = {
    "flipped": [(aten.flip.default, [0])],
    "one block for all": [(aten.slice.Tensor, 0, 0, 1), (aten.expand.default, [4, -1, -1])],
    "turned over": [(aten.transpose.int, 0, 1), (aten.reshape.default, [4, 16, -1])],
    "rounded": [(aten._to_copy.default,), (aten.mul.Tensor, 1.5)],
}


def call(gm: GraphModule, op: Any, *args: Any) -> Node:
    made = gm.graph.call_function(op, args)
    held = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    with held[0].fake_mode:
        made.meta["val"] = op(*held)
    return made


def put_back(steps: list[Step], read_too: bool = False) -> tuple[GraphModule, list[torch.Tensor]]:
    """The graph with the steps in front of each ``select_scatter``; ``read_too``: what it scatters
    is added to the result.
    """
    torch.manual_seed(0)
    gm, weights = traced(BlockOffset(), paged_args())
    output = gm.graph.output_node()
    (result,) = output.all_input_nodes
    for node in gm.graph.find_nodes(op="call_function", target=aten.select_scatter.default):
        value = node.args[1]
        with gm.graph.inserting_before(node):
            for op, *rest in steps:
                value = call(gm, op, value, *rest)
        node.update_arg(1, value)
        if read_too:
            with gm.graph.inserting_before(output):
                added = call(gm, aten.add.Tensor, result, call(gm, aten.sum.default, value))
            output.replace_input_with(result, added)
            result = added
    gm.recompile()
    return gm, weights


def check(gm: GraphModule, weights: list[torch.Tensor], placement: str) -> None:
    torch.manual_seed(1)
    args = paged_args()
    plain, fused = clones(args), clones(args)
    with torch.no_grad():
        want = [*flat(gm(weights, *plain)), *plain]
        report = mf.fuse(gm)
        assert outcome(report) == (placement,), str(report)
        got = [*flat(gm(weights, *fused)), *fused]
    for one, other in zip(got, want, strict=True):  # bfloat16: a few roundings more or less
        assert distance(one, other) <= 1e-2


@pytest.mark.parametrize("steps", KEEP.values(), ids=KEEP)
def test_what_keeps_every_row_is_passed(steps: list[Step]) -> None:
    check(*put_back(steps), "in place")


@pytest.mark.parametrize("steps", CHANGE.values(), ids=CHANGE)
def test_what_does_not_is_not(steps: list[Step]) -> None:
    check(*put_back(steps), "staged")


def test_what_is_read_on_the_way_stays() -> None:
    check(*put_back(KEEP["selected"], read_too=True), "staged")
