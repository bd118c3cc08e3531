"""Facts of one layer, said of an equal one."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

import mla_fusion.facts
from mla_fusion.facts import projection
from mla_fusion.facts.moved import moved
from mla_fusion.facts.reading import FactReader
from mla_fusion.fx.view import View
from tests.fx.tracing import floats, view

T, HE, W = 5, 16, 8
DATACLASSES = sorted(
    {
        kind
        for module in pkgutil.iter_modules(mla_fusion.facts.__path__, "mla_fusion.facts.")
        for kind in vars(importlib.import_module(module.name)).values()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__name__.endswith("Fact")
    },
    key=lambda kind: kind.__name__,
)


def layer(x: Tensor, w: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    v = x @ w
    turned = torch.cat((-v[:, W // 2 :], v[:, : W // 2]), -1)
    return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma, v * cos + turned * sin


def two_layers(*inputs: Tensor) -> Any:
    x, *rest = inputs
    return layer(x, *rest[:4]), layer(x, *rest[4:])


def traced() -> View:
    of_layer = floats(HE, W), floats(W), floats(T, W), floats(T, W)
    return view(two_layers, floats(T, HE), *of_layer, *of_layer)


def described(value: Any) -> Any:
    """Comparable: nodes by name, tensors by content."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    if is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in fields(value)}
    return value


def test_a_second_layer_gets_the_facts_that_reading_it_would_find() -> None:
    graph = traced()
    first, second = projection.find(graph)
    reader = FactReader(graph, (first, second))
    known, moved_on = reader.read(first), reader.read(second)
    alone = FactReader(graph, (first, second)).read(second)
    assert reader.probes == 1 and known.norms and known.ropes
    for by_move, anew, before in zip(
        (*moved_on.norms, *moved_on.ropes),
        (*alone.norms, *alone.ropes),
        (*known.norms, *known.ropes),
        strict=True,
    ):
        assert described(by_move) == described(anew)
        assert by_move.node is not before.node


def test_columns_and_codes_are_shared_not_copied() -> None:
    graph = traced()
    found = projection.find(graph)
    reader = FactReader(graph, found)
    (one,), (other,) = (reader.read(item).norms for item in found)
    assert one.columns is other.columns and one.codes is other.codes


def test_a_node_without_a_counterpart_is_an_error() -> None:
    graph = traced()
    found = projection.find(graph)
    (norm,) = FactReader(graph, found).read(found[0]).norms
    with pytest.raises(KeyError):
        moved(norm, {norm.node: norm.node})


@pytest.mark.parametrize("kind", DATACLASSES, ids=lambda kind: kind.__name__)
def test_every_fact_is_a_frozen_value_named_at_the_call(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in fields(kind))
