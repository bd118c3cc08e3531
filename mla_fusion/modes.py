"""Handles the state of torch that belongs to the caller: modes, transforms, locks, threads, hooks.

Whatever outlives a call is made outside of the caller's modes, from tensors that belong to none of
them. Otherwise a dry run under a FakeTensorMode would leave fake tensors for later calls.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from inspect import unwrap
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as without_transforms

from mla_fusion.compat import is_functional, without_modes

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def outside_modes() -> Iterator[None]:
    """Leaves dispatch and function modes, functorch's transforms and inference mode, and disables
    gradients.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        without_transforms(),
        without_modes(),
        torch._C.DisableTorchFunction(),
    ):
        yield


def is_plain(tensor: Tensor) -> bool:
    """Returns True for a tensor that only has memory: it is not fake, no transform wraps it, and
    its class does not dispatch.
    """
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not is_functional(tensor)
    )


def kept_outside_modes(most: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator that caches ``most`` results of a function that makes tensors.

    The function takes positional arguments, and runs outside of all modes. Under a dispatch mode,
    which may need tensors of its own kind, the result is not cached.
    """

    def decorate(make: Callable[_P, _R]) -> Callable[_P, _R]:
        """Returns the cached function."""

        @lru_cache(most)
        def cached(*args: Any) -> _R:
            with outside_modes():
                return make(*args)  # type: ignore[call-arg]  # a cache's keys have no types

        @wraps(make)
        def result(*args: _P.args, **_: _P.kwargs) -> _R:
            return make(*args, **_) if torch._C._len_torch_dispatch_stack() else cached(*args)

        return result

    return decorate


def compile_lock() -> AbstractContextManager[Any]:
    """Returns dynamo's lock, which it keeps from reading a frame's tensors until it has checked
    its guards.

    A parameter that moves meanwhile makes the guards fail at once.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return nullcontext() if dynamo is None else dynamo.compile_lock


def use_threads(count: int) -> bool:
    """Makes this Python thread's operators run on ``count`` threads. Returns True if that worked.

    ``torch.set_num_threads`` would decide for every thread that calls its first operator meanwhile,
    and for good. OpenMP's setting is the calling thread's. It is found among what libraries export
    to the process, if torch is built with OpenMP.
    """
    openmp = ctypes.CDLL(None)
    if not hasattr(openmp, "omp_set_num_threads"):
        return False
    # a thread that has called no operator yet: torch sets its number now, not later
    torch.get_num_threads()
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(count)
    if torch.get_num_threads() == count:
        return True
    openmp.omp_set_num_threads(before)  # another OpenMP than torch's
    return False


def is_capturing(device: torch.device) -> bool:
    """Returns True if the device captures its current stream: nothing may be read back then."""
    module = getattr(torch, device.type, None)
    is_current = getattr(module, "is_current_stream_capturing", lambda: False)
    return device.type != "cpu" and bool(is_current())


def is_call_of_torch(call: Any) -> bool:
    """Returns True for ``nn.Module.__call__``, and for torch.fx's replacement while it traces."""
    return call is _CALL or (
        unwrap(call) is _CALL and call.__globals__["__name__"] == "torch.fx._symbolic_trace"
    )


def has_hooks(module: torch.nn.Module, but_of: str) -> bool:
    """Returns True if a call of the module does more than its forward.

    That is so with hooks of the module or of all modules, and with a replaced call.

    but_of  a package whose hooks do not count
    """
    if type(module)._call_impl is not _CALL_IMPL or "_call_impl" in vars(module):
        return True
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    for kind in _HOOKS:
        for hook in getattr(module, f"_{kind}_hooks").values():
            if not getattr(hook, "__module__", "").startswith(but_of):
                return True
    return any(getattr(_MODULE, f"_global_{kind}_hooks") for kind in _HOOKS)


_MODULE = torch.nn.modules.module
# torch's own, even if they are patched later
_CALL = torch.nn.Module.__call__
_CALL_IMPL = torch.nn.Module._call_impl
_HOOKS = ("backward", "backward_pre", "forward", "forward_pre")
