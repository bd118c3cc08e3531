"""The token's number decides: steps along the token axis that five probed tokens cannot show.

With a symbolic token count a probe has a handful of tokens; a change from the sixteenth on is not
among them. Where the count is static the graph can be read whole, and a step that does nothing
there is a control.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..member import ALL, Attack, Family, attacks
from ..program import FLOATS, OUTPUTS, Named, Step


def _number(v: Tensor) -> Tensor:
    return torch.arange(v.shape[0]).view(-1, *[1] * (v.dim() - 1))


def _late(at: int) -> dict[str, Step]:
    steps: dict[str, Step] = {
        "halved_tail": lambda v, i: torch.cat([v[:at], v[at:] / 2]),
        "where_early": lambda v, i: torch.where(_number(v) < at, v, v * 2),
        "masked_tail": lambda v, i: v.masked_fill(_number(v) >= at, 0.0),
        "number_in_scale": lambda v, i: v * (1 + (_number(v) // at).to(v.dtype)),
        "tail_reversed": lambda v, i: torch.cat([v[:at], v[at:].flip(0)]),
        "tail_from_head": lambda v, i: (
            torch.cat([v[:at], v[:1].expand(max(0, v.shape[0] - at), *v.shape[1:])])
            if isinstance(v.shape[0], int)
            else torch.cat([v[:at], v[at:] * 0 + v[:1]])
        ),
        "power_of_number": lambda v, i: (
            v * torch.pow(1.25, (_number(v) - at).clamp(min=0)).clamp(max=9).to(v.dtype)
        ),
        "scattered_tail": lambda v, i: torch.slice_scatter(v, v[at:] * 3, 0, at),
        "narrow_counted": lambda v, i: (
            torch.cat([v[: v.shape[0] // at * at] * 2, v[v.shape[0] // at * at :]]) * 0.5 + v * 0.5
        ),
    }
    return {f"{name}_{at}": step for name, step in steps.items()}


def _products(v: Tensor) -> Tensor:
    """Of each token with each, at most about 1."""
    rows = v.float().flatten(1)
    return torch.tanh(rows @ rows.t() / rows.shape[1])


def _times(v: Tensor, number: Tensor) -> Tensor:
    return v * (2 + number).view(-1, *[1] * (v.dim() - 1)).to(v.dtype)


_MIXED: dict[str, Step] = {
    "products_with_the_next": lambda v, i: _times(v, _products(v).roll(1, 0).diagonal()),
    "products_with_all": lambda v, i: _times(v, _products(v).mean(-1)),
    "padded_and_cut": lambda v, i: F.pad(v, (0, 0) * (v.dim() - 1) + (1, -1)),
    "roll": lambda v, i: v.roll(1, 0),
    "flip": lambda v, i: v.flip(0),
    "cumsum": lambda v, i: v.float().cumsum(0).to(v.dtype),
    "less_the_mean": lambda v, i: v - v.float().mean(0, keepdim=True).to(v.dtype),
    "over_the_norm": lambda v, i: (
        v / v.float().norm(dim=0, keepdim=True).to(v.dtype).clamp(min=1e-3)
    ),
    "last_for_all": lambda v, i: v[-1:].expand_as(v),
    "first_for_all": lambda v, i: v[:1].expand_as(v),
    "first_added": lambda v, i: v + 0.5 * v[:1],
    "one_back": lambda v, i: torch.cat([v[:1], v[:-1]]) if v.shape[0] > 1 else v * 2,
    "even_and_odd": lambda v, i: torch.cat([v[0::2], v[1::2]]),
    "sorted_by_norm": lambda v, i: v[v.float().flatten(1).norm(dim=-1).argsort()],
    "transposed_pairs": lambda v, i: v.flatten(1).t().reshape(v.shape),
    "softmax_over_tokens": lambda v, i: v * torch.softmax(v.float(), 0).to(v.dtype),
    "over_the_count": lambda v, i: v * (8 / v.shape[0]),
    "by_permutation": lambda v, i: v[torch.arange(v.shape[0] - 1, -1, -1)],
}

_WHOLE: dict[str, Step] = {
    "cut_and_joined": lambda v, i: torch.cat([v[:4], v[4:]]),
    "full_slice": lambda v, i: v[0 : v.shape[0]],
    "narrowed_to_all": lambda v, i: v.narrow(0, 0, v.shape[0]),
    "columns_cut_and_joined": lambda v, i: torch.cat([v[..., :32], v[..., 32:]], -1),
    "flip_twice": lambda v, i: v.flip(0).flip(0),
    "roll_and_back": lambda v, i: v.roll(1, 0).roll(-1, 0),
    "where_always": lambda v, i: torch.where(_number(v) >= 0, v, v * 2),
}

_COLUMNS = {
    name: step for name, step in _WHOLE.items() if name in ("full_slice", "columns_cut_and_joined")
}
_ALL_BUT_ONE = tuple(regime for regime in ALL if regime != "T1")


def _shift_from_input(v: Tensor, i: Named) -> Tensor:
    """Rows of other tokens by an index that comes in: sorted, it is the identity."""
    return v[i["slots"].argsort().argsort() * 0 + torch.arange(v.shape[0]).flip(0)]


# A row times a number is the same row after a norm.
_SCALES = ("number_in_scale", "power_of_number", "over_the_count")
_NORMED = tuple(place for place in (*FLOATS, *OUTPUTS) if place not in ("q_raw", "kv_raw"))


def _everywhere(steps: dict[str, Step], regimes: tuple[str, ...]) -> tuple[Attack, ...]:
    scales = {name: step for name, step in steps.items() if name.startswith(_SCALES)}
    others = {name: step for name, step in steps.items() if name not in scales}
    return attacks(scales, _NORMED, regimes) + attacks(others, (*FLOATS, *OUTPUTS), regimes)


FAMILIES = [
    Family(
        "tokens.late",
        "the first tokens stay, later ones are changed",
        _everywhere(_late(16), ("T64", "T128", "sym", "dynamo"))
        + _everywhere(_late(100), ("T128", "sym", "dynamo"))
        + _everywhere(_late(6), ("T8", "T64", "sym", "dynamo")),
        attacks(_WHOLE, ("c_q", "k_pe"), ("T8", "T64"), ("paged",))
        + attacks(_COLUMNS, ("x", "c_q", "q_nope", "c_kv"), ("T1", "sym"), ("paged", "neox")),
    ),
    Family("tokens.mixed", "tokens are mixed, or moved", _everywhere(_MIXED, _ALL_BUT_ONE)),
    Family(
        "tokens.moved_by_index",
        "tokens are moved by computed integers",
        attacks({"shift_from_input": _shift_from_input}, FLOATS, _ALL_BUT_ONE),
    ),
]
