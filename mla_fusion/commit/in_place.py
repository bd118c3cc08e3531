"""Steps that change memory in place, judged for each prologue: do they change what its call would
read?

A functional graph has such steps at its end alone, where each input that was written gets its new
value. Graphs that were never made functional (``torch.export(m).module()``, make_fx) may hold them
anywhere, and then what a reader sees depends on the order in which nodes stand, which moving a
computation into one call would change.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from torch.fx import Node

from mla_fusion.commit.region import Region
from mla_fusion.fx.in_place import changed, is_closing, memory_of, root
from mla_fusion.fx.kinds import operator_of
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import INPUTS, input_of, upward, views_and_writes
from mla_fusion.plan.plan import Plan
from mla_fusion.report.rejection import Refuse


class InPlaceSteps:
    """Those of one graph."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._on: dict[object, list[tuple[Node, Node]]] = {}  # by the memory: step, its target
        for step in view.effects:
            if operator_of(step).effect:
                for target in changed(step):
                    self._on.setdefault(memory_of(target), []).append((step, target))

    @cached_property
    def _first(self) -> Node | None:
        return min((step for steps in self._on.values() for step, _ in steps), default=None)

    @cached_property
    def _between_reads(self) -> dict[object, list[tuple[Node, Node]]]:
        """By the memory, the steps that do not just end the graph: of a functionalised one there
        are none.
        """
        found = {
            memory: [
                (step, target) for step, target in steps if not self._is_epilogue(step, memory)
            ]
            for memory, steps in self._on.items()
        }
        return {memory: steps for memory, steps in found.items() if steps}

    def _is_epilogue(self, step: Node, memory: object) -> bool:
        """Is it a ``copy_`` into an input, after which nothing but such copies and the output
        stands to read it?
        """
        if not is_closing(step) or not all(root(node).op in INPUTS for node in changed(step)):
            return False
        later = self._view.nodes[self._view.position[step] + 1 : self._closing]
        return not any(
            memory_of(node) == memory or memory in map(memory_of, node.all_input_nodes)
            for node in later
            if not is_closing(node)
        )

    @cached_property
    def _closing(self) -> int:
        """Where the copies and the output begin behind which nothing else stands."""
        nodes = self._view.nodes
        others = (at for at in reversed(range(len(nodes))) if not is_closing(nodes[at]))
        return next(others, -1) + 1

    def judge(self, plan: Plan, region: Region, point: Node, ahead: Iterable[Node]) -> None:
        """Raise ``Refuse("graph.not_functional")`` where a step changes memory that the region or
        the call reads, or what is to move ``ahead`` of the call. What else the call is given is
        computed where it was.

        Two kinds of steps do no harm: those after which nobody reads that memory but other such
        steps and the output, if the call stands before them (at ``point``), and the writes by which
        the model itself puts the new rows into the caches of the plan.
        """
        if not self._between_reads and (self._first is None or point < self._first):
            return
        own: set[Node] | None = None
        moved = [read for node in ahead for read in (node, *node.all_input_nodes)]
        for memory in dict.fromkeys(map(memory_of, (*region.leaves, *region.nodes, *moved))):
            harmful = self._between_reads.get(memory, ())
            for step, target in self._on.get(memory, ()):
                if (step, target) not in harmful and not step < point:
                    continue
                own = _own_writes(plan) if own is None else own
                if step not in own:
                    raise _changes(step, target)

    def behind(self, reason: Refuse, nodes: Iterable[Node]) -> Refuse:
        """The reason, or what comes first: that one of the nodes at fault changes memory, or holds
        a value that a step changes. A graph says of such a value only what it was before.

        nodes  at fault where the reason names none
        """
        for node in reason.nodes or nodes:
            for step, target in self._between_reads.get(memory_of(node), ()):
                if step is node or root(target).op not in INPUTS:
                    return _changes(step, target)
        return reason


def _changes(step: Node, target: Node) -> Refuse:
    return Refuse("graph.not_functional", f"{step.name} changes {target.name}", (step, target))


def _own_writes(plan: Plan) -> set[Node]:
    """The model's writes into the plan's caches: what the call's results take the place of."""
    found = set()
    for item in plan.replacements:
        steps = (node for node in upward(item.node, views_and_writes) if operator_of(node).mutates)
        found |= {
            step
            for step in steps
            if (target := input_of(step)) is not None and root(target) in plan.caches.inputs
        }
    return found
