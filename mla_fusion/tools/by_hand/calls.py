"""The fused operators that a model calls by hand: seen as they run, and run again with other
arguments, which mend a mistake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from traceback import extract_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from mla_fusion.compat import OpOverload, TorchDispatchMode, schema_of
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.prove.operators import called
from mla_fusion.tools.by_hand.memory import Inputs, Tensors, same_bits, tensors_in
from mla_fusion.tools.by_hand.outcome import Finding
from mla_fusion.tools.by_hand.roles import KR, KV, Roles, Touched, roles_of

_OTHERS = (
    "npu::npu_kv_rmsnorm_rope_cache",
    "npu::npu_kv_rmsnorm_rope_cache_v2",
    "npu::npu_kv_rmsnorm_rope_cache_v2_functional",
    "atb::npu_mla_preprocess",
    "atb::npu_mla_preprocess.out",
)
AUDITED = frozenset([*(f"npu::{name}" for name in PROLOGS), *_OTHERS])
_CAST = ("npu::npu_format_cast", "npu::npu_format_cast_")
_FRACTAL_NZ = 29
_KEEPS_LAYOUT = ("aten::detach", "aten::alias", "aten::lift_fresh", *_CAST)
_LIBRARIES = tuple(
    str(Path(module.__file__).parent) for module in (torch, contextlib) if module.__file__
)

Arguments = dict[str, Any]  # of a call, by name
Target = Callable[..., Any]  # what is audited: a module, a method of one, a function, a graph


@dataclass(frozen=True)
class Call:
    """One call: the operator, every argument by name (defaults filled in), and the caller's line.

    reworked  arguments in FRACTAL_NZ that were changed after the cast, and by which operator
    held      what the run could write, by name
    """

    place: int
    operator: str
    arguments: Arguments
    line: str
    reworked: dict[str, str] = field(default_factory=dict)
    held: Tensors = field(default_factory=dict)

    @property
    def short(self) -> str:
        return self.operator.partition("::")[2]

    @cached_property
    def roles(self) -> Roles:
        return roles_of(self.short)

    def tensor(self, name: str) -> Tensor | None:
        """The argument, where it is a tensor that has elements."""
        value = self.arguments.get(name)
        return value if isinstance(value, Tensor) and value.numel() else None

    def caches(self) -> Iterator[tuple[str, Tensor, Touched]]:
        """The caches by name, each with what a mistake about it alters."""
        for name, touched in ((self.roles.kv_cache, KV), (self.roles.kr_cache, KR)):
            cache = self.tensor(name)
            if cache is not None:
                yield name, cache, touched

    def finding(self, code: str, message: str, argument: str = "", certain: bool = True) -> Finding:
        return Finding(code, message, argument, self.short, self.place, self.line, certain)


Change = Callable[[Call], Arguments]  # arguments to be replaced, by name
After = Callable[[Call, Any], None]  # done with the results of a call


@dataclass(frozen=True)
class Repair:
    """``code`` is stable; ``text`` says what is wrong and what is right; ``argument`` is what it is
    about; ``place`` is that of the call that it mends, None: of every call.
    """

    code: str
    text: str
    argument: str
    touches: Touched
    change: Change = lambda call: {}
    after: After = lambda call, results: None
    place: int | None = None

    def mends(self, call: Call) -> bool:
        return self.place in (None, call.place)

    def has_effect(self, call: Call) -> bool:
        """Does it give another value for an argument?"""
        for name, value in self.change(call).items():
            before = call.arguments[name]
            if not isinstance(value, Tensor) or not isinstance(before, Tensor):
                if value != before:
                    return True
            # what is to be written may hold anything
            elif any(value is held for held in call.held.values()) or not same_bits(value, before):
                return True
        return False


def instead(name: str, value: Any) -> Change:
    """Give another value for one argument."""
    return lambda call: {name: value}


def on(function: Callable[[Tensor], Tensor | None], *names: str) -> Change:
    """Apply to these arguments, those that are tensors of the right shape."""

    def change(call: Call) -> Arguments:
        given = {name: call.tensor(name) for name in names}
        made = {name: function(value) for name, value in given.items() if value is not None}
        return {name: value.contiguous() for name, value in made.items() if value is not None}

    return change


class Watch(TorchDispatchMode):
    """Records the audited calls; makes each with the arguments that ``change``, and then the
    repairs, give instead.
    """

    supports_higher_order_operators = True  # torch.cond and the like are run as they are

    def __init__(
        self,
        change: Change = lambda call: {},
        repairs: Sequence[Repair] = (),
        line: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.refused: Exception | None = None  # what an audited operator raised
        self.held: Tensors = {}  # what the run can write, by name
        self.bound: Tensors = {}  # the same behind the run: it may have bound names anew
        self._change, self._repairs, self._line = change, repairs, line
        # kept alive, so that no other tensor has its id
        self._cast: dict[int, tuple[Tensor, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        name = func.name()
        if name not in AUDITED:
            result = func(*args, **kwargs)
            self._follow(schema_of(func).name, args, kwargs, result)
            return result
        arguments = called(func, args, kwargs).given
        cast = {key: self._cast.get(id(value)) for key, value in arguments.items()}
        reworked = {key: held[1] for key, held in cast.items() if held and held[1]}
        call = Call(len(self.calls), name, arguments, self._line(), reworked, self.held)
        self.calls.append(call)
        repairs = [one for one in self._repairs if one.mends(call)]
        for change in (self._change, *(one.change for one in repairs)):
            arguments = {**arguments, **change(replace(call, arguments=arguments))}
        try:
            result = func(**arguments)
        except Exception as error:
            self.refused = error
            raise
        for one in repairs:
            one.after(replace(call, arguments=arguments), result)
        return result

    def _follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Remember tensors in FRACTAL_NZ, and what is made of them."""
        if name in _CAST:
            layout = args[1] if len(args) > 1 else kwargs.get("acl_format")
            if layout == _FRACTAL_NZ and isinstance(result, Tensor):
                self._cast[id(result)] = result, ""
            return
        read = map(id, tensors_in((args, kwargs)))
        sources = [self._cast[tensor][1] for tensor in read if tensor in self._cast]
        if sources and isinstance(result, Tensor):
            reworked = "" if name in _KEEPS_LAYOUT else name
            self._cast[id(result)] = result, next(filter(None, sources), reworked)


