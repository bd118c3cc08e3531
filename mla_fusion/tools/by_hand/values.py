"""What a run leaves behind, and how far another run's is from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mla_fusion.compat import tree_leaves
from mla_fusion.paging.tiles import numbers_of_rows
from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.calls import Target, Watch, run
from mla_fusion.tools.by_hand.memory import Inputs, Tensors
from mla_fusion.tools.by_hand.outcome import Errors

WEIGHT_OF_A_ROW = 2.5  # a row may be so many times as far off as the whole


@dataclass(frozen=True)
class Values:
    """Results, then what the run was given and what its modules hold, as it left them; ``before``:
    as it found them.
    """

    held: Tensors
    before: Tensors


def values_of(
    target: Target,
    inputs: Inputs,
    watch: Watch,
    names: Mapping[str, str] | None = None,
) -> Values:
    """Run ``target`` on copies of the inputs. ``names``: what to call the tensors that its modules
    hold.
    """
    given = memory.copied(inputs)
    watch.held = memory.reachable(given, target, names or {})
    before = _copies(watch.held)
    with memory.kept(target):
        leaves = enumerate(tree_leaves(run(target, given, watch)))
        outputs = {f"output {at}": leaf for at, leaf in leaves if isinstance(leaf, Tensor)}
        watch.bound = memory.reachable(given, target, names or {})
        return Values(_copies(outputs | watch.held | watch.bound), before)


def _copies(held: Tensors) -> Tensors:
    return {name: value.detach().clone() for name, value in held.items()}


def errors(want: Values, got: Values, tiles: Mapping[str, tuple[int, int]] | None = None) -> Errors:
    """The relative error of each result, and of each tensor that either run has changed. Infinite
    for another shape.

    ``tiles``: the caches of int8 tiles, each with its Hckv and tile size; their rows are compared
    as the numbers that they stand for.

    Of memory that is written, rows that neither run has changed are left out: the error is that of
    the rows written, and a row that only one of them wrote is wrong as a whole. What only one of
    the two holds is not compared.
    """
    found: Errors = {}
    for name, value in want.held.items():
        other, before = got.held.get(name), want.before.get(name)
        if before is None:
            found[name] = float("inf")
            if other is not None and value.numel() == other.numel():
                found[name] = _error(_rows(value), _rows(other))
        elif other is not None and before.shape == value.shape == other.shape:
            rows = _changed(value, before) | _changed(other, got.before[name])
            if bool(rows.any()):
                tile = (tiles or {}).get(name)
                decode = _rows if tile is None else partial(_numbers, *tile)
                found[name] = _error(decode(value)[rows], decode(other)[rows])
    return found


def _changed(after: Tensor, before: Tensor) -> Tensor:
    """Which rows. Memory that nobody has written may hold NaN, which is not equal to itself."""
    a, b = _rows(after), _rows(before)
    return ((a != b) & ~(a.isnan() & b.isnan())).any(-1)


def _rows(value: Tensor) -> Tensor:
    value = value.detach().to("cpu")
    wide = (torch.view_as_real(value).flatten(-2) if value.is_complex() else value).double()
    if not wide.numel() or not wide.dim():
        return wide.reshape(-1, 1)
    return wide.reshape(-1, wide.shape[-1])


def _numbers(hckv: int, tile: int, cache: Tensor) -> Tensor:
    dr = (cache.shape[-1] - hckv - 4 * (hckv // tile)) // 2
    return _rows(numbers_of_rows(cache.detach(), hckv=hckv, dr=dr, tile=tile))


def _error(want: Tensor, got: Tensor) -> float:
    """Masked scores are infinite, and unwritten memory may be NaN: there both must be so, and the
    rest is measured.
    """
    got = got.reshape(want.shape)
    if not want.numel():
        return 0.0
    odd = ~(want.isfinite() & got.isfinite())
    if not bool(((want == got) | (want.isnan() & got.isnan()))[odd].all()):
        return float("inf")
    want, got = want.masked_fill(odd, 0.0), got.masked_fill(odd, 0.0)
    off, size = (got - want).square().sum(-1), want.square().sum(-1)
    whole = (off.sum() / size.sum().clamp_min(1e-60)).sqrt()
    of_rows = torch.where(off == 0, 0.0, (off / size.clamp_min(1e-60)).sqrt())
    return float(torch.maximum(whole, of_rows.max() / WEIGHT_OF_A_ROW))


def worst(found: Errors) -> float:
    return max(found.values(), default=0.0)
