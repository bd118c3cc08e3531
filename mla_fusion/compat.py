"""Has every private or version-dependent name of torch, torch_npu and torchair.

``tests/project/test_private_names.py`` finds such names in other files. Five exceptions:

* ``compile/torchair_bridge.py``: how torchair and npugraph_ex compile, from inside
* ``compile/inductor_bridge.py``: what Inductor needs of its custom passes
* ``compile/offline/``: stand-ins for CANN's libraries, and parts of torch_npu and torchair that
  need a device
* ``modes.py``: the state of torch that belongs to the caller
* ``_autoload.py``: imported before torch

Names that are imported here and not used are torch's as they are. Modules that ``import torch``
loads are imported here at the top. Others are loaded on first use, so that ``import mla_fusion``
stays light.
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
from torch._C import DispatchKey, DispatchKeySet, FunctionSchema, parse_schema
from torch._C import _DisableAutocast as without_autocast
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel  # of a name, for a key
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fake_mode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

# True for a tensor that consists of other tensors: a DTensor, a quantised weight
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

if TYPE_CHECKING:
    from torch._dynamo import mark_static_address
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported, UserError
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Mod

_LATE = {  # loaded on first use
    "BackendCompilerFailed": "torch._dynamo.exc",
    "CeilToInt": "torch.utils._sympy.functions",
    "FloorDiv": "torch.utils._sympy.functions",
    "IntTrueDiv": "torch.utils._sympy.functions",
    "Mod": "torch.utils._sympy.functions",
    "TorchRuntimeError": "torch._dynamo.exc",
    "Unsupported": "torch._dynamo.exc",
    "UserError": "torch._dynamo.exc",
    "aot_autograd": "torch._dynamo.backends.common",
    "aot_module_simplified": "torch._functorch.aot_autograd",
    "make_fx": "torch.fx.experimental.proxy_tensor",
    "mark_static_address": "torch._dynamo",
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
    """Returns the arguments of a call, and defaults, by their names in the operator's schema."""
    arguments = schema_of(target).arguments
    names = [argument.name for argument in arguments]
    defaults = {
        argument.name: argument.default_value
        for argument in arguments
        if argument.has_default_value()
    }
    values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return {name: values[name] for name in names if name in values}


def overload_name(target: Any) -> str:
    """Returns ``Tensor`` for ``aten.add.Tensor``; "" if the target is no overload."""
    return getattr(target, "_overloadname", "")


def overload_of(operator: Any) -> Any:
    """Returns the overload of a ``torch.library.custom_op``, or the operator itself."""
    return getattr(operator, "_opoverload", operator)


# -- the dispatcher


def has_schema(name: str) -> bool:
    """Returns True if ``namespace::name`` or ``namespace::name.overload`` is defined."""
    base, _, overload = name.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(base, overload)
    except RuntimeError:
        return False
    return True


def has_argument(operator: str, name: str) -> bool:
    """Returns True if ``namespace::name`` is defined and has an argument of that name."""
    schemas = torch._C._jit_get_schemas_for_operator(operator)
    return any(argument.name == name for schema in schemas for argument in schema.arguments)


def registrations(name: str) -> list[str]:
    """Returns the dispatcher's lines about an operator: kernels by key, and who registered them."""
    return torch._C._dispatch_dump(name).splitlines()


def override(library: torch.library.Library, operator: str, kernel: Callable[..., Any]) -> None:
    """Registers a kernel for the library's key, in place of any other kernel."""
    if "allow_override" in signature(torch.library.Library.impl).parameters:  # since torch 2.8
        library.impl(operator, kernel, allow_override=True)
        return
    registered = getattr(torch.library, "_impls")  # noqa: B009  # its stubs leave it out
    registered.discard(f"{library.ns}/{operator}/{library.dispatch_key}")
    library.impl(operator, kernel)


def withdraw(library: torch.library.Library) -> list[OpOverloadPacket]:
    """Removes all that a library has registered. Returns its operators, which callers may still
    refer to.
    """
    names = {name.partition("::")[2].partition(".")[0] for name in library._op_defs}
    packets = vars(getattr(torch.ops, library.ns))
    old_packets = [packet for name, packet in packets.items() if name in names]
    library._destroy()
    return old_packets


