"""Every private or version-dependent name of torch, torch_npu and torchair; nobody else touches
one.

``tests/project/test_private_names.py`` holds the package to it, five other places apart:

* ``compile/torchair_bridge.py``: how torchair and npugraph_ex compile, from inside
* ``compile/inductor_bridge.py``: what Inductor asks of its custom passes
* ``compile/offline/``: stand-ins for CANN's libraries, and what of torch_npu and torchair asks for
  a device
* ``modes.py``: what of torch's state belongs to the caller
* ``_autoload.py``: imported before torch

What ``import torch`` has loaded anyway is imported here at the top. The rest is loaded where it is
first asked for, so that ``import mla_fusion`` stays light.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, FunctionSchema
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fake_mode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

if TYPE_CHECKING:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Mod

__all__ = [  # names of torch as they are; the functions of this file come beside them
    "BackendCompilerFailed",
    "CeilToInt",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "HigherOrderOperator",
    "IntTrueDiv",
    "Mod",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TorchRuntimeError",
    "Unsupported",
    "aot_autograd",
    "aot_module_simplified",
    "make_fx",
    "statically_known_true",
    "tree_leaves",
    "tree_map_only",
    "tree_structure",
    "without_fake_mode",
    "without_modes",
]

_LATE = {  # loaded on first use
    "BackendCompilerFailed": "torch._dynamo.exc",
    "CeilToInt": "torch.utils._sympy.functions",
    "FloorDiv": "torch.utils._sympy.functions",
    "IntTrueDiv": "torch.utils._sympy.functions",
    "Mod": "torch.utils._sympy.functions",
    "TorchRuntimeError": "torch._dynamo.exc",
    "Unsupported": "torch._dynamo.exc",
    "aot_autograd": "torch._dynamo.backends.common",
    "aot_module_simplified": "torch._functorch.aot_autograd",
    "make_fx": "torch.fx.experimental.proxy_tensor",
    "statically_known_true": "torch.fx.experimental.symbolic_shapes",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value


# -- operators; attrgetter costs no more than the attribute: the pass asks for schemas everywhere

schema_of: Callable[[Any], FunctionSchema] = attrgetter("_schema")


def given_by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by the names of the operator's schema, with defaults."""
    found: dict[str, Any] = {}
    for place, argument in enumerate(schema_of(target).arguments):
        if argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif place < len(args):
            found[argument.name] = args[place]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


parse_schema: Callable[[str], FunctionSchema] = torch._C.parse_schema


def overload_name(target: Any) -> str:
    """``Tensor`` of ``aten.add.Tensor``; "" of what is no overload of an operator."""
    return getattr(target, "_overloadname", "")


def overload_of(operator: Any) -> Any:
    """Of what ``torch.library.custom_op`` made, its overload; else what it is given."""
    return getattr(operator, "_opoverload", operator)


def packet_name(packet: OpOverloadPacket) -> str:
    """``aten::add`` of ``torch.ops.aten.add``."""
    return str(packet._qualified_op_name)


# -- the dispatcher


def has_schema(name: str) -> bool:
    """Whether ``namespace::name`` or ``namespace::name.overload`` is defined now."""
    base, _, overload = name.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(base, overload)
    except RuntimeError:
        return False
    return True


def has_argument(operator: str, name: str) -> bool:
    """Is there an operator of that name (``namespace::name``), and does its schema name that
    argument?
    """
    if not has_schema(operator):
        return False
    namespace, _, packet = operator.partition("::")
    overload = getattr(getattr(torch.ops, namespace), packet).default
    return any(argument.name == name for argument in schema_of(overload).arguments)


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def registrations(name: str) -> list[str]:
    """The dispatcher's own lines on an operator: what is registered for which key, and from
    where.
    """
    return torch._C._dispatch_dump(name).splitlines()


