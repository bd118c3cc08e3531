"""Which chip the reference kernels round like: the operator's arguments do not say it, its kernels
differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mla_fusion.meta import SOCS
from mla_fusion.meta.errors import known_name

_current = ContextVar("mla_fusion.reference.chips", default="A3")


@contextmanager
def chip(soc: str) -> Iterator[None]:
    """Reference kernels called inside round as ``soc`` ("A2", "A3", "A5") does; outside they round
    as A3.

    A2 and A3 run the same kernel. On A5 int8 is dequantised per channel first, and dynamic
    quantisation divides by its scale and rounds once, half to even
    (`mla_fusion.reference.formats`); the formats that only A5 has are the same inside and outside.
    Raises ContractError ``soc``.
    """
    token = _current.set(known_name("soc", soc, SOCS))
    try:
        yield
    finally:
        _current.reset(token)


def current_chip() -> str:
    return _current.get()
