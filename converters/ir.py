"""The GE operators as CANN registers them: inputs and outputs in order, attributes with their kinds.

A converter binds a call to the torch schema and lays its values out by these tables. An input, output or
attribute has one name in torch and in GE, with the exception that GE names the written caches as it names
the read ones, which is what marks them as references.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHTS = (
    "token_x",
    "weight_dq",
    "weight_uq_qr",
    "weight_uk",
    "weight_dkv_kr",
    "rmsnorm_gamma_cq",
    "rmsnorm_gamma_ckv",
    "rope_sin",
    "rope_cos",
)
_SCALES = (
    "dequant_scale_x",
    "dequant_scale_w_dq",
    "dequant_scale_w_uq_qr",
    "dequant_scale_w_dkv_kr",
    "quant_scale_ckv",
    "quant_scale_ckr",
    "smooth_scales_cq",
)
_CACHES = ("kv_cache", "kr_cache")
_EPSILONS = {"rmsnorm_epsilon_cq": "Float", "rmsnorm_epsilon_ckv": "Float", "cache_mode": "Str"}


@dataclass(frozen=True)
class Ir:
    """One GE operator. ``attributes`` maps a name to its kind in ``torchair.ge.attr``."""

    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, str]


V1 = Ir(
    "MlaProlog",
    (*_WEIGHTS, "cache_index", *_CACHES, *_SCALES),
    ("query", "query_rope", *_CACHES),
    _EPSILONS,
)
V2 = Ir("MlaPrologV2", V1.inputs, (*V1.outputs, "dequant_scale_q_nope"), _EPSILONS)
V3 = Ir(
    "MlaPrologV3",
    (*_WEIGHTS, *_CACHES, "cache_index", *_SCALES, "actual_seq_len", "k_nope_clip_alpha"),
    ("query", "query_rope", *_CACHES, "dequant_scale_q_nope", "query_norm", "dequant_scale_q_norm"),
    {
        **_EPSILONS,
        "query_norm_flag": "Bool",
        "weight_quant_mode": "Int",
        "kv_cache_quant_mode": "Int",
        "query_quant_mode": "Int",
        "ckvkr_repo_mode": "Int",
        "quant_scale_repo_mode": "Int",
        "tile_size": "Int",
        "qc_qr_scale": "Float",
        "kc_scale": "Float",
    },
)
