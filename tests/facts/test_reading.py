"""Facts are read once for cones that are equal, and an unequal one is read for itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_fusion.facts import projection
from mla_fusion.facts.reading import FactReader
from tests.facts.reading import HE, T
from tests.fx.tracing import floats, view

W = 8
Step = Callable[[Tensor], Tensor]


def norm(y: Tensor, eps: float = 1e-6) -> Tensor:
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)


def reader(*steps: Step) -> tuple[FactReader, list[int]]:
    """After the cones of as many products are read, and how many norms each holds."""
    weights = [floats(HE, W) for _ in steps]
    graph = view(
        lambda x, *ws: [step(x @ w) for step, w in zip(steps, ws, strict=True)],
        floats(T, HE),
        *weights,
    )
    found = projection.find(graph)
    made = FactReader(graph, found)
    return made, [len(made.read(item).norms) for item in found]


def test_equal_cones_are_probed_once() -> None:
    made, norms = reader(norm, norm, norm)
    assert norms == [1, 1, 1]
    alone, _ = reader(norm)
    assert made.probes == alone.probes == 1


def test_unequal_cones_are_probed_each() -> None:
    made, norms = reader(norm, lambda y: norm(y, 1e-5), lambda y: y * 2)
    assert norms == [1, 1, 0] and made.probes == 3


def test_facts_of_an_equal_cone_name_its_own_nodes() -> None:
    weights = [floats(HE, W) for _ in range(2)]
    graph = view(lambda x, v, w: (norm(x @ v), norm(x @ w)), floats(T, HE), *weights)
    found = projection.find(graph)
    made = FactReader(graph, found)
    first, second = (made.read(item) for item in found)
    assert first.norms[0].node is not second.norms[0].node
    assert second.norms[0].node in graph.members(found[1].node)
    assert first.norms[0].eps == second.norms[0].eps


def test_what_was_read_is_not_read_again() -> None:
    graph = view(lambda x, w: norm(x @ w), floats(T, HE), floats(HE, W))
    (item,) = projection.find(graph)
    made = FactReader(graph, [item])
    assert made.read(item) is made.read(item) and made.probes == 1
