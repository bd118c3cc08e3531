"""aten operators of unfused MLA graphs that torchair declares and refuses: cache writes and head
repeats.

They go onto documented GE operators, so that an unfused model compiles too and can be compared with
the fused one. ``ScatterNdUpdate`` writes its first input, hence the copy, which torchair's graph
passes remove again where the original is a graph input without another reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from mla_fusion.converters.emit import copied

from mla_fusion.compat import ge_operators

_MAX_INDICES = 2


def index_copy(self: Any, dim: int, index: Any, source: Any, meta_outputs: Any = None) -> Any:
    """``index_copy(self, dim, index, source)``: ScatterNdUpdate on axis 0, else ScatterElements."""
    ge = ge_operators()
    dim %= self.rank
    if dim == 0:
        return ge.ScatterNdUpdate(copied(self), ge.Reshape(index, [-1, 1]), source)
    ones = [-1 if axis == dim else 1 for axis in range(self.rank)]
    everywhere = ge.BroadcastTo(ge.Reshape(index, ones), ge.Shape(source))
    return ge.ScatterElements(self, everywhere, source, axis=dim)


def index_put(
    self: Any,
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
    meta_outputs: Any = None,
) -> Any:
    """``self[i] = values`` and ``self[i, j] = values``: ScatterNdUpdate over rows of stacked
    indices.

    The indices are integer tensors of one shape over the leading axes; values broadcast. A negative
    index counts from the end in torch and not in GE, so it is brought into range first. Raises
    NotImplementedError for ``accumulate``, more than two indices, an index behind a full slice,
    boolean masks, and indices that broadcast against each other.
    """
    ge = ge_operators()
    used = _leading(indices)
    if accumulate:
        raise _refused("accumulate=True")
    positive = [
        ge.FloorMod(index, _size(self, axis, index.dtype)) for axis, index in enumerate(used)
    ]
    rows = (
        ge.Unsqueeze(positive[0], axes=[-1]) if len(used) == 1 else ge.Pack(positive, N=2, axis=-1)
    )
    rest = list(self.symsize[len(used) :])
    if not _same_sizes(values.symsize, [*used[0].symsize, *rest]):
        values = ge.BroadcastTo(values, _written_shape(ge, self, used[0], len(used)))
    return ge.ScatterNdUpdate(copied(self), rows, values)


def repeat_interleave(
    self: Any,
    repeats: Any,
    dim: int | None = None,
    *,
    output_size: Any = None,
    meta_outputs: Any = None,
) -> Any:
    """``repeat_interleave(self, repeats, dim)``, one count for all: RepeatInterleave; no dim
    flattens.
    """
    ge = ge_operators()
    if isinstance(repeats, int):
        repeats = ge.Const([repeats], dtype=ge.DataType.DT_INT64)
    if dim is None:
        return ge.RepeatInterleave(ge.Reshape(self, [-1]), repeats, axis=0)
    return ge.RepeatInterleave(self, repeats, axis=dim % self.rank)


def _leading(indices: Sequence[Any]) -> list[Any]:
    """The index tensors, known to index the first axes and to have one shape."""
    used = [index for index in indices if index is not None]
    if not 1 <= len(used) <= _MAX_INDICES:
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
    """One size of a tensor as a GE tensor of the index's dtype."""
    ge = ge_operators()
    size = tensor.symsize[axis]
    if isinstance(size, int):
        return ge.Const(size, dtype=dtype)
    return ge.Cast(ge.GatherV2(ge.Shape(tensor), ge.Const(axis), ge.Const(0)), dst_type=dtype)


def _written_shape(ge: Any, self: Any, index: Any, count: int) -> Any:
    """``index.shape + self.shape[count:]``."""
    sizes = [*index.symsize, *self.symsize[count:]]
    if all(isinstance(size, int) for size in sizes):
        return ge.Const(sizes, dtype=ge.DataType.DT_INT64)
    int64 = ge.DataType.DT_INT64
    rest = ge.GatherV2(
        ge.Shape(self, dtype=int64), ge.Const(list(range(count, self.rank))), ge.Const(0)
    )
    return ge.ConcatV2([ge.Shape(index, dtype=int64), rest], concat_dim=0, N=2)


def _same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal term by term; two symbols are equal when they are the same
    expression.
    """
    return len(a) == len(b) and all(str(x) == str(y) for x, y in zip(a, b, strict=True))


def _refused(what: str) -> NotImplementedError:
    return NotImplementedError(f"{torch.ops.aten.index_put.default}: no GE operator for {what}")
