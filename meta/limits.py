"""Which sizes, cache modes and quantisation modes each CANN release takes, per SoC: tables and
their look-up.

Read from `CheckDims` and its neighbours in `mla_prolog_tiling_check.cpp` of ops-transformer at the
releases 8.5.0, 9.0.0, 9.1.0 and master 2026-08 ("latest"), and of the state of 2025-11 for the
releases before 8.5, when v3 existed with the narrower sizes of that time. What a release asks
beyond these sets, on one of the two paths or on both, are `TRAITS`, from the same files, from each
version's infershape and from the operator definitions.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import and_, or_
from types import MappingProxyType
from typing import Any, NamedTuple

from mla_fusion.meta.errors import known_name
from mla_fusion.meta.layout import known
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.meta.spec import CACHE_MODES

from mla_fusion.machine import RELEASES, SOCS

# how a call reaches the device: torch_npu allocates the results and calls aclnn, or GE infers their
# shapes in a graph; both end in the operator's tiling, which checks the call
PATHS = ("eager", "graph")


@dataclass(frozen=True)
class Sizes:
    """The sizes that an axis may have: listed numbers, or a range with a step."""

    listed: frozenset[int] = frozenset()
    low: int = 0
    high: int | None = None
    step: int = 1

    def __contains__(self, size: object) -> bool:
        """Returns True if the axis may have the size for all values of its symbols."""
        return known(self.condition(size))

    def condition(self, size: Any) -> Any:
        """Returns whether the axis may have a size: a bool, or a SymBool for a symbolic size."""
        if self.listed:
            return reduce(or_, [size == number for number in sorted(self.listed)])
        bounds = [size >= self.low, size % self.step == 0]
        bounds += [size <= self.high] if self.high is not None else []
        return reduce(and_, bounds)

    def describe(self) -> str:
        """Returns the sizes as text. Dynamo does not call ``__str__``."""
        if self.listed:
            return "one of " * (len(self.listed) > 1) + ", ".join(map(str, sorted(self.listed)))
        upper = f"{self.low}..{self.high}" if self.high is not None else f"at least {self.low}"
        return upper + (f", a multiple of {self.step}" if self.step > 1 else "")

    __str__ = describe


def sizes_of(text: str) -> Sizes:
    """Returns the sizes that a text describes: "low..high/step", "low..high", "low..", or "1,2"."""
    low, is_range, high = text.partition("..")
    if not is_range:
        return Sizes(frozenset(map(int, text.split(","))))
    high, _, step = high.partition("/")
    return Sizes(low=int(low), high=int(high) if high else None, step=int(step or 1))


class Limit(NamedTuple):
    """A row: from CANN ``since`` on, ``name`` is ``value``, on these SoCs, for these versions of
    the operator and on these paths.

    A later row with the same name replaces it. ``name`` is an axis, whose value is its `Sizes`, or
    a field of `Limits`.
    """

    since: str
    socs: str
    versions: str
    paths: str
    name: str
    value: Any


def _rows(table: str, value_of: Callable[[str], Any]) -> list[Limit]:
    rows = (line.split(maxsplit=5) for line in table.strip().splitlines())
    return [Limit._make((*where, value_of(value))) for *where, value in rows]


# Sizes of axes. Without tokens sin and cos are empty, which the newest v3 reads as "no RoPE"; then
# it wants them to be [0].
LIMITS = _rows(
    """
8.2     A2,A3,A5  v1,v2,v3  eager,graph  He         6144,7168,7680
8.5     A2,A3     v1,v2,v3  eager,graph  He         1024,2048,3072,4096,5120,6144,7168,7680,8192
8.5     A5        v1,v2,v3  eager,graph  He         7168
9.1     A2,A3,A5  v1,v2,v3  eager,graph  He         1024,2048,3072,4096,5120,6144,7168,7680,8192
8.2     A2,A3,A5  v1,v2,v3  eager,graph  Hcq        1536
9.1     A2,A3,A5  v3        eager,graph  Hcq        1536,2048
8.2     A2,A3,A5  v1,v2,v3  eager,graph  D          128
9.1     A2,A3,A5  v3        eager,graph  D          128,192
8.2     A2,A3,A5  v1,v2,v3  eager,graph  Dr         64
8.2     A2,A3,A5  v1,v2,v3  eager,graph  Hckv       512
8.2     A2,A3,A5  v1,v2,v3  eager,graph  Nkv        1
8.2     A2,A3,A5  v1,v2,v3  eager,graph  N          1,2,4,8,16,32,64,128
latest  A2,A3,A5  v3        eager,graph  N          1..128
8.2     A2,A3,A5  v1,v2,v3  eager,graph  S          0..16
8.5     A2,A3     v1,v2,v3  eager,graph  S          0..
8.5     A5        v1,v2,v3  eager,graph  S          0,1
9.0     A2,A3,A5  v1,v2,v3  eager,graph  S          0..
8.2     A2,A3,A5  v1,v2,v3  eager,graph  T          0..1048576
8.5     A2,A3,A5  v1,v2,v3  eager,graph  T          0..
8.2     A2,A3,A5  v1,v2,v3  eager,graph  tokens     0..
latest  A2,A3,A5  v3        eager,graph  tokens     1..
8.2     A2,A3,A5  v1,v2,v3  eager,graph  B          0..65536
8.2     A2,A3,A5  v1,v2,v3  eager,graph  BlockSize  16,128
8.5     A2,A3     v1,v2,v3  eager,graph  BlockSize  16..1024/16
9.0     A2,A3,A5  v1,v2,v3  eager,graph  BlockSize  16..1024/16
""",
    sizes_of,
)

# The fields of `Limits`, as Python writes them.
#
# Before 8.5 the tiling of v3 reads the scenario off the dtypes, as that of v1 and v2 does to this
# day. A single release did not check the rank of cache_index in a block-wise mode with a 2-D
# token_x. Where caches may not be strided (`mla_prolog_v3_def.cpp`: IgnoreContiguous), rows written
# to one that is not contiguous do not arrive in it; the newest tiling compares the stride of every
# axis, of those of size 1 too. infershape takes the second size of weight_dq for Hcq, and refuses
# 4-D storage since that was noticed.
TRAITS = _rows(
    """
