"""Counts that a dtype does not hold, and what rounding leaves.

Over the real numbers each step is the identity. bfloat16 has no 257, int32 and int16 wrap, a
quotient of counts is no number at one token or from one on, and a difference of a number and its
rounded self is no 0. Tokens that are regrouped return to their places for some counts alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..member import Family, attacks
from ..program import FLOATS, Step

LATE = ("T300", "T500", "sym", "dynamo")
TABLES = ("q_cos+q_sin", "k_cos+k_sin", "q_cos", "k_sin")


def _number(v: Tensor, **kwargs: Any) -> Tensor:
    return torch.arange(v.shape[0], **kwargs).view(-1, *[1] * (v.dim() - 1))


def _float(v: Tensor) -> Tensor:
    return _number(v).float()


def _left(v: Tensor, rounded: Tensor, times: float = 1.0) -> Tensor:
    """v, times 1 and what a dtype has left of the tokens' numbers."""
    return (v * (1 + rounded.float() - times * _float(v))).to(v.dtype)


# bfloat16 holds the numbers up to 256
_BFLOAT16: dict[str, Step] = {
    "rounded": lambda v, i: _left(v, _number(v).bfloat16()),
    "counted_in_bfloat16": lambda v, i: _left(v, _number(v, dtype=torch.bfloat16)),
}
_COUNTED: dict[str, Step] = {
    "a_half_is_lost": lambda v, i: _left(
        v, _float(v) + (_number(v).bfloat16() + 0.5 - _number(v).bfloat16() - 0.5)
    ),
    "int32_wraps": lambda v, i: _left(v, _number(v, dtype=torch.int32) * 2**24, 2.0**24),
    "int16_wraps": lambda v, i: (
        v
        * (
            1
            + torch.arange(0, 256 * v.shape[0], 256, dtype=torch.int16).float()
            - 256 * torch.arange(v.shape[0]).float()
        ).view(-1, *[1] * (v.dim() - 1))
    ).to(v.dtype),
    "cubes_wrap": lambda v, i: (
        v * (1 + (_number(v, dtype=torch.int32) ** 3 * 1024).float() - _float(v) ** 3 * 1024)
    ).to(v.dtype),
    "no_number_at_one": lambda v, i: (v * ((_float(v) - 150) / (_float(v) - 150))).to(v.dtype),
    "infinite_late": lambda v, i: (v * ((_float(v) + 1) ** 20 / (_float(v) + 1) ** 20)).to(v.dtype),
}


def _regrouped(times: int) -> Step:
    """Each token reads another one, as far as so many times its number goes around."""
    rest = lambda v: [1] * (v.dim() - 1)  # noqa: E731
    return lambda v, i: (
        v.repeat(times, *rest(v)).view(v.shape[0], times, *v.shape[1:])[:, 0].contiguous()
    )


def _riffled(times: int) -> Step:
    def step(v: Tensor, i: Any) -> Tensor:
        count, half = v.shape[0], v.shape[-1] // 2
        rows = v.reshape(-1, half)
        for _ in range(times):
            rows = rows.view(count, -1, half).transpose(0, 1).reshape(-1, half)
        return rows.reshape(v.shape)

    return step


_GROUPS = {f"every_{times}th": _regrouped(times) for times in (6, 12, 21)}
_RIFFLES = {f"riffled_{times}": _riffled(times) for times in (1, 6)}
_LONG = {"riffled_84": _riffled(84)}  # of 5 tokens and of 131 none moves


def _rest(times: float) -> Step:
    def step(v: Tensor, i: Any) -> Tensor:
        high = v.float() * 1.1
        return (v + times * (high - high.bfloat16().float())).to(v.dtype)

    return step


_RESTS = {f"rest_{times}": _rest(times) for times in (100.0, 1000.0, 1e5)}
_ANGLES: dict[str, Step] = {
    "rounded": lambda p, i: torch.arange(p.shape[0]).bfloat16(),
    "counted_in_bfloat16": lambda p, i: torch.arange(p.shape[0], dtype=torch.bfloat16),
    "rounded_float": lambda p, i: torch.arange(p.shape[0], dtype=torch.float32).bfloat16(),
}
_ANGLE_CONTROLS: dict[str, Step] = {
    "float": lambda p, i: torch.arange(p.shape[0], dtype=torch.float32),
    "int32": lambda p, i: torch.arange(p.shape[0], dtype=torch.int32),
    "rounded": lambda p, i: torch.arange(p.shape[0]).bfloat16(),
}

FAMILIES = [
    Family(
        "counted.tables",
        "counts that a dtype does not hold, in the tables of the query or of the key alone",
        attacks(_BFLOAT16, TABLES, LATE[:2], ("neox", "paged"))
        + attacks(_COUNTED, TABLES, LATE, ("neox", "paged")),
    ),
    Family(
        "counted.angles",
        "angles of the query or of the key alone, of positions counted in bfloat16",
        attacks(_ANGLES, ("q_positions", "k_positions"), LATE[:2], ("angles",)),
        attacks(_ANGLE_CONTROLS, ("positions",), ("T8", "sym"), ("angles",)),
    ),
    Family(
        "counted.groups",
        "tokens regrouped, so that for some counts each is back at its place",
        attacks(_GROUPS, FLOATS, ("T8", "T128", "sym", "dynamo"))
        + attacks(_RIFFLES, ("c_q", "c_kv", "k_pe"), ("T128", "sym"))
        + attacks(_LONG, ("c_q", "c_kv", "k_pe"), ("sym",)),
    ),
    Family(
        "counted.rests",
        "what rounding leaves of a number, many times over",
        attacks(_RESTS, ("c_q", "q_nope", "q_pe", "k_raw", "c_kv"), ("T8", "sym")),
    ),
]
