"""Counts that a dtype does not hold.

Over the real numbers each step is the identity. bfloat16 has no 257, int32 and int16 wrap, and a
quotient of counts is no number at one token or from one on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..member import Family, attacks
from ..program import Step

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
]
