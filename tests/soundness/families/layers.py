"""A second layer that differs from the first by one step: verification of the first says nothing of
it.

By default one layer of each structure is verified. An attack in the second layer alone must be in
what tells structures apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..member import Family, attacks
from ..program import Change, Named, Step, Style, prologue

STEPS: dict[str, Step] = {
    "clamp": lambda v, i: v.clamp(-12, 12),
    "masked": lambda v, i: v * (v < 12),
    "doubled": lambda v, i: v * 2,
    "shifted": lambda v, i: v + 0.5,
    "flag": lambda v, i: torch.where(i["flag"], v, v * 2 + 0.1),
    "mask": lambda v, i: torch.where(i["mask"].view(-1, *[1] * (v.dim() - 1)), v, v * 0.5 + 0.3),
    "late": lambda v, i: torch.cat([v[:6], v[6:] * 3]),
    "rolled": lambda v, i: v.roll(1, -1),
    "root": lambda v, i: 12 - torch.sqrt((v - 12) ** 2),
    "tail": lambda v, i: torch.cat([v[:-1], v[-1:] * 2]),
    "columns": lambda v, i: torch.cat([v[..., :32], v[..., 32:] * 1.5], -1),
}
INTEGERS: dict[str, Step] = {
    "positions": lambda p, i: p.clamp(max=4095),
    "wrapped": lambda p, i: p % 4096,
}
SLOTS: dict[str, Step] = {
    "ring": lambda s, i: s % 256,
    "less_one": lambda s, i: s - 1,
    "padded": lambda s, i: torch.where(i["mask"], s, -1),
}


def _second(place: str, step: Step) -> Step:
    def program(i: Named, style: Style) -> tuple[Tensor, ...]:
        first = prologue(i, style)
        return *first, *prologue(_Second(i), style, Change((place,), step))

    return program


class _Second(dict[str, Tensor]):
    """The inputs of the second layer: the same ones, another x and its own caches."""

    def __init__(self, i: Named) -> None:
        super().__init__()
        self._all = i

    def __missing__(self, name: str) -> Tensor:
        found: Tensor = self._all[f"{name}_2" if name in ("kv_cache", "kr_cache") else name]
        return found.flip(-1) if name == "x" else found


def _at(steps: dict[str, Step], places: tuple[str, ...]) -> dict[str, Step]:
    return {
        f"{name}@{place}": _second(place, step) for name, step in steps.items() for place in places
    }


FAMILIES = [
    Family(
        "layers.second",
        "the second of two layers is another model",
        attacks(
            _at(STEPS, ("c_q", "q_nope", "q_pe_raw", "c_kv", "k_raw", "k_pe"))
            | _at(INTEGERS, ("k_positions", "q_positions"))
            | _at(SLOTS, ("slots",)),
            ("program",),
            ("T8", "T64", "sym"),
            ("paged", "blocks"),
        ),
        attacks(
            {"same@c_q": _second("c_q", lambda v, i: v)},
            ("program",),
            ("T8", "sym"),
            ("paged", "neox"),
        ),
    )
]
