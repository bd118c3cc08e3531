"""Subgraphs inlined: layers that were traced once and are called, and bodies under a switched-off
grad or autocast mode.

A call of a subgraph is one node, so nothing of a prologue inside it can be seen. It is called once
and unconditionally, so its nodes can take the place of the call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import HigherOrderOperator, call_like
from mla_fusion.fx.kinds import is_getitem, is_mutating, value_of, word
from mla_fusion.fx.sizes import has_symbols

aten = torch.ops.aten
_ORIGIN = ("nn_module_stack", "stack_trace")


@dataclass(frozen=True)
class _Entry:
    """``base[index]``, such as the cache of one layer in a pool."""

    base: Node
    index: int

    @property
    def value(self) -> Any:
        return value_of(self.base)[self.index]


@dataclass(frozen=True)
class _Call:
    """The call of a graph.

    body       the get_attr node of the graph
    operands   what its placeholders stand for: nodes, entries of nodes, or numbers
    written    those it writes into, where the call is a function: their new values follow its own
               results
    shared     other layers may call the same body, whose nodes tell of the first one only
    """

    body: Node
    operands: Sequence[Any]
    written: Sequence[Any] = ()
    shared: bool = False


@dataclass(frozen=True)
class _Body:
    graph: Graph
    path: str
    call: _Call
    origin: Mapping[str, Any]


def found(gm: GraphModule) -> bool:
    """Does ``gm.graph`` call subgraphs that can be inlined?

    Calls stay where the body was traced for other shapes, or writes into its operands before it
    ends.
    """
    return bool(_calls(gm, gm.graph, ""))


def copied(gm: GraphModule, into: Graph | None = None) -> Graph:
    """A copy of ``gm.graph``, to be changed: the same nodes, with those of subgraphs in place of
    their calls.

    ``into``: an empty graph to be filled, instead of a new one.
    """
    graph = Graph(owning_module=gm) if into is None else into
    call_like(graph, gm.graph)
    _lay(gm, graph, gm.graph, {}, "", {})
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:  # a body, which nothing calls any more
            graph.erase_node(node)
    return graph


def _lay(
    gm: GraphModule,
    into: Graph,
    graph: Graph,
    values: dict[Node, Any],
    path: str,
    origin: Mapping[str, Any],
) -> None:
    """Copies ``graph``, which stands at ``path`` in the module, except for the nodes in ``values``;
    adds theirs.
    """
    bodies = _calls(gm, graph, path)
    for node in graph.nodes:
        if node in values:
            continue
        if node in bodies:
            values[node] = _results(gm, into, bodies[node], values, origin)
        elif is_getitem(node) and isinstance(values.get(node.args[0]), list):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = copy = into.node_copy(node, values.__getitem__)
            copy.meta |= origin
            if node.op == "get_attr":
                copy.target = path + str(node.target)


def _results(
    gm: GraphModule,
    into: Graph,
    body: _Body,
    outside: Mapping[Node, Any],
    origin: Mapping[str, Any],
) -> list[Any]:
    graph, call = body.graph, body.call
    (output,) = graph.find_nodes(op="output")
    copies = _last_copies(graph) if call.written else []
    inputs = graph.find_nodes(op="placeholder")
    of_inputs = dict(zip(inputs, call.operands, strict=True))
    given = {
        node: _selected(into, outside, operand, origin)
        if isinstance(operand, _Entry)
        else _value(outside, operand)
        for node, operand in of_inputs.items()
    }
    values: dict[Node, Any] = dict.fromkeys((output, *copies)) | given
    _lay(gm, into, graph, values, f"{body.path}.", body.origin or origin)
    written = {base: _value(outside, base) for base in call.written}
    for node in copies:
        operand, new = of_inputs[node.args[0]], _value(values, node.args[1])
        if isinstance(operand, _Entry):
            at = (written[operand.base], new, 0, operand.index)
            value = value_of(operand.base).clone()
            new = _made(into, aten.select_scatter.default, at, value, origin)
        written[_memory(operand)] = new
    return [*(_value(values, item) for item in output.args[0]), *written.values()]


def _selected(
    into: Graph, outside: Mapping[Node, Any], entry: _Entry, origin: Mapping[str, Any]
) -> Node:
    at = (outside[entry.base], 0, entry.index)
    return _made(into, aten.select.int, at, entry.value, origin)


def _made(
    into: Graph, target: Any, args: tuple[Any, ...], value: Any, origin: Mapping[str, Any]
) -> Node:
    node = into.call_function(target, args)
    node.meta |= {**origin, "val": value}
    return node


def _value(values: Mapping[Node, Any], item: Any) -> Any:
    return values[item] if isinstance(item, Node) else item


def _calls(gm: GraphModule, graph: Graph, path: str) -> dict[Node, _Body]:
    """The calls in ``graph`` that can be inlined."""
    found: dict[Node, _Body] = {}
    for node in graph.nodes:
        call = _READERS[name](node) if (name := _name(node.target)) in _READERS else None
        if call is None or not all(is_getitem(user) for user in node.users):
            continue
        body_path = path + str(call.body.target)
        body = gm.get_submodule(body_path)
        if isinstance(body, GraphModule) and _fits(body.graph, call):
            found[node] = _Body(body.graph, body_path, call, _origin(node) if call.shared else {})
    return found


def _origin(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _ORIGIN if node.meta.get(key)}


def _fits(graph: Graph, call: _Call) -> bool:
    """Was the body traced for such operands, and does it write as the call says that it does?"""
    inputs = graph.find_nodes(op="placeholder")
    if len(inputs) != len(call.operands) or not all(map(_alike, inputs, call.operands)):
        return False
    (output,) = graph.find_nodes(op="output")
    if not isinstance(output.args[0], (tuple, list)):
        return False
    if not call.written:
        return True
    copies = _last_copies(graph)
    targets = [node.args[0] for node in copies]
    written = [
        node
        for node, held in zip(inputs, call.operands, strict=True)
        if _memory(held) in call.written
    ]
    effects = [node for node in graph.nodes if node.op == "call_function" and is_mutating(node)]
    return effects == copies and len(set(targets)) == len(targets) and set(targets) <= set(written)


def _memory(operand: Any) -> Any:
    return operand.base if isinstance(operand, _Entry) else operand


def _alike(placeholder: Node, operand: Any) -> bool:
    held = value_of(operand) if isinstance(operand, Node) else operand
    held = held.value if isinstance(held, _Entry) else held
    return _description(value_of(placeholder)) == _description(held)


def _description(value: Any) -> tuple[str, str]:
    return str(getattr(value, "shape", value)), str(getattr(value, "dtype", ""))


def _last_copies(graph: Graph) -> list[Node]:
    """The copies into operands that end a body which has been made a function."""
    copies: list[Node] = []
    for node in list(graph.nodes)[-2::-1]:
        is_copy = word(node) == "copy_" and isinstance(node.args[0], Node) and not node.users
        if not is_copy or node.args[0].op != "placeholder":
            break
        copies.insert(0, node)
    return copies


def _name(target: object) -> str:
    return target.name() if isinstance(target, HigherOrderOperator) else ""


# -- how each operator calls its graph


def _invoked(node: Node) -> _Call | None:
    body, _, *operands = node.args
    return _Call(body, operands, shared=True) if isinstance(body, Node) else None


def _functionalised(node: Node) -> _Call | None:
    """``arg<i>``, or the base that it is one with, or an entry of it (``pool[i]``); a base of which
    an operand is another part is left alone.
    """
    given, bases = node.kwargs, node.kwargs.get("_all_bases")
    body = given.get("subgraph")
    if (
        _name(node.args[0]) != "invoke_subgraph"
        or not isinstance(body, Node)
        or not isinstance(bases, Sequence)
    ):
        return None
    operands: dict[int, Any] = {}
    views: dict[int, dict[str, Any]] = {}
    for key, value in given.items():
        direct, base, view = (
            re.fullmatch(form, key)
            for form in (r"arg(\d+)", r"_arg(\d+)_base_index", r"_arg(\d+)_(.*)")
        )
        if direct:
            operands[int(direct[1])] = value
        elif base:
            operands[int(base[1])] = None if value is None else bases[value]  # type: ignore[index]
        elif view:
            views.setdefault(int(view[1]), {})[view[2]] = value
    operands |= {index: _entry(operands.get(index), view) for index, view in views.items()}
    if sorted(operands) != list(range(len(operands))) or None in map(operands.get, views):
        return None
    ordered = [operands[index] for index in range(len(operands))]
    held = list(map(_memory, ordered))
    if any(held.count(base) != 1 for base in bases):
        return None
    return _Call(body, ordered, bases, shared=True)


def _entry(base: Any, view: Mapping[str, Any]) -> _Entry | None:
    """The entry of ``base`` along its first axis that has this size, stride and storage offset."""
    whole = value_of(base) if isinstance(base, Node) else None
    size, stride, offset = map(view.get, ("size", "stride", "storage_offset"))
    if not isinstance(whole, Tensor) or not whole.dim() or has_symbols(whole.shape):
        return None
    if not isinstance(offset, int):  # it is another part, or says so otherwise
        return None
    index = (offset - whole.storage_offset()) // max(whole.stride(0), 1)
    part = whole[index] if 0 <= index < whole.shape[0] else None
    if part is None or (part.shape, part.stride(), part.storage_offset()) != (size, stride, offset):
        return None
    return _Entry(base, index)


def _without_grad(node: Node) -> _Call | None:
    enabled, body, *operands = node.args
    return _Call(body, operands) if enabled is False and isinstance(body, Node) else None


def _without_autocast(node: Node) -> _Call | None:
    _, _, enabled, _, body, *operands = node.args
    return _Call(body, operands) if enabled is False and isinstance(body, Node) else None


_READERS = {
    "invoke_subgraph": _invoked,
    "auto_functionalized_v2": _functionalised,
    "wrap_with_set_grad_enabled": _without_grad,
    "wrap_with_autocast": _without_autocast,
}
