"""Calls of ATen operators on float64 arguments, as torch's own test suite (OpInfo) samples them."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mla_fusion.fx.kinds import Kind, kind_of
from mla_fusion.operators.known import known
from mla_fusion.operators.table import row_of

_SAMPLES = 10  # of one OpInfo
_CALLS = 4  # of one overload
_ALIKE = 2  # of them with arguments of as many axes: the first samples are often scalars
_LARGEST = 512  # elements of one argument


@dataclass(frozen=True)
class Call:
    """One call of an operator; ``leaves`` are its arguments, flattened."""

    target: Any
    leaves: tuple[Any, ...]
    spec: Any

    @property
    def name(self) -> str:
        return str(self.target._schema.name)

    @property
    def kind(self) -> Kind:
        """Its class, the arguments looked at."""
        return kind_of(self.node())

    def node(self) -> Node:
        graph = Graph()
        leaves = [
            graph.placeholder(f"a{i}") if isinstance(x, Tensor) else x
            for i, x in enumerate(self.leaves)
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return graph.call_function(self.target, args, kwargs)

    def floats(self) -> list[int]:
        """Which leaves are float64 tensors."""
        return [
            i
            for i, x in enumerate(self.leaves)
            if isinstance(x, Tensor) and x.dtype == torch.float64
        ]

    def run(self, floats: list[Tensor]) -> list[Tensor]:
        """The results, complex ones as pairs, where these stand for the float64 leaves."""
        given = iter(floats)
        places = set(self.floats())
        leaves = [next(given) if i in places else _copied(x) for i, x in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        with torch.no_grad():
            found = tree_flatten(self.target(*args, **kwargs))[0]
        return [
            torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
            for x in found
            if isinstance(x, Tensor)
        ]

    def __str__(self) -> str:
        shown = [list(x.shape) if isinstance(x, Tensor) else x for x in self.leaves]
        return f"{self.target}({', '.join(map(str, shown))})"


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: dict[Any, list[Call]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _keep(self._calls[func], func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _keep(calls: list[Call], target: Any, args: Any, kwargs: Any) -> None:
    """A call, unless there are enough of its operator, or it is large."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    outline = _outline(tree_flatten((args, kwargs))[0])
    alike = sum(outline == _outline(call.leaves) for call in calls)
    small = all(type(x) is Tensor and x.numel() <= _LARGEST for x in tensors)
    if small and len(calls) < _CALLS and alike < _ALIKE:
        plain = tree_map(
            lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs)
        )
        leaves, spec = tree_flatten(plain)
        calls.append(Call(target, tuple(leaves), spec))


def _outline(leaves: Sequence[Any]) -> list[int]:
    """The ranks of tensors, -1 for other arguments; nothing where all tensors are single
    numbers.
    """
    ranks = [x.dim() if isinstance(x, Tensor) else -1 for x in leaves]
    return ranks if max(ranks, default=0) > 0 else []


@cache
def calls() -> dict[str, list[Call]]:
    """By name, without the overload. What torch takes apart before dispatch is called by its own
    name.
    """
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[Any, list[Call]] = defaultdict(list)
    for info in op_db:
        names = {
            info.aten_name,
            info.name.rpartition(".")[2],
            *(alias.name for alias in info.aliases),
        }
        if torch.float64 not in info.supported_dtypes("cpu") or not any(
            row_of(f"aten::{name}").kind for name in names
        ):
            continue
        torch.manual_seed(0)
        try:
            # not info.sample_inputs, which walks the whole stack for the name of a unittest's
            # method
            samples = list(
                itertools.islice(
                    info.sample_inputs_func(info, "cpu", torch.float64, False), _SAMPLES
                )
            )
        except (RuntimeError, ImportError):
            continue  # it wants a library or a back end that is not here
        for sample in samples:
            try:
                with _Recorder(found), torch.no_grad():
                    info.op(sample.input, *sample.args, **sample.kwargs)
            except Exception:
                continue  # not every sample is meant for a dispatch mode
            for name in names:
                _call_by_name(found, name, (sample.input, *sample.args), sample.kwargs)
    named: dict[str, list[Call]] = defaultdict(list)
    for target, each in found.items():
        named[target._schema.name] += each
    return named


def _call_by_name(found: dict[Any, list[Call]], name: str, args: Any, kwargs: Any) -> None:
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        target = getattr(packet, overload)
        if found.get(target) and len(found[target]) >= _CALLS:
            continue
        if known(target).effect or len(args) > len(target._schema.arguments):
            continue
        try:
            with torch.no_grad():
                target(*args, **kwargs)
        except Exception:
            continue  # the arguments are another overload's
        _keep(found[target], target, args, kwargs)
