"""What a run leaves behind, and how far another run's is from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fusion.by_hand.calls import Watch, buffers_kept, run
from mla_fusion.compat import tree_leaves

WEIGHT_OF_A_ROW = 2.5  # a row may be so many times as far off as the whole


@dataclass(frozen=True)
class Values:
    """Results, then the arguments and buffers as the run left them, by name; ``before``: as it found the latter."""

    held: dict[str, Tensor]
    before: dict[str, Tensor]


def values_of(target: Callable[..., Any], inputs: Sequence[Any], watch: Watch) -> Values:
    """Run ``target`` on copies of the inputs."""
    given = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    buffers = dict(target.named_buffers()) if isinstance(target, torch.nn.Module) else {}
    before = {f"argument {place}": value for place, value in enumerate(inputs) if isinstance(value, Tensor)}
    before |= {f"buffer {name}": value.detach().clone() for name, value in buffers.items()}
    with buffers_kept(target):
        results = run(target, given, watch)
        leaves = enumerate(tree_leaves(results))
        held = {f"output {place}": value for place, value in leaves if isinstance(value, Tensor)}
        held |= {f"argument {place}": value for place, value in enumerate(given) if isinstance(value, Tensor)}
        held |= {f"buffer {name}": value.detach().clone() for name, value in buffers.items()}
    return Values(held, before)


def errors(want: Values, got: Values) -> dict[str, float]:
    """The relative error of each result, and of each tensor that either run has changed. Infinite for another shape.

    Of memory that is written, rows that neither run has changed are left out: the error is that of the rows written,
    and a row that only one of them wrote is wrong as a whole.
    """
    found: dict[str, float] = {}
    for name, value in want.held.items():
        other = got.held.get(name)
        if name in want.before:
            if other is None:
                if not torch.equal(value, want.before[name]):
                    found[name] = float("inf")
                continue
            before = want.before[name]
            if before.shape != value.shape or other.shape != value.shape:
                continue
            changed = _rows(value) != _rows(before)
            changed |= _rows(other) != _rows(got.before.get(name, before))
            rows = changed.any(-1)
            if bool(rows.any()):
                found[name] = _error(_rows(value)[rows], _rows(other)[rows])
        else:
            same_size = other is not None and value.numel() == other.numel()
            found[name] = _error(_rows(value), _rows(other)) if other is not None and same_size else float("inf")
    return found


def _rows(value: Tensor) -> Tensor:
    value = value.detach().to("cpu")
    wide = value.double() if not value.is_complex() else torch.view_as_real(value).flatten(-2).double()
    return wide.reshape(-1, wide.shape[-1]) if wide.dim() else wide.reshape(1, 1)


def _error(want: Tensor, got: Tensor) -> float:
    got = got.reshape(want.shape)
    off, size = (got - want).square().sum(-1), want.square().sum(-1)
    whole = (off.sum() / size.sum().clamp_min(1e-60)).sqrt()
    of_rows = (off / size.clamp_min(1e-60)).sqrt()
    error = torch.maximum(whole, of_rows.max() / WEIGHT_OF_A_ROW) if len(of_rows) else whole
    return float("inf") if bool(error.isnan()) else float(error)


def worst(found: Mapping[str, float]) -> float:
    return max(found.values(), default=0.0)
