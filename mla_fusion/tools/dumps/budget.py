"""Limits the work that reading a dump may cause, whatever the dump says.

A small listing can ask for sizes whose expressions double with each line. Each symbolic size is
therefore weighed when torch first uses it, and each operator is counted. Units are counted, not
seconds, so that the answer is the same on every machine. They are counted where torch works for a
dump; elsewhere nothing is limited.
"""

from __future__ import annotations

import builtins
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import comb
from typing import Any

import sympy

from mla_fusion.compat import FakeTensorMode
from mla_fusion.tools.dumps import names
from mla_fusion.tools.dumps.model import NotRebuilt

MOST_TERMS = 64  # of one size when it is multiplied out; torch's own sizes have a few
MOST_DEGREE = 64  # of one size, as a polynomial
UNITS = 6_000  # a size that was not met before is one and one for each term; a call is one
UNITS_PER_OPERATOR = 2  # a long listing may cost more


_LARGEST = 1 << 64  # of a number in a size: memory has no more bytes


class TooCostly(BaseException):
    """Not an Exception, because torch and sympy catch those and try something else."""


class Budget:
    """What one dump has cost so far. ``line``: of the operator that is read, 0 while the pass looks
    at all.
    """

    def __init__(self, operators: int) -> None:
        self.line = 0
        self.why = ""  # it was refused; where torch lost the exception, this tells it
        self._limit = max(UNITS, operators * UNITS_PER_OPERATOR)
        self._spent = Counter[int]()  # by line
        self._known = set[Any]()

    def refuse(self, why: str) -> None:
        """Raises TooCostly, and again whenever the budget is asked."""
        self.why = self.why or why
        self.check()

    @property
    def place(self) -> int:
        """The line that is being read, or else the one that cost most."""
        costs = {line: units for line, units in self._spent.items() if line}
        return self.line or max(costs, key=costs.__getitem__, default=0)

    def check(self) -> None:
        if self.why:
            raise TooCostly(self.why)

    def spend(self, units: int) -> None:
        self.check()
        self._spent[self.line] += units
        if self._spent.total() > self._limit:
            self.refuse(f"its sizes take more than {self._limit:,} steps to work out")

    def weigh(self, size: Any) -> None:
        """Count an expression at which torch looks."""
        if size in self._known:
            return self.check()
        terms, degree = measured(size)
        if terms > MOST_TERMS or degree > MOST_DEGREE:
            most = f"{MOST_TERMS} terms, a degree above {MOST_DEGREE} or a number above 2**64"
            self.refuse(f"a size has more than {most}")
        self._known.add(size)
        return self.spend(1 + terms)


def measured(size: Any) -> tuple[int, int]:
    """Terms of an expression when it is multiplied out, and its degree; both stop a little above
    the limits.

    What stands in a quotient, a remainder or a maximum counts twice, because sympy compares it with
    its neighbours.
    """
    most = max(MOST_TERMS, MOST_DEGREE) + 1
    if isinstance(size, sympy.Integer) and abs(size) > _LARGEST:
        return most, most
    if not getattr(size, "args", ()):
        return 1, 0 if getattr(size, "is_number", True) else 1
    if isinstance(size, sympy.Pow):
        (terms, degree), exponent = measured(size.args[0]), size.args[1]
        if not isinstance(exponent, sympy.Integer) or abs(exponent) > most:
            return most, most
        power = abs(int(exponent))
        return min(most, comb(terms + power - 1, terms - 1)), min(most, degree * power)
    is_product = isinstance(size, sympy.Mul)
    terms, degree = int(is_product), 0
    for part in size.args:
        more, higher = measured(part)
        if is_product:
            terms, degree = terms * more, degree + higher
        else:
            terms += more if isinstance(size, sympy.Add) else 2 * more
            degree = max(degree, higher)
        if terms > most or degree > most:
            return most, most
    return terms, degree


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


def weigh(size: Any) -> Any:
    """The expression; it is counted where torch works for a dump."""
    current = _CURRENT.get()
    if current is not None:
        current.weigh(size)
    return size


class Mode(FakeTensorMode):
    """Counts the operators that torch calls, also those of which it makes another, and refuses long
    results.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        current = _CURRENT.get()
        if current is not None:
            current.spend(1)
            if not names.bounded(func, args, kwargs or {}):
                current.refuse(f"{func} has too many arguments or results")
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class Refused(ValueError):
    """Torch takes no such operands."""


def called(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call without storage. Raises Refused for whatever reason torch refuses it."""
    current = _CURRENT.get()
    try:
        with mode:
            return target(*args, **kwargs)
    except Exception as error:
        if current is not None:
            current.check()
        end_if_interrupted(error)
        raise Refused(f"{type(error).__name__}: {error}".splitlines()[0]) from error


# packages whose errors are refusals
_REFUSE = {"builtins", "torch", "torch_npu", "sympy", "numpy", "mla_fusion"}
# torch's C++ makes an error of its own of what Python raised
_HIDDEN = re.compile(r'(?:^|with error ")(\w+)(?=:|$)')


def end_if_interrupted(error: Exception) -> None:
    """Raise what a signal handler raised, a time limit say: it only looks like an answer of the
    call that it met.
    """
    name = found[1] if (found := _HIDDEN.search(str(error))) else ""
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, (KeyboardInterrupt, SystemExit, OSError)):
        raise kind(*error.args) from error
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] not in _REFUSE:
        raise error


@contextmanager
def limited(operators: int) -> Iterator[Budget]:
    """Work for a dump of so many operators. Raises NotRebuilt where it costs too much. The
    outermost one counts.
    """
    outer = _CURRENT.get()
    if outer is not None:
        yield outer
        return
    budget = Budget(operators)
    token = _CURRENT.set(budget)
    try:
        with _quiet():
            yield budget
            budget.check()
    except TooCostly as error:
        raise NotRebuilt(f"line {budget.place}: too costly to read: {error}") from None
    finally:
        _CURRENT.reset(token)


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs in this thread when it refuses a call is dropped: the reader says so
    itself.
    """
    thread = threading.get_ident()
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.partition(".")[0] == "torch"
    ]

    def drop(record: logging.LogRecord) -> bool:
        return record.thread != thread

    for logger in loggers:
        logger.addFilter(drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)