def override(library: torch.library.Library, operator: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel for the one key of a library, in place of another one where there is
    one.
    """
    if "allow_override" in signature(torch.library.Library.impl).parameters:  # since torch 2.8
        library.impl(operator, kernel, allow_override=True)
        return
    registered: set[str] = getattr(torch.library, "_impls")  # noqa: B009  # its stubs leave it out
    registered.discard(f"{library.ns}/{operator}/{library.dispatch_key}")
    library.impl(operator, kernel)


def withdraw(library: torch.library.Library) -> list[OpOverloadPacket]:
    """Take back all that a library has registered. Returns what others may hold of the operators it
    defined.
    """
    names = {name.partition("::")[2].partition(".")[0] for name in library._op_defs}
    held = [
        packet for name, packet in vars(getattr(torch.ops, library.ns)).items() if name in names
    ]
    library._destroy()
    return held


def renew(packet: OpOverloadPacket) -> None:
    """Make a held operator, defined anew since, and its overloads those of now: they would read
    freed memory.
    """
    namespace, _, name = packet_name(packet).partition("::")
    now = getattr(getattr(torch.ops, namespace), name)
    held = {name: vars(packet)[name] for name in now.overloads() if name in vars(packet)}
    for name, overload in held.items():
        _become(overload, getattr(now, name))
    _become(packet, now)
    vars(packet).update(held)


def _become(held: Any, now: Any) -> None:
    called = _Called(now._op)
    called.hashed = hash(held)
    vars(held).clear()
    vars(held).update(vars(now), _op=called)


class _Called(partial[Any]):
    """What a held operator calls. Operators have the hash of that, and graphs keep tables by
    operators.
    """

    hashed: int

    def __hash__(self) -> int:
        return self.hashed


# -- functionalisation

is_functional: Callable[[Tensor], bool] = torch._is_functional_tensor
functional: Callable[[Tensor], Tensor] = torch._to_functional_tensor


def content_of(tensor: Tensor) -> Tensor:
    """What a functional tensor holds now; any other tensor as it is."""
    if not is_functional(tensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


def set_content(tensor: Tensor, value: Tensor) -> None:
    """Let a functional tensor hold ``value``, as an operator that has written it would."""
    torch._functionalize_replace(tensor, value)
    torch._functionalize_commit_update(tensor)
    torch._functionalize_sync(tensor)


def below_functionalisation() -> AbstractContextManager[Any]:
    """Calls made inside go past the kernels for Functionalize."""
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.Functionalize))


# -- tensors and their memory

storage_id: Callable[[Tensor], int] = getattr(torch._C, "_storage_id")  # noqa: B009  # its stubs leave it out
# raises RuntimeError where there is no counter
version_of: Callable[[Tensor], int] = attrgetter("_version")


def is_wrapper(value: object) -> bool:
    """Whether it is a tensor whose memory is that of tensors inside it: a DTensor, a quantised
    weight.
    """
    return bool(is_traceable_wrapper_subclass(value))


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The tensors inside a wrapper, as AOT autograd hands them to a graph; else the tensor."""
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif isinstance(tensor, Tensor):  # a wrapper may hold other things besides
        yield tensor


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows it as a view of another tensor."""
    return tensor._is_view()


def holders(tensor: Tensor) -> int:
    """Tensors (and others) that hold its storage; the Python object of the storage, made here, is
    one of them.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# -- symbolic sizes


def expression_of(size: Any) -> Any:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def bounds_of(size: Any, part: Any = None) -> tuple[float, float]:
    """The least and the largest number that a symbolic size can be, or an expression in its
    symbols.
    """
    bounds = size.node.shape_env.bound_sympy(size.node.expr if part is None else part)
    if bounds is None:  # no symbol of torch's
        return 1, math.inf
    return float(bounds.lower), float(bounds.upper)


def guarded_equal(size: Any) -> list[tuple[Any, Any]]:
    """Expressions that are equal whenever a graph runs that has this size, as its guards say."""
    from sympy import Eq, Expr

    env = size.node.shape_env
    found = (env.replace(guard.expr) for guard in env.guards)
    pairs = (guard.args for guard in found if isinstance(guard, Eq))
    return [(a, b) for a, b in pairs if isinstance(a, Expr) and isinstance(b, Expr)]


def guards_of(mode: FakeTensorMode | None) -> list[Any]:
    """What must hold of the mode's symbolic sizes, as expressions, the newest last."""
    sizes = mode.shape_env if mode is not None else None
    return [guard.expr for guard in sizes.guards] if sizes is not None else []


_MADE_UP = "_mla_fusion_hints"  # of sizes that a dump names: nobody traced them


def hint_of(size: Any) -> Any:
    """What a size, or a condition on sizes, was when the graph was traced; None where nothing
    says.
    """
    if isinstance(size, torch.SymBool) and hasattr(size.node.shape_env, _MADE_UP):
        return None
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymBool)) else size