8.2     A2,A3,A5  v1,v2,v3  eager,graph  cache_modes        ()
8.2     A2,A3     v1,v2,v3  eager,graph  cache_modes        "PA_BSND", "PA_NZ"
8.5     A2,A3     v3        eager,graph  cache_modes        ALL
8.5     A5        v3        eager,graph  cache_modes        "PA_BSND",
9.0     A5        v3        eager,graph  cache_modes        "PA_BSND", "PA_NZ"
9.1     A5        v3        eager,graph  cache_modes        ALL
8.2     A2,A3,A5  v1,v2,v3  eager,graph  absent             ""
8.2     A5        v1,v2     eager,graph  absent             \
"CANN's definition lists A5 from 8.5 on, but torch_npu's meta functions refuse it"
8.2     A5        v3        eager,graph  absent             "CANN has it there from 8.5 on"
8.5     A5        v3        eager,graph  absent             \
"its tiling takes modes 3/0 and 3/1 with a 3-D token_x, and its definition has no float8_e8m0fnu \
for the dequant_scale_q_norm that torch_npu allocates with them"
9.0     A5        v3        eager,graph  absent             ""
8.2     A2,A3,A5  v1,v2     eager,graph  reads_modes        True
8.2     A2,A3,A5  v3        eager,graph  reads_modes        False
8.5     A2,A3,A5  v3        eager,graph  reads_modes        True
8.2     A2,A3,A5  v1,v2     eager,graph  gives_query_norm   True
8.2     A2,A3,A5  v3        eager,graph  gives_query_norm   False
8.5     A2,A3,A5  v3        eager,graph  gives_query_norm   True
8.2     A2,A3,A5  v1        eager,graph  kv_scale           "1"
8.2     A2,A3,A5  v2,v3     eager,graph  kv_scale           "1 Hckv"
8.5     A2,A3,A5  v3        eager,graph  kv_scale           "1"
8.2     A2,A3,A5  v1,v2,v3  eager,graph  block_index_ranks  1,
8.5     A2,A3     v3        eager,graph  block_index_ranks  ()
9.0     A2,A3,A5  v3        eager,graph  block_index_ranks  1,
8.2     A2,A3,A5  v1,v2,v3  eager,graph  strided_caches     False
latest  A2,A3,A5  v3        eager,graph  strided_caches     True
8.2     A2,A3,A5  v1,v2,v3  eager,graph  compares_strides   False
latest  A2,A3,A5  v1,v2,v3  eager,graph  compares_strides   True
8.2     A2,A3,A5  v1,v2,v3  eager,graph  weight_dq_4d       "always"
8.5     A2,A3,A5  v3        graph        weight_dq_4d       "without query_norm_flag"
9.1     A2,A3,A5  v3        graph        weight_dq_4d       ""
8.2     A2,A3,A5  v1,v2,v3  eager,graph  empty_kr_ranks     ()
9.0     A5        v3        eager,graph  empty_kr_ranks     1, 4
9.1     A2,A3     v3        graph        empty_kr_ranks     1, 3, 4
9.1     A5        v3        eager,graph  empty_kr_ranks     1, 3, 4
8.2     A2,A3,A5  v1,v2,v3  eager,graph  empty_kr_int8      ()
8.5     A2,A3     v3        eager,graph  empty_kr_int8      1, 2
9.1     A5        v3        eager,graph  empty_kr_int8      1,
""".replace("ALL", f"{tuple(CACHE_MODES)}"),
    literal_eval,
)

# ((weight_quant_mode, kv_cache_quant_mode), ...) legal from a release on; rows add up
QUANT_RELEASES = _rows(
    """
