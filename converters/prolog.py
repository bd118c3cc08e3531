"""The prologue operators as GE nodes, outputs re-ordered from GE's order to the schema's.

GE lists the caches third and fourth. The functional form of v3 gives them last and works on copies,
which torchair's graph passes remove where the cache is a graph input with no other reader. The
in-place form does not give them at all. The schemas of v1 and v2 are pure and the kernel writes the
caches all the same, so no copy is made there: a copy would be written instead of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mla_fusion.converters.emit import copied, emit
from mla_fusion.meta.prolog import CACHES, V3_FUNCTIONAL, Operator
from mla_fusion.meta.spec import HIFLOAT8

from mla_fusion.compat import ge_dtype, ge_operators

_HIF8_WEIGHTS = 5


def converter(operator: Operator) -> Callable[..., tuple[Any, ...]]:
    """From the operator's arguments to its results."""

    def convert(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        values = operator.defaults | dict(zip(operator.required, args, strict=False)) | kwargs
        hif8 = values.get("weight_quant_mode") == _HIF8_WEIGHTS
        if hif8:
            _declare_hif8_inputs(operator, values)
        if operator is V3_FUNCTIONAL:
            values |= {name: copied(values[name]) for name in CACHES}
        outputs = emit(operator, values)
        if hif8:
            _declare_hif8_outputs(values, outputs)
        return tuple(outputs[name] for name in operator.results)

    return convert


def _declare_hif8_inputs(operator: Operator, values: dict[str, Any]) -> None:
    """torch carries hifloat8 as uint8 with the type beside it; GE wants the type on the tensor."""
    hif8 = import_module("torchair.ge").DataType.DT_HIFLOAT8
    for name in operator.ge_inputs:
        if values.get(f"{name}_dtype") == HIFLOAT8:
            values[name] = ge_operators().Bitcast(values[name], type=hif8)


def _declare_hif8_outputs(values: dict[str, Any], outputs: dict[str, Any]) -> None:
    if values["token_x_dtype"] != HIFLOAT8:
        return
    cache_mode = values["kv_cache_quant_mode"]
    typed = ["query"] if cache_mode == 1 else []
    typed += ["kv_cache"] if cache_mode in (1, 3) else []
    typed += ["query_norm"] if values["query_norm_flag"] else []
    for name in typed:
        outputs[name].desc.dtype = ge_dtype(HIFLOAT8)
