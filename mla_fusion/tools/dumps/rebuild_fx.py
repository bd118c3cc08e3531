"""Rebuilds the graph of an FX listing from the operators that torch knows.

No operator is called. Values are tensors without storage, in the shapes that the listing states,
symbolic sizes among them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from time import monotonic
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from mla_fusion.compat import (
    C_FUNCTIONS,
    FakeTensorMode,
    new_size,
    symbolic_mode,
    tree_leaves,
)
from mla_fusion.fx.kinds import value_of
from mla_fusion.report.text_tables import first_line
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value, names
from mla_fusion.tools.dumps.model import NotRebuilt
from mla_fusion.tools.dumps.python_text import BINARY, METHOD, Word

_EARLY = (METHOD, "setitem", C_FUNCTIONS)  # calls that AOT autograd leaves none of
_SOURCE = re.compile(r"(.+?):(\d+) in (.*?)(?:: |$)(.*)", re.DOTALL)
_MOST_PARTS = 1 << 12  # of a value that is taken apart; models have a few
MOST_SECONDS = 120  # that the pass may work on the graph of a dump; 61 layers take a few
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    sign: BINARY[sign] for sign in (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
}
_CALLS: dict[str, Callable[..., Any]] = {"Max": torch.sym_max, "Min": torch.sym_min}
_HINT = 11  # the number that stands for each symbol: a prime that is no factor of a model's dims
_LARGEST = 1 << 40
_LONGEST = 256  # characters of an expression
_FACTORS = 8  # products of more sums have too many terms


class Rebuilder:
    """Rebuilds the graph of a dump, node by node.

    constants  our names of attributes, by the paths of the dump
    unmapped   calls of operators that are not on the list of names
    """

    def __init__(self, dump: Dump) -> None:
        self.dump, self.graph, self.tensors = dump, Graph(), Tensors()
        self.nodes: dict[str, Node] = {}
        self.constants: dict[str, str] = {}
        self.unmapped = Counter[str]()

    def graph_module(self) -> tuple[GraphModule, list[str]]:
        """Returns the graph, and remarks on what the dump does not say.

        Raises NotRebuilt, with the line.
        """
        for operator in self.dump.operators:
            if operator.type.startswith(_EARLY):
                raise NotRebuilt(
                    f"line {operator.line} calls {operator.type}: this is the graph before AOT "
                    "autograd; the pass reads the one after it: TORCH_LOGS=aot_graphs prints it, "
                    "torchair writes it as 000_aot_forward_graph.txt with TORCH_COMPILE_DEBUG=1"
                )
            self.tensors.mode.check()
            try:
                self.nodes[operator.name] = self._node(operator)
            # a damaged dump may have sizes below zero, or names that are none
            except Exception as error:
                raise NotRebuilt(
                    f"line {operator.line}: torch accepts no such graph: {first_line(error)}"
                ) from error
        for name, node in self.nodes.items():
            operator = self.dump.by_name[name]
            if node.users and value_of(node) is None and operator.output.dtype != "Sym":
                raise NotRebuilt(
                    f"line {operator.line}: the dump does not tell the shape of {name}"
                )
        remarks = [
            f"the operator {name} is unknown here: the pass does not look inside ({count} calls)"
            for name, count in self.unmapped.items()
        ] + [
            f"the dump does not hold the value of the constant {path}; what depends on it is not "
            "recognised"
            for path in self.constants
        ]
        return GraphModule(dict.fromkeys(self.constants.values()), self.graph), remarks

    def _node(self, operator: Operator) -> Node:
        """Returns the node of an operator."""
        kind, (args, kwargs) = operator.type, operator.call
        if kind == "placeholder":
            return self._described(operator, kind, operator.name)
        if kind == "get_attr":
            # a path of the dump could lead into the module itself
            name = self.constants.setdefault(args[0], f"constant_{len(self.constants)}")
            return self._described(operator, kind, name)
        if kind == "output":
            return self.graph.output(self._data(args[0]))
        try:
            args, kwargs = self._data((args, kwargs))
        except names.Unknown as unknown:
            return self._opaque(operator, f"{kind} of {unknown}")
        if kind == "alias" and isinstance(args[0], Node):
            return args[0]
        target = names.target(kind)
        if target is None or (kind in names.FUNCTIONS and not _is_arithmetic(args, kwargs)):
            return self._opaque(operator, kind)
        return self._described(operator, "call_function", target, args, kwargs)

    def _opaque(self, operator: Operator, name: str) -> Node:
        """Returns a node for an operator that is not on the list: no walk of the pass goes on."""
        self.unmapped[name] += 1
        inputs = [self.nodes[edge.producer] for _, edge in operator.reads]
        return self._described(operator, "call_method", "unknown", (inputs,))

    def _described(
        self, operator: Operator, kind: str, target: Any, args: Any = (), kwargs: Any = None
    ) -> Node:
        """Returns a new node with its value and its place in the model."""
        node = self.graph.create_node(kind, target, args, kwargs, name=operator.name)
        value = self.tensors.of(operator.output)
        value = self._parts(operator) if value is None else value
        if value is not None:
            node.meta["val"] = value
        if operator.source:  # in the words of Python's tracebacks
            words = r'File "\1", line \2, in \3\n    \4'
            node.meta["stack_trace"] = _SOURCE.sub(words, operator.source)
        return node

    def _parts(self, operator: Operator) -> Any:
        """Returns the parts of a tuple as their readers have them.

        Listings do not annotate tuples.
        """
        parts = {}
        for reader in self.dump.readers[operator.name]:
            place = reader.call[0][1] if reader.type == "getitem" else None
            if isinstance(place, int):
                parts[place] = self.tensors.of(reader.output)
        last = max(parts, default=-1)
        return tuple(map(parts.get, range(last + 1))) if 0 <= last < _MOST_PARTS else None

    def _data(self, arguments: Any) -> Any:
        """Returns arguments with nodes and torch's objects in them."""

        def datum(leaf: Any) -> Any:
            """Returns the node or the object that a leaf of the arguments stands for."""
            if isinstance(leaf, Word):
                return names.literal(leaf)
            return self.nodes[leaf.producer] if isinstance(leaf, Edge) else leaf

        return map_aggregate(arguments, datum)


