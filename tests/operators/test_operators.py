"""The operator table against torch itself: its tags, and what its operators do to sampled
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph

from mla_fusion.fx.kinds import Kind, kind_of
from mla_fusion.operators.known import known
from mla_fusion.operators.table import ROWS

from .samples import Call, calls
from .tagged import not_movement

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


def sampled(kind: Kind) -> list[Call]:
    """Calls of one class that have floats to look at."""
    return [
        call for each in calls().values() for call in each if call.kind is kind and call.floats()
    ]


# -- the table


def test_every_listed_operator_exists() -> None:
    listed = {name.removeprefix("aten::") for name in LISTED if name.startswith("aten::")}
    assert not {name for name in listed if not hasattr(aten, name)}


@pytest.mark.parametrize("name, kind", LISTED.items(), ids=str)
def test_every_entry_decides_for_some_overload(name: str, kind: Kind) -> None:
    """An entry that a tag or the schema overrules everywhere says nothing."""
    if name.startswith("aten::"):
        assert kind in {known(target).kind for target in overloads(name)}


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


# -- movement


def _leaves_floats_alone(call: Call) -> bool:
    """Casts to other dtypes are judged by what they make; memory that nobody wrote holds
    anything.
    """
    made = call.run([call.leaves[i] for i in call.floats()])
    return "empty" not in call.name and all(result.dtype == torch.float64 for result in made)


def test_movement_takes_elements_by_shapes_alone() -> None:
    tried = [call for call in sampled(Kind.MOVEMENT) if _leaves_floats_alone(call)]
    assert len({call.name for call in tried}) > 80
    assert not [found for call in tried if (found := not_movement(call))]


def test_movement_takes_no_place_from_a_tensor() -> None:
    """What comes beside floats and is a tensor of integers is an index."""
    others = [
        call
        for call in sampled(Kind.MOVEMENT)
        if any(
            isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() for leaf in call.leaves
        )
        and not any(
            overload in str(call.target) for overload in ("narrow.default", "tensor_split.indices")
        )
    ]
    # handed over as the number that they hold, which tracing would have written down
    assert not [str(call) for call in others if _wants_tensor(call)]


def _wants_tensor(call: Call) -> bool:
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in call.leaves)
    return tensors <= sum("Tensor" in str(arg.type) for arg in call.target._schema.arguments)


@pytest.mark.parametrize("make", [aten.roll.default, aten.sort.default, aten.fmod.Tensor])
def test_the_movement_check_tells_sorts_and_arithmetic_apart(make: Callable[..., Any]) -> None:
    calls_of = [
        call
        for call in calls()[make._schema.name]
        if call.target is make and max(map(_size, call.leaves)) > 2
    ]
    assert calls_of
    assert all(bool(not_movement(call)) == (make is not aten.roll.default) for call in calls_of)


def _size(leaf: Any) -> int:
    return leaf.numel() if isinstance(leaf, torch.Tensor) else 0
