"""Reads products whose operands are of one byte, for the other files of ``propose/``.

It finds the rows before they were quantised, the scales, and what brings a product back to floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mla_fusion.graph import quantise
from mla_fusion.graph.form import BYTES, Factor, Form, Value, filled_with, strip
from mla_fusion.graph.numbers import ONE, Number
from mla_fusion.meta.number_formats import BLOCK, FORMATS, MXFP8, NumberFormat

FORMATS_BY_NAME = {kind.name: kind for kind in FORMATS}


@dataclass(frozen=True)
class Projection:
    """A product [.., columns] with a weight, brought back to floats.

    root     the Value in floats, divided by ``number``
    dot      the product of matrices itself
    weight   the weight [k, columns]
    factors  what the product is multiplied by on the way to the root
    number   the number by which nodes hold the root
    blocks   for mxfp8, the scales of x [tokens, k / 32] (None for activations) and those of the
             weight [k / 32, columns]
    kind     the format of the operands; None for floats
    """

    root: Value
    dot: Value
    weight: Value
    factors: tuple[Factor, ...] = ()
    number: Number = ONE
    blocks: tuple[Value | None, Value] | None = None
    kind: NumberFormat | None = None

    @property
    def columns(self) -> int:
        """Returns the number of columns."""
        return self.dot.shape[1]


def strip_views(value: Value) -> Value:
    """Returns the Value without reshapes and expands around it."""
    return strip(value, "reshape", "expand")


def operand_format(rows: Value) -> NumberFormat | None:
    """Returns the format of the operand of a product, or None for floats."""
    inner = strip_views(rows)
    if inner.function == "of format":
        return next(kind for kind in FORMATS if kind.number == inner.literal[1])
    if inner.op == "product":
        return MXFP8 if any(map(_is_mxfp8, inner.sources)) else None
    # what is active has the dtype of an operator's result alone
    if inner.op == "function" or (rows.active and inner.op != "opaque"):
        return FORMATS_BY_NAME.get(inner.function)
    kinds = (kind for kind in FORMATS if kind.element == rows.dtype and not kind.in_blocks)
    return next(kinds, None)


def _is_mxfp8(value: Value) -> bool:
    """Returns True if the Value holds the elements of an operand in mxfp8."""
    inner = strip_views(value)
    if inner.op == "function":
        return inner.function == MXFP8.name
    return inner.dtype == MXFP8.element and not inner.active


def unquantised_rows(form: Form, rows: Value) -> Value | None:
    """Returns the rows that were quantised, each by its own largest element, or None."""
    kind, inner = operand_format(rows), strip_views(rows)
    if kind is MXFP8:
        return _unquantised_blocks(form, rows, inner)
    if inner.function == "of format":
        inner = strip_views(inner.sources[0])
    if kind is None or inner.function != kind.name:
        return None
    for factor, scaled_rows in quantise.divided_by_size(form, inner.sources[0]):
        number, size = form.split(quantise.largest(form, scaled_rows))
        if size is factor:
            return form.reshape(form.scaled(scaled_rows, number.inverse), rows.shape)
    return None


def has_fixed_step(rows: Value) -> bool:
    """Returns True if rows are quantised by steps that are not made of the rows."""
    inner = strip_views(rows)
    if inner.op == "opaque":
        return "npu_quantize" in inner.literal[0]
    return inner.function in BYTES and all(
        factor.op not in ("function", "opaque")
        for factor in inner.sources[0].sources
        if factor.active
    )


def _unquantised_blocks(form: Form, rows: Value, inner: Value) -> Value | None:
    """Returns the rows that were quantised in blocks, or None."""
    values = next(filter(_is_mxfp8, inner.sources), None)
    if values is None or not values.active:
        return None
    (scaled,) = strip_views(values).sources
    other_factors = [
        pair for pair in scaled.operands if strip_views(pair[0]).function != "power of two"
    ]
    if len(other_factors) == len(scaled.sources):
        return None
    unscaled = form.product(other_factors, scaled.number)
    return form.reshape(form.expand(unscaled, scaled.shape), rows.shape)


def split_blocks(form: Form, value: Value) -> tuple[Value, Value] | None:
    """Returns the bytes and the scales of an operand in mxfp8, or None.

    Their shapes are [a, b], and [a / 32, b] or [a, b / 32].
    """
    if value.op == "join":
        parts = [split_blocks(form, part) for part in value.sources]
        split_parts = [part for part in parts if part is not None]
        if len(split_parts) < len(parts):
            return None
        values_of, scales_of = zip(*split_parts, strict=True)
        return form.join(values_of, value.literal), form.join(scales_of, value.literal)
    inner = strip_views(value)
    if inner.op != "product" or len(inner.sources) != 2 or inner.number != ONE:
        return None
    values = next(filter(_is_mxfp8, inner.sources), None)
    if values is None:
        return None
    (scales,) = [source for source in inner.sources if source is not values]
    if scales.numel * BLOCK != value.numel:  # one block's scale for others, too
        return None
    sizes = [size for size in scales.shape if size != 1]
    shape = tuple(sizes)
    if len(sizes) != 2:
        (rows, columns), count = value.shape, scales.numel
        shape = (rows, count // rows) if count % rows == 0 else (count // columns, columns)
    return form.reshape(values, value.shape), form.reshape(scales, shape)


def operand_bytes(form: Form, rows: Value) -> Value:
    """Returns the bytes of an operand, before a product says which format they have.

    Returns an operand of floats as it is.
    """
    blocks = split_blocks(form, rows) if operand_format(rows) is MXFP8 else None
    if blocks is not None:
        return blocks[0]
    inner = strip_views(rows)
    return inner.sources[0] if inner.function == "of format" else rows


def read_projection(
    form: Form,
    dot: Value,
    users: Mapping[Value, Sequence[Value]],
    multiples_of: Callable[[Value], list[Value]],
) -> Projection:
    """Returns a product with what brings it back to floats.

    A product of floats is its own root. A product of bytes is followed to where it is multiplied by
    scales of rows and columns.

    users         by Value, the Values that read it
    multiples_of  returns the multiples of a Value that nodes hold
    """
    rows, weight = dot.sources
    kind = operand_format(rows)
    if kind is None:
        return Projection(dot, dot, weight)
    if kind is MXFP8:
        weight_blocks, row_blocks = split_blocks(form, weight), split_blocks(form, rows)
        if weight_blocks is None:
            return Projection(dot, dot, weight)
        blocks = row_blocks and row_blocks[1], weight_blocks[1]
        return Projection(dot, dot, weight_blocks[0], blocks=blocks, kind=kind)
    root, factors, number = dot, list[Factor](), ONE
    while True:
        reader_and_factors = _next_root(form, root, users.get(root, ()), dot.shape)
        if reader_and_factors is None:
            return Projection(root, dot, weight, tuple(factors), number, kind=kind)
        root, reader_factors = reader_and_factors
        number = form.split([root, *multiples_of(root)][-1])[0]
        factors += reader_factors


def column_scales(form: Form, product: Projection, step: Value | None) -> Value | None:
    """Returns the scales [columns] of the weight's columns, or None if other factors are left.

    For mxfp8 they are those of its blocks.

    step  the scales of the rows, by which the kernel multiplies too
    """
    if product.blocks is not None:
        return product.blocks[1]
    factors = list(product.factors)
    if step is not None:
        factors.append((step, -1))
    factor = strip(form.product(factors, product.number), "expand")
    return None if factor.active else scale_row(form, factor, product.columns)


def scale_row(form: Form, value: Value, width: int) -> Value | None:
    """Returns a scale [width], repeated if it is one number. Returns None if it is more than a
    row.
    """
    number = filled_with(value) or value
    if number.numel == 1:
        return form.expand(form.reshape(number, ()), (width,))
    is_row = value.shape[-1:] == (width,) and value.numel == width
    return form.reshape(value, (width,)) if is_row else None


def row_scales(
    form: Form, product: Projection, multiples_of: Callable[[Value], list[Value]]
) -> Value | None:
    """Returns the scales [tokens, 1] of the rows of an x that comes in quantised, or None.

    For mxfp8 they are those of its blocks.
    """
    if product.blocks is not None:
        return product.blocks[0]
    tokens, columns = product.dot.shape
    factors = [
        (value, power)
        for value, power in product.factors
        if value.shape[-1:] != (columns,) and value.numel == tokens
    ]
    scales = strip(form.product(factors), "expand")
    if scales.numel != tokens:
        return None
    held = multiples_of(scales) or [scales]
    scales = max(held, key=lambda value: form.split(value)[0] == product.number)
    return form.reshape(scales, (tokens, 1))


def _next_root(
    form: Form, root: Value, readers: Sequence[Value], shape: tuple[int, ...]
) -> tuple[Value, list[Factor]] | None:
    """Returns the next Value on the way to floats, and its factors [tokens, 1] or [columns], or
    None.

    Readers that differ only in a number count as one.
    """
    distinct_readers = {form.split(reader)[1] for reader in readers}
    if len(distinct_readers) != 1:
        return None
    (reader,) = distinct_readers
    if reader.op == "reshape" and reader.shape[-1:] == shape[1:]:
        return reader, []
    if reader.op != "product":
        return None
    if [power for source, power in reader.operands if source is root] != [1]:
        return None
    factors = list[Factor]()
    for factor, power in reader.operands:
        if factor is root:
            continue
        size = factor.numel
        if factor.shape[-1:] == shape[1:] and size == shape[1]:
            factors.append((form.reshape(factor, shape[1:]), power))
        elif factor.shape[-1:] in ((1,), ()) and size in (1, shape[0]):
            factors.append((form.reshape(factor, (size, 1)), power))
        else:
            return None
    return reader, factors
