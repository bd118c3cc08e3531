"""Meta kernels by operator name: shapes and dtypes only, sizes kept symbolic."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.compat import take_for_one
from mla_fusion.meta import key_operator, number_formats, preprocess
from mla_fusion.meta.prolog import CACHES
from mla_fusion.meta.signature import OPERATORS
from mla_fusion.reference.kernels import (  # noqa: F401  # what these compute of meta tensors
    npu_add_rms_norm,
    npu_rms_norm,
)
from mla_fusion.reference.matmul_scatter_quant import OUTPUT_DTYPES

# results that are caches, and the arguments whose strides they keep
_LIKE = dict(zip(CACHES, CACHES, strict=True))
_LIKE_OF_OTHERS = {
    preprocess.OP: dict(zip(preprocess.RESULTS[1::2], preprocess.CACHES, strict=True)),
    **dict.fromkeys((one.name for one in key_operator.OPERATORS), key_operator.ARGUMENTS),
}


def _inferred(op: str, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    arguments = meta.bind(op, args, options)
    results = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in meta.infer(op, **arguments)
    ]
    like = _LIKE_OF_OTHERS.get(op, _LIKE)
    for position, name in enumerate(OPERATORS[op].results):
        if name in like:
            results[position] = torch.empty_like(arguments[like[name]])
    return tuple(results)


# those that the contract describes
globals().update({name: partial(_inferred, name) for name in OPERATORS})


def npu_mla_preprocess_out(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return tuple(options[name] for name in preprocess.RESULTS)


def _like_the_first(input: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(input)


npu_interleave_rope = npu_scatter_nd_update = npu_format_cast = _like_the_first


def npu_rotary_mul(input: Tensor, *args: Any, **options: Any) -> Tensor:
    return input.new_empty(input.shape)


def npu_transpose_batchmatmul(input: Tensor, weight: Tensor, **options: Any) -> Tensor:
    perm_x1, perm_x2 = options.get("perm_x1") or (0, 1, 2), options.get("perm_x2") or (0, 1, 2)
    batch, m = input.shape[perm_x1[0]], input.shape[perm_x1[1]]
    n, factor = weight.shape[perm_x2[2]], options.get("batch_split_factor") or 1
    return input.new_empty((m, batch, n) if factor == 1 else (factor, m, batch * n // factor))


def npu_scatter_nd_update_(input: Tensor, *args: Tensor) -> Tensor:
    return input


def npu_scatter_pa_kv_cache(*args: Tensor, **options: Any) -> None:
    return None


def npu_scatter_pa_kv_cache_functional(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[2]), torch.empty_like(args[3])


def npu_dynamic_quant(input: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    scale = input.new_empty(input.shape[:-1], dtype=torch.float32)
    return torch.empty_like(input, dtype=_element(options.get("dst_type"))), scale


def _element(number: int | None) -> torch.dtype:
    form = number_formats.of_dst_type(number)
    return form.element if form is not None else _FLOAT8.get(number, torch.int8)


_FLOAT8: dict[Any, torch.dtype] = dict.fromkeys((23, 291), torch.float8_e5m2) | dict.fromkeys(
    (24, 292), torch.float8_e4m3fn
)


def npu_dynamic_mx_quant(input: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    pairs = (input.shape[-1] + 2 * number_formats.BLOCK - 1) // (2 * number_formats.BLOCK)
    scales = input.new_empty((*input.shape[:-1], pairs, 2), dtype=torch.uint8)
    return torch.empty_like(input, dtype=_FLOAT8[options.get("dst_type")]), scales


def npu_dynamic_block_quant(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    blocks = (x.shape[-1] + 127) // 128
    scale = x.new_empty((*x.shape[:-1], blocks), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=_element(options.get("dst_type"))), scale


def npu_quantize(input: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(input, dtype=torch.int8)


def npu_quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, **options: Any) -> Tensor:
    dtype = OUTPUT_DTYPES[options.get("output_dtype")]
    take_for_one(x1.shape[-1], x2.shape[0])
    return x1.new_empty([*x1.shape[:-1], x2.shape[-1]], dtype=dtype)
