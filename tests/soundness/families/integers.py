"""Positions and slots through integer arithmetic that is the identity on the small numbers of a
probe.

Tables at other positions are other tables; a slot beyond the cache is a write into somebody else's
memory. Integers are equal only where their terms are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.catalogue.base import DR, HCKV

from ..inputs import PAGES
from ..member import ALL, Family, attacks
from ..program import Named, Step

GATHERED = ("paged", "blocks", "copied")
AT = ("positions", "q_positions", "k_positions", "q_positions+k_positions")


def _constants(at: int) -> dict[str, Step]:
    steps: dict[str, Step] = {
        "clamp_max": lambda p, i: p.clamp(max=at - 1),
        "modulo": lambda p, i: p % at,
        "bit_and": lambda p, i: p & (at - 1),
        "fmod": lambda p, i: torch.fmod(p, at),
        "minimum": lambda p, i: torch.minimum(p, torch.tensor(at - 1)),
        "where_less": lambda p, i: torch.where(p < at, p, p - at),
        "less_where_beyond": lambda p, i: p - (p >= at).long(),
        "high_bits_mixed_in": lambda p, i: p ^ (p >> (at.bit_length() - 1)),
        "quotient_dropped": lambda p, i: p - p // at * at,
        "bucket": lambda p, i: p - torch.bucketize(p, torch.tensor([at, 2 * at])),
        "float_rounds": lambda p, i: (p.float() - torch.relu(p.float() - (at - 1))).long(),
    }
    return {f"{name}_{at}": step for name, step in steps.items()}


_POSITIONS: dict[str, Step] = {
    "through_bfloat16": lambda p, i: p.bfloat16().long(),
    "through_half": lambda p, i: p.half().long(),
    "one_number_zeroed": lambda p, i: torch.where(p == 20011, 0, p),
    "masked_number": lambda p, i: p.masked_fill(p == 20011, 3),
    "even_only": lambda p, i: p >> 1 << 1,
    "by_pairs": lambda p, i: p // 2 * 2,
    "as_uint8": lambda p, i: p.to(torch.uint8).long(),
    "one_later": lambda p, i: (p + 1) % 32768,
    "scaled_then_divided": lambda p, i: (p.to(torch.int32) * 131072 // 131072).long().clamp(min=0),
    "less_equal_flags": lambda p, i: p * (p != 20011).long(),
    "by_kind": lambda p, i: torch.where(i["kind"] > 2, p // 2, p),
    "sorted": lambda p, i: p.sort().values,
    "cumulated": lambda p, i: p.cummax(0).values,
    "float_with_a_nudge": lambda p, i: (p.float() * 0.99999).long(),
}

_POSITION_CONTROLS: dict[str, Step] = {
    "int32": lambda p, i: p.to(torch.int32).to(torch.int64),
    "plus_zero": lambda p, i: p + 0,
    "from_quotient": lambda p, i: p // 64 * 64 + p % 64,
}

_ANGLES: dict[str, Step] = {
    "bfloat16": lambda p, i: p.bfloat16(),
    "half": lambda p, i: p.half(),
    "clamped_float": lambda p, i: p.float().clamp(max=4095.0),
    "wrapped_float": lambda p, i: p.float() % 4096.0,
    "stretched_late": lambda p, i: torch.where(p > 4096, p / 2, p.float()),
    "log_scaled": lambda p, i: p.float() * torch.floor(1 + p / 4096),
    "up_and_back": lambda p, i: p.float() + 2.0**24 - 2.0**24,
    "small": lambda p, i: (p / 1e9 + 1 - 1) * 1e9,
    "through_a_cast": lambda p, i: (p.float() + 300).bfloat16().float() - 300,
}


def _rows(i: Named) -> tuple[Tensor, Tensor]:
    return i["kv_cache"].view(-1, HCKV), i["kr_cache"].view(-1, DR)


def _slots(at: int) -> dict[str, Step]:
    """Slots of caches of 512 rows."""
    steps: dict[str, Step] = {
        "ring": lambda s, i: (s // 16) % (at // 16) * 16 + s % 16,
        "wrapped": lambda s, i: s % at,
        "bit_and": lambda s, i: s & (at - 1),
        "at_most": lambda s, i: s.clamp(max=at - 1),
        "one_number_moved": lambda s, i: torch.where(s == 511, 0, s),
        "back_from_end": lambda s, i: torch.where(s >= at, s - at, s),
    }
    return {f"{name}_{at}": step for name, step in steps.items()}


_SLOTS: dict[str, Step] = {
    "through_bfloat16": lambda s, i: s.bfloat16().long(),
    "through_uint8": lambda s, i: s.to(torch.uint8).long(),
    "wrong_stride": lambda s, i: i["table_of_blocks"][(s // 16) % PAGES] * 16 + s % 15,
    "other_block_size": lambda s, i: s // 8 % 32 * 16 + s % 8,
    "offset_twice": lambda s, i: (s // 16 * 16 + s % 16 * 2) % 512,
    "by_table": lambda s, i: i["table_of_blocks"][(s // 16) % PAGES] * 16 + s % 16,
    "block_reversed": lambda s, i: (31 - s // 16) * 16 + s % 16,
    "by_kind": lambda s, i: torch.where(i["kind"] > 2, s // 2, s),
}

_SLOT_CONTROLS: dict[str, Step] = {
    "from_quotient": lambda s, i: s // 16 * 16 + s % 16,
    "at_least_0": lambda s, i: s.clamp(min=0),
    "int32": lambda s, i: s.to(torch.int32).to(torch.int64),
    "from_bits": lambda s, i: (s >> 4 << 4) | (s & 15),
}


def _key_elsewhere(step: Step) -> Step:
    """The key's rows at other slots than the latent's."""

    def write(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv, kr = _rows(i)
        kv[slots] = c_kv
        kr[step(slots, i)] = k_pe

    return write


def _in_blocks(block: Any, offset: Any) -> Step:
    def write(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        for name, rows in (("kv_cache", c_kv), ("kr_cache", k_pe)):
            i[name].squeeze(2)[block(slots), offset(slots)] = rows

    return write


_WRITES: dict[str, Step] = {
    **{f"key_{name}": _key_elsewhere(step) for name, step in {**_slots(256), **_SLOTS}.items()},
    "block_ring": _in_blocks(lambda s: (s // 16) % 8, lambda s: s % 16),
    "block_clamped": _in_blocks(lambda s: (s // 16).clamp(max=7), lambda s: s % 16),
    "offset_of_eight": _in_blocks(lambda s: s // 16, lambda s: s % 8),
    "offset_clamped": _in_blocks(lambda s: s // 16, lambda s: (s % 16).clamp(max=14)),
    "swapped": _in_blocks(lambda s: s % 32, lambda s: s // 32),
    "block_in_uint8": _in_blocks(
        lambda s: (s // 16 * 16).to(torch.uint8).long() // 16, lambda s: s % 16
    ),
}

FAMILIES = [
    Family(
        "integers.positions",
        "tables at positions that differ from the positions only far out",
        attacks(_constants(4096), AT, ALL, GATHERED)
        + attacks(_constants(16384), AT, ALL, GATHERED)
        + attacks(_POSITIONS, AT, ALL, GATHERED),
        attacks(_POSITION_CONTROLS, AT[:3], ("T8", "sym"), ("paged",)),
    ),
    Family(
        "integers.angles",
        "angles of positions that lost bits, or are stretched far out, for the query or the key "
        "alone",
        attacks(_ANGLES, AT[1:3], ALL, ("angles",)),
    ),
    Family(
        "integers.slots",
        "slots that differ from the input far out",
        attacks(_slots(256), ("slots",), ALL)
        + attacks(_slots(64), ("slots",), ALL)
        + attacks(_SLOTS, ("slots",), ALL),
        attacks(_SLOT_CONTROLS, ("slots",), ("T8", "sym"), ("paged", "blocks")),
    ),
    Family(
        "integers.writes",
        "the two caches at different slots, or wrong blocks",
        attacks(_WRITES, ("write",), ALL),
    ),
]
