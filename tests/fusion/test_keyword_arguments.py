"""Calls that give arguments by name, as a graph made by hand may, are read as the others are."""

from __future__ import annotations

import pytest

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from torch.fx import GraphModule, Node

from tests.catalogue import ENTRIES
from tests.exhaustive import one_in
from tests.harness import traced_graph

NAMES = (
    "PagedRotateHalf",
    "ComplexDense",
    "NpuOperatorsV1",
    "PackedRows",
    "PlainCache",
    "FusedQkvA",
)


def _by_name(gm: GraphModule, from_place: int) -> int:
    """Gives all arguments from a place on by name; how many calls that changes."""
    count = 0
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and len(node.args) > from_place:
            names = [one.name for one in node.target._schema.arguments][from_place:]
            named = dict(zip(names, node.args[from_place:], strict=False))
            node.args, node.kwargs = node.args[:from_place], {**named, **node.kwargs}
            count += 1
    gm.recompile()
    return count


def _targets(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if isinstance(node, Node)]


@pytest.mark.parametrize(
    ("name", "from_place"), one_in(1, [*[(name, 0) for name in NAMES], (NAMES[0], 1)])
)
def test_named_arguments(name: str, from_place: int) -> None:
    entry = ENTRIES[name]
    plain, named = (traced_graph(entry.model(), *entry.args()) for _ in range(2))
    assert _by_name(named, from_place)
    wanted, report = mf.fuse(plain), mf.fuse(named)
    assert [item.placement for item in report.fused] == [item.placement for item in wanted.fused]
    assert [item.code for item in report.rejected] == [item.code for item in wanted.rejected]
    assert _targets(named) == _targets(plain)
    named.graph.lint()
