"""Is a converted attention still what ``optimize`` examined? Looked at in each call.

Beside the parts of its own ``forward``, a converted attention reads three things directly: the
weight of its up projection, the class's ``expand_kv``, and the functions of its file. What is done
to them later (a LoRA wrapper, a hook, a bias, a patch, quantisation) must count, as it does in the
plain model. A changed up projection is called as a module: latents are expanded, which is slower.
Changed code is an OptimizeError.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mla_fusion.models.hf.latent_form import IMPLEMENTATIONS, LatentForm, expanded
from mla_fusion.models.refusal import OptimizeError
from mla_fusion.modes import has_hooks, is_call_of_torch

_LOG = logging.getLogger(__name__)
# As torch has them, whoever patches them later.
_PRODUCT, _LINEAR = nn.Linear.forward, nn.functional.linear
_SHARDING = "torch.distributed.tensor"  # its hooks hand over each rank's share, and nothing else
TABLE = "ALL_ATTENTION_FUNCTIONS"
_SAID: set[str] = set()  # attentions of which the log says that they expand


def keywords(code: CodeType) -> set[str]:
    """Names by which the code gives arguments."""
    constants = (constant for constant in code.co_consts if isinstance(constant, tuple))
    return {name for names in constants for name in names if isinstance(name, str)}


def _file_of(source: FunctionType) -> ModuleType | None:
    """The module in which a function looks names up; None for one that was put together."""
    file = sys.modules.get(source.__module__)
    return file if file is not None and vars(file) is source.__globals__ else None


class AttentionFunctions:
    """``ALL_ATTENTION_FUNCTIONS`` as a file has it now, and what stood in it when it was
    examined.
    """

    def __init__(self, source: FunctionType) -> None:
        self._table = source.__globals__[TABLE]
        self._file = _file_of(source)
        self._known = {name: self._table[name] for name in IMPLEMENTATIONS if name in self._table}

    @property
    def table(self) -> Any:
        return self._table if self._file is None else getattr(self._file, TABLE)

    def is_known(self, implementation: str, function: Any) -> bool:
        """Is this the function that the implementation's name stood for? (Eager ones stand in their
        own files.)
        """
        return function is self._known.get(implementation, function)

    def stands(self, implementation: str) -> bool:
        """Does the name stand for the same function as it did?"""
        known = self._known.get(implementation)
        return known is None or self.table[implementation] is known


class Code(NamedTuple):
    """Code that was examined: a class's forward, and the functions of its file that this calls."""

    forward: Callable[..., Any]
    file: ModuleType | None
    functions: tuple[tuple[str, FunctionType], ...]

    @classmethod
    def of(cls, forward: Callable[..., Any], source: FunctionType, names: Iterable[str]) -> Code:
        """``source`` is ``forward`` without decorators, ``names`` what it looks up in its file."""
        file = _file_of(source)
        named = [(name, getattr(file, name, None)) for name in names] if file is not None else []
        functions = ((name, value) for name, value in named if isinstance(value, FunctionType))
        return cls(forward, file, tuple(functions))


def require_same_code(module: nn.Module, name: str, code: Code) -> None:
    """Raises OptimizeError ``forward.unknown`` where a function that was examined has been
    replaced.
    """
    if type(module).forward is not code.forward:
        raise _replaced(name, f"{type(module).__name__}.forward")
    for called, function in code.functions:
        if getattr(code.file, called, None) is not function:
            raise _replaced(name, f"{function.__module__}.{called}")


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
    return plain_weight(up.weight, form.heads * form.dims.up, form.dims.rank)


def _is_method(module: nn.Module, name: str, function: Any) -> bool:
    """Is an attribute of a module this function of its class?"""
    getattr(module, name)  # read, so that torch.compile guards what it is
    return getattr(type(module), name) is function and name not in vars(module)


def plain_weight(weight: Any, rows: int, columns: int) -> Tensor | None:
    """This rank's share of a weight, if that is a floating-point matrix ``[rows, columns]``."""
    weight = local(weight)
    plain = (
        _computes_as_torch(type(weight))
        and weight.layout is torch.strided
        and weight.is_floating_point()
        and weight.dtype.itemsize > 1
        and not hasattr(weight, "__tensor_flatten__")
    )
    return weight if plain and tuple(weight.shape) == (rows, columns) else None


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


def expand(module: Any, form: LatentForm, c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads from ``[B, 1, L, R]`` and ``[B, 1, L, Dr]``, as the module makes
    them.
    """
    if form.after_cache:
        keys, values = module.expand_kv(c_kv, k_pe)
        return keys, values
    return expanded(getattr(module, form.kv_up)(c_kv), k_pe, form.dims)


def say_that_it_expands(name: str, form: LatentForm) -> None:
    """One line in the log for each attention."""
    if name not in _SAID:
        _SAID.add(name)
        _LOG.warning(
            "%s.%s is no plain Linear any more (a hook, a wrapper, a bias, a quantisation, a "
            "patch of torch), or the"
            " attention function is another: latents are expanded to all heads at each step",
            name, form.kv_up,
        )  # fmt: skip


def local(weight: Any) -> Tensor:
    """This rank's share of a weight that is sharded by heads."""
    share: Tensor = weight.to_local() if isinstance(weight, _SHARDED) else weight
    return share


def _sharded() -> tuple[type[Any], ...]:
    """DTensor, where torch has it (dynamo cannot tell by attributes: it traces a parameter as a
    plain one).
    """
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return (DTensor,)


_SHARDED = _sharded()
