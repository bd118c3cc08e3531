"""CPU kernels of npu_kv_rmsnorm_rope_cache (v1, v2, v2_functional).

Argument order: cos before sin, the rope cache before the nope cache; the schema's "k_cache" is the
rope cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta.key_operator import MODES, V1, V2
from mla_fusion.reference import cache, hifloat8
from mla_fusion.reference.formats import to_fp8
from mla_fusion.reference.functional import kernel, on_copies
from mla_fusion.reference.numerics import interleave_rope, rms_norm, working_dtype
from mla_fusion.reference.quantize import to_int8


@kernel(V2)
def npu_kv_rmsnorm_rope_cache_v2(call: Any) -> tuple[Tensor, ...]:
    """``(k_embed [B, 1, S, Dk], y [B, 1, S, Dv])``; writes ``RoPE(kv[..., Dv:])`` and
    ``RMSNorm(kv[..., :Dv])``.

    ``kv [B, 1, S, Dv + Dk]``, ``gamma [Dv]``, ``cos``/``sin`` ``[B, 1, S or 1, Dk]``. Everything is
    float32 inside; the cache rows are cast (or multiplied by their scale, offset added, rounded and
    saturated to int8) once. ``index``: "Norm" ``[B, S]``, a position in the batch's own cache ``[B,
    N, S_max, *]``; "PA", "PA_BNSD", "PA_NZ" ``[B*S]``, a slot; "PA_BLK_*"
    ``[B*ceil(S/BlockSize)]``, the first slot of each block. Negative: the row is skipped. The two
    results are meaningful with ``is_output_kv``; without it the device leaves them unset, and zeros
    are returned here.

    Raises ValueError for an unknown cache_mode and for ``v`` (the A5-only three-tensor form).
    """
    if call.cache_mode not in MODES:
        raise ValueError(
            f"npu_kv_rmsnorm_rope_cache: cache_mode is one of {', '.join(MODES)}, "
            f"not {call.cache_mode!r}"
        )
    if call.v is not None:
        raise ValueError("npu_kv_rmsnorm_rope_cache: the form with a separate v has no CPU kernel")
    work = working_dtype(call.kv.dtype)
    dv = call.gamma.shape[0]
    ckv, k_pe = call.kv.split((dv, call.kv.shape[-1] - dv), -1)
    y = rms_norm(ckv.to(work), call.gamma.to(work), call.epsilon)
    k_embed = interleave_rope(k_pe, call.cos, call.sin, work)
    k_rows = _cast(k_embed, call.k_cache.dtype, call.k_rope_scale, call.k_rope_offset)
    ckv_rows = _cast(y, call.ckv_cache.dtype, call.c_kv_scale, call.c_kv_offset)
    _write(call.k_cache, k_rows, call.index, call.cache_mode, "k_cache")
    _write(call.ckv_cache, ckv_rows, call.index, call.cache_mode, "ckv_cache")
    made = k_embed.to(call.kv.dtype), y.to(call.kv.dtype)
    return made if call.is_output_kv else tuple(map(torch.zeros_like, made))


npu_kv_rmsnorm_rope_cache_v2_functional = on_copies(V2, npu_kv_rmsnorm_rope_cache_v2)


@kernel(V1)
def npu_kv_rmsnorm_rope_cache(call: Any) -> tuple[Tensor, ...]:
    """v1: ``(k_cache, ckv_cache, k_embed, y)``.

    On the device the caches are written in place although the schema declares no mutation, and the
    first two results are those caches. Here the inputs are written as well, and the results are
    copies of them: a result of a pure schema may not share memory with an input.
    """
    embedded = npu_kv_rmsnorm_rope_cache_v2(**vars(call))
    return (call.k_cache.clone(), call.ckv_cache.clone(), *embedded)


def _cast(x: Tensor, dtype: torch.dtype, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    if scale is None:
        return x.to(dtype)
    x = x * scale.to(x.dtype)
    return _ROUNDED[dtype](x if offset is None else x + offset.to(x.dtype))


_ROUNDED = {torch.int8: to_int8, torch.float8_e4m3fn: to_fp8, torch.uint8: hifloat8.encode}


def _write(target: Tensor, new: Tensor, index: Tensor, cache_mode: str, argument: str) -> None:
    """Write ``new [B, 1, S, W]`` into one cache."""
    batch, _, length, width = new.shape
    if cache_mode == "Norm":
        chosen = index.reshape(batch, length)
        b, s = (chosen >= 0).nonzero(as_tuple=True)
        target[b, :, chosen[b, s]] = new[b, :, s]
        return
    block_size = target.shape[1]
    if "BLK" in cache_mode:
        blocks = index // block_size
        block, offset = cache.block_slots(blocks, torch.Size((batch, length)), None, block_size)
    else:
        block, offset = cache.token_slots(index, block_size)
    rows, nz = new.reshape(batch * length, width), cache_mode.endswith("NZ")
    cache.write_paged(target, block, offset, rows, nz=nz, argument=argument)
