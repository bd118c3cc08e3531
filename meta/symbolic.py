"""Comparing sizes that may be symbolic; none is guarded on or specialised."""

from __future__ import annotations

from typing import Any


def different(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ."""
    return known(a != b)


def known(condition: Any) -> bool:
    """Whether a condition, a bool or a SymBool, holds for every size that there can be."""
    if type(condition) is bool:
        return condition
    from mla_fusion.compat import statically_known_true

    return statically_known_true(condition)


def not_(condition: Any) -> Any:
    if type(condition) is bool:
        return not condition
    import torch

    return torch.sym_not(condition)
