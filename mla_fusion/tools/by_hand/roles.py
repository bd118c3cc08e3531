"""Which argument of each audited operator plays which part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from mla_fusion.meta.prolog import PROLOGS

Touched = frozenset[str]  # what a mistake can alter: the query, and rows of either cache
QUERY, KV, KR = frozenset({"query"}), frozenset({"kv"}), frozenset({"kr"})
ALL = QUERY | KV | KR


class Sizes(NamedTuple):
    """N, Dr and Hckv; 0 where no argument tells."""

    heads: int
    rope: int
    latent: int


@dataclass(frozen=True)
class Roles:
    """Names of arguments; "" where an operator has none for a part.

    transposed   weights are [columns, in] (ATB's), not [in, columns]
    of_rows      ``down`` is no weight but what it has made: rows of any number of axes
    down         the weight whose columns are [c_kv | k_pe ..]; ``down_also_query``: [c_kv | k_pe |
                 c_q]
    vectors      of a weight: what else has its columns
    epsilons, gammas, scales   with the values that each touches
    returned_caches            cache, its place among the results, what it touches; ``fresh``: of
                               their rows, only those of the slots are defined
    """

    x: str
    cos: str
    sin: str
    slots: str
    kv_cache: str
    kr_cache: str
    epsilons: Mapping[str, Touched]
    gammas: Mapping[str, Touched]
    scales: Mapping[str, Touched]
    down_query: str = ""
    up: str = ""
    absorbed: str = ""
    down: str = ""
    vectors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    down_also_query: bool = False
    transposed: bool = False
    of_rows: bool = False
    returned_caches: tuple[tuple[str, int, Touched], ...] = ()
    fresh: bool = False

    def columns(self, matrix: Tensor) -> Tensor | None:
        """The matrix, or a vector of scales, with its columns last; None for other storage
        (FRACTAL_NZ's 4-D shape).
        """
        if self.of_rows:
            return matrix
        if matrix.dim() == 1 or (matrix.dim() == 2 and 1 in matrix.shape):
            return matrix.reshape(1, -1)
        if matrix.dim() != 2:
            return None
        return matrix.t() if self.transposed else matrix

    def like(self, matrix: Tensor, columns: Tensor) -> Tensor:
        """``columns`` in the form of ``matrix``."""
        if not self.of_rows and (matrix.dim() == 1 or 1 in matrix.shape):
            return columns.reshape(matrix.shape)
        return columns.t() if self.transposed else columns

    def sizes(self, arguments: Mapping[str, Any]) -> Sizes:
        latent = next((name for name, touched in self.gammas.items() if touched == KV), "")
        heads = _size(arguments.get(self.absorbed), 0, rank=3)
        return Sizes(heads, *(_size(arguments.get(name), -1) for name in (self.cos, latent)))


def _size(value: Any, axis: int, rank: int = 1) -> int:
    return int(value.shape[axis]) if isinstance(value, Tensor) and value.dim() >= rank else 0


_PROLOG = Roles(
    x="token_x",
    cos="rope_cos",
    sin="rope_sin",
    slots="cache_index",
    kv_cache="kv_cache",
    kr_cache="kr_cache",
    epsilons={"rmsnorm_epsilon_cq": QUERY, "rmsnorm_epsilon_ckv": KV},
    gammas={"rmsnorm_gamma_cq": QUERY, "rmsnorm_gamma_ckv": KV},
    scales={
        "dequant_scale_x": ALL,
        "dequant_scale_w_dq": QUERY,
        "dequant_scale_w_uq_qr": QUERY,
        "dequant_scale_w_dkv_kr": KV | KR,
        "quant_scale_ckv": KV | QUERY,
        "quant_scale_ckr": KR,
        "smooth_scales_cq": QUERY,
        "qc_qr_scale": QUERY,
        "kc_scale": KV,
    },
    down_query="weight_dq",
    up="weight_uq_qr",
    absorbed="weight_uk",
    down="weight_dkv_kr",
    vectors={
        "weight_dq": ("dequant_scale_w_dq",),
        "weight_uq_qr": ("dequant_scale_w_uq_qr",),
        "weight_dkv_kr": ("dequant_scale_w_dkv_kr",),
    },
)
_KEY_OPERATOR = Roles(
    x="kv",
    cos="cos",
    sin="sin",
    slots="index",
    kv_cache="ckv_cache",
    kr_cache="k_cache",
    epsilons={"epsilon": KV},
    gammas={"gamma": KV},
    scales={"k_rope_scale": KR, "c_kv_scale": KV},
    down="kv",
    of_rows=True,
)
_PREPROCESS = Roles(
    x="input",
    cos="cos",
    sin="sin",
    slots="slotmapping",
    kv_cache="kv_cache",
    kr_cache="kv_cache_rope",
    epsilons={},
    gammas={"gamma0": ALL, "gamma1": QUERY, "gamma2": KV},
    scales={
        "quant_scale0": ALL,
        "quant_scale1": QUERY,
        "descale0": ALL,
        "descale1": QUERY,
        "ctkv_scale": KV,
        "q_nope_scale": QUERY,
    },
    up="wuq",
    absorbed="wuk",
    down="wdqkv",
    vectors={"wuq": ("descale1",), "wdqkv": ("descale0", "bias0")},
    down_also_query=True,
    transposed=True,
)


def roles_of(name: str) -> Roles:
    """Of an operator by its name without namespace."""
    if name in PROLOGS:
        results = PROLOGS[name].results if PROLOGS[name].version == "v3" else ()
        caches = ((_PROLOG.kv_cache, KV), (_PROLOG.kr_cache, KR))
        returned = [(one, results.index(one), touched) for one, touched in caches if one in results]
        return replace(_PROLOG, returned_caches=tuple(returned))
    if name == "npu_mla_preprocess":
        returned_caches = ((_PREPROCESS.kv_cache, 1, KV), (_PREPROCESS.kr_cache, 3, KR))
        return replace(_PREPROCESS, returned_caches=returned_caches, fresh=True)
    return _PREPROCESS if name.startswith("npu_mla_preprocess") else _KEY_OPERATOR
