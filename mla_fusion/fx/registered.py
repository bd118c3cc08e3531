"""Registers operators of the user's own: what each computes, as a function of torch's operators.

The pass reads a call as the graph of that function (:func:`body`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

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
)
from mla_fusion.fx.kinds import called, is_torchs_own, op_name
from mla_fusion.modes import outside_modes

log = logging.getLogger("mla_fusion")
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # by overload
_DIFFERENCES: dict[Any, str] = {}  # by overload: how its function differs from its kernel, or ""
_CPU = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")  # kernels that run on CPU
_TOLERANCE = 1e-2  # of the largest number: rounding in two kernels differs by less


def register_operator(op: Any, decomposition: Callable[..., Any] | None, *example: Any) -> None:
    """Registers what an operator of your own computes, so that prologues that use it fuse.

    op             ``torch.ops.mylib.rope``, an overload of it, or the result of
                   ``torch.library.custom_op``
    decomposition  a function that takes its arguments and returns its results, made of torch's
                   operators; None: forget the operator
    example        arguments on which both are run and compared, where the operator has a kernel for
                   them

    The graph that runs still calls the operator wherever nothing was fused. A proof takes the
    operator for the function. The function is checked on the example and, if the operator has a
    kernel for CPU, once on random inputs when a graph first calls it. A function that differs is
    not used, and the report says how much it differs. Compile caches are not used while a function
    is registered.

    Raises TypeError if ``op`` is no operator, or if the function takes other arguments. Raises
    ValueError for an operator of torch's or torch_npu's, for one that writes into an argument, and
    if one of the two fails on the example or their results differ by more than 1e-2 of the largest
    number, or are all 0, infinite or NaN. A function registered before then stays.
    """
    overload = _overload(op)
    _DIFFERENCES.pop(overload, None)
    if decomposition is None:
        _FUNCTIONS.pop(overload, None)
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
        # a result of zeros, infinities and NaN tells nothing
        _compare(
            overload,
            decomposition,
            example,
            {},
            lambda result: result.to(torch.complex128).nan_to_num(0, 0, 0).any(),
        )
    _FUNCTIONS[overload] = decomposition


def _overload(op: Any) -> OpOverload:
    """Returns the overload that a user names. Raises TypeError if there is none, or several."""
    overload = overload_of(op)
    if isinstance(overload, OpOverloadPacket):
        names = overload.overloads()
        if len(names) != 1:
            raise TypeError(
                f"{overload} has the overloads {', '.join(names)}: name one, such as "
                f"{overload}.{names[0]}"
            )
        overload = getattr(overload, names[0])
    if not isinstance(overload, OpOverload):
        raise TypeError(
            f"expected an operator such as torch.ops.mylib.rope, got {type(op).__name__}"
        )
    return overload


def _check_arguments(overload: OpOverload, decomposition: Callable[..., Any]) -> None:
    """Raises TypeError if the function does not take the arguments that the operator needs."""
    needed = [item for item in schema_of(overload).arguments if not item.has_default_value()]
    try:
        signature = inspect.signature(decomposition)
    except ValueError:  # a function of torch's without a signature
        return
    try:
        signature.bind(
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
    tells: Callable[[Tensor], Any],
) -> None:
    """Raises ValueError if the function gives other results for an example than the operator.

    tells  whether a result of the operator tells anything
    """
    results = []
    for what, function in (("it", overload), ("its decomposition", decomposition)):
        try:
            with torch.no_grad():
                results.append(tree_leaves(function(*example, **options)))
        except Exception as error:
            detail = f"{what} fails on the example: {type(error).__name__}: {error}"
            raise ValueError(f"{overload}: {detail}") from error
    expected, actual = results
    if len(expected) != len(actual):
        raise ValueError(
            f"{overload} gives {len(expected)} results, its decomposition {len(actual)}"
        )
    for place, (want, got) in enumerate(zip(expected, actual, strict=True)):
        are_tensors = isinstance(want, Tensor) and isinstance(got, Tensor)
        if not are_tensors or _described(want) != _described(got):
            raise ValueError(
                f"{overload}, result {place}: {_described(want)}; of its "
                f"decomposition {_described(got)}"
            )
        deviation = _relative_error(want, got)
        if not deviation <= _TOLERANCE:
            raise ValueError(
                f"{overload}, result {place}: its decomposition is off by {deviation:.2g} of "
                f"the largest number, more than {_TOLERANCE}"
            )
    if not any(map(tells, expected)):
        raise ValueError(f"{overload}: the example has no numbers to compare")


def _relative_error(want: Tensor, got: Tensor) -> float:
    """Returns the largest difference, relative to the largest finite number of the first tensor.

    Infinities and NaN have to be equal.
    """
    want, got = (value.to(torch.complex128) for value in (want, got))
    differ = (want != got) & ~(want.isnan() & got.isnan())
    if not differ.any():
        return 0.0
    largest = want.abs().nan_to_num(0.0, 0.0).max().clamp_min(1e-30)
    return float((want - got)[differ].abs().max() / largest)


def _described(value: Any) -> str:
    """Returns dtype and shape of a tensor; the type of anything else."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def digest() -> str:
    """Returns "" if nothing is registered, else a text that is never the same again.

    What a function computes may depend on all that it reads, so no compile cache has a graph of it.
    """
    return uuid4().hex if _FUNCTIONS else ""


