"""What pairs need of one of the two graphs, and how it runs on what was drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fusion.fx.kinds import attribute
from mla_fusion.fx.sizes import Binding, same_shape
from mla_fusion.meta.number_formats import ELEMENTS
from mla_fusion.operators.known import shape_of, value_of
from mla_fusion.witness.draws import WIDE, changes
from mla_fusion.witness.interpreter import Interpreter, cone_of, dependent, reshaped, widened

_ONE_BYTE = frozenset((torch.int8, torch.uint8, *ELEMENTS, torch.float8_e8m0fnu))


class Side:
    """
    nodes   from leaves to what is wanted, in order
    leaves  what is drawn, and for which leaf of the original graph
    of_x    nodes and leaves that are x, or computed from it
    """

    def __init__(
        self, wanted: Iterable[Node], stands_for: Mapping[Node, Node], roles: Mapping[Node, str]
    ) -> None:
        """``stands_for``: of each leaf, itself in the original graph. An attribute stands for the
        one of its name that has a role; another one holds its own tensor.
        """
        self._wanted = list(wanted)
        self.nodes, found = cone_of(self._wanted, stands_for)
        named = {node.target: node for node in roles if node.op == "get_attr"}
        of = {node: stands_for.get(node) or named.get(node.target) for node in found}
        self.leaves = {node: leaf for node, leaf in of.items() if leaf is not None}
        self._held = {node: _held(node) for node, leaf in of.items() if leaf is None}
        self.of_x = self._above(lambda leaf: roles[leaf] == "x")
        self._changing = self._above(lambda leaf: changes(leaf, roles[leaf]))
        self._runs: dict[bool, Interpreter] = {}
        self._known: dict[tuple[bool, str], dict[Node, Any]] = {}

    def _above(self, is_such: Any) -> set[Node]:
        return dependent(self.nodes, [node for node, leaf in self.leaves.items() if is_such(leaf)])

    @property
    def rounds(self) -> bool:
        """Does it hold numbers of one byte, which float64 rounds too, or pieces of 32 bytes?"""
        values = (value_of(node) for node in (*self.leaves, *self.nodes))
        held = any(isinstance(one, Tensor) and one.dtype in _ONE_BYTE for one in values)
        return held or any("PA_NZ" in node.kwargs.values() for node in self.nodes)

    def run(
        self,
        drawn: Mapping[Node, Any],
        kind: str,
        binding: Binding,
        wide: bool = False,
        wanted: Iterable[Node] = (),
        others: Mapping[Node, Any] | None = None,
    ) -> dict[Node, Any]:
        """The values of ``wanted``, by default all, and of what they are computed from. Raises
        ``Unrunnable``.

        drawn   by leaves of the original graph
        wide    in float64
        others  values of leaves and nodes that are not as drawn or computed
        """
        given = dict(self._held)
        for node, leaf in self.leaves.items():
            given[node] = drawn[leaf]
            is_tensor = node is not leaf and isinstance(drawn[leaf], Tensor)
            if is_tensor and not same_shape(shape_of(node), shape_of(leaf)):
                given[node] = reshaped(drawn[leaf], binding.shape(shape_of(node)))
        if wide:
            given = {node: widened(value) for node, value in given.items()}
        if wide not in self._runs:
            self._runs[wide] = Interpreter(self.nodes, self.of_x, self._changing, binding, wide)
        weights = kind if kind in ("outliers", *WIDE) else ""
        known = self._known.setdefault((wide, weights), {})
        given.update(others or {})
        return self._runs[wide].run(given, known, wanted or self._wanted)


def _held(node: Node) -> Any:
    value = attribute(node)
    return value.detach().cpu() if isinstance(value, Tensor) else value
