"""Each operator in the field: what moves elements moves them, arithmetic is exact, all else is a
function.

A rule takes a :class:`Call` and gives its value. An operator without one is an uninterpreted
function: of each element where torch's own tag says that it works element by element, else of all
that it reads. So to forget one costs a fusion, never a wrong one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.compat import OpOverload, overload_name, schema_of
from mla_fusion.fx.contraction import Labels, einsum_terms
from mla_fusion.fx.kinds import is_float
from mla_fusion.meta import number_formats
from mla_fusion.meta.number_formats import E8M0_NUMBER, HIFLOAT8, NumberFormat
from mla_fusion.operators.known import known
from mla_fusion.prove import field, quantising
from mla_fusion.prove.field import (
    Complex,
    Num,
    Undecided,
    Value,
    function,
    here,
)


@dataclass(frozen=True)
class Abstract:
    """A number that stands for others: a symbolic size. ``number``: what it is in this run."""

    number: Any
    name: str


class ReadsAll(Exception):
    """A rule does not hold of a call: each element of the result reads everything."""


@dataclass(frozen=True)
class Call:
    """One call.

    given     its arguments by the schema's names, defaults among them
    shape     the result's sizes in this run; None: as the arguments say
    parts     those of each result, where there are several
    varies    is an axis of this argument, or of the result, as long as the tokens are many?
    source    what the first tensor holds in the graph, if that is known
    rounded   do arguments hold numbers that a cast has rounded?
    masks     are arguments bools, or uint8, which as an index say whether and not where?
    holds     the dtype that an argument has in the graph, if that is known
    is_wide   has nothing between the rows of this maximum (a place among the point's) and the first
              argument been rounded to a narrow dtype?
    """

    target: Any
    name: str
    given: dict[str, Any]
    shape: tuple[int, ...] | None = None
    parts: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = None
    varies: Callable[[str, int], bool] = lambda name, axis: False
    keeps: Callable[[int], bool] = lambda axis: True
    source: torch.dtype | None = None
    rounded: bool = False
    masks: bool = False
    holds: Callable[[str], torch.dtype | None] = lambda name: None
    is_wide: Callable[[int], bool] = lambda place: False

    @property
    def word(self) -> str:
        """What rows of the operator table call it."""
        return known(self.target).row.word

    def of(self, target: OpOverload, given: dict[str, Any]) -> Call:
        """The call of another operator, of other arguments."""
        return replace(self, target=target, name=schema_of(target).name, given=given)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)

    @property
    def value(self) -> Value:
        """The first argument."""
        return as_value(next(iter(self.given.values())))

    @property
    def real(self) -> Num:
        """The first argument, which is real."""
        return real(self.value)

    @property
    def sides(self) -> tuple[Value, Value]:
        """The first two arguments."""
        first, second = list(self.given.values())[:2]
        return as_value(first), as_value(second)

    @property
    def reals(self) -> tuple[Num, Num]:
        first, second = self.sides
        return real(first), real(second)

    def num(self, name: str) -> Num:
        return as_num(self.given[name])

    def plus(self, value: Num, name: str) -> Num:
        """A value and an argument, where that is given."""
        return value if self[name] is None else value + self.num(name)

    def times(self, value: Num, name: str) -> Num:
        return value if self[name] is None else value * self.num(name)

    def apart_from_tokens(self, name: str, *axes: int) -> None:
        """Raises ReadsAll where one of these axes, of an argument or of the result, is as long as
        the tokens are many.
        """
        if any(self.varies(name, axis) for axis in axes):
            raise ReadsAll

    def plain(self, name: str) -> Any:
        """An argument that says where, not what: a number. Raises Undecided for one of this run
        alone.
        """
        return plain(self.given.get(name))

    def function(self, name: str, *arguments: Num) -> Num:
        """An uninterpreted function, of what its arguments are rounded to."""
        return function(f"{name} of rounded numbers" if self.rounded else name, *arguments)

    @property
    def kind(self) -> str:
        """Integers wrap around, each dtype at numbers of its own."""
        return f" in {self.dtype}" if self.dtype in _INTEGERS else ""

    @property
    def literals(self) -> str:
        """What is no tensor, and where tensors stand."""
        return repr([(name, _written(item)) for name, item in self.given.items()])


@dataclass(frozen=True)
class Exponential:
    """``exp(value)``"""

    value: Num


@dataclass(frozen=True)
class Exponentials:
    """The sum of ``exp(value)`` over an axis, which stays."""

    value: Num
    axis: int


@dataclass(frozen=True)
class Narrowed:
    """Integers that were cast to a narrower dtype. As an index they are what they were: no index is
    as large as what it has not.
    """

    value: Num


Rule = Callable[[Call], Any]
RULES: dict[str, Rule] = {}


def rule(made: Rule) -> Rule:
    """The rule that rows of the operator table give by this name."""
    return RULES.setdefault(made.__name__.strip("_"), made)


NARROW = (torch.bfloat16, torch.float16)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# what makes integers of floats by a rule of its own
_TRUNCATE = frozenset("_to_copy to type_as copy view view_copy".split())
_WRAPS = (torch.int8, torch.uint8, torch.int16, torch.bool)
_ARITHMETIC = frozenset(
    "add sub rsub mul neg square pow sum addcmul abs div floor_divide mm bmm _int_mm matmul dot mv "
    "linear addmm baddbmm einsum".split()
)


def run(call: Call) -> Any:
    """The value of a call. Raises Undecided."""
    try:
        return _run(call)
    except ReadsAll:
        return opaque(call)


def _run(call: Call) -> Any:
    if (call.dtype in _WRAPS and call.word in _ARITHMETIC) or _truncates(call):
        raise ReadsAll
    made = RULES.get(known(call.target).row.rules.get("field", ""))
    if made is not None:
        found = made(call)
        if not _is_held(found, call.dtype):
            raise ReadsAll
        is_known = here().are_rows or not isinstance(found, Num) or found.ints is not None
        wraps = call.dtype == torch.int32 and call.word in _ARITHMETIC and not is_known
        return function("in torch.int32", found) if wraps else found
    if known(call.target).random:
        raise Undecided(f"{call.name} is random")
    if known(call.target).view:
        return _viewed(call)
    if isinstance(call.target, OpOverload) and torch.Tag.pointwise in call.target.tags:
        return pointwise(call)
    return opaque(call)


def _is_held(found: Any, dtype: torch.dtype | None) -> bool:
    """Are literal integers such as the dtype has?"""
    if dtype not in _INTEGERS or not isinstance(found, Num) or found.ints is None:
        return True
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return not found.ints.numel() or bool(found.ints.min() >= least and found.ints.max() <= most)


def _truncates(call: Call) -> bool:
    """Is a float put among integers, where nothing says how?"""
    if call.dtype not in _INTEGERS or call.name.partition("::")[0] != "aten":
        return False
    holds_float = any(
        held is not None and held.is_floating_point
        for held in (call.source, *map(call.holds, call.given))
    )
    literal = any(isinstance(item, float) and item % 1 for item in call.given.values())
    return call.word not in _TRUNCATE and (holds_float or literal)


def _viewed(call: Call) -> Any:
    """A view without a rule of its own, as torch does it; along tokens nothing is known of it."""
    value = call.value
    axes = [_axis(call)] if isinstance(call["dim"], int) else range(len(value.shape))
    if _are_tokens(call, axes):
        raise Undecided(f"{call.name} along the tokens has no field run")
    rest = [plain(item) for item in list(call.given.values())[1:]]
    if str(schema_of(call.target).returns[0].type).startswith("List["):
        return value.parts(lambda part: call.target(part, *rest))
    return _natively(call)


def called(target: Any, args: Sequence[Any], kwargs: dict[str, Any], **more: Any) -> Call:
    """A call with its arguments by name."""
    schema = schema_of(target)
    given: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.name in kwargs:
            given[argument.name] = kwargs[argument.name]
        elif place < len(args):
            given[argument.name] = args[place]
        elif argument.has_default_value():
            given[argument.name] = argument.default_value
    return Call(target, schema.name, given, **more)


# -- arguments


def is_mask(held: Any) -> bool:
    return isinstance(held, Tensor) and held.dtype in (torch.bool, torch.uint8)


def as_value(item: Any) -> Value:
    if isinstance(item, (Num, Complex)):
        return item
    if isinstance(item, Abstract):
        return function(f"size {item.name}")
    if isinstance(item, complex):
        return Complex(field.number(item.real), field.number(item.imag))
    if isinstance(item, int):
        return field.integers(torch.tensor(item, dtype=torch.int64))
    if isinstance(item, float):
        return field.number(item)
    raise Undecided(f"{item!r} is no number")


def as_num(item: Any) -> Num:
    return real(as_value(item))


def real(value: Value) -> Num:
    if isinstance(value, Complex):
        raise Undecided("complex numbers")
    return value


def plain(item: Any) -> Any:
    if isinstance(item, Abstract):
        raise Undecided(f"{item.name} says where")
    if isinstance(item, (list, tuple)):
        return [plain(part) for part in item]
    if isinstance(item, Num):
        if item.ints is None or item.ints.dim():
            raise Undecided("a place that is computed")
        return int(item.ints)
    return item


def _written(item: Any) -> str:
    """What an argument is: what is written, or the kind of value that stands there."""
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(map(_written, item))}]"
    kinds = {Num: "real", Abstract: "real", Complex: "complex"}
    return next((name for kind, name in kinds.items() if isinstance(item, kind)), None) or str(item)


def _values(item: Any) -> list[Num]:
    if isinstance(item, (list, tuple)):
        return [part for each in item for part in _values(each)]
    if isinstance(item, Complex):
        return [item.real, item.imag]
    return [as_num(item)] if isinstance(item, (Num, Abstract)) else []


# -- functions of which nothing is known


def pointwise(call: Call) -> Num:
    """Element by element."""
    given = [as_value(item) if _is_number(item) else item for item in call.given.values()]
    operands = _values(given)
    name = f"{call.name}{call.kind} {list(map(_written, given))}"
    found = call.function(name, *operands)
    shape = torch.broadcast_shapes(*(item.shape for item in operands))
    return found if found.shape == tuple(shape) else found.expand(shape)


def _is_number(item: Any) -> bool:
    """What is no number of the field stays as it is written."""
    return isinstance(item, (int, float)) and not isinstance(item, bool) and math.isfinite(item)


def opaque(call: Call) -> Any:
    """Each element reads everything; of several results, each is a function of its own."""
    if call.parts and not schema_of(call.target).is_mutable:
        named = (f"{call.name} [{place}]" for place in range(len(call.parts)))
        alone = [replace(call, shape=shape, parts=()) for shape in call.parts]
        return [opaque(replace(each, name=name)) for each, name in zip(alone, named, strict=True)]
    if call.shape is None:
        raise Undecided(f"{call.name} has no field run")
    of = _values(list(call.given.values()))
    every = field.label(*of) if of else field.number(0)
    places = field.integers(torch.arange(prod(call.shape)).reshape(call.shape))
    return call.function(f"{call.name}{call.kind} {call.literals}", every, places)


# -- what moves elements


@rule
def _dropout(call: Call) -> Value:
    if call["train"] and call["p"]:
        raise Undecided(f"{call.name} is random")
    return call.value


@rule
def _cast(call: Call) -> Value:
    """Casts among the wide floats are erased; integers are floats exactly."""
    wanted, value = call.dtype, call.value
    if wanted is None:
        return value
    if wanted == torch.complex32 and call.source != torch.complex32 and not here().float16:
        raise Undecided(f"numbers cast to {wanted}")
    if wanted.is_complex:
        return Complex.of(value)
    if isinstance(value, Complex):
        if not wanted.is_floating_point:
            raise Undecided(f"complex numbers cast to {wanted}")
        value = value.real
    if wanted == torch.float16 and call.source != torch.float16 and not here().float16:
        return function("in float16", value)
    if wanted.is_floating_point and wanted.itemsize > 1:
        return value.with_past() if value.cells is None else value
    if wanted == torch.bool and (value.ints is not None or _are_bits(value)):
        return field.integers((value.re if value.ints is None else value.ints).ne(0))
    if call.source == torch.uint8 and value.ints is None:
        value = function("number of a byte", value)  # which may stand for that of a float format
    is_whole = call.source is not None and not is_float(call.source)
    is_narrower = is_whole and call.source.itemsize > wanted.itemsize  # type: ignore[union-attr]
    if is_narrower and value.ints is None and not here().are_rows and wanted in _INTEGERS:
        return function(f"in {wanted}", value).with_past(Narrowed(value))
    # that rows are far below 2**31 is a listed assumption (commit/assumed.py)
    is_integral = is_whole or (here().are_rows and quantising.whole(value).rounded)
    if is_integral and wanted in (torch.int32, torch.int64):
        return value
    return quantising.to_bytes(value, wanted, call.is_wide)


def _are_bits(value: Num) -> bool:
    """Is each element 0 or 1? No random one is."""
    return not here().are_rows and not bool(((value.re >> 1) | field.imaginary(value)).any())


@rule
def _reshaped(call: Call) -> Value:
    if isinstance(call.target, OpOverload) and overload_name(call.target) == "dtype":
        return _bytes(call)
    return _natively(call) if call.shape is None else call.value.reshape(call.shape)


def _bytes(call: Call) -> Value:
    """Numbers read as bytes: as many functions of each as it has bytes."""
    value, source, wanted = call.real, call.source, call["dtype"]
    if source is None or not value.shape or wanted.itemsize not in (1, source.itemsize):
        return opaque(replace(call, name=f"{source} read"))
    if wanted.itemsize != 1:
        return function(f"{source} read as {wanted}", value)
    if call.rounded and source.itemsize > 2:
        raise ReadsAll  # bytes of other numbers than those that were rounded
    if {source, wanted} == {torch.uint8, torch.float8_e8m0fnu}:
        return value  # torch_npu holds scales of blocks in either
    return quantising.as_bytes(value, source, wanted)


@rule
def _expanded(call: Call) -> Value:
    return _natively(call) if call.shape is None else call.value.expand(call.shape)


@rule
def _natively(call: Call) -> Value:
    """The operator itself, on elements and integers alike; a function of all where a symbolic size
    says which.
    """
    if any(isinstance(item, Abstract) for item in call.given.values()):
        raise ReadsAll
    keywords = {
        argument.name for argument in schema_of(call.target).arguments if argument.kwarg_only
    }
    rest = [plain(item) for name, item in list(call.given.items())[1:] if name not in keywords]
    return call.value.moved(lambda part: call.target(part, *rest))


@rule
def _diagonal(call: Call) -> Value:
    """Of tokens with tokens: each with itself."""
    shape = call.value.shape
    axes = [int(call.plain(name)) % len(shape) for name in ("dim1", "dim2")]
    of_tokens = [call.varies("self", axis) for axis in axes]
    if any(of_tokens) and not (
        all(of_tokens) and call.plain("offset") == 0 and shape[axes[0]] == shape[axes[1]]
    ):
        raise ReadsAll
    return _natively(call)


def _axis(call: Call) -> int:
    return int(call.plain("dim") or call.plain("dimension") or 0) % len(call.value.shape)


@rule
def _sliced(call: Call) -> Value:
    axis = _axis(call)
    if call.varies("self", axis) or call.varies("", axis):
        if call.keeps(axis) and call["step"] in (1, None):
            return call.value
        found = [call[name] for name in ("start", "end", "length") if call[name] is not None]
        if not call.varies("", axis) and all(isinstance(end, int) and end >= 0 for end in found):
            taken = _natively(call)  # the same places in every run
            if call.shape in (None, taken.shape):
                return taken
        # Which rows these are is known of this run alone: rows of that name.
        ends = function("rows", *[as_num(end) for end in found])
        return _of_any_rows(call.value, _some_rows(call, axis), [axis], ends)
    return _natively(call)


def _some_rows(call: Call, axis: int) -> Value:
    """As many rows as the result has in this run; which, its name says."""
    value, step = call.value, call["step"]
    count = value.shape[axis] if call.shape is None else call.shape[axis]
    if step not in (None, 1) or count > value.shape[axis]:
        raise Undecided(f"{call.name} takes some rows")
    return value.narrow(axis, 0, count)


def _of_any_rows(value: Value, taken: Value, axes: Sequence[int], names: Num) -> Value:
    """Rows of which it is not known which: those that are taken in this run, times a number of
    their name. With them all rows that there are, so that no row can differ unseen.

    axes   of ``value``, side by side, along which rows are taken
    names  has an element for each that is taken, or one for all of them
    """
    if isinstance(value, Complex) and isinstance(taken, Complex):
        sides = (value.real, taken.real), (value.imag, taken.imag)
        return Complex(*(real(_of_any_rows(*side, axes, names)) for side in sides))
    value, taken = real(value), real(taken)
    before, rows = value.shape[: axes[0]], [value.shape[axis] for axis in axes]
    behind = value.shape[axes[-1] + 1 :]
    names = names.reshape(*names.shape, *(1,) * len(behind))
    flat = value.moved(
        lambda part: part.reshape(prod(before), prod(rows), prod(behind)).transpose(0, 1).flatten(1)
    )
    shares = field.random(f"shares of {prod(rows)} rows", (prod(rows), 1))
    # a weight is not drawn for that
    is_drawn = flat.cells is None
    every = field.total(shares * flat, [0], True) if is_drawn else shares.mT @ flat
    inserted = len(taken.shape) - len(before) - len(behind)
    every = every.reshape(*before, *(1,) * inserted, *behind)
    names, of_all = function("read", names), function("read among all", names)
    return taken * names + every * of_all


@rule
def _selected(call: Call) -> Value:
    call.apart_from_tokens("self", _axis(call))
    return _natively(call)


@rule
def _split(call: Call) -> Any:
    """Where a symbolic size says where to cut, rows of that name, as of a slice."""
    rest = list(call.given.values())[1:]
    sizes = [item for item in _flat(rest) if isinstance(item, Abstract)]
    if not sizes and call.varies("self", _axis(call)):
        raise Undecided(f"{call.name} cuts the tokens")
    now = [_in_this_run(item) for item in rest]
    parts: Sequence[Value] = call.value.parts(lambda part: call.target(part, *now))
    if not sizes:
        return parts
    names = (f"rows of {call.name} {call.literals}, {place}" for place in range(len(parts)))
    of = [as_num(size) for size in sizes]
    return [
        _of_any_rows(call.value, part, [_axis(call)], function(name, *of))
        for part, name in zip(parts, names, strict=True)
    ]


def _flat(item: Any) -> list[Any]:
    return [part for each in item for part in _flat(each)] if isinstance(item, list) else [item]


def _in_this_run(item: Any) -> Any:
    if isinstance(item, list):
        return [_in_this_run(part) for part in item]
    return item.number if isinstance(item, Abstract) else plain(item)


@rule
def _turned(call: Call) -> Value:
    rank = len(call.value.shape)
    if call.word in ("flip", "roll"):
        axes = [int(axis) % rank for axis in (call.plain("dims") or range(rank))]
        call.apart_from_tokens("self", *axes)
    elif call.shape is None:
        call.apart_from_tokens("self", *range(rank))
    found = _natively(call)
    if call.shape not in (None, found.shape):
        raise ReadsAll
    return found


@rule
def _triangle(call: Call) -> Value:
    value, shape = call.real, call.value.shape
    call.apart_from_tokens("self", -2, -1)
    cut = torch.tril if call.word == "tril" else torch.triu
    kept = field.integers(cut(torch.ones(shape[-2:], dtype=torch.int64), call.plain("diagonal")))
    return _of_integers(operator.mul, value, kept) or value * kept


@rule
def _padded(call: Call) -> Value:
    pads, value = call.plain("pad"), call.value
    axes = (len(value.shape) - 1 - place // 2 for place, pad in enumerate(pads) if pad)
    call.apart_from_tokens("self", *axes)
    if isinstance(value, Complex) or call["mode"] not in (None, "constant"):
        raise ReadsAll
    fill = as_num(call["value"] or 0)
    padded = field.pad(value, pads)
    if not int(fill.re):
        return padded
    ones = torch.nn.functional.pad(torch.zeros(value.shape, dtype=torch.int64), pads, value=1)
    return padded + field.integers(ones) * fill


@rule
def _joined(call: Call) -> Value:
    parts: list[Value] = [as_value(part) for part in next(iter(call.given.values()))]
    stacks = call.word == "stack"
    axis = int(call.plain("dim") or 0)
    parts = [part for part in parts if stacks or part.shape != (0,)]
    axis %= len(parts[0].shape) + stacks
    if not stacks and len(parts) > 1:
        call.apart_from_tokens("", axis)
    join = field.stacked if stacks else field.joined
    if any(isinstance(part, Complex) for part in parts):
        pairs = [
            part if isinstance(part, Complex) else Complex(part, part * field.number(0))
            for part in parts
        ]
        real_parts, imaginary = [part.real for part in pairs], [part.imag for part in pairs]
        return Complex(join(real_parts, axis), join(imaginary, axis))
    return join([real(part) for part in parts], axis)


@rule
def _indexed(call: Call) -> Value:
    if call.masks:
        raise ReadsAll
    return _read(call, [_place(index) for index in call["indices"]])


def _place(index: Any) -> Num | None:
    if index is None:
        return None
    found = as_num(index)
    return found.past.value if isinstance(found.past, Narrowed) else found


def _read(call: Call, indices: list[Num | None], value: Value | None = None) -> Value:
    """By integers of literals: movement. By others: rows of that name."""
    value = call.value if value is None else value
    axes, known = _indexed_axes(indices), [index for index in indices if index is not None]
    if all(index.ints is not None for index in known):
        places = _literal_places(indices)
        call.apart_from_tokens("self", *axes)
        return value.moved(lambda part: part[places])
    sizes = value.shape
    if len(known) == 1 and isinstance(value, Num) and sizes[len(indices) - 1] <= _FEW_ROWS:
        return _read_any(value, known[0], len(indices) - 1)
    names = reduce(lambda a, b: function("place", a, b), [i.with_past() for i in known])
    places = tuple(
        slice(None) if index is None else index.re.remainder(sizes[axis])
        for axis, index in enumerate(indices)
    )
    if axes != [*range(axes[0], axes[-1] + 1)]:
        raise Undecided(f"{call.name} along axes that do not stand side by side")
    taken = value.moved(lambda part: part[places])
    return _of_any_rows(value, taken, axes, names)


def _indexed_axes(indices: Sequence[Num | None]) -> list[int]:
    return [axis for axis, index in enumerate(indices) if index is not None]


def _literal_places(indices: Sequence[Num | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index.ints for index in indices)


_FEW_ROWS = 1024  # of more, two places are one row by a chance that three points make small enough


def _read_any(value: Num, index: Num, axis: int) -> Num:
    """Each row, times whether it is the one."""
    rows = field.integers(torch.arange(value.shape[axis]))
    chosen = function("chosen", index.with_past().reshape(-1, 1), rows)
    flat = value.moved(
        lambda part: part.movedim(axis, 0).flatten(1) if part.dim() > 1 else part.unsqueeze(1)
    )
    shape = (*index.shape, *value.shape[:axis], *value.shape[axis + 1 :])
    found = (chosen @ flat).reshape(shape)
    order = [*range(len(index.shape), len(index.shape) + axis), *range(len(index.shape))]
    order += range(len(order), len(shape))
    return found.permute(order)


@rule
def _gathered(call: Call) -> Value:
    index, axis = call.num("index"), _axis(call)
    if index.ints is None or call.varies("self", axis):
        if call["dim"] is None:
            raise ReadsAll
        return _read(call, [None] * axis + [_rows(index, axis, call.value.shape)])
    ints = index.ints
    return call.value.moved(lambda part: part.gather(axis, ints))


def _rows(index: Num, axis: int, shape: Sequence[int]) -> Num:
    """The places of whole rows that an index of elements repeats for each element of a row. Raises
    ReadsAll for any other index.
    """
    first = tuple(slice(None if at == axis else 1) for at in range(len(index.shape)))
    row = index.moved(lambda part: part[first])
    others = [(*sizes[:axis], *sizes[axis + 1 :]) for sizes in (index.shape, shape)]
    if others[0] != others[1] or not index.re.numel() or not field.equal(index, row):
        raise ReadsAll
    return row.reshape(-1)


# -- assembled values


def _put(base: Num, source: Num, at: Any) -> Num:
    """A copy of ``base`` with the source's elements at some places."""
    counts = [prod(part.shape) for part in (base, source)]
    places = torch.arange(counts[0]).reshape(base.shape)
    places[at] = torch.arange(counts[0], sum(counts)).reshape(source.shape)
    flat = field.joined([part.reshape(-1) for part in (base, source)], 0)
    return flat.moved(lambda part: part[places])


@rule
def _scattered(call: Call) -> Value:
    base, source, axis = call.num("self"), call.num("src"), _axis(call)
    if call.varies("self", axis) and base.shape != source.shape:
        raise ReadsAll
    if call.word == "select_scatter":
        place: Any = call.plain("index")
    else:
        place = slice(call.plain("start"), call.plain("end"), call.plain("step"))
        if isinstance(place.stop, int) and place.stop > base.shape[axis]:
            place = slice(place.start, base.shape[axis], place.step)
    return _put(base, source, (*(slice(None),) * axis, place))


@rule
def _copied(call: Call) -> Value:
    shape, source = call.num("self").shape, as_value(call["src"])
    is_wide = call.dtype is None or (call.dtype.is_floating_point and call.dtype.itemsize > 1)
    if not is_wide and not (
        isinstance(source, Num) and source.ints is not None and call.dtype == torch.int64
    ):
        raise ReadsAll
    return source.expand(shape)


@rule
def _index_put(call: Call) -> Value:
    base, source = call.num("self"), call.num("values")
    indices = [_place(index) for index in call["indices"]]
    literal = all(index is None or index.ints is not None for index in indices)
    if not literal or call.masks or call["accumulate"] or _are_tokens(call, _indexed_axes(indices)):
        (mask, *others), is_number = indices, source.re.numel() == 1
        if mask is not None and is_number and not (others or call["accumulate"]):
            guarded = quantising.guarded(mask, source, base)
            if guarded is not None:
                return guarded
        return opaque(replace(call, given={**call.given, "indices": indices}))
    return _put(base, source, _literal_places(indices))


@rule
def _scattered_rows(call: Call) -> Value:
    """Of whole rows."""
    index, source = call.num("index"), call["src"]
    if not isinstance(source, Num) or call["reduce"] is not None or source.shape != index.shape:
        raise ReadsAll
    return _rows_put(call, _rows(index, _axis(call), call.value.shape), source)


def _rows_put(call: Call, index: Any, source: Any) -> Value:
    indices = [None] * _axis(call) + [index]
    given = {"self": call["self"], "indices": indices, "values": source, "accumulate": False}
    return _index_put(call.of(torch.ops.aten.index_put.default, given))


# -- tensors of numbers


@rule
def _filled(call: Call) -> Num:
    name = next(name for name in ("fill_value", "value", "s") if name in call.given)
    return _whole(call, as_value(call[name]))


def _whole(call: Call, filling: Value) -> Num:
    value, shape = real(filling), call.shape
    if shape is None:
        if "size" in call.given:
            shape = tuple(call.plain("size"))
        elif call.word == "scalar_tensor":
            shape = ()
        else:
            shape = call.value.shape
    if call.dtype is not None and is_float(call.dtype):
        value = value.with_past()
    literal = call["fill_value"]
    if call.dtype in (torch.int32, torch.int64) and isinstance(literal, float):
        value = as_num(int(literal))
    elif call.dtype in _WRAPS and literal not in (None, 0, 1):
        raise ReadsAll
    found = value.expand(shape)
    found.past = float(literal) if isinstance(literal, (int, float)) else None
    return found


@rule
def _empty(call: Call) -> Num:
    shape = call.shape or tuple(call.plain("size"))
    here().memory += 1
    return field.random(f"memory {here().memory}", shape)


@rule
def _eye(call: Call) -> Num:
    call.apart_from_tokens("", 0, 1)
    rows, columns = call.shape or (call.plain("n"), call.plain("m") or call.plain("n"))
    return field.integers(torch.eye(rows, columns, dtype=torch.int64))


@rule
def _counted(call: Call) -> Num:
    if "length" in call.given:  # iota
        start, step, length = call["start"], call["step"], call["length"]
    else:
        start, step = call["start"] or 0, call["step"] or 1
        length = call["end"]
        if call.shape is None:
            length = -(-(plain(length) - plain(start)) // plain(step))
    if call.shape is not None:
        (length,) = call.shape
    places = torch.arange(length, dtype=torch.int64)
    positions = field.integers(places)
    if call.varies("", 0):  # every position is one of its own
        positions = function("position", positions)
    elif not (isinstance(start, Abstract) or isinstance(step, Abstract)):
        if not (isinstance(start, float) or isinstance(step, float)):
            return field.integers(places * step + start)
        if call.dtype is not None and not call.dtype.is_floating_point:
            raise ReadsAll
    return as_num(start) + as_num(step) * positions


# -- arithmetic


def _of_integers(on: Callable[..., Tensor], *sides: Value) -> Num | None:
    """What a step makes of literal integers: such; None of anything else."""
    ints = [side.ints for side in sides if isinstance(side, Num) and side.ints is not None]
    return field.integers(on(*ints)) if len(ints) == len(sides) else None


@rule
def _added(call: Call) -> Value:
    a, b = call.sides
    if call.word == "rsub":
        a, b = b, a
    if call["alpha"] not in (None, 1):
        b = b * as_value(call["alpha"])
    if "sub" in call.word:
        return _of_integers(operator.sub, a, b) or a - b
    return _of_integers(operator.add, a, b) or a + b


@rule
def _mul(call: Call) -> Value:
    factor = list(call.given.values())[1]
    if isinstance(factor, float) and isinstance(call.value, Num):
        return quantising.scaled(call.value, factor)
    a, b = call.sides
    return _of_integers(operator.mul, a, b) or a * b


@rule
def _div(call: Call) -> Value:
    a, b = call.sides
    mode = call["rounding_mode"]
    if mode == "floor":
        return _floor_divide(call)
    if mode is not None:
        return pointwise(call)
    each, all_of = (side.past if isinstance(side, Num) else None for side in (a, b))
    if isinstance(each, Exponential) and isinstance(all_of, Exponentials):
        value, other = each.value, all_of.value
        if value.shape == other.shape and field.equal(value, other):
            return _shares(call, value, all_of.axis)
    if isinstance(b, Complex):
        return a * b.conjugate() / b.squared()
    return a / b


@rule
def _floor_divide(call: Call) -> Num:
    a, b = call.reals
    return _of_integers(operator.floordiv, a, b) or function("floor of quotient", a, b)


@rule
def _remainder(call: Call) -> Value:
    a, b = call.reals
    return _of_integers(operator.mod, a, b) or a - b * _floor_divide(call)


@rule
def _neg(call: Call) -> Value:
    value = call.value
    if isinstance(value, Num) and isinstance(value.past, quantising.End):
        return (-value).with_past(replace(value.past, sign=-value.past.sign))
    return _of_integers(operator.neg, value) or -value


@rule
def _pow(call: Call) -> Value:
    base, exponent = call.sides
    power = call["exponent"]
    if isinstance(power, (int, float)) and abs(power) <= 16:
        if float(power).is_integer():
            if isinstance(base, Complex):
                return base * base if power == 2 else pointwise(call)
            return field.integer_power(base, int(power))
        if abs(power) == 0.5:
            root = field.sqrt(real(base))
            return root if power > 0 else field.inverse(root)
    return call.function("pow", real(base), real(exponent))


@rule
def _addc(call: Call) -> Value:
    second = as_value(call["tensor2"])
    second = second if call.word == "addcmul" else field.inverse(real(second))
    product = as_value(call["tensor1"]) * second
    return as_value(call["self"]) + product * as_value(call["value"])


@rule
def _lerp(call: Call) -> Value:
    start, end = as_value(call["self"]), as_value(call["end"])
    return start + (end - start) * as_value(call["weight"])


def _turn(call: Call, angle: Num) -> Complex:
    """``exp(i * angle)``, by a function that is the same of both signs, and one times the angle."""
    square = angle * angle
    return Complex(call.function("cos", square), angle * call.function("sinc", square))


@rule
def _abs(call: Call) -> Value:
    value = call.value
    if isinstance(value, Complex):
        return field.sqrt(value.squared())
    found = function("abs", value * value)
    return found.with_past(quantising.Absolute(value))


@rule
def _sigmoid(call: Call) -> Num:
    less = call.function("exp", -call.real)
    return field.inverse(field.number(1) + less)


@rule
def _softmax(call: Call) -> Num:
    axis = _axis(call)
    call.apart_from_tokens("self", axis)
    return _shares(call, call.real, axis)


def _shares(call: Call, value: Num, axis: int) -> Num:
    """Softmax: of numbers that are all larger by one number it is the same."""
    apart = value - value.narrow(axis, 0, 1)
    each = call.function("exp", apart)
    return each / field.total(each, [axis], True)


@rule
def _clamped(call: Call) -> Value:
    value, ends = call.real, (call["min"], call["max"])
    if all(isinstance(end, Num) for end in ends) and field.equal(-ends[0], ends[1]):
        return quantising.clipped(value, ends[1])
    if not all(end is None or isinstance(end, (int, float)) for end in ends):
        return pointwise(call)
    if ends[1] is None and ends[0] is not None and quantising.is_floor(value, ends[0]):
        return value
    return quantising.bounded(value, *ends)


@rule
def _greater(call: Call) -> Value:
    """A floor under the largest of a row, given as a tensor."""
    sides = call.num("self"), call.num("other")
    for value, floor in (sides, sides[::-1]):
        least = floor.past
        if isinstance(least, float) and quantising.is_floor(value, least):
            return value
    a, b = (side.past for side in sides)
    if quantising.are_both_ends(a, b):
        return quantising.largest_of(a.rows, len(a.rows.shape) == len(sides[0].shape))
    return _clip(call)


@rule
def _clip(call: Call) -> Num:
    """``minimum(maximum(v, -limit), limit)``, or the half of it; in the other order where no limit
    is below 0.
    """
    sides = call.num("self"), call.num("other")
    for inner, bound in (sides, sides[::-1]):
        if not isinstance(inner.past, quantising.Bounded) or inner.past.by == call.name:
            continue
        for value, other in (inner.past.sides, inner.past.sides[::-1]):
            limit = bound if call.word == "minimum" else other
            in_order = call.word == "minimum" or quantising.is_size(limit)
            if in_order and field.equal(-other, bound):
                return quantising.clipped(value, limit)
    found = real(pointwise(call))
    return found.with_past(quantising.Bounded(call.name, sides))


@rule
def _masked_fill(call: Call) -> Value:
    chosen = call.num("mask").ints
    if chosen is not None and not bool(chosen.any()):
        return call.value
    return _chosen(call, "mask", call["value"], call["self"])


def _chosen(call: Call, name: str, a: Any, b: Any) -> Value:
    """``a`` where the condition holds, else ``b``. If it is not known: a function that is the same
    of the opposite condition.
    """
    chosen = call.num(name)
    if isinstance(a, Complex) or isinstance(b, Complex):
        return pointwise(call)
    is_finite = all(_is_number(item) or not isinstance(item, float) for item in (a, b))
    if chosen.ints is not None and is_finite:
        chosen = field.integers(chosen.ints.ne(0))
        return chosen * as_num(a) + _opposite(chosen) * as_num(b)
    one, other = (_read_only(item) for item in (a, b))
    guarded = quantising.guarded(chosen, one, other)
    if guarded is not None:
        return guarded
    return call.function("where", chosen, one, other) + call.function(
        "where", _opposite(chosen), other, one
    )


def _read_only(item: Any) -> Num:
    """For a function: what is no number of the field is known by its name."""
    is_known = _is_number(item) or not isinstance(item, float)
    return as_num(item) if is_known else function(f"the number {item}")


def _opposite(chosen: Num) -> Num:
    if chosen.ints is not None:
        return field.integers(1 - chosen.ints)
    return field.number(1) - chosen


OF_ZERO = {"eq": False, "le": False, "ne": True, "gt": True}  # of what is never negative


@rule
def _compare(call: Call) -> Value:
    value, other = call.sides
    found = _of_integers(getattr(torch, call.word), value, other)
    if found is not None:
        return found
    made = pointwise(call)
    if call.word not in OF_ZERO or not _is_number(call["other"]) or call["other"] != 0:
        return made
    return made.with_past(quantising.IsZero(real(value), OF_ZERO[call.word]))


@rule
def _not(call: Call) -> Value:
    of_bools = call.source == call.dtype == torch.bool
    return _opposite(call.real) if of_bools else pointwise(call)


# -- complex numbers


@rule
def _as_complex(call: Call) -> Value:
    value = call.real
    return Complex(*value.parts(lambda part: part.unbind(-1)))


@rule
def _as_real(call: Call) -> Value:
    value = call.value
    assert isinstance(value, Complex)
    return field.stacked([value.real, value.imag], -1)


@rule
def _part(call: Call) -> Value:
    value = call.value
    if isinstance(value, Num):
        return value if call.word == "real" else value * field.number(0)
    return value.real if call.word == "real" else value.imag


@rule
def _conjugate(call: Call) -> Value:
    value = call.value
    return value.conjugate() if isinstance(value, Complex) else value


@rule
def _exp(call: Call) -> Value:
    value = call.value
    if isinstance(value, Num):
        return call.function("exp", value).with_past(Exponential(value))
    turned = _turn(call, value.imag)
    is_zero = not bool(value.real.re.any()) and value.real.im is None
    return turned if is_zero else turned * call.function("exp", value.real)


# -- sums


def _axes(call: Call) -> list[int]:
    given, rank = call.plain("dim"), len(call.value.shape)
    axes = [given] if isinstance(given, int) else list(given or [])
    return [axis % rank for axis in axes] or list(range(rank))


def _are_tokens(call: Call, axes: Sequence[int]) -> bool:
    """Is one of these axes of the first argument as long as the tokens are many?"""
    return any(call.varies("self", axis) for axis in axes)


def _counts(call: Call, axes: Sequence[int]) -> Num:
    """How many elements a sum over the axes has."""
    if _are_tokens(call, axes):
        raise Undecided(f"{call.name} reduces along the tokens")
    value = call.value
    return field.number(prod(value.shape[axis] for axis in axes))


@rule
def _sum(call: Call) -> Value:
    value, keep = call.value, bool(call["keepdim"])
    axes = _axes(call)
    _counts(call, axes)
    if isinstance(value, Complex):
        return Complex(field.total(value.real, axes, keep), field.total(value.imag, axes, keep))
    found = field.total(value, axes, keep)
    if isinstance(value.past, Exponential) and keep and len(axes) == 1:
        return found.with_past(Exponentials(value.past.value, axes[0]))
    return found


@rule
def _mean(call: Call) -> Value:
    value = call.real
    axes = _axes(call)
    return field.total(value, axes, bool(call["keepdim"])) / _counts(call, axes)


def _around_mean(value: Num, axes: Sequence[int], count: Num) -> tuple[Num, Num]:
    """The mean, and what each element is apart from it."""
    mean = field.total(value, axes, True) / count
    return mean, value - mean


@rule
def _var(call: Call) -> Any:
    value, axes, keep = call.real, _axes(call), bool(call["keepdim"])
    count = _counts(call, axes)
    less = call["correction"] if "correction" in call.given else int(call["unbiased"] is not False)
    less = 1 if less is None else less
    if isinstance(less, (int, float)) and prod(value.shape[axis] for axis in axes) <= less:
        raise Undecided(f"{call.name} of too few elements")
    _, apart = _around_mean(value, axes, count)
    variance = field.total(apart * apart, axes, keep) / (count - as_num(less))
    found = field.sqrt(variance) if "std" in call.name else variance
    mean = field.total(value, axes, keep) / count
    return [found, mean] if call.name.endswith("_mean") else found


@rule
def _norm(call: Call) -> Value:
    order = call["ord"] if "ord" in call.given else call["p"]
    value, axes, keep = call.real, _axes(call), bool(call["keepdim"])
    call.apart_from_tokens("self", *axes)
    if order == math.inf and axes == [len(value.shape) - 1]:
        return quantising.largest_of(value, keep)
    if order not in (2, 2.0, None):
        raise ReadsAll
    return field.sqrt(field.total(value * value, axes, keep))


@rule
def _largest(call: Call) -> Any:
    """A function of what the elements are, whatever their order."""
    value = call.real
    if call["other"] is not None:
        return pointwise(call)
    axes, keep = _axes(call), bool(call["keepdim"])
    call.apart_from_tokens("self", *axes)
    is_least = call.word in ("amin", "min")
    name, in_rows = "least" if is_least else "largest", axes == [len(value.shape) - 1]
    if isinstance(value.past, quantising.Absolute) and in_rows and not is_least:
        found = quantising.largest_of(value.past.value, keep)
    else:
        found = function(name, field.total(function(f"element of {name}", value), axes, keep))
        found = found.with_past(quantising.End(value, is_least) if in_rows else None)
    if call.word in ("amax", "amin") or "dim" not in call.given:
        return found
    (axis,) = axes
    places = torch.arange(value.shape[axis]).reshape(-1, *(1,) * (len(value.shape) - 1 - axis))
    in_order = field.total(
        function("element in its place", value, field.integers(places)), axes, keep
    )
    return [found, function(f"place of {name}", in_order)]


# -- products


def _sums_along(call: Call, name: str = "self", axis: int = -1) -> None:
    """Raises Undecided for a product that sums over an axis which is shorter in this run than it
    may be.

    A weight has no tokens: what it is multiplied along is a width.
    """
    operands = (item for item in call.given.values() if isinstance(item, Num))
    summed = axis % len(call.num(name).shape)
    if all(value.cells is None for value in operands) and call.varies(name, summed):
        raise Undecided(f"{call.name} sums along the tokens")


@rule
def _matmul(call: Call) -> Value:
    _sums_along(call, next(iter(call.given)))
    a, b = call.reals
    is_row, is_column = len(a.shape) == 1, len(b.shape) == 1
    found = (a.unsqueeze(0) if is_row else a) @ (b.unsqueeze(-1) if is_column else b)
    found = found.squeeze(-1) if is_column else found
    return found.squeeze(-1 if is_column else -2) if is_row else found


@rule
def _linear(call: Call) -> Value:
    _sums_along(call, "input")
    weight = call.num("weight").mT
    return call.plus(call.num("input") @ weight, "bias")


@rule
def _addmm(call: Call) -> Value:
    left, right = ("mat1", "mat2") if call.word == "addmm" else ("batch1", "batch2")
    _sums_along(call, left)
    product = call.num(left) @ call.num(right) * call.num("alpha")
    return product + call.num("self") * call.num("beta")


@rule
def _einsum_of(call: Call) -> Value:
    """Two operands; an axis that one of them alone has, the result has too."""
    equation, operands = call["equation"], list(map(as_num, call["tensors"]))
    terms = einsum_terms(equation, [len(operand.shape) for operand in operands])
    if terms is None or len(operands) != 2:
        raise Undecided(f"einsum {equation}")
    (left, right), (a, b, out) = operands, terms
    shared = [label for label in a if label in b]
    batch = [label for label in shared if label in out]
    summed = [label for label in shared if label not in out]
    rows, columns = ([label for label in side if label not in shared] for side in (a, b))
    made = [*batch, *rows, *columns]
    sizes = dict(zip(a, left.shape, strict=True))
    spread = any(size != sizes.get(label, size) for label, size in zip(b, right.shape, strict=True))
    if spread or {*made} != {*out}:
        raise Undecided(f"einsum {equation}")
    sizes |= dict(zip(b, right.shape, strict=True))

    def arranged(value: Num, labels: Labels, *groups: list[int]) -> Num:
        order = [labels.index(label) for group in (batch, *groups) for label in group]
        shape = [sizes[label] for label in batch]
        shape += [prod(sizes[label] for label in group) for group in groups]
        return value.moved(lambda part: part.permute(order).reshape(shape))

    found = arranged(left, a, rows, summed) @ arranged(right, b, summed, columns)
    order = [made.index(label) for label in out]
    return found.reshape([sizes[label] for label in made]).permute(order)


@rule
def _transposed_product(call: Call) -> Value:
    if call["bias"] is not None or call["scale"] is not None:
        raise ReadsAll
    a, b = call.reals
    one, two = (call[name] or [0, 1, 2] for name in ("perm_x1", "perm_x2"))
    _sums_along(call, next(iter(call.given)), one[-1])
    found = a.permute(one) @ b.permute(two)
    order = call["perm_y"] or [1, 0, 2]
    return found.permute(order)


# -- quantised rows


def _only(call: Call, **wanted: Any) -> None:
    """Raises Undecided for an argument that is neither left out nor what is wanted."""
    for name, item in wanted.items():
        if call[name] not in (None, item):
            raise Undecided(f"{call.name} with {name}={call[name]}")


def _format(call: Call, in_blocks: bool = False) -> NumberFormat:
    form = number_formats.of_dst_type(call["dst_type"], in_blocks)
    if form is None:
        raise Undecided(f"{call.name} to a format that is not known")
    return form


@rule
def _dynamic_quant(call: Call) -> Any:
    _only(call, quant_mode="pertoken", group_index=None, dst_type_max=0)
    value = call.times(call.real, "smooth_scales")
    values, scale = quantising.by_row(value, _format(call))
    return [values, scale.squeeze(-1)]


@rule
def _mx_quant(call: Call) -> Any:
    """Blocks of 32 neighbours, whose scales lie in pairs."""
    value, _ = call.real, _format(call, in_blocks=True)
    _only(
        call,
        axis=len(value.shape) - 1 if call["axis"] != -1 else -1,
        round_mode="rint",
        dst_type_max=0,
    )
    _only(call, block_size=number_formats.BLOCK, scale_alg=0, max_low_bound=0)
    if value.shape[-1] % (2 * number_formats.BLOCK):
        raise Undecided("blocks that fill no pair")
    values, scale = quantising.by_block(value)
    return [values, scale.unflatten(-1, (-1, 2))]


@rule
def _block_quant(call: Call) -> Any:
    """Tiles of 128 neighbours."""
    value, tile, form = call.real, call["col_block_size"], _format(call)
    _only(call, min_scale=0, round_mode=form.block_rounding, row_block_size=1, dst_type_max=0)
    if value.shape[-1] % tile:
        raise Undecided("tiles that are cut")
    values, scale = quantising.by_row(value.unflatten(-1, (-1, tile)), form)
    return [values.flatten(-2), scale.squeeze(-1)]


@rule
def _quantize(call: Call) -> Num:
    value, scale = call.real, call.num("scales")
    shape = [1] * len(value.shape)
    shape[call["axis"]] = -1
    scale = scale.reshape(shape)
    if call["dtype"] not in (1, 12, torch.int8, torch.qint8):
        raise Undecided(f"{call.name} to {call['dtype']}")
    found = value * scale if call["div_mode"] is False else value / scale
    if call["zero_points"] is not None:
        found = found + call.num("zero_points").reshape(shape)
    return quantising.saturated(found)


@rule
def _quant_matmul(call: Call) -> Num:
    kinds = {"x1_dtype", "x2_dtype", "scale_dtype", "pertoken_scale_dtype", "group_sizes"}
    given = {"x1", "x2", "scale", "pertoken_scale", "output_dtype"}
    if call.holds("bias") == torch.int32 and call["pertoken_scale"] is None:
        given.add("bias")  # before the scale
    others = {
        name for name, item in call.given.items() if name not in given | kinds and item is not None
    }
    if others or call["x1_dtype"] != call["x2_dtype"]:
        raise Undecided(f"npu_quant_matmul with {', '.join(sorted(others))}")
    _sums_along(call, "x1")
    rows, weight, scale = call.num("x1"), call.num("x2"), call.num("scale")
    if any(call["group_sizes"] or ()):
        _only(
            call,
            bias=None,
            scale_dtype=E8M0_NUMBER,
            pertoken_scale_dtype=E8M0_NUMBER,
            x1_dtype=None,
        )
        if tuple(call["group_sizes"]) not in number_formats.IN_BLOCKS:
            raise Undecided("blocks of other sizes")
        of_rows = call.num("pertoken_scale").flatten(-2)
        of_weight = scale.moved(lambda part: part.transpose(1, 2).flatten(0, 1))
        return _as_asked(call, quantising.product_of_blocks(rows, weight, of_rows, of_weight))
    _only(call, scale_dtype=None, pertoken_scale_dtype=None, x1_dtype=HIFLOAT8.number)
    found = quantising.read_as(rows, call["x1_dtype"]) @ weight
    found = call.plus(found, "bias")
    if call.dtype == torch.int32:  # the sum, before any scale
        return found
    found = found * scale
    if call["pertoken_scale"] is not None:
        found = found * call.num("pertoken_scale").unsqueeze(-1)
    return _as_asked(call, found)


def _as_asked(call: Call, product: Num) -> Num:
    """The product in the dtype that was asked for: in int8 rounded and saturated."""
    return quantising.saturated(product) if call.dtype == torch.int8 else product


# -- attention, norms and rotations by one operator


@rule
def _attention(call: Call) -> Value:
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    for name in ("query", "key", "value"):
        call.apart_from_tokens(name, -2, -1)
    if call["enable_gqa"]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (
            part.moved(lambda part: part.repeat_interleave(times, -3)) for part in (key, value)
        )
    scale = query.shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
    scores = query @ key.mT
    scores = scores * as_num(scale)
    if call["is_causal"]:
        mask = field.integers(torch.ones(scores.shape[-2:], dtype=torch.int64).tril())
    if call["is_causal"] or call.holds("attn_mask") == torch.bool:
        given = {"mask": _opposite(mask), "self": scores, "value": -math.inf}
        scores = real(_masked_fill(call.of(torch.ops.aten.masked_fill.Scalar, given)))
    elif mask is not None:
        scores = scores + mask
    return _shares(call, scores, len(scores.shape) - 1) @ value


@rule
def _layer_norm(call: Call) -> Any:
    value, rank = call.num("input"), len(call.plain("normalized_shape"))
    axes = list(range(len(value.shape) - rank, len(value.shape)))
    count = _counts(call, axes)
    mean, apart = _around_mean(value, axes, count)
    variance = field.total(apart * apart, axes, True) / count
    rstd = field.inverse(field.sqrt(variance + call.num("eps")))
    found = call.plus(call.times(apart * rstd, "weight"), "bias")
    return found if call.word == "layer_norm" else [found, mean, rstd]


def rms_norm(value: Num, gamma: Num | None, epsilon: Any, rank: int) -> tuple[Num, Num]:
    axes = list(range(len(value.shape) - rank, len(value.shape)))
    count = prod(value.shape[axis] for axis in axes)
    mean = field.total(value * value, axes, True) / field.number(count)
    here().means.append(mean)
    rstd = field.inverse(field.sqrt(mean + as_num(epsilon)))
    normed = value * rstd
    return (normed if gamma is None else normed * gamma), rstd


@rule
def _rms_norm(call: Call) -> Any:
    weight = None if call["weight"] is None else call.num("weight")
    if call["eps"] is None:
        raise Undecided("rms_norm with the epsilon of a dtype")
    found = rms_norm(call.num("input"), weight, call["eps"], len(call.plain("normalized_shape")))
    return found[0] if call.word == "rms_norm" else list(found)


@rule
def _npu_rms_norm(call: Call) -> Any:
    gamma = call.num("gamma")
    return list(rms_norm(call.real, gamma, call["epsilon"], len(gamma.shape)))


@rule
def _npu_add_rms_norm(call: Call) -> Any:
    gamma, both = call.num("gamma"), call.num("x1") + call.num("x2")
    return [*rms_norm(both, gamma, call["epsilon"], len(gamma.shape)), both]


def pairs(value: Num) -> tuple[Num, Num]:
    """The even and the odd elements of the last axis."""
    even, odd = value.parts(lambda part: (part[..., 0::2], part[..., 1::2]))
    return even, odd


def rotated(value: Num, cos: Num, sin: Num) -> Num:
    """Interleaved pairs in, halves out."""
    even, odd = pairs(value)
    (c0, c1), (s0, s1) = (table.parts(lambda part: part.chunk(2, -1)) for table in (cos, sin))
    halves = [even * c0 - odd * s0, odd * c1 + even * s1]
    return field.joined(halves, -1)


def rotated_halves(value: Num, cos: Num, sin: Num) -> Num:
    first, second = value.parts(lambda part: part.chunk(2, -1))
    return value * cos + field.joined([-second, first], -1) * sin


@rule
def _rotary_mul(call: Call) -> Value:
    value, r1, r2 = (as_num(item) for item in list(call.given.values())[:3])
    mode = call["rotary_mode"] or "half"
    if call["rotate"] is not None:
        turned = value @ call.num("rotate")
    elif mode == "half":
        return rotated_halves(value, r1, r2)
    elif mode == "interleave":
        even, odd = pairs(value)
        turned = field.stacked([-odd, even], -1).flatten(-2)
    else:
        raise ReadsAll
    return value * r1 + turned * r2


# -- rules of one expression


RULES |= {
    "same": lambda call: call.value,
    "index_selected": lambda call: _read(call, [*[None] * _axis(call), _place(call["index"])]),
    "embedded": lambda call: _read(call, [_place(call["indices"])], call.num("weight")),
    "index_copied": lambda call: _rows_put(call, call["index"], call["source"]),
    "zeros": lambda call: _whole(call, as_value(0)),
    "ones": lambda call: _whole(call, as_value(1)),
    "reciprocal": lambda call: field.inverse(call.real),
    "square": lambda call: call.value * call.value,
    "sqrt": lambda call: field.sqrt(call.real),
    "rsqrt": lambda call: field.inverse(field.sqrt(call.real)),
    "cos": lambda call: _turn(call, call.real).real,
    "sin": lambda call: _turn(call, call.real).imag,
    "silu": lambda call: call.real * _sigmoid(call),
    "relu": lambda call: quantising.bounded(call.real, 0, None),
    "round": lambda call: pointwise(call) if call["decimals"] else quantising.rounded(call.real),
    "where": lambda call: _chosen(call, "condition", call["self"], call["other"]),
    "complex": lambda call: Complex(call.num("real"), call.num("imag")),
    "polar": lambda call: _turn(call, call.num("angle")) * call.num("abs"),
    "interleave_rope": lambda call: rotated(call.real, call.num("cos"), call.num("sin")),
}
