"""A GE graph made an FX graph: GE operators become the ATen or npu calls that mean the same, as far as that is known.

Shapes are not taken from the dump but follow from those of its inputs, because torchair notes them for few other
tensors. An operator without a counterpart here, or one whose call torch refuses, makes its results unknown, and
with them all that is computed from those; both are told in the remarks, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_structure

from mla_fusion.graph.kinds import is_view
from mla_fusion.inspect import ge_operators
from mla_fusion.inspect.dumps import Dump, Edge, Operator, Value
from mla_fusion.inspect.ge_values import Constant, Result, Rows, Unmapped
from mla_fusion.inspect.prologues import is_prologue
from mla_fusion.inspect.rebuild_fx import NotRebuilt
from mla_fusion.inspect.symbols import Tensors

aten = torch.ops.aten


def rebuild(dump: Dump) -> tuple[GraphModule, list[str]]:
    """The graph, and remarks on what could not be carried over. Raises NotRebuilt where no input has a shape."""
    return Rebuilder(dump).graph_module()


class Rebuilder:
    """What the functions of ``ge_operators`` work with: arguments of the operator at hand, and ``call``."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.tensors = Tensors()
        self.graph = Graph()
        self.root = nn.Module()
        self.results: dict[tuple[str, int], Result] = {}
        self.rows: dict[Node, Rows] = {}
        self.written: dict[Node, Node] = {}
        self.copied: set[Node] = set()  # inputs that a TensorMove keeps from being written
        self.unmapped: Counter[str] = Counter()
        self.boxed: Counter[str] = Counter()
        self.lost = 0
        self.escaped: dict[Node, None] = {}  # read by something that is not in the graph
        self._name = self._source = ""
        self._known: dict[object, Any] = {}

    def graph_module(self) -> tuple[GraphModule, list[str]]:
        for operator in self.dump.of_type("Data", "RefData"):
            self._placeholder(operator)
        if not self.results:
            raise NotRebuilt("no Data of the dump has a shape")
        outputs: list[Edge | None] = []
        for operator in _in_order(self.dump):
            if operator.type == "NetOutput":
                outputs = [edge for edge in operator.inputs if edge is not None and edge.index >= 0]
            elif operator.type not in ("Data", "RefData"):
                self._operator(operator)
        self._finish(outputs)
        return GraphModule(self.root, self.graph), self._remarks()

    def _placeholder(self, operator: Operator) -> None:
        value = operator.outputs[0] if operator.outputs else Value()
        named = [
            f"{operator.name}_{place}" if dim == -1 else dim for place, dim in enumerate(value.shape or ())
        ]
        tensor = self.tensors.of(Value(value.dtype, None if value.shape is None else tuple(named)))
        if tensor is None:
            raise NotRebuilt(f"line {operator.line}: the dump does not tell dtype and shape of {operator.name}")
        node = self.graph.placeholder(re.sub(r"\W|^(?=\d)", "_", operator.name))  # GE's names may be no identifiers
        node.meta["val"] = tensor
        self.rows[node] = Rows(node)
        self.results[operator.name, 0] = node

    def _operator(self, operator: Operator) -> None:
        self._name, self._source = operator.name, operator.source
        try:
            found = ge_operators.convert(self, operator)
        except (Unmapped, TypeError, ValueError, AttributeError):  # attributes of another version may be other things
            self.unmapped[operator.type] += 1
            found = ()
        except LookupError:  # an argument is unknown, or absent
            self.lost += 1
            found = ()
        if not found:
            self._escape(operator)
        for index, result in enumerate(found):
            self.results[operator.name, index] = result

    def _escape(self, operator: Operator) -> None:
        """What an operator outside the graph reads must stay readable: the graph returns it."""
        for edge in operator.inputs:
            result = self.results.get((edge.producer, edge.index)) if edge is not None else None
            if isinstance(result, Node) and result.op != "placeholder":
                self.escaped[result] = None

    # -- arguments

    def argument(self, operator: Operator, place: int) -> Node | Constant:
        """Raises KeyError where the argument is unknown, IndexError where there is none."""
        edge = operator.inputs[place]
        found = self.results.get((edge.producer, edge.index)) if edge is not None else None
        if found is None:
            raise KeyError(place)
        return found

    def node(self, operator: Operator, place: int) -> Node:
        return self.as_node(self.argument(operator, place))

    def as_node(self, found: Node | Constant) -> Node:
        """A constant becomes a tensor of the graph."""
        if isinstance(found, Node):
            return found
        dtype = getattr(torch, found.dtype, None)
        if dtype is None or not all(isinstance(number, (int, float)) for number in found.numbers):
            raise Unmapped
        name = f"constant_{sum(1 for _ in self.root.buffers())}"
        self.root.register_buffer(name, torch.tensor(found.numbers, dtype=dtype).reshape(found.shape))
        node = self.graph.get_attr(name)
        node.meta["val"] = self.tensors.of(Value(found.dtype, found.shape))
        return node

    def has(self, operator: Operator, place: int) -> bool:
        return place < len(operator.inputs) and operator.inputs[place] is not None

    def numbers(self, operator: Operator, place: int) -> list[Any]:
        """The numbers of a constant argument."""
        found = self.argument(operator, place)
        if not isinstance(found, Constant):
            raise Unmapped
        return list(found.numbers)

    def number(self, operator: Operator, place: int) -> Any:
        (found,) = self.numbers(operator, place)
        return found

    # -- results

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of the graph. Raises Unmapped where torch refuses it."""
        value = self._value(target, args, kwargs)
        node = self.graph.create_node("call_function", target, args, kwargs, name=self._name or None)
        node.meta["val"] = value
        if self._source:
            node.meta["stack_trace"] = _trace(self._source)
        return node

    def _value(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch says of the result. Layers ask the same again and again."""
        values, options = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        leaves = tree_leaves((values, options))
        key = (target, tuple(_described(leaf) for leaf in leaves), str(tree_structure((values, options))))
        if key not in self._known:
            try:
                with self.tensors.mode:
                    self._known[key] = target(*values, **options)
            except Exception:  # an operator may refuse for any reason, each saying that the call means nothing
                raise Unmapped from None
        return self._known[key]

    def view(self, target: Any, source: Node, *args: Any) -> Node:
        """A call that re-indexes ``source``; what is known of the source's rows holds of the result."""
        node = self.call(target, source, *args)
        if source in self.rows:
            self.rows[node] = self.rows[source]
        return node

    def write(self, var: Node, result: Node) -> Node:
        """``result`` is what ``var`` holds after a write; where that is an input itself, the input is written."""
        rows = self.rows.get(var)
        if rows is not None:
            self.rows[result] = Rows(rows.placeholder, True)
            if rows.placeholder not in self.copied:
                self.written[rows.placeholder] = result
        return result

    def opaque(self, operator: Operator) -> list[Result]:
        """An operator that stays a black box, its results as the dump describes them."""
        inputs = [self.results.get((edge.producer, edge.index)) for edge in operator.inputs if edge is not None]
        nodes = tuple(found for found in inputs if isinstance(found, Node))
        values = [self.tensors.of(value) for value in operator.outputs]
        if not nodes or all(value is None for value in values):
            raise KeyError(operator.name)
        if not is_prologue(operator.type):
            self.boxed[operator.type] += 1
        box = self.graph.create_node("call_method", "unknown", nodes, name=self._name)
        box.meta["val"] = tuple(values)
        results: list[Result] = []
        for index, value in enumerate(values):
            node = self.graph.call_function(ge_operators.getitem, (box, index)) if value is not None else None
            if node is not None:
                node.meta["val"] = value
            results.append(node)
        return results

    def _finish(self, outputs: list[Edge | None]) -> None:
        """Caches that torchair writes back are graph results of their own: those become writes again."""
        self._name = self._source = ""
        returned = []
        for edge in outputs:
            result = self.results.get((edge.producer, edge.index)) if edge is not None else None
            rows = self.rows.get(result) if isinstance(result, Node) else None
            if isinstance(result, Node) and rows is not None and rows.written and self._fills(rows, result):
                self.written.setdefault(rows.placeholder, result)
            elif isinstance(result, Node):
                returned.append(result)
        for placeholder, result in self.written.items():
            shape = placeholder.meta["val"].shape
            whole = result if result.meta["val"].shape == shape else self.call(aten.reshape.default, result, [*shape])
            self.call(aten.copy_.default, placeholder, whole)
        self.graph.output(tuple(dict.fromkeys([*returned, *self.escaped])))
        self._drop_unread_views()

    def _drop_unread_views(self) -> None:
        """GE spreads operands that ATen takes as they are; what was spread is then read by nobody."""
        for node in reversed(self.graph.nodes):
            if is_view(node) and not node.users:
                self.graph.erase_node(node)

    def _fills(self, rows: Rows, result: Node) -> bool:
        return bool(rows.placeholder.meta["val"].shape == result.meta["val"].shape)

    def _remarks(self) -> list[str]:
        remarks = ["GE operators are read as the ATen calls that mean the same; rounding may differ in places"]
        if self.boxed:
            remarks.append(f"no ATen counterpart here for {_listed(self.boxed)}: opaque, in the shapes of the dump")
        if self.unmapped:
            remarks.append(f"not carried over: {_listed(self.unmapped)}; their results are unknown")
        if self.lost:
            remarks.append(f"{self.lost} operators read unknown results and are left out")
        return remarks


