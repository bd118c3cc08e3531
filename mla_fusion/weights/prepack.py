"""Lays parameters out as the kernel reads them, and keeps them so. Parameters and buffers of which
copies are packed are kept in their memory.

A packed weight is its parameter's memory: other code reads it by other strides, and an update of
the parameter is an update of the packed weight. The module that holds the parameter is known here,
until it dies. A copy of a module has parameters of its own with the same strides, which are not
known here.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from mla_fusion.compat import holders, is_view, storage_id
from mla_fusion.fx.kinds import word
from mla_fusion.modes import compile_lock, is_plain, outside_modes
from mla_fusion.weights import cache
from mla_fusion.weights.source import place

log = logging.getLogger("mla_fusion")

# the result holds every element of the argument, at a place that follows from shapes alone
_VIEWS = frozenset(
    """
    t transpose permute view _unsafe_view reshape
    unsqueeze squeeze alias detach
    """.split()
)
_CAST = "npu_format_cast"
_ND, _NZ = 2, 29  # its formats: memory in the order of axes, and FRACTAL_NZ
# other memory, the same elements in the same places
_COPIES = frozenset(["clone", _CAST])
_OTHER_FORM = (
    "%s of a %s has another shape, dtype or device than when it was laid out, or is gone: call "
    "mla_fusion.prepack again"
)
_IN_USE = (
    "%s of a %s has been given other memory, and somebody else uses what it had (a tied parameter, "
    "a flat buffer, a kept tensor): graphs that were captured before read the old numbers, capture "
    "them again"
)


@dataclass(frozen=True)
class Inverse:
    """Reads a parameter out of its packed weight."""

    order: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, packed: Tensor) -> Tensor:
        return packed.permute(self.order).view(self.shape)


def inverse(program: GraphModule, parameter: Tensor) -> Inverse | None:
    """Returns the inverse of a packing program for such a parameter, None if it is no view.

    The program's views are taken of a contiguous stand-in. Their strides tell which axis of the
    result holds which stretch of the parameter: in descending order they are the parameter, if
    nothing was left out or repeated.

    parameter  may be fake
    """
    leaves = program.graph.find_nodes(op="placeholder")
    steps = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if len(leaves) != 1 or any(word(step) not in _VIEWS | _COPIES for step in steps):
        return None
    leaf = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    viewed = Without(program).run(leaf)
    order = tuple(sorted(range(viewed.dim()), key=viewed.stride, reverse=True))
    has_all = storage_id(viewed) == storage_id(leaf) and viewed.permute(order).is_contiguous()
    if not has_all or (viewed.dtype, viewed.numel()) != (leaf.dtype, leaf.numel()):
        return None
    result = Inverse(order, parameter.shape)
    try:
        result(torch.empty(viewed.shape, device="meta", dtype=torch.float32))
    except RuntimeError:  # axes of the parameter are spread over the packed weight
        return None
    return result


class Without(Interpreter):
    """Runs a packing program without its copies, or without some of them."""

    def __init__(self, program: GraphModule, skipped: frozenset[str] = _COPIES) -> None:
        super().__init__(program)
        self._skipped = skipped

    def run_node(self, n: Any) -> Any:
        return self.env[n.args[0]] if word(n) in self._skipped else super().run_node(n)


class _Laid(NamedTuple):
    """The memory in which a parameter or a buffer was laid out.

    packed   the packed weight
    inverse  reads the parameter out of it
    program  packs a contiguous tensor. None if the memory is the parameter's own: copies are packed
             of it, and it must stay.
    """

    packed: Tensor
    inverse: Inverse
    program: GraphModule | None

    def has(self, parameter: Tensor | None) -> bool:
        """Returns True if the parameter lies there, not in another part of the memory."""
        return place(parameter) == place(self.inverse(self.packed))

    def fits(self, parameter: Tensor) -> bool:
        """Returns True if the parameter may lie there."""
        form = self.inverse.shape, self.packed.dtype, self.packed.device
        return (parameter.shape, parameter.dtype, parameter.device) == form

    def is_in_use(self) -> bool:
        """Returns True if memory that a parameter has left was freed, or has another user, who
        would find other numbers in it.
        """
        if self.program is not None:
            return False
        if self.packed.untyped_storage().nbytes() < self.packed.nbytes:
            return True
        if self._has_other_user():
            gc.collect()  # what a compilation has left behind may hold the memory
        return self._has_other_user()

    def _has_other_user(self) -> bool:
        """Returns True if anything but this package and the parameter holds the memory."""
        storage = storage_id(self.packed)
        ours = cache.count_by_storage()[storage] + sum(
            storage_id(laid.packed) == storage
            for laid_out in list(_MODULES.values())
            for laid in laid_out.values()
        )
        return holders(self.packed) != holders(self.packed.new_empty(0)) - 1 + ours


_MODULES: WeakKeyDictionary[nn.Module, dict[str, _Laid]] = WeakKeyDictionary()
"""What is laid out of each module's own parameters, by name."""


