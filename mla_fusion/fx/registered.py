"""Operators of the user's own: what each computes, as a function made of torch's operators.

The pass reads a call as the graph of that function (:func:`body`).
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType, ModuleType, NoneType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import (
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    guards_of,
    has_kernel,
    hint_of,
    make_fx,
    overload_of,
    schema_of,
    tree_leaves,
    tree_map_only,
)
from mla_fusion.fx.kinds import called, is_torchs_own, op_name
from mla_fusion.modes import outside_modes

log = logging.getLogger("mla_fusion")
_KNOWN: dict[Any, Callable[..., Any]] = {}  # by overload
_COMPARED: dict[Any, str] = {}  # by overload: how its function differs from its kernel, "" if not
_CPU = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")  # kernels that run on CPU
_OFF = 1e-2  # of the largest number: what two kernels round otherwise is less


def register_operator(op: Any, decomposition: Callable[..., Any] | None, *example: Any) -> None:
    """Say what an operator of your own computes, so that prologues that use it fuse.

    op             ``torch.ops.mylib.rope``, an overload of it, or what ``torch.library.custom_op``
                   returned
    decomposition  a function that takes its arguments and returns its results, made of torch's
                   operators; None: forget the operator
    example        arguments on which both are run and compared, where the operator has a kernel for
                   them

    The graph that runs still calls the operator wherever nothing was fused. What the function
    computes is taken for what the operator computes: it is proved with. It is checked on the
    example and, if the operator has a kernel for CPU, once on random inputs when a graph first
    calls it: a function that differs is not used, and the report says how far it is off. Compile
    caches are keyed on its code and numbers; what holds more is not cached.

    Raises TypeError for what is no operator and for a function of other arguments; ValueError for
    an operator of torch's or of torch_npu's, for one that writes into an argument, and where the
    function fails on the example or gives other results (off by more than 1e-2 of the largest
    number), or the example has no numbers to compare. What was registered before then stays.
    """
    overload = _overload(op)
    _COMPARED.pop(overload, None)
    if decomposition is None:
        _KNOWN.pop(overload, None)
        return
    if not callable(decomposition):
        raise TypeError(
            f"decomposition of {overload}: expected a function, got {type(decomposition).__name__}"
        )
    if is_torchs_own(overload):
        raise ValueError(
            f"{overload} is not yours to register: {overload.namespace} is torch's or torch_npu's"
        )
    schema = schema_of(overload)
    if any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns)):
        raise ValueError(
            f"{overload} writes into an argument, or returns a view of one: it is no "
            "function of them"
        )
    _check_arguments(overload, decomposition)
    if example:
        _compare(overload, decomposition, example, {})
    _KNOWN[overload] = decomposition


def _overload(op: Any) -> OpOverload:
    found = overload_of(op)
    if isinstance(found, OpOverloadPacket):
        names = found.overloads()
        if len(names) != 1:
            raise TypeError(
                f"{found} has the overloads {', '.join(names)}: name one, such as "
                f"{found}.{names[0]}"
            )
        found = getattr(found, names[0])
    if not isinstance(found, OpOverload):
        raise TypeError(
            f"expected an operator such as torch.ops.mylib.rope, got {type(op).__name__}"
        )
    return found


def _check_arguments(overload: OpOverload, decomposition: Callable[..., Any]) -> None:
    needed = [item for item in schema_of(overload).arguments if not item.has_default_value()]
    try:
        takes = inspect.signature(decomposition)
    except ValueError:  # a function of torch's that does not say
        return
    try:
        takes.bind(
            *(None for item in needed if not item.kwarg_only),
            **{item.name: None for item in needed if item.kwarg_only},
        )
    except TypeError as error:
        raise TypeError(f"{overload}: its decomposition takes other arguments: {error}") from error


def _compare(
    overload: OpOverload,
    decomposition: Callable[..., Any],
    example: tuple[Any, ...],
    options: Mapping[str, Any],
) -> None:
    with torch.no_grad():
        wanted = tree_leaves(overload(*example, **options))
        try:
            found = tree_leaves(decomposition(*example))
        except Exception as error:
            said = f"its decomposition fails on the example: {type(error).__name__}: {error}"
            raise ValueError(f"{overload}: {said}") from error
    if len(wanted) != len(found):
        raise ValueError(f"{overload} gives {len(wanted)} results, its decomposition {len(found)}")
    for place, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if (
            not isinstance(want, Tensor)
            or not isinstance(got, Tensor)
            or _described(want) != _described(got)
        ):
            raise ValueError(
                f"{overload}, result {place}: {_described(want)}; of its "
                f"decomposition {_described(got)}"
            )
        apart = _apart(want, got)
        if not apart <= _OFF:
            raise ValueError(
                f"{overload}, result {place}: its decomposition is off by {apart:.2g} of "
                f"the largest number, more than {_OFF}"
            )
    if not any(want.numel() for want in wanted):
        raise ValueError(f"{overload}: the example has no numbers to compare")


def _apart(want: Tensor, got: Tensor) -> float:
    """How far two results are from each other, relative to the largest finite number of the first;
    infinities and NaN are what they are.
    """
    want, got = (
        (torch.view_as_real(value) if value.is_complex() else value).double()
        for value in (want, got)
    )
    differ = (want != got) & ~(want.isnan() & got.isnan())
    if not bool(differ.any()):
        return 0.0
    largest = (
        want[want.isfinite()].abs().max() if bool(want.isfinite().any()) else want.new_ones(())
    )
    return float((want - got)[differ].abs().max() / largest.clamp_min(1e-30))


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def digest() -> str:
    """Of all that was registered: graphs depend on it. Of a function that reads more than numbers
    and torch it is another one each time: nothing says whether that is still the same.
    """
    found = sha256()
    for known in sorted(_KNOWN, key=str):
        found.update(f"{known} {_text(_KNOWN[known])}".encode())
    return found.hexdigest() if _KNOWN else ""


_LITERALS = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_OWN = frozenset((*sys.stdlib_module_names, "torch"))  # modules whose release says what they are


def _text(value: Any, inside: tuple[Any, ...] = ()) -> str:
    """Equal for values that compute the same, in other processes too; of a value that does not tell
    what it is, equal to nothing. ``inside``: functions and lists that it was reached through.
    """
    if any(known is value for known in inside):
        return "itself"
    within = (*inside, value)
    if isinstance(value, _LITERALS):
        return repr(value)
    if isinstance(value, OpOverload | OpOverloadPacket):
        return str(value)
    if isinstance(value, tuple | list):
        return f"{type(value)} {[_text(item, within) for item in value]}"
    if _is_named(value):
        return f"{value.__module__} {value.__qualname__}" if callable(value) else value.__name__
    if not isinstance(value, FunctionType):
        return uuid4().hex
    code, names = value.__code__, value.__globals__
    read = [(name, names[name]) for name in names_in(code) if name in names]
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    defaults = value.__defaults__, list((value.__kwdefaults__ or {}).items())
    return f"{_steps(code)} {_text([*read, cells, *defaults], within)}"


def _is_named(value: Any) -> bool:
    """Does its name tell what it is? So do those of modules, classes and functions of torch and
    Python.
    """
    is_function = isinstance(value, FunctionType) and not value.__closure__
    if not is_function and not isinstance(value, ModuleType | type):
        return False
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(name).partition(".")[0] in _OWN


def names_in(code: CodeType) -> Iterator[str]:
    """Names that the code and what is defined in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _steps(code: CodeType) -> str:
    held = [_steps(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {held}"


def unknown(nodes: Iterable[Node]) -> list[str]:
    """The operators among the nodes' that are neither torch's nor registered, by name."""
    others = (
        op_name(node)
        for node in nodes
        if node.op == "call_function"
        and not is_torchs_own(called(node))
        and called(node) not in _KNOWN
    )
    return [*dict.fromkeys(others)]


# -- what a call computes


def body(node: Node) -> Graph | str:
    """Of a call of a registered operator the graph of its function, whose inputs are
    ``node.all_input_nodes``; why there is none, where the function cannot be traced for the call;
    "" for any other node.
    """
    function = _KNOWN.get(node.target) if _KNOWN and node.op == "call_function" else None
    if function is None:
        return ""
    try:
        traced = _traced(node, function)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    else:
        why = _unfit(node, traced) or _difference(node, function)
    if why:
        log.warning("the decomposition of %s is not used for %s: %s", node.target, node.name, why)
    return why or traced.graph


def _difference(node: Node, function: Callable[..., Any]) -> str:
    """How the function differs from the operator's kernel for CPU, on random floats and on zeros
    for integers, of the sizes of this call; "" where it does not, or where no such kernel runs.
    """
    overload: Any = node.target
    if overload not in _COMPARED:
        _COMPARED[overload] = ""
        if any(has_kernel(overload.name(), key) for key in _CPU):
            with outside_modes():
                try:
                    example, options = tree_map_only(
                        Node, lambda operand: _drawn(operand.meta["val"]), (node.args, node.kwargs)
                    )
                    overload(*example, **options)
                except Exception:  # it needs other inputs than drawn ones, or another device
                    return ""
                try:
                    _compare(overload, partial(function, **options), example, options)
                except ValueError as error:
                    _COMPARED[overload] = str(error)
    return _COMPARED[overload]


def _drawn(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return hint_of(value)
    zeros = torch.zeros([hint_of(size) for size in value.shape], dtype=value.dtype)
    if not value.is_floating_point() or value.dtype.itemsize == 1:
        return zeros
    return zeros.normal_(generator=torch.Generator().manual_seed(0))


def _unfit(node: Node, traced: GraphModule) -> str:
    if traced.graph.find_nodes(op="get_attr"):
        return "it makes a tensor of its own numbers; use torch.full, torch.arange and the like"
    (output,) = traced.graph.find_nodes(op="output")
    wanted = tree_leaves(node.meta["val"])
    given = [item.meta["val"] if isinstance(item, Node) else item for item in output.args[0]]
    if list(map(_described, wanted)) == list(map(_described, given)):
        return ""
    return f"it gives {', '.join(map(_described, given))}, not {', '.join(map(_described, wanted))}"


def _traced(node: Node, function: Callable[..., Any]) -> GraphModule:
    operands = node.all_input_nodes

    def flat(*values: Any) -> list[Any]:
        held = dict(zip(operands, values, strict=True))
        args, kwargs = tree_map_only(Node, held.__getitem__, (node.args, dict(node.kwargs)))
        return tree_leaves(function(*args, **kwargs))

    values = [operand.meta["val"] for operand in operands]
    fakes = [value for value in tree_leaves(values) if isinstance(value, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else None
    known = len(guards_of(mode))
    with mode or nullcontext(), torch.no_grad():
        traced = make_fx(flat)(*values)
    if new := guards_of(mode)[known:]:
        raise ValueError(f"it depends on a size: {new[0]}")
    return traced
