"""Parameters that are laid out as the kernel reads them ahead of time, and stay so.

The packed weight is the parameter's memory: everybody else reads it by other strides, and an update of one is an update
of the other. What is laid out is known by the module that holds the parameter, and goes with it. A copy of a module
has parameters of its own with the same strides; they are not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from mla_fusion.compat import storage_id
from mla_fusion.fx.kinds import op_name
from mla_fusion.modes import compile_lock, outside_modes
from mla_fusion.weights import cache
from mla_fusion.weights.share import Inverse, Without, shared_memory

log = logging.getLogger("mla_fusion")
_CAST = "npu::npu_format_cast"
_ND, _NZ = 2, 29


class _Laid(NamedTuple):
    """A parameter's packed weight; ``program`` makes one of a contiguous tensor."""

    packed: Tensor
    inverse: Inverse
    program: GraphModule

    def has(self, parameter: object) -> bool:
        return isinstance(parameter, Tensor) and storage_id(parameter) == storage_id(self.packed)

    def takes(self, parameter: object) -> bool:
        form = self.inverse.shape, self.packed.dtype, self.packed.device
        return isinstance(parameter, Tensor) and (tuple(parameter.shape), parameter.dtype, parameter.device) == form


class _Module:
    """What is laid out of one module's own parameters, by name."""

    def __init__(self, module: nn.Module) -> None:
        self.laid: dict[str, _Laid] = {}
        self.hook = module.register_load_state_dict_post_hook(_after_loading)


_MODULES: WeakKeyDictionary[nn.Module, _Module] = WeakKeyDictionary()


def is_laid_out(module: nn.Module, name: str) -> bool:
    """Whether :func:`lay_out` has done this parameter, and it has stayed where it was put."""
    known = _MODULES.get(module)
    laid = known.laid.get(name) if known is not None else None
    return laid is not None and laid.has(module._parameters.get(name))


def lay_out(module: nn.Module, name: str, program: GraphModule, inverse: Inverse) -> str:
    """Make a module's parameter a view of its packed weight; why not, where its memory is not its alone, else "".

    At most the parameter's size is allocated beside it at any time.
    """
    parameter = getattr(module, name)
    with compile_lock(), outside_modes():
        if reason := shared_memory(parameter):
            return reason
        packed: Tensor = Without(program, frozenset([_CAST])).run(parameter.data)
        if storage_id(packed) != storage_id(parameter):
            parameter.data = inverse(packed)  # frees its memory, before a cast asks for more
        if any(op_name(step) == _CAST for step in program.graph.nodes):
            packed = torch.ops.npu.npu_format_cast(packed, _NZ)
            parameter.data = inverse(packed)
        known = _MODULES.get(module)
        if known is None:
            known = _MODULES[module] = _Module(module)
        known.laid[name] = _Laid(packed, inverse, program)
    return ""


def refresh(model: nn.Module) -> int:
    """Lay out anew, now, what has changed in ways that torch does not count, and say how many.

    model  whose parameters have changed

    Parameters that :func:`mla_fusion.prepack` has laid out and that have been given other memory (``parameter.data =
    other``, ``load_state_dict(assign=True)``) get back the memory that they had, with the new values: compiled and
    captured graphs that hold its address stay right. Packed copies made of the model's parameters and buffers are
    packed again, in place too. To be called after ``parameter.data.add_(..)``, steps of fused optimizers and updates of
    flat buffers under ``Config(updates="counted")``, and before a captured graph is replayed.

    Raises TypeError for anything but a module, WeightError where a packed weight cannot hold the new numbers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"refresh takes the module whose parameters have changed, got a {type(model).__name__}")
    moved = sum(_put_back(module) for module in model.modules())
    return moved + cache.renew([*model.parameters(), *model.buffers()])


def release(parameters: Iterable[Tensor] | nn.Module) -> int:
    """Drop packed weights, and say how many. The next call packs anew.

    parameters  those that the weights were made of, or a module that has them

    Parameters that are views of packed weights (:func:`mla_fusion.prepack`, ``Config(weights="shared")``) get
    contiguous memory of their own again. To be called before weights are loaded into a model that has run on an NPU.
    """
    given = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    dropped, wanted = cache.drop(given), set(map(id, given))
    with compile_lock(), outside_modes():
        for module, known in list(_MODULES.items()):
            for name, laid in list(known.laid.items()):
                parameter = module._parameters.get(name)
                if id(parameter) in wanted:
                    dropped.add(storage_id(laid.packed))
                    _give_back(parameter, laid)
                    _forget(module, name)
    return len(dropped)


def _give_back(parameter: Any, laid: _Laid) -> None:
    """Contiguous memory of its own, to a parameter that lies in its packed weight."""
    if laid.has(parameter):
        parameter.data = laid.inverse(torch.ops.npu.npu_format_cast(laid.packed, _ND)).contiguous()


def _forget(module: nn.Module, name: str) -> None:
    known = _MODULES[module]
    del known.laid[name]
    if not known.laid:
        known.hook.remove()
        del _MODULES[module]


def _put_back(module: nn.Module) -> int:
    """Bring a module's own parameters back into the packed weights that they were views of; how many."""
    known, count = _MODULES.get(module), 0
    if known is None:
        return 0
    with compile_lock(), outside_modes():
        for name, laid in list(known.laid.items()):
            parameter = module._parameters.get(name)
            if laid.has(parameter):
                continue
            if parameter is None or not laid.takes(parameter):
                log.warning(
                    "%s of a %s has another shape, dtype or device than when it was laid out, or is gone: call "
                    "mla_fusion.prepack again",
                    name,
                    type(module).__name__,
                )
                _forget(module, name)
                continue
            laid.packed.copy_(laid.program(parameter.data.contiguous()))
            parameter.data = laid.inverse(laid.packed)
            count += 1
    return count


def _after_loading(module: nn.Module, incompatible: Any) -> None:
    """Of a state dict, whose tensors may have been assigned."""
    _put_back(module)
