"""Ask the operator's own specification whether the planned call would be taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import FakeTensorMode, OpOverload, guard, hint_of, schema_of
from mla_fusion.config import Config
from mla_fusion.emit.target import Target
from mla_fusion.emit.targets import target_of
from mla_fusion.fx.build import OfTensors, Recipe, fake_mode_of, faked
from mla_fusion.fx.held import Exact
from mla_fusion.meta import ContractError
from mla_fusion.meta.binder import Undecided
from mla_fusion.plan.plan import Plan
from mla_fusion.report.rejection import Refuse


def ask(plan: Plan, config: Config, graph: Graph) -> tuple[str, ...]:
    """What the call assumes of sizes that the graph leaves open.

    Raises ``Refuse("contract:<code>")`` with the specification's own message.
    """
    target = target_of(plan)
    builder = OnPaper(graph, target)
    given = builder.arguments(lambda b: target.call(b, plan))
    try:
        open_sizes = target.examine(config.machine, given)
        lines = [line for one in open_sizes if (line := assumed(one, target.called))]
    except ContractError as error:
        culprit = builder.read_by(given.get(error.argument)) or plan.candidate.down.node
        detail = f"{error.argument}: expected {error.expected}, found {error.found}"
        raise Refuse(f"contract:{error.code}", detail, (culprit,)) from None
    target.ask(plan, config)
    return tuple(lines)


def assumed(one: Undecided, operator: str) -> str:
    """What is assumed of a size that the operator takes for some of its values only; "" where the
    compiler guards that, so that the graph is compiled anew for the others.

    Raises ContractError where the operator does not take the size that the graph was traced with.
    """
    condition = one.sizes.condition(one.size)
    guarded = guard(condition)
    if (hint_of(condition) if guarded is None else guarded) is False:
        expected = f"{one.axis} {one.sizes}"
        found = f"{one.axis} {hint_of(one.size)}, when the graph was traced"
        raise ContractError(f"dims.{one.axis.lower()}", one.argument, expected, found)
    if guarded:
        return ""
    return f"{one.axis} ({one.size}) is {one.sizes}: {operator} takes no other"


class _Called(Exception):
    """The kernel's call has been reached. ``given``: its arguments by name."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


class OnPaper(OfTensors):
    """Makes a call, up to the operator itself, on the values that the nodes of a graph are said to
    have: nothing is computed.
    """

    def __init__(self, graph: Graph, target: Target[Any]) -> None:
        self._mode, self._target = fake_mode_of(graph) or FakeTensorMode(), target
        # what each value was first read from; the values are held so that no id comes twice
        self._read: dict[int, tuple[torch.Tensor, Node | None]] = {}

    def arguments(self, recipe: Recipe) -> dict[str, Any]:
        """What the operator is given, by name."""
        try:
            with torch.no_grad(), self._mode:
                recipe(self)
        except _Called as called:
            return called.given
        raise AssertionError(f"no call of {self._target.called}")

    def read_by(self, value: Any) -> Node | None:
        """The node that an argument was made of, the first of several."""
        if isinstance(value, (list, tuple)):
            return next(filter(None, map(self.read_by, value)), None)
        return self._read.get(id(value), (value, None))[1]

    def _made(self, value: torch.Tensor, of: Node | None) -> torch.Tensor:
        self._read[id(value)] = value, of
        return value

    def value(self, node: Node) -> torch.Tensor:
        return self._made(faked(node.meta["val"], self._mode), node)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(op, OpOverload) and self._target.is_called_by(op):
            accepted = [one.name for one in schema_of(op).arguments if not one.is_out]
            given = dict(zip(accepted, args, strict=False)) | kwargs
            raise _Called({name: given[name] for name in accepted if name in given})
        return self._made(op(*args, **kwargs), self.read_by(args))

    def packed(
        self, name: str, recipe: Recipe, leaves: Sequence[Node], exact: Exact | None = None
    ) -> torch.Tensor:
        made = recipe(self)  # and laid out as the kernel reads it
        return self._made(made.new_empty(made.shape), self.read_by(made))

    def sizes(self, shape: Sequence[Any], of: Any = None) -> list[Any]:
        return list(shape)

    def constant(self, numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((len(numbers),), dtype=torch.int64)
