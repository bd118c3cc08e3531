"""What goes with each weight_quant_mode of a planned call, read from the operator's
specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_fusion.meta.binder import size_of
from mla_fusion.meta.spec import CACHE_QUANTS, ELEMENT, HIFLOAT8, WEIGHT_MODES

_NUMBERED = ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr")


def attributes(mode: int, cache_mode: int = 0) -> dict[str, int]:
    """Those that are not the operator's default; ``cache_mode``: kv_cache_quant_mode."""
    if not mode:
        return {}
    names = (*_NUMBERED, *(["kv_cache"] if CACHE_QUANTS[cache_mode].kv == ELEMENT else []))
    numbered = names if WEIGHT_MODES[mode].element == torch.uint8 else ()
    return {"weight_quant_mode": mode, **{f"{name}_dtype": HIFLOAT8 for name in numbered}}


def scales(mode: int, dims: Mapping[str, Any]) -> dict[str, tuple[tuple[Any, ...], torch.dtype]]:
    """Shape and dtype of the scales that a mode needs; ``dims`` has "tokens" among the axes."""
    weights = WEIGHT_MODES[mode]
    shapes = {name: text.split() for name, text in weights.required.items()}
    return {
        name: (
            tuple(size_of(axis, dims) for axis in axes),
            weights.scale_dtype,
        )
        for name, axes in shapes.items()
    }
