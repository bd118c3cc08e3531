"""Makes kernels callable as their operators are, and kernels that write caches functional."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta.prolog import Operator

Kernel = Callable[..., tuple[Tensor, ...]]


def kernel(operator: Operator) -> Callable[[Callable[[Any], tuple[Tensor, ...]]], Kernel]:
    """Returns a decorator that gives a function the signature of the operator.

    The decorated function has one argument, a namespace of all arguments of the operator with the
    defaults of its schema.
    """
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in operator.required]
    for name, default in operator.defaults.items():
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))

    def decorate(compute: Callable[[Any], tuple[Tensor, ...]]) -> Kernel:
        @wraps(compute)
        def call(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            arguments = meta.bind(operator.name, args, options)
            return compute(SimpleNamespace(**meta.complete(operator.name, arguments)))

        vars(call)["__signature__"] = Signature(parameters)
        return call

    return decorate


def clones(arguments: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
    """Returns copies of the tensors among the arguments of these names."""
    present = [name for name in names if isinstance(arguments.get(name), Tensor)]
    return {name: arguments[name].clone() for name in present}


def on_copies(operator: Operator, write: Kernel) -> Kernel:
    """Returns a kernel that calls ``write`` on copies of the caches and returns the copies behind
    its results. The inputs stay as they are.
    """

    def functional(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        arguments = meta.bind(operator.name, args, options)
        caches = clones(arguments, operator.written)
        return (*write(**arguments | caches), *caches.values())

    functional.__name__ = operator.functional
    return functional
