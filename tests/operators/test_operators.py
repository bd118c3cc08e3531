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


def test_every_listed_operator_exists() -> None:
    listed = {name.removeprefix("aten::") for name in LISTED if name.startswith("aten::")}
    assert not {name for name in listed if not hasattr(aten, name)}


def test_every_entry_decides_for_some_overload() -> None:
    """An entry that a tag or the schema overrules everywhere says nothing."""
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


def called(target: Any, *args: Any, **kwargs: Any) -> Kind:
    graph = Graph()
    given = [graph.placeholder(f"a{i}") if arg is ... else arg for i, arg in enumerate(args)]
    return kind_of(graph.call_function(target, tuple(given), kwargs))


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


@pytest.mark.parametrize(
    "kind, target, args, kwargs",
    [
        (Kind.ANALYTIC, aten.div.Tensor, (..., ...), {}),
        (Kind.CHOICE, aten.div.Tensor_mode, (..., ...), {"rounding_mode": "floor"}),
        (Kind.CHOICE, aten.div.Scalar_mode, (..., 2), {"rounding_mode": "trunc"}),
        (Kind.ANALYTIC, aten.div.Tensor_mode, (..., ...), {"rounding_mode": None}),
        (Kind.ANALYTIC, aten.linalg_vector_norm.default, (...,), {}),
        (Kind.ANALYTIC, aten.linalg_vector_norm.default, (..., 2), {}),
        (Kind.CHOICE, aten.linalg_vector_norm.default, (..., 1), {}),
        (Kind.CHOICE, aten.linalg_vector_norm.default, (..., float("inf")), {}),
        (Kind.CHOICE, aten.norm.Scalar, (..., 1), {}),
        (Kind.ANALYTIC, aten.logit.default, (...,), {}),
        (Kind.CHOICE, aten.logit.default, (..., 0.2), {}),
        (Kind.CHOICE, aten.view.dtype, (..., torch.int32), {}),
        (Kind.MOVEMENT, aten.view.default, (..., [2, 3]), {}),
        (Kind.GATHER, aten.repeat_interleave.self_Tensor, (..., ..., 0), {}),
        (Kind.MOVEMENT, aten.repeat_interleave.self_int, (..., 2, 0), {}),
        (Kind.GATHER, aten.narrow.Tensor, (..., 0, ..., 2), {}),
        (Kind.MOVEMENT, aten.narrow.default, (..., 0, 1, 2), {}),
        (Kind.GATHER, aten.tensor_split.tensor_indices_or_sections, (..., ...), {}),
        (Kind.MOVEMENT, aten.tensor_split.sections, (..., 2), {}),
    ],
)
def test_class_by_arguments(
    kind: Kind, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert called(target, *args, **kwargs) is kind


# -- effects


def test_what_mutates_is_never_run_or_looked_through() -> None:
    mutable = [target for target in every_aten_overload() if target._schema.is_mutable]
    assert len(mutable) > 500
    allowed = (Kind.EFFECT, Kind.RANDOM)
    assert not [
        target for target in mutable if known(target).kind not in allowed or known(target).runs
    ]


def test_views_by_schema_alone_are_movement() -> None:
    assert known(aten.diagonal.default).kind is Kind.MOVEMENT
    # it reads memory, whose layout a probe need not have
    assert known(aten.as_strided.default).kind is Kind.OPAQUE