def renew(packet: OpOverloadPacket) -> None:
    """Gives an old operator, and its overloads, the definition of now. The old one is freed."""
    namespace, _, name = str(packet._qualified_op_name).partition("::")
    new_packet = getattr(getattr(torch.ops, namespace), name)
    overloads = {
        name: vars(packet)[name] for name in new_packet.overloads() if name in vars(packet)
    }
    for name, overload in overloads.items():
        _become(overload, getattr(new_packet, name))
    _become(packet, new_packet)
    vars(packet).update(overloads)


def _become(old: Any, new: Any) -> None:
    """Gives an old operator all attributes of a new one. The hash stays."""
    call = _Call(new._op)
    call.old_hash = hash(old)
    vars(old).clear()
    vars(old).update(vars(new), _op=call)


class _Call(partial[Any]):
    """Calls the new operator. An operator's hash is the hash of this, and graphs have operators as
    keys.
    """

    old_hash: int

    def __hash__(self) -> int:
        return self.old_hash


# -- functionalisation

is_functional: Callable[[Tensor], bool] = torch._is_functional_tensor
functional: Callable[[Tensor], Tensor] = torch._to_functional_tensor


def content_of(tensor: Tensor) -> Tensor:
    """Returns the content of a functional tensor; any other tensor as it is."""
    if not is_functional(tensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


def set_content(tensor: Tensor, value: Tensor) -> None:
    """Sets the content of a functional tensor, as an operator that writes it does."""
    torch._functionalize_replace(tensor, value)
    torch._functionalize_commit_update(tensor)
    torch._functionalize_sync(tensor)


def below_functionalisation() -> AbstractContextManager[Any]:
    """Returns a context in which calls skip the kernels for Functionalize."""
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.Functionalize))


# -- tensors and their memory

storage_id: Callable[[Tensor], int] = getattr(torch._C, "_storage_id")  # noqa: B009  # its stubs leave it out
# raises RuntimeError if there is no counter
version_of: Callable[[Tensor], int] = attrgetter("_version")


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """Yields the tensors inside a wrapper, in AOT autograd's order; or the tensor itself."""
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif isinstance(tensor, Tensor):  # a wrapper may have other attributes
        yield tensor


def is_view(tensor: Tensor) -> bool:
    """Returns True if autograd knows the tensor as a view of another tensor."""
    return tensor._is_view()


def holders(tensor: Tensor) -> int:
    """Returns how many objects refer to the tensor's storage, the storage object made here among
    them.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# -- symbolic sizes


def expression_of(size: Any) -> Any:
    """Returns the sympy expression of a symbolic size."""
    return size.node.expr


def bounds_of(size: Any, part: Any) -> tuple[float, float]:
    """Returns the least and the largest value of an expression in the symbols of a size."""
    bounds = size.node.shape_env.bound_sympy(part)
    if bounds is None:  # torch does not know the symbol
        return 1, math.inf
    return float(bounds.lower), float(bounds.upper)


def take_name(node: Node, name: str) -> None:
    """Gives a node a name; no later node of its graph gets it."""
    node.name = name
    node.graph._graph_namespace._used_names.add(name)


def guarded_equal(size: Any) -> list[tuple[Any, Any]]:
    """Returns pairs of expressions that the guards of a graph with this size make equal."""
    from sympy import Eq, Expr

    env = size.node.shape_env
    conditions = (env.replace(guard.expr) for guard in env.guards)
    pairs = (condition.args for condition in conditions if isinstance(condition, Eq))
    return [(a, b) for a, b in pairs if isinstance(a, Expr) and isinstance(b, Expr)]


def guards_of(mode: FakeTensorMode | None) -> list[Any]:
    """Returns the guards on the mode's symbolic sizes as expressions, the newest last."""
    env = getattr(mode, "shape_env", None)
    return [guard.expr for guard in env.guards] if env is not None else []


_MADE_UP = "_mla_fusion_hints"  # marks sizes that a dump names, which were never traced


def hint_of(size: Any) -> Any:
    """Returns the value of a size, or of a condition on sizes, in the trace; None if unknown."""
    if isinstance(size, torch.SymBool) and hasattr(size.node.shape_env, _MADE_UP):
        return None
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymBool)) else size


