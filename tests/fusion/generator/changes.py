"""One change of a graph at the level of its nodes: each takes a graph and a source of chance, and
says what it did.

A change may make nonsense (shapes that do not fit, a dtype that an operator refuses); the caller
finds out by propagating shapes again, and draws another. What it must never do is leave the graph
as it was.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from .nodes import calls, is_float, tensors
from .write_changes import accumulate, drop_write_back, old_cache_read, write_again

aten = torch.ops.aten
Change = Callable[[Graph, random.Random], str | None]
Place = tuple[int | str, ...]  # of a value among arguments
_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)


# -- constants


def edit_constant(graph: Graph, rng: random.Random) -> str | None:
    """A number or dtype among a node's arguments becomes another: eps, a bound, an axis, a size."""
    node = rng.choice(calls(graph))
    places = list(_numbers((node.args, node.kwargs)))
    if not places:
        return None
    place, value = rng.choice(places)
    new = rng.choice(_other_numbers(value))
    if new == value:
        return None
    node.args, node.kwargs = _replaced((node.args, node.kwargs), place, new)
    return f"{node.name}: {value} becomes {new}"


def _leaves(
    value: Any, kinds: type | tuple[type, ...], place: Place = ()
) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves(item, kinds, (*place, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, kinds, (*place, name))
    elif isinstance(value, kinds):
        yield place, value


def _numbers(value: Any) -> Iterator[tuple[Place, Any]]:
    return _leaves(value, (int, float, bool, torch.dtype))


def _replaced(value: Any, place: Place, new: Any) -> Any:
    if not place:
        return new
    if isinstance(value, dict):
        return {
            name: _replaced(item, place[1:], new) if name == place[0] else item
            for name, item in value.items()
        }
    items = [
        _replaced(item, place[1:], new) if index == place[0] else item
        for index, item in enumerate(value)
    ]
    return type(value)(items)


def _other_numbers(value: Any) -> list[Any]:
    if isinstance(value, torch.dtype):
        return list(_DTYPES)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, -value, 2 * value, value // 2]
    return [value * 10, value / 10, -value, value + 1.0, 0.0]


# -- wiring


def redirect(graph: Graph, rng: random.Random) -> str | None:
    """A node reads another value of the same shape and dtype."""
    node = rng.choice(
        [n for n in graph.nodes if n.op in ("call_function", "output") and n.all_input_nodes]
    )
    old = rng.choice(node.all_input_nodes)
    value = old.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    before = itertools.takewhile(lambda other: other is not node, graph.nodes)
    others = [other for other in before if other is not old and _can_stand_for(other, value)]
    if not others:
        return None
    new = rng.choice(others)
    node.replace_input_with(old, new)
    return f"{node.name} reads {new.name} instead of {old.name}"


def _can_stand_for(node: Node, value: torch.Tensor) -> bool:
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor) or node.target is aten.copy_.default:
        return False
    return (found.shape, found.dtype) == (value.shape, value.dtype)


def skip_node(graph: Graph, rng: random.Random) -> str | None:
    """A step is left out: its users read its input, of the same shape."""
    nodes = [node for node in tensors(graph) if _same_shape_input(node) is not None]
    node = rng.choice(nodes)
    source = _same_shape_input(node)
    assert source is not None
    node.replace_all_uses_with(source)
    return f"{node.name} ({node.target}) left out"


def _same_shape_input(node: Node) -> Node | None:
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor) and value.shape == node.meta["val"].shape:
            return source
    return None


def also_returned(graph: Graph, rng: random.Random) -> str | None:
    """An inner value leaves the graph as one more output."""
    (output,) = graph.find_nodes(op="output")
    node = rng.choice(tensors(graph))
    output.args = ((*output.args[0], node),)
    return f"{node.name} is returned too"


# -- operators

_REPLACED: dict[Any, tuple[Any, ...]] = {
    aten.add.Tensor: (aten.sub.Tensor, aten.mul.Tensor),
    aten.sub.Tensor: (aten.add.Tensor, aten.mul.Tensor),
    aten.mul.Tensor: (aten.add.Tensor, aten.div.Tensor, aten.maximum.default),
    aten.div.Tensor: (aten.mul.Tensor, aten.sub.Tensor),
    aten.rsqrt.default: (aten.sqrt.default, aten.reciprocal.default, aten.sigmoid.default),
    aten.sqrt.default: (aten.rsqrt.default, aten.square.default),
    aten.mean.dim: (aten.sum.dim_IntList, aten.amax.default),
    aten.sum.dim_IntList: (aten.mean.dim, aten.amax.default),
    aten.cos.default: (aten.sin.default, aten.tanh.default),
    aten.sin.default: (aten.cos.default,),
    aten.neg.default: (aten.abs.default, aten.clone.default, aten.relu.default),
    aten.square.default: (aten.abs.default,),
    aten.index_copy.default: (aten.index_add.default,),
    aten.scatter.src: (aten.scatter_add.default,),
    aten.floor_divide.default: (aten.remainder.Scalar, aten.mul.Scalar),
    aten.remainder.Scalar: (aten.floor_divide.default,),
    aten.clone.default: (aten.neg.default,),
}


def replace_operator(graph: Graph, rng: random.Random) -> str | None:
    """An operator becomes a relative of it."""
    nodes = [node for node in calls(graph) if node.target in _REPLACED]
    node = rng.choice(nodes)
    old, new = node.target, rng.choice(_REPLACED[node.target])
    node.target = new
    if new is aten.neg.default or old is aten.clone.default:
        node.args, node.kwargs = node.args[:1], {}
    return f"{node.name}: {old} becomes {new}"


