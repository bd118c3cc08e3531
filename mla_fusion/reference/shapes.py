"""Meta kernels by operator name. They compute shapes and dtypes only, and keep sizes symbolic."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.compat import take_for_one
from mla_fusion.meta import key_operator, preprocess
from mla_fusion.meta.number_formats import BLOCK, HIFLOAT8_NUMBER
from mla_fusion.meta.signature import OPERATORS
from mla_fusion.reference.matmul_scatter_quant import OUTPUT_DTYPES
from mla_fusion.reference.norm_rope import (  # noqa: F401  # what these compute of meta tensors
    npu_add_rms_norm,
    npu_rms_norm,
)

# arguments that are caches, by the names of the results, where these names differ
_CACHE_ARGUMENTS = {
    **dict(zip(preprocess.RESULTS[1::2], preprocess.CACHES, strict=True)),
    **key_operator.ARGUMENTS,
}


def _inferred(op: str, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Returns the results that the contract infers. Results that are caches keep the strides."""
    arguments = meta.bind(op, args, options)
    results = []
    for name, result in zip(OPERATORS[op].results, meta.infer(op, **arguments), strict=True):
        argument = name if name in arguments else _CACHE_ARGUMENTS.get(name)
        if argument is None:
            shape, dtype = result
            results.append(torch.empty(shape, dtype=dtype, device="meta"))
        else:
            results.append(torch.empty_like(arguments[argument]))
    return tuple(results)


# operators that the contract describes
globals().update({name: partial(_inferred, name) for name in OPERATORS})


def npu_mla_preprocess_out(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return tuple(options[name] for name in preprocess.RESULTS)


def _like_the_first(input: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(input)


npu_interleave_rope = npu_scatter_nd_update = scatter_update = npu_format_cast = _like_the_first


def npu_rotary_mul(input: Tensor, *args: Any, **options: Any) -> Tensor:
    return input.new_empty(input.shape)


def npu_transpose_batchmatmul(input: Tensor, weight: Tensor, **options: Any) -> Tensor:
    batch, m, _ = input.permute(options.get("perm_x1") or (0, 1, 2)).shape
    n = weight.permute(options.get("perm_x2") or (0, 1, 2)).shape[2]
    factor = options.get("batch_split_factor") or 1
    return input.new_empty((m, batch, n) if factor == 1 else (factor, m, batch * n // factor))


def npu_scatter_nd_update_(input: Tensor, *args: Tensor) -> Tensor:
    return input


scatter_update_ = npu_scatter_nd_update_


def npu_scatter_pa_kv_cache(*args: Tensor, **options: Any) -> None:
    return None


def npu_scatter_pa_kv_cache_functional(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[2]), torch.empty_like(args[3])


# dtypes by dst_type, torch's own number or torch_npu's; int8 for the others
_DTYPES: dict[Any, torch.dtype] = {
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    HIFLOAT8_NUMBER: torch.uint8,
    291: torch.float8_e5m2,
    292: torch.float8_e4m3fn,
}


def npu_dynamic_quant(input: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    scale = input.new_empty(input.shape[:-1], dtype=torch.float32)
    dtype = _DTYPES.get(options.get("dst_type"), torch.int8)
    return torch.empty_like(input, dtype=dtype), scale


def npu_dynamic_mx_quant(input: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    pairs = (input.shape[-1] + 2 * BLOCK - 1) // (2 * BLOCK)
    scales = input.new_empty((*input.shape[:-1], pairs, 2), dtype=torch.uint8)
    return torch.empty_like(input, dtype=_DTYPES[options.get("dst_type")]), scales


def npu_dynamic_block_quant(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    blocks = (x.shape[-1] + 127) // 128
    scale = x.new_empty((*x.shape[:-1], blocks), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=_DTYPES.get(options.get("dst_type"), torch.int8)), scale


def npu_quantize(input: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(input, dtype=torch.int8)


def npu_quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, **options: Any) -> Tensor:
    dtype = OUTPUT_DTYPES[options.get("output_dtype")]
    take_for_one(x1.shape[-1], x2.shape[0])
    return x1.new_empty([*x1.shape[:-1], x2.shape[-1]], dtype=dtype)
