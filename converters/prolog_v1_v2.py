"""npu_mla_prolog and npu_mla_prolog_v2: one GE operator each, outputs in the order of the torch
schema.

Their schemas are pure and the kernel writes the caches all the same, so no copy is made: a copy
would be written instead of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from mla_fusion.converters.emit import bind, emit
from mla_fusion.meta.prolog import V1, V2, Operator


def v1(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The results of `meta.prolog.V1`."""
    return _convert(V1, torch.ops.npu.npu_mla_prolog.default, args, kwargs)


def v2(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The results of `meta.prolog.V2`."""
    return _convert(V2, torch.ops.npu.npu_mla_prolog_v2.default, args, kwargs)


def _convert(
    operator: Operator, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    outputs = emit(operator, bind(overload, args, kwargs))
    return tuple(outputs[name] for name in operator.results)
