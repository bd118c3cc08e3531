"""Operators that move elements, fill tensors, and read or write rows by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

import torch

from mla_fusion.graph.call import Call, Departs, operator
from mla_fusion.graph.form import Form, Value, filled_with
from mla_fusion.graph.numbers import is_open, literal

_VIEWS = (
    "view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten ravel view_as"
)


@operator(*_VIEWS.split(), *(f"{name}_copy" for name in "view unsqueeze squeeze _reshape".split()))
def _(c: Call, x: Value, size: Any = None, dtype: Any = None, **_: Any) -> Value:
    if isinstance(dtype, torch.dtype):
        return _read_as(c, x, dtype)
    return c.form.reshape(x, c.shape)


_CODES = frozenset((torch.uint8, torch.float8_e8m0fnu))


def _read_as(c: Call, x: Value, dtype: torch.dtype) -> Value:
    """The same bytes as elements of another dtype."""
    from mla_fusion.graph import quantise

    inner = x
    while inner.op in ("reshape", "permute", "slice"):
        inner = inner.sources[0]
    is_scale = inner.op == "function" and inner.literal[0] == "power of two"
    if dtype.itemsize == 1 and (is_scale or {x.dtype, dtype} <= _CODES):
        return x  # the codes of scales, by another name
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


@operator("t", "t_copy", "numpy_T", "mT", "matrix_H", "adjoint")
def _(c: Call, x: Value) -> Value:
    return c.form.transposed(x) if len(x.shape) > 1 else x


@operator("transpose", "transpose_copy", "swapaxes", "swapdims")
def _(c: Call, x: Value, **dims: int) -> Value:
    return c.form.transposed(x, *dims.values())


@operator("slice", "slice_copy")
def _(c: Call, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    size = x.shape[dim]
    return c.form.slice(x, dim, 0 if start is None else start, size if end is None else end, step)


@operator("narrow", "narrow_copy")
def _(c: Call, x: Value, dim: int, start: Any, length: int) -> Value:
    if isinstance(start, Value):
        raise Departs
    start += x.shape[dim] if start < 0 else 0
    return c.form.slice(x, dim, start, start + length)


@operator("select", "select_copy")
def _(c: Call, x: Value, dim: int, index: int) -> Value:
    index += x.shape[dim] if index < 0 else 0
    return c.form.reshape(c.form.slice(x, dim, index, index + 1), c.shape)


_SPLITS = "split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk"


@operator(*_SPLITS.split(), "split_copy", "split_with_sizes_copy")
def _(c: Call, x: Value, dim: int = 0, **_: Any) -> list[Value]:
    found, at = list[Value](), 0
    for shape in c.shape:
        found.append(c.form.slice(x, dim, at, at + shape[dim]))
        at += shape[dim]
    return found


@operator("unbind", "unbind_copy")
def _(c: Call, x: Value, dim: int = 0) -> list[Value]:
    parts = (c.form.slice(x, dim, place, place + 1) for place in range(x.shape[dim]))
    return [c.form.reshape(part, shape) for part, shape in zip(parts, c.shape, strict=True)]


@operator("cat", "concat", "concatenate")
def _(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    parts = [one for one in tensors if one.shape != (0,)] or list(tensors)
    return c.form.join(_alike(c, parts), dim)


@operator("stack")
def _(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(c.shape)
    parts = [c.form.reshape(one, (*one.shape[:dim], 1, *one.shape[dim:])) for one in tensors]
    return c.form.join(_alike(c, parts), dim)


def _alike(c: Call, parts: Sequence[Value]) -> list[Value]:
    """Parts in the call's dtype; beside an activation their own rounding is left out."""
    if any(part.active for part in parts):
        return [c.form.bare(part) for part in parts]
    return [c.form.cast(part, c.dtype) for part in parts]


_SAME = "clone alias detach contiguous lift_fresh lift_fresh_copy resolve_conj resolve_neg"


@operator(*_SAME.split(), "alias_copy", "detach_copy", "npu::npu_format_cast")
def _(c: Call, x: Any = None, input: Any = None, **_: Any) -> Any:
    return input if x is None else x


_CASTS = "_to_copy to type_as npu::npu_dtype_cast npu::_npu_dtype_cast prims::convert_element_type"


@operator(*_CASTS.split())
def cast(c: Call, x: Value | None = None, a: Value | None = None, **_: Any) -> Value:
    from mla_fusion.graph import quantise

    value = x if x is not None else a
    assert value is not None
    return quantise.cast(c, value, c.dtype)


