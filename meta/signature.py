"""Argument names, order and defaults of the operators: the one place where a signature is written down."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from mla_fusion.meta import preprocess, preprocess_csrc
from mla_fusion.meta.errors import ContractError

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
_SCALES: dict[str, Any] = dict.fromkeys(
    (
        "dequant_scale_x",
        "dequant_scale_w_dq",
        "dequant_scale_w_uq_qr",
        "dequant_scale_w_dkv_kr",
        "quant_scale_ckv",
        "quant_scale_ckr",
        "smooth_scales_cq",
    )
)
_NORM = {"rmsnorm_epsilon_cq": 1e-05, "rmsnorm_epsilon_ckv": 1e-05, "cache_mode": "PA_BSND"}
_MODES = {
    "query_norm_flag": False,
    "weight_quant_mode": 0,
    "kv_cache_quant_mode": 0,
    "query_quant_mode": 0,
    "ckvkr_repo_mode": 0,
    "quant_scale_repo_mode": 0,
    "tile_size": 128,
    "qc_qr_scale": 1.0,
    "kc_scale": 1.0,
}
_DTYPES: dict[str, Any] = dict.fromkeys(
    ("token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype", "kv_cache_dtype")
)
_V1 = ((*_WEIGHTS, "cache_index", "kv_cache", "kr_cache"), {**_SCALES, **_NORM})
_V3 = (
    (*_WEIGHTS, "kv_cache", "kr_cache"),
    {
        "cache_index": None,
        **_SCALES,
        "actual_seq_len": None,
        "k_nope_clip_alpha": None,
        **_NORM,
        **_MODES,
        **_DTYPES,
    },
)

# op -> (required arguments in positional order, keyword arguments with the schema's defaults)
SIGNATURES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "npu_mla_prolog": _V1,
    "npu_mla_prolog_v2": _V1,
    "npu_mla_prolog_v3": _V3,
    "npu_mla_prolog_v3_functional": _V3,
    preprocess.OP: (preprocess.ATB.required, preprocess.ATB.defaults),
    preprocess_csrc.OP: (preprocess_csrc.CSRC.required, preprocess_csrc.CSRC.defaults),
}
# ATB's operator without torch's prefix; the fork, whose own name this is too, is mla_preprocess_csrc
ALIASES = {"mla_preprocess": preprocess.OP}
# arguments that may be given by position, where these are not just the required ones
_POSITIONAL = {preprocess_csrc.OP: preprocess_csrc.CSRC.positional}


def named(op: str) -> str:
    """The operator's own name, of any name that it goes by; a name nobody knows is handed back."""
    return ALIASES.get(op, op) if isinstance(op, str) else op


def bind(op: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name from a call's positional and keyword arguments, without defaults.

    Raises ContractError ``op`` for an unknown operator and ``argument.unknown`` for too many positional ones.
    """
    required, _ = signature(op)
    order = _POSITIONAL.get(named(op), required)
    if len(args) > len(order):
        raise ContractError("argument.unknown", "*args", f"at most {len(order)} positional", str(len(args)), op=op)
    twice = next((name for name in order[: len(args)] if name in options), None)
    if twice is not None:
        raise ContractError("argument.unknown", twice, "one value", "one by position and one by name", op=op)
    return dict(zip(order, args, strict=False)) | dict(options)


def complete(op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of the operator by name, schema defaults filled in.

    Raises ContractError ``argument.unknown`` and ``required.<argument>``.
    """
    required, defaults = signature(op)
    full = {**defaults, **arguments}
    if len(full) != len(defaults) + len(required):
        for name in arguments:
            if name not in defaults and name not in required:
                raise ContractError("argument.unknown", name, f"an argument of {op}", name, op=op)
    for name in required:
        if full.get(name) is None:
            raise ContractError(f"required.{name}", name, "a tensor", "nothing", op=op)
    for name, (kind, text) in attribute_types(op).items():
        value = full[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ContractError(f"type.{name}", name, text, repr(value), op=op)
    return full


@cache
def attribute_types(op: str) -> dict[str, tuple[Any, str]]:
    """The Python type of every argument that is not a tensor."""
    kinds: dict[type, tuple[Any, str]] = {
        bool: (bool, "True or False"),
        int: ((int, torch.SymInt), "an int"),
        float: ((int, float, torch.SymFloat), "a number"),
        str: (str, "a str"),
    }
    attributes = {name: kinds[type(value)] for name, value in signature(op)[1].items() if value is not None}
    dtype = ((int, type(None)), "a torch_npu dtype number or None")
    return attributes | {name: dtype for name in signature(op)[1] if name.endswith("_dtype")}


def signature(op: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """(required arguments in order, keyword arguments with defaults); ContractError ``op`` when unknown."""
    try:
        return SIGNATURES[named(op)]
    except (KeyError, TypeError):
        raise ContractError("op", "op", "one of " + ", ".join(SIGNATURES), repr(op)) from None
