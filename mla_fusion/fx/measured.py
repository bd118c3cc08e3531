"""How often each fact is looked for and each rule applied, how often it answers, and how long that
takes.

Kept only inside :func:`measuring`; elsewhere a measured function costs one look-up more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Tally:
    """calls; hits: facts that were found, or rules that refused; seconds: wall time of all
    calls.
    """

    calls: int = 0
    hits: int = 0
    seconds: float = 0.0


_tallies: ContextVar[dict[str, Tally] | None] = ContextVar("mla_fusion_tallies", default=None)


@contextlib.contextmanager
def measuring() -> Iterator[dict[str, Tally]]:
    """Tallies of what is called meanwhile, by ``room.file.function``."""
    found: dict[str, Tally] = {}
    token = _tallies.set(found)
    try:
        yield found
    finally:
        _tallies.reset(token)


def measured(function: Callable[P, T]) -> Callable[P, T]:
    """The function, tallied: a hit is a result that holds something, or an exception (a rule that
    refuses).
    """
    name = f"{function.__module__.removeprefix('mla_fusion.')}.{function.__name__.lstrip('_')}"

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        tallies = _tallies.get()
        if tallies is None:
            return function(*args, **kwargs)
        tally = tallies.setdefault(name, Tally())
        started, hit = perf_counter(), True
        try:
            result = function(*args, **kwargs)
            hit = bool(result) and not isinstance(result, str)
            return result
        finally:
            tally.calls += 1
            tally.hits += hit
            tally.seconds += perf_counter() - started

    return call
