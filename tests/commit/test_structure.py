"""Layers that differ in anything that verification sees are verified each; equal ones share one
verification.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import mla_fusion as mf
from mla_fusion.commit import structure
from mla_fusion.commit.region import Region, cut_out
from mla_fusion.compile.device_graph import capture
from mla_fusion.fx.view import View
from mla_fusion.plan.plan import Plan
from tests.catalogue import base, prologues

aten = torch.ops.aten


@cache
def _captured() -> GraphModule:
    return capture(prologues.Layers(), *prologues.layers_args(), device="cpu")[0]


def layers() -> GraphModule:
    """A copy of one captured graph."""
    return copy.deepcopy(_captured())


def keys(
    gm: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[object], list[tuple[Region, Plan]]]:
    """The keys that the pass gives to the prologues of a graph, and what they were made of."""
    right, made, of = structure.key, [], []

    def key(view: View, region: Region, plan: Plan) -> object:
        made.append(right(view, region, plan))
        of.append((region, plan))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(structure, "key", key)
        mf.explain(gm)
    return made, of


def test_equal_layers_have_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second, third), _ = keys(layers(), monkeypatch)
    assert first == second == third and hash(first) == hash(second)


def test_every_literal_and_operator_of_the_region_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gm = layers()
    _, ((region, plan), *others) = keys(gm, monkeypatch)

    def is_like_the_others() -> bool:
        view = View(gm)
        (first, *rest) = (structure.key(view, *of) for of in ((region, plan), *others))
        assert len(set(rest)) == 1
        return first in rest

    changed = 0
    for node in region.nodes:
        for place, value in enumerate(node.args):
            if type(value) not in (int, float):
                continue
            kept = node.args
            node.args = (*kept[:place], value + 1, *kept[place + 1 :])
            assert not is_like_the_others(), node.format_node()
            node.args = kept
            changed += 1
        kept_target = node.target
        node.target = aten.neg.default if kept_target is not aten.neg.default else aten.abs.default
        assert not is_like_the_others(), node.format_node()
        node.target = kept_target
    assert changed > 10 and is_like_the_others()


def test_types_of_literals_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = layers()
    _, ((region, plan), second, *_) = keys(gm, monkeypatch)
    node = next(
        node
        for node in region.nodes
        if any(type(value) is int and value in (0, 1) for value in node.args)
    )
    node.args = tuple(
        bool(value) if type(value) is int and value in (0, 1) else value for value in node.args
    )
    view = View(gm)
    assert structure.key(view, region, plan) != structure.key(view, *second)


class Gathered(prologues.PagedRotateHalf):
    """Tables gathered by position, with a factor that a layer may have for itself."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *rest: Tensor) -> Any:
        rows = positions + self.shift
        return super().forward(x, cos[rows], sin[rows], *rest)


class Stack(nn.Module):
    def __init__(self, *shifts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gathered(shift) for shift in shifts)

    def forward(self, *args: Tensor) -> Any:
        x, *tables = args[:4]
        *caches, slots = args[4:]
        calls = [
            (x * (at + 1), *tables, *caches[2 * at : 2 * at + 2], slots)
            for at in range(len(self.layers))
        ]
        return tuple(layer(*call) for layer, call in zip(self.layers, calls, strict=True))


@pytest.mark.parametrize(("shifts", "verified"), [((1, 1), 1), ((1, 2), 2)])
def test_what_the_call_reads_is_in_the_key_up_to_the_inputs(
    shifts: tuple[int, ...], verified: int
) -> None:
    x, cos, _sin, *caches, slots = base.paged_args()
    tables = (torch.randn(64, cos.shape[-1]).to(cos.dtype) for _ in range(2))
    args = (x, *tables, torch.arange(len(x)), *caches, *(cache.clone() for cache in caches), slots)
    report = mf.fuse(capture(Stack(*shifts), *args, device="cpu")[0])
    assert len(report.fused) == 2, str(report)
    assert sum(item.verified == "verified" for item in report.fused) == verified


def test_constants_count_by_their_values() -> None:
    def key(value: list[int]) -> object:
        holder = nn.Module()
        holder.constant = torch.tensor(value)
        graph = torch.fx.Graph()
        node: Node = graph.get_attr("constant") if hasattr(holder, "constant") else None  # type: ignore[assignment]
        node.meta["val"] = holder.constant
        graph.output(node)
        gm = GraphModule(holder, graph)
        return structure._described(next(iter(gm.graph.nodes)), "constant")

    assert key([1, 2]) == key([1, 2]) != key([1, 3])


def test_the_region_ends_at_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = layers()
    _, ((_, plan), *_) = keys(gm, monkeypatch)
    region = cut_out(View(gm), plan)
    roles = {leaf.name: role for leaf, role in region.leaves.items()}
    assert sorted(role for role in roles.values() if role in ("x", "slots")) == ["slots", "x"]
    assert list(roles.values()).count("cache") == 2 and list(roles.values()).count("gamma") == 2
    known = {*region.leaves, *region.twins}
    for node in region.nodes:
        assert all(read in known for read in node.all_input_nodes)
        known.add(node)