class TooSlow(BaseException):
    """Raised when the time is up. It is no Exception, because torch and sympy catch those."""


class _Mode(FakeTensorMode):
    """Makes fake tensors until the time is up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._deadline = monotonic() + MOST_SECONDS

    def check(self) -> None:
        """Raises TooSlow if the time is up."""
        if monotonic() > self._deadline:
            raise TooSlow

    def __torch_dispatch__(self, *call: Any, **options: Any) -> Any:
        self.check()
        return super().__torch_dispatch__(*call, **options)


class Tensors:
    """Makes fake tensors. A symbol is the same size everywhere."""

    def __init__(self) -> None:
        self.mode = symbolic_mode(_Mode)
        self._symbol = cache(partial(new_size, self.mode, hint=_HINT, largest=_LARGEST))
        self.size = cache(self._size)

    def of(self, value: Value) -> Any:
        """Returns the tensor or size that an annotation describes; None if parts are missing."""
        if value.dtype == "Sym":
            return self.size((value.shape or ("",))[0])
        dtype = names.dtype(value.dtype)
        sizes = [*map(self.size, (*(value.shape or ()), *(value.stride or ())))]
        if value.shape is None or dtype is None or any(size is None for size in sizes):
            return None
        rank = len(value.shape)
        with self.mode:
            if value.stride is None:
                return torch.empty(sizes, dtype=dtype)
            return torch.empty_strided(sizes[:rank], sizes[rank:], dtype=dtype)

    def _size(self, dim: int | str) -> Any:
        """Returns a number, or the SymInt of an expression; None for anything else."""
        if isinstance(dim, int):
            return dim if dim >= 0 else None
        if len(dim) > _LONGEST or dim.count("*") > _FACTORS:
            return None
        try:
            return self._evaluate(ast.parse(dim.strip(), mode="eval").body)
        except Exception:  # the text is no expression
            return None

    def _evaluate(self, node: ast.AST) -> Any:
        """Returns the size of an expression. Raises an error for anything that is no size."""
        match node:
            case ast.Constant(value=int(number)) if number < _LARGEST:
                return number
            case ast.Name(id=name):
                return self._symbol(name)
            case ast.BinOp(op=ast.Pow(), left=ast.Name(id=name), right=ast.Constant(value=2)):
                return self._symbol(name) * self._symbol(name)
            case ast.BinOp(left=left, op=op, right=right):
                size = _BINARY[type(op)](self._evaluate(left), self._evaluate(right))
                if isinstance(size, int) and abs(size) > _LARGEST:
                    raise ValueError("too large for a size")
                return size
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return _CALLS[name](*map(self._evaluate, arguments))
        raise ValueError("not a size")


def _is_arithmetic(args: Any, kwargs: Any) -> bool:
    """Returns True if all operands are values of the graph and numbers, at least one a value."""
    leaves = tree_leaves((args, kwargs))
    return any(isinstance(leaf, Node) for leaf in leaves) and all(
        isinstance(leaf, (Node, int, float)) for leaf in leaves
    )
