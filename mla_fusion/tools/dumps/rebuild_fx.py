"""An FX listing made a graph again: the operators that torch knows, each value with the shape that
stands beside it. No operator is called: values are tensors without storage, in the shapes that the
dump states, symbolic sizes among them.
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

from mla_fusion.compat import (
    C_FUNCTIONS,
    FakeTensorMode,
    new_size,
    symbolic_mode,
    tree_leaves,
    tree_map_only,
)
from mla_fusion.fx.kinds import value_of
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value, names
from mla_fusion.tools.dumps.model import NotRebuilt
from mla_fusion.tools.dumps.python_text import BINARY, METHOD, Word
from mla_fusion.tools.target import first_line

_EARLY = (METHOD, "setitem", C_FUNCTIONS)  # calls that AOT autograd leaves none of
_SOURCE = re.compile(r"(.+?):(\d+) in (.*?)(?:: |$)(.*)", re.DOTALL)
_MOST_PARTS = 1 << 12  # of a value that is taken apart; models have a few
MOST_SECONDS = 120  # that the pass may work on the graph of a dump; 61 layers take a few
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    sign: BINARY[sign] for sign in (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
}
_CALLS: dict[str, Callable[..., Any]] = {"Max": torch.sym_max, "Min": torch.sym_min}
_HINT = 11  # as good a number of tokens as any: a prime that no model's dims contain
_LARGEST = 1 << 40
_LONGEST = 256  # characters of an expression
_FACTORS = 8  # products of more sums have too many terms


class Rebuilder:
    """Makes nodes of the operators, one by one. ``unmapped`` counts calls of what is not on the
    list of names.
    """

    def __init__(self, dump: Dump) -> None:
        self.dump, self.graph, self.tensors = dump, Graph(), Tensors()
        self.nodes: dict[str, Node] = {}
        self.constants: dict[str, str] = {}  # by path: attributes of our module
        self.unmapped = Counter[str]()

    def graph_module(self) -> tuple[GraphModule, list[str]]:
        """The graph, and remarks on what the dump does not tell. Raises NotRebuilt, with the
        line.
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
            # a damaged dump can describe what no graph is: sizes below zero, names that are none
            except Exception as error:
                raise NotRebuilt(
                    f"line {operator.line}: torch accepts no such graph: {first_line(error)}"
                ) from error
        for name, node in self.nodes.items():
            one = self.dump.by_name[name]
            if node.users and value_of(node) is None and one.output.dtype != "Sym":
                raise NotRebuilt(f"line {one.line}: the dump does not tell the shape of {name}")
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
        args, kwargs = operator.call
        match operator.type:
            case "placeholder":
                return self._described(operator, "placeholder", operator.name)
            case "output":
                return self.graph.output(self._data(args[0]))
            case "get_attr":
                # by a name of our own: a path of the dump's could lead into the module itself
                name = self.constants.setdefault(args[0], f"constant_{len(self.constants)}")
                return self._described(operator, "get_attr", name)
        try:
            args, kwargs = self._data(args), self._data(kwargs)
        except names.Unknown as unknown:
            return self._opaque(operator, f"{operator.type} of {unknown}")
        if operator.type == "alias" and isinstance(args[0], Node):
            return args[0]
        target = names.target(operator.type)
        if target is None or (operator.type in names.FUNCTIONS and not _plain(args, kwargs)):
            return self._opaque(operator, operator.type)
        return self._described(operator, "call_function", target, args, kwargs)

    def _opaque(self, operator: Operator, called: str) -> Node:
        """A node of what is not on the list: every walk of the pass stops at it."""
        self.unmapped[called] += 1
        inputs = [self.nodes[edge.producer] for _, edge in operator.reads]
        return self._described(operator, "call_method", "unknown", (inputs,))

    def _described(
        self, operator: Operator, kind: str, target: Any, args: Any = (), kwargs: Any = None
    ) -> Node:
        node = self.graph.create_node(kind, target, args, kwargs, name=operator.name)
        value = self.tensors.of(operator.output)
        value = self._unstated(operator) if value is None else value
        if value is not None:
            node.meta["val"] = value
        if operator.source:  # in the words of Python's tracebacks
            words = r'File "\1", line \2, in \3\n    \4'
            node.meta["stack_trace"] = _SOURCE.sub(words, operator.source)
        return node

    def _unstated(self, operator: Operator) -> Any:
        """Of a tuple, on which listings write no annotation: what the readers of its parts say."""
        parts = {}
        for reader in self.dump.readers[operator.name]:
            place = reader.call[0][1] if reader.type == "getitem" else None
            if isinstance(place, int):
                parts[place] = self.tensors.of(reader.output)
        last = max(parts, default=-1)
        return tuple(map(parts.get, range(last + 1))) if 0 <= last < _MOST_PARTS else None

    def _data(self, found: Any) -> Any:
        return tree_map_only((Edge, Word, slice), self._datum, found)

    def _datum(self, found: Edge | Word | slice) -> Any:
        if isinstance(found, slice):
            return slice(*map(self._data, (found.start, found.stop, found.step)))
        return names.literal(found) if isinstance(found, Word) else self.nodes[found.producer]


class TooSlow(BaseException):
    """Not an Exception, because torch and sympy catch those and try something else."""


class _Mode(FakeTensorMode):
    """Ends the work on a graph when its time is up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._deadline = monotonic() + MOST_SECONDS

    def check(self) -> None:
        if monotonic() > self._deadline:
            raise TooSlow

    def __torch_dispatch__(self, *call: Any, **options: Any) -> Any:
        self.check()
        return super().__torch_dispatch__(*call, **options)


class Tensors:
    """Makes fake tensors; a symbol of one name is the same size everywhere."""

    def __init__(self) -> None:
        self.mode = symbolic_mode(_Mode)
        self._symbol = cache(partial(new_size, self.mode, hint=_HINT, largest=_LARGEST))
        self.size = cache(self._size)

    def of(self, value: Value) -> Any:
        """The tensor or symbolic size that an annotation describes, or None where it does not say
        enough.
        """
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
        """A number, or the SymInt of an expression; None for what is no size."""
        if isinstance(dim, int):
            return dim if dim >= 0 else None
        if len(dim) > _LONGEST or dim.count("*") > _FACTORS:
            return None
        try:
            return self._evaluate(ast.parse(dim.strip(), mode="eval").body)
        except Exception:  # of an expression that is none
            return None

    def _evaluate(self, node: ast.AST) -> Any:
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


def _plain(args: Any, kwargs: Any) -> bool:
    """Are the operands of Python's arithmetic values of the graph, and numbers?"""
    leaves = tree_leaves((args, kwargs))
    return any(isinstance(leaf, Node) for leaf in leaves) and all(
        isinstance(leaf, (Node, int, float)) for leaf in leaves
    )
