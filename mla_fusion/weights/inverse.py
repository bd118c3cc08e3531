"""How a parameter is read, as a view, out of its packed weight.

Most packings only lay a weight out anew (transposed, heads merged, in FRACTAL_NZ). The parameter
can then be a view of the packed tensor, with the same shape and values and other strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from mla_fusion.compat import storage_id
from mla_fusion.fx.kinds import word

# Each gives the very elements of its argument, whose place in the result follows from shapes alone.
_VIEWS = frozenset(
    """
    t transpose permute view _unsafe_view reshape
    unsqueeze squeeze alias detach
    """.split()
)
# other memory, the same elements in the same places
_COPIES = frozenset(["clone", "npu_format_cast"])


_ND = 2  # the storage format of plain memory, as npu_format_cast numbers them


@dataclass(frozen=True)
class Inverse:
    """How a parameter is read out of its packed weight."""

    order: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, packed: Tensor) -> Tensor:
        return packed.permute(self.order).view(self.shape)

    def apart(self, packed: Tensor) -> Tensor:
        """The parameter in contiguous memory of its own."""
        return self(torch.ops.npu.npu_format_cast(packed, _ND)).contiguous()


def inverse(program: GraphModule, parameter: Tensor) -> Inverse | None:
    """The inverse of a packing program for a parameter like this (it may be fake); None where it is
    no view.

    The program's views are taken on a contiguous stand-in. Their strides tell which axis of the
    result holds which stretch of the parameter: in descending order they are the parameter, if
    nothing was left out or repeated.
    """
    leaves = [node for node in program.graph.nodes if node.op == "placeholder"]
    steps = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if len(leaves) != 1 or any(word(step) not in _VIEWS | _COPIES for step in steps):
        return None
    leaf = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    viewed: Tensor = Without(program).run(leaf)
    order = tuple(sorted(range(viewed.dim()), key=viewed.stride, reverse=True))
    whole = storage_id(viewed) == storage_id(leaf) and viewed.permute(order).is_contiguous()
    if not whole or (viewed.dtype, viewed.numel()) != (leaf.dtype, leaf.numel()):
        return None
    found = Inverse(order, tuple(parameter.shape))
    try:
        found(torch.empty(viewed.shape, device="meta", dtype=torch.float32))
    except RuntimeError:  # axes of the parameter are spread over the packed weight
        return None
    return found


class Without(Interpreter):
    """Runs a packing program without its copies, or some of them."""

    def __init__(self, program: GraphModule, left_out: frozenset[str] = _COPIES) -> None:
        super().__init__(program)
        self._left_out = left_out

    def run_node(self, n: Any) -> Any:
        if word(n) in self._left_out:
            return self.env[n.args[0]]
        return super().run_node(n)
