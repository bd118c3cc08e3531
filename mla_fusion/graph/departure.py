"""Where a prologue leaves what the kernel computes."""

from __future__ import annotations

from collections.abc import Sequence

from mla_fusion.graph.form import Value

UNKNOWN = "is not known"  # of an operator: what a message says


class Departure(Exception):
    """
    code    of the table of refusals
    detail  what is there in place of what was looked for
    values  at which the graph leaves
    site    products of the prologue
    score   how much of a prologue was found, from 0 to 1
    """

    site: tuple[Value, ...] = ()
    score = 1.0

    def __init__(self, code: str, detail: str, values: Sequence[Value] = ()) -> None:
        super().__init__(f"[{code}] {detail}")
        self.code, self.detail, self.values = code, detail, tuple(values)
