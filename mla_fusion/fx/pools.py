"""Caches of layers that are stacked in one input, ``pool[i]`` with ``i`` a literal, read as an input for each layer.

Functional, a write to one layer is a ``select_scatter`` over the whole pool, and the next layer selects from that.
Where every reader of the pool goes through one of its layers, layers have nothing to do with each other: each is an
input of its own, written and copied back alone. A wrapper around the graph makes these inputs, views of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fusion.fx import strides
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import argument, has_effect, is_getitem, is_mutating, is_view, op_name
from mla_fusion.fx.module_path import NAME, label
from mla_fusion.fx.sizes import is_symbolic, same
from mla_fusion.fx.walk import INPUTS, input_of, origin, reshapes, shared_memory

aten = torch.ops.aten
_LAYER_OF = "mla_fusion_layer_of"


def layer_of(node: Node) -> tuple[int, int] | None:
    """Of an input that is a layer of a pool: which input the pool is, and the number of the layer."""
    found: tuple[int, int] | None = node.meta.get(_LAYER_OF)
    return found


@dataclass(frozen=True)
class _Pool:
    """What is made of a pool, in graph order.

    stacked    the pool itself, reshapes of it, and it with one layer exchanged
    layers     a layer of one of these, with its number
    back       the step that copies the last of these into the pool
    """

    stacked: tuple[Node, ...]
    layers: tuple[tuple[Node, int], ...]
    back: Node | None


def found(graph: Graph) -> list[_Pool]:
    """The pools that can be taken apart."""
    pools = (_read(node) for node in graph.find_nodes(op="placeholder") if _may_be_one(node))
    return [pool for pool in pools if pool is not None]


def take_apart(gm: GraphModule) -> None:
    """Rewrite the module's graph so that each layer of its pools is an input."""
    builder = GraphBuilder(gm)
    *_, last = gm.graph.find_nodes(op="placeholder")
    positions = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    with builder.propagating():
        for pool in found(gm.graph):
            last = _take_apart(builder, pool, positions[pool.stacked[0]], last)


def _may_be_one(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 3:
        return False
    return any(op_name(user) in ("aten::select", "aten::unbind", *_RESHAPES) for user in node.users)


def _read(pool: Node) -> _Pool | None:
    """None where something reads the pool as a whole, or nothing writes to it."""
    count = pool.meta["val"].shape[0]
    stacked, layers, back = [pool], list[tuple[Node, Any]](), list[Node]()
    for node in stacked:  # grows as it is walked
        for user in node.users:
            name, on_layers = op_name(user), user.args[:1] == (node,) and argument(user, "dim", 0) == 0
            if name == "aten::select" and on_layers:
                layers.append((user, argument(user, "index")))
            elif name == "aten::unbind" and on_layers and all(map(is_getitem, user.users)):
                layers += [(part, part.args[1]) for part in user.users]
            elif _stays_stacked(user, node, count):
                stacked.append(user)
            elif name == "aten::copy_" and user.args[0] is pool:
                back += [user] if user not in back else []
            elif node is not pool or not is_symbolic(user.meta.get("val")):
                return None
    scattered = [node for node in stacked if op_name(node) == "aten::select_scatter"]
    if not layers or not all(map(_is_number, (*map(_index, scattered), *(number for _, number in layers)))):
        return None
    readers = list(_through([node for node, _ in layers]))
    if scattered or back:  # functional: then nothing else may change the pool, and no layer be another one's rows
        late = len(back) == 1 and any(back[0] < user for node in stacked for user in node.users)
        if len(back) != 1 or late or back[0].args[1] not in stacked or any(map(_changes, readers)):
            return None
        sources = (origin(node.args[1], shared_memory) for node in scattered)  # type: ignore[arg-type]
        if any(source.op in INPUTS or source in stacked for source in sources):
            return None
    elif not any(map(has_effect, readers)):
        return None
    return _Pool(tuple(sorted(stacked)), tuple(layers), back[0] if back else None)


def _stays_stacked(user: Node, node: Node, count: int) -> bool:
    if op_name(user) == "aten::select_scatter":
        return user.args[0] is node and user.args[1] is not node and argument(user, "dim", 0) == 0
    return op_name(user) in _RESHAPES and user.args[0] is node and same((*user.meta["val"].shape, 0)[0], count)


_RESHAPES = frozenset(f"aten::{name}" for name in "view _unsafe_view reshape squeeze unsqueeze alias".split())


def _changes(reader: Node) -> bool:
    return is_mutating(reader) or has_effect(reader)


def _index(scatter: Node) -> Any:
    return argument(scatter, "index")


def _is_number(index: object) -> bool:
    """Counted from the first layer: how many there are may be symbolic."""
    return isinstance(index, int) and index >= 0


def _through(nodes: list[Node]) -> Iterator[Node]:
    """What reads the nodes, or views of them."""
    for node in nodes:  # grows as it is walked
        for user in node.users:
            yield user
            if is_view(user):
                nodes.append(user)


def _take_apart(b: GraphBuilder, pool: _Pool, position: int, last: Node) -> Node:
    """The last input of the graph afterwards; ``last``: before."""
    whole, graph = pool.stacked[0], b.gm.graph
    read = {number for _, number in pool.layers}
    read |= {_index(node) for node in pool.stacked if op_name(node) == "aten::select_scatter"}
    inputs = _layers(graph, whole, position, sorted(read), last)
    held: dict[Node, dict[int, Any]] = {whole: dict(inputs)}  # of what is stacked, its layers
    made: list[Node] = []
    for node in pool.stacked[1:]:
        layers = held[node.args[0]]  # type: ignore[index]
        if op_name(node) == "aten::select_scatter":
            held[node] = layers | {_index(node): node.args[1]}
        else:
            b.at(node, node.meta)
            held[node] = {number: b.reshape(layer, node.meta["val"].shape[1:]) for number, layer in layers.items()}
            made += [new for number, new in held[node].items() if new is not layers[number]]
    replaced: list[tuple[Node, Node]] = []
    for node, number in pool.layers:
        new = held[input_of(node)][number]  # type: ignore[index]
        node.replace_all_uses_with(new)
        replaced.append((new, node))
    if pool.back is not None:
        b.at(pool.back, pool.back.meta)
        for number, new in held[pool.back.args[1]].items():  # type: ignore[index]
            own = inputs[number]
            if origin(new, reshapes) is not own:
                b.insert(aten.copy_.default, (own, b.reshape(new, own.meta["val"].shape)), {}, own.meta["val"])
        graph.erase_node(pool.back)
    strides.follow(b, [(new, node) for new, node in replaced if new.users])
    left = {*(node for node, _ in pool.layers), *pool.stacked[1:], *inputs.values(), *made}
    left |= {node.args[0] for node in left if is_getitem(node)}  # type: ignore[misc]
    for node in sorted(left, reverse=True):
        if not node.users:
            graph.erase_node(node)
    *_, last = graph.find_nodes(op="placeholder")
    return last


def _layers(graph: Graph, whole: Node, position: int, numbers: list[int], last: Node) -> dict[int, Node]:
    """A new input for each layer of a pool, by its number."""
    made: dict[int, Node] = {}
    for number in numbers:
        with graph.inserting_after(last):
            last = made[number] = graph.create_node("placeholder", f"{whole.target}_layer{number}")
        last.meta["val"] = whole.meta["val"].select(0, number)
        last.meta |= {_LAYER_OF: (position, number), NAME: f"{label(whole)}[{number}]"}
    return made
