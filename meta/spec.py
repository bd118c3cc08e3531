"""Specifies the MLA prologue in tables: tensors, axes, dtypes, and the changes of each mode.

`mla_fusion.meta.check` interprets the tables. Read from
`mla_prolog_tiling_check.cpp` (required and forbidden tensors, dtypes, shapes, modes) and the
operator definitions `mla_prolog_v3_def.cpp`.

Axes: T tokens (or B, S), He hidden, Hcq query rank, N heads, D nope dim, Dr rope dim, Hckv KV rank,
BlockNum, BlockSize, Nkv, Blocks of a sequence. "lead" in a shape stands for ``T`` or
``B S``, as token_x has them; "tokens" for T or B*S; "*" for any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

HIFLOAT8 = 290  # torch_npu.hifloat8; such tensors are uint8 and named by the *_dtype arguments

# A dtype role: the activation dtype (bfloat16 on the device), or the element of the weight
# quantisation mode.
ACTIVATION, ELEMENT = "activation", "element"
Dtype = str | torch.dtype

TILING = "mla_prolog_tiling_check.cpp"
SCATTER = "service_scatter_cache"
DEFINITION = "mla_prolog_v3_def.cpp"
INFERSHAPE = "mla_prolog_v3_infershape.cpp"


class Input(NamedTuple):
    """A tensor argument: its shape as axes, its dtype or role, and True for 4-D FRACTAL_NZ."""

    name: str
    shape: str
    dtype: Dtype
    nz: bool = False


class WeightMode(NamedTuple):
    """A weight_quant_mode: dtypes of its tensors, and shapes of the scales that it needs and may
    have.
    """

    title: str
    element: Dtype
    dtypes: Mapping[str, Dtype]
    required: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}
    scale_dtype: torch.dtype = torch.float32

    def roles(self, activation: torch.dtype) -> dict[Any, Any]:
        """Returns the dtype of each role, and of each tensor of ``dtypes``."""
        element = activation if self.element == ACTIVATION else self.element
        roles: dict[Any, Any] = {ACTIVATION: activation, ELEMENT: element}
        return roles | {name: roles[role] for name, role in self.dtypes.items()}


class CacheQuant(NamedTuple):
    """A kv_cache_quant_mode: dtypes of the caches, width of a row, shapes of further tensors, and
    the modes that follow.
    """

    title: str
    kv: Dtype
    kr: Dtype | None  # None: kr_cache is an empty tensor
    width: str
    required: Mapping[str, str] = {}
    query_quant_mode: int = 0
    repo_mode: int = 0
    cache_modes: tuple[str, ...] = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND")

    @property
    def modes(self) -> dict[str, int]:
        """Returns the arguments of a call that follow from this mode."""
        repo = dict.fromkeys(("ckvkr_repo_mode", "quant_scale_repo_mode"), self.repo_mode)
        return {"query_quant_mode": self.query_quant_mode, **repo}


@dataclass(frozen=True)
class CacheMode:
    """A cache_mode: axes in front of a cache's row, and the shape of cache_index by the rank of
    token_x.

    The operator takes only these ranks. With ``actual_seq_len`` it requires this argument for a 2-D
    token_x, and forbids it otherwise.
    """

    cache: str
    index: Mapping[int, str | None]
    actual_seq_len: bool = False


INPUTS = (
    Input("token_x", "lead He", "x"),
    Input("weight_dq", "He Hcq", "weight_dq", nz=True),
    Input("weight_uk", "N D Hckv", ACTIVATION),
    Input("rope_sin", "lead Dr", ACTIVATION),
    Input("rope_cos", "lead Dr", ACTIVATION),
    Input("weight_uq_qr", "Hcq N*D+N*Dr", "weight_uq_qr", nz=True),
    Input("weight_dkv_kr", "He Hckv+Dr", "weight_dkv_kr", nz=True),
    Input("rmsnorm_gamma_cq", "Hcq", ACTIVATION),
    Input("rmsnorm_gamma_ckv", "Hckv", ACTIVATION),
)

_FULL = {name: ELEMENT for name in ("x", "weight_dq", "weight_uq_qr", "weight_dkv_kr")}
_CHANNEL_SCALES = {
    "dequant_scale_x": "tokens 1",
    "dequant_scale_w_dq": "1 Hcq",
    "dequant_scale_w_uq_qr": "1 N*D+N*Dr",
    "dequant_scale_w_dkv_kr": "1 Hckv+Dr",
}
BLOCK_SCALES = {
    "dequant_scale_x": "tokens He/32",
    "dequant_scale_w_dq": "Hcq He/32",
    "dequant_scale_w_uq_qr": "N*D+N*Dr Hcq/32",
    "dequant_scale_w_dkv_kr": "Hckv+Dr He/32",
}
_SMOOTH = {"smooth_scales_cq": "1 Hcq"}

WEIGHT_MODES: Mapping[int, WeightMode] = {
    0: WeightMode("no quantisation", ACTIVATION, dict.fromkeys(_FULL, ACTIVATION)),
    1: WeightMode(
        "weight_uq_qr int8",
        torch.int8,
        {**dict.fromkeys(_FULL, ACTIVATION), "weight_uq_qr": ELEMENT},
        {"dequant_scale_w_uq_qr": "1 N*D+N*Dr"},
        _SMOOTH,
    ),
    2: WeightMode("full int8", torch.int8, _FULL, _CHANNEL_SCALES, _SMOOTH),
    3: WeightMode("full mxfp8", torch.float8_e4m3fn, _FULL, BLOCK_SCALES, {}, torch.float8_e8m0fnu),
    4: WeightMode("full fp8", torch.float8_e4m3fn, _FULL, _CHANNEL_SCALES, _SMOOTH),
    5: WeightMode("full hifloat8", torch.uint8, _FULL, _CHANNEL_SCALES, _SMOOTH),
}

# k_nope_clip_alpha goes with the int8 tiles of these weight modes and is forbidden with the A5
# formats
CLIP_WEIGHT_MODES = (1, 2)

TILED_ROW = "Hckv+2*Dr+4*Hckv/tile"  # bytes: the latent, the rope part, a float for each tile
CACHE_QUANTS: Mapping[int, CacheQuant] = {
    0: CacheQuant("no quantisation", ACTIVATION, ACTIVATION, "Hckv"),
    1: CacheQuant(
        "per tensor",
        ELEMENT,
        ACTIVATION,
        "Hckv",
        {"quant_scale_ckv": "1"},
        query_quant_mode=1,
    ),
    2: CacheQuant(
        "per channel",
        torch.int8,
        torch.int8,
        "Hckv",
        {"quant_scale_ckv": "1 Hckv", "quant_scale_ckr": "1 Dr"},
    ),
    3: CacheQuant(
        "per tile of 128",
        ELEMENT,
        None,
        TILED_ROW,
        {"k_nope_clip_alpha": "1"},
        repo_mode=1,
        cache_modes=("PA_BSND", "BSND", "TND"),
    ),
}
# the kernel reads the first float of this scale, which some versions require as a row
QUANT_SCALE_CKV_ROW = "1 Hckv"

_PAGED = "BlockNum BlockSize Nkv"
_BLOCKWISE: Mapping[int, str | None] = {2: "*", 3: "B Blocks"}
CACHE_MODES: Mapping[str, CacheMode] = {
    "PA_BSND": CacheMode(_PAGED, {2: "lead", 3: "lead"}),
    "PA_NZ": CacheMode(_PAGED, {2: "lead", 3: "lead"}),
    "PA_BLK_BSND": CacheMode(_PAGED, _BLOCKWISE, actual_seq_len=True),
    "PA_BLK_NZ": CacheMode(_PAGED, _BLOCKWISE, actual_seq_len=True),
    "BSND": CacheMode("B S Nkv", {3: None}),
    "TND": CacheMode("T Nkv", {2: None}),
}


def named_dtypes(kv_cache_quant_mode: int) -> tuple[str, ...]:
    """Returns the arguments that name the dtypes of tensors, if the weights are hifloat8."""
    quantised = (*_FULL, "kv_cache") if CACHE_QUANTS[kv_cache_quant_mode].kv == ELEMENT else _FULL
    return tuple("token_x_dtype" if name == "x" else f"{name}_dtype" for name in quantised)


TILE_SIZE = 128
