"""Refreshes weights of models after the usual updates.

The replay of a captured graph does not check whether a weight has changed, and torch does not count
every change. So three kinds of update end with :func:`mla_fusion.refresh` of what they touched:
``load_state_dict`` (of the model or of a module inside), a step of any ``torch.optim.Optimizer``,
fused or not, and PEFT's ``merge`` and ``unmerge``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mla_fusion.fx.walk import reached
from mla_fusion.weights import cache, prepack
from mla_fusion.weights.source import plain

_MODELS: WeakSet[nn.Module] = WeakSet()
# by module: the handle of its hook
_LOADING: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_MERGES = ("merge", "unmerge")
_usual: dict[tuple[type, str], Callable[..., Any]] = {}  # PEFT's own methods, which are wrapped
_stepping: list[Any] = []  # the handle of the hook of all optimizers, if there is a model
_LOCK = Lock()


def refresh(model: nn.Module) -> int:
    """Lays out again, now, what has changed in ways that torch does not count. Returns how many.

    model  whose parameters or buffers have changed

    Parameters that :func:`mla_fusion.prepack` has laid out, or has seen copies to be packed of, may
    have other memory now (``parameter.data = other``, ``load_state_dict(assign=True)``). They get
    back the memory that they had, with the new values: compiled and captured graphs that know its
    address stay right. If it is in use elsewhere, a warning says so instead. Packed copies made of
    the model's parameters and buffers are packed again, in place too. Call it after
    ``parameter.data.add_(..)``, steps of fused optimizers and updates of flat buffers under
    ``Config(updates="counted")``, and before a captured graph is replayed.

    Raises TypeError for anything but a module, and WeightError if a packed weight cannot hold the
    new numbers: all others are packed then, and the next call of the graph raises it too.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"refresh takes the module whose parameters have changed, got a {type(model).__name__}"
        )
    return _refresh([*model.modules()])


def release(parameters: Iterable[Tensor] | nn.Module) -> int:
    """Drops packed weights, and returns how many. The next call packs again.

    parameters  those that the weights were made of, or a module that has them

    What :func:`mla_fusion.prepack` laid out is contiguous again. Call it before weights are loaded.

    Raises TypeError for anything else.
    """
    if isinstance(parameters, nn.Module):
        with _LOCK:
            _MODELS.discard(parameters)
            for module in parameters.modules():
                if module in _LOADING:
                    _LOADING.pop(module).remove()
            _remove_shared_hooks()
        parameters = _tensors(parameters)
    tensors = [*parameters] if isinstance(parameters, Iterable) else [parameters]
    if isinstance(parameters, Tensor) or not all(isinstance(one, Tensor) for one in tensors):
        kind = type(parameters).__name__
        raise TypeError(f"release takes a module or a sequence of parameters, got a {kind}")
    return len(cache.drop([*plain(tensors)]) | prepack.give_back(tensors))


def follow(model: nn.Module, owners: Iterable[nn.Module]) -> None:
    """Refreshes weights of ``model`` after updates, until :func:`release`.

    owners  modules that have such weights
    """
    with _LOCK:
        _MODELS.add(model)
        for module in owners:
            if module not in _LOADING:
                _LOADING[module] = module.register_load_state_dict_post_hook(_after_loading)
        if not _stepping:
            _stepping.append(register_optimizer_step_post_hook(_after_step))
        for kind in _tuners(model):
            for name in _MERGES:
                if name in vars(kind) and (kind, name) not in _usual:
                    _usual[kind, name] = vars(kind)[name]
                    setattr(kind, name, _refreshing(_usual[kind, name]))


def _remove_shared_hooks() -> None:
    """Removes the hooks that serve all models, if there is no model."""
    if not _MODELS:
        while _stepping:
            _stepping.pop().remove()
        while _usual:
            (kind, name), method = _usual.popitem()
            setattr(kind, name, method)


def _after_loading(module: nn.Module, incompatible: Any) -> None:
    """Refreshes a module after a state dict, whose tensors may have been assigned."""
    _refresh([module])


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    followed = {id(parameter) for model in list(_MODELS) for parameter in model.parameters()}
    if any(id(parameter) in followed for parameter in stepped):
        _refresh([], stepped)
    elif not followed:  # the models died without a call of release
        with _LOCK:
            _remove_shared_hooks()


def _refreshing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method of a module, which then refreshes it."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        _refresh([*self.modules()])
        return result

    return call


def _refresh(modules: Sequence[nn.Module], changed: Iterable[Tensor] = ()) -> int:
    """Refreshes what was made of the ``changed`` tensors and of the modules' own tensors. Returns
    the number of tensors that moved and of copies that were packed.
    """
    moved = sum(map(prepack.put_back, modules))
    own = (tensor for module in modules for tensor in _tensors(module, recurse=False))
    others = (tensor for model in list(_MODELS) for tensor in _tensors(model))
    return moved + cache.renew(plain([*changed, *own]), plain(others))


def _tensors(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    """Returns parameters and buffers."""
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _tuners(model: nn.Module) -> set[type]:
    """Returns the classes of PEFT's layers, each with its own ``merge``: those of the model, and
    all that PEFT has loaded.
    """
    kinds = {
        base
        for module in model.modules()
        if hasattr(module, "merged") and all(hasattr(module, name) for name in _MERGES)
        for base in type(module).__mro__
        if base is not nn.Module
    }
    peft = sys.modules.get("peft.tuners.tuners_utils")
    loaded = filter(None, [getattr(peft, "BaseTunerLayer", None)])
    return kinds.union(reached(loaded, type.__subclasses__))
