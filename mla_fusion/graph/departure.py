"""The exception with which a stage of the pass gives up on a prologue.

``propose/``, ``exact/`` and ``plan/`` raise it; ``observe/record.py`` makes a ``Rejection`` of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mla_fusion.graph.form import Value

UNKNOWN = "is not known"  # the words of a message about an operator that the pass cannot read


class Departure(Exception):
    """Why a prologue is not fused.

    code    a code of the table of rejections
    detail  what the graph has there, and what the kernel has instead
    values  the Values at fault
    site    the products of the prologue
    score   how much of a prologue was recognised, from 0 to 1
    """

    site: tuple[Value, ...] = ()
    score = 1.0

    def __init__(self, code: str, detail: str, values: Sequence[Value] = ()) -> None:
        super().__init__(f"[{code}] {detail}")
        self.code, self.detail, self.values = code, detail, tuple(values)
