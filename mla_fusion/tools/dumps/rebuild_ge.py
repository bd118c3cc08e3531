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
from collections.abc import Sequence

from torch.fx import Node

from mla_fusion.fx.kinds import is_view
from mla_fusion.operators.known import shape_of
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value, ge_operators
from mla_fusion.tools.dumps.ge_values import OperatorReader, Result, Rows, Unmapped
from mla_fusion.tools.dumps.model import NotRebuilt

_INPUTS = ("Data", "RefData")


class Rebuilder(OperatorReader):
    def __init__(self, dump: Dump) -> None:
        super().__init__(dump)
        self.lost = 0
        self.escaped: dict[Node, None] = {}  # read by something that is not in the graph
        self._outputs: list[Edge] = []

    def ordered(self) -> list[Operator]:
        """Inputs first. Raises NotRebuilt for a graph without any, and for a cycle."""
        inputs = list(self.dump.of_type(*_INPUTS))
        if not inputs:
            raise NotRebuilt("no Data of the dump has a shape")
        ordered = self.dump.ordered
        if len(ordered) < len(self.dump.operators):
            left = {*self.dump.operators} - {*ordered}
            operator = next(one for one in self.dump.operators if one in left)
            raise NotRebuilt(f"line {operator.line}: {operator.name} is part of a cycle")
        return inputs + [operator for operator in ordered if operator.type not in _INPUTS]

    def take(self, operator: Operator) -> None:
        if operator.type in _INPUTS:
            self._placeholder(operator)
        elif operator.type == "NetOutput":
            self._outputs = [edge for _, edge in operator.reads if edge.index >= 0]
        else:
            found = self._converted(operator)
            if not found:
                self._escape(operator)
            for index, result in enumerate(found):
                self.results[Edge(operator.name, index)] = result

    def _placeholder(self, operator: Operator) -> None:
        value = operator.output
        named = tuple(
            f"{operator.name}_{place}" if dim == -1 else dim
            for place, dim in enumerate(value.shape or ())
        )
        tensor = self.tensors.of(Value(value.dtype, None if value.shape is None else named))
        if tensor is None:
            raise NotRebuilt(
                f"line {operator.line}: the dump does not tell dtype and shape of {operator.name}"
            )
        # GE's names may be no identifiers
        node = self.graph.placeholder(re.sub(r"\W|^(?=\d)", "_", operator.name))
        node.meta["val"] = tensor
        self.rows[node] = Rows(node)
        self.results[Edge(operator.name)] = node

    def _converted(self, operator: Operator) -> Sequence[Result]:
        """Its results; none where it is not carried over."""
        self.operator = operator
        try:
            return ge_operators.convert(self)
        # of another version, or damaged
        except (Unmapped, TypeError, ValueError, AttributeError, ArithmeticError):
            self.unmapped[operator.type] += 1
        except LookupError:  # an argument is unknown, or absent
            self.lost += 1
        return ()

    def _escape(self, operator: Operator) -> None:
        """What an operator outside the graph reads must stay readable: the graph returns it."""
        for edge in operator.inputs:
            result = self.results.get(edge)
            if isinstance(result, Node) and result.op != "placeholder":
                self.escaped[result] = None

    def finish(self) -> None:
        """Caches that torchair writes back are graph results of their own: those become writes
        again.
        """
        self.operator = Operator("", "")
        returned = []
        for edge in self._outputs:
            result = self.results.get(edge)
            if not isinstance(result, Node):
                continue
            rows = self.rows.get(result)
            shape = shape_of(result)
            if rows is not None and rows.written and shape_of(rows.placeholder) == shape:
                self.written.setdefault(rows.placeholder, result)
            else:
                returned.append(result)
        for placeholder, result in self.written.items():
            shape = shape_of(placeholder)
            if shape_of(result) != shape:
                result = self.call("aten.reshape.default", result, [*shape])
            self.call("aten.copy_.default", placeholder, result)
        self.graph.output(tuple(dict.fromkeys([*returned, *self.escaped])))
        # GE spreads operands that ATen takes as they are; what was spread is read by nobody
        for node in reversed(self.graph.nodes):
            if is_view(node) and not node.users:
                self.graph.erase_node(node)

    def remarks(self) -> list[str]:
        told = [
            "GE operators are read as the ATen calls that mean the same; rounding may differ in "
            "places"
        ]
        if self.boxed:
            told.append(
                f"no ATen counterpart here for {_listed(self.boxed)}: opaque, in the shapes of the "
                "dump"
            )
        if self.unmapped:
            told.append(f"not carried over: {_listed(self.unmapped)}; their results are unknown")
        if self.lost:
            told.append(
                f"left out, because they read results of unknown operators: {self.lost} operators"
            )
        return told


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())