@operator("copy")
def _(c: Call, x: Value, src: Any, non_blocking: bool = False) -> Value:
    value = c.value(src)
    value = value if value.active else c.form.cast(value, x.dtype)
    return c.form.expand(value, x.shape)


@operator("fill", "full", "full_like", "new_full", "scalar_tensor")
def _(c: Call, value: Any = None, fill_value: Any = None, s: Any = None, **_: Any) -> Value:
    given = next(one for one in (value, fill_value, s) if one is not None)
    return c.form.expand(c.form.cast(c.value(given), c.dtype), c.shape)


@operator("zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like", "new_ones")
def _(c: Call, **_: Any) -> Value:
    return c.form.filled(int("ones" in c.name), c.shape, c.dtype)


@operator("arange", "prims::iota")
def _(
    c: Call, end: Any = None, start: Any = 0, step: Any = 1, length: Any = None, **_: Any
) -> Value:
    first, by = literal(start or 0), literal(1 if step is None else step)
    if first.roots or by.roots:
        raise Departs
    found = c.form.count(*c.shape)
    inner = Call(c.form, "arange", c.shape, torch.int64)
    if first.ratio.denominator * by.ratio.denominator != 1:
        raise Departs
    found = inner.sum([(by.ratio, found), (first.ratio, c.form.filled(1, c.shape, torch.int64))])
    return c.form.cast(found, c.dtype)


