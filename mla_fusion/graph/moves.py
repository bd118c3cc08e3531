"""Rules of operators that move elements, fill tensors, and read or write rows by their numbers.

``graph/read.py`` calls them for nodes such as view, permute, slice, cat, index and index_put. Each
returns the Value of the result. A write returns the whole tensor after the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from mla_fusion.graph import quantise
from mla_fusion.graph.call import Call, Departs, Size, operator
from mla_fusion.graph.form import Form, Value, filled_with, strip_reshapes, with_axis
from mla_fusion.graph.numbers import is_open

_SCALE_CODES = frozenset((torch.uint8, torch.float8_e8m0fnu))
_VIEWS = """
view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten ravel view_as view_copy
unsqueeze_copy squeeze_copy _reshape_copy
"""


@operator(*_VIEWS.split())
def _(c: Call, x: Value, dtype: Any = None, **_: Any) -> Value:
    """With a dtype, the same bytes as elements of that."""
    if not isinstance(dtype, torch.dtype):
        return c.form.reshape(x, c.shape)
    if dtype in _SCALE_CODES and (x.dtype in _SCALE_CODES or quantise.is_block_scale(x)):
        return x  # both dtypes hold the codes of scales
    if dtype.itemsize > 1 or not x.active or x.shape[-1:] == c.shape[-1:]:
        return c.opaque(str(dtype), [x])
    source = torch.float32 if c.shape[-1] == 4 * x.shape[-1] else torch.bfloat16
    return quantise.as_bytes(c.form, x, source, dtype)


@operator("expand", "expand_copy", "expand_as", "broadcast_to")
def _(c: Call, x: Value, **_: Any) -> Value:
    return c.form.expand(x, c.shape)


@operator("permute", "permute_copy")
def _(c: Call, x: Value, dims: Sequence[int]) -> Value:
    return c.form.permute(x, dims)


@operator("t", "t_copy")
def _(c: Call, x: Value) -> Value:
    return c.form.transposed(x) if len(x.shape) > 1 else x


@operator("transpose", "transpose_copy", "swapaxes", "swapdims")
def _(c: Call, x: Value, **dims: int) -> Value:
    return c.form.transposed(x, *dims.values())


@operator("slice", "slice_copy")
def _(c: Call, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    if isinstance(end, Size) and not start and step == 1 and c.shape[dim] == end:
        return _first_entries(c.form, x, dim % len(x.shape), end)
    return c.form.slice(x, dim, start, end, step)


def is_open_part(value: Value) -> bool:
    """True for a slice of which only symbolic sizes say which entries it takes."""
    if value.op == "slice":
        axis, start, step = value.literal
        return (start, step) == (0, 1) and is_open(value.shape[axis])
    return value.op == "opaque" and value.literal[0] == "slice"


def _first_entries(form: Form, x: Value, dim: int, count: int) -> Value:
    """The first entries of an axis. The number that ``count`` is bound to may be too large."""
    shape = with_axis(x.shape, dim, int(count))
    if is_open(count) and count > x.shape[dim]:
        return form.opaque("slice", dim, [x], shape, x.dtype)
    return form.slice(x, dim, 0, count)


@operator("narrow", "narrow_copy")
def _(c: Call, x: Value, dim: int, start: Any, length: int) -> Value:
    start += x.shape[dim] if start < 0 else 0
    return c.form.slice(x, dim, start, start + length)


@operator("select", "select_copy")
def _(c: Call, x: Value, dim: int, index: int) -> Value:
    return c.form.select(x, dim, index)


_SPLITS = """
split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk split_copy split_with_sizes_copy
"""


@operator(*_SPLITS.split())
def _(c: Call, x: Value, dim: int = 0, **_: Any) -> list[Value]:
    sizes = tuple([shape[dim] for shape in c.shape])
    if sum(sizes) != x.shape[dim]:  # one of them is a difference: a symbol of its own
        first = _first_entries(c.form, x, dim % len(x.shape), sizes[0])
        return [first, *c.opaque(sizes, [x])[1:]]
    parts, start = list[Value](), 0
    for size in sizes:
        parts.append(c.form.slice(x, dim, start, start + size))
        start += size
    return parts


@operator("unbind", "unbind_copy")
def _(c: Call, x: Value, dim: int = 0) -> list[Value]:
    return [c.form.select(x, dim, place) for place in range(x.shape[dim])]


@operator("cat")
def concatenate(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    """The parts in the call's dtype. Beside an active one they lose casts that change no number."""
    parts = [tensor for tensor in tensors if tensor.shape != (0,)] or tensors
    parts = [part if part.active else c.form.cast(part, c.dtype) for part in parts]
    if any(part.active for part in parts):
        parts = [c.form.bare(part, False) for part in parts]
    return c.form.join(parts, dim)


