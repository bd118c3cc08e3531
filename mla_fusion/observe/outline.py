"""Builds the tensors of a legal call without their numbers, from the operator's specification.

``gain.py`` explains such a call; the self-test and the tests use them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import spec
from mla_fusion.meta.binder import size_of


def outline(
    weight_quant_mode: int,
    kv_cache_quant_mode: int,
    lead: Sequence[int],
    dims: Mapping[str, int],
    *,
    cache_mode: str = "PA_BSND",
    dtype: torch.dtype = torch.bfloat16,
    smooth: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of a legal ``npu_mla_prolog_v3`` call, on meta, and its attributes, by
    name.

    Arguments that say where the rows go are left out.

    lead  ``(T,)`` or ``(B, S)``
    """
    weights, cache = spec.WEIGHT_MODES[weight_quant_mode], spec.CACHE_QUANTS[kv_cache_quant_mode]
    axes = ("T",) if len(lead) == 1 else ("B", "S")
    tile = spec.TILE_SIZE if dims["Hckv"] % spec.TILE_SIZE == 0 else dims["Hckv"]
    extents = {**dims, **dict(zip(axes, lead, strict=True)), "tokens": prod(lead), "tile": tile}
    roles, cache_axes = weights.roles(dtype), spec.CACHE_MODES[cache_mode].cache
    tensors: dict[str, Tensor] = {}

    def add(name: str, shape: str, role: spec.Dtype) -> None:
        sizes = [size_of(axis, extents) for axis in shape.replace("lead", " ".join(axes)).split()]
        tensors[name] = torch.empty(sizes, dtype=roles.get(role, role), device="meta")

    for tensor in spec.INPUTS:
        add(tensor.name, tensor.shape, tensor.dtype)
    add("kv_cache", f"{cache_axes} {cache.width}", cache.kv)
    add("kr_cache", *(("0", dtype) if cache.kr is None else (f"{cache_axes} Dr", cache.kr)))
    scales = {**weights.required, **cache.required, **(weights.optional if smooth else {})}
    if weight_quant_mode not in spec.CLIP_WEIGHT_MODES:
        scales.pop("k_nope_clip_alpha", None)
    for name, shape in scales.items():
        add(name, shape, weights.scale_dtype if name in weights.required else torch.float32)
    options = {
        "cache_mode": cache_mode,
        "weight_quant_mode": weight_quant_mode,
        "kv_cache_quant_mode": kv_cache_quant_mode,
        **cache.modes,
        "tile_size": tile if cache.repo_mode else spec.TILE_SIZE,
    }
    if weight_quant_mode == 5:
        options |= dict.fromkeys(spec.named_dtypes(kv_cache_quant_mode), spec.HIFLOAT8)
    return tensors, options
