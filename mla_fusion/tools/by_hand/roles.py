"""Which argument of each audited operator plays which part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.tools.by_hand.calls import Call

_QUERY, _KV, _KR = ("query",), ("kv",), ("kr",)


@dataclass(frozen=True)
class Roles:
    """Names of arguments; "" where an operator has none for a part.

    transposed   weights are [columns, in] (ATB's), not [in, columns]
    of_rows      ``down`` is no weight but what it has made: rows of any number of axes
    down         the weight whose columns are [c_kv | k_pe ..]; ``down_also_query``: [c_kv | k_pe |
                 c_q]
    down_vectors what else has those columns
    epsilons, gammas, scales   with the values that each touches
    returned_caches            cache, its place among the results, "kv" or "kr"; ``fresh``: of their
                               rows, only those of the slots are defined
    """

    x: str
    cos: str
    sin: str
    slots: str
    kv_cache: str
    kr_cache: str
    epsilons: Mapping[str, tuple[str, ...]]
    gammas: Mapping[str, tuple[str, ...]]
    scales: Mapping[str, tuple[str, ...]]
    down_query: str = ""
    up: str = ""
    up_scale: str = ""
    absorbed: str = ""
    down: str = ""
    down_scale: str = ""
    down_also_query: bool = False
    down_vectors: tuple[str, ...] = ()
    transposed: bool = False
    of_rows: bool = False
    returned_caches: tuple[tuple[str, int, str], ...] = field(default=())
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

    def heads(self, call: Call) -> int:
        weight = call.arguments.get(self.absorbed)
        return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 3 else 0

    def rope_dim(self, call: Call) -> int:
        return _width(call.arguments.get(self.cos))

    def latent_dim(self, call: Call) -> int:
        """Hckv."""
        name = next((name for name, touched in self.gammas.items() if touched == _KV), "")
        gamma = call.arguments.get(name)
        return gamma.numel() if isinstance(gamma, Tensor) else 0


def _width(value: Any) -> int:
    return int(value.shape[-1]) if isinstance(value, torch.Tensor) and value.dim() else 0


def _of_prolog(name: str) -> Roles:
    operator = PROLOGS[name]
    returned = tuple(
        (cache, operator.results.index(cache), touched)
        for cache, touched in (("kv_cache", "kv"), ("kr_cache", "kr"))
        if cache in operator.results
    )
    scales: dict[str, tuple[str, ...]] = {
        "dequant_scale_x": ("query", "kv", "kr"),
        "dequant_scale_w_dq": _QUERY,
        "dequant_scale_w_uq_qr": _QUERY,
        "dequant_scale_w_dkv_kr": ("kv", "kr"),
        "quant_scale_ckv": ("kv", "query"),
        "quant_scale_ckr": _KR,
        "smooth_scales_cq": _QUERY,
        "qc_qr_scale": _QUERY,
        "kc_scale": _KV,
    }
    return Roles(
        x="token_x",
        cos="rope_cos",
        sin="rope_sin",
        slots="cache_index",
        kv_cache="kv_cache",
        kr_cache="kr_cache",
        epsilons={"rmsnorm_epsilon_cq": _QUERY, "rmsnorm_epsilon_ckv": _KV},
        gammas={"rmsnorm_gamma_cq": _QUERY, "rmsnorm_gamma_ckv": _KV},
        scales=scales,
        down_query="weight_dq",
        up="weight_uq_qr",
        up_scale="dequant_scale_w_uq_qr",
        absorbed="weight_uk",
        down="weight_dkv_kr",
        down_scale="dequant_scale_w_dkv_kr",
        returned_caches=returned if operator.version == "v3" else (),
    )


_KEY_OPERATOR = Roles(
    x="kv",
    cos="cos",
    sin="sin",
    slots="index",
    kv_cache="ckv_cache",
    kr_cache="k_cache",
    epsilons={"epsilon": _KV},
    gammas={"gamma": _KV},
    scales={"k_rope_scale": _KR, "c_kv_scale": _KV},
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
    gammas={"gamma0": ("query", "kv", "kr"), "gamma1": _QUERY, "gamma2": _KV},
    scales={
        "quant_scale0": ("query", "kv", "kr"),
        "quant_scale1": _QUERY,
        "descale0": ("query", "kv", "kr"),
        "descale1": _QUERY,
        "ctkv_scale": _KV,
        "q_nope_scale": _QUERY,
    },
    up="wuq",
    up_scale="descale1",
    absorbed="wuk",
    down="wdqkv",
    down_also_query=True,
    down_vectors=("descale0", "bias0"),
    transposed=True,
)


def roles_of(name: str) -> Roles:
    """Of an operator by its name without namespace."""
    if name in PROLOGS:
        return _of_prolog(name)
    if name == "npu_mla_preprocess":
        returned = (("kv_cache", 1, "kv"), ("kv_cache_rope", 3, "kr"))
        return replace(_PREPROCESS, returned_caches=returned, fresh=True)
    return _PREPROCESS if name.startswith("npu_mla_preprocess") else _KEY_OPERATOR
