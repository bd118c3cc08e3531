"""Seeded random arguments of a legal call, built from the specification: for tests, self-tests and
examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import spec
from mla_fusion.meta.binder import size_of
from mla_fusion.reference import hifloat8

# small sizes; the operator's own are in mla_fusion.meta.limits
SMALL = {
    "He": 256,
    "Hcq": 96,
    "N": 4,
    "D": 32,
    "Dr": 16,
    "Hckv": 64,
    "BlockNum": 6,
    "BlockSize": 16,
    "Nkv": 1,
}


class Drawn:
    """Seeded random tensors whose shapes are written as axes; on the meta device nothing is
    allocated.
    """

    def __init__(self, dims: Mapping[str, int], seed: int, device: str) -> None:
        self.dims, self.device = dims, device
        self.make = torch.Generator().manual_seed(seed)

    def shape(self, axes: str) -> list[int]:
        return [size_of(axis, self.dims) for axis in axes.split()]

    def filled(self, axes: str, kind: torch.dtype, fan_in: float = 1.0) -> Tensor:
        """Noise of variance 1 / ``fan_in``; the whole range of int8."""
        sizes = self.shape(axes)
        if self.device == "meta":
            return torch.empty(sizes, dtype=kind, device=self.device)
        if kind == torch.int8:
            return torch.randint(-127, 128, sizes, generator=self.make, dtype=torch.int8)
        noise = torch.randn(sizes, generator=self.make, dtype=torch.float32) / fan_in**0.5
        return hifloat8.encode(noise) if kind == torch.uint8 else noise.to(kind)

    def scale(self, axes: str, typical: float) -> Tensor:
        """float32 numbers around ``typical``, half of it to one and a half."""
        sizes, make = self.shape(axes), self.make
        noise = torch.rand(sizes, generator=make, dtype=torch.float32, device=self.device)
        return typical * (0.5 + noise)


def sample_call(
    *,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    cache_mode: str = "PA_BSND",
    lead: Sequence[int] = (8,),
    dims: Mapping[str, int] = SMALL,
    dtype: torch.dtype = torch.bfloat16,
    smooth: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments by name of a legal ``npu_mla_prolog_v3`` call; ``lead`` is ``(T,)`` or ``(B, S)``.

    Values are scaled so that every intermediate is of order one; caches hold noise; slots are
    distinct, and -1 (skipped) where the cache is too small for the tokens. With block-wise cache
    modes and a 2-D token_x the tokens are two sequences. On ``device="meta"`` nothing is allocated.
    """
    weights, cache = spec.WEIGHT_MODES[weight_quant_mode], spec.CACHE_QUANTS[kv_cache_quant_mode]
    tokens = prod(lead)
    axes = ("T",) if len(lead) == 1 else ("B", "S")
    tile = spec.TILE_SIZE if dims["Hckv"] % spec.TILE_SIZE == 0 else dims["Hckv"]
    known = {**dims, **dict(zip(axes, lead, strict=True)), "tokens": tokens, "tile": tile}
    drawn = Drawn(known, seed, device)
    roles = weights.roles(dtype)
    call: dict[str, Any] = {}
    for tensor in spec.INPUTS:
        axes_of = tensor.shape.replace("lead", " ".join(axes))
        fan_in = drawn.shape(axes_of)[-2] if tensor.name.startswith("weight") else 1
        call[tensor.name] = drawn.filled(axes_of, roles.get(tensor.dtype, tensor.dtype), fan_in)
    mode = spec.CACHE_MODES[cache_mode]
    call["kv_cache"] = drawn.filled(f"{mode.cache} {cache.width}", roles.get(cache.kv, cache.kv))
    call["kr_cache"] = (
        drawn.filled(f"{mode.cache} Dr", roles.get(cache.kr, cache.kr))
        if cache.kr is not None
        else torch.empty(0, dtype=dtype, device=device)
    )
    scales = {**weights.required, **cache.required, **(weights.optional if smooth else {})}
    if weight_quant_mode not in spec.CLIP_WEIGHT_MODES:
        scales.pop("k_nope_clip_alpha", None)
    for name, text in scales.items():
        typical = 0.9 if name == "k_nope_clip_alpha" else 30.0 if name.startswith("quant") else 1.0
        if name.startswith("dequant") and weights.element == torch.int8:
            # int8 operands have standard deviation 73: bring each product sum back to order one
            typical = 1.0 / (
                73.0
                * (known["He"] ** 0.25 if name != "dequant_scale_w_uq_qr" else known["Hcq"] ** 0.5)
            )
        kind = weights.scale_dtype if name in weights.required else torch.float32
        call[name] = drawn.scale(text, typical).to(kind)
    call |= {
        name: tensor.to(device) for name, tensor in _index(mode, lead, known, drawn.make).items()
    }
    options = {
        "cache_mode": cache_mode,
        "weight_quant_mode": weight_quant_mode,
        "kv_cache_quant_mode": kv_cache_quant_mode,
        **cache.modes,
        "tile_size": tile if cache.repo_mode else spec.TILE_SIZE,
    }
    if weight_quant_mode == 5:
        options |= dict.fromkeys(spec.named_dtypes(kv_cache_quant_mode), spec.HIFLOAT8)
    return call | options


def _index(
    mode: spec.CacheMode, lead: Sequence[int], dims: Mapping[str, int], make: torch.Generator
) -> dict[str, Tensor]:
    if mode.index[len(lead) + 1] is None:
        return {}
    block_num, block_size = dims["BlockNum"], dims["BlockSize"]
    places = block_num if mode.actual_seq_len else block_num * block_size
    unused = torch.full((dims["tokens"],), -1, dtype=torch.int64)
    blocks = torch.cat((torch.randperm(places, generator=make), unused))
    if not mode.actual_seq_len:
        return {"cache_index": blocks[: dims["tokens"]].reshape(list(lead))}
    if len(lead) == 2:
        per_batch = -(-lead[1] // block_size)
        return {"cache_index": blocks[: lead[0] * per_batch].reshape(lead[0], per_batch)}
    first = lead[0] // 2
    ends = torch.tensor([first, lead[0]], dtype=torch.int32)
    count = -(-first // block_size) + -(-(lead[0] - first) // block_size)
    return {"cache_index": blocks[:count], "actual_seq_len": ends}
