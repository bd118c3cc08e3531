"""Parameters that are laid out as the kernel reads them ahead of time, and stay so; and those, and
buffers, that packed copies are made of, which stay where they are.

A packed weight is its parameter's memory: everybody else reads it by other strides, and an update
of one is an update of the other. What is laid out is known by the module that holds the parameter,
and goes with it. A copy of a module has parameters of its own with the same strides; they are not
known here.
"""

from __future__ import annotations

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


log = logging.getLogger("mla_fusion")
_CAST = "npu_format_cast"
_NZ = 29


_OTHER_FORM = (
    "%s of a %s has another shape, dtype or device than when it was laid out, or is gone: call "
    "mla_fusion.prepack again"
)
_IN_USE = (
    "%s of a %s has been given other memory, and somebody else uses what it had (a tied parameter, "
    "a flat buffer, a kept tensor): graphs that were captured before read the old numbers, capture "
    "them again"
)


class _Laid(NamedTuple):
    """A parameter's packed weight; ``program`` makes one of a contiguous tensor.

    Without a program it is the memory of the parameter, or buffer, itself: copies are packed of it,
    which are to stay where they are.
    """

    packed: Tensor
    inverse: Inverse
    program: GraphModule | None

    def has(self, parameter: Tensor | None) -> bool:
        """Does the parameter lie there? Another part of the memory is another place."""
        return place(parameter) == place(self.inverse(self.packed))

    def takes(self, parameter: object) -> bool:
        form = self.inverse.shape, self.packed.dtype, self.packed.device
        return (
            isinstance(parameter, Tensor)
            and (tuple(parameter.shape), parameter.dtype, parameter.device) == form
        )

    @property
    def is_somebodys(self) -> bool:
        """Of memory that a parameter has left: whether it was freed, or who kept it would find
        other numbers in it.
        """
        memory = self.packed
        if self.program is not None:
            return False
        freed = memory.untyped_storage().nbytes() < memory.nbytes
        own = cache.held()[storage_id(memory)] + sum(
            storage_id(laid.packed) == storage_id(memory)
            for known in list(_MODULES.values())
            for laid in known.values()
        )
        return freed or holders(memory) != holders(memory.new_empty(0)) - 1 + own


_MODULES: WeakKeyDictionary[nn.Module, dict[str, _Laid]] = WeakKeyDictionary()
"""What is laid out of each module's own parameters, by name."""


def own(module: nn.Module, name: str) -> Tensor | None:
    """A module's own parameter, or buffer."""
    parameter: Tensor | None = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def is_laid_out(module: nn.Module, name: str) -> bool:
    """Whether :func:`lay_out` has done this parameter, and it has stayed where it was put."""
    laid = _MODULES.get(module, {}).get(name)
    return laid is not None and laid.program is not None and laid.has(own(module, name))


def pin(module: nn.Module, name: str) -> None:
    """Let :func:`put_back` bring a parameter or a buffer back into the memory that it has now, if
    nothing else was laid out.
    """
    held, known = own(module, name), _MODULES.get(module, {})
    if held is None or name in known or not is_plain(held):
        return
    if 0 in held.stride() and held.numel() > 1:
        return  # repeated numbers, into which nothing can be copied
    as_it_lies = Inverse(tuple(range(held.dim())), tuple(held.shape))
    _MODULES.setdefault(module, known)[name] = _Laid(held.data, as_it_lies, None)


def lay_out(module: nn.Module, name: str, program: GraphModule, inverse: Inverse) -> str:
    """Make a module's parameter a view of its packed weight; why not, where its memory is not its
    alone, else "".

    At most the parameter's size is allocated beside it at any time.
    """
    parameter = getattr(module, name)
    with compile_lock(), outside_modes():
        if reason := _shared_memory(parameter):
            return reason
        packed: Tensor = Without(program, frozenset([_CAST])).run(parameter.data)
        if storage_id(packed) != storage_id(parameter):
            parameter.data = inverse(packed)  # frees its memory, before a cast asks for more
        if any(word(step) == _CAST for step in program.graph.nodes):
            packed = torch.ops.npu.npu_format_cast(packed, _NZ)
            parameter.data = inverse(packed)
        _MODULES.setdefault(module, {})[name] = _Laid(packed, inverse, program)
    return ""


def _shared_memory(tensor: Tensor) -> str:
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


def give_back(parameters: Iterable[Tensor]) -> set[int]:
    """Give parameters that were laid out memory of their own; the memory that they lay in, by
    identity.
    """
    wanted, left = set(map(id, parameters)), set()
    with compile_lock(), outside_modes():
        for module, known in list(_MODULES.items()):
            for name, laid in list(known.items()):
                held = own(module, name)
                if id(held) in wanted:
                    if laid.program is not None:
                        left.add(storage_id(laid.packed))
                        if held is not None and laid.has(held):
                            held.data = laid.inverse.apart(laid.packed)
                    _forget(module, name)
    return left


def _forget(module: nn.Module, name: str) -> None:
    known = _MODULES[module]
    del known[name]
    if not known:
        del _MODULES[module]


def put_back(module: nn.Module) -> int:
    """Bring a module's own parameters, and buffers, back into the memory that they had when they
    were laid out; how many.
    """
    known, count = _MODULES.get(module), 0
    if known is None:
        return 0
    with compile_lock(), outside_modes():
        for name, laid in list(known.items()):
            held = own(module, name)
            if laid.has(held):
                continue
            fits = held is not None and laid.takes(held)
            if held is None or not fits or laid.is_somebodys:
                if fits or laid.program is not None:
                    log.warning(_IN_USE if fits else _OTHER_FORM, name, type(module).__name__)
                _forget(module, name)
                continue
            values = held.data.contiguous()
            laid.packed.copy_(values if laid.program is None else laid.program(values))
            _give(module, name, held, laid.inverse(laid.packed))
            count += 1
    return count


def _give(module: nn.Module, name: str, held: Tensor, memory: Tensor) -> None:
    """Let what a module holds lie in this memory."""
    if not isinstance(held, nn.Parameter):  # it may be the caller's, of a state that was assigned
        module._buffers[name] = memory
    elif held.is_inference():  # it would stay one, which torch counts no changes of
        module._parameters[name] = nn.Parameter(memory, held.requires_grad)
    else:
        held.data = memory
