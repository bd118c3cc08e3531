"""npu_mla_prolog and npu_mla_prolog_v2: one GE operator each, outputs in the order of the torch schema.

Their schemas are pure and the kernel writes the caches all the same, so no copy is made: a copy would be
written instead of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from mla_fusion.converters.emit import bind, emit
from mla_fusion.converters.ir import V1, V2, Ir


def v1(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """query, query_rope, kv_cache, kr_cache."""
    return _convert(V1, torch.ops.npu.npu_mla_prolog.default, args, kwargs)


def v2(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope."""
    return _convert(V2, torch.ops.npu.npu_mla_prolog_v2.default, args, kwargs)


def _convert(ir: Ir, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    outputs = emit(ir, bind(overload, args, kwargs))
    return tuple(outputs[name] for name in ir.outputs)
