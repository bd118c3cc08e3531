"""Whether the numbers of a norm weight are bfloat16 numbers, whatever its dtype is.

That is seen when a graph is compiled, and holds for that call alone. The note in a node's metadata
decides only whether a graph may be compiled so. :class:`Exact` goes with the packed tensor:
whenever that is made, every number of its source must be in it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# in the meta of an input: True if the numbers of its vector are bfloat16 numbers; absent if the
# tensor was not seen
HOLDS_BFLOAT16 = "mla_fusion_holds_bfloat16"


def survives(numbers: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns True if a dtype holds all the numbers of a tensor."""
    return torch.equal(numbers.to(dtype).to(numbers.dtype), numbers)


@dataclass(frozen=True)
class Exact:
    """The condition that a packed tensor holds the numbers of its only source.

    code, what  code and message of the error if it does not
    """

    code: str
    what: str

    def holds(self, packed: torch.Tensor, source: torch.Tensor) -> bool:
        """Returns True if the condition is met."""
        return bool(torch.isfinite(packed).all()) and survives(source, packed.dtype)