def guard(condition: Any) -> bool | None:
    """What a condition on sizes is, which becomes a guard of the graph that is being compiled:
    torch compiles it anew where the condition is another. None where nobody would look at a guard.
    """
    context = torch._guards.TracingContext.try_get()
    mode, sizes = getattr(context, "fake_mode", None), condition.node.shape_env
    if mode is None or mode.shape_env is not sizes or sizes.frozen or hint_of(condition) is None:
        return None
    return bool(condition)


def traced_with(size: Any, symbol: Any) -> int:
    """The number that a symbol of the size stood for when the graph was traced."""
    return int(_hints(size.node.shape_env)[symbol])


def _hints(env: Any) -> dict[Any, Any]:
    """Numbers by symbol, under a name by release."""
    name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    found: dict[Any, Any] = getattr(env, name)
    return found


ModeT = TypeVar("ModeT", bound=FakeTensorMode)


def symbolic_mode(kind: type[ModeT]) -> ModeT:
    """A fake mode whose tensors may have sizes made by `new_size`."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env: Any = ShapeEnv()
    setattr(env, _MADE_UP, True)
    env._replacements_version_counter = 1  # at 0, torch does not ask for replacements
    return kind(shape_env=env, allow_non_fake_inputs=True)


def take_for_one(a: Any, b: Any) -> None:
    """Two sizes that an operator needs to be equal: symbols are one from here on; numbers that
    differ raise.
    """
    torch._check(a == b)


def new_size(mode: FakeTensorMode, name: str, hint: int, largest: int) -> torch.SymInt:
    """A symbolic size of that name, from 2 to ``largest``; torch takes it for ``hint`` where it
    needs a number.
    """
    import sympy
    from torch.fx.experimental.sym_node import SymNode
    from torch.utils._sympy.value_ranges import ValueRanges

    env: Any = mode.shape_env
    symbol = sympy.Symbol(name, positive=True, integer=True)
    _hints(env)[symbol] = sympy.Integer(hint)
    env.var_to_range[symbol] = ValueRanges(2, largest)
    return torch.SymInt(SymNode(symbol, env, int, hint))


# -- FX graphs

# how a graph names torch's functions in C++, torch._C._nn.linear say, before AOT autograd
C_FUNCTIONS = "torch._C"


def call_like(graph: Graph, other: Graph) -> None:
    """Let ``graph`` nest its arguments and results as ``other`` does."""
    graph.set_codegen(other._codegen)


def source_name(placeholder: Node) -> str:
    """The expression by which dynamo reaches an input, such as ``L['self'].eps``; "" where dynamo
    made no note.
    """
    if "grapharg" not in placeholder.meta:
        return ""
    name = placeholder.meta["grapharg"].source.name
    return name if isinstance(name, str) else name()  # an attribute or a method, by release


def broken_at(gm: Any) -> str:
    """Where the graph of dynamo's ends, ``file:line in function``, if the frame was broken in
    pieces before it or behind it; "" where it was not, or dynamo does not say.
    """
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    for frame in getattr(reason, "user_stack", ())[-1:]:
        if reason.graph_break or "torch_dynamo_resume_in_" in frame.name:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def is_held(placeholder: Node) -> bool:
    """Does dynamo reach the input through a module, its class or what it holds, or a global?"""
    source = placeholder.meta["grapharg"].source if "grapharg" in placeholder.meta else None
    kind = getattr(source, "guard_source", None)  # an attribute or a method, by release
    name = getattr(kind() if callable(kind) else kind, "name", "")
    return "NN_MODULE" in name or name.startswith("GLOBAL")


def is_argument(placeholder: Node) -> bool:
    """Does dynamo reach the input through an argument or a local variable?"""
    return "grapharg" in placeholder.meta and not is_held(placeholder)


# -- dynamo

_OF_SIZES = ("dynamic_indices", "dynamic_range", "hint_overrides", "static_indices")
HELD = "_mla_fusion_numbers"  # ours, on a fake tensor: what the vector holds for which it stands
_STATIC = "_dynamo_static_input_type"
_MARKS = (HELD, _STATIC, *(f"_dynamo_{mark}" for mark in _OF_SIZES))


def is_of_model(value: Any) -> bool:
    """Is a tensor a parameter or a buffer, as far as can be told? Dynamo marks those of the modules
    that it traces.
    """
    is_marked = getattr(value, _STATIC, None) is not None
    return isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and is_marked)


def static_inputs() -> frozenset[int] | None:
    """Which inputs of the graph that AOT autograd compiles are parameters and buffers, by place;
    None where it does not say.
    """
    context = torch._guards.TracingContext.try_get()
    places = getattr(getattr(context, "fw_metadata", None), "static_input_indices", None)
    return None if places is None else frozenset(places)


def in_tracing_mode(inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a graph of dynamo, fake tensors of another mode rebuilt in the mode that dynamo
    traced in.

    AOT autograd does so itself since torch 2.11, and asserts that there are none in releases
    before.
    """
    context = torch._guards.TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if context is None or mode is None:
        return list(inputs)
    rebuilt: list[Any] = []
    for value in inputs:
        if isinstance(value, FakeTensor) and value.fake_mode is not mode:
            # how dynamo read its sizes: the same symbols again
            known: Any = context.tensor_to_context.get(value)
            source = known.tensor_source if known is not None else None
            moved = mode.from_tensor(value, symbolic_context=known, source=source, trace=False)
            copy_marks(value, moved)
            rebuilt.append(moved)
        else:
            rebuilt.append(value)
    return rebuilt


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Give one tensor what ``mark_dynamic``, ``mark_static`` and the like have noted on another."""
    for mark in _MARKS:
        if hasattr(source, mark):
            setattr(target, mark, copy.copy(getattr(source, mark)))


def mark_static_address(tensor: Tensor) -> None:
    torch._dynamo.mark_static_address(tensor)


def is_saving() -> bool:
    """Whether what is compiled now is to be serialised, as ``torch.compile(..).aot_compile`` asks
    for.
    """
    config: Any = import_module("torch._functorch.config")
    asked = ("bundled_autograd_cache", "strict_autograd_cache")
    return all(getattr(config, name, False) for name in asked)


# -- torchair

_COMPILES_THROUGH = ("_compile_graph_with_aot", "_get_merged_decompositions", "_process_send_recv")


def torchair_lacks() -> tuple[str, ...]:
    """The functions by which graphs are compiled that the installed torchair does not define; it is
    not imported.

    In releases where they are absent, importing torchair may fail already.
    """
    package = find_spec("torch_npu")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    files = [Path(folder, "dynamo", "torchair", "npu_fx_compiler.py") for folder in folders]
    source = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return tuple(name for name in _COMPILES_THROUGH if f"\ndef {name}(" not in source)


def ge_operators() -> ModuleType:
    """GE's operators as functions that add a node to the graph being built."""
    return import_module("torchair._ge_concrete_graph.ge_apis")


def ge_node(**parts: Any) -> Any:
    """Add a node to the GE graph being built; its outputs."""
    return import_module("torchair._ge_concrete_graph.compat_ir").ge_op(**parts)


def is_ge_tensor(value: Any) -> bool:
    return isinstance(value, import_module("torchair.ge._ge_graph").Tensor)


def ge_dtype(number: int) -> Any:
    """GE's dtype for the number that an argument of a torch_npu operator has for it."""
    return import_module("torchair.ge._ge_graph").torch_dtype_value_to_ge_proto_type(number)


def ge_converter(overload: Any) -> Callable[..., Any] | None:
    """torchair keeps a converter on the operator itself, and where that cannot be, in a table."""
    import_module("torchair._ge_concrete_graph.ge_converter.custom")
    table = import_module("torchair._ge_concrete_graph.fx2ge_converter")._CONVERTERS
    return getattr(overload, "_ge_converter", None) or table.get(overload)


def set_ge_converter(overload: Any, converter: Callable[..., Any] | None) -> None:
    overload._ge_converter = converter


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Fake tensors log the stack of an error that is raised as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operators as torch decomposes them, by overload."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())
