"""A call under somebody's mode leaves nothing that another call could meet: no fake tensor, none of
a transform's.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mla_fusion as mf
from mla_fusion.modes import is_plain
from mla_fusion.reference import hifloat8
from mla_fusion.weights.source import fingerprint
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


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- what outlives a call


def kept() -> Iterator[tuple[str, Tensor]]:
    """The tensors that the package's modules hold, and where: in tables, caches of functions,
    objects of its own.
    """
    seen = set[int]()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "mla_fusion":
            continue
        for attribute, value in list(vars(module).items()):
            if not isinstance(value, (type, ModuleType)):
                for tensor in _reachable(value, seen):
                    yield f"{name}.{attribute}", tensor


def _reachable(start: Any, seen: set[int]) -> Iterator[Tensor]:
    """What hangs on tables, functions (their caches and closures) and objects of this package; not
    on torch's.
    """
    stack = [start]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif _is_of_package(value):
            stack.extend(gc.get_referents(value))
            if isinstance(getattr(value, "data", None), dict):  # a dictionary of weak references
                stack.extend(
                    reference() for reference in value.data.values() if callable(reference)
                )


def _is_of_package(value: Any) -> bool:
    kind = type(value)
    of_python = kind.__module__ in ("builtins", "functools", "weakref", "collections")
    is_ours = kind.__module__.partition(".")[0] == "mla_fusion"
    return (
        (of_python or is_ours)
        and not isinstance(value, (type, ModuleType, str, bytes))
        and (kind.__name__ != "dict" or "__builtins__" not in value)
    )


def strange() -> list[str]:
    return [f"{where}: {type(tensor).__name__}" for where, tensor in kept() if not is_plain(tensor)]


def test_caches_are_found() -> None:
    """Those that hold tensors now, by which the walk over the package is known to find them."""
    fingerprint(torch.ones(3, 64))
    hifloat8.decode(torch.zeros(1, dtype=torch.uint8))
    run = torch.compile(prologues.Neox(), backend=mf.backend())
    with torch.no_grad():
        run(*base.paged_args())
    places = {where for where, _ in kept()}
    wanted = {"weights.source._keys", "reference.hifloat8._tables", "weights.cache._ENTRIES"}
    assert {f"mla_fusion.{where}" for where in wanted} <= places


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
    assert not strange()
    assert_right(run, model, args)
    with torch.no_grad():
        model.q_b_proj.weight.mul_(2)
    assert_right(run, model, args)
    other = copy.deepcopy(model)
    assert_right(torch.compile(other, backend=mf.backend(CONFIGS[config])), other, args)
    torch.compiler.reset()
    assert_right(torch.compile(model, backend=mf.backend(CONFIGS[config])), model, args)
    assert not strange()


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
    assert not strange()