def own(module: nn.Module, name: str) -> Tensor | None:
    """Returns a module's own parameter or buffer."""
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def is_laid_out(module: nn.Module, name: str) -> bool:
    """Returns True if :func:`lay_out` has moved this parameter, and it is still there."""
    laid = _MODULES.get(module, {}).get(name)
    return laid is not None and laid.program is not None and laid.has(own(module, name))


def pin(module: nn.Module, name: str) -> None:
    """Makes :func:`put_back` move a parameter or a buffer back into the memory that it has now,
    unless it is laid out.
    """
    tensor, laid_out = own(module, name), _MODULES.get(module, {})
    if tensor is None or name in laid_out or not is_plain(tensor):
        return
    if 0 in tensor.stride() and tensor.numel() > 1:
        return  # repeated numbers, into which nothing can be copied
    as_it_lies = Inverse(tuple(range(tensor.dim())), tensor.shape)
    _MODULES.setdefault(module, laid_out)[name] = _Laid(tensor.data, as_it_lies, None)


def lay_out(module: nn.Module, name: str, program: GraphModule, inverse: Inverse) -> str:
    """Makes a module's parameter a view of its packed weight. Returns "", or why it cannot be.

    At most the parameter's size is allocated beside it at any time.
    """
    parameter = getattr(module, name)
    with compile_lock(), outside_modes():
        if reason := _shared_memory(parameter):
            return reason
        packed = Without(program, frozenset([_CAST])).run(parameter.data)
        if storage_id(packed) != storage_id(parameter):
            parameter.data = inverse(packed)  # frees its memory, before a cast asks for more
        if any(word(step) == _CAST for step in program.graph.nodes):
            packed = torch.ops.npu.npu_format_cast(packed, _NZ)
            parameter.data = inverse(packed)
        _MODULES.setdefault(module, {})[name] = _Laid(packed, inverse, program)
    return ""


def _shared_memory(tensor: Tensor) -> str:
    """Returns why a tensor may not give up its memory, "" for a parameter that alone uses it.

    Tied weights, slices of a merged weight and a state dict in a variable share the storage, which
    then has more holders than that of a new tensor. A gradient is a sign of training in progress:
    optimisers keep state in the parameter's layout.
    """
    if not isinstance(tensor, nn.Parameter):
        return "it is not a parameter"
    if tensor.is_inference():
        return "it was made under inference_mode"
    if tensor.grad is not None:
        return "it has a gradient: an optimizer may keep state in its layout"
    if is_view(tensor) or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return "it is a part of other memory, such as a flat buffer"
    if holders(tensor) != holders(tensor.new_empty(0)):
        return "something else holds its memory: a tied weight, a state dict in a variable"
    return ""


def give_back(parameters: Iterable[Tensor]) -> set[int]:
    """Gives parameters that were laid out memory of their own. Returns the identities of the memory
    that they leave.
    """
    ids, storages = set(map(id, parameters)), set()
    with compile_lock(), outside_modes():
        for module, laid_out in list(_MODULES.items()):
            for name, laid in list(laid_out.items()):
                tensor = own(module, name)
                if id(tensor) not in ids:
                    continue
                if laid.program is not None:
                    storages.add(storage_id(laid.packed))
                    if tensor is not None and laid.has(tensor):
                        nd = torch.ops.npu.npu_format_cast(laid.packed, _ND)
                        tensor.data = laid.inverse(nd).contiguous()
                _forget(module, name)
    return storages


def _forget(module: nn.Module, name: str) -> None:
    del _MODULES[module][name]
    if not _MODULES[module]:
        del _MODULES[module]


def put_back(module: nn.Module) -> int:
    """Moves a module's own parameters and buffers back into the memory in which they were laid out.

    Returns how many it moved.
    """
    count = 0
    if module not in _MODULES:
        return 0
    with compile_lock(), outside_modes():
        for name, laid in list(_MODULES[module].items()):
            tensor = own(module, name)
            if laid.has(tensor):
                continue
            if tensor is None or not laid.fits(tensor):
                if laid.program is not None:
                    log.warning(_OTHER_FORM, name, type(module).__name__)
                _forget(module, name)
            elif laid.is_in_use():
                log.warning(_IN_USE, name, type(module).__name__)
                _forget(module, name)
            else:
                values = tensor.data.contiguous()
                laid.packed.copy_(values if laid.program is None else laid.program(values))
                _move(module, name, tensor, laid.inverse(laid.packed))
                count += 1
    return count


def _move(module: nn.Module, name: str, tensor: Tensor, memory: Tensor) -> None:
    """Makes this memory that of a module's parameter or buffer."""
    if not isinstance(tensor, nn.Parameter):  # a state that was assigned may be the caller's
        module._buffers[name] = memory
    elif tensor.is_inference():  # its .data would stay one, whose changes torch does not count
        module._parameters[name] = nn.Parameter(memory, tensor.requires_grad)
    else:
        tensor.data = memory
