"""CPU kernels of npu_kv_rmsnorm_rope_cache (v1, v2, v2_functional).

Argument order: cos before sin, the rope cache before the nope cache; the schema's "k_cache" is the
rope cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta.key_operator import V1, V2, KeyCall
from mla_fusion.reference import cache, hifloat8
from mla_fusion.reference.formats import to_fp8
from mla_fusion.reference.functional import kernel, on_copies
from mla_fusion.reference.numerics import interleave_rope, rms_norm, working_dtype
from mla_fusion.reference.quantize import to_int8


@kernel(V2)
def npu_kv_rmsnorm_rope_cache_v2(call: Any) -> tuple[Tensor, ...]:
    """Returns ``(k_embed [B, 1, S, Dk], y [B, 1, S, Dv])``, which are ``RoPE(kv[..., Dv:])`` and
    ``RMSNorm(kv[..., :Dv])``, and writes both into the caches.

    ``kv [B, 1, S, Dv + Dk]``, ``gamma [Dv]``, ``cos``/``sin`` ``[B, 1, S or 1, Dk]``. Everything is
    float32 inside; the cache rows are cast (or multiplied by their scale, offset added, rounded and
    saturated to int8) once. ``index``: "Norm" ``[B, S]``, a position in the batch's own cache ``[B,
    N, S_max, *]``; "PA", "PA_BNSD", "PA_NZ" ``[B*S]``, a slot; "PA_BLK_*"
    ``[B*ceil(S/BlockSize)]``, the first slot of each block. A negative index skips the row. The two
    results are meaningful with ``is_output_kv``. Without it the device leaves them unset, and this
    kernel returns zeros.

    Raises ContractError for an unknown cache_mode and for ``v`` (the A5-only three-tensor form).
    """
    KeyCall(V2, vars(call)).check_form()
    work = working_dtype(call.kv.dtype)
    dv = call.gamma.shape[0]
    ckv, k_pe = call.kv.split((dv, call.kv.shape[-1] - dv), -1)
    y = rms_norm(ckv.to(work), call.gamma.to(work), call.epsilon)
    k_embed = interleave_rope(k_pe, call.cos, call.sin, work)
    k_rows = _cast(k_embed, call.k_cache.dtype, call.k_rope_scale, call.k_rope_offset)
    ckv_rows = _cast(y, call.ckv_cache.dtype, call.c_kv_scale, call.c_kv_offset)
    _write(call.k_cache, k_rows, call.index, call.cache_mode, "k_cache")
    _write(call.ckv_cache, ckv_rows, call.index, call.cache_mode, "ckv_cache")
    results = k_embed.to(call.kv.dtype), y.to(call.kv.dtype)
    return results if call.is_output_kv else tuple(map(torch.zeros_like, results))


npu_kv_rmsnorm_rope_cache_v2_functional = on_copies(V2, npu_kv_rmsnorm_rope_cache_v2)


@kernel(V1)
def npu_kv_rmsnorm_rope_cache(call: Any) -> tuple[Tensor, ...]:
    """Returns ``(k_cache, ckv_cache, k_embed, y)``.

    On the device the caches are written in place although the schema declares no mutation, and the
    first two results are those caches. Here the inputs are written as well, and the results are
    copies of them: a result of a pure schema may not share memory with an input.
    """
    rows = npu_kv_rmsnorm_rope_cache_v2(**vars(call))
    return (call.k_cache.clone(), call.ckv_cache.clone(), *rows)


def _cast(x: Tensor, dtype: torch.dtype, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    if scale is None:
        return x.to(dtype)
    x = x * scale.to(x.dtype)
    return _ROUNDED[dtype](x if offset is None else x + offset.to(x.dtype))


_ROUNDED = {torch.int8: to_int8, torch.float8_e4m3fn: to_fp8, torch.uint8: hifloat8.encode}


def _write(target: Tensor, new: Tensor, index: Tensor, cache_mode: str, argument: str) -> None:
    """Writes ``new [B, 1, S, W]`` into a cache."""
    lead = torch.Size((new.shape[0], new.shape[2]))
    if cache_mode == "Norm":
        positions = index.reshape(lead)
        b, s = (positions >= 0).nonzero(as_tuple=True)
        target[b, :, positions[b, s]] = new[b, :, s]
        return
    if "BLK" in cache_mode:  # the slot of a block's first row
        index = index // target.shape[1]
    cache.write(target, new.flatten(0, 2), cache_mode, lead, index, None, argument)