def guard(condition: Any) -> bool | None:
    """Returns the value of a condition on sizes, and makes it a guard of the compiled graph.

    torch compiles the graph again for another value. If nothing checks guards, it returns True for
    a condition that always holds, False for one that the trace breaks, else None.
    """
    if isinstance(condition, bool):
        return condition
    if statically_known_true(condition):
        return True
    mode, env = getattr(_tracing_context(), "fake_mode", None), condition.node.shape_env
    hint = hint_of(condition)
    if mode is None or mode.shape_env is not env or env.frozen or hint is None:
        return False if hint is False else None
    return bool(condition)


def _hints(env: Any) -> dict[Any, Any]:
    """Returns values by symbol. The attribute's name depends on the release."""
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


ModeT = TypeVar("ModeT", bound=FakeTensorMode)


def symbolic_mode(kind: type[ModeT]) -> ModeT:
    """Returns a fake mode whose tensors may have sizes of `new_size`."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env: Any = ShapeEnv()
    setattr(env, _MADE_UP, True)
    env._replacements_version_counter = 1  # at 0, torch does not ask for replacements
    return kind(shape_env=env, allow_non_fake_inputs=True)


def take_for_one(a: Any, b: Any) -> None:
    """Makes two sizes equal, as an operator needs them. Raises RuntimeError if they differ."""
    torch._check(a == b)


def new_size(mode: FakeTensorMode, name: str, hint: int, largest: int) -> torch.SymInt:
    """Returns a symbolic size from 2 to ``largest``. torch uses ``hint`` if it needs a number."""
    import sympy
    from torch.fx.experimental.sym_node import SymNode
    from torch.utils._sympy.value_ranges import ValueRanges

    env: Any = mode.shape_env
    symbol = sympy.Symbol(name, positive=True, integer=True)
    _hints(env)[symbol] = sympy.Integer(hint)
    env.var_to_range[symbol] = ValueRanges(2, largest)
    return torch.SymInt(SymNode(symbol, env, int, hint))


# -- FX graphs

# the module of torch's functions in C++ (torch._C._nn.linear) in graphs before AOT autograd
C_FUNCTIONS = "torch._C"


def call_like(graph: Graph, other: Graph) -> None:
    """Gives ``graph`` the nesting of arguments and results that ``other`` has."""
    graph.set_codegen(other._codegen)


def _source(placeholder: Node) -> Any:
    """Returns how dynamo reaches an input; None if dynamo has not noted it."""
    return placeholder.meta["grapharg"].source if "grapharg" in placeholder.meta else None


def _value(attribute: Any) -> Any:
    """Returns the value of an attribute that some releases have as a method."""
    return attribute() if callable(attribute) else attribute


def source_name(placeholder: Node) -> str:
    """Returns the expression of an input, such as ``L['self'].eps``; "" if it is unknown."""
    return str(_value(getattr(_source(placeholder), "name", "")))


def broken_at(gm: Any) -> str:
    """Returns where a graph break ends dynamo's graph, as ``file:line in function``.

    Returns "" if there is no graph break before or behind the graph, or if dynamo does not say.
    """
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    for frame in getattr(reason, "user_stack", ())[-1:]:
        if reason.graph_break or "torch_dynamo_resume_in_" in frame.name:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def is_held(placeholder: Node) -> bool:
    """Returns True if dynamo reaches the input through a module, its class, or a global."""
    kind = _value(getattr(_source(placeholder), "guard_source", None))
    name = getattr(kind, "name", "")
    return "NN_MODULE" in name or name.startswith("GLOBAL")


def is_argument(placeholder: Node) -> bool:
    """Returns True if dynamo reaches the input through an argument or a local variable."""
    return _source(placeholder) is not None and not is_held(placeholder)


# -- dynamo

_OF_SIZES = ("dynamic_indices", "dynamic_range", "hint_overrides", "static_indices")
HELD = "_mla_fusion_numbers"  # our mark of a fake tensor: facts about the numbers of its vector
_STATIC = "_dynamo_static_input_type"
_MARKS = (HELD, _STATIC, *(f"_dynamo_{mark}" for mark in _OF_SIZES))


def _tracing_context() -> Any:
    """Returns the context of the compilation that runs now; None if none runs."""
    return torch._guards.TracingContext.try_get()


def is_of_model(value: Any) -> bool:
    """Returns True for a parameter, and for a buffer of a module that dynamo traces."""
    return isinstance(value, torch.nn.Parameter) or getattr(value, _STATIC, None) is not None


def static_inputs() -> frozenset[int] | None:
    """Returns the places of parameters and buffers among the inputs of the graph that AOT autograd
    compiles; None if it does not say.
    """
    metadata = getattr(_tracing_context(), "fw_metadata", None)
    places = getattr(metadata, "static_input_indices", None)
    return None if places is None else frozenset(places)


def in_tracing_mode(inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs of dynamo's graph, with all fake tensors in the mode of dynamo's trace.

    AOT autograd does so since torch 2.11. In earlier releases it asserts that there are no others.
    """
    context = _tracing_context()
    mode = getattr(context, "fake_mode", None)

    def moved(value: Any) -> Any:
        """Returns an input in the mode of the trace."""
        if mode is None or not isinstance(value, FakeTensor) or value.fake_mode is mode:
            return value
        # how dynamo read its sizes: the same symbols again
        known = context.tensor_to_context.get(value)
        source = known.tensor_source if known is not None else None
        rebuilt = mode.from_tensor(value, symbolic_context=known, source=source, trace=False)
        copy_marks(value, rebuilt)
        return rebuilt

    return list(map(moved, inputs))


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Copies the marks that ``mark_dynamic``, ``mark_static`` and the like make on a tensor."""
    for mark in _MARKS:
        if hasattr(source, mark):
            setattr(target, mark, copy.copy(getattr(source, mark)))


def is_saving() -> bool:
    """Returns True if torch saves the compiled graph, as for ``torch.compile(..).aot_compile``."""
    config: Any = import_module("torch._functorch.config")
    options = ("bundled_autograd_cache", "strict_autograd_cache")
    return all(getattr(config, name, False) for name in options)


# -- torchair

_COMPILES_THROUGH = ("_compile_graph_with_aot", "_get_merged_decompositions", "_process_send_recv")


def torchair_lacks() -> tuple[str, ...]:
    """Returns the functions for compiling graphs that the installed torchair does not define.

    torchair is not imported: that may fail in releases without these functions.
    """
    package = find_spec("torch_npu")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    files = [Path(folder, "dynamo", "torchair", "npu_fx_compiler.py") for folder in folders]
    source = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return tuple(name for name in _COMPILES_THROUGH if f"\ndef {name}(" not in source)


def ge_operators() -> ModuleType:
    """Returns GE's operators, as functions that add a node to the graph being built."""
    return import_module("torchair._ge_concrete_graph.ge_apis")


