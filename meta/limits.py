"""Which sizes, cache modes and quantisation modes each CANN release takes, per SoC: tables and
their look-up.

Read from `CheckDims` and its neighbours in `mla_prolog_tiling_check.cpp` of ops-transformer at the
releases 8.5.0, 9.0.0, 9.1.0 and master 2026-08 ("latest"), and of the state of 2025-11 for the
releases before 8.5, when v3 existed with the narrower sizes of that time. What a release asks
beyond these sets, on one of the two paths or on both, are `TRAITS`, from the same files, from each
version's infershape and from the operator definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import and_, or_
from types import MappingProxyType
from typing import Any

from mla_fusion.meta.errors import known_name
from mla_fusion.meta.layout import known, not_
from mla_fusion.meta.prolog import PROLOGS

from mla_fusion.machine import RELEASES, SOCS

# how a call reaches the device: torch_npu allocates the results and calls aclnn, or GE infers their
# shapes in a graph; both end in the operator's tiling, which checks the call
PATHS = ("eager", "graph")


@dataclass(frozen=True)
class Sizes:
    """The sizes an axis may have: listed ones, or a range with a step."""

    listed: frozenset[int] = frozenset()
    low: int = 0
    high: int | None = None
    step: int = 1

    def __contains__(self, size: object) -> bool:
        return bool(self.condition(size))

    def condition(self, size: Any) -> Any:
        """Whether a size is one of these: a bool, or a SymBool of a symbolic size."""
        if self.listed:
            return reduce(or_, [size == one for one in sorted(self.listed)])
        bounds = [size >= self.low, size % self.step == 0]
        bounds += [size <= self.high] if self.high is not None else []
        return reduce(and_, bounds)

    def include(self, size: Any) -> bool:
        """Whether a size, which may be symbolic, is known to be one of these."""
        return known(self.condition(size))

    def exclude(self, size: Any) -> bool:
        """Whether a size, which may be symbolic, is known to be none of these."""
        return known(not_(self.condition(size)))

    def describe(self) -> str:
        """As text, also for Dynamo, which does not call ``__str__``."""
        if self.listed:
            return "one of " * (len(self.listed) > 1) + ", ".join(map(str, sorted(self.listed)))
        upper = f"{self.low}..{self.high}" if self.high is not None else f"at least {self.low}"
        return upper + (f", a multiple of {self.step}" if self.step > 1 else "")

    __str__ = describe


def only(*sizes: int) -> Sizes:
    return Sizes(frozenset(sizes))


_ALL_MODES = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND")
_V12, _V3 = ("v1", "v2"), ("v3",)
_ANY_VERSION = _V12 + _V3
_A23, _ANY_SOC = ("A2", "A3"), SOCS


@dataclass(frozen=True)
class Limit:
    """``name`` is ``value`` from CANN ``since`` on, until a later row for it replaces it: the
    `Sizes` of an axis, or a field of `Limits`.
    """

    name: str
    value: Any
    since: str = "8.2"
    socs: tuple[str, ...] = _ANY_SOC
    versions: tuple[str, ...] = _ANY_VERSION
    paths: tuple[str, ...] = PATHS


# Axis, sizes ("low..high/step", or listed), and where that holds: since which CANN release, on
# which SoCs, for which versions of the operator. Without tokens sin and cos are empty, which the
# newest v3 reads as "no RoPE"; then it wants them to be [0].
_SIZES = """
He        6144,7168,7680                                      8.2     A2,A3,A5  v1,v2,v3
He        1024,2048,3072,4096,5120,6144,7168,7680,8192        8.5     A2,A3     v1,v2,v3
He        7168                                                8.5     A5        v1,v2,v3
He        1024,2048,3072,4096,5120,6144,7168,7680,8192        9.1     A2,A3,A5  v1,v2,v3
Hcq       1536                                                8.2     A2,A3,A5  v1,v2,v3
Hcq       1536,2048                                           9.1     A2,A3,A5  v3
D         128                                                 8.2     A2,A3,A5  v1,v2,v3
D         128,192                                             9.1     A2,A3,A5  v3
Dr        64                                                  8.2     A2,A3,A5  v1,v2,v3
Hckv      512                                                 8.2     A2,A3,A5  v1,v2,v3
Nkv       1                                                   8.2     A2,A3,A5  v1,v2,v3
N         1,2,4,8,16,32,64,128                                8.2     A2,A3,A5  v1,v2,v3
N         1..128                                              latest  A2,A3,A5  v3
S         0..16                                               8.2     A2,A3,A5  v1,v2,v3
S         0..                                                 8.5     A2,A3     v1,v2,v3
S         0,1                                                 8.5     A5        v1,v2,v3
S         0..                                                 9.0     A2,A3,A5  v1,v2,v3
T         0..1048576                                          8.2     A2,A3,A5  v1,v2,v3
T         0..                                                 8.5     A2,A3,A5  v1,v2,v3
tokens    0..                                                 8.2     A2,A3,A5  v1,v2,v3
tokens    1..                                                 latest  A2,A3,A5  v3
B         0..65536                                            8.2     A2,A3,A5  v1,v2,v3
BlockSize 16,128                                              8.2     A2,A3,A5  v1,v2,v3
BlockSize 16..1024/16                                         8.5     A2,A3     v1,v2,v3
BlockSize 16..1024/16                                         9.0     A2,A3,A5  v1,v2,v3
"""


def _sizes(text: str) -> Sizes:
    low, is_range, high = text.partition("..")
    if not is_range:
        return only(*map(int, text.split(",")))
    high, _, step = high.partition("/")
    return Sizes(low=int(low), high=int(high) if high else None, step=int(step or 1))


def _limit(line: str) -> Limit:
    axis, sizes, since, socs, versions = line.split()
    return Limit(axis, _sizes(sizes), since, tuple(socs.split(",")), tuple(versions.split(",")))


LIMITS = tuple(map(_limit, _SIZES.strip().splitlines()))

# ((weight_quant_mode, kv_cache_quant_mode), ...) legal from a release on; rows add up
QUANT_RELEASES = (
    (((0, 0), (1, 0), (1, 2), (2, 0)), "8.2", _A23, _ANY_VERSION),
    (((2, 1),), "8.2", _A23, ("v2", "v3")),
    (((1, 3), (2, 3)), "8.5", _A23, _V3),
    (((0, 0), (3, 0), (3, 1), (3, 3)), "9.0", ("A5",), _V3),
    (((1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)), "9.1", ("A5",), _V3),
    (((4, 0), (4, 1), (4, 3), (5, 0), (5, 1), (5, 3)), "9.1", ("A5",), _V3),
)


_GRAPH = ("graph",)
TRAITS = (
    Limit("cache_modes", ("PA_BSND", "PA_NZ"), socs=_A23),
    Limit("cache_modes", ("PA_BSND",), "8.5", ("A5",), _V3),
    Limit("cache_modes", _ALL_MODES, "8.5", _A23, _V3),
    Limit("cache_modes", ("PA_BSND", "PA_NZ"), "9.0", ("A5",), _V3),
    Limit("cache_modes", _ALL_MODES, "9.1", ("A5",), _V3),
    Limit("absent", "CANN has it there from 8.5 on", socs=("A5",), versions=_V3),
    Limit(
        "absent",
        "its tiling takes modes 3/0 and 3/1 with a 3-D token_x, and its definition has no "
        "float8_e8m0fnu for the "
        "dequant_scale_q_norm that torch_npu allocates with them",
        "8.5",
        ("A5",),
        _V3,
    ),
    Limit("absent", "", "9.0", ("A5",), _V3),
    Limit(
        "absent",
        "CANN's definition lists A5 from 8.5 on, but torch_npu's meta functions refuse it",
        "8.2",
        ("A5",),
        _V12,
    ),
    # before 8.5 the tiling of v3 reads the scenario off the dtypes, as that of v1 and v2 does to
    # this day
    Limit("reads_modes", False, versions=_V3),
    Limit("reads_modes", True, "8.5", versions=_V3),
    Limit("gives_query_norm", False, versions=_V3),
    Limit("gives_query_norm", True, "8.5", versions=_V3),
    Limit("kv_scale", "1 Hckv", versions=("v2", "v3")),
    Limit("kv_scale", "1", "8.5", versions=_V3),
    # the rank of cache_index in a block-wise mode with a 2-D token_x was not looked at in one
    # release
    Limit("block_index_ranks", frozenset(), "8.5", _A23, _V3),
    Limit("block_index_ranks", frozenset({1}), "9.0", versions=_V3),
    # whose caches' first axis may be strided (`mla_prolog_v3_def.cpp`: IgnoreContiguous); elsewhere
    # rows written to a cache that is not contiguous do not arrive in it
    Limit("strided_caches", True, "latest", versions=_V3),
    # the tiling compares the stride of every axis, of those of size 1 too
    Limit("compares_strides", True, "latest"),
    # infershape takes the second size of weight_dq for Hcq, and refuses 4-D storage since that was
    # noticed
    Limit("weight_dq_4d", "without query_norm_flag", "8.5", versions=_V3, paths=_GRAPH),
    Limit("weight_dq_4d", "", "9.1", versions=_V3, paths=_GRAPH),
    # an empty kr_cache of a per-tile call: its ranks, and the weight modes with which it may be
    # int8
    Limit("empty_kr_ranks", frozenset({1, 3, 4}), "9.1", _A23, _V3, _GRAPH),
    Limit("empty_kr_ranks", frozenset({1, 4}), "9.0", ("A5",), _V3),
    Limit("empty_kr_ranks", frozenset({1, 3, 4}), "9.1", ("A5",), _V3),
    Limit("empty_kr_int8", frozenset({1, 2}), "8.5", _A23, _V3),
    Limit("empty_kr_int8", frozenset({1}), "9.1", ("A5",), _V3),
)


def known_releases(cann: str) -> tuple[str, ...]:
    """The releases up to and including ``cann``; ContractError ``cann`` when it is none of them."""
    return RELEASES[: RELEASES.index(known_name("cann", cann, RELEASES)) + 1]


def known_path(path: str) -> str:
    """The path itself; ContractError ``path`` when it is none of `PATHS`."""
    return known_name("path", path, PATHS)


def newest(since: Mapping[str, Any], cann: str) -> Any:
    """The entry of the last release up to ``cann``, None where there is none; ContractError
    ``cann``.
    """
    there = [name for name in known_releases(cann) if name in since]
    return since[there[-1]] if there else None


VERSIONS = {name: operator.version for name, operator in PROLOGS.items()}


@dataclass(frozen=True)
class Limits:
    """What one operator takes on one SoC at one CANN release, on one path.

    absent             why there is no scenario at all, or ""
    reads_modes        whether the modes are read; otherwise the dtypes decide
    gives_query_norm   whether query_norm and its scale are results; otherwise [1] stands for them
    kv_scale           shape of quant_scale_ckv with kv_cache_quant_mode 1
    compares_strides   whether an axis of size 1 must have the stride of a contiguous cache, too
    block_index_ranks  of cache_index with a block-wise cache mode and a 2-D token_x; without
                       entries any will do
    weight_dq_4d       when weight_dq may be 4-D storage: "always", "without query_norm_flag", or ""
                       for never
    empty_kr_ranks     of the empty kr_cache of a per-tile call; without entries any will do
    empty_kr_int8      weight modes with which that one may be int8; it may always be bfloat16
    """

    dims: Mapping[str, Sizes]
    quant_modes: frozenset[tuple[int, int]]
    cache_modes: tuple[str, ...] = ()
    strided_caches: bool = False
    absent: str = ""
    reads_modes: bool = True
    gives_query_norm: bool = True
    kv_scale: str = "1"
    compares_strides: bool = False
    block_index_ranks: frozenset[int] = frozenset({1})
    weight_dq_4d: str = "always"
    empty_kr_ranks: frozenset[int] = frozenset()
    empty_kr_int8: frozenset[int] = frozenset()


def limits(op: str, soc: str = "A3", cann: str = "latest", path: str = "eager") -> Limits:
    """Allowed sizes per axis, cache modes and (weight, KV cache) quantisation modes, and the traits
    of a release.

    Raises ContractError ``op``, ``soc``, ``cann`` or ``path`` for a name that is not in the tables.
    """
    known_name("op", op, VERSIONS)
    known_name("soc", soc, SOCS)
    known_releases(cann)
    known_path(path)
    return _limits(op, soc, cann, path)


@cache
def _limits(op: str, soc: str, cann: str, path: str) -> Limits:
    version, known = VERSIONS[op], known_releases(cann)

    def holds(since: str, socs: tuple[str, ...], versions: tuple[str, ...]) -> bool:
        return since in known and soc in socs and version in versions

    def in_force(rows: tuple[Limit, ...]) -> dict[str, Any]:
        there = (row for row in rows if path in row.paths)
        return {row.name: row.value for row in there if holds(row.since, row.socs, row.versions)}

    quant = {pair for row in QUANT_RELEASES if holds(*row[1:]) for pair in row[0]}
    return Limits(MappingProxyType(in_force(LIMITS)), frozenset(quant), **in_force(TRAITS))


def taken_by(op: str, axis: str, size: int, here: str) -> str:
    """Which releases take a size that ``here`` ("A3, CANN 8.5") refuses: for its message.

    "which A3 takes from CANN 8.5 on", "which A5 takes from CANN 9.1 on, A3 in no release", or
    "which no release takes".
    """
    own = here.partition(",")[0]
    found = {soc: when for soc in SOCS if (when := _when_taken(op, axis, size, soc))}
    if own in found:
        return f"which {own} takes {found[own]}"
    others = " and ".join(f"{soc} takes {when}" for soc, when in found.items())
    return f"which {others}, {own} in no release" if others else "which no release takes"


def _when_taken(op: str, axis: str, size: int, soc: str) -> str:
    """ "from CANN 8.5 on", "up to CANN 9.1", .. or "" for never."""
    every = [limits(op, soc, cann) for cann in RELEASES]
    takes = [not one.absent and size in one.dims[axis] for one in every]
    if not any(takes):
        return ""
    if not takes[-1]:
        return f"up to CANN {RELEASES[max(place for place, yes in enumerate(takes) if yes)]}"
    first = max((place + 1 for place, yes in enumerate(takes) if not yes), default=0)
    if first == len(RELEASES) - 1:
        return f"after CANN {RELEASES[-2]}"
    return f"from CANN {RELEASES[first]} on"
