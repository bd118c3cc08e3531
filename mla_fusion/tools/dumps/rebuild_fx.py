"""An FX listing made a graph again: the operators that torch knows, each value with the shape that
stands beside it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch.fx import GraphModule, Node

import mla_fusion.ops  # noqa: F401  # npu:: operators, where torch_npu has not defined them
from mla_fusion.compat import C_FUNCTIONS, FakeTensor, tree_leaves, tree_map_only
from mla_fusion.operators.known import value_of
from mla_fusion.tools.dumps import Dump, Edge, Operator, budget, names
from mla_fusion.tools.dumps.builder import Builder
from mla_fusion.tools.dumps.fx_text import METHOD
from mla_fusion.tools.dumps.model import NotRebuilt
from mla_fusion.tools.dumps.python_text import Word

_EARLY = (METHOD, "setitem", C_FUNCTIONS)  # calls that AOT autograd leaves none of


class Rebuilder(Builder):
    def __init__(self, dump: Dump) -> None:
        super().__init__(dump)
        self.nodes: dict[str, Node] = {}
        self.constants: list[str] = []

    def ordered(self) -> list[Operator]:
        """As they stand. Raises NotRebuilt for a graph before AOT autograd."""
        for early in self.dump.operators:
            if early.type.startswith(_EARLY):
                raise NotRebuilt(
                    f"line {early.line} calls {early.type}: this is the graph before AOT autograd; "
                    "the pass reads the one after it, 000_aot_forward_graph.txt of "
                    "TORCH_COMPILE_DEBUG=1"
                )
        return self.dump.operators

    def take(self, operator: Operator) -> None:
        self.nodes[operator.name] = self._node(operator)

    def _node(self, operator: Operator) -> Node:
        args, kwargs = operator.call
        match operator.type:
            case "placeholder":
                return self._described(operator, "placeholder", operator.name)
            case "output":
                return self.graph.output(self._data(args[0]))
            case "get_attr":
                return self._attribute(operator, args[0])
        try:
            args, kwargs = self._data(args), self._data(kwargs)
        except names.Unknown as unknown:
            return self._opaque(operator, f"{operator.type} of {unknown}")
        if operator.type == "alias" and isinstance(args[0], Node):
            return args[0]
        target = names.target(operator.type)
        if target is None:
            return self._opaque(operator, operator.type)
        return self._described(operator, "call_function", target, args, kwargs)

    def _opaque(self, operator: Operator, called: str) -> Node:
        self.unmapped[called] += 1
        inputs = tuple(self.nodes[edge.producer] for _, edge in operator.reads)
        if not inputs:
            raise NotRebuilt(
                f"line {operator.line}: {operator.type} is not known here and reads nothing"
            )
        return self._described(operator, *self.BOX, inputs)

    def _attribute(self, operator: Operator, path: str) -> Node:
        value = self.tensors.of(operator.output)
        held = None
        if value is not None:
            sizes = [size if isinstance(size, int) else 1 for size in value.shape]
            held = torch.empty(sizes, dtype=value.dtype, device="meta")
        self.root.setdefault(path, held)
        self.constants.append(path)
        return self._described(operator, "get_attr", path)

    def _described(self, operator: Operator, kind: str, *call: Any) -> Node:
        """``call``: as :meth:`add` takes target and arguments."""
        value = self.tensors.of(operator.output)
        node = self.add(operator, kind, *call, value=value)
        if value is None and kind == "call_function":
            value = self._computed(node)
            if value is not None:
                node.meta["val"] = value
        return node

    def _computed(self, node: Node) -> Any:
        """What torch says the operator returns: listings write no annotation on a tuple. Where it
        says nothing, the readers of the parts tell their shapes.
        """
        missing = object()
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda arg: arg.meta.get("val", missing)
        )
        if names.computable(node.target, args, kwargs):
            with suppress(budget.Refused):
                return budget.called(self.tensors.mode, node.target, args, kwargs)
        parts = {}
        for reader, _ in self.dump.readers[node.name]:
            place = reader.call[0][1] if reader.type == "getitem" else None
            if isinstance(place, int):
                parts[place] = self.tensors.of(reader.output)
        last = max(parts, default=-1)
        return tuple(map(parts.get, range(last + 1))) if 0 <= last < names.MOST_PARTS else None

    def _data(self, found: Any) -> Any:
        count = len(tree_leaves(found))
        if count > names.MOST_ELEMENTS:
            raise names.Unknown(f"{count} elements")
        return tree_map_only((Edge, Word, slice), self._datum, found)

    def _datum(self, found: Edge | Word | slice) -> Any:
        if isinstance(found, slice):
            return slice(*map(self._data, (found.start, found.stop, found.step)))
        return names.literal(found) if isinstance(found, Word) else self.nodes[found.producer]

    def finish(self) -> None:
        for node in self.graph.nodes:
            if node.op != "output" and node.users and value_of(node) is None:
                line = self.dump.by_name[node.name].line if node.name in self.dump.by_name else 0
                raise NotRebuilt(f"line {line}: the dump does not tell the shape of {node.name}")

    def remarks(self) -> list[str]:
        told = [
            f"the operator {name} is unknown here: the pass does not look inside ({count} calls)"
            for name, count in self.unmapped.items()
        ]
        if self.constants:
            few = ", ".join(self.constants[:3]) + (", .." if len(self.constants) > 3 else "")
            told.append(
                f"the dump holds no values of constants ({few}); what depends on them is not "
                "recognised"
            )
        return told


def contradiction(gm: GraphModule) -> tuple[Node, str] | None:
    """The first node whose operands torch refuses, or makes something else of than the dump says;
    and which.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: value_of(arg))
        if not names.fits(node.target, args, kwargs):
            return node, "these are not the arguments that it takes"
        modes = [
            leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)
        ]
        if not modes or not names.computable(node.target, args, kwargs, writes=True):
            continue
        try:
            value = budget.called(modes[0], node.target, args, kwargs)
        except budget.Refused as error:
            return node, str(error)
        stated = tree_leaves(value_of(node))
        if any(map(_differ, stated, tree_leaves(value))):
            return node, f"the dump says {_said(stated)}, torch {_said(tree_leaves(value))}"
    return None


def _differ(stated: Any, made: Any) -> bool:
    """Symbolic sizes may be the same in other words."""
    if not isinstance(stated, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    pairs = [
        (a, b) for a, b in zip(stated.shape, made.shape, strict=False) if type(a) is type(b) is int
    ]
    return stated.dtype != made.dtype or stated.dim() != made.dim() or any(a != b for a, b in pairs)


def _said(leaves: list[Any]) -> str:
    shapes = (
        f"{leaf.dtype}{list(leaf.shape)}".removeprefix("torch.")
        for leaf in leaves
        if hasattr(leaf, "shape")
    )
    return ", ".join(shapes)
