"""One mistake of a hand-written call, and the change of its arguments that mends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mla_fusion.tools.by_hand.calls import After, Call, Change

QUERY, KV, KR = "query", "kv", "kr"  # what a mistake can alter: the query, and rows of either cache


@dataclass(frozen=True)
class Repair:
    """``code`` is stable; ``text`` says what is wrong and what is right; ``argument`` is what it is
    about.
    """

    code: str
    text: str
    argument: str
    touches: frozenset[str]
    change: Change = lambda call: {}
    after: After | None = None
    place: int | None = None  # of the call that it mends; None: of every call

    def at(self, place: int) -> Repair:
        def change(call: Call) -> dict[str, Any]:
            return self.change(call) if call.place == place else {}

        def after(call: Call, results: Any) -> None:
            if call.place == place and self.after is not None:
                self.after(call, results)

        return Repair(
            self.code,
            self.text,
            self.argument,
            self.touches,
            change,
            after if self.after else None,
            place,
        )


def instead(name: str, value: Any) -> Change:
    """Give another value for one argument."""
    return lambda call: {name: value}


def on(name: str, function: Callable[[Tensor], Tensor | None]) -> Change:
    """Apply to one tensor argument, where it is given and of the right shape."""

    def change(call: Call) -> dict[str, Any]:
        value = call.arguments.get(name)
        made = function(value) if isinstance(value, Tensor) else None
        return {} if made is None else {name: made.contiguous()}

    return change


def both(*changes: Change) -> Change:
    def change(call: Call) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for one in changes:
            made |= one(call)
        return made

    return change


def touching(*what: str) -> frozenset[str]:
    return frozenset(what)
