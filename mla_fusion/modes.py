"""What of torch's state belongs to whoever calls: modes, transforms, locks, the number of threads,
hooks.

Whatever outlives a call is made outside of its modes, of tensors that are no mode's: one dry run
under a FakeTensorMode would else leave fake tensors for every call that follows.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache, wraps
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
    """Outside of dispatch and function modes, of functorch's transforms, of inference mode, and
    without gradients.
    """
    functions = torch._C.DisableTorchFunction()
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        without_transforms(),
        without_modes(),
        functions,
    ):
        yield


def is_plain(tensor: Tensor) -> bool:
    """Whether it is memory and nothing else: not fake, not a transform's, of no class that
    dispatches by itself.
    """
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not is_functional(tensor)
    )


def kept_outside_modes(most: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A cache of ``most`` results, for a function of positions that makes tensors: outside of all
    modes.

    Under a dispatch mode, which may ask for tensors of its own kind, the result is made anew and
    not kept.
    """

    def of(make: Callable[_P, _R]) -> Callable[_P, _R]:
        @lru_cache(most)
        def kept(*args: Any) -> _R:
            with outside_modes():
                return make(*args)  # type: ignore[call-arg]  # a cache's keys have no types

        @wraps(make)
        def result(*args: _P.args, **_: _P.kwargs) -> _R:
            return make(*args, **_) if torch._C._len_torch_dispatch_stack() else kept(*args)

        return result

    return of


def compile_lock() -> AbstractContextManager[Any]:
    """Dynamo's, which it holds from its first look at the tensors of a frame until its guards are
    tried.

    Whoever moves a parameter meanwhile makes the guards fail at once.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return nullcontext() if dynamo is None else dynamo.compile_lock


def use_threads(count: int) -> bool:
    """Let operators called by this Python thread run on so many threads; False where this process
    has no way to.

    ``torch.set_num_threads`` would decide for every thread that calls its first operator meanwhile,
    and for good. OpenMP's own setting is the calling thread's.
    """
    openmp = _process()
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


@cache
def _process() -> ctypes.CDLL:
    """What libraries make known to the whole process: OpenMP, where torch is built with it."""
    return ctypes.CDLL(None)


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured: nothing may be read back meanwhile."""
    ask = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return device.type != "cpu" and ask is not None and bool(ask())


def is_call_of_torch(call: Any) -> bool:
    """``nn.Module.__call__``, or what torch.fx puts in its place while it traces."""
    return call is _CALL or (
        unwrap(call) is _CALL and call.__globals__["__name__"] == "torch.fx._symbolic_trace"
    )


def has_hooks(module: torch.nn.Module, but_of: str = "") -> bool:
    """Does calling a module do more than its forward? Hooks, its own or of all modules, or a call
    that was replaced.

    but_of  a package whose hooks do not count
    """
    if type(module)._call_impl is not _CALL_IMPL or "_call_impl" in vars(module):
        return True
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    own = (hook for kind in _HOOKS for hook in getattr(module, f"_{kind}_hooks").values())
    if any(not but_of or not getattr(hook, "__module__", "").startswith(but_of) for hook in own):
        return True
    return any(getattr(_MODULE, f"_global_{kind}_hooks") for kind in _HOOKS)


_MODULE = torch.nn.modules.module
_CALL, _CALL_IMPL = (
    torch.nn.Module.__call__,
    torch.nn.Module._call_impl,
)  # as torch has them, whoever patches them later
_HOOKS = ("backward", "backward_pre", "forward", "forward_pre")
