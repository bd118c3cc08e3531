"""A call under a mode leaves nothing another could meet: no fake tensor, none of a transform's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import assert_no_worse, clones, eager, exact

Mode = Callable[[], AbstractContextManager[Any]]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """What a mode makes of every result."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(
            Wrapped, lambda one: one.held, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])

    held: Tensor


class Wrapping(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(
            Wrapped, lambda one: one.held, (args, kwargs or {})
        )
        return torch.utils._pytree.tree_map_only(Tensor, wrapped, func(*plain[0], **plain[1]))


def wrapped(value: Tensor) -> Tensor:
    made = Tensor._make_wrapper_subclass(
        Wrapped, value.shape, strides=value.stride(), dtype=value.dtype
    )
    made.held = value  # type: ignore[attr-defined]
    return made


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def in_grad() -> Iterator[None]:
    """Inside a transform of functorch."""
    from torch._C import _functorch

    _functorch._grad_increment_nesting()
    try:
        yield
    finally:
        _functorch._grad_decrement_nesting()


@contextmanager
def default_device_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


MODES: dict[str, Mode] = {
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "watching": Watching,
    "wrapping": Wrapping,
    "functions": Functions,
    "inference": torch.inference_mode,
    "functorch": in_grad,
    "default device": default_device_meta,
}
CONFIGS = {
    "copy": mf.Config(verify="off"),
    "counted": mf.Config(verify="off", updates="counted"),
    "checked": mf.Config(verify="off", slots="checked"),
}
pytestmark = pytest.mark.usefixtures("fresh")


# -- calls


def called(run: Callable[..., Any], name: str, args: tuple[Tensor, ...]) -> None:
    """One call under a mode. It may fail, as the mode pleases."""
    with torch.no_grad(), MODES[name]() as mode:
        if isinstance(mode, FakeTensorMode):
            args = tuple(map(mode.from_tensor, args))
        with suppress(RuntimeError, NotImplementedError, TypeError):
            run(*args)


def assert_right(run: Callable[..., Any], model: nn.Module, args: tuple[Tensor, ...]) -> None:
    given = clones(args)
    with torch.no_grad():
        found = run(*given)
    tensors = [*(found if isinstance(found, tuple) else (found,)), *given]
    assert all(type(tensor) is Tensor for tensor in tensors)
    assert_no_worse(exact(model, args), eager(model, args), tensors)


FAKE = [("fake", config, first) for config in CONFIGS for first in ("mode", "real")]
OTHERS = [
    (name, config, first)
    for first in ("mode", "real")
    for config in CONFIGS
    for name in MODES
    if name != "fake"
]


@pytest.mark.parametrize(
    ("name", "config", "first"), [*one_in(2, FAKE), *one_in(18, OTHERS, first=3)]
)
def test_later_calls_are_right(name: str, config: str, first: str) -> None:
    model, args = prologues.Neox(), base.paged_args()
    run = torch.compile(model, backend=mf.backend(CONFIGS[config]))
    if first == "real":
        assert_right(run, model, args)
    called(run, name, args)
    assert_right(run, model, args)
    with torch.no_grad():
        model.q_b_proj.weight.mul_(2)
    assert_right(run, model, args)
    other = copy.deepcopy(model)
    assert_right(torch.compile(other, backend=mf.backend(CONFIGS[config])), other, args)
    torch.compiler.reset()
    assert_right(torch.compile(model, backend=mf.backend(CONFIGS[config])), model, args)


def test_modes_of_another_thread_are_its_own() -> None:
    model, args = prologues.Neox(), base.paged_args()
    run = torch.compile(model, backend=mf.backend())
    assert_right(run, model, args)
    inside, over = threading.Event(), threading.Event()

    def stay() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            inside.set()
            over.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert inside.wait(60)
        assert_right(run, model, args)
    finally:
        over.set()
        thread.join()
