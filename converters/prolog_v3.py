"""npu_mla_prolog_v3 and its functional form: MlaPrologV3, outputs re-ordered from GE's order to the
schema's.

GE lists the caches third and fourth. The functional operator gives them last and works on copies,
which torchair's graph passes remove where the cache is a graph input with no other reader. The
in-place operator does not give them at all.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from mla_fusion.converters.emit import bind, copied, emit
from mla_fusion.meta.prolog import CACHES, V3, V3_FUNCTIONAL

from mla_fusion.compat import ge_dtype, ge_operators

_HIF8_WEIGHTS = 5
_HIF8_INPUTS = ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr", "kv_cache")


def v3(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The five results; the caches are written in place."""
    outputs = _node(bind(torch.ops.npu.npu_mla_prolog_v3.default, args, kwargs), copy=False)
    return tuple(outputs[name] for name in V3.results)


def v3_functional(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The five results, then both caches."""
    outputs = _node(
        bind(torch.ops.npu.npu_mla_prolog_v3_functional.default, args, kwargs), copy=True
    )
    return tuple(outputs[name] for name in V3_FUNCTIONAL.results)


def _node(values: dict[str, Any], *, copy: bool) -> dict[str, Any]:
    hif8 = values["weight_quant_mode"] == _HIF8_WEIGHTS
    if hif8:
        _declare_hif8_inputs(values)
    if copy:
        values.update({name: copied(values[name]) for name in CACHES})
    outputs = emit(V3, values)
    if hif8:
        _declare_hif8_outputs(values, outputs)
    return outputs


def _declare_hif8_inputs(values: dict[str, Any]) -> None:
    """torch carries hifloat8 as uint8 with the type beside it; GE wants the type on the tensor."""
    apis = ge_operators()
    hif8 = import_module("torchair.ge").DataType.DT_HIFLOAT8
    for name in _HIF8_INPUTS:
        if _is_hif8(values.get(f"{name}_dtype")):
            values[name] = apis.Bitcast(values[name], type=hif8)


def _declare_hif8_outputs(values: dict[str, Any], outputs: dict[str, Any]) -> None:
    if not _is_hif8(values.get("token_x_dtype")):
        return
    cache_mode = values["kv_cache_quant_mode"]
    typed = ["query"] if cache_mode == 1 else []
    typed += ["kv_cache"] if cache_mode in (1, 3) else []
    typed += ["query_norm"] if values["query_norm_flag"] else []
    for name in typed:
        outputs[name].desc.dtype = ge_dtype(values["token_x_dtype"])


def _is_hif8(dtype: int | None) -> bool:
    return dtype is not None and dtype == getattr(import_module("torch_npu"), "hifloat8", None)