def _described(leaf: Any) -> object:
    """Equal for arguments that give equal results: shape, stride and dtype of a tensor, a literal with its type."""
    if isinstance(leaf, torch.Tensor):
        return str(tuple(leaf.shape)), str(leaf.stride()), leaf.dtype
    return type(leaf), str(leaf)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


def _in_order(dump: Dump) -> list[Operator]:
    """Definitions before uses. Raises NotRebuilt for a cycle."""
    done: set[str] = set()
    ordered: list[Operator] = []
    for start in dump.operators:
        stack = [(start, iter(start.inputs))]
        if start.name in done:
            continue
        open_ = {start.name}
        while stack:
            operator, edges = stack[-1]
            edge = next((edge for edge in edges if edge is not None and edge.producer not in done), None)
            if edge is None:
                stack.pop()
                done.add(operator.name)
                ordered.append(operator)
            elif edge.producer in open_:
                raise NotRebuilt(f"line {operator.line}: {operator.name} is part of a cycle")
            else:
                open_.add(edge.producer)
                inner = dump.by_name[edge.producer]
                stack.append((inner, iter(inner.inputs)))
    return ordered


def _trace(source: str) -> str:
    where, _, rest = source.partition(" in ")
    file, _, line = where.rpartition(":")
    function, _, code = rest.partition(": ")
    return f'File "{file}", line {line}, in {function}\n    {code}'
