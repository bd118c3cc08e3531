"""Converts the prologue operators to GE nodes, and their outputs from GE's order to the schema's.

GE lists the caches third and fourth. The functional form of v3 returns them last and works on
copies, which torchair's graph passes remove where the cache is a graph input with no other reader.
The in-place form does not return them. The schemas of v1 and v2 are pure, but the kernel writes the
caches, so these have no copies: the kernel would write the copy instead of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mla_fusion.converters.emit import copied, emit
from mla_fusion.meta.prolog import CACHES, V3_FUNCTIONAL, Operator
from mla_fusion.meta.spec import HIFLOAT8

from mla_fusion.compat import ge_dtype, ge_operators


def converter(operator: Operator) -> Callable[..., tuple[Any, ...]]:
    """Returns a function from the operator's arguments to its results."""

    def convert(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        values = operator.defaults | dict(zip(operator.required, args, strict=False)) | kwargs
        is_hif8 = values.get("token_x_dtype") == HIFLOAT8
        if is_hif8:
            _declare_hif8_inputs(operator, values)
        if operator is V3_FUNCTIONAL:
            values |= {name: copied(values[name]) for name in CACHES}
        outputs = emit(operator, values)
        if is_hif8:
            _declare_hif8_outputs(values, outputs)
        return tuple(outputs[name] for name in operator.results)

    return convert


def _declare_hif8_inputs(operator: Operator, values: dict[str, Any]) -> None:
    """Casts the inputs that are hifloat8. torch carries them as uint8 with the type beside them; GE
    wants the type on the tensor.
    """
    hif8 = import_module("torchair.ge").DataType.DT_HIFLOAT8
    for name in operator.ge_inputs:
        if values.get(f"{name}_dtype") == HIFLOAT8:
            values[name] = ge_operators().Bitcast(values[name], type=hif8)


def _declare_hif8_outputs(values: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Sets the dtype of the outputs that are hifloat8."""
    cache_mode = values["kv_cache_quant_mode"]
    are_hif8 = {
        "query": cache_mode == 1,
        "kv_cache": cache_mode in (1, 3),
        "query_norm": values["query_norm_flag"],
    }
    for name, is_hif8 in are_hif8.items():
        if is_hif8:
            outputs[name].desc.dtype = ge_dtype(HIFLOAT8)
