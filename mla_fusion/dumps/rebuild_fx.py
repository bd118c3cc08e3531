"""An FX listing made a graph again: the operators that torch knows, each value with the shape that stands beside it."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

import mla_fusion.ops  # noqa: F401  # npu:: operators, where torch_npu has not defined them
from mla_fusion.compat import C_FUNCTIONS
from mla_fusion.dumps import Dump, Edge, Operator
from mla_fusion.dumps.fx_text import METHOD, OPERATORS
from mla_fusion.dumps.python_text import Word
from mla_fusion.dumps.symbols import Tensors

_SOURCE = re.compile(r"(?P<file>.*):(?P<line>\d+) in (?P<function>\S+): (?P<code>.*)", re.DOTALL)


class NotRebuilt(ValueError):
    """A dump that does not hold what a graph needs; the message says what is missing."""


def rebuild(dump: Dump) -> tuple[GraphModule, list[str]]:
    """The graph, and remarks on what the dump does not tell. Raises NotRebuilt where that is too much."""
    early = next((op for op in dump.operators if op.type.startswith((METHOD, "setitem", C_FUNCTIONS))), None)
    if early is not None:
        raise NotRebuilt(
            f"line {early.line} calls {early.type}: this is the graph before AOT autograd; "
            "the pass reads the one after it, 000_aot_forward_graph.txt of TORCH_COMPILE_DEBUG=1"
        )
    return _Rebuilder(dump).graph_module()


class _Rebuilder:
    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.tensors = Tensors()
        self.graph = Graph()
        self.root = nn.Module()
        self.nodes: dict[str, Node] = {}
        self.unknown: dict[str, int] = {}
        self.constants: list[str] = []

    def graph_module(self) -> tuple[GraphModule, list[str]]:
        for operator in self.dump.operators:
            self.nodes[operator.name] = self._node(operator)
        self._check()
        return GraphModule(self.root, self.graph), self._remarks()

    def _node(self, operator: Operator) -> Node:
        if operator.type == "placeholder":
            return self._described(self.graph.placeholder(operator.name), operator)
        args, kwargs = operator.call or ((), {})
        if operator.type == "output":
            return self.graph.output(self._data(args[0]))
        if operator.type == "get_attr":
            return self._attribute(operator, args[0])
        args, kwargs = self._data(args), self._data(kwargs)
        if operator.type == "alias" and isinstance(args[0], Node):
            return args[0]
        target = resolve(operator.type)
        if target is None:
            return self._opaque(operator, args)
        node = self.graph.create_node("call_function", target, args, kwargs, name=operator.name)
        return self._described(node, operator)

    def _opaque(self, operator: Operator, args: tuple[Any, ...]) -> Node:
        """An operator unknown here: a method call is what every walk of the pass stops at."""
        self.unknown[operator.type] = self.unknown.get(operator.type, 0) + 1
        inputs = tuple(self.nodes[edge.producer] for edge in operator.inputs if edge is not None)
        if not inputs:
            raise NotRebuilt(f"line {operator.line}: {operator.type} is not known here and reads nothing")
        return self._described(self.graph.create_node("call_method", "unknown", inputs, name=operator.name), operator)

    def _attribute(self, operator: Operator, path: str) -> Node:
        value = self.tensors.of(operator.outputs[0])
        *folders, name = path.split(".")
        owner = self.root
        for folder in folders:
            if not hasattr(owner, folder):
                owner.add_module(folder, nn.Module())
            owner = getattr(owner, folder)
        held = None if value is None else torch.empty(_numbers(value.shape), dtype=value.dtype, device="meta")
        setattr(owner, name, held)
        self.constants.append(path)
        return self._described(self.graph.create_node("get_attr", path, name=operator.name), operator)

    def _described(self, node: Node, operator: Operator) -> Node:
        value = self.tensors.of(operator.outputs[0])
        if value is None and node.op == "call_function":
            value = self._computed(node)
        if value is not None:
            node.meta["val"] = value
        trace = _SOURCE.match(operator.source)
        if trace is not None:
            node.meta["stack_trace"] = f'File "{trace[1]}", line {trace[2]}, in {trace[3]}\n    {trace[4]}'
        return node

    def _computed(self, node: Node) -> Any:
        """What torch says the operator returns: listings write no annotation on a tuple."""
        missing = object()
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val", missing))
        try:
            with self.tensors.mode:
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # an operator may refuse for any reason; the readers of its parts then tell the shapes
            return self._gathered(node)

    def _gathered(self, node: Node) -> Any:
        parts = {}
        for reader, _ in self.dump.readers[node.name]:
            if reader.type == "getitem" and reader.call is not None and isinstance(reader.call[0][1], int):
                parts[reader.call[0][1]] = self.tensors.of(reader.outputs[0])
        return tuple(parts.get(index) for index in range(max(parts) + 1)) if parts else None

    def _data(self, found: Any) -> Any:
        if isinstance(found, Edge):
            return self.nodes[found.producer]
        if isinstance(found, Word):
            return word(found)
        if isinstance(found, (list, tuple)):
            return type(found)(self._data(item) for item in found)
        if isinstance(found, dict):
            return {key: self._data(item) for key, item in found.items()}
        if isinstance(found, slice):
            return slice(*(self._data(item) for item in (found.start, found.stop, found.step)))
        return found

    def _check(self) -> None:
        for node in self.graph.nodes:
            if node.op != "output" and node.users and node.meta.get("val") is None:
                line = self.dump.by_name[node.name].line if node.name in self.dump.by_name else 0
                raise NotRebuilt(f"line {line}: the dump does not tell the shape of {node.name}")

    def _remarks(self) -> list[str]:
        remarks = [f"{name} is not known here; {count} calls stand as opaque" for name, count in self.unknown.items()]
        if self.constants:
            few = ", ".join(self.constants[:3]) + (", .." if len(self.constants) > 3 else "")
            remarks.append(f"the dump holds no values of constants ({few}); what depends on them is not recognised")
        return remarks


def _numbers(shape: Any) -> list[int]:
    return [size if isinstance(size, int) else 1 for size in shape]


def resolve(name: str) -> Any:
    """The operator of a name such as ``aten.mm.default``, ``getitem`` or ``torch.sym_max``; None for none.

    Asked of torch each time: torch_npu, where it is loaded later, defines operators anew.
    """
    if name in OPERATORS:
        return OPERATORS[name]
    owner: Any = torch if name.startswith("torch.") else torch.ops
    for part in name.removeprefix("torch.").split("."):
        try:
            owner = getattr(owner, part)
        except (AttributeError, RuntimeError):
            return None
    return owner if callable(owner) else None


def word(name: str) -> Any:
    """The object of a dotted name among the arguments. A device becomes the CPU, on which everything here runs."""
    if name.startswith("device:"):
        return torch.device("cpu")
    if name.lstrip("-") in ("inf", "nan"):
        return float(name)
    if name == "Ellipsis":
        return Ellipsis
    found = resolve_attribute(name)
    return name if found is None else found


def resolve_attribute(name: str) -> Any:
    found: Any = torch
    for part in name.removeprefix("torch.").split("."):
        found = getattr(found, part, None)
    return found
