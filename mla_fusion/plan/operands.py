"""Makes operands that no Value of the graph is, and reads new rows back from the caches.

``call.py`` and ``commit/rewrite.py`` call these builders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import without_fake_mode
from mla_fusion.fx.build import Builder
from mla_fusion.fx.kinds import value_of, word
from mla_fusion.fx.sizes import has_symbols

aten = torch.ops.aten
FRACTAL_NZ = 29
_TRANSPOSES = ("permute", "t", "transpose")
_NZ_COLUMNS = 16  # columns of bfloat16 in a piece of FRACTAL_NZ


def identity(builder: Builder, shape: tuple[int, int, int], device: torch.device) -> Any:
    """Returns [I | 0] for every head: a product with it is q_nope itself, followed by zeros."""
    rows, columns = (builder.call(aten.arange.default, size, device=device) for size in shape[1:])
    # torchair has no converter for eye
    eye = builder.call(aten.eq.Tensor, builder.reshape(rows, (shape[1], 1)), columns)
    heads = builder.call(aten.expand.default, builder.cast(eye, torch.bfloat16), list(shape))
    return builder.contiguous(heads)


def to_kernel_layout(builder: Builder, weight: Any, is_nz: bool) -> Any:
    """Returns the weight contiguous, and on a device in the format that the kernel reads.

    is_nz  True for FRACTAL_NZ; weight_uk stays ND
    """
    if builder.device_type(weight) == "cpu":
        # the reference kernel reads any strides; copying weights at every call would be waste
        return weight
    if not _is_laid_out(weight, is_nz):
        weight = builder.contiguous(weight)
    on_cpu = value_of(weight).device.type == "cpu"  # traced for an NPU; a CPU has no formats
    if is_nz and builder.device_type(weight) == "npu" and (not on_cpu or _is_input(weight)):
        weight = builder.call(torch.ops.npu.npu_format_cast.default, weight, FRACTAL_NZ)
    return weight


def _is_laid_out(weight: Any, is_nz: bool) -> bool:
    """Returns True if a value needs no copy to be contiguous in memory that holds nothing else.

    A format cast works on the whole memory, in the shape in which it was allocated. So a view that
    is cast must be an input transposed, as ``mla_fusion.prepack`` leaves parameters.
    """
    if _is_input(weight):
        return True
    value = value_of(weight)
    if has_symbols((*value.shape, *value.stride())) or not value.is_contiguous():
        return False
    is_transposed = word(weight) in _TRANSPOSES and _is_input(weight.args[0])
    return not is_nz or (is_transposed and value.untyped_storage().nbytes() == value.nbytes)


def _is_input(weight: Any) -> bool:
    """Returns True if the node is an input or an attribute of the graph."""
    return isinstance(weight, Node) and weight.op in ("placeholder", "get_attr")


def row_buffer(builder: Builder, x: Any, tokens: Any, width: int) -> Any:
    """Returns memory for the new rows, [T, 1, width] in bfloat16. The kernel writes every row."""
    dtype = {} if builder.dtype(x) == torch.bfloat16 else {"dtype": torch.bfloat16}
    return builder.call(aten.new_empty.default, x, builder.sizes((tokens, 1, width), x), **dtype)


def empty_kr_cache(builder: Builder, x: Any) -> Any:
    """Returns the kr_cache of packed rows, which has no elements."""
    return builder.once(
        "no kr_cache", lambda b: b.call(aten.new_empty.default, x, [0], dtype=torch.bfloat16)
    )


def rows_in_cache(builder: Builder, cache: Any, slots: Any, shape: Sequence[Any], mode: str) -> Any:
    """Returns the new rows, read from where the kernel wrote them.

    The row of a skipped token (slot below 0) is some other row.

    mode  the cache_mode
    """

    def places(builder: Builder) -> Any:
        return builder.call(
            aten.clamp_min.default, builder.call(aten.reshape.default, slots, [-1]), 0
        )

    index, piece_width = builder.once(("places", slots), places), shape[-1]
    if mode == "PA_NZ":  # the pieces of a row lie one block apart
        piece_width = _NZ_COLUMNS
        index = builder.once(
            ("pieces", slots, shape[-1]),
            lambda builder: _piece_numbers(
                builder, index, builder.shape(cache)[1], shape[-1] // piece_width
            ),
        )
    flat = builder.call(aten.reshape.default, cache, [-1, piece_width])
    return builder.reshape(builder.call(aten.index_select.default, flat, 0, index), shape)


def _piece_numbers(builder: Builder, rows: Any, block_size: Any, count: int) -> Any:
    """Returns the numbers of the pieces of rows in a cache [BlockNum, count, BlockSize,
    _NZ_COLUMNS].
    """
    size = builder.size(block_size)
    offset = builder.call(aten.remainder.Scalar, rows, size)
    block_start = builder.call(aten.mul.Tensor, builder.call(aten.sub.Tensor, rows, offset), count)
    first_piece = builder.reshape(
        builder.call(aten.add.Tensor, block_start, offset), (*builder.shape(rows), 1)
    )
    with without_fake_mode():
        numbers = torch.arange(count)
    steps = builder.call(aten.mul.Tensor, builder.constant(numbers, rows), size)
    return builder.call(
        aten.reshape.default, builder.call(aten.add.Tensor, first_piece, steps), [-1]
    )