@operator("stack")
def _(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(c.shape)
    parts = [
        c.form.reshape(tensor, (*tensor.shape[:dim], 1, *tensor.shape[dim:])) for tensor in tensors
    ]
    return concatenate(c, parts, dim)


_IDENTITIES = """
clone alias detach contiguous lift_fresh lift_fresh_copy resolve_conj resolve_neg alias_copy
detach_copy npu::npu_format_cast
"""


@operator(*_IDENTITIES.split())
def _(c: Call, x: Any, **_: Any) -> Any:
    return x


_CASTS = "_to_copy to type_as npu::npu_dtype_cast npu::_npu_dtype_cast prims::convert_element_type"


@operator(*_CASTS.split())
def cast(c: Call, x: Value, **_: Any) -> Value:
    """A cast to the call's dtype."""
    return quantise.cast(c, x, c.dtype)


@operator("copy")
def _(c: Call, x: Value, src: Any, non_blocking: bool = False) -> Value:
    return c.form.expand(c.value(src), x.shape)


@operator("fill", "full", "full_like", "new_full", "scalar_tensor")
def _(c: Call, value: Any = None, fill_value: Any = None, s: Any = None, **_: Any) -> Value:
    operand = next((operand for operand in (value, fill_value, s) if operand is not None), None)
    return c.form.expand(c.form.cast(c.value(operand), c.dtype), c.shape)


@operator("zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like", "new_ones")
def _(c: Call, **_: Any) -> Value:
    return c.form.filled(int("ones" in c.name), c.shape, c.dtype)


@operator("arange", "prims::iota")
def _(c: Call, start: Any = 0, step: Any = 1, **_: Any) -> Value:
    inner = Call(c.form, "arange", c.shape, torch.int64)
    first, stride = (
        inner.value(int(number) if isinstance(number, float) and number.is_integer() else number)
        for number in (start or 0, 1 if step is None else step)
    )
    if first.is_float or stride.is_float:
        raise Departs
    positions = inner.times(c.form.count(*c.shape), stride)
    return c.form.cast(inner.plus(positions, first), c.dtype)


@operator("roll")
def _(c: Call, x: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = shifts if isinstance(shifts, (list, tuple)) else [shifts]
    if len(dims) != len(shifts) or any(is_open(x.shape[dim]) for dim in dims):
        raise Departs
    for shift, dim in zip(shifts, dims, strict=True):
        places = [*range(x.shape[dim])]
        start = -shift % len(places)
        x = c.form.take(x, dim, [*places[start:], *places[:start]])
    return x


@operator("flip")
def _(c: Call, x: Value, dims: Sequence[int]) -> Value:
    if any(is_open(x.shape[dim]) for dim in dims):
        raise Departs
    for dim in dims:
        x = c.form.take(x, dim, list(range(x.shape[dim]))[::-1])
    return x


@operator("repeat")
def _(c: Call, x: Value, repeats: Sequence[int]) -> Value:
    sizes = *[1] * (len(repeats) - len(x.shape)), *x.shape
    ones, counts = list[int](), list[int]()
    for times, size in zip(repeats, sizes, strict=True):
        is_one_axis = 1 in (times, size)
        ones += [size] if is_one_axis else [1, size]
        counts += [times * size] if is_one_axis else [times, size]
    return c.form.reshape(c.form.expand(c.form.reshape(x, ones), counts), c.shape)


@operator("constant_pad_nd")
def _(c: Call, x: Value, pad: Sequence[int], value: Any = 0) -> Value:
    for place in range(0, len(pad), 2):
        axis = len(x.shape) - 1 - place // 2
        before, after = pad[place : place + 2]
        x = c.form.slice(x, axis, max(0, -before), x.shape[axis] - max(0, -after))
        fill = c.form.cast(c.value(value), x.dtype)
        left, right = (
            c.form.expand(fill, with_axis(x.shape, axis, max(0, size))) for size in (before, after)
        )
        x = c.form.join([left, x, right], axis)
    return x


@operator("unfold")
def _(c: Call, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows without overlap are a reshape. Raises Departs for others."""
    dimension %= len(x.shape)
    if size != step or x.shape[dimension] % size:
        raise Departs
    parts = c.form.reshape(x, with_axis(x.shape, dimension, x.shape[dimension] // size, size))
    order = [axis for axis in range(len(parts.shape)) if axis != dimension + 1]
    return c.form.permute(parts, [*order, dimension + 1])


# -- rows by their numbers


def row_numbers(c: Call, index: Value, size: int) -> Value:
    """Row numbers of an axis with ``size`` rows: a negative literal counts from the end.

    Raises Departs for a negative literal if the size is symbolic: the row number is no literal.
    """
    if index.op == "expand":
        return c.form.expand(row_numbers(c, index.sources[0], size), index.shape)
    if index.is_number:
        rows = torch.tensor(int(index.number.ratio))
    elif index.op == "constant":
        rows = index.literal.tensor
    else:
        return c.form.cast(index, torch.int64)
    if is_open(size) and bool((rows < 0).any()):
        raise Departs
    return c.form.constant(torch.where(rows < 0, rows + size, rows))


@operator("index_select")
def _(c: Call, x: Value, dim: int, index: Value) -> Value:
    return c.form.gather(x, dim, row_numbers(c, index, x.shape[dim]))


@operator("embedding")
def _(c: Call, weight: Value, indices: Value, **_: Any) -> Value:
    return c.form.gather(weight, 0, indices)


@operator("gather")
def _(c: Call, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """Reads whole rows if the index is the same along all axes but ``dim``.

    Otherwise it reads single elements of each row, of a matrix along its last axis.
    """
    dim %= len(x.shape)
    for at, size in enumerate(index.shape):
        if at != dim and size != x.shape[at]:
            x = _first_entries(c.form, x, at, size)
    row_index = _row_index(c, index, dim, dim + 1)
    if row_index is not None:
        return c.form.gather(x, dim, row_index)
    if dim == 1 and len(x.shape) == 2:  # single elements of each row
        column = _column(c, x.shape[0])
        # of the rows of sequences, of a block table
        if x.op == "gather" and not x.literal and len(x.sources[0].shape) == 2:
            x, rows = x.sources
            column = c.form.reshape(rows, column.shape)
        return take_indexed(c, x, [column, index])
    raise Departs


def _row_index(c: Call, index: Value, first: int, last: int) -> Value | None:
    """The numbers of an index that is the same along all axes but those from ``first`` to
    ``last``. None for other indices.
    """
    inner = strip_reshapes(index)
    if inner.op != "expand" or inner.shape[:last] != index.shape[:last]:
        return None
    numbers = inner.sources[0]
    sizes = (1,) * (len(inner.shape) - len(numbers.shape)) + numbers.shape
    is_same = prod(sizes[:first]) == prod(sizes[last:]) == 1
    return c.form.reshape(numbers, sizes[first:last]) if is_same else None


def _column(c: Call, size: int) -> Value:
    """The positions 0, 1, .. as a column [size, 1]."""
    return c.form.reshape(c.form.count(size), (size, 1))


@operator("index", "_unsafe_index")
def take_indexed(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    """The elements at the row numbers of neighbouring axes."""
    first, flat, size = flat_index(c, x.shape, indices)
    for axis, index in [*enumerate(indices)][first + 1 : first + size]:
        # a negative one would wrap
        if not c.is_not_negative(row_numbers(c, index, x.shape[axis])):  # type: ignore[arg-type]
            raise Departs
    last = first + size
    base = c.form.reshape(x, (*x.shape[:first], prod(x.shape[first:last]), *x.shape[last:]))
    return c.form.gather(base, first, flat)


def flat_index(
    c: Call, shape: Sequence[int], indices: Sequence[Value | None]
) -> tuple[int, Value, int]:
    """Merges neighbouring indexed axes into one.

    Returns the first of these axes, the row numbers over all of them, and how many they are. Raises
    Departs if the indexed axes are not neighbours, or an index is a mask.
    """
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if not axes or axes != list(range(axes[0], axes[-1] + 1)):
        raise Departs
    terms, remaining_sizes = [], list(shape[axes[0] : axes[-1] + 1])
    inner = Call(c.form, "index", (), torch.int64)
    for axis in axes:
        size = remaining_sizes.pop(0)
        index = indices[axis]
        assert index is not None
        if index.dtype in (torch.bool, torch.uint8):  # masks
            raise Departs
        terms.append((prod(remaining_sizes), row_numbers(c, index, size)))
    wide_terms = [(times, c.form.cast(value, torch.int64)) for times, value in terms]
    return axes[0], inner.sum(wide_terms), len(axes)


def write_rows(c: Call, base: Value, axis: int, count: int, index: Value, rows: Any) -> Value:
    """Writes rows by their numbers and returns all of ``base``.

    The numbers count through ``count`` axes from ``axis`` on. Each entry of the axes before is
    written at the same numbers.
    """
    form = c.form
    leading, trailing = base.shape[:axis], base.shape[axis + count :]
    size, width = prod(base.shape[axis : axis + count]), prod(trailing)
    rows = form.expand(c.value(rows), (*leading, *index.shape, *trailing))
    rows = rows if rows.active else form.cast(rows, base.dtype)
    total, entries = index.numel, prod(leading)
    flat = form.reshape(index, (total,))
    if entries > 1:
        columns = [_column(c, entries), form.reshape(flat, (1, total))]
        _, numbers, _ = flat_index(c, (entries, size), columns)
        flat = form.reshape(numbers, (entries * total,))
    result = form.write(
        form.reshape(base, (entries * size, width)),
        flat,
        form.reshape(rows, (entries * total, width)),
    )
    return form.reshape(result, base.shape)


@operator("index_put", "_unsafe_index_put")
def write_indexed(
    c: Call, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """Writes elements at the row numbers of neighbouring axes."""
    if accumulate:
        raise Departs
    first, flat, count = flat_index(c, x.shape, indices)
    return write_rows(c, x, first, count, flat, values)


@operator("index_copy")
def _(c: Call, x: Value, dim: int, index: Value, source: Value) -> Value:
    return write_rows(c, x, dim % len(x.shape), 1, index, source)


@operator("scatter")
def _(c: Call, x: Value, dim: int, index: Value, src: Any = None, **options: Any) -> Value:
    """Writes whole rows: the index must be the same along all axes behind the rows."""
    dim %= len(x.shape)
    row_index = _row_index(c, index, dim, dim + 1)
    is_of_rows = index.shape[dim + 1 :] == x.shape[dim + 1 :]
    if options.get("reduce") is not None or not isinstance(src, Value) or not is_of_rows:
        raise Departs
    for axis, size in enumerate(index.shape):
        src = c.form.slice(src, axis, 0, size)
    is_of_all = index.shape[:dim] == x.shape[:dim]
    if is_of_all and row_index is not None and row_index.shape == (index.shape[dim],):
        return write_rows(c, x, dim, 1, row_index, src)
    entry_index = _row_index(c, index, 0, 2) if dim == 1 else None
    if entry_index is None or entry_index.shape != index.shape[:2]:
        raise Departs
    return write_indexed(c, x, [_column(c, index.shape[0]), entry_index], src)


@operator("npu::npu_scatter_nd_update")
def _(c: Call, x: Value, indices: Value, updates: Value) -> Value:
    columns = [c.form.select(indices, -1, place) for place in range(indices.shape[-1])]
    return write_indexed(c, x, columns, updates)


@operator("npu::scatter_update")
def _(c: Call, x: Value, indices: Value, updates: Value, axis: int) -> Value:
    """Writes rows into each entry of the first axis, from a row number of its own on.

    indices  the row numbers [t], or the numbers of entries and rows [t, 2]

    Raises ValueError for entries of several heads.
    """
    form, axis = c.form, axis % len(x.shape)
    base, rows = (
        form.reshape(value, (value.shape[0], *value.shape[axis:])) for value in (x, updates)
    )
    entries, starts = _column(c, rows.shape[0]), indices
    if len(indices.shape) == 2:
        entries, starts = (form.slice(indices, 1, place, place + 1) for place in (0, 1))
    first = form.cast(form.reshape(starts, entries.shape), torch.int64)
    places = Call(form, "places", (), torch.int64).plus(first, form.count(rows.shape[1]))
    return form.reshape(write_indexed(c, base, [entries, places], rows), x.shape)


@operator("slice_scatter")
def _(
    c: Call, x: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    dim %= len(x.shape)
    first = start or 0
    is_symbolic = isinstance(start, Size) or isinstance(end, Size)
    is_run = is_symbolic and step == 1 and end is not None and end - first == src.shape[dim]
    is_first = is_run and (dim, first) == (0, 0)
    if is_first and (written := _write_entries(c.form, x, src)) is not None:
        return written
    if is_run and _is_written_by_rows(c.form, x, src, dim, of_entries=True):
        return _write_run(c, x, src, dim, first)
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    if src.shape[dim] != len(range(first, last, step)):
        raise Departs  # a symbolic end was cut to the number that the axis is bound to
    return _write_slice(c, x, src, dim, first, step)


def _is_written_by_rows(
    form: Form, x: Value, src: Value, dim: int, of_entries: bool = False
) -> bool:
    """True if a part of ``x`` along ``dim`` is rows of an input, and gets new ones.

    of_entries  ``x`` may be any literal entries of the input
    """
    inner = strip_reshapes(x)
    is_entries = of_entries and inner.op == "slice" and inner.literal[::2] == (0, 1)
    inner = inner.sources[0] if is_entries or is_open_part(inner) else inner
    is_memory = inner.op == "leaf" and not x.active
    return src.active and not form.keeps_parts and is_memory and dim < len(x.shape) - 1


def _write_entries(form: Form, x: Value, src: Value) -> Value | None:
    """Writes to ``x`` the rows that were written to its first entries, which makes ``src``. None
    if ``src`` is anything else.
    """
    inner = strip_reshapes(src)
    if (inner.op, inner.literal) != ("write", None) or form.keeps_parts:
        return None
    memory, index, rows = inner.sources
    if strip_reshapes(memory) is not strip_reshapes(_first_entries(form, x, 0, src.shape[0])):
        return None
    flat = form.reshape(x, (-1, *rows.shape[1:]))
    return form.reshape(form.write(flat, index, rows), x.shape)


def _write_run(c: Call, x: Value, src: Value, dim: int, first: int, step: int = 1) -> Value:
    """Writes rows at the numbers ``first``, ``first + step``, .. and returns all of ``x``."""
    count = src.shape[dim]
    inner = Call(c.form, "places", (count,), torch.int64)
    terms = [(step, c.form.count(count)), (1, inner.value(first))]
    return write_rows(c, x, dim, 1, inner.sum(terms), src)


def _write_slice(c: Call, x: Value, src: Value, dim: int, first: int, step: int = 1) -> Value:
    """Writes ``src`` at places first, first + step, .. of an axis and returns all of ``x``.

    Only the part of ``src`` that changes ``x`` is written. Active rows of an input are written by
    row numbers; anything else becomes a join.
    """
    form, size, count = c.form, x.shape[dim], src.shape[dim]
    is_part = 0 < count < size
    is_first = (dim, first, step) == (0, 0, 1)
    if is_first and (written := _write_entries(form, x, src)) is not None:
        return written
    if count == 1 and src.op == "join" and src.literal == dim + 1 < len(x.shape) - 1:
        parts = _changed_parts(form, form.slice(x, dim, first, first + 1), src, dim + 1, 0)
        if len(parts) == 1:  # rows of one block are rows of all blocks
            ((part, offset),) = parts
            part_count, first = part.shape[dim + 1], first * x.shape[dim + 1] + offset
            leading, trailing = x.shape[:dim], x.shape[dim + 2 :]
            rows = form.reshape(part, (*leading, part_count, *trailing))
            flat = form.reshape(x, (*leading, -1, *trailing))
            return form.reshape(_write_slice(c, flat, rows, dim, first), x.shape)
    is_run = is_part and step == 1
    parts = _changed_parts(form, x, src, dim, first) if is_run and src.op == "join" else []
    if len(parts) == 1 and parts[0][0] is not src:
        ((src, first),) = parts
        return _write_slice(c, x, src, dim, first)
    if is_part and _is_written_by_rows(form, x, src, dim):
        return _write_run(c, x, src, dim, first, step)
    src = src if src.active else form.cast(src, x.dtype)
    src = form.expand(src, with_axis(x.shape, dim, count))
    if step == 1:
        before, behind = form.slice(x, dim, 0, first), form.slice(x, dim, first + count, size)
        return form.join([before, src, behind], dim)
    if is_open(size) or is_open(count):
        raise Departs
    places = list(range(size))
    places[first : first + count * step : step] = range(size, size + count)
    return form.take(form.join([x, src], dim), dim, places)


def _changed_parts(
    form: Form, x: Value, src: Value, dim: int, start: int
) -> list[tuple[Value, int]]:
    """The parts of ``src`` that differ from what ``x`` holds, each with its place along ``dim``.

    start  where ``src`` begins along ``dim``
    """
    if src.op != "join" or src.literal != dim:
        is_same = src is form.slice(x, dim, start, start + src.shape[dim])
        return [] if is_same else [(src, start)]
    changed_parts = list[tuple[Value, int]]()
    for part in src.sources:
        changed_parts += _changed_parts(form, x, part, dim, start)
        start += part.shape[dim]
    return changed_parts


@operator("select_scatter")
def _(c: Call, x: Value, src: Value, dim: int, index: int) -> Value:
    dim, index = dim % len(x.shape), range(x.shape[dim])[index]
    src = c.form.reshape(src, with_axis(x.shape, dim, 1))
    return _write_slice(c, x, src, dim, index)


@operator("where", "masked_fill")
def _(c: Call, condition: Any = None, x: Any = None, other: Any = None, **options: Any) -> Value:
    if c.name == "masked_fill":
        condition, x, other = options["mask"], options["value"], x
    value, other_value = c.value(x), c.value(other)
    mask = filled_with(condition)
    if mask is not None:
        return c.form.expand(value if mask.number.ratio else other_value, c.shape)
    guarded = quantise.without_zero_guard(c, condition, value, other_value)
    if guarded is not None:
        return c.form.expand(guarded, c.shape)
    if condition.op == "constant" and (value.active or other_value.active):
        return _select_by_mask(c, condition.literal.tensor, value, other_value)
    return c.form.expand(c.function("where", condition, value, other_value), c.shape)


def _select_by_mask(c: Call, mask: torch.Tensor, value: Value, other_value: Value) -> Value:
    """Selects elements by a literal mask: each operand is multiplied with its 0/1 mask, and
    added.
    """
    form = c.form
    parts = [
        form.times(form.constant(side_mask.float()), form.bare(operand))
        for side_mask, operand in ((mask, value), (~mask, other_value))
    ]
    return form.expand(form.plus(*parts), c.shape)
