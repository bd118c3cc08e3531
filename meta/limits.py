"""Which sizes, cache modes and quantisation modes each CANN release takes, per SoC: tables and their look-up.

Read from `CheckDims` and its neighbours in `mla_prolog_tiling_check.cpp` of ops-transformer at the releases
8.5.0, 9.0.0, 9.1.0 and master 2026-08 ("latest"), and of the state of 2025-11 for the releases before 8.5,
when v3 existed with the narrower sizes of that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.prolog import PROLOGS

RELEASES = ("8.2", "8.3", "8.5", "9.0", "9.1", "latest")
SOCS = ("A2", "A3", "A5")


@dataclass(frozen=True)
class Sizes:
    """The sizes an axis may have: listed ones, or a range with a step."""

    listed: frozenset[int] = frozenset()
    low: int = 0
    high: int | None = None
    step: int = 1

    def __contains__(self, size: object) -> bool:
        if self.listed:
            return size in self.listed
        assert isinstance(size, int)
        return self.low <= size and (self.high is None or size <= self.high) and size % self.step == 0

    def __str__(self) -> str:
        if self.listed:
            return "one of " + ", ".join(map(str, sorted(self.listed))) if len(self.listed) > 1 else self._only()
        upper = f"{self.low}..{self.high}" if self.high is not None else f"at least {self.low}"
        return upper + (f", a multiple of {self.step}" if self.step > 1 else "")

    def _only(self) -> str:
        return str(next(iter(self.listed)))


def _of(*sizes: int) -> Sizes:
    return Sizes(frozenset(sizes))


_HE_WIDE = _of(1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
_POWERS = _of(1, 2, 4, 8, 16, 32, 64, 128)
_BLOCKS = Sizes(low=16, high=1024, step=16)
_ALL_MODES = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND")
_V12, _V3 = ("v1", "v2"), ("v3",)
_ANY_VERSION = _V12 + _V3
_A23, _ANY_SOC = ("A2", "A3"), SOCS


@dataclass(frozen=True)
class Limit:
    """``axis`` takes ``sizes`` from CANN ``since`` on, until a later row for the same axis replaces it."""

    axis: str
    sizes: Sizes
    since: str = "8.2"
    socs: tuple[str, ...] = _ANY_SOC
    versions: tuple[str, ...] = _ANY_VERSION


LIMITS = (
    Limit("He", _of(6144, 7168, 7680)),
    Limit("He", _HE_WIDE, "8.5", _A23),
    Limit("He", _of(7168), "8.5", ("A5",)),
    Limit("He", _HE_WIDE, "9.1"),
    Limit("Hcq", _of(1536)),
    Limit("Hcq", _of(1536, 2048), "9.1", versions=_V3),
    Limit("D", _of(128)),
    Limit("D", _of(128, 192), "9.1", versions=_V3),
    Limit("Dr", _of(64)),
    Limit("Hckv", _of(512)),
    Limit("Nkv", _of(1)),
    Limit("N", _POWERS),
    Limit("N", Sizes(low=1, high=128), "latest", versions=_V3),
    Limit("S", Sizes(low=0, high=16)),
    Limit("S", Sizes(), "8.5", _A23),
    Limit("S", _of(0, 1), "8.5", ("A5",)),
    Limit("S", Sizes(), "9.0"),
    Limit("T", Sizes(low=0, high=1 << 20)),
    Limit("T", Sizes(), "8.5"),
    Limit("B", Sizes()),
    Limit("B", Sizes(low=0, high=65536), "latest"),
    Limit("BlockSize", _of(16, 128)),
    Limit("BlockSize", _BLOCKS, "8.5", _A23),
    Limit("BlockSize", _BLOCKS, "9.0"),
)

# (cache modes, since, socs, versions), later rows replace earlier ones
CACHE_MODE_RELEASES = (
    (("PA_BSND", "PA_NZ"), "8.2", _A23, _ANY_VERSION),
    (("PA_BSND",), "8.5", ("A5",), _V3),
    (_ALL_MODES, "8.5", _A23, _V3),
    (("PA_BSND", "PA_NZ"), "9.0", ("A5",), _V3),
    (_ALL_MODES, "9.1", ("A5",), _V3),
)

# ((weight_quant_mode, kv_cache_quant_mode), ...) legal from a release on; rows add up
QUANT_RELEASES = (
    (((0, 0), (1, 0), (1, 2), (2, 0)), "8.2", _A23, _ANY_VERSION),
    (((2, 1),), "8.2", _A23, ("v2", "v3")),
    (((1, 3), (2, 3)), "8.2", _A23, _V3),
    (((0, 0), (3, 0), (3, 1)), "8.5", ("A5",), _V3),
    (((3, 3),), "9.0", ("A5",), _V3),
    (((1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)), "9.1", ("A5",), _V3),
    (((4, 0), (4, 1), (4, 3), (5, 0), (5, 1), (5, 3)), "9.1", ("A5",), _V3),
)

# whose caches' first axis may be strided (`mla_prolog_v3_def.cpp`: IgnoreContiguous); elsewhere a cache that is not
# contiguous is copied on the way in, and the rows are written to the copy
STRIDED_CACHES = ("latest", _ANY_SOC, _V3)


def known_releases(cann: str) -> tuple[str, ...]:
    """The releases up to and including ``cann``; ContractError ``cann`` when it is none of them."""
    if not isinstance(cann, str) or cann not in RELEASES:
        raise ContractError("cann", "cann", "one of " + ", ".join(RELEASES), repr(cann))
    return RELEASES[: RELEASES.index(cann) + 1]


VERSIONS = {name: operator.version for name, operator in PROLOGS.items()}


@dataclass(frozen=True)
class Limits:
    """What one operator takes on one SoC at one CANN release."""

    dims: Mapping[str, Sizes]
    cache_modes: tuple[str, ...]
    quant_modes: frozenset[tuple[int, int]]
    strided_caches: bool


def limits(op: str, soc: str = "A3", cann: str = "latest") -> Limits:
    """Allowed sizes per axis, cache modes and (weight, KV cache) quantisation modes.

    Raises ContractError ``op``, ``soc`` or ``cann`` for a name that is not in the tables.
    """
    for name, value, known in (("op", op, tuple(VERSIONS)), ("soc", soc, SOCS), ("cann", cann, RELEASES)):
        if not isinstance(value, str) or value not in known:
            raise ContractError(name, name, "one of " + ", ".join(known), repr(value))
    return _limits(op, soc, cann)


@cache
def _limits(op: str, soc: str, cann: str) -> Limits:
    version, release = VERSIONS[op], RELEASES.index(cann)

    def holds(since: str, socs: tuple[str, ...], versions: tuple[str, ...]) -> bool:
        return RELEASES.index(since) <= release and soc in socs and version in versions

    dims = {row.axis: row.sizes for row in LIMITS if holds(row.since, row.socs, row.versions)}
    modes = [row[0] for row in CACHE_MODE_RELEASES if holds(*row[1:])]
    quant = {pair for row in QUANT_RELEASES if holds(*row[1:]) for pair in row[0]}
    strided = holds(*STRIDED_CACHES)
    return Limits(MappingProxyType(dims), modes[-1] if modes else (), frozenset(quant), strided)
