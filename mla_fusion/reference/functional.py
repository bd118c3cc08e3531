"""Kernels as functions with the signature of their operator, and kernels that write their caches as
those that give out written copies of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta.prolog import Operator

Kernel = Callable[..., tuple[Tensor, ...]]


def kernel(operator: Operator) -> Callable[[Callable[[Any], tuple[Tensor, ...]]], Kernel]:
    """A function of the operator's own arguments, made of one that has all of them by name, schema
    defaults filled in.
    """
    given = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in operator.required]
    named = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default)
        for name, default in operator.defaults.items()
    ]

    def of(compute: Callable[[Any], tuple[Tensor, ...]]) -> Kernel:
        @wraps(compute)
        def call(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            arguments = meta.bind(operator.name, args, options)
            return compute(SimpleNamespace(**meta.complete(operator.name, arguments)))

        vars(call)["__signature__"] = Signature([*given, *named])
        return call

    return of


def on_copies(operator: Operator, write: Kernel) -> Kernel:
    """``write`` on copies of the caches, which come behind its results; inputs are untouched."""

    def functional(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        call = meta.bind(operator.name, args, options)
        given = {name: call[name] for name in operator.written if name in call}
        copies = {n: c.clone() if isinstance(c, Tensor) else c for n, c in given.items()}
        return (*write(**call | copies), *copies.values())

    functional.__name__ = operator.functional
    return functional
