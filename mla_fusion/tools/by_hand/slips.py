"""Lists the usual slips of a hand-written call, each with the change that undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_fusion.tools.by_hand.calls import Arguments, Call
from mla_fusion.tools.by_hand.outcome import Finding

# takes a weight, N and Dr; returns the weight as the operator takes it
_Order = Callable[[Tensor, int, int], Tensor]
_UP, _DOWN = "weight_uq_qr", "weight_dkv_kr"


Change = Callable[[Arguments], Arguments]  # takes a call's arguments, returns those to replace


def _pairs(columns: Tensor) -> Tensor:
    """Returns a0, b0, a1, b1, .. for [a0 .. | b0 ..] along the last axis."""
    return columns.unflatten(-1, (2, -1)).mT.flatten(-2)


def _halves(columns: Tensor) -> Tensor:
    """Returns [a0 .. | b0 ..] for a0, b0, a1, b1, .. along the last axis."""
    return columns.unflatten(-1, (-1, 2)).mT.flatten(-2)


def _rope(order: Callable[[Tensor], Tensor]) -> _Order:
    """Returns ``order`` of the last Dr columns."""
    return lambda w, n, dr: torch.cat([w[..., :-dr], order(w[..., -dr:])], -1)


def _heads(order: _Order) -> _Order:
    """Returns ``order`` of the columns of each head."""
    return lambda w, n, dr: order(w.unflatten(-1, (n, -1)), n, dr).flatten(-2)


def _first_last(w: Tensor, n: int, dr: int) -> Tensor:
    """Returns the weight with its first Dr columns behind the others."""
    return w.roll(-dr, -1)


def _nope_then_rope(w: Tensor, n: int, dr: int) -> Tensor:
    """Returns the columns head by head, from all nope columns before all rope columns."""
    parts = w.tensor_split([-n * dr], -1)
    return torch.cat([part.unflatten(-1, (n, -1)) for part in parts], -1).flatten(-2)


def _transposed(w: Tensor, n: int, dr: int) -> Tensor:
    """Returns the transpose of a weight that was reshaped instead."""
    return w.reshape(*w.shape[:-2], w.shape[-1], w.shape[-2]).mT


def _heads_of_uk(w: Tensor, n: int, dr: int) -> Tensor:
    """Returns [N, D, Hckv] of [D, N, Hckv] that was reshaped instead."""
    return w.reshape(w.shape[1], n, -1).transpose(0, 1)


_HALF = "its rope columns are in half layout; write interleaved pairs a0 b0 a1 b1 .."
_TWICE = "its rope columns were interleaved twice, or are those of a model that interleaves already"
_BY_HEAD = "write [D | Dr] head by head"
_LINEAR = "it holds a linear layer's [out, in] reshaped to [in, out]; transpose it instead"
_WEIGHTS: tuple[tuple[str, str, str, _Order], ...] = (
    *(("weight.reshaped", name, _LINEAR, _transposed) for name in ("weight_dq", _UP, _DOWN)),
    ("w_uk.transposed", "weight_uk", "[N, Hckv, D] is reshaped; transpose it", _transposed),
    ("w_uk.heads", "weight_uk", "[D, N, Hckv] is reshaped; transpose it", _heads_of_uk),
    (
        "columns.key_first",
        _DOWN,
        "its columns are [k_pe | c_kv]; write [c_kv | k_pe]",
        _first_last,
    ),
    ("rope_columns.half", _UP, _HALF, _heads(_rope(_pairs))),
    ("rope_columns.half", _DOWN, _HALF, _rope(_pairs)),
    ("rope_columns.interleaved", _UP, _TWICE, _heads(_rope(_halves))),
    ("rope_columns.interleaved", _DOWN, _TWICE, _rope(_halves)),
    (
        "heads.nope_then_rope",
        _UP,
        f"all nope columns come before all rope columns; {_BY_HEAD}",
        _nope_then_rope,
    ),
    (
        "heads.rope_first",
        _UP,
        f"each head is [Dr | D]; {_BY_HEAD}",
        _heads(_first_last),
    ),
    (
        "heads.transposed",
        _UP,
        f"heads vary fastest; {_BY_HEAD}",
        lambda w, n, dr: w.unflatten(-1, (-1, n)).mT.flatten(-2),
    ),
)
# the operators' names of the tables and of the epsilons
_TABLES = (("rope_cos", "rope_sin"), ("cos", "sin"))
EPSILONS = ("rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv", "epsilon")


def slips(call: Call, epsilons: Iterable[float]) -> Iterator[tuple[Finding, Change]]:
    """Yields the slips that ``call`` may have, with the changes that undo them.

    epsilons  those that the model may have
    """
    arguments = call.arguments
    for cos, sin in _TABLES:
        if cos in arguments:
            text = f"{cos} and {sin} are exchanged"
            yield call.finding("tables.swapped", text, f"{cos}, {sin}"), partial(_swap, cos, sin)
    for name in EPSILONS:
        for value in epsilons if name in arguments else ():
            if value != arguments[name]:
                text = (
                    f"{name} is {arguments[name]:g} (1e-05 where it is not given); write {value:g}"
                )
                yield call.finding("epsilon", text, name), partial(_set, name, value)
    for code, name, text, order in _WEIGHTS if "weight_uk" in arguments else ():
        yield call.finding(code, f"{name}: {text}", name), partial(_reorder, name, order)


def _swap(first: str, second: str, arguments: Arguments) -> Arguments:
    """Exchanges two arguments."""
    return {first: arguments[second], second: arguments[first]}


def _set(name: str, value: Any, arguments: Arguments) -> Arguments:
    """Returns another value of an argument."""
    return {name: value}


def _reorder(name: str, order: _Order, arguments: Arguments) -> Arguments:
    """Reorders the elements of a weight."""
    heads, dr = arguments["weight_uk"].shape[0], arguments["rope_cos"].shape[-1]
    return {name: order(arguments[name], heads, dr).contiguous()}
