"""What a product reads and gives where its operands are of one byte: rows before they were
quantised, and what brings the product back to floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mla_fusion.graph import quantise
from mla_fusion.graph.form import Factor, Form, Value
from mla_fusion.graph.numbers import ONE, Number
from mla_fusion.meta.number_formats import FORMATS, MXFP8, NumberFormat

_FORMATS = {kind.name: kind for kind in FORMATS}


@dataclass(frozen=True)
class Projection:
    """A product [.., columns] with a weight, brought back to floats.

    root     the Value that is that, divided by ``times``
    dot      the product of matrices itself
    weight   [k, columns]
    factors  what the product is multiplied with on the way to the root
    blocks   of operands in mxfp8, their scales: of x [tokens, k / 32], or None of activations, and
             of the weight [k / 32, columns]
    kind     of the operands; None for floats
    """

    root: Value
    dot: Value
    weight: Value
    factors: tuple[Factor, ...] = ()
    times: Number = ONE
    blocks: tuple[Value | None, Value] | None = None
    kind: NumberFormat | None = None

    @property
    def columns(self) -> int:
        return self.dot.shape[1]


def unmoved(value: Value) -> Value:
    while value.op in ("reshape", "expand"):
        value = value.sources[0]
    return value


def unexpanded(value: Value) -> Value:
    """A factor as it is before it is repeated."""
    return value.sources[0] if value.op == "expand" else value


def kind_of(rows: Value) -> NumberFormat | None:
    """The format of the operand of a product; None for floats."""
    inner = unmoved(rows)
    if inner.op == "function" and inner.literal[0] == "of format":
        return next(kind for kind in FORMATS if kind.number == inner.literal[1])
    if inner.op == "product":
        inner = next((one for one in inner.sources if _is_block(one)), inner)
        return MXFP8 if _is_block(inner) else None
    if inner.op == "function":
        return _FORMATS.get(inner.literal[0])
    if rows.active:
        return None
    alike = (kind for kind in FORMATS if kind.element == rows.dtype and not kind.in_blocks)
    return next(alike, None)


def _is_block(value: Value) -> bool:
    inner = unmoved(value)
    if inner.op == "function":
        return bool(inner.literal[0] == MXFP8.name)
    return inner.dtype == MXFP8.element and not inner.active


def unquantised(form: Form, rows: Value) -> Value | None:
    """The rows that were quantised, each by the largest of itself; None where that is not what was
    done.
    """
    kind, inner = kind_of(rows), unmoved(rows)
    if kind is MXFP8:
        return _of_blocks(form, rows, inner)
    if inner.op == "function" and inner.literal[0] == "of format":
        inner = unmoved(inner.sources[0])
    if kind is None or inner.op != "function" or inner.literal[0] != kind.name:
        return None
    steps = inner.sources[0]
    if steps.op != "product":
        return None
    pairs = list(zip(steps.sources, steps.literal[0], strict=True))
    for factor, exponent in pairs:
        if exponent == -1 and quantise.is_size(factor):
            rest = form.product([pair for pair in pairs if pair[0] is not factor])
            rest = form.expand(rest, steps.shape)
            times, size = form.split(quantise.largest(form, rest))
            by = times.power(-1)
            if size is factor and by is not None:
                return form.reshape(form.scaled(rest, by), rows.shape)
    return None


def _of_blocks(form: Form, rows: Value, inner: Value) -> Value | None:
    if inner.op != "product":
        return None
    values = next((one for one in inner.sources if _is_block(one)), None)
    if values is None or not values.active:
        return None
    function = unmoved(values)
    pairs = list(zip(function.sources[0].sources, function.sources[0].literal[0], strict=True))
    rest = [(one, power) for one, power in pairs if not _is_power(one)]
    if len(rest) == len(pairs):
        return None
    times = function.sources[0].literal[1]
    blocks = form.expand(form.product(rest, times), function.shape)
    return form.reshape(blocks, rows.shape)


def _is_power(value: Value) -> bool:
    inner = unmoved(value)
    return inner.op == "function" and bool(inner.literal[0] == "power of two")


def of_blocks(form: Form, value: Value) -> tuple[Value, Value] | None:
    """The bytes and the scales of an operand in mxfp8: [a, b], and [a / 32, b] or [a, b / 32]."""
    if value.op == "join":
        parts = [of_blocks(form, part) for part in value.sources]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        values_of, scales_of = zip(*known, strict=True)
        return form.join(values_of, value.literal), form.join(scales_of, value.literal)
    inner = unmoved(value)
    if inner.op != "product" or len(inner.sources) != 2 or inner.literal[1] != ONE:
        return None
    values = next((one for one in inner.sources if _is_block(one)), None)
    if values is None:
        return None
    (scales,) = [one for one in inner.sources if one is not values]
    own = [size for size in scales.shape if size != 1] or [1]
    shape = tuple(own) if len(own) == 2 else _scales_of(value.shape, prod(scales.shape))
    return form.reshape(values, value.shape), form.reshape(scales, shape)


def _scales_of(shape: tuple[int, ...], count: int) -> tuple[int, int]:
    rows, columns = shape
    return (rows, count // rows) if count % rows == 0 else (count // columns, columns)


def projection(
    form: Form,
    dot: Value,
    users: Mapping[Value, Sequence[Value]],
    numbers: Mapping[Value, set[Number]],
) -> Projection:
    """A product of floats is its own root. One of bytes is followed to where it is multiplied with
    scales of rows and of columns.

    numbers  in front of a Value, where nodes hold it
    """
    rows, weight = dot.sources
    kind = kind_of(rows)
    if kind is None:
        return Projection(dot, dot, weight)
    if kind is MXFP8:
        parts, of_rows = of_blocks(form, weight), of_blocks(form, rows)
        if parts is None:
            return Projection(dot, dot, weight)
        step = of_rows[1] if of_rows is not None and not rows.active else None
        return Projection(dot, dot, parts[0], blocks=(step, parts[1]), kind=kind)
    root, factors, times = dot, list[Factor](), ONE
    while True:
        following = _following(form, root, users.get(root, ()), dot.shape)
        if following is None:
            return Projection(root, dot, weight, tuple(factors), times, kind=kind)
        root, more = following
        held = numbers.get(root, set())
        others = held - {ONE}
        times = next(iter(others)) if len(others) == 1 else ONE
        factors += more


def scale_of(form: Form, product: Projection, step: Value | None) -> Value | None:
    """The scales of the weight's columns [columns], where the kernel multiplies with ``step`` too;
    None where what is left is of something else.
    """
    columns = product.columns
    factors = list(product.factors)
    if step is not None:
        factors.append((step, -1))
    whole = unexpanded(form.product(factors, product.times))
    if whole.active or prod(whole.shape) not in (1, columns):
        return None
    if prod(whole.shape) == columns:
        return form.reshape(whole, (columns,))
    return form.expand(form.reshape(whole, ()), (columns,))


def step_of(form: Form, product: Projection) -> Value | None:
    """The scales of rows [tokens, 1] of x that comes in quantised."""
    tokens = product.dot.shape[0]
    found = [one for one in product.factors if one[0].shape[-1:] != product.dot.shape[1:]]
    of_rows = unexpanded(form.product([one for one in found if prod(one[0].shape) == tokens]))
    return form.reshape(of_rows, (tokens, 1)) if prod(of_rows.shape) == tokens else None


def _following(
    form: Form, root: Value, readers: Sequence[Value], shape: tuple[int, ...]
) -> tuple[Value, list[Factor]] | None:
    """The next Value on the way to floats, and what it is multiplied with: [tokens, 1], or
    [columns]. Readers that differ in the number in front are one.
    """
    found = {form.split(reader)[1] for reader in readers}
    if len(found) != 1:
        return None
    (reader,) = found
    if reader.op == "reshape" and reader.shape[-1:] == shape[1:]:
        return reader, []
    if reader.op != "product":
        return None
    pairs = list(zip(reader.sources, reader.literal[0], strict=True))
    if [power for one, power in pairs if one is root] != [1]:
        return None
    factors = list[Factor]()
    for one, power in pairs:
        if one is root:
            continue
        size = prod(one.shape)
        if one.shape[-1:] == shape[1:] and size == shape[1]:
            factors.append((form.reshape(one, shape[1:]), power))
        elif one.shape[-1:] in ((1,), ()) and size in (1, shape[0]):
            factors.append((form.reshape(one, (size, 1)), power))
        else:
            return None
    return reader, factors
