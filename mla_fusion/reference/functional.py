"""An operator that writes its caches as the one that gives out written copies of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta.prolog import Operator


def on_copies(
    operator: Operator, kernel: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., tuple[Tensor, ...]]:
    """``kernel`` on copies of the caches, which come behind its results; inputs are untouched."""

    def functional(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        call = meta.bind(operator.name, args, options)
        given = {name: call[name] for name in operator.written if name in call}
        copies = {n: c.clone() if isinstance(c, Tensor) else c for n, c in given.items()}
        return (*kernel(**call | copies), *copies.values())

    functional.__name__ = operator.functional
    return functional
