"""The tiling key of the operator design document: which kernel template a call selects.

A uint64 of bit fields. The document lists values for PA_BSND and PA_NZ caches and for the scenarios in which only
weight_uq_qr is quantised; the operator has since gained cache modes and scenarios whose values it does not
list, and it does not say when the tiling turns the two optional bits on. Such fields have no value here.
"""

from __future__ import annotations

from dataclasses import dataclass

_SINCE = "not listed in the design document"


@dataclass(frozen=True)
class KeyField:
    """One field: its first and last bit, its value or None where the document gives none, and the meaning."""

    low: int
    high: int
    name: str
    value: int | None
    meaning: str


@dataclass(frozen=True)
class TilingKey:
    """The fields from bit 0 upwards."""

    fields: tuple[KeyField, ...]

    @property
    def value(self) -> int | None:
        """The key with both optional bits off; None when another field has no documented value."""
        listed = [f for f in self.fields if not f.name.endswith("OPTIONAL")]
        values = [f.value for f in listed if f.value is not None]
        if len(values) != len(listed):
            return None
        return sum(value << field.low for value, field in zip(values, listed, strict=True))

    def __getitem__(self, name: str) -> KeyField:
        return next(field for field in self.fields if field.name == name)


def tiling_key(wq: int, kv: int, cache_mode: str, empty: int) -> TilingKey:
    """The key of a scenario; ``empty`` is the empty-tensor mode (`empty_tensor_mode`)."""
    optional = "turned on by the tiling for a quantised call; excludes the other optional bit"
    return TilingKey(
        (
            KeyField(0, 3, "CACHE_MODE", {"PA_BSND": 1, "PA_NZ": 2}.get(cache_mode), _cache(cache_mode)),
            KeyField(4, 5, "SCENARIO", 2 if wq else 1, "quantised" if wq else "not quantised"),
            _quant_mode(wq, kv),
            KeyField(10, 10, "ENABLE_DEQUANT_OPTIONAL", None if wq else 0, optional if wq else "off"),
            KeyField(11, 11, "ENABLE_GROUP_COMPUTE_OPTIONAL", None if wq else 0, optional if wq else "off"),
            KeyField(12, 13, "EMPTY_TENSOR_MODE", empty, EMPTY_TENSOR_MODES[empty]),
        )
    )


EMPTY_TENSOR_MODES = (
    "no empty tensor",
    "kv_cache and kr_cache are empty: the query is computed, no cache is written",
    "no tokens: nothing is computed, nothing is written",
)


def empty_tensor_mode(tokens: int, block_num: int | None) -> int:
    """0, 1 for a paged cache without blocks, 2 without tokens (which leaves nothing to do in any case)."""
    if tokens == 0:
        return 2
    return 1 if block_num == 0 else 0


def _cache(cache_mode: str) -> str:
    known = {"PA_BSND": "paged, rows in ND", "PA_NZ": "paged, blocks in FRACTAL_NZ"}
    return f"{cache_mode}: {known.get(cache_mode, _SINCE)}"


def _quant_mode(wq: int, kv: int) -> KeyField:
    if wq == 0:
        return KeyField(6, 9, "QUANT_MODE", 0, "unused: nothing is quantised")
    listed = {
        (1, 0): (0, "weight_uq_qr (MMQcQr) quantised"),
        (1, 2): (1, "weight_uq_qr (MMQcQr) and the caches quantised"),
    }
    value, meaning = listed.get((wq, kv), (None, f"weight mode {wq}, cache mode {kv}: {_SINCE}"))
    return KeyField(6, 9, "QUANT_MODE", value, meaning)
