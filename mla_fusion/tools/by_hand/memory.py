"""Runs a function, names and compares its results and all that it can write, and restores what its
modules hold.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, traceback

from mla_fusion.compat import tree_leaves, tree_map_only
from mla_fusion.fx.kinds import is_float
from mla_fusion.witness.compare import ROW_FACTOR

Inputs = Sequence[Any]  # the arguments of a function
Tensors = dict[str, Tensor]  # by name
Target = Callable[..., Any]  # a module, a method of a module, a function, a graph


def address(value: Tensor) -> int:
    """Returns the address of a tensor's memory; 0 if it has none."""
    return value.untyped_storage().data_ptr()


def tensors_in(item: Any) -> list[Tensor]:
    """Returns the tensors of an item, and of lists and dicts in it."""
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]


def copies_of(inputs: Inputs) -> list[Any]:
    """Returns copies, also of tensors in lists and dicts. Copies share memory as the inputs do."""
    known: dict[int, Any] = {}
    return list(tree_map_only(Tensor, lambda v: copy.deepcopy(v.detach(), known), list(inputs)))


def scale(inputs: Inputs, factor: float, width: int | None = None) -> list[Any]:
    """Returns the inputs with floats times ``factor``: all, or those whose last axis is
    ``width``.
    """

    def scale_tensor(value: Tensor) -> Tensor:
        """Returns one of the tensors."""
        has_width = width is None or (value.dim() > 1 and value.shape[-1] == width)
        return value * factor if has_width and is_float(value.dtype) else value

    return list(tree_map_only(Tensor, scale_tensor, list(inputs)))


def has_same_bits(first: Tensor, second: Tensor) -> bool:
    """Returns True if shape, dtype and bits of two tensors are equal, those of NaNs too."""
    has_same_form = first.shape == second.shape and first.dtype == second.dtype
    return has_same_form and torch.equal(bits(first), bits(second))


def bits(value: Tensor) -> Tensor:
    """Returns the bytes of a tensor in one row."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def modules_of(target: object) -> dict[str, nn.Module]:
    """Returns the modules of a module, or of a method's module, by path."""
    owner = getattr(target, "__self__", target)
    return dict(owner.named_modules()) if isinstance(owner, nn.Module) else {}


def tensors_of_modules(target: object) -> Tensors:
    """Returns buffers, and tensors among the attributes, also in lists and dicts; no parameters."""
    values: dict[str, Any] = {}
    for path, module in modules_of(target).items():
        prefix = f"{path}." if path else ""
        values |= {f"buffer {prefix}{name}": value for name, value in module._buffers.items()}
        values |= {
            f"attribute {prefix}{name}": value
            for name, value in vars(module).items()
            if name[:1] != "_"
        }
    return _writable_tensors(values)


def tensors_of_inputs(inputs: Inputs) -> Tensors:
    """Returns the tensors among the arguments: "argument 3"; in a list or dict, "argument 3.0"."""
    return _writable_tensors({f"argument {at}": value for at, value in enumerate(inputs)})


def _writable_tensors(values: Mapping[str, Any]) -> Tensors:
    """Returns the tensors that can be written. A tensor in a list or dict has its place there
    behind the name.
    """
    return {
        name if leaf is value else f"{name}.{at}": leaf
        for name, value in values.items()
        for at, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
        if not isinstance(leaf, nn.Parameter)
    }


@contextlib.contextmanager
def restore(target: object) -> Iterator[None]:
    """Restores at the end what a module holds: the same tensors under the same names, with the same
    content.
    """
    attributes = [vars(module) for module in modules_of(target).values()]
    values = [value for names in attributes for value in names.values()]
    containers = [
        (item, copy.copy(item)) for item in (*values, *attributes) if isinstance(item, (list, dict))
    ]
    tensors = tensors_of_modules(target)
    copies = _copies(tensors)
    try:
        yield
    finally:
        for container, contents in containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(contents)
        with torch.no_grad():
            for name, value in tensors.items():
                if not has_same_bits(value, copies[name]):  # some tensors cannot be written
                    value.copy_(copies[name])