def ge_node(**parts: Any) -> Any:
    """Adds a node to the GE graph being built. Returns its outputs."""
    return import_module("torchair._ge_concrete_graph.compat_ir").ge_op(**parts)


def is_ge_tensor(value: Any) -> bool:
    """Returns True for an output of a node of a GE graph."""
    return isinstance(value, import_module("torchair.ge._ge_graph").Tensor)


def ge_dtype(number: int) -> Any:
    """Returns GE's dtype for the number of a dtype in an argument of a torch_npu operator."""
    return import_module("torchair.ge._ge_graph").torch_dtype_value_to_ge_proto_type(number)


def ge_converter(overload: Any) -> Callable[..., Any] | None:
    """Returns torchair's converter: an attribute of the operator, or an entry of a table."""
    import_module("torchair._ge_concrete_graph.ge_converter.custom")
    table = import_module("torchair._ge_concrete_graph.fx2ge_converter")._CONVERTERS
    return getattr(overload, "_ge_converter", None) or table.get(overload)


def set_ge_converter(overload: Any, converter: Callable[..., Any] | None) -> None:
    """Sets torchair's converter of an operator."""
    overload._ge_converter = converter


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps fake tensors from logging the stack of an error that they raise."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns torch's decompositions of operators, by overload."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    return dict(core_aten_decompositions()) | get_decompositions([torch.ops.aten.native_layer_norm])
