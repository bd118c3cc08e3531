"""Inlines subgraphs: layers that were traced once, and bodies without grad or without autocast.

A call of a subgraph is one node, which hides a prologue inside it. The subgraph is called once and
unconditionally, so its nodes can take the place of the call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from mla_fusion.compat import HigherOrderOperator
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
        """The tensor of the entry."""
        return value_of(self.base)[self.index]


@dataclass(frozen=True)
class _Call:
    """The call of a graph.

    body       the get_attr node of the graph
    operands   what its placeholders stand for: nodes, entries of nodes, or numbers
    written    operands into which a functional call writes: their new values follow its results
    is_shared  True if other layers may call the same body: its nodes come from the first of them
    """

    body: Node
    operands: Sequence[Any]
    written: Sequence[Any] = ()
    is_shared: bool = False


def copied(gm: GraphModule, graph: Graph) -> None:
    """Copies ``gm.graph`` into an empty graph, with subgraphs in place of their calls."""
    _Copy(gm, graph).add(gm.graph, {}, "", {})
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:  # a body, which nothing calls any more
            graph.erase_node(node)


@dataclass(frozen=True)
class _Copy:
    """The copy of a module's graph."""

    gm: GraphModule
    graph: Graph

    def add(
        self, graph: Graph, values: dict[Node, Any], path: str, origin: Mapping[str, Any]
    ) -> None:
        """Copies the nodes of ``graph`` that are not in ``values``, and adds their values there.

        path    where the graph is in the module, with a dot at the end
        origin  metadata for all copies
        """
        calls = calls_of(self.gm, graph, path)
        for node in graph.nodes:
            if node in values:
                continue
            if node in calls:
                values[node] = self._results(calls[node], node, values, path, origin)
            elif is_getitem(node) and isinstance(values.get(node.args[0]), list):
                values[node] = values[node.args[0]][node.args[1]]
            else:
                values[node] = copy = self.graph.node_copy(node, values.__getitem__)
                copy.meta |= origin
                if node.op == "get_attr":
                    copy.target = path + str(node.target)

    def _results(
        self,
        call: _Call,
        node: Node,
        outside: Mapping[Node, Any],
        path: str,
        origin: Mapping[str, Any],
    ) -> list[Any]:
        """Copies the body of a call, and returns the results of the call."""

        def step(target: Any, args: tuple[Any, ...], value: Any) -> Node:
            """Returns a new node."""
            new = self.graph.call_function(target, args)
            new.meta |= {**origin, "val": value}
            return new

        path += str(call.body.target)
        graph: Any = self.gm.get_submodule(path).graph
        output = graph.output_node()
        copies = _last_copies(graph) if call.written else []
        operand_of = dict(zip(graph.find_nodes(op="placeholder"), call.operands, strict=True))
        values = dict.fromkeys((output, *copies))
        for placeholder, operand in operand_of.items():
            if isinstance(operand, _Entry):
                args = outside[operand.base], 0, operand.index
                values[placeholder] = step(aten.select.int, args, operand.value)
            else:
                values[placeholder] = map_arg(operand, outside.__getitem__)
        own_origin = {
            key: node.meta[key] for key in _ORIGIN if call.is_shared and node.meta.get(key)
        }
        self.add(graph, values, f"{path}.", own_origin or origin)
        written = {base: outside[base] for base in call.written}
        for copy in copies:
            operand, new = operand_of[copy.args[0]], map_arg(copy.args[1], values.__getitem__)
            if isinstance(operand, _Entry):
                scatter = written[operand.base], new, 0, operand.index
                value = value_of(operand.base).clone()
                new = step(aten.select_scatter.default, scatter, value)
            written[_memory(operand)] = new
        return [*map_arg(output.args[0], values.__getitem__), *written.values()]


def calls_of(gm: GraphModule, graph: Graph, path: str) -> dict[Node, _Call]:
    """Returns the calls in ``graph`` that can be inlined.

    A call stays if its body was traced for other shapes, or writes into operands before its end.

    path  of the graph's module in ``gm``
    """
    calls: dict[Node, _Call] = {}
    for node in graph.nodes:
        call = _read_call(node)
        if call is None or not all(map(is_getitem, node.users)):
            continue
        body = gm.get_submodule(path + str(call.body.target))
        if isinstance(body, GraphModule) and _is_as_called(body.graph, call):
            calls[node] = call
    return calls


