"""CPU kernels of npu_kv_rmsnorm_rope_cache (v1, v2, v2_functional).

Argument order: cos before sin, the rope cache before the nope cache; the schema's "k_cache" is the
rope cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta.key_operator import MODES, V1, V2
from mla_fusion.reference import cache, hifloat8
from mla_fusion.reference.formats import to_fp8
from mla_fusion.reference.functional import on_copies
from mla_fusion.reference.numerics import interleave_rope, rms_norm, working_dtype
from mla_fusion.reference.quantize import to_int8


def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``(k_embed [B, N, S, Dk], y [B, N, S, Dv])``; writes ``RoPE(kv[..., Dv:])`` and
    ``RMSNorm(kv[..., :Dv])``.

    ``kv [B, N, S, Dv + Dk]``, ``gamma [Dv]``, ``cos``/``sin`` ``[B, 1, S or 1, Dk]``. Everything is
    float32 inside; the cache rows are cast (or multiplied by their scale, offset added, rounded and
    saturated to int8) once. ``index``: "Norm" ``[B, S]``, a position in the batch's own cache ``[B,
    N, S_max, *]``; "PA", "PA_BNSD", "PA_NZ" ``[B*S]``, a slot; "PA_BLK_*"
    ``[B*ceil(S/BlockSize)]``, the first slot of each block. Negative: the row is skipped. The two
    results are meaningful with ``is_output_kv``; without it the device leaves them unset, and zeros
    are returned here.

    Raises ValueError for an unknown cache_mode and for ``v`` (the A5-only three-tensor form).
    """
    if cache_mode not in MODES:
        raise ValueError(
            f"npu_kv_rmsnorm_rope_cache: cache_mode is one of {', '.join(MODES)}, "
            f"not {cache_mode!r}"
        )
    if v is not None:
        raise ValueError("npu_kv_rmsnorm_rope_cache: the form with a separate v has no CPU kernel")
    work = working_dtype(kv.dtype)
    dv = gamma.shape[0]
    ckv, k_pe = kv.split((dv, kv.shape[-1] - dv), -1)
    y = rms_norm(ckv.to(work), gamma.to(work), epsilon)
    k_embed = interleave_rope(k_pe, cos, sin, work)
    k_rows = _cast(k_embed, k_cache.dtype, k_rope_scale, k_rope_offset)
    ckv_rows = _cast(y, ckv_cache.dtype, c_kv_scale, c_kv_offset)
    _write(k_cache, k_rows, index, cache_mode, "k_cache")
    _write(ckv_cache, ckv_rows, index, cache_mode, "ckv_cache")
    if not is_output_kv:
        return torch.zeros_like(k_embed, dtype=kv.dtype), torch.zeros_like(y, dtype=kv.dtype)
    return k_embed.to(kv.dtype), y.to(kv.dtype)


npu_kv_rmsnorm_rope_cache_v2_functional = on_copies(V2, npu_kv_rmsnorm_rope_cache_v2)


def npu_kv_rmsnorm_rope_cache(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """v1: ``(k_cache, ckv_cache, k_embed, y)``.

    On the device the caches are written in place although the schema declares no mutation, and the
    first two results are those caches. Here the inputs are written as well, and the results are
    copies of them: a result of a pure schema may not share memory with an input.
    """
    call = meta.bind(V1.name, args, options)
    embedded = npu_kv_rmsnorm_rope_cache_v2(**call)
    return (call["k_cache"].clone(), call["ckv_cache"].clone(), *embedded)


def _cast(x: Tensor, dtype: torch.dtype, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    if scale is None:
        return x.to(dtype)
    x = x * scale.to(x.dtype)
    return _ROUNDED[dtype](x if offset is None else x + offset.to(x.dtype))


_ROUNDED = {torch.int8: to_int8, torch.float8_e4m3fn: to_fp8, torch.uint8: hifloat8.encode}


def _write(target: Tensor, new: Tensor, index: Tensor, cache_mode: str, argument: str) -> None:
    """Write ``new [B, N, S, W]`` into one cache; a token's row is its N heads side by side."""
    batch, heads, length, width = new.shape
    if cache_mode == "Norm":
        chosen = index.reshape(batch, length)
        b, s = (chosen >= 0).nonzero(as_tuple=True)
        target[b, :, chosen[b, s]] = new[b, :, s]
        return
    block_size = target.shape[1]
    if "BLK" in cache_mode:
        blocks = index.div(block_size, rounding_mode="floor")
        block, offset = cache.block_slots(blocks, torch.Size((batch, length)), None, block_size)
    else:
        block, offset = cache.token_slots(index, block_size)
    rows = new.transpose(1, 2).reshape(batch * length, heads, width)
    for head in range(heads):
        one = target[:, :, head : head + 1]
        cache.write_paged(
            one, block, offset, rows[:, head], nz=cache_mode.endswith("NZ"), argument=argument
        )
