"""Facts about the numbers of norm weights and scales: all are bfloat16 numbers, or all are equal.

Such a fact is seen when a graph is compiled, and holds for that call alone. The note in a node's
metadata (:class:`Numbers`) decides only whether a graph may be compiled so. :class:`Exact` goes
with the packed tensor: whenever that is made, every number of its source must be in it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

NUMBERS = "mla_fusion_numbers"  # in the meta of an input


@dataclass(frozen=True)
class Numbers:
    """What is known of the numbers of a vector.

    bfloat16  True if all of them are bfloat16 numbers
    one       the number that all of them are; None if they differ
    """

    bfloat16: bool
    one: float | None

    @classmethod
    def of(cls, vector: torch.Tensor) -> Numbers:
        """Returns the facts about a tensor."""
        is_bfloat16 = bool((vector.to(torch.bfloat16).to(vector.dtype) == vector).all())
        is_repeated = len(vector) > 0 and bool((vector == vector[0]).all())
        return cls(is_bfloat16, vector[0].item() if is_repeated else None)


def numbers(node: Node) -> Numbers | None:
    """Returns the note on an input; None if its tensor was not seen."""
    note: Numbers | None = node.meta.get(NUMBERS)
    return note


@dataclass(frozen=True)
class Exact:
    """The condition that a packed tensor holds the numbers of its only source.

    code, what  code and message of the error if it does not
    repeated    True: its only element must be each of them
    inverse     True: each of them must be the reciprocal of that, rounded to the source's dtype
    """

    code: str
    what: str
    repeated: bool = False
    inverse: bool = False

    def holds(self, packed: torch.Tensor, source: torch.Tensor) -> bool:
        """Returns True if the condition is met."""
        numbers = packed if self.repeated else source.to(packed.dtype)
        restored = numbers.float().reciprocal() if self.inverse else numbers
        return bool(torch.isfinite(packed).all()) and bool(
            (restored.to(source.dtype) == source).all()
        )