def _is_as_called(graph: Graph, call: _Call) -> bool:
    """Returns True if a body was traced for such operands, and writes into those of the call."""
    inputs = graph.find_nodes(op="placeholder")
    if list(map(_description, inputs)) != list(map(_description, call.operands)):
        return False
    if not isinstance(graph.output_node().args[0], (tuple, list)):
        return False
    if not call.written:
        return True
    copies = _last_copies(graph)
    targets = [node.args[0] for node in copies]
    written = {
        node
        for node, operand in zip(inputs, call.operands, strict=True)
        if _memory(operand) in call.written
    }
    effects = [node for node in graph.nodes if node.op == "call_function" and is_mutating(node)]
    return effects == copies and len({*targets}) == len(targets) and written.issuperset(targets)


def _memory(operand: Any) -> Any:
    """Returns the node into which a write to an operand goes."""
    return operand.base if isinstance(operand, _Entry) else operand


def _description(operand: Any) -> tuple[str, str]:
    """Returns shape and dtype of a node or an entry; a number is its own shape."""
    if isinstance(operand, Node):
        value = value_of(operand)
    else:
        value = operand.value if isinstance(operand, _Entry) else operand
    return str(getattr(value, "shape", value)), str(getattr(value, "dtype", ""))


def _last_copies(graph: Graph) -> list[Node]:
    """Returns the copies into operands at the end of a body that AOT autograd made functional."""
    copies: list[Node] = []
    for node in list(graph.nodes)[-2::-1]:
        is_copy = word(node) == "copy_" and isinstance(node.args[0], Node) and not node.users
        if not is_copy or node.args[0].op != "placeholder":
            break
        copies.insert(0, node)
    return copies


def _name(target: object) -> str:
    """Returns the name of a higher-order operator; "" for any other target."""
    return target.name() if isinstance(target, HigherOrderOperator) else ""


def _read_call(node: Node) -> _Call | None:
    """Returns the call that a node makes of a graph; None if it makes none, or another kind.

    A body under a grad mode or an autocast mode is read if the mode is off.
    """
    body: Any
    enabled: Any = False
    name = _name(node.target)
    match name:
        case "auto_functionalized_v2":
            return _functionalised(node)
        case "invoke_subgraph":
            body, _, *operands = node.args
        case "wrap_with_set_grad_enabled":
            enabled, body, *operands = node.args
        case "wrap_with_autocast":
            _, _, enabled, _, body, *operands = node.args
        case _:
            return None
    if enabled is not False or not isinstance(body, Node):
        return None
    return _Call(body, operands, is_shared=name == "invoke_subgraph")


def _functionalised(node: Node) -> _Call | None:
    """Reads a call of ``invoke_subgraph`` that AOT autograd has made functional.

    An operand is ``arg<i>``, or a base (an input that is written), or an entry of a base
    (``pool[i]``). Returns None if an operand is another part of a base.
    """
    options, bases = node.kwargs, node.kwargs.get("_all_bases")
    body = options.get("subgraph")
    if (
        _name(node.args[0]) != "invoke_subgraph"
        or not isinstance(body, Node)
        or not isinstance(bases, Sequence)
    ):
        return None
    places = [key for key in options if re.fullmatch(r"arg\d+|_arg\d+_base_index", key)]
    operands: list[Any] = []
    for place in range(len(places)):
        prefix = f"_arg{place}_"
        view = {
            key.removeprefix(prefix): value
            for key, value in options.items()
            if key.startswith(prefix)
        }
        index: Any = view.pop("base_index", None)
        operand = options.get(f"arg{place}") if index is None else bases[index]
        operands.append(_entry(operand, view) if view else operand)
        if view and operands[-1] is None:
            return None
    memories = list(map(_memory, operands))
    if any(memories.count(base) != 1 for base in bases):
        return None
    return _Call(body, operands, bases, is_shared=True)


def _entry(base: Any, view: Mapping[str, Any]) -> _Entry | None:
    """Returns the entry of ``base`` along its first axis that has the layout of a view.

    Returns None if there is none.
    """
    tensor = value_of(base) if isinstance(base, Node) else None
    size, stride, offset = map(view.get, ("size", "stride", "storage_offset"))
    if not isinstance(tensor, Tensor) or not tensor.dim() or has_symbols(tensor.shape):
        return None
    if not isinstance(offset, int):  # a view of another kind
        return None
    index = (offset - tensor.storage_offset()) // max(tensor.stride(0), 1)
    part = tensor[index] if 0 <= index < tensor.shape[0] else None
    if part is None or (part.shape, part.stride(), part.storage_offset()) != (size, stride, offset):
        return None
    return _Entry(base, index)
