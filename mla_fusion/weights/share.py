"""Parameters that live in their packed weight: one memory, read by the kernel and, as a view, by
everybody else.

Most packings only lay a weight out anew (transposed, heads merged, in FRACTAL_NZ). The parameter is
then a view of the packed tensor, so that it may give up its own memory: same shape and values,
other strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from mla_fusion.compat import holders, is_view, storage_id
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
    whole = _same_memory(viewed, leaf) and viewed.permute(order).is_contiguous()
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


def re_express(parameter: Tensor, packed: Tensor, view: Inverse) -> bool:
    """Let the parameter hold its values in ``packed`` and free its own memory; False where that is
    not its alone.
    """
    if _same_memory(parameter, packed) or shared_memory(parameter):
        return False
    values = view(packed)
    parameter.data = values  # the last step: if anything fails, the parameter is as it was
    return True


def shared_memory(tensor: Tensor) -> str:
    """Why a tensor may not give up its memory; "" for a parameter at rest whose memory nobody else
    reads.

    Tied weights, slices of a merged weight and a state dict that somebody holds share the storage,
    so it has more holders than that of a fresh tensor. A gradient tells of a training in progress,
    where optimisers keep state in the parameter's layout.
    """
    storage = tensor.untyped_storage()
    if not isinstance(tensor, torch.nn.Parameter):
        return "it is not a parameter"
    if tensor.is_inference():
        return "it was made under inference_mode"
    if tensor.grad is not None:
        return "it has a gradient: an optimizer may keep state in its layout"
    if is_view(tensor) or storage.nbytes() != tensor.nbytes:
        return "it is a part of other memory, such as a flat buffer"
    if holders(tensor) != holders(tensor.new_empty(0)):
        return "something else holds its memory: a tied weight, a state dict in a variable"
    return ""


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return storage_id(first) == storage_id(second)
