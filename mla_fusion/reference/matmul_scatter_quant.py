"""CPU kernels of the remaining NPU operators of MLA graphs: batched matmul, scatter, int8 product, format
cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fusion.reference.numerics import matmul
from mla_fusion.reference.quantize import int8_matmul, to_int8


def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """``permute(input)[Bt, M, K] @ permute(weight)[Bt, K, N]``, output ``[M, Bt, N]`` (perm_y is [1, 0, 2]
    only).

    With ``batch_split_factor`` f > 1 the result is ``[f, M, Bt*N/f]``.
    Raises ValueError for bias (unsupported by the operator) and scale (static quantisation, no CPU kernel).
    """
    if bias is not None or scale is not None:
        raise ValueError("npu_transpose_batchmatmul: bias and scale have no CPU kernel")
    if list(perm_y or (1, 0, 2)) != [1, 0, 2]:
        raise ValueError(f"npu_transpose_batchmatmul: perm_y is [1, 0, 2], not {list(perm_y or ())}")
    left = input.permute(*(perm_x1 or (0, 1, 2)))
    right = weight.permute(*(perm_x2 or (0, 1, 2)))
    y = matmul(left, right).transpose(0, 1)
    factor = batch_split_factor or 1
    if factor > 1:
        m, batch, n = y.shape
        return y.reshape(m, factor, batch * n // factor).transpose(0, 1).contiguous()
    return y.contiguous()


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """``input[indices[..., 0], ..., indices[..., a-1]] = updates``, in place; of equal indices the last
    one wins.
    """
    depth = indices.shape[-1]
    positions = indices.reshape(-1, depth).to(torch.int64)
    input.index_put_(tuple(positions.unbind(-1)), updates.reshape(-1, *input.shape[depth:]))
    return input


def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """`npu_scatter_nd_update_` on a copy."""
    return npu_scatter_nd_update_(input.clone(), indices, updates)


def npu_scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **options: Any
) -> None:
    """Rows ``[T, heads, width]`` to slots of ``[BlockNum, BlockSize, heads, width]``, in place, for key and value.

    Raises ValueError for any other ``cache_mode`` than "Norm" and for compressed sequences.
    """
    mode = options.get("cache_mode", "PA_NZ")
    if mode != "Norm":
        raise ValueError(f"cache_mode {mode!r} is not emulated, only 'Norm'")
    given = [name for name in ("compress_lens", "compress_seq_offsets", "seq_lens") if options.get(name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: compressed sequences are not emulated")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slot_mapping.to(torch.int64)] = rows


def npu_scatter_pa_kv_cache_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """`npu_scatter_pa_kv_cache` on copies."""
    caches = key_cache.clone(), value_cache.clone()
    npu_scatter_pa_kv_cache(key, value, *caches, slot_mapping, **options)
    return caches


OUTPUT_DTYPES = {None: torch.int8, 1: torch.int8, 3: torch.int32, 5: torch.float16, 15: torch.bfloat16}


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """``(x1 @ x2 [+ int32 bias]) * scale [* pertoken_scale] [+ bias] [+ offset]`` from int8, rounded once.

    ``output_dtype`` is a torch dtype number: 1 int8 (default), 3 int32, 5 float16, 15 bfloat16; int32
    returns the accumulator. Raises ValueError for packed 4-bit, group-wise or y_scale forms.
    """
    if x1.dtype != torch.int8 or x2.dtype != torch.int8 or x2.dim() != 2 or group_sizes or y_scale is not None:
        raise ValueError("npu_quant_matmul: the CPU kernel multiplies int8 [..., k] by int8 [k, n], without groups")
    if output_dtype not in OUTPUT_DTYPES:
        raise ValueError(f"npu_quant_matmul: output_dtype is 1, 3, 5 or 15, not {output_dtype}")
    dtype = OUTPUT_DTYPES[output_dtype]
    total = int8_matmul(x1.reshape(-1, x1.shape[-1]), x2)
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias.reshape(-1)
    if dtype == torch.int32:
        return total.view(*x1.shape[:-1], x2.shape[-1])
    y = total.float() * scale.float().reshape(-1)
    if pertoken_scale is not None:
        y = y * pertoken_scale.reshape(-1, 1)
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.float().reshape(-1)
    if offset is not None:
        y = y + offset.reshape(-1)
    rounded = to_int8(y) if dtype == torch.int8 else y.to(dtype)
    return rounded.view(*x1.shape[:-1], x2.shape[-1])


def npu_format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """A copy: a storage format such as FRACTAL_NZ (29) is invisible to the logical tensor, and the CPU has
    none.
    """
    return input.clone()
