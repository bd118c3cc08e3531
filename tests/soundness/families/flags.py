"""Flags and masks that come in: a coin toss, or always the same, and another model otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from ..member import ALL, Family, attacks
from ..program import FLOATS, OUTPUTS, TABLES, WEIGHTS, Named, Step


def _per_token(given: Tensor, v: Tensor) -> Tensor:
    return given.view(-1, *[1] * (v.dim() - 1))


def _early(v: Tensor, i: Named) -> Tensor:
    return torch.arange(v.shape[0]).view(-1, *[1] * (v.dim() - 1)) < i["count"]


_FLAGS: dict[str, Step] = {
    "where_flag": lambda v, i: torch.where(i["flag"], v, v * 2 + 0.1),
    "times_flag": lambda v, i: v * i["flag"].to(v.dtype),
    "less_flag": lambda v, i: v + (1 - i["flag"].to(v.dtype)) * v.cos(),
    "masked_by_flag": lambda v, i: v.masked_fill(~i["flag"], 0.0),
    "where_kind": lambda v, i: torch.where(i["kind"] > 2, v * v, v),
    "kind_is_seven": lambda v, i: v + (i["kind"] == 7).to(v.dtype),
    "kind_shifted": lambda v, i: v * (1 + v.abs() * (i["kind"] >> 2).to(v.dtype)),
    "kind_selects": lambda v, i: torch.stack([v, v.sin()])[(i["kind"] > 2).long().view(1)][0],
    "kind_gathers": lambda v, i: torch.stack([v, v.sin()]).index_select(
        0, (i["kind"] // 4).clamp(max=1).view(1)
    )[0],
    "flag_and_kind": lambda v, i: torch.where(i["flag"] | (i["kind"] < 3), v, v.tanh()),
}
_FLAGS |= {
    "lerp_by_flag": lambda v, i: torch.lerp(v.cos(), v, i["flag"].to(v.dtype)),
    "power_by_flag": lambda v, i: v * (v.abs() + 0.1) ** (1 - i["flag"].to(v.dtype)),
    "added_under_flag": lambda v, i: torch.where(i["flag"], 0.0, 0.5).to(v.dtype) + v,
}

_MASKS: dict[str, Step] = {
    "where_mask": lambda v, i: torch.where(_per_token(i["mask"], v), v, v * 0.5 + 0.3),
    "masked_fill": lambda v, i: v.masked_fill(~_per_token(i["mask"], v), 0.0),
    "times_mask": lambda v, i: v * _per_token(i["mask"], v).to(v.dtype),
    "where_kinds": lambda v, i: torch.where(_per_token(i["kinds"], v) > 2, v.cos(), v),
    "kinds_weigh": lambda v, i: v + v.cos() * (_per_token(i["kinds"], v) == 4).to(v.dtype),
    "before_count": lambda v, i: torch.where(_early(v, i), v, v * 0),
    "any_masked": lambda v, i: torch.where(i["mask"].all(), v, v.sin()),
    "all_kinds_small": lambda v, i: torch.where((i["kinds"] < 3).all(), v, v.sin()),
    "sum_of_mask": lambda v, i: v + v.cos() * (i["mask"].shape[0] - i["mask"].sum()).to(v.dtype),
    "first_of_mask": lambda v, i: torch.where(i["mask"][:1].view(*[1] * v.dim()), v, v.sin()),
    "kinds_embedded": lambda v, i: (
        v + torch.tensor([0.0, 0, 0, 1, 1])[_per_token(i["kinds"], v)].to(v.dtype)
    ),
}

_CONSTANT: dict[str, Step] = {
    "true": lambda v, i: torch.where(torch.ones((), dtype=torch.bool), v, v * 2),
    "ones": lambda v, i: torch.where(torch.ones(v.shape[-1], dtype=torch.bool), v, v * 2),
    "never": lambda v, i: v.masked_fill(torch.zeros(v.shape[-1], dtype=torch.bool), 0.0),
}

FAMILIES = [
    Family(
        "flags.scalar",
        "a flag of no axes, bool or int",
        attacks(_FLAGS, (*FLOATS, *OUTPUTS), ALL),
        attacks(_CONSTANT, ("c_q", "k_pe"), ("T8", "sym"), ("paged", "neox")),
    ),
    Family(
        "flags.weights",
        "a flag decides on a weight or table",
        attacks(_FLAGS, (*WEIGHTS, *TABLES), ALL),
    ),
    Family("flags.masks", "a mask of tokens", attacks(_MASKS, (*FLOATS, *OUTPUTS), ALL)),
    Family(
        "flags.one_side",
        "a mask on one of the two reads of x, or tables of one rotation",
        attacks(_MASKS | _FLAGS, ("x_q", "x_kv", "q_cos", "k_sin"), ALL),
    ),
]
