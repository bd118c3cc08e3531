"""Sizes that a binding makes equal: slices by a dynamic int, writes of a part of the rows, halves
of the tokens.

A probe binds the int to one number, at which a slice may hold every token. It is a slice all the
same: a reader of the kernel's output, never that output itself, and rows that it drops are rows
that are not written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.catalogue.base import DR, HCKV

from ..member import DYNAMIC, Family, attacks
from ..program import FLOATS, OUTPUTS, Named, Step


def _rows(i: Named) -> tuple[Tensor, Tensor]:
    return i["kv_cache"].view(-1, HCKV), i["kr_cache"].view(-1, DR)


def _of(size: str) -> dict[str, Step]:
    steps: dict[str, Step] = {
        "doubled_after": lambda v, i: torch.cat([v[: i[size]], v[i[size] :] * 2]),
        "turned_by": lambda v, i: torch.cat([v[i[size] :], v[: i[size]]]),
        "where_before": lambda v, i: torch.where(
            torch.arange(v.shape[0]).view(-1, *[1] * (v.dim() - 1)) < i[size], v, v * 2
        ),
        "zeroed_after": lambda v, i: torch.cat([v[: i[size]], torch.zeros_like(v[i[size] :])]),
        "scattered_before": lambda v, i: torch.slice_scatter(v, v[: i[size]] * 3, 0, 0, i[size]),
    }
    return {f"{name}_{size}": step for name, step in steps.items()}


def _cut(size: str) -> dict[str, Step]:
    steps: dict[str, Step] = {
        "first": lambda v, i: v[: i[size]],
        "last": lambda v, i: v[-i[size] :],
        "narrow": lambda v, i: v.narrow(0, 0, i[size]),
        "from": lambda v, i: v[i[size] :],
        "index": lambda v, i: v[torch.arange(i[size])],
        "every_nth": lambda v, i: v[:: i[size]],
        "columns": lambda v, i: v[..., : i[size]],
        "split": lambda v, i: v.split([i[size], v.shape[0] - i[size]])[0],
    }
    return {f"{name}_{size}": step for name, step in steps.items()}


def _writes(size: str) -> dict[str, Step]:
    def first(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv, kr = _rows(i)
        kv[slots[: i[size]]] = c_kv[: i[size]]
        kr[slots[: i[size]]] = k_pe[: i[size]]

    def last(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv, kr = _rows(i)
        kv[slots[-i[size] :]] = c_kv[-i[size] :]
        kr[slots[-i[size] :]] = k_pe[-i[size] :]

    def latent_alone(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv, kr = _rows(i)
        kv[slots[: i[size]]] = c_kv[: i[size]]
        kr[slots] = k_pe

    def first_rows_to_last_slots(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv, kr = _rows(i)
        kv[slots[-i[size] :]] = c_kv[: i[size]]
        kr[slots[-i[size] :]] = k_pe[: i[size]]

    def assigned_from(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv, kr = _rows(i)
        kv[i[size] : i[size] + c_kv.shape[0]] = c_kv
        kr[i[size] : i[size] + c_kv.shape[0]] = k_pe

    found: list[Any] = [first, last, latent_alone, first_rows_to_last_slots, assigned_from]
    return {f"{step.__name__}_{size}": step for step in found}


_HALVES: dict[str, Step] = {
    "second_half_first": lambda v, i: torch.cat([v[v.shape[0] // 2 :], v[: v.shape[0] // 2]]),
    "second_half_doubled": lambda v, i: torch.cat([v[: v.shape[0] // 2], v[v.shape[0] // 2 :] * 2]),
    "last_but_one_for_last": lambda v, i: torch.cat([v[:-1], v[-2:-1]]),
    "capped_at_ten": lambda v, i: torch.cat([v[:10], v[10:] * 0.5]),
    "times_the_count": lambda v, i: (v * (v.shape[0] / 5) + 0.1 * (v.shape[0] - 5)).to(v.dtype),
}


def _spread(v: Tensor, size: int) -> Tensor:
    return v.unsqueeze(0).expand(size, *v.shape)


# What is computed with: a size is another number at other lengths, whatever number it is bound to
# for a probe.
_NUMBERS: dict[str, Step] = {
    "times": lambda v, i: v * i["n"],
    "over": lambda v, i: v / i["n"],
    "plus": lambda v, i: v + i["n"] * 0.1,
    "times_a_third": lambda v, i: (v * (i["n"] / 3)).to(v.dtype),
    "times_a_tensor": lambda v, i: v * torch.scalar_tensor(i["n"], dtype=v.dtype),
    "times_a_fill": lambda v, i: v * v.new_full((1,), i["n"]),
    "times_the_logarithm": lambda v, i: v * torch.scalar_tensor(i["n"]).log().to(v.dtype),
    "times_a_sum_of_ones": lambda v, i: v * torch.ones(i["n"], dtype=v.dtype).sum(),
    "times_the_last_of_a_count": lambda v, i: v * torch.arange(i["n"])[-1],
    "summed_over_a_spread": lambda v, i: _spread(v, i["n"]).sum(0),
    "long_contexts_alone": lambda v, i: (v * max(1.0, v.shape[0] / 150)).to(v.dtype),
    "steps_of_the_count": lambda v, i: v * (v.shape[0] // 150 + 1),
    "count_as_a_tensor": lambda v, i: (v * torch.full((1,), v.shape[0]).div(150).clamp(min=1)).to(
        v.dtype
    ),
}
_INTEGER_NUMBERS: dict[str, Step] = {
    "plus_n": lambda v, i: v + i["n"],
    "plus_a_sum_of_ones": lambda v, i: v + 2 * torch.ones(i["n"], dtype=v.dtype).sum(),
    "less_the_long_part": lambda v, i: v - max(0, v.shape[0] - 7),
}

# A norm takes the factor of a row out again.
_NOT_NORMED = tuple(place for place in FLOATS if place not in ("q_raw", "kv_raw"))


FAMILIES = [
    Family(
        "sizes.steps",
        "a step that begins at a dynamic int",
        attacks(_of("n"), _NOT_NORMED, DYNAMIC) + attacks(_of("m"), _NOT_NORMED, DYNAMIC),
    ),
    Family(
        "sizes.outputs",
        "a reader takes some of the tokens",
        attacks(_cut("n"), OUTPUTS, DYNAMIC) + attacks(_cut("m"), OUTPUTS, DYNAMIC),
    ),
    Family(
        "sizes.writes",
        "some of the rows are written",
        attacks(_writes("n"), ("write",), DYNAMIC) + attacks(_writes("m"), ("write",), DYNAMIC),
    ),
    Family("sizes.numbers", "a size is computed with", attacks(_NUMBERS, _NOT_NORMED, DYNAMIC)),
    Family(
        "sizes.integers",
        "positions and slots computed with a size",
        attacks(_INTEGER_NUMBERS, ("positions", "slots"), DYNAMIC),
    ),
    Family(
        "sizes.halves", "halves of a symbolic count", attacks(_HALVES, (*FLOATS, *OUTPUTS), DYNAMIC)
    ),
]
