"""A GE graph made an FX graph: GE operators become the ATen or npu calls that mean the same, as far
as that is known.

Shapes are not taken from the dump but follow from those of its inputs, because torchair notes them
for few other tensors. An operator without a counterpart here, or one whose call torch refuses,
makes its results unknown, and with them all that is computed from those; both are told in the
remarks, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch.fx import GraphModule, Node

from mla_fusion.fx.kinds import is_view
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value, budget, ge_operators
from mla_fusion.tools.dumps.ge_values import OperatorReader, Rows, Unmapped
from mla_fusion.tools.dumps.model import NotRebuilt

aten = torch.ops.aten


def rebuild(dump: Dump) -> tuple[GraphModule, list[str]]:
    """The graph, and remarks on what could not be carried over. Raises NotRebuilt where no input
    has a shape.
    """
    return Rebuilder(dump).graph_module()


class Rebuilder(OperatorReader):
    def graph_module(self) -> tuple[GraphModule, list[str]]:
        with budget.limited(len(self.dump.operators)) as spent:
            self._build(spent)
        return GraphModule(self.root, self.graph), self._remarks()

    def _build(self, spent: budget.Budget) -> None:
        for operator in self.dump.of_type("Data", "RefData"):
            spent.line = operator.line
            self._placeholder(operator)
        if not self.results:
            raise NotRebuilt("no Data of the dump has a shape")
        outputs: list[Edge | None] = []
        for operator in _in_order(self.dump):
            spent.line = operator.line
            if operator.type == "NetOutput":
                outputs = [edge for edge in operator.inputs if edge is not None and edge.index >= 0]
            elif operator.type not in ("Data", "RefData"):
                self._operator(operator)
        self._finish(outputs)

    def _placeholder(self, operator: Operator) -> None:
        value = operator.outputs[0] if operator.outputs else Value()
        named = [
            f"{operator.name}_{place}" if dim == -1 else dim
            for place, dim in enumerate(value.shape or ())
        ]
        tensor = self.tensors.of(Value(value.dtype, None if value.shape is None else tuple(named)))
        if tensor is None:
            raise NotRebuilt(
                f"line {operator.line}: the dump does not tell dtype and shape of {operator.name}"
            )
        # GE's names may be no identifiers
        node = self.graph.placeholder(re.sub(r"\W|^(?=\d)", "_", operator.name))
        node.meta["val"] = tensor
        self.rows[node] = Rows(node)
        self.results[operator.name, 0] = node

    def _operator(self, operator: Operator) -> None:
        self._name, self._source = operator.name, operator.stack_trace
        try:
            found = ge_operators.convert(self, operator)
        # of another version, or damaged
        except (Unmapped, TypeError, ValueError, AttributeError, ArithmeticError):
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

    def _finish(self, outputs: list[Edge | None]) -> None:
        """Caches that torchair writes back are graph results of their own: those become writes
        again.
        """
        self._name = self._source = ""
        returned = []
        for edge in outputs:
            result = self.results.get((edge.producer, edge.index)) if edge is not None else None
            rows = self.rows.get(result) if isinstance(result, Node) else None
            if (
                isinstance(result, Node)
                and rows is not None
                and rows.written
                and self._fills(rows, result)
            ):
                self.written.setdefault(rows.placeholder, result)
            elif isinstance(result, Node):
                returned.append(result)
        for placeholder, result in self.written.items():
            shape = placeholder.meta["val"].shape
            whole = (
                result
                if result.meta["val"].shape == shape
                else self.call(aten.reshape.default, result, [*shape])
            )
            self.call(aten.copy_.default, placeholder, whole)
        self.graph.output(tuple(dict.fromkeys([*returned, *self.escaped])))
        self._drop_unread_views()

    def _drop_unread_views(self) -> None:
        """GE spreads operands that ATen takes as they are; what was spread is then read by
        nobody.
        """
        for node in reversed(self.graph.nodes):
            if is_view(node) and not node.users:
                self.graph.erase_node(node)

    def _fills(self, rows: Rows, result: Node) -> bool:
        return bool(rows.placeholder.meta["val"].shape == result.meta["val"].shape)

    def _remarks(self) -> list[str]:
        remarks = [
            "GE operators are read as the ATen calls that mean the same; rounding may "
            "differ in places"
        ]
        if self.boxed:
            remarks.append(
                f"no ATen counterpart here for {_listed(self.boxed)}: opaque, in the "
                "shapes of the dump"
            )
        if self.unmapped:
            remarks.append(f"not carried over: {_listed(self.unmapped)}; their results are unknown")
        if self.lost:
            remarks.append(
                f"left out, because they read results of unknown operators: {self.lost} operators"
            )
        return remarks


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
            edge = next(
                (edge for edge in edges if edge is not None and edge.producer not in done), None
            )
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
