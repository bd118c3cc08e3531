"""What a GE tensor can be while its graph is rebuilt, and what the functions that rebuild operators
work with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import tree_leaves, tree_structure
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value, budget, dtypes, names
from mla_fusion.tools.dumps.builder import Builder
from mla_fusion.tools.dumps.prologues import is_prologue

_REINDEXED = """
aten.reshape.default aten.unsqueeze.default aten.squeeze.dims aten.slice.Tensor aten.select.int
""".split()


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
_NONE = Operator("", "")


class Unmapped(Exception):
    """A GE operator, or a use of one, that has no counterpart here."""


class OperatorReader(Builder):
    """What the functions of ``ge_operators`` work with: arguments of ``operator``, the one at hand,
    and ``call``.
    """

    def __init__(self, dump: Dump) -> None:
        super().__init__(dump)
        self.operator = _NONE
        self.results: dict[Edge | None, Result] = {}
        self.rows: dict[Node, Rows] = {}
        self.written: dict[Node, Node] = {}
        self.copied: set[Node] = set()  # inputs that a TensorMove keeps from being written
        self.boxed: Counter[str] = Counter()
        self._known: dict[object, Any] = {}

    # -- arguments

    def result(self, edge: Edge | None) -> Node | Constant:
        """Of an operator that was read before. Raises KeyError where it is unknown."""
        found = self.results.get(edge)
        if found is None:
            raise KeyError(edge)
        return found

    def argument(self, place: int) -> Node | Constant:
        """Raises KeyError where it is unknown, IndexError where there is none."""
        return self.result(self.operator.inputs[place])

    def arguments(self) -> list[Node | Constant]:
        return list(map(self.result, self.operator.inputs))

    def node(self, place: int) -> Node:
        return self.as_node(self.argument(place))

    def nodes(self, count: int) -> list[Node]:
        """The first arguments."""
        return [self.node(place) for place in range(count)]

    def as_node(self, found: Node | Constant) -> Node:
        """A constant becomes a tensor of the graph."""
        if isinstance(found, Node):
            return found
        if not all(isinstance(number, (int, float)) for number in found.numbers):
            raise Unmapped
        name = f"constant_{len(self.root)}"
        content = torch.tensor(found.numbers, dtype=known_dtype(found.dtype)).reshape(found.shape)
        self.root[name] = content
        value = self.tensors.of(Value(found.dtype, found.shape))
        return self.add(None, "get_attr", name, value=value)

    def has(self, place: int) -> bool:
        return self.operator.input(place) is not None

    def producer(self, edge: Edge | None) -> Operator:
        """The operator that makes an argument; one without a type where nothing is given."""
        return _NONE if edge is None else self.dump.producer(edge)

    def numbers(self, place: int) -> list[Any]:
        """The numbers of a constant argument."""
        found = self.argument(place)
        if not isinstance(found, Constant):
            raise Unmapped
        return list(found.numbers)

    def number(self, place: int) -> Any:
        (found,) = self.numbers(place)
        return found

    def optional(self, first: int, *names: str) -> dict[str, Node]:
        """Optional arguments from place ``first`` on, by the names that torch_npu gives them."""
        return {
            name: self.node(place) for place, name in enumerate(names, first) if self.has(place)
        }

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, of its default's type; without a default it raises KeyError where it is not
        given.
        """
        attributes = self.operator.attributes
        return attributes[name] if default is None else type(default)(attributes.get(name, default))

    def dtype_name(self, attribute: str) -> str:
        """torch's name."""
        stated = self.operator.attributes.get(attribute)
        return dtypes.from_number(stated) if isinstance(stated, int) else str(stated)

    def dtype(self, attribute: str) -> torch.dtype:
        return known_dtype(self.dtype_name(attribute))

    # -- results

    def call(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """A call of the graph, of an operator by torch's name. Raises Unmapped where torch refuses
        it. What is known of the rows of a tensor holds of what is another shape, or a part, of it.
        """
        target = names.target(name)
        value = self._value(target, args, kwargs)
        node = self.add(self.operator, "call_function", target, args, kwargs, value=value)
        if name in _REINDEXED and args[0] in self.rows:
            self.rows[node] = self.rows[args[0]]
        return node

    def parts(self, node: Node) -> list[Node]:
        """The results of a call that gives several."""
        return [self.call("getitem", node, index) for index in range(len(node.meta["val"]))]

    def _value(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch says of the result. Layers ask the same again and again."""
        values, options = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        key = (
            target,
            tuple(_described(leaf) for leaf in tree_leaves((values, options))),
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

    def opaque(self) -> list[Result]:
        """The operator stays a black box, its results as the dump describes them."""
        operator = self.operator
        found = [self.results.get(edge) for edge in operator.inputs]
        nodes = tuple(one for one in found if isinstance(one, Node))
        values = [self.tensors.of(value) for value in operator.outputs]
        if not nodes or all(value is None for value in values):
            raise KeyError(operator.name)
        if not is_prologue(operator.type):
            self.boxed[operator.type] += 1
        box = self.add(operator, *self.BOX, nodes, value=tuple(values))
        return [
            None
            if value is None
            else self.add(None, "call_function", getitem, (box, index), value=value)
            for index, value in enumerate(values)
        ]


def known_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name. Raises Unmapped where there is none."""
    found = names.dtype(name)
    if found is None:
        raise Unmapped
    return found


def _described(leaf: Any) -> object:
    """Equal for arguments that give equal results: shape, stride and dtype of a tensor, a literal
    with its type.
    """
    if isinstance(leaf, torch.Tensor):
        return str(tuple(leaf.shape)), str(leaf.stride()), leaf.dtype
    return type(leaf), str(leaf)
