"""Is a converted attention still what ``optimize`` has seen? Looked at in each call.

Beside the parts of its own ``forward``, a converted attention reads the code of its class, the
functions of its file, the attention functions, and the weight of its up projection. Replaced code
is an OptimizeError. An up projection that does more than multiply (LoRA, a hook, a bias, a
quantisation) is called as a module: latents are expanded, which is slower.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models.hf.latent_attention import LatentForm
from mla_fusion.models.refusal import OptimizeError
from mla_fusion.modes import has_hooks, is_call_of_torch

IMPLEMENTATIONS = ("sdpa", "eager")
TABLE = "ALL_ATTENTION_FUNCTIONS"
# As torch has them, whoever patches them later.
_PRODUCT, _LINEAR = nn.Linear.forward, nn.functional.linear
_SHARDING = "torch.distributed.tensor"  # its hooks hand over each rank's share, and nothing else


class Seen:
    """The code of an attention as ``optimize`` has seen it: the forward of its class, the functions
    of its file that this calls, and the attention functions by implementation.
    """

    def __init__(self, kind: type[nn.Module], source: FunctionType, names: Iterable[str]) -> None:
        """``source`` is the forward without decorators, ``names`` what it looks up."""
        self.forward = kind.forward
        file = sys.modules.get(source.__module__)
        # None for a forward that was put together
        self.file = file if file is not None and vars(file) is source.__globals__ else None
        self._table = source.__globals__[TABLE]
        self.attend = {name: self._table[name] for name in IMPLEMENTATIONS if name in self._table}
        called = ((name, getattr(self.file, name, None)) for name in names)
        self.called = tuple(item for item in called if isinstance(item[1], FunctionType))

    def require(self, module: nn.Module, name: str) -> None:
        """Raises OptimizeError ``forward.unknown`` where a function has been replaced."""
        if type(module).forward is not self.forward:
            raise _replaced(name, f"{type(module).__name__}.forward")
        for called, function in self.called:
            if getattr(self.file, called, None) is not function:
                raise _replaced(name, f"{called} of {type(module).__module__}")
        table = self._table if self.file is None else getattr(self.file, TABLE)
        for implementation, function in self.attend.items():
            if table[implementation] is not function:
                raise _replaced(name, f"{TABLE}[{implementation!r}]")


def _replaced(name: str, what: str) -> OptimizeError:
    return OptimizeError(
        "forward.unknown",
        f"{what} has been replaced since {name} was optimised: hf.revert(model), then "
        "hf.optimize(model) again",
    )


def absorbed_weight(module: nn.Module, form: LatentForm) -> Tensor | None:
    """The up projection's weight, this rank's rows ``[N * (D + Dv), R]``, to be absorbed.

    None where calling the projection, or ``expand_kv``, does anything beside the product with it.
    Compiled code meets changes as torch.compile does: those of hooks only where dynamo guards hooks
    (``torch._dynamo.config.skip_nnmodule_hook_guards = False``).
    """
    up: Any = getattr(module, form.kv_up)
    if not isinstance(up, nn.Linear) or not _is_method(up, "forward", _PRODUCT):
        return None
    if nn.functional.linear is not _LINEAR or not is_call_of_torch(type(up).__call__):
        return None
    if up.bias is not None or has_hooks(up, but_of=_SHARDING):
        return None
    if form.after_cache and not _is_method(module, "expand_kv", form.expand_kv):
        return None
    weight = local(up.weight)
    plain = (
        _computes_as_torch(type(weight))
        and weight.layout is torch.strided
        and weight.is_floating_point()
        and weight.dtype.itemsize > 1
        and not hasattr(weight, "__tensor_flatten__")
        and tuple(weight.shape) == (form.heads * form.dims.up, form.dims.rank)
    )
    return weight if plain else None


def _is_method(module: nn.Module, name: str, function: Any) -> bool:
    """Is an attribute of a module this function of its class?"""
    getattr(module, name)  # read, so that torch.compile guards what it is
    return getattr(type(module), name) is function and name not in vars(module)


def _computes_as_torch(kind: Any) -> bool:
    """Is a product with a tensor of this class torch's own?"""
    if kind is Tensor or kind is nn.Parameter:
        return True
    if torch.compiler.is_compiling():
        return False
    own: Any = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return own in _FUNCTIONS_OF_TORCH


_FUNCTIONS_OF_TORCH: tuple[Any, ...] = (
    vars(Tensor)["__torch_function__"].__func__,
    nn.Parameter.__torch_function__,
)


def local(weight: Any) -> Tensor:
    """This rank's share of a weight that is sharded by heads."""
    share: Tensor = weight.to_local() if isinstance(weight, _SHARDED) else weight
    return share


_SHARDED: tuple[type[Any], ...] = ()
# dynamo cannot tell by attributes: it traces a parameter as a plain one
if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor

    _SHARDED = (DTensor,)
