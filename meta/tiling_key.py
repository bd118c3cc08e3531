"""The tiling key: which kernel template the host's tiling selects for a call.

A uint64 of bit fields, whose layout and numbers differ by release: `LAYOUTS` and `QUANT_NUMBERS`,
read from `mla_prolog_template_tiling_key.h` and `GenTilingKey` in `mla_prolog_tiling.cpp`. Two
vector cores to a cube core, as every product has, are taken for granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mla_fusion.meta.limits import known_releases, newest
from mla_fusion.meta.spec import CACHE_QUANTS, WEIGHT_MODES

_OLDEST = (
    ("CACHE_MODE", 4),
    ("SCENARIO", 2),
    ("QUANT_MODE", 4),
    ("ENABLE_DEQUANT_OPTIONAL", 1),
    ("ENABLE_GROUP_COMPUTE_OPTIONAL", 1),
    ("EMPTY_TENSOR_MODE", 2),
)
_SINCE_8_5 = (*_OLDEST, ("ACTUAL_SEQ_LEN_MODE", 2), ("SPLIT_M_MODE", 2))
_CORES = ("CV_MODE", 8)
# since which release -> the fields from bit 0 upwards, with their widths
LAYOUTS = {
    "8.2": _OLDEST,
    "8.5": (*_SINCE_8_5, _CORES),
    "latest": (*_SINCE_8_5, ("ENABLE_ROPE", 1), _CORES),
}


def _numbered(pairs: str) -> dict[tuple[int, int], int]:
    return {(int(pair[0]), int(pair[2])): number for number, pair in enumerate(pairs.split())}


# since which release -> (weight_quant_mode, kv_cache_quant_mode) -> QUANT_MODE
QUANT_NUMBERS: Mapping[str, Mapping[tuple[int, int], int]] = {
    "8.2": {(0, 0): 0} | _numbered("1/0 1/2 2/0 2/1"),
    "8.5": _numbered("0/0 1/0 1/2 2/0 2/1 1/3 2/3 3/0 3/1 3/3 4/0 4/1 5/0 5/1 4/3 5/3"),
}
CACHE_NUMBERS = {"BSND": 0, "TND": 0, "PA_BSND": 1, "PA_NZ": 2, "PA_BLK_BSND": 3, "PA_BLK_NZ": 4}
_CACHES = (
    "contiguous, a row for each token",
    "paged, rows in ND",
    "paged, blocks in FRACTAL_NZ",
    "paged, an index for each block, rows in ND",
    "paged, an index for each block, in FRACTAL_NZ",
)
EMPTY_TENSOR_MODES = (
    "no empty tensor",
    "kv_cache and kr_cache are empty: the query is computed, no cache is written",
    "no tokens: nothing is computed, nothing is written",
)
TWO_VECTOR_CORES = 7  # of the numbers for how many vector cores go with a cube core
DEQUANT_HEADS = 8  # int8 weights: from this N on, dequantisation runs beside the products
SPLIT_SINCE, SPLIT_TOKENS, SPLIT_HE, SPLIT_HEADS = "9.1", 8192, (7168, 7680), 128


class KeyField(NamedTuple):
    """One field: its first and last bit, its value, and the meaning of that."""

    low: int
    high: int
    name: str
    value: int
    meaning: str


@dataclass(frozen=True)
class TilingKey:
    """The fields from bit 0 upwards."""

    fields: tuple[KeyField, ...]

    @property
    def value(self) -> int:
        """The key as the tiling returns it."""
        return sum(field.value << field.low for field in self.fields)

    def __getitem__(self, name: str) -> KeyField:
        return next(field for field in self.fields if field.name == name)


def tiling_key(
    cann: str, wq: int, kv: int, cache_mode: str, dims: Mapping[str, int], lengths: bool
) -> TilingKey:
    """The key of a legal call with CANN ``cann``; ``lengths``: whether actual_seq_len is given."""
    tokens, heads = dims["tokens"], dims["N"]
    empty = 2 if tokens == 0 else int(dims.get("BlockNum") == 0)
    found = {
        "EMPTY_TENSOR_MODE": (empty, EMPTY_TENSOR_MODES[empty]),
        "ENABLE_ROPE": (1, "on: torch_npu always gives sin and cos"),
        "CV_MODE": (TWO_VECTOR_CORES, "two vector cores to a cube core"),
    }
    if empty != 2:
        cache = CACHE_NUMBERS[cache_mode]
        quant = f"{WEIGHT_MODES[wq].title}, cache {CACHE_QUANTS[kv].title}"
        dequant = wq > 2 or (wq > 0 and heads >= DEQUANT_HEADS)
        large = tokens >= SPLIT_TOKENS and dims["He"] in SPLIT_HE and heads == SPLIT_HEADS
        split = wq == 3 and large and SPLIT_SINCE in known_releases(cann)
        found |= {
            "CACHE_MODE": (cache, f"{cache_mode}: {_CACHES[cache]}"),
            "SCENARIO": (2, "quantised") if wq else (1, "not quantised"),
            "QUANT_MODE": (
                newest(QUANT_NUMBERS, cann)[wq, kv],
                quant if wq else "unused: nothing is quantised",
            ),
            "ENABLE_DEQUANT_OPTIONAL": (
                (1, "dequantised beside the products") if dequant else (0, "off")
            ),
            "ENABLE_GROUP_COMPUTE_OPTIONAL": (0, "off: it needs eight KV heads"),
            "ACTUAL_SEQ_LEN_MODE": (
                (1, "actual_seq_len is read") if lengths else (0, "no actual_seq_len")
            ),
            "SPLIT_M_MODE": (1, "split by tokens") if split else (0, "split by columns"),
        }
    fields, low = [], 0
    for name, width in newest(LAYOUTS, cann):
        of = found.get(name, (0, "unused: there are no tokens"))
        fields.append(KeyField(low, low + width - 1, name, *of))
        low += width
    return TilingKey(tuple(fields))
