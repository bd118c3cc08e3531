"""What goes with each kv_cache_quant_mode of a planned call, read from the operator's
specification.
"""

from __future__ import annotations

from mla_fusion.meta.spec import CACHE_QUANTS, CLIP_WEIGHT_MODES


def attributes(mode: int) -> dict[str, int]:
    """Those that are not 0, which is the operator's default."""
    quant = CACHE_QUANTS[mode]
    given = {
        "kv_cache_quant_mode": mode,
        "query_quant_mode": quant.query_quant_mode,
        "ckvkr_repo_mode": quant.repo_mode,
        "quant_scale_repo_mode": quant.repo_mode,
    }
    return {name: value for name, value in given.items() if value}


def scale_shapes(mode: int, latent: int, rope: int, weight_mode: int) -> dict[str, tuple[int, ...]]:
    """The float32 arguments of a mode beside a weight_quant_mode, by name; ``latent`` is Hckv,
    ``rope`` Dr.
    """
    sizes = {"1": 1, "Hckv": latent, "Dr": rope}
    required = CACHE_QUANTS[mode].required.items()
    clips = weight_mode in CLIP_WEIGHT_MODES
    return {
        name: tuple(sizes[axis] for axis in axes.split())
        for name, axes in required
        if clips or name != "k_nope_clip_alpha"
    }
