"""The operator table against torch itself: its tags and its schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph

from mla_fusion.fx.kinds import Kind, kind_of
from mla_fusion.operators.known import known
from mla_fusion.operators.table import ROWS

aten = torch.ops.aten

LISTED = {name: row.kind for row in ROWS for name in row.names if row.kind is not None}


def overloads(name: str) -> list[Any]:
    """Of ``namespace::name``."""
    packet = getattr(getattr(torch.ops, name.partition("::")[0]), name.partition("::")[2])
    return [getattr(packet, overload) for overload in packet.overloads()]


def every_aten_overload() -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, full = name.partition("::")
        base, _, overload = full.partition(".")
        packet = getattr(aten, base, None) if namespace == "aten" else None
        if packet is not None and (overload or "default") in packet.overloads():
            yield getattr(packet, overload or "default")


# -- the table


def test_every_entry_decides_for_some_overload() -> None:
    """It exists, and neither a tag nor the schema overrules the entry everywhere."""
    for name, kind in LISTED.items():
        if name.startswith("aten::"):
            assert kind in {known(target).kind for target in overloads(name)}, name


# -- random


def test_what_torch_tags_as_random_is_random() -> None:
    tagged = [
        target
        for target in every_aten_overload()
        if torch.Tag.nondeterministic_seeded in target.tags
    ]
    assert len(tagged) > 80
    assert not [target for target in tagged if known(target).kind is not Kind.RANDOM]
    assert not [target for target in tagged if known(target).runs]


def test_what_is_named_like_a_draw_is_believed_to_be_nothing_better() -> None:
    words = (
        "rand",
        "dropout",
        "bernoulli",
        "normal_",
        "multinomial",
        "poisson",
        "uniform",
        "exponential_",
        "rrelu",
    )
    drawn = [
        target for target in every_aten_overload() if any(word in str(target) for word in words)
    ]
    wrong = [
        target
        for target in drawn
        if known(target).kind in (Kind.MOVEMENT, Kind.ANALYTIC, Kind.CHOICE)
    ]
    assert not [target for target in wrong if "backward" not in str(target)]


def called(target: Any, *args: Any) -> Kind:
    graph = Graph()
    given = [graph.placeholder(f"a{i}") if arg is ... else arg for i, arg in enumerate(args)]
    return kind_of(graph.call_function(target, tuple(given)))


@pytest.mark.parametrize(
    "kind, target, args",
    [
        (Kind.MOVEMENT, aten.dropout.default, (..., 0.0, True)),
        (Kind.MOVEMENT, aten.dropout.default, (..., 0.5, False)),
        (Kind.RANDOM, aten.dropout.default, (..., 0.5, True)),
        (Kind.MOVEMENT, aten.feature_dropout.default, (..., 0.5, False)),
        (Kind.RANDOM, aten.native_dropout.default, (..., 0.5, True)),
        (Kind.OPAQUE, aten._scaled_dot_product_flash_attention.default, (..., ..., ..., 0.0)),
        (Kind.OPAQUE, aten._scaled_dot_product_flash_attention.default, (..., ..., ...)),
        (Kind.RANDOM, aten._scaled_dot_product_flash_attention.default, (..., ..., ..., 0.1)),
        (Kind.RANDOM, aten.rand.default, ([3],)),
        (Kind.RANDOM, aten.bernoulli.default, (...,)),
    ],
)
def test_randomness_by_arguments(kind: Kind, target: Any, args: tuple[Any, ...]) -> None:
    assert called(target, *args) is kind


# -- effects


def test_what_mutates_is_never_run_or_looked_through() -> None:
    mutable = [target for target in every_aten_overload() if target._schema.is_mutable]
    assert len(mutable) > 500
    allowed = (Kind.EFFECT, Kind.RANDOM)
    assert not [
        target for target in mutable if known(target).kind not in allowed or known(target).runs
    ]
