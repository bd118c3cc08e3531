"""The slips that are usual in a hand-written call, each with the one change that undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mla_fusion.tools.by_hand.calls import Arguments, Call

# of a weight as it is given, N and Dr: the weight as the operator wants it
_Order = Callable[[Tensor, int, int], Tensor]
_UP, _DOWN = "weight_uq_qr", "weight_dkv_kr"


class Slip(NamedTuple):
    """``code`` is stable; ``change`` gives the arguments to be replaced."""

    code: str
    argument: str
    message: str
    change: Callable[[Call], Arguments]


def _pairs(columns: Tensor) -> Tensor:
    """[a0 .. | b0 ..] to a0, b0, a1, b1, .. along the last axis."""
    return columns.unflatten(-1, (2, -1)).mT.flatten(-2)


def _halves(columns: Tensor) -> Tensor:
    return columns.unflatten(-1, (-1, 2)).mT.flatten(-2)


def _rope(order: Callable[[Tensor], Tensor]) -> _Order:
    """``order`` done to the last Dr columns."""
    return lambda w, n, dr: torch.cat([w[..., :-dr], order(w[..., -dr:])], -1)


def _heads(order: _Order) -> _Order:
    """``order`` done to the columns of each head."""
    return lambda w, n, dr: order(w.unflatten(-1, (n, -1)), n, dr).flatten(-2)


def _first_last(w: Tensor, n: int, dr: int) -> Tensor:
    """The first Dr columns behind the others."""
    return w.roll(-dr, -1)


def _nope_then_rope(w: Tensor, n: int, dr: int) -> Tensor:
    parts = w.tensor_split([-n * dr], -1)
    return torch.cat([part.unflatten(-1, (n, -1)) for part in parts], -1).flatten(-2)


def _transposed(w: Tensor, n: int, dr: int) -> Tensor:
    return w.reshape(*w.shape[:-2], w.shape[-1], w.shape[-2]).mT


def _heads_of_uk(w: Tensor, n: int, dr: int) -> Tensor:
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


def slips(call: Call, epsilons: Iterable[float]) -> Iterator[Slip]:
    """Those that ``call`` may have; ``epsilons``: that the model may have."""
    given = call.arguments
    for cos, sin in _TABLES:
        if cos in given:

            def swapped(call: Call, cos: str = cos, sin: str = sin) -> Arguments:
                return {cos: call.arguments[sin], sin: call.arguments[cos]}

            both = f"{cos}, {sin}"
            yield Slip("tables.swapped", both, f"{cos} and {sin} are exchanged", swapped)
    for name in EPSILONS:
        for value in epsilons if name in given else ():
            if value != given[name]:
                text = f"{name} is {given[name]:g} (1e-05 where it is not given); write {value:g}"
                yield Slip("epsilon", name, text, lambda _, given={name: value}: given)  # type: ignore[misc]
    for code, name, text, order in _WEIGHTS if "weight_uk" in given else ():

        def ordered(call: Call, name: str = name, order: _Order = order) -> Arguments:
            heads, dr = call.arguments["weight_uk"].shape[0], call.arguments["rope_cos"].shape[-1]
            return {name: order(call.arguments[name], heads, dr).contiguous()}

        yield Slip(code, name, f"{name}: {text}", ordered)
