"""Lists the attributes and scales that weight_quant_mode and kv_cache_quant_mode of a call need.

They are read from the operator's specification. ``plan.py`` and ``call.py`` ask for them.
"""

from __future__ import annotations

import torch

from mla_fusion.meta.spec import (
    CACHE_QUANTS,
    CLIP_WEIGHT_MODES,
    HIFLOAT8,
    WEIGHT_MODES,
    named_dtypes,
)


def attributes(weight_mode: int, cache_mode: int) -> dict[str, int]:
    """Returns the attributes of these modes that differ from 0, the operator's default."""
    quant = CACHE_QUANTS[cache_mode]
    modes = {
        "weight_quant_mode": weight_mode,
        "kv_cache_quant_mode": cache_mode,
        "query_quant_mode": quant.query_quant_mode,
        "ckvkr_repo_mode": quant.repo_mode,
        "quant_scale_repo_mode": quant.repo_mode,
    }
    if weight_mode and WEIGHT_MODES[weight_mode].element == torch.uint8:
        modes |= dict.fromkeys(named_dtypes(cache_mode), HIFLOAT8)
    return {name: mode for name, mode in modes.items() if mode}


def scale_shapes(
    weight_mode: int, cache_mode: int, latent: int, rope: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the scales that the caches need, by name.

    latent  Hckv, the width of the latents
    rope    Dr, the width of the rotated keys
    """
    sizes = {"1": 1, "Hckv": latent, "Dr": rope}
    has_clip = weight_mode in CLIP_WEIGHT_MODES
    return {
        name: tuple(sizes[axis] for axis in axes.split())
        for name, axes in CACHE_QUANTS[cache_mode].required.items()
        if has_clip or name != "k_nope_clip_alpha"
    }