@operator("roll")
def _(c: Call, x: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = shifts if isinstance(shifts, (list, tuple)) else [shifts]
    if len(dims) != len(shifts):
        raise Departs
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        at = size - shift % size
        if at < size:
            parts = c.form.slice(x, dim, at, size), c.form.slice(x, dim, 0, at)
            x = c.form.join(parts, dim)
    return x


@operator("flip")
def _(c: Call, x: Value, dims: Sequence[int]) -> Value:
    for dim in dims:
        x = c.form.take(x, dim, list(range(x.shape[dim]))[::-1])
    return x


@operator("repeat", "tile")
def _(c: Call, x: Value, repeats: Any = None, dims: Any = None) -> Value:
    times = list(repeats if repeats is not None else dims)
    lead = [1] * (len(x.shape) - len(times))
    x = c.form.reshape(x, (*[1] * (len(times) - len(x.shape)), *x.shape))
    wide, shape = list[int](), list[int]()
    for number, size in zip((*lead, *times), x.shape, strict=True):
        wide += [1, size]
        shape += [number, size]
    return c.form.reshape(c.form.expand(c.form.reshape(x, wide), shape), c.shape)


@operator("repeat_interleave")
def _(c: Call, x: Value | None = None, repeats: Any = None, dim: Any = None, **_: Any) -> Value:
    if not isinstance(repeats, int) or x is None:
        raise Departs
    if dim is None:
        x, dim = c.form.reshape(x, (prod(x.shape),)), 0
    dim %= len(x.shape)
    one = c.form.reshape(x, (*x.shape[: dim + 1], 1, *x.shape[dim + 1 :]))
    wide = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
    return c.form.reshape(c.form.expand(one, wide), c.shape)


@operator("diagonal", "diagonal_copy")
def _(c: Call, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    rank = len(x.shape)
    one, two = dim1 % rank, dim2 % rank
    if offset or x.shape[one] != x.shape[two]:
        raise Departs
    size = x.shape[one]
    times, product = c.form.split(x)
    if product.op == "dot" and {one, two} == {rank - 1, rank - 2}:  # row by row
        left, right = product.sources
        rows = c.form.times(left, c.form.transposed(right))
        return c.form.scaled(c.form.reduce(rows, [-1]), times)
    rest = [axis for axis in range(rank) if axis not in (one, two)]
    x = c.form.permute(x, [*rest, one, two])
    flat = c.form.reshape(x, (*x.shape[:-2], size * size))
    return c.form.take(flat, -1, list(range(0, size * size, size + 1)))


@operator("constant_pad_nd", "pad")
def _(c: Call, x: Value, pad: Sequence[int], value: Any = 0, mode: str = "constant") -> Value:
    if mode != "constant":
        raise Departs
    for place in range(0, len(pad), 2):
        axis = len(x.shape) - 1 - place // 2
        before, after = pad[place : place + 2]
        x = c.form.slice(x, axis, max(0, -before), x.shape[axis] - max(0, -after))
        fill = c.form.cast(c.value(value or 0), x.dtype)

        def filled(size: int, x: Value = x, axis: int = axis, fill: Value = fill) -> Value:
            shape = [size if at == axis else n for at, n in enumerate(x.shape)]
            return c.form.expand(fill, shape)

        parts = [filled(before)] if before > 0 else []
        parts += [x, *([filled(after)] if after > 0 else [])]
        x = c.form.join(parts, axis)
    return x


@operator("unfold")
def _(c: Call, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows that touch are a reshape."""
    dimension %= len(x.shape)
    if size != step or x.shape[dimension] % size:
        raise Departs
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    parts = c.form.reshape(x, (*before, x.shape[dimension] // size, size, *after))
    order = [axis for axis in range(len(parts.shape)) if axis != dimension + 1]
    return c.form.permute(parts, [*order, dimension + 1])


# -- rows by their numbers


def numbered(c: Call, index: Value, size: int) -> Value:
    """Row numbers, from 0 on where the call counts from the end."""
    filled = filled_with(index)
    if filled is not None and filled.literal[1].ratio < 0:
        return c.form.filled(filled.literal[1].ratio + size, index.shape, index.dtype)
    if index.op == "expand":
        return c.form.expand(numbered(c, index.sources[0], size), index.shape)
    if index.op == "constant":
        return c.form.constant(index.literal.tensor % size)
    return c.form.cast(index, torch.int64)


@operator("index_select")
def _(c: Call, x: Value, dim: int, index: Value) -> Value:
    return c.form.gather(x, dim, numbered(c, index, x.shape[dim]))


@operator("embedding")
def _(c: Call, weight: Value, indices: Value, **_: Any) -> Value:
    return c.form.gather(weight, 0, indices)


@operator("gather", "take_along_dim")
def _(c: Call, x: Value, index: Value | None = None, dim: int = 0, **options: Any) -> Value:
    """Whole rows, where the index is one number along all other axes."""
    index = index if index is not None else options["indices"]
    dim %= len(x.shape)
    if len(index.shape) != len(x.shape) or any(
        n != x.shape[at] for at, n in enumerate(index.shape) if at != dim
    ):
        raise Departs
    own = _of_rows(c, index, dim)
    if own is not None:
        return c.form.gather(x, dim, own)
    listed = index if index.op == "constant" else None
    if listed is not None:
        tensor = listed.literal.tensor
        line = tensor.select(0, 0) if tensor.dim() else tensor
        rows = tensor.movedim(dim, -1)
        first = rows.reshape(-1, rows.shape[-1])[0]
        if bool((rows == first).all()) and line is not None:
            return c.form.take(x, dim, first.tolist())
    if dim == 1 and len(x.shape) == 2:  # some of each row
        return _of_each_row(c, x, index)
    raise Departs


def _of_rows(c: Call, index: Value, dim: int) -> Value | None:
    """The numbers [n] or [1] of whole rows, where an index is one number along all other axes."""
    inner = index
    while inner.op == "reshape":
        inner = inner.sources[0]
    if inner.op != "expand" or inner.shape[: dim + 1] != index.shape[: dim + 1]:
        return None
    own = inner.sources[0]
    sizes = (1,) * (len(inner.shape) - len(own.shape)) + own.shape
    is_line = all(size == 1 or at == dim for at, size in enumerate(sizes))
    return c.form.reshape(own, (sizes[dim],)) if is_line else None


def _of_each_row(c: Call, x: Value, index: Value) -> Value:
    rows, size = x.shape
    inner = Call(c.form, "gather", index.shape, torch.int64)
    places = c.form.reshape(c.form.count(rows), (rows, 1))
    flat = inner.sum([(Fraction(size), places), (Fraction(1), c.form.cast(index, torch.int64))])
    return c.form.gather(c.form.reshape(x, (rows * size,)), 0, flat)


@operator("index", "_unsafe_index")
def _(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    first, flat, size = flat_index(c, x.shape, indices)
    last = first + size
    rows = prod(x.shape[first:last])
    base = c.form.reshape(x, (*x.shape[:first], rows, *x.shape[last:]))
    return c.form.gather(base, first, flat)


def flat_index(
    c: Call, shape: Sequence[int], indices: Sequence[Value | None]
) -> tuple[int, Value, int]:
    """Neighbouring axes that are indexed as one: the first, row numbers of all, how many."""
    at = [axis for axis, index in enumerate(indices) if index is not None]
    if not at or at != list(range(at[0], at[-1] + 1)):
        raise Departs
    terms, rest = [], list(shape[at[0] : at[-1] + 1])
    inner = Call(c.form, "index", (), torch.int64)
    for axis in at:
        size = rest.pop(0)
        index = indices[axis]
        assert index is not None
        if index.dtype == torch.bool:
            raise Departs
        terms.append((Fraction(prod(rest)), numbered(c, index, size)))
    if len(terms) == 1:
        return at[0], terms[0][1], 1
    wide = [(times, c.form.cast(value, torch.int64)) for times, value in terms]
    return at[0], inner.sum(wide), len(at)


def written(c: Call, base: Value, axis: int, count: int, index: Value, rows: Any) -> Value:
    """``base`` with rows at numbers that count through ``count`` axes from ``axis`` on, the same in
    each entry of the axes before.
    """
    form = c.form
    lead, behind = base.shape[:axis], base.shape[axis + count :]
    size, width = prod(base.shape[axis : axis + count]), prod(behind)
    rows = c.value(rows)
    shape = (*lead, *index.shape, *behind)
    if len(rows.shape) == len(shape) - axis and prod(lead) == 1:
        shape = shape[axis:]
    rows = form.expand(rows, shape)
    rows = rows if rows.active else form.cast(rows, base.dtype)
    total, entries = prod(index.shape), prod(lead)
    flat = form.reshape(index, (total,))
    if entries > 1:
        inner = Call(form, "write", (entries, total), torch.int64)
        first = form.reshape(form.count(entries), (entries, 1))
        each = form.reshape(form.cast(flat, torch.int64), (1, total))
        numbers = inner.sum([(Fraction(size), first), (Fraction(1), each)])
        flat = form.reshape(form.expand(numbers, (entries, total)), (entries * total,))
    made = form.write(
        form.reshape(base, (entries * size, width)),
        flat,
        form.reshape(rows, (entries * total, width)),
    )
    return form.reshape(made, base.shape)


@operator("index_put", "_unsafe_index_put", "index_put_")
def _(
    c: Call, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    if accumulate:
        raise Departs
    first, flat, count = flat_index(c, x.shape, indices)
    return written(c, x, first, count, flat, values)


@operator("index_copy")
def _(c: Call, x: Value, dim: int, index: Value, source: Value) -> Value:
    return written(c, x, dim % len(x.shape), 1, index, source)


@operator("scatter")
def _(c: Call, x: Value, dim: int, index: Value, src: Any = None, **options: Any) -> Value:
    """Whole rows, where the index is one number along all other axes."""
    dim %= len(x.shape)
    own = _of_rows(c, index, dim)
    if options.get("reduce") is not None or not isinstance(src, Value):
        raise Departs
    if index.shape[dim + 1 :] != x.shape[dim + 1 :]:
        raise Departs
    for at, size in enumerate(index.shape):
        src = c.form.slice(src, at, 0, size)
    if own is not None and own.shape == (index.shape[dim],):
        return written(c, x, dim, 1, own, src)
    of_entries = _of_entries(c, index, dim)
    if of_entries is None:
        raise Departs
    entries = c.form.count(index.shape[0])
    columns = [c.form.reshape(entries, (index.shape[0], 1)), of_entries]
    _, flat, count = flat_index(c, x.shape, columns)
    return written(c, x, 0, count, flat, src)


def _of_entries(c: Call, index: Value, dim: int) -> Value | None:
    """The numbers [entries, n] of whole rows, where an index is one number along all axes behind
    the second.
    """
    inner = index
    while inner.op == "reshape":
        inner = inner.sources[0]
    if dim != 1 or inner.op != "expand" or inner.shape[:2] != index.shape[:2]:
        return None
    own = inner.sources[0]
    sizes = (1,) * (len(inner.shape) - len(own.shape)) + own.shape
    is_of_rows = sizes[:2] == index.shape[:2] and prod(sizes[2:]) == 1
    return c.form.reshape(own, sizes[:2]) if is_of_rows else None


@operator("npu::npu_scatter_nd_update")
def _(
    c: Call, indices: Value, updates: Value, x: Value | None = None, input: Value | None = None
) -> Value:
    x = input if x is None else x
    assert x is not None
    depth = indices.shape[-1]
    columns = [
        c.form.reshape(c.form.slice(indices, -1, place, place + 1), indices.shape[:-1])
        for place in range(depth)
    ]
    _, flat, count = flat_index(c, x.shape, columns)
    return written(c, x, 0, count, flat, updates)


def _is_memory(value: Value) -> bool:
    """Is it an input, as it is given?"""
    while value.op == "reshape":
        value = value.sources[0]
    return value.op == "leaf" and not value.active


@operator("slice_scatter")
def _(
    c: Call,
    x: Value,
    src: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    size = x.shape[dim]
    first, last, step = slice(start, end, step).indices(size)
    return _placed(c, x, src, dim % len(x.shape), first, last, step)


def _placed(c: Call, x: Value, src: Value, dim: int, first: int, last: int, step: int) -> Value:
    form, size, count = c.form, x.shape[dim], len(range(first, last, step))
    is_part = 0 < count < size
    if last - first == 1 and src.op == "join" and src.literal == dim + 1 < len(x.shape) - 1:
        block = form.slice(x, dim, first, last)
        parts = _changed(form, block, src, dim + 1, 0)
        if len(parts) == 1:  # rows of one block, as rows of all
            ((part, at),) = parts
            own, first = part.shape[dim + 1], first * x.shape[dim + 1] + at
            lead, rest = x.shape[:dim], x.shape[dim + 2 :]
            rows = form.reshape(part, (*lead, own, *rest))
            flat = form.reshape(x, (*lead, -1, *rest))
            return form.reshape(_placed(c, flat, rows, dim, first, first + own, 1), x.shape)
    is_run = is_part and step == 1
    parts = _changed(form, x, src, dim, first) if is_run and src.op == "join" else []
    if len(parts) == 1 and parts[0][0] is not src:
        ((src, first),) = parts
        return _placed(c, x, src, dim, first, first + src.shape[dim], 1)
    if src.active and _is_memory(x) and dim < len(x.shape) - 1 and is_part:
        inner = Call(form, "places", (count,), torch.int64)
        counted = inner.sum([(Fraction(step), form.count(count))], Fraction(first))
        return written(c, x, dim, 1, counted, src)
    src = form.expand(
        src if src.active else form.cast(src, x.dtype),
        [count if at == dim else n for at, n in enumerate(x.shape)],
    )
    if step == 1:
        before = [form.slice(x, dim, 0, first)] if first else []
        behind = [form.slice(x, dim, last, size)] if last < size else []
        return form.join([*before, src, *behind], dim)
    if is_open(size) or is_open(count):
        raise Departs
    places = list(range(size))
    for at, place in enumerate(range(first, last, step)):
        places[place] = size + at
    return form.take(form.join([x, src], dim), dim, places)


def _changed(form: Form, x: Value, src: Value, dim: int, at: int) -> list[tuple[Value, int]]:
    """The parts of what is put into ``x`` from ``at`` on that are not what it holds there, and
    where they begin.
    """
    if src.op != "join" or src.literal != dim:
        is_same = src is form.slice(x, dim, at, at + src.shape[dim])
        return [] if is_same else [(src, at)]
    found = list[tuple[Value, int]]()
    for part in src.sources:
        found += _changed(form, x, part, dim, at)
        at += part.shape[dim]
    return found


@operator("select_scatter")
def _(c: Call, x: Value, src: Value, dim: int, index: int) -> Value:
    dim, index = dim % len(x.shape), index % x.shape[dim]
    src = c.form.reshape(src, [1 if at == dim else n for at, n in enumerate(x.shape)])
    return _placed(c, x, src, dim, index, index + 1, 1)


@operator("where", "masked_fill")
def _(c: Call, condition: Any = None, x: Any = None, other: Any = None, **given: Any) -> Value:
    if c.name == "masked_fill":
        condition, x, other = given["mask"], given["value"], x
    from mla_fusion.graph import quantise

    one, two = c.value(x), c.value(other)
    mask = filled_with(condition)
    if mask is not None:
        return c.form.expand(one if mask.literal[1].ratio else two, c.shape)
    if one is two:
        return c.form.expand(one, c.shape)
    guarded = quantise.guarded(c, condition, one, two)
    if guarded is not None:
        return c.form.expand(guarded, c.shape)
    if condition.op == "constant" and (one.active or two.active):
        return _picked(c, condition.literal.tensor, one, two)
    return c.form.expand(c.function("where", (), condition, one, two), c.shape)


def _picked(c: Call, mask: torch.Tensor, one: Value, two: Value) -> Value:
    """By a literal mask: what is picked otherwise is multiplied with 0."""
    form = c.form
    if any(value.op == "function" and value.literal[0] == "number" for value in (one, two)):
        return form.expand(c.function("where", (), form.constant(mask), one, two), c.shape)
    masks = (form.constant(side.float()) for side in (mask, ~mask))
    parts = [
        form.times(side, form.bare(value)) for side, value in zip(masks, (one, two), strict=True)
    ]
    return form.expand(form.plus(*parts), c.shape)
