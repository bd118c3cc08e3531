"""The walk: each policy passes what it is named for, and ends at everything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from mla_fusion.fx import walk
from tests.fx.tracing import floats, inputs, outputs, view

Step = Callable[[Tensor], Tensor]

# one step on bfloat16 [4, 2, 6], and the policies that pass it
STEPS: dict[str, tuple[Step, str]] = {
    "rows merged": (
        lambda x: x.view(8, 6),
        "reshapes views casts exact rows columns repeats memory written in_place",
    ),
    "all merged": (
        lambda x: x.view(48),
        "reshapes views casts exact repeats memory written in_place",
    ),
    "transposed": (lambda x: x.transpose(0, 1), "views casts exact memory written in_place"),
    "columns sliced": (lambda x: x[..., 2:], "views casts exact columns memory written in_place"),
    "rows sliced": (lambda x: x[1:], "views casts exact memory written in_place"),
    "columns split": (
        lambda x: x.split([2, 4], -1)[1],
        "views casts exact columns memory written in_place",
    ),
    "rows split": (lambda x: x.split([1, 3])[1], "views casts exact memory written in_place"),
    "widened": (lambda x: x.float(), "casts exact model columns repeats memory written"),
    "to float8": (lambda x: x.to(torch.float8_e4m3fn), "casts repeats memory written"),
    "to float16": (lambda x: x.half(), "casts model repeats memory written"),
    "doubled": (lambda x: x * 2, ""),
    "summed": (lambda x: x.sum(-1), ""),
}
POLICIES: dict[str, tuple[walk.Policy, str]] = {
    "views": (walk.views, "views"),
    "reshapes": (walk.reshapes, "reshapes"),
    "row_reshapes": (walk.row_reshapes, "rows"),
    "table_columns": (walk.table_columns, "columns"),
    "views_and_casts": (walk.views_and_casts, "casts"),
    "views_and_exact_casts": (walk.views_and_exact_casts, "exact"),
    "repeats": (walk.repeats, "repeats"),
    "written": (walk.written, "written"),
    "shared_memory": (walk.shared_memory, "memory"),
    "views_and_writes": (walk.views_and_writes, "in_place"),
}


def step(fn: Step) -> tuple[Node, Node]:
    """What goes in and what comes out."""
    graph = view(fn, floats(4, 2, 6).bfloat16())
    return inputs(graph)[0], outputs(graph)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", STEPS)
def test_a_policy_passes_what_it_is_named_for(name: str, policy: str) -> None:
    fn, passed = STEPS[name]
    source, node = step(fn)
    follow, word = POLICIES[policy]
    assert (walk.origin(node, follow) is source) == (word in passed.split())


@pytest.mark.parametrize("name", ["widened", "to float16", "to float8"])
def test_casts_among_a_models_floats(name: str) -> None:
    fn, passed = STEPS[name]
    source, node = step(fn)
    assert (walk.peel(node) is source) == ("model" in passed.split())
    assert (walk.exact_casts(node) is source) == ("exact" in passed.split())


def test_expands_alone() -> None:
    source, node = step(lambda x: x[:, :1].expand(4, 5, 6))
    assert [above.meta["val"].shape[1] for above in walk.upward(node, walk.expands)] == [5, 1]
    assert walk.origin(node, walk.views) is source


def test_a_selection_along_an_axis_of_length_one() -> None:
    source, node = step(lambda x: x.view(8, 1, 6).select(1, 0))
    assert walk.origin(node, walk.unit_selections) is source
    _, other = step(lambda x: x.select(1, 0))
    assert walk.unit_selections(other) is None


def test_upward_gives_every_node_on_the_way() -> None:
    graph = view(lambda x: x.view(8, 6).t().float(), floats(4, 2, 6).bfloat16())
    way = list(walk.upward(outputs(graph)[0], walk.views_and_casts))
    assert way == [node for node in reversed(graph.nodes) if node.op != "output"]


def test_a_result_of_a_split_leads_to_what_was_split() -> None:
    source, node = step(lambda x: x.unbind(1)[1])
    assert walk.input_of(node) is source
    assert walk.input_of(source) is None