def unknown(nodes: Iterable[Node]) -> list[str]:
    """Returns the names of the nodes' operators that are neither torch's nor registered."""
    names = (
        op_name(node)
        for node in nodes
        if node.op == "call_function"
        and not is_torchs_own(called(node))
        and called(node) not in _FUNCTIONS
    )
    return [*dict.fromkeys(names)]


# -- what a call computes


def body(node: Node) -> Graph | str:
    """Returns the graph of a registered operator's function for a call of it.

    Its inputs are ``node.all_input_nodes``. Returns the reason if the function cannot be used, and
    "" for any other node.
    """
    function = _FUNCTIONS.get(node.target) if _FUNCTIONS else None
    if function is None:
        return ""
    try:
        traced = _traced(node, function)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = _misfit(node, traced) or _difference(node, function)
        if not reason:
            return traced
    log.warning("the decomposition of %s is not used for %s: %s", node.target, node.name, reason)
    return reason


def _difference(node: Node, function: Callable[..., Any]) -> str:
    """Returns how the function differs from the operator's kernel for CPU, once for an operator.

    Both run on random floats, and zeros for integers, of the sizes of this call. Returns "" if they
    agree, or if no such kernel runs.
    """
    overload: Any = node.target
    if overload in _DIFFERENCES:
        return _DIFFERENCES[overload]
    _DIFFERENCES[overload] = ""
    if any(has_kernel(overload.name(), key) for key in _CPU):
        with outside_modes():
            try:
                draw = partial(_drawn, torch.Generator().manual_seed(0))
                example, options = map_arg((node.args, node.kwargs), draw)
                overload(*example, **options)
            except Exception:  # it needs other inputs, or another device
                return ""
            try:
                # of zeros for integers it may make zeros
                _compare(overload, function, example, options, torch.numel)
            except ValueError as error:
                _DIFFERENCES[overload] = str(error)
    return _DIFFERENCES[overload]


def _drawn(generator: torch.Generator, node: Node) -> Any:
    """Returns random numbers for a node's tensor, or the number that its size was traced with."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return hint_of(value)
    zeros = torch.zeros([hint_of(size) for size in value.shape], dtype=value.dtype)
    if not value.is_floating_point() or value.dtype.itemsize == 1:
        return zeros
    return zeros.normal_(generator=generator)


def _misfit(node: Node, traced: Graph) -> str:
    """Returns why a traced function cannot take the place of a call, or ""."""
    if traced.find_nodes(op="get_attr"):
        return "it makes a tensor of its own numbers; use torch.full, torch.arange and the like"
    expected = ", ".join(map(_described, tree_leaves(node.meta["val"])))
    results: Any = map_arg(traced.output_node().args[0], lambda item: item.meta["val"])
    actual = ", ".join(map(_described, results))
    return "" if actual == expected else f"it gives {actual}, not {expected}"


def _traced(node: Node, function: Callable[..., Any]) -> Graph:
    """Returns the graph of a function for the arguments of a call.

    Raises ValueError if it is right only for some sizes.
    """
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    tensors = (value for value in tree_leaves(values) if isinstance(value, FakeTensor))
    mode = next((tensor.fake_mode for tensor in tensors), None)
    count = len(guards_of(mode))
    graph = traced_call(node, lambda *args, **kwargs: tree_leaves(function(*args, **kwargs)), mode)
    if new := guards_of(mode)[count:]:
        raise ValueError(f"it depends on a size: {new[0]}")
    return graph


def traced_call(
    node: Node, function: Callable[..., Any], mode: Any, table: Mapping[Any, Any] | None = None
) -> Graph:
    """Returns the graph of what a function computes of the arguments of a call.

    Its inputs are ``node.all_input_nodes``.

    mode   the mode of the operands' fake tensors, or None
    table  decompositions by operator
    """
    operands = node.all_input_nodes

    def results(*values: Any) -> Any:
        """Returns the results for the values of the operands."""
        value_of_operand = dict(zip(operands, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), value_of_operand.__getitem__)
        return function(*args, **kwargs)

    with mode or nullcontext(), torch.no_grad():
        return make_fx(results, table)(*(operand.meta["val"] for operand in operands)).graph
