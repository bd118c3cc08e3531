"""Operands of the call that no Value of the graph is, and new rows read back from the caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.build import Builder
from mla_fusion.fx.kinds import word
from mla_fusion.fx.sizes import has_symbols

aten = torch.ops.aten
FRACTAL_NZ = 29
_TURNS = ("permute", "t", "transpose")
_NZ_COLUMNS = 16  # of bfloat16, in a piece of FRACTAL_NZ


def identity(b: Builder, shape: tuple[int, int, int], device: torch.device) -> Any:
    """[I | 0] for every head: the product with it is q_nope itself, then zeros."""
    rows, columns = (b.call(aten.arange.default, size, device=device) for size in shape[1:])
    # torchair has no converter for eye
    eye = b.call(aten.eq.Tensor, b.reshape(rows, (shape[1], 1)), columns)
    heads = b.call(aten.expand.default, b.cast(eye, torch.bfloat16), list(shape))
    return b.contiguous(heads)


def dense(b: Builder, weight: Any, nz: bool) -> Any:
    """Contiguous, and on a device in the format that the kernel reads (weight_uk stays ND)."""
    if b.device_type(weight) == "cpu":
        # the reference kernel reads any strides; copying weights at every call would be waste
        return weight
    if not _lies_right(weight, nz):
        weight = b.contiguous(weight)
    on_cpu = weight.meta["val"].device.type == "cpu"  # laid out as on an NPU: a CPU has no formats
    if nz and b.device_type(weight) == "npu" and (not on_cpu or _is_input(weight)):
        weight = b.call(torch.ops.npu.npu_format_cast.default, weight, FRACTAL_NZ)
    return weight


def _lies_right(weight: Any, nz: bool) -> bool:
    """Whether a value needs no copy to be contiguous in memory that holds nothing else.

    A format cast works on the whole memory, in the shape in which it was allocated. So a view that
    is to be cast has to be an input transposed, as ``mla_fusion.prepack`` leaves parameters.
    """
    if _is_input(weight):
        return True
    value = weight.meta["val"]
    if has_symbols((*value.shape, *value.stride())) or not value.is_contiguous():
        return False
    turned = word(weight) in _TURNS and _is_input(weight.args[0])
    return not nz or (turned and value.untyped_storage().nbytes() == value.nbytes)


def _is_input(weight: Any) -> bool:
    return isinstance(weight, Node) and weight.op in ("placeholder", "get_attr")


def buffer(b: Builder, x: Any, lead: Sequence[Any], width: int) -> Any:
    """Room for the new rows, [B, S, 1, width] or [T, 1, width] in bfloat16; every row is
    written.
    """
    dtype = {} if b.dtype(x) == torch.bfloat16 else {"dtype": torch.bfloat16}
    return b.call(aten.new_empty.default, x, b.sizes((*lead, 1, width), x), **dtype)


def nothing(b: Builder, x: Any) -> Any:
    """The kr_cache of packed rows: no elements."""
    return b.once(
        "no kr_cache", lambda b: b.call(aten.new_empty.default, x, [0], dtype=torch.bfloat16)
    )


def written(b: Builder, cache: Any, slots: Any, shape: Sequence[Any], mode: str) -> Any:
    """The new rows, read back from where the kernel wrote them; of a skipped token (slot below 0)
    some other row.
    """
    return b.new_rows(cache, shape, lambda b: _read_back(b, cache, slots, shape, mode))


def _read_back(b: Builder, cache: Any, slots: Any, shape: Sequence[Any], mode: str) -> Any:

    def places(b: Builder) -> Any:
        return b.call(aten.clamp_min.default, b.call(aten.reshape.default, slots, [-1]), 0)

    index, piece = b.once(("places", slots), places), shape[-1]
    if mode == "PA_NZ":  # a row lies in pieces, a block of rows apart
        piece = _NZ_COLUMNS
        index = b.once(
            ("pieces", slots, shape[-1]),
            lambda b: _pieces(b, index, b.shape(cache)[1], shape[-1] // piece),
        )
    flat = b.call(aten.reshape.default, cache, [-1, piece])
    return b.reshape(b.call(aten.index_select.default, flat, 0, index), shape)


def _pieces(b: Builder, rows: Any, block_size: Any, count: int) -> Any:
    """Where the pieces of rows lie in a cache [BlockNum, count, BlockSize, _NZ_COLUMNS]."""
    size = b.size(block_size)
    offset = b.call(aten.remainder.Scalar, rows, size)
    block = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, rows, offset), count)
    first = b.reshape(b.call(aten.add.Tensor, block, offset), (*b.shape(rows), 1))
    steps = b.call(aten.mul.Tensor, b.constant(range(count), rows), size)
    return b.call(aten.reshape.default, b.call(aten.add.Tensor, first, steps), [-1])