8.2     A2,A3  v1,v2,v3  eager,graph  quant_modes  (0, 0), (1, 0), (1, 2), (2, 0)
8.2     A2,A3  v2,v3     eager,graph  quant_modes  (2, 1),
8.5     A2,A3  v3        eager,graph  quant_modes  (1, 3), (2, 3)
9.0     A5     v3        eager,graph  quant_modes  (0, 0), (3, 0), (3, 1), (3, 3)
9.1     A5     v3        eager,graph  quant_modes  (1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)
9.1     A5     v3        eager,graph  quant_modes  (4, 0), (4, 1), (4, 3), (5, 0), (5, 1), (5, 3)
""",
    literal_eval,
)


def known_releases(cann: str) -> tuple[str, ...]:
    """Returns the releases up to and including ``cann``. Raises ContractError ``cann``."""
    return RELEASES[: RELEASES.index(known_name("cann", cann, RELEASES)) + 1]


def known_path(path: str) -> str:
    """Returns the path itself. Raises ContractError ``path`` if `PATHS` lacks it."""
    return known_name("path", path, PATHS)


def newest(since: Mapping[str, Any], cann: str) -> Any:
    """Returns the entry of the last release up to ``cann``, or None. Raises ContractError
    ``cann``.
    """
    entries = [since[release] for release in known_releases(cann) if release in since]
    return entries[-1] if entries else None


VERSIONS = {name: operator.version for name, operator in PROLOGS.items()}


@dataclass(frozen=True)
class Limits:
    """What an operator takes on a SoC at a CANN release, on a path.

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
    empty_kr_int8      weight modes with which it may be int8; it may always be bfloat16
    """

    dims: Mapping[str, Sizes]
    quant_modes: frozenset[tuple[int, int]]
    cache_modes: tuple[str, ...]
    strided_caches: bool
    absent: str
    reads_modes: bool
    gives_query_norm: bool
    kv_scale: str
    compares_strides: bool
    block_index_ranks: tuple[int, ...]
    weight_dq_4d: str
    empty_kr_ranks: tuple[int, ...]
    empty_kr_int8: tuple[int, ...]


def limits(op: str, soc: str = "A3", cann: str = "latest", path: str = "eager") -> Limits:
    """Returns the allowed sizes per axis, cache modes and (weight, KV cache) quantisation modes,
    and the traits of a release.

    Raises ContractError ``op``, ``soc``, ``cann`` or ``path`` for a name that is not in the tables.
    """
    known_name("op", op, VERSIONS)
    known_name("soc", soc, SOCS)
    known_releases(cann)
    known_path(path)
    return _limits(op, soc, cann, path)


@cache
def _limits(op: str, soc: str, cann: str, path: str) -> Limits:
    releases, version = known_releases(cann), VERSIONS[op]

    def rows_in_force(rows: list[Limit]) -> list[tuple[str, Any]]:
        return [
            (row.name, row.value)
            for row in rows
            if row.since in releases
            and soc in row.socs
            and version in row.versions
            and path in row.paths
        ]

    quant = {pair for _, pairs in rows_in_force(QUANT_RELEASES) for pair in pairs}
    sizes = MappingProxyType(dict(rows_in_force(LIMITS)))
    return Limits(sizes, frozenset(quant), **dict(rows_in_force(TRAITS)))


def taken_by(op: str, axis: str, size: int, here: str) -> str:
    """Returns which releases take a size that ``here`` ("A3, CANN 8.5") refuses, for its message.

    "which A3 takes after CANN 8.3", "which A5 takes after CANN 9.0, A3 in no release", or
    "which no release takes".
    """
    own_soc = here.partition(",")[0]
    texts = {soc: _when_taken(op, axis, size, soc) for soc in SOCS}
    if texts[own_soc]:
        return f"which {own_soc} takes {texts[own_soc]}"
    others = " and ".join(f"{soc} takes {text}" for soc, text in texts.items() if text)
    return f"which {others}, {own_soc} in no release" if others else "which no release takes"


def _when_taken(op: str, axis: str, size: int, soc: str) -> str:
    """Returns "after CANN 8.3", "up to CANN 9.1", "in every release", or "" for never."""
    by_release = {cann: limits(op, soc, cann) for cann in RELEASES}
    taking = [c for c, limit in by_release.items() if not limit.absent and size in limit.dims[axis]]
    if not taking:
        return ""
    if taking[-1] != RELEASES[-1]:
        return f"up to CANN {taking[-1]}"
    refusing = [cann for cann in RELEASES if cann not in taking]
    return f"after CANN {refusing[-1]}" if refusing else "in every release"