def run(target: Target, args: Inputs, watch: Watch) -> Any:
    """Call ``target`` under the watch; the lines of a graph's nodes are those of their
    ``stack_trace``.
    """
    with torch.no_grad(), watch:
        if isinstance(target, GraphModule):
            return _Traced(target, watch).run(*args)
        return target(*args)


class AsModule(nn.Module):
    """A function, or the method of a module, which is found so, and copied."""

    def __init__(self, function: Target) -> None:
        super().__init__()
        self.function, self.owner = function, getattr(function, "__self__", None)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class _Traced(Interpreter):
    """Runs a graph so that a call knows the line of its node."""

    def __init__(self, gm: GraphModule, watch: Watch) -> None:
        super().__init__(gm)
        self._watch = watch

    def run_node(self, n: Node) -> Any:
        self._watch._line = lambda: last_line(n.stack_trace or "")
        return super().run_node(n)


def last_line(trace: str) -> str:
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    files = [place for place, line in enumerate(lines) if line.startswith("File ")]
    return " ".join(lines[files[-1] : files[-1] + 2]) if files else ""


def callers_line() -> str:
    """The innermost line on the stack that is neither torch's nor this package's."""
    foreign = (*_LIBRARIES, str(Path(__file__).parent), "<")
    for frame in reversed(extract_stack()):
        if not frame.filename.startswith(foreign) and "torch_npu" not in frame.filename:
            return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    return ""
