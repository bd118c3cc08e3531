"""CPU kernels of the remaining NPU operators of MLA graphs: batched matmul, scatter, quantised
product, format cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import number_formats
from mla_fusion.meta.number_formats import INT8, NumberFormat
from mla_fusion.reference.formats import BY_MODE
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
    """Returns ``permute(input)[Bt, M, K] @ permute(weight)[Bt, K, N]`` as ``[M, Bt, N]`` (perm_y
    is [1, 0, 2] only).

    With ``batch_split_factor`` f > 1 the result is ``[f, M, Bt*N/f]``. Raises ValueError for bias
    (unsupported by the operator) and scale (static quantisation, no CPU kernel).
    """
    if bias is not None or scale is not None:
        raise ValueError("npu_transpose_batchmatmul: bias and scale have no CPU kernel")
    if perm_y and list(perm_y) != [1, 0, 2]:
        raise ValueError(f"npu_transpose_batchmatmul: perm_y is [1, 0, 2], not {list(perm_y)}")
    left = input.permute(*(perm_x1 or (0, 1, 2)))
    right = weight.permute(*(perm_x2 or (0, 1, 2)))
    y = matmul(left, right).transpose(0, 1)
    factor = batch_split_factor or 1
    if factor > 1:
        y = y.flatten(1).unflatten(1, (factor, -1)).transpose(0, 1)
    return y.contiguous()


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Writes ``input[indices[..., 0], ..., indices[..., a-1]] = updates`` and returns the input. If
    indices are equal, the last update wins.
    """
    depth = indices.shape[-1]
    positions = indices.reshape(-1, depth).to(torch.int64)
    input.index_put_(tuple(positions.unbind(-1)), updates.reshape(-1, *input.shape[depth:]))
    return input


def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Returns a copy after `npu_scatter_nd_update_`."""
    return npu_scatter_nd_update_(input.clone(), indices, updates)


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Writes ``updates[t]`` into ``input[t]`` at the places from ``indices[t]`` on of ``axis``, and
    returns the input. If the indices are ``[T, 2]``, their first column has numbers of entries of
    the first axis in place of t.
    """
    places = indices.tolist()
    for entry, (place, rows) in enumerate(zip(places, updates.unsqueeze(1), strict=True)):
        first, start = place if indices.dim() == 2 else (entry, place)
        input[first : first + 1].narrow(axis, start, rows.shape[axis]).copy_(rows)
    return input


def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Returns a copy after `scatter_update_`."""
    return scatter_update_(input.clone(), indices, updates, axis)


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> None:
    """Writes rows ``[T, heads, width]`` to slots of ``[BlockNum, BlockSize, heads, width]``, for
    key and value.

    Raises ValueError for any other ``cache_mode`` than "Norm" and for compressed sequences.
    """
    mode = options.pop("cache_mode", "PA_NZ")
    if mode != "Norm":
        raise ValueError(f"cache_mode {mode!r} is not emulated, only 'Norm'")
    if any(option is not None for option in options.values()):
        raise ValueError(f"{', '.join(options)}: compressed sequences are not emulated")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slot_mapping.to(torch.int64)] = rows


def npu_scatter_pa_kv_cache_functional(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns copies of both caches after `npu_scatter_pa_kv_cache`."""
    caches = key_cache.clone(), value_cache.clone()
    npu_scatter_pa_kv_cache(key, value, *caches, slot_mapping, **options)
    return caches


OUTPUT_DTYPES = {
    None: torch.int8,
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
}


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
    """Returns ``(x1 @ x2 [+ int32 bias]) * scale [* pertoken_scale] [+ bias] [+ offset]``, rounded
    once.

    The operands are int8; or float8_e4m3fn, or hifloat8 (uint8, and 290 for both operands' dtype),
    with a scale for each column and token; or float8_e4m3fn with e8m0 scales for blocks of 32 along
    k, ``scale [k/64, n, 2]``, ``pertoken_scale [.., k/64, 2]``. ``output_dtype`` is a torch dtype
    number: 1 int8 (default), 3 int32, 5 float16, 6 float32, 15 bfloat16; int32 returns the
    accumulator of int8. Raises ValueError for any other form.
    """
    token = None if pertoken_scale is None else (pertoken_scale.dtype, pertoken_scale_dtype)
    scales = (scale.dtype, scale_dtype), token
    form = number_formats.of_product(
        (x1.dtype, x2.dtype), (x1_dtype, x2_dtype), scales, group_sizes
    )
    if form is None or x2.dim() != 2 or y_scale is not None:
        raise ValueError(
            "npu_quant_matmul: the CPU kernel multiplies [..., k] by [k, n] of int8, "
            "float8_e4m3fn or hifloat8, in no groups but blocks of 32 with e8m0 scales"
        )
    if output_dtype not in OUTPUT_DTYPES:
        raise ValueError(f"npu_quant_matmul: output_dtype is 1, 3, 5, 6 or 15, not {output_dtype}")
    dtype = OUTPUT_DTYPES[output_dtype]
    shape = (*x1.shape[:-1], x2.shape[-1])
    x1 = x1.reshape(-1, x1.shape[-1])
    if form is INT8:
        total = int8_matmul(x1, x2)
        if bias is not None and bias.dtype == torch.int32:
            total = total + bias.reshape(-1)
        if dtype == torch.int32:
            return total.view(shape)
        y = total.float() * scale.float().reshape(-1)
        if pertoken_scale is not None:
            y = y * pertoken_scale.reshape(-1, 1)
    else:
        y = _float_product(form, x1, x2, scale, pertoken_scale)
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.float().reshape(-1)
    if offset is not None:
        y = y + offset.reshape(-1)
    rounded = to_int8(y) if dtype == torch.int8 else y.to(dtype)
    return rounded.view(shape)


def _float_product(
    form: NumberFormat, x1: Tensor, x2: Tensor, scale: Tensor, token: Tensor | None
) -> Tensor:
    """Returns the float32 product, by the arithmetic of the prologue's own products."""
    if form.in_blocks:
        assert token is not None
        row_scale = token.view(torch.uint8).reshape(x1.shape[0], -1).view(torch.float8_e8m0fnu)
        columns = scale.view(torch.uint8).permute(1, 0, 2).reshape(x2.shape[1], -1)
        column_scale = columns.view(torch.float8_e8m0fnu)
    else:
        no_scale = torch.ones(1, dtype=torch.float32)
        row_scale = no_scale if token is None else token.float().reshape(-1, 1)
        column_scale = scale.float().reshape(1, -1)
    return BY_MODE[form.full].product(x1, x2, row_scale, column_scale)


def npu_format_cast(input: Tensor, acl_format: int, **dtypes: int | None) -> Tensor:
    """Returns a copy. A storage format such as FRACTAL_NZ (29) is invisible to the logical tensor,
    and the CPU has no formats.
    """
    return input.clone()
