"""What a run leaves behind: results, arguments and what modules hold; named, compared, put back."""

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

Inputs = Sequence[Any]  # what a function is called with
Tensors = dict[str, Tensor]  # by name
Target = Callable[..., Any]  # what is audited: a module, a method of one, a function, a graph
_WEIGHT_OF_A_ROW = 2.5  # a row may be so many times as far off as the whole


def place(value: Tensor) -> int:
    """Where its memory lies; 0 for none."""
    return value.untyped_storage().data_ptr()


def tensors_in(item: Any) -> list[Tensor]:
    """Inside lists and dicts too."""
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]


def copied(inputs: Inputs) -> list[Any]:
    """Copies, inside lists and dicts too. What shares memory shares it in the copies."""
    known: dict[int, Any] = {}
    return list(tree_map_only(Tensor, lambda v: copy.deepcopy(v.detach(), known), list(inputs)))


def scaled(inputs: Inputs, factor: float, width: int | None = None) -> list[Any]:
    """The inputs, with the floats (those of that last axis) times ``factor``."""

    def changed(value: Tensor) -> Tensor:
        is_meant = width is None or (value.dim() > 1 and value.shape[-1] == width)
        return value * factor if is_meant and is_float(value.dtype) else value

    return list(tree_map_only(Tensor, changed, list(inputs)))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal shape, dtype and bits; NaNs with the same bits are the same."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bits(one), bits(other))


def bits(value: Tensor) -> Tensor:
    """Its bytes in one row."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def modules_of(target: object) -> dict[str, nn.Module]:
    """The modules of a module, or of one that a method belongs to, by path."""
    owner = getattr(target, "__self__", target)
    return dict(owner.named_modules()) if isinstance(owner, nn.Module) else {}


def held_by(target: object) -> Tensors:
    """Buffers of a module, and tensors among its plain attributes, in lists and dicts too;
    parameters are not.
    """
    values: dict[str, Any] = {}
    for path, module in modules_of(target).items():
        prefix = f"{path}." if path else ""
        values |= {f"buffer {prefix}{name}": value for name, value in module._buffers.items()}
        values |= {
            f"attribute {prefix}{name}": value
            for name, value in vars(module).items()
            if name[:1] != "_"
        }
    return _tensors(values)


def named(inputs: Inputs) -> Tensors:
    """Every tensor among the arguments: "argument 3"; in a list or dict, "argument 3.0"."""
    return _tensors({f"argument {at}": value for at, value in enumerate(inputs)})


def _tensors(values: Mapping[str, Any]) -> Tensors:
    """The tensors that have memory which can be written; one in a list or dict has its place there
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
def kept(target: object) -> Iterator[None]:
    """What a module holds is as before afterwards: the same tensors under the same names, with the
    same content.
    """
    modules = modules_of(target).values()
    holders = [item for module in modules for item in (vars(module), module._buffers)]
    inside = [item for holder in holders for item in holder.values()]
    containers = [
        (item, copy.copy(item)) for item in (*inside, *holders) if isinstance(item, (list, dict))
    ]
    tensors = [(value, value.detach().clone()) for value in held_by(target).values()]
    try:
        yield
    finally:
        for container, contents in containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(contents)
        with torch.no_grad():
            for value, before in tensors:
                if not same_bits(value, before):  # some tensors cannot be written
                    value.copy_(before)


@dataclass(frozen=True)
class Values:
    """Tensors by name. after: results, and what could be written, as the run left it; before: as it
    found it; places: what lay where.
    """

    after: Tensors
    before: Tensors
    places: dict[int, str]


def values_of(target: Target, inputs: Inputs) -> Values:
    """Run ``target`` on copies of the inputs."""
    arguments = copied(inputs)

    def reachable() -> Tensors:
        return named(arguments) | held_by(target)

    start = reachable()
    before = _copies(start)
    is_graph = isinstance(target, GraphModule)
    call: Any = Interpreter(target).run if is_graph else target  # type: ignore[arg-type]
    with kept(target), torch.no_grad(), traceback.preserve_node_meta(is_graph):
        results = tree_leaves(call(*arguments))
        outputs = {f"output {at}": leaf for at, leaf in enumerate(results)}
        end = reachable()
        after = _copies(_tensors(outputs) | start | end)
    places = {place(v): name for part in (start, end) for name, v in part.items() if v.numel()}
    return Values(after, before, places)


def _copies(tensors: Tensors) -> Tensors:
    return {name: value.detach().clone() for name, value in tensors.items()}


def errors(want: Values, got: Values) -> dict[str, float]:
    """The relative error of each result, and of each tensor that either run has changed: of the
    rows that either has. Infinite for another shape. What only one of the two holds is left out.
    """
    relative: dict[str, float] = {}
    for name, value in want.after.items():
        other, before = got.after.get(name), want.before.get(name)
        if other is None and before is not None:
            continue
        if other is None or other.numel() != value.numel():
            relative[name] = math.inf
            continue
        one, two = _rows(value), _rows(other)
        if before is not None and before.shape == value.shape == other.shape:
            start = _rows(got.before.get(name, other))
            rows = (_differ(one, _rows(before)) | _differ(two, start)).any(-1)
            if not bool(rows.any()):
                continue
            one, two = one[rows], two[rows]
        relative[name] = error(one, two)
    return relative


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Which elements. Memory that nobody has written may hold NaN, which is not equal to itself."""
    return (one != other) & ~(one.isnan() & other.isnan())


def _rows(value: Tensor) -> Tensor:
    value = value.detach().to("cpu")
    wide = (torch.view_as_real(value).flatten(-2) if value.is_complex() else value).double()
    return wide.reshape(-1, wide.shape[-1] if wide.numel() and wide.dim() else 1)


def error(want: Tensor, got: Tensor) -> float:
    """Relative, of the whole or of its worst row. Masked scores are infinite, and unwritten memory
    may be NaN: there both must be so, and the rest is measured.
    """
    want, got = _rows(want), _rows(got)
    odd = ~(want.isfinite() & got.isfinite())
    if bool(_differ(want, got)[odd].any()):
        return math.inf
    want, got = want.masked_fill(odd, 0.0), got.masked_fill(odd, 0.0)
    off, size = (got - want).square().sum(-1), want.square().sum(-1)
    if not bool(off.any()):
        return 0.0
    of_all = (off.sum() / size.sum().clamp_min(1e-60)).sqrt()
    of_rows = torch.where(off == 0, 0.0, (off / size.clamp_min(1e-60)).sqrt())
    return float(torch.maximum(of_all, of_rows.max() / _WEIGHT_OF_A_ROW))
