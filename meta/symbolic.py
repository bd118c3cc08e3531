"""Comparing sizes that may be symbolic."""

from __future__ import annotations

from typing import Any


def different(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ; a symbolic one is neither guarded on nor
    specialised.
    """
    if type(a) is int and type(b) is int:
        return a != b
    from mla_fusion.compat import statically_known_true

    return statically_known_true(a != b)
