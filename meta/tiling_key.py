"""Computes the tiling key, by which the host's tiling selects a kernel template for a call.

The key is a uint64 of bit fields. Their layout and numbers differ by release: `LAYOUTS` and
`QUANT_NUMBERS`, read from `mla_prolog_template_tiling_key.h` and `GenTilingKey` in
`mla_prolog_tiling.cpp`. Every product has two vector cores to a cube core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mla_fusion.meta.limits import known_releases, newest

_OLDEST = {
    "CACHE_MODE": 4,
    "SCENARIO": 2,
    "QUANT_MODE": 4,
    "ENABLE_DEQUANT_OPTIONAL": 1,
    "ENABLE_GROUP_COMPUTE_OPTIONAL": 1,
    "EMPTY_TENSOR_MODE": 2,
}
_SINCE_8_5 = _OLDEST | {"ACTUAL_SEQ_LEN_MODE": 2, "SPLIT_M_MODE": 2}
# first release -> the fields from bit 0 upwards, with their widths
LAYOUTS = {
    "8.2": _OLDEST,
    "8.5": _SINCE_8_5 | {"CV_MODE": 8},
    "latest": _SINCE_8_5 | {"ENABLE_ROPE": 1, "CV_MODE": 8},
}


def _numbered(pairs: str) -> dict[tuple[int, int], int]:
    """Returns the places of pairs, such as "1/0", in a list."""
    return {(int(pair[0]), int(pair[2])): number for number, pair in enumerate(pairs.split())}


# first release -> (weight_quant_mode, kv_cache_quant_mode) -> QUANT_MODE
QUANT_NUMBERS: Mapping[str, Mapping[tuple[int, int], int]] = {
    "8.2": {(0, 0): 0} | _numbered("1/0 1/2 2/0 2/1"),
    "8.5": _numbered("0/0 1/0 1/2 2/0 2/1 1/3 2/3 3/0 3/1 3/3 4/0 4/1 5/0 5/1 4/3 5/3"),
}
CACHE_NUMBERS = {"BSND": 0, "TND": 0, "PA_BSND": 1, "PA_NZ": 2, "PA_BLK_BSND": 3, "PA_BLK_NZ": 4}
TWO_VECTOR_CORES = 7  # the number for two vector cores to a cube core
DEQUANT_HEADS = 8  # int8 weights: from this N on, dequantisation runs beside the products
SPLIT_SINCE, SPLIT_TOKENS, SPLIT_HE, SPLIT_HEADS = "9.1", 8192, (7168, 7680), 128


class KeyField(NamedTuple):
    """A field: its first and last bit, its name and its value."""

    low: int
    high: int
    name: str
    value: int


@dataclass(frozen=True)
class TilingKey:
    """The fields from bit 0 upwards."""

    fields: tuple[KeyField, ...]

    @property
    def value(self) -> int:
        """Returns the key as the tiling returns it."""
        return sum(field.value << field.low for field in self.fields)

    def __getitem__(self, name: str) -> KeyField:
        return next(field for field in self.fields if field.name == name)


def tiling_key(
    cann: str, wq: int, kv: int, cache_mode: str, dims: Mapping[str, int], lengths: bool
) -> TilingKey:
    """Returns the key of a legal call with CANN ``cann``.

    lengths  True if the call has actual_seq_len
    """
    tokens, heads = dims["tokens"], dims["N"]
    values = {"EMPTY_TENSOR_MODE": 2, "ENABLE_ROPE": 1, "CV_MODE": TWO_VECTOR_CORES}
    if tokens:
        large = tokens >= SPLIT_TOKENS and dims["He"] in SPLIT_HE and heads == SPLIT_HEADS
        values |= {
            "EMPTY_TENSOR_MODE": int(dims.get("BlockNum") == 0),
            "CACHE_MODE": CACHE_NUMBERS[cache_mode],
            "SCENARIO": 2 if wq else 1,
            "QUANT_MODE": newest(QUANT_NUMBERS, cann)[wq, kv],
            "ENABLE_DEQUANT_OPTIONAL": int(wq > 2 or (wq > 0 and heads >= DEQUANT_HEADS)),
            "ACTUAL_SEQ_LEN_MODE": int(lengths),
            "SPLIT_M_MODE": int(wq == 3 and large and SPLIT_SINCE in known_releases(cann)),
        }
    fields, low = [], 0
    for name, width in newest(LAYOUTS, cann).items():
        fields.append(KeyField(low, low + width - 1, name, values.get(name, 0)))
        low += width
    return TilingKey(tuple(fields))
