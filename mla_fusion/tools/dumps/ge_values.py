"""What a GE tensor can be while its graph is rebuilt, and what the functions that rebuild operators
work with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from mla_fusion.compat import tree_leaves, tree_structure
from mla_fusion.tools.dumps import Dump, Operator, Value, budget, names
from mla_fusion.tools.dumps.prologues import is_prologue
from mla_fusion.tools.dumps.symbols import Tensors


@dataclass(frozen=True)
class Constant:
    """Numbers that the graph holds; sizes may be symbolic."""

    numbers: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def scalar(self) -> Any:
        return self.numbers[0] if self.shape == () and len(self.numbers) == 1 else None


@dataclass(frozen=True)
class Rows:
    """Which input a value is a view of, and whether a write lies between."""

    placeholder: Node
    written: bool = False


Result = Node | Constant | None


class Unmapped(Exception):
    """A GE operator, or a use of one, that has no counterpart here."""


class OperatorReader:
    """What the functions of ``ge_operators`` work with: arguments of the operator at hand, and
    ``call``.
    """

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
        dtype = names.dtype(found.dtype)
        if dtype is None or not all(isinstance(number, (int, float)) for number in found.numbers):
            raise Unmapped
        name = f"constant_{sum(1 for _ in self.root.buffers())}"
        self.root.register_buffer(
            name, torch.tensor(found.numbers, dtype=dtype).reshape(found.shape)
        )
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
        node = self.graph.create_node(
            "call_function", target, args, kwargs, name=self._name or None
        )
        node.meta["val"] = value
        if self._source:
            node.meta["stack_trace"] = self._source
        return node

    def _value(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch says of the result. Layers ask the same again and again."""
        values, options = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        leaves = tree_leaves((values, options))
        key = (
            target,
            tuple(_described(leaf) for leaf in leaves),
            str(tree_structure((values, options))),
        )
        if key not in self._known:
            if not names.bounded(target, values, options):
                raise Unmapped(f"{target} would have too many parts, or an argument of no sense")
            try:
                self._known[key] = budget.called(self.tensors.mode, target, values, options)
            except budget.Refused:
                raise Unmapped(f"torch refuses the operands of {target}") from None
        return self._known[key]

    def view(self, target: Any, source: Node, *args: Any) -> Node:
        """A call that re-indexes ``source``; what is known of the source's rows holds of the
        result.
        """
        node = self.call(target, source, *args)
        if source in self.rows:
            self.rows[node] = self.rows[source]
        return node

    def write(self, var: Node, result: Node) -> Node:
        """``result`` is what ``var`` holds after a write; where that is an input itself, the input
        is written.
        """
        rows = self.rows.get(var)
        if rows is not None:
            self.rows[result] = Rows(rows.placeholder, True)
            if rows.placeholder not in self.copied:
                self.written[rows.placeholder] = result
        return result

    def opaque(self, operator: Operator) -> list[Result]:
        """An operator that stays a black box, its results as the dump describes them."""
        inputs = [
            self.results.get((edge.producer, edge.index))
            for edge in operator.inputs
            if edge is not None
        ]
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
            node = self.graph.call_function(getitem, (box, index)) if value is not None else None
            if node is not None:
                node.meta["val"] = value
            results.append(node)
        return results


def _described(leaf: Any) -> object:
    """Equal for arguments that give equal results: shape, stride and dtype of a tensor, a literal
    with its type.
    """
    if isinstance(leaf, torch.Tensor):
        return str(tuple(leaf.shape)), str(leaf.stride()), leaf.dtype
    return type(leaf), str(leaf)
