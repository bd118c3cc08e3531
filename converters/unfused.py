"""Converts the aten operators of unfused MLA graphs that torchair refuses: cache writes and head
repeats.

They become documented GE operators, so that an unfused model compiles and can be compared with the
fused model. ``ScatterNdUpdate`` writes its first input, hence the copy, which torchair's graph
passes remove where the original is a graph input without another reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from mla_fusion.converters.emit import copied

from mla_fusion.compat import ge_operators


def index_copy(self: Any, dim: int, index: Any, source: Any, meta_outputs: Any = None) -> Any:
    """Converts index_copy to ScatterNdUpdate on axis 0, else to ScatterElements."""
    ge = ge_operators()
    dim %= self.rank
    if dim == 0:
        return ge.ScatterNdUpdate(copied(self), ge.Reshape(index, [-1, 1]), source)
    column = [-1 if axis == dim else 1 for axis in range(self.rank)]
    places = ge.BroadcastTo(ge.Reshape(index, column), ge.Shape(source))
    return ge.ScatterElements(self, places, source, axis=dim)


def index_put(
    self: Any,
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
    meta_outputs: Any = None,
) -> Any:
    """Converts ``self[i] = values`` and ``self[i, j] = values`` to ScatterNdUpdate over rows of
    stacked indices.

    The indices are integer tensors of equal shapes over the leading axes; values broadcast. A
    negative index counts from the end in torch and not in GE, so FloorMod brings it into range.
    Raises NotImplementedError for ``accumulate``, more than two indices, an index behind a full
    slice, boolean masks, and indices that broadcast against each other.
    """
    ge = ge_operators()
    used = _leading(indices)
    if accumulate:
        raise _refused("accumulate=True")
    rows = [ge.FloorMod(index, _size(self, axis, index.dtype)) for axis, index in enumerate(used)]
    stacked = ge.Unsqueeze(rows[0], axes=[-1]) if len(rows) == 1 else ge.Pack(rows, N=2, axis=-1)
    sizes = [*used[0].symsize, *self.symsize[len(used) :]]
    if not _same_sizes(values.symsize, sizes):
        values = ge.BroadcastTo(values, _written_shape(self, used, sizes))
    return ge.ScatterNdUpdate(copied(self), stacked, values)


def repeat_interleave(
    self: Any,
    repeats: Any,
    dim: int | None = None,
    *,
    output_size: Any = None,
    meta_outputs: Any = None,
) -> Any:
    """Converts repeat_interleave with a single count. Without dim it flattens."""
    ge = ge_operators()
    if isinstance(repeats, int):
        repeats = ge.Const([repeats], dtype=ge.DataType.DT_INT64)
    if dim is None:
        return ge.RepeatInterleave(ge.Reshape(self, [-1]), repeats, axis=0)
    return ge.RepeatInterleave(self, repeats, axis=dim % self.rank)


def _leading(indices: Sequence[Any]) -> list[Any]:
    """Returns the index tensors, which index the first axes and have equal shapes.

    Raises NotImplementedError for others.
    """
    used = [index for index in indices if index is not None]
    if len(used) not in (1, 2):
        raise _refused(f"{len(used)} index tensors; 1 or 2 are taken")
    if any(index is None for index in indices[: len(used)]):
        raise _refused("an index behind a full slice")
    boolean = import_module("torchair.ge").DataType.DT_BOOL
    if any(index.dtype == boolean for index in used):
        raise _refused("a boolean mask")
    if not all(_same_sizes(index.symsize, used[0].symsize) for index in used):
        raise _refused("indices of different shapes")
    return used


def _size(tensor: Any, axis: int, dtype: int) -> Any:
    """Returns a size of a tensor as a GE tensor of a dtype."""
    ge = ge_operators()
    size = tensor.symsize[axis]
    if isinstance(size, int):
        return ge.Const(size, dtype=dtype)
    return ge.Cast(ge.GatherV2(ge.Shape(tensor), ge.Const(axis), ge.Const(0)), dst_type=dtype)


def _written_shape(self: Any, indices: Sequence[Any], sizes: list[Any]) -> Any:
    """Returns ``sizes``, the shape of an index and then the other axes of ``self``, as a GE
    tensor.
    """
    ge = ge_operators()
    int64 = ge.DataType.DT_INT64
    if all(isinstance(size, int) for size in sizes):
        return ge.Const(sizes, dtype=int64)
    axes = ge.Const(list(range(len(indices), self.rank)))
    others = ge.GatherV2(ge.Shape(self, dtype=int64), axes, ge.Const(0))
    return ge.ConcatV2([ge.Shape(indices[0], dtype=int64), others], concat_dim=0, N=2)


def _same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Returns True if two shapes are equal. Symbols are equal if their expressions are."""
    return [*map(str, a)] == [*map(str, b)]


def _refused(what: str) -> NotImplementedError:
    return NotImplementedError(f"{torch.ops.aten.index_put.default}: no GE operator for {what}")