# -- insertions


def _round_trip(dtype: torch.dtype) -> Callable[[Graph, Node], Node]:
    def insert(graph: Graph, node: Node) -> Node:
        narrow = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
        return graph.call_function(
            aten._to_copy.default, (narrow,), {"dtype": node.meta["val"].dtype}
        )

    return insert


def _first_element(graph: Graph, node: Node) -> Node:
    flat = graph.call_function(aten.reshape.default, (node, [-1]))
    return graph.call_function(aten.select.int, (flat, 0, 0))


def _unary(target: Any, *args: Any) -> Callable[[Graph, Node], Node]:
    return lambda graph, node: graph.call_function(target, (node, *args))


_FLOAT_INSERTS: dict[str, Callable[[Graph, Node], Node]] = {
    "abs": _unary(aten.abs.default),
    "relu": _unary(aten.relu.default),
    "neg": _unary(aten.neg.default),
    "clamp": _unary(aten.clamp.default, -0.5, 0.5),
    "lower bound": _unary(aten.clamp_min.default, -0.25),
    "upper bound": _unary(aten.clamp_max.default, 1.0),
    "times 2": _unary(aten.mul.Tensor, 2.0),
    "times 1.05": _unary(aten.mul.Tensor, 1.05),
    "plus 0.1": _unary(aten.add.Tensor, 0.1),
    "square": _unary(aten.square.default),
    "tanh": _unary(aten.tanh.default),
    "round": _unary(aten.round.default),
    "through float8": _round_trip(torch.float8_e4m3fn),
    "through float8_e5m2": _round_trip(torch.float8_e5m2),
    "through float16": _round_trip(torch.float16),
    "through bfloat16": _round_trip(torch.bfloat16),
    "through int32": _round_trip(torch.int32),
    "through int8": _round_trip(torch.int8),
    "times one of its own": lambda graph, node: graph.call_function(
        aten.mul.Tensor, (node, _first_element(graph, node))
    ),
}
_INTEGER_INSERTS: dict[str, Callable[[Graph, Node], Node]] = {
    "plus 1": _unary(aten.add.Tensor, 1),
    "minus 1": _unary(aten.sub.Tensor, 1),
    "plus -1": _unary(aten.add.Tensor, -1),
    "times -1": _unary(aten.mul.Tensor, -1),
    "neg": _unary(aten.neg.default),
    "modulo 7": _unary(aten.remainder.Scalar, 7),
    "clamped": _unary(aten.clamp.default, 0, 20),
    "through int8": _round_trip(torch.int8),
}


def insert(graph: Graph, rng: random.Random) -> str | None:
    """A value passes through one more operator, for all its readers or for one."""
    node = rng.choice(
        [n for n in graph.nodes if n.op != "output" and isinstance(n.meta.get("val"), torch.Tensor)]
    )
    if node.target is aten.copy_.default or not node.users:
        return None
    inserts = _FLOAT_INSERTS if is_float(node) else _INTEGER_INSERTS
    if not is_float(node) and (
        node.meta["val"].is_complex() or node.meta["val"].dtype == torch.bool
    ):
        return None
    name = rng.choice(list(inserts))
    return _pass_through(graph, node, inserts[name], name, rng)


def insert_along_axis(graph: Graph, rng: random.Random) -> str | None:
    """Along one axis a value is flipped, rolled, or its first entry repeated."""
    node = rng.choice(
        [n for n in graph.nodes if n.op != "output" and isinstance(n.meta.get("val"), torch.Tensor)]
    )
    wide = [
        axis
        for axis, size in enumerate(node.meta["val"].shape)
        if isinstance(size, int) and size > 1
    ]
    if node.target is aten.copy_.default or not wide or not node.users:
        return None
    axis = rng.choice(wide)
    name, change = rng.choice(
        [
            ("flipped", _unary(aten.flip.default, [axis])),
            ("rolled", _unary(aten.roll.default, [1], [axis])),
            ("half rolled", _unary(aten.roll.default, [node.meta["val"].shape[axis] // 2], [axis])),
            ("spread", _repeat_first(axis)),
        ]
    )
    return _pass_through(graph, node, change, f"{name} along {axis}", rng)


def _repeat_first(axis: int) -> Callable[[Graph, Node], Node]:
    def change(graph: Graph, node: Node) -> Node:
        first = graph.call_function(aten.slice.Tensor, (node, axis, 0, 1))
        return graph.call_function(aten.expand.default, (first, list(node.meta["val"].shape)))

    return change


def _pass_through(
    graph: Graph, node: Node, change: Callable[[Graph, Node], Node], name: str, rng: random.Random
) -> str | None:
    readers = [
        user
        for user in node.users
        if user.target is not aten.copy_.default or user.args[0] is not node
    ]
    if not readers:
        return None
    chosen = readers if rng.random() < 0.5 else [rng.choice(readers)]
    with graph.inserting_before(min(chosen)):
        changed = change(graph, node)
    for user in chosen:
        if user.target is aten.copy_.default:
            user.args = (user.args[0], changed)
        else:
            user.replace_input_with(node, changed)
    return f"{node.name} {name} for {', '.join(user.name for user in chosen)}"


CHANGES: dict[str, Change] = {
    f.__name__: f
    for f in (
        edit_constant,
        redirect,
        skip_node,
        drop_write_back,
        also_returned,
        replace_operator,
        accumulate,
        insert,
        insert_along_axis,
        write_again,
        old_cache_read,
    )
}
