"""What vectors of a model hold: looked at when a graph is compiled, and shown again by what is
packed of them.

Some facts are a matter of values: a float32 norm weight whose numbers are bfloat16's, a scale that
was repeated for every channel when a checkpoint was loaded. What was seen once holds for that call
alone. So the note (:class:`Numbers`) decides only whether a graph may be compiled so, and
:class:`Exact` goes with the packed tensor: whenever it is made, every number of its source must be
found in it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

NUMBERS = "mla_fusion_numbers"  # in the meta of an input


@dataclass(frozen=True)
class Numbers:
    """Of a vector.

    bfloat16   are all of them bfloat16 numbers?
    one        the one number that all of them are; None where they differ
    """

    bfloat16: bool
    one: float | None

    @classmethod
    def of(cls, vector: torch.Tensor) -> Numbers:
        bfloat16 = bool((vector.to(torch.bfloat16).to(vector.dtype) == vector).all())
        return cls(
            bfloat16,
            vector[0].item() if len(vector) and bool((vector == vector[0]).all()) else None,
        )


def numbers(node: Node) -> Numbers | None:
    """What an input was found to hold; None where nobody has looked."""
    found: Numbers | None = node.meta.get(NUMBERS)
    return found


@dataclass(frozen=True)
class Exact:
    """The dtype of a packed tensor must hold the numbers of its one source.

    code, what   of the error where it does not
    repeated     its one element must be each of them
    inverse      each of them must be the reciprocal of that, rounded to the source's dtype
    """

    code: str
    what: str
    repeated: bool = False
    inverse: bool = False

    def holds(self, packed: torch.Tensor, source: torch.Tensor) -> bool:
        held = packed if self.repeated else source.to(packed.dtype)
        restored = held.float().reciprocal() if self.inverse else held
        return bool(torch.isfinite(packed).all()) and bool(
            (restored.to(source.dtype) == source).all()
        )
