"""Tokens that are regrouped on the way to what the kernel gives: each row is another token's, but
for the counts at which every token is back at its place.

The tables are gathered by position, cut from a longer one, or given: whatever they are, every step
between x and a claim counts. Rows that are quantised for a cache, one by one or packed, are claims
as the others are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import mla_fusion as mf
from tests.catalogue import int8_caches
from tests.catalogue.base import DR, HCKV

from .. import inputs, modelled
from ..member import Family, Member, Outcome, attacks, tokens_of
from ..program import FLOATS, SIDES, Named, Step


def _repeated(times: int) -> Step:
    return lambda v, i: v.repeat(times, *_ones(v)).view(v.shape[0], times, *v.shape[1:])[:, 0]


def _expanded(times: int) -> Step:
    def step(v: Tensor, i: Any) -> Tensor:
        rows = v.expand(times, *v.shape).reshape(times * v.shape[0], *v.shape[1:])
        return rows.view(v.shape[0], times, *v.shape[1:])[:, 0]

    return step


def _interleaved(times: int) -> Step:
    """Back to front: the first copy of each token, of copies that stand side by side."""

    def step(v: Tensor, i: Any) -> Tensor:
        rows = v.repeat_interleave(times, 0, output_size=times * v.shape[0])
        return rows.view(times, v.shape[0], *v.shape[1:])[0]

    return step


def _riffled(times: int) -> Step:
    def step(v: Tensor, i: Any) -> Tensor:
        count, half = v.shape[0], v.shape[-1] // 2
        rows = v.reshape(-1, half)
        for _ in range(times):
            rows = rows.view(count, -1, half).transpose(0, 1).reshape(-1, half)
        return rows.reshape(v.shape)

    return step


def _other_size(v: Tensor, i: Any) -> Tensor:
    return v.reshape(-1, v.shape[0]).t().reshape(v.shape)


def _ones(v: Tensor) -> list[int]:
    return [1] * (v.dim() - 1)


def _number(v: Tensor) -> Tensor:
    return torch.arange(v.shape[0]).reshape(-1, *_ones(v)).float()


_STEPS: dict[str, Step] = {
    # no token is another's, and later ones are scaled
    "late": lambda v, i: (v * (1 + torch.relu(_number(v) - 100))).to(v.dtype),
    # a power of 40 would make the largest byte of what one rounding leaves of zero
    "late_by_a_power": lambda v, i: (v * (1 + (_number(v) / 100) ** 8)).to(v.dtype),
    **{f"repeated_{times}": _repeated(times) for times in (6, 21, 321, 656)},
    **{f"expanded_{times}": _expanded(times) for times in (321, 656)},
    "interleaved_321": _interleaved(321),
    "riffled_6": _riffled(6),
    "riffled_84": _riffled(84),  # of 5 tokens and of 131 none moves
    "other_size": _other_size,
}
_KEPT: dict[str, Step] = {
    "as_it_is": lambda v, i: v,
    "viewed_and_back": lambda v, i: v.reshape(1, -1, v.shape[-1]).reshape(v.shape),
    "expanded_once": lambda v, i: v.expand(3, *v.shape)[1],
    "repeated_within": lambda v, i: v.repeat(*_ones(v), 2)[..., : v.shape[-1]],
    "turned_and_back": lambda v, i: v.transpose(0, -1).contiguous().transpose(0, -1),
}
_ROWS = (*FLOATS[1:], "query", "query_rope")
_TABLES = tuple(place for place in SIDES if place.endswith(("cos", "sin")))


class _Rows(int8_caches.PlainCache):
    """A step in front of the quantisation of one row or the other."""

    steps: dict[str, Step] = {}  # noqa: RUF012

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        super().write(kv_cache, kr_cache, slots, *self.stepped(c_kv, k_pe))

    def stepped(self, c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        keep = _KEPT["as_it_is"]
        return (self.steps.get("c_kv", keep)(c_kv, None), self.steps.get("k_pe", keep)(k_pe, None))


class _LiteralRows(_Rows):
    quantise = int8_caches.LiteralScale.quantise


class _Packed(int8_caches.PackedRows):
    steps: dict[str, Step] = {}  # noqa: RUF012
    stepped = _Rows.stepped

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        super().write(kv_cache, kr_cache, slots, *self.stepped(c_kv, k_pe))


_MODELS: dict[str, type[Any]] = {"channels": _Rows, "literal": _LiteralRows, "packed": _Packed}
TABLES: dict[str, Callable[[Named], tuple[Tensor, Tensor]]] = {
    "gathered": lambda i: (i["all_cos"][i["positions"]], i["all_sin"][i["positions"]]),
    "cut": lambda i: (i["all_cos"][: i["x"].shape[0]], i["all_sin"][: i["x"].shape[0]]),
    "counted": lambda i: (
        i["all_cos"][torch.arange(i["x"].shape[0])],
        i["all_sin"][torch.arange(i["x"].shape[0])],
    ),
    "given": lambda i: (i["cos"], i["sin"]),
}


@lru_cache(maxsize=4)
def _model(name: str) -> nn.Module:
    torch.manual_seed(3)
    return _MODELS[name]().requires_grad_(False)


def _program(style: str, place: str, step: Step | None) -> Callable[[Named], tuple[Tensor, ...]]:
    rows, _, tables = style.partition(", ")
    model = _model(rows)
    names = [name for name, _ in model.named_parameters()]

    def program(i: Named) -> tuple[Tensor, ...]:
        model.steps = {} if step is None else dict.fromkeys(place.split("+"), step)
        given = (i["x"], *TABLES[tables](i), i["kv_cache"], i["kr_cache"], i["slots"])
        found = functional_call(model, {name: i["w." + name] for name in names}, given)
        return tuple(found[:1]) if isinstance(found, tuple) else (found,)

    return program


def _draws(style: str, regime: str) -> list[tuple[str, Named]]:
    rows = style.partition(", ")[0]
    parameters = {"w." + name: value for name, value in _model(rows).named_parameters()}
    counts = tokens_of(regime)
    draws = []
    for label, count in (("as compiled", counts[0]), *((f"{c} tokens", c) for c in (7, *counts))):
        named = {**inputs.ordinary(count, count), **parameters}
        named["kv_cache"] = (named["kv_cache"] * 20).to(torch.int8)
        named["kr_cache"] = (named["kr_cache"] * 20).to(torch.int8)
        if rows == "packed":
            shape = (*named["kv_cache"].shape[:-1], HCKV + 2 * DR + 16)
            named["kv_cache"] = torch.zeros(shape, dtype=torch.int8)
        draws.append((label, named))
    return draws if regime == "sym" else draws[:1]


def _judge(member: Member) -> Outcome:
    step = {**_STEPS, **_KEPT}[member.attack]
    program, usual = (_program(member.style, member.place, each) for each in (step, None))
    draws = _draws(member.style, member.regime)
    return modelled.judge(member, program, usual, draws, mf.Config())


_PLACES = ("c_kv", "k_pe", "c_kv+k_pe")
_STYLES = tuple(f"{rows}, {tables}" for rows in _MODELS for tables in TABLES)


FAMILIES = [
    Family(
        "regroups.rows",
        "tokens regrouped in front of rows of bytes",
        attacks(_STEPS, _PLACES, ("sym", "T128"), _STYLES),
        attacks(_KEPT, _PLACES[2:], ("sym",), _STYLES[::3]),
        judge=_judge,
    ),
    Family(
        "regroups.values",
        "tokens regrouped, behind tables of every kind",
        attacks(_STEPS, _ROWS, ("sym", "dynamo", "T128"))
        + attacks(_STEPS, _TABLES, ("sym", "T128"), ("paged", "neox")),
        attacks(_KEPT, ("q_pe", "k_pe"), ("sym", "T8"), ("paged", "neox")),
    ),
]
