"""Slots that the graph makes negative: the model's write wraps them, the kernel skips them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.catalogue.base import DR, HCKV

from ..inputs import ROWS
from ..member import ALL, Family, attacks
from ..program import Named, Step

_WRITERS = ("paged", "neox", "blocks")  # index_copy refuses a negative index


def _marked(s: Tensor, at: int, value: int) -> Tensor:
    """One token is padding, told by its number."""
    return torch.where(torch.arange(s.shape[0]) == (at if at >= 0 else s.shape[0] + at), value, s)


def _pad_buffer(s: Tensor, i: Named) -> Tensor:
    buffer = torch.full((4096,), -1)
    return torch.where(i["mask"], s, buffer[: s.shape[0]])


_NEGATIVE: dict[str, Step] = {
    "where_mask": lambda s, i: torch.where(i["mask"], s, torch.tensor(-1)),
    "where_mask_number": lambda s, i: torch.where(i["mask"], s, -1),
    "masked_fill": lambda s, i: s.masked_fill(~i["mask"], -1),
    "pad_buffer": _pad_buffer,
    "last_is_pad": lambda s, i: _marked(s, -1, -1),
    "first_is_pad": lambda s, i: _marked(s, 0, -1),
    "constant_added": lambda s, i: s + _marked(torch.zeros_like(s), -1, -128),
    "one_less": lambda s, i: s - 1,
    "rsub": lambda s, i: 300 - s,
    "padded": lambda s, i: F.pad(s[:-1], (0, 1), value=-1),
    "joined_with_pad": lambda s, i: torch.cat([s[:-1], torch.full((1,), -1)]),
    "pad_by_new_full": lambda s, i: torch.cat([s[:-1], s.new_full((1,), -1)]),
    "complement": lambda s, i: ~s,
    "negated": lambda s, i: -1 - s,
    "bit_xor": lambda s, i: s ^ -1,
    "from_the_end": lambda s, i: s - ROWS // 2,
    "by_kinds": lambda s, i: s - i["kinds"],
    "through_int8": lambda s, i: s.to(torch.int8).long(),
    "int32_overflow": lambda s, i: ((s.to(torch.int32) << 24) >> 24).long(),
    "flag_decides": lambda s, i: torch.where(i["flag"], s, -1 - s),
    "times_mask": lambda s, i: (s + 1) * i["mask"].long() - 1,
    "minimum": lambda s, i: torch.minimum(s, torch.where(i["mask"], 1 << 20, -1)),
    "float_floor": lambda s, i: torch.floor(s.float() - 0.5).long(),
    "remainder_trunc": lambda s, i: torch.fmod(s - 8, ROWS),
    "difference": lambda s, i: s - i["positions"] % 2,
    "sign": lambda s, i: s - (i["kinds"] > 1).long() * 600,
}

_AGAIN: dict[str, Step] = {
    "halved": lambda s, i: s // 2,
    "masked": lambda s, i: s & 15,
    "remainder": lambda s, i: s % 16,
    "distance": lambda s, i: (s - 8).abs(),
    "blocks_half_as_long": lambda s, i: s // 16 * 8 + s % 16,
    "rows_half_as_many": lambda s, i: s // 16 * 16 + s % 8,
    "through_bfloat16": lambda s, i: s.bfloat16().long(),
    "joined": lambda s, i: torch.cat([s[: s.shape[0] // 2], s[: s.shape[0] - s.shape[0] // 2]]),
    "all_the_same": lambda s, i: s * 0 + 5,
    "first_for_all": lambda s, i: s[:1].expand_as(s),
    "by_mask_to_zero": lambda s, i: torch.where(i["mask"], s, 0),
    "clamped": lambda s, i: s.clamp(64, 128),
}


def _apart(of_kv: Callable[[Tensor], Tensor], of_kr: Callable[[Tensor], Tensor]) -> Step:
    def step(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        i["kv_cache"].view(-1, HCKV)[of_kv(slots)] = c_kv
        i["kr_cache"].view(-1, DR)[of_kr(slots)] = k_pe

    return step


def _itself(s: Tensor) -> Tensor:
    return s


_OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped": lambda s: s.flip(0),
    "rolled": lambda s: s.roll(1, 0),
    "neighbour": lambda s: s ^ 1,
    "next": lambda s: (s + 1) % ROWS,
    "sorted": lambda s: s.sort().values,
    "block_swapped": lambda s: s % 16 * (ROWS // 16) + s // 16,
    "by_bfloat16": lambda s: s.bfloat16().long(),
    "by_uint8": lambda s: s.to(torch.uint8).long(),
    "by_half_and_back": lambda s: (s * 5).half().long() // 5,
    "from_the_end": lambda s: ROWS - 1 - s,
}
_SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": _itself,
    "by_int32": lambda s: s.int().long(),
    "cut_and_joined": lambda s: s // 16 * 16 + s % 16,
}
_APART = {f"kv_{name}": _apart(other, _itself) for name, other in _OTHER.items()}
_APART |= {f"kr_{name}": _apart(_itself, other) for name, other in _OTHER.items()}
_TOGETHER = {name: _apart(_itself, same) for name, same in _SAME.items()}

FAMILIES = [
    Family(
        "slots.apart",
        "each cache is written at slots of its own",
        attacks(_APART, ("write",), ("T8", "T64", "sym"), ("paged", "neox")),
        attacks(_TOGETHER, ("write",), ("T8", "sym"), ("paged",)),
    ),
    Family("slots.negative", "negative slots", attacks(_NEGATIVE, ("slots",), ALL, _WRITERS)),
    Family(
        "slots.repeated",
        "two tokens at one slot: the last one's row stays",
        attacks(_AGAIN, ("slots",), ("T8", "T64", "sym"), _WRITERS),
        staged=True,
    ),
]
