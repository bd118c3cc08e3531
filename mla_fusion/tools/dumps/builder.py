"""What both rebuilders of a graph do: nodes from operators, each with its value and source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from torch.fx import Graph, GraphModule, Node

from mla_fusion.tools.dumps import Dump, Operator, budget
from mla_fusion.tools.dumps.symbols import Tensors


class Builder(ABC):
    """Reads the operators one by one. ``unmapped`` counts those that have no counterpart here."""

    BOX = "call_method", "unknown"  # of an unknown operator: what every walk of the pass stops at

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.tensors = Tensors()
        self.graph = Graph()
        self.root: dict[str, Any] = {}  # the attributes of the module, by their paths
        self.unmapped: Counter[str] = Counter()

    def graph_module(self) -> tuple[GraphModule, list[str]]:
        """The graph, and remarks on what the dump does not tell. Raises NotRebuilt."""
        with budget.limited(len(self.dump.operators)) as spent:
            for operator in self.ordered():
                spent.line = operator.line
                self.take(operator)
            self.finish()
        return GraphModule(self.root, self.graph), self.remarks()

    @abstractmethod
    def ordered(self) -> list[Operator]:
        """The operators, each behind what it reads. Raises NotRebuilt where there is no such
        graph.
        """

    @abstractmethod
    def take(self, operator: Operator) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def remarks(self) -> list[str]: ...

    def add(
        self,
        operator: Operator | None,
        kind: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        value: Any = None,
    ) -> Node:
        """A node, which has the name and the source of ``operator``."""
        name = operator.name if operator is not None else ""
        node = self.graph.create_node(kind, target, args, kwargs, name=name or None)
        if value is not None:
            node.meta["val"] = value
        if operator is not None and operator.stack_trace:
            node.meta["stack_trace"] = operator.stack_trace
        return node