@dataclass(frozen=True)
class Values:
    """Copies of the tensors of one run, by name.

    after      results, and all that can be written, as the run leaves it
    before     all that can be written, before the run
    addresses  the names of tensors by the address of their memory
    """

    after: Tensors
    before: Tensors
    addresses: dict[int, str]


def values_of(target: Target, inputs: Inputs) -> Values:
    """Runs ``target`` on copies of the inputs, and returns the tensors."""
    arguments = copies_of(inputs)

    def reachable() -> Tensors:
        """Returns the tensors that the target can write."""
        return tensors_of_inputs(arguments) | tensors_of_modules(target)

    start = reachable()
    before = _copies(start)
    is_graph = isinstance(target, GraphModule)
    call: Any = Interpreter(target).run if is_graph else target  # type: ignore[arg-type]
    with restore(target), torch.no_grad(), traceback.preserve_node_meta(is_graph):
        results = tree_leaves(call(*arguments))
        outputs = {f"output {at}": leaf for at, leaf in enumerate(results)}
        end = reachable()
        after = _copies(_writable_tensors(outputs) | start | end)
    tensors = (*start.items(), *end.items())
    addresses = {address(value): name for name, value in tensors if value.numel()}
    return Values(after, before, addresses)


def _copies(tensors: Tensors) -> Tensors:
    """Returns copies that later writes do not change."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def relative_errors(expected: Values, actual: Values) -> dict[str, float]:
    """Returns the relative error of each result, and of each tensor that either run changes.

    Of a changed tensor it compares the rows that either run changes. The error is infinite for
    another number of elements. A tensor that only one run can write is left out.
    """
    errors: dict[str, float] = {}
    for name, value in expected.after.items():
        other, before = actual.after.get(name), expected.before.get(name)
        if other is None and before is not None:
            continue
        if (
            other is None
            or other.numel() != value.numel()
            or other.is_complex() != value.is_complex()
        ):
            errors[name] = math.inf
            continue
        rows, other_rows = _rows(value), _rows(other.reshape(value.shape))
        if before is not None and before.shape == value.shape == other.shape:
            start = _rows(actual.before.get(name, other))
            changed = (_differs(rows, _rows(before)) | _differs(other_rows, start)).any(-1)
            if not changed.any():
                continue
            rows, other_rows = rows[changed], other_rows[changed]
        errors[name] = relative_error(rows, other_rows)
    return errors


def _differs(first: Tensor, second: Tensor) -> Tensor:
    """Returns which elements differ. NaN is equal to NaN: unwritten memory may hold it."""
    return (first != second) & ~(first.isnan() & second.isnan())


def _rows(value: Tensor) -> Tensor:
    """Returns a tensor on the CPU as a matrix of float64."""
    value = value.detach().to("cpu")
    wide = (torch.view_as_real(value).flatten(-2) if value.is_complex() else value).double()
    return wide.reshape(-1, wide.shape[-1] if wide.numel() and wide.dim() else 1)


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Returns the relative error of the whole tensor, or of its worst row by the factor for rows.

    Masked scores are infinite, and unwritten memory may be NaN: both tensors must be so there.
    """
    expected, actual = _rows(expected), _rows(actual)
    odd = ~(expected.isfinite() & actual.isfinite())
    if _differs(expected, actual)[odd].any():
        return math.inf
    expected, actual = expected.masked_fill(odd, 0.0), actual.masked_fill(odd, 0.0)
    off, size = (actual - expected).square().sum(-1), expected.square().sum(-1)
    if not off.any():
        return 0.0
    of_all = (off.sum() / size.sum().clamp_min(1e-60)).sqrt()
    of_rows = torch.where(off == 0, 0.0, (off / size.clamp_min(1e-60)).sqrt())
    return float(torch.maximum(of_all, of_rows.max() / ROW_FACTOR))
