"""Each operator in the field: what moves elements moves them, arithmetic is exact, all else is a
function.

A rule takes a :class:`Call` and gives its value. An operator without one is an uninterpreted
function: of each element where torch's own tag says that it works element by element, else of all
that it reads. So to forget one costs a fusion, never a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.compat import OpOverload, overload_name, schema_of
from mla_fusion.meta import number_formats
from mla_fusion.meta.number_formats import E8M0_NUMBER, HIFLOAT8, NumberFormat
from mla_fusion.operators.known import known
from mla_fusion.prove import field, quantising
from mla_fusion.prove.field import (
    Complex,
    Num,
    Undecided,
    Value,
    add,
    function,
    here,
    mul,
    neg,
    sub,
)


@dataclass(frozen=True)
class Abstract:
    """A number that stands for others: a symbolic size. ``number``: what it is in this run."""

    number: Any
    name: str


@dataclass(frozen=True)
class Call:
    """One call.

    given     its arguments by the schema's names, defaults among them
    shape     the result's sizes in this run; None: as the arguments say
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

    def num(self, name: str) -> Num:
        return real(as_value(self.given[name]))

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
    if (call.dtype in _WRAPS and call.word in _ARITHMETIC) or _truncates(call):
        return opaque(call)
    made = RULES.get(known(call.target).row.field)
    if made is not None:
        found = made(call)
        if not _is_held(found, call.dtype):
            return opaque(call)
        is_known = here().are_rows or not isinstance(found, Num) or found.ints is not None
        wraps = call.dtype == torch.int32 and call.word in _ARITHMETIC and not is_known
        return function("in torch.int32", found) if wraps else found
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
    is_float = any(
        held is not None and held.is_floating_point
        for held in (call.source, *map(call.holds, call.given))
    )
    literal = any(isinstance(item, float) and item % 1 for item in call.given.values())
    return call.word not in _TRUNCATE and (is_float or literal)


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
    if isinstance(item, bool):
        return field.integers(torch.tensor(int(item), dtype=torch.int64))
    if isinstance(item, complex):
        return Complex(field.number(item.real), field.number(item.imag))
    if isinstance(item, int):
        return field.integers(torch.tensor(item, dtype=torch.int64))
    if isinstance(item, float):
        return field.number(item)
    raise Undecided(f"{item!r} is no number")


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
    return [real(as_value(item))] if isinstance(item, (Num, Abstract)) else []


# -- functions of which nothing is known


def pointwise(call: Call) -> Num:
    """Element by element."""
    operands = [part for item in call.given.values() for part in _operands(item)]
    name = f"{call.name}{call.kind} {list(map(_form, call.given.values()))}"
    found = call.function(name, *operands)
    return _spread(found, [item.shape for item in operands])


def _operands(item: Any) -> list[Num]:
    return _values(as_value(item) if _is_number(item) else item)


def _form(item: Any) -> str:
    return "real" if _is_number(item) else _written(item)


def _is_number(item: Any) -> bool:
    """What is no number of the field stays as it is written."""
    return isinstance(item, (int, float)) and not isinstance(item, bool) and math.isfinite(item)


def _spread(found: Num, shapes: Sequence[tuple[int, ...]]) -> Num:
    wanted = torch.broadcast_shapes(*shapes) if shapes else found.shape
    return found if found.shape == tuple(wanted) else found.moved(lambda part: part.expand(wanted))


def opaque(call: Call) -> Num:
    """Each element reads everything."""
    if call.shape is None:
        raise Undecided(f"{call.name} has no field run")
    of = [item for value in call.given.values() for item in _values(value)]
    every = field.label(*of) if of else field.number(0)
    places = field.integers(torch.arange(prod(call.shape)).reshape(call.shape))
    return call.function(f"{call.name}{call.kind} {call.literals}", every, places)


# -- what moves elements


@rule
def _same(call: Call) -> Value:
    return call.value


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
        return value if isinstance(value, Complex) else Complex(value, field.number(0))
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
    is_whole = call.source is not None and not (
        call.source.is_floating_point or call.source.is_complex
    )
    is_narrower = is_whole and call.source.itemsize > wanted.itemsize  # type: ignore[union-attr]
    if is_narrower and value.ints is None and not here().are_rows and wanted in _INTEGERS:
        return function(f"in {wanted}", value).with_past(Narrowed(value))
    if is_whole and wanted in (torch.int32, torch.int64):
        return value
    if here().are_rows and wanted in (torch.int32, torch.int64) and quantising.fits(value, wanted):
        return value
    return quantising.to_bytes(value, wanted, call.is_wide)


def _are_bits(value: Num) -> bool:
    """Is each element 0 or 1? No random one is."""
    return not here().are_rows and not bool(((value.re >> 1) | field.imaginary(value)).any())


@rule
def _reshaped(call: Call) -> Value:
    if isinstance(call.target, OpOverload) and overload_name(call.target) == "dtype":
        return _bytes(call)
    if call.shape is not None:
        shape = call.shape
        return call.value.moved(lambda part: part.reshape(shape))
    return _natively(call)


def _bytes(call: Call) -> Value:
    """Numbers read as bytes: as many functions of each as it has bytes."""
    value, source, wanted = real(call.value), call.source, call["dtype"]
    if source is None or not value.shape or wanted.itemsize not in (1, source.itemsize):
        return opaque(replace(call, name=f"{source} read"))
    if wanted.itemsize != 1:
        return function(f"{source} read as {wanted}", value)
    if call.rounded and source.itemsize > 2:
        return opaque(call)  # bytes of other numbers than those that were rounded
    if {source, wanted} == {torch.uint8, torch.float8_e8m0fnu}:
        return value  # torch_npu holds scales of blocks in either
    return quantising.as_bytes(value, source, wanted)


@rule
def _expanded(call: Call) -> Value:
    if call.shape is not None:
        shape = call.shape
        return call.value.moved(lambda part: part.expand(shape))
    return _natively(call)


@rule
def _natively(call: Call) -> Value:
    """The operator itself, on elements and integers alike; a function of all where a symbolic size
    says which.
    """
    if any(isinstance(item, Abstract) for item in call.given.values()):
        return opaque(call)
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
        return opaque(call)
    return _natively(call)


def _axis(call: Call, name: str = "dim", extra: int = 0) -> int:
    return int(call.plain(name) or 0) % (len(call.value.shape) + extra)


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
        ends = function("rows", *[real(as_value(end)) for end in found])
        return _of_any_rows(call.value, _some_rows(call, axis), [axis], ends)
    return _natively(call)


def _some_rows(call: Call, axis: int) -> Value:
    """As many rows as the result has in this run; which, its name says."""
    value, step = call.value, call["step"]
    count = value.shape[axis] if call.shape is None else call.shape[axis]
    if step not in (None, 1) or count > value.shape[axis]:
        raise Undecided(f"{call.name} takes some rows")
    return value.moved(lambda part: part.narrow(axis, 0, count))


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
    names = names.moved(lambda part: part.reshape(*part.shape, *(1,) * len(behind)))
    flat = value.moved(
        lambda part: part.reshape(prod(before), prod(rows), prod(behind)).transpose(0, 1).flatten(1)
    )
    shares = field.random(f"shares of {prod(rows)} rows", (prod(rows), 1))
    if flat.cells is None:
        every = field.total(mul(shares, flat), [0], True)
    else:  # a weight is not drawn for that
        every = field.matmul(shares.moved(lambda part: part.mT), flat)
    inserted = len(taken.shape) - len(before) - len(behind)
    every = every.moved(lambda part: part.reshape(*before, *(1,) * inserted, *behind))
    names, of_all = function("read", names), function("read among all", names)
    return add(mul(taken, names), mul(every, of_all))


@rule
def _selected(call: Call) -> Value:
    if call.varies("self", _axis(call)):
        return opaque(call)
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
    of = [real(as_value(size)) for size in sizes]
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
def _unbound(call: Call) -> Any:
    axis = _axis(call)
    if call.varies("self", axis):
        raise Undecided(f"{call.name} cuts the tokens")
    return call.value.parts(lambda part: part.unbind(axis))


@rule
def _turned(call: Call) -> Value:
    rank = len(call.value.shape)
    if call.word in ("flip", "roll"):
        axes = [int(axis) % rank for axis in (call.plain("dims") or range(rank))]
        if _are_tokens(call, axes):
            return opaque(call)
    elif _are_tokens(call, range(rank)) and call.shape is None:
        return opaque(call)
    found = _natively(call)
    return found if call.shape in (None, found.shape) else opaque(call)


@rule
def _triangle(call: Call) -> Value:
    value, shape = real(call.value), call.value.shape
    if _are_tokens(call, [len(shape) - 2, len(shape) - 1]):
        return opaque(call)
    cut = torch.tril if call.word == "tril" else torch.triu
    kept = cut(torch.ones(shape[-2:], dtype=torch.int64), call.plain("diagonal"))
    ints = None if value.ints is None else field.integers(value.ints * kept)
    return mul(value, field.integers(kept)) if ints is None else ints


@rule
def _padded(call: Call) -> Value:
    pads, value = call.plain("pad"), call.value
    if (
        isinstance(value, Complex)
        or call["mode"] not in (None, "constant")
        or any(
            call.varies("self", len(value.shape) - 1 - place // 2)
            for place, pad in enumerate(pads)
            if pad
        )
    ):
        return opaque(call)
    fill = real(as_value(call["value"] or 0))
    padded = field.pad(value, pads)
    if not int(fill.re):
        return padded
    ones = torch.nn.functional.pad(torch.zeros(value.shape, dtype=torch.int64), pads, value=1)
    return add(padded, mul(field.integers(ones), fill))


@rule
def _joined(call: Call) -> Value:
    parts: list[Value] = [as_value(part) for part in next(iter(call.given.values()))]
    stacks = call.word == "stack"
    axis = int(call.plain("dim") or 0)
    parts = [part for part in parts if stacks or part.shape != (0,)]
    axis %= len(parts[0].shape) + stacks
    if not stacks and len(parts) > 1 and call.varies("", axis):
        return opaque(call)
    join = field.stacked if stacks else field.joined
    if any(isinstance(part, Complex) for part in parts):
        pairs = [
            part if isinstance(part, Complex) else Complex(part, mul(part, field.number(0)))
            for part in parts
        ]
        return Complex(
            *(join(side, axis) for side in zip(*((p.real, p.imag) for p in pairs), strict=True))
        )
    return join([real(part) for part in parts], axis)


@rule
def _indexed(call: Call) -> Value:
    if call.masks:
        return opaque(call)
    return _read(call, [_place(index) for index in call["indices"]])


def _place(index: Any) -> Num | None:
    if index is None:
        return None
    found = real(as_value(index))
    return found.past.value if isinstance(found.past, Narrowed) else found


@rule
def _index_selected(call: Call) -> Value:
    return _read(call, [*[None] * _axis(call), _place(call["index"])])


@rule
def _embedded(call: Call) -> Value:
    value = real(as_value(call["weight"]))
    return _read(call, [_place(call["indices"])], value)


def _read(call: Call, indices: list[Num | None], value: Value | None = None) -> Value:
    """By integers of literals: movement. By others: rows of that name."""
    value = call.value if value is None else value
    known = [index for index in indices if index is not None]
    if all(index.ints is not None for index in known):
        if any(
            call.varies("self", axis) for axis, index in enumerate(indices) if index is not None
        ):
            return opaque(call)
        places = [slice(None) if index is None else index.ints for index in indices]
        return value.moved(lambda part: part[tuple(places)])
    sizes = value.shape
    if len(known) == 1 and isinstance(value, Num) and sizes[len(indices) - 1] <= _FEW_ROWS:
        return _read_any(value, known[0], len(indices) - 1)
    names = reduce(lambda a, b: function("place", a, b), [i.with_past() for i in known])
    places = [
        slice(None) if index is None else index.re.remainder(sizes[axis])
        for axis, index in enumerate(indices)
    ]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if axes != [*range(axes[0], axes[-1] + 1)]:
        raise Undecided(f"{call.name} along axes that do not stand side by side")
    taken = value.moved(lambda part: part[tuple(places)])
    return _of_any_rows(value, taken, axes, names)


_FEW_ROWS = 1024  # of more, two places are one row by a chance that three points make small enough


def _read_any(value: Num, index: Num, axis: int) -> Num:
    """Each row, times whether it is the one."""
    rows = field.integers(torch.arange(value.shape[axis]))
    chosen = function("chosen", index.with_past().moved(lambda part: part.reshape(-1, 1)), rows)
    flat = value.moved(
        lambda part: part.movedim(axis, 0).flatten(1) if part.dim() > 1 else part.unsqueeze(1)
    )
    shape = (*index.shape, *value.shape[:axis], *value.shape[axis + 1 :])
    found = field.matmul(chosen, flat).moved(lambda part: part.reshape(shape))
    order = [*range(len(index.shape), len(index.shape) + axis), *range(len(index.shape))]
    order += range(len(order), len(shape))
    return found.moved(lambda part: part.permute(order))


@rule
def _gathered(call: Call) -> Value:
    index, axis = call.num("index"), _axis(call)
    if index.ints is None or call.varies("self", axis):
        rows = None if call["dim"] is None else _rows(index, axis, call.value.shape)
        return opaque(call) if rows is None else _read(call, [None] * axis + [rows])
    ints = index.ints
    return call.value.moved(lambda part: part.gather(axis, ints))


def _rows(index: Num, axis: int, shape: Sequence[int]) -> Num | None:
    """The places of whole rows that an index of elements repeats for each element of a row."""
    first = tuple(slice(None if at == axis else 1) for at in range(len(index.shape)))
    row = index.moved(lambda part: part[first])
    if (*index.shape[:axis], *index.shape[axis + 1 :]) != (*shape[:axis], *shape[axis + 1 :]):
        return None
    if not index.re.numel() or not field.equal(index, row):
        return None
    return row.moved(lambda part: part.reshape(-1))


# -- assembled values


def _put(base: Num, source: Num, at: Any) -> Num:
    """A copy of ``base`` with the source's elements at some places."""
    counts = [prod(part.shape) for part in (base, source)]
    places = torch.arange(counts[0]).reshape(base.shape)
    places[at] = torch.arange(counts[0], sum(counts)).reshape(source.shape)
    flat = field.joined([part.moved(lambda part: part.reshape(-1)) for part in (base, source)], 0)
    return flat.moved(lambda part: part[places])


@rule
def _scattered(call: Call) -> Value:
    base, source, axis = call.num("self"), call.num("src"), _axis(call)
    if call.varies("self", axis) and base.shape != source.shape:
        return opaque(call)
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
    is_float = call.dtype is None or (call.dtype.is_floating_point and call.dtype.itemsize > 1)
    if not is_float and not (
        isinstance(source, Num) and source.ints is not None and call.dtype == torch.int64
    ):
        return opaque(call)
    return source.moved(lambda part: part.expand(shape))


@rule
def _index_put(call: Call) -> Value:
    base, source = call.num("self"), call.num("values")
    indices = [_place(index) for index in call["indices"]]
    literal = all(index is None or index.ints is not None for index in indices)
    if (
        not literal
        or call.masks
        or call["accumulate"]
        or any(call.varies("self", axis) for axis, index in enumerate(indices) if index is not None)
    ):
        return opaque(replace(call, given={**call.given, "indices": indices}))
    return _put(
        base, source, tuple(slice(None) if index is None else index.ints for index in indices)
    )


@rule
def _index_copied(call: Call) -> Value:
    return _rows_put(call, call["index"], call["source"])


@rule
def _scattered_rows(call: Call) -> Value:
    """Of whole rows."""
    axis, source = _axis(call), call["src"]
    if not isinstance(source, Num) or call["reduce"] is not None:
        return opaque(call)
    rows = _rows(call.num("index"), axis, call.value.shape)
    if rows is None or source.shape != call.num("index").shape:
        return opaque(call)
    return _rows_put(call, rows, source)


def _rows_put(call: Call, index: Any, source: Any) -> Value:
    indices = [None] * _axis(call) + [index]
    given = {"self": call["self"], "indices": indices, "values": source, "accumulate": False}
    return _index_put(call.of(torch.ops.aten.index_put.default, given))


# -- tensors of numbers


@rule
def _filled(call: Call) -> Num:
    name = next(name for name in ("fill_value", "value", "s") if name in call.given)
    return _whole(call, real(as_value(call[name])))


def _whole(call: Call, value: Num) -> Num:
    shape = call.shape
    if shape is None:
        if "size" in call.given:
            shape = tuple(call.plain("size"))
        elif call.word == "scalar_tensor":
            shape = ()
        else:
            shape = call.value.shape
    if call.dtype is not None and (call.dtype.is_floating_point or call.dtype.is_complex):
        value = value.with_past()
    literal = call["fill_value"]
    if call.dtype in (torch.int32, torch.int64) and isinstance(literal, float):
        value = field.integers(torch.tensor(int(literal), dtype=torch.int64))
    elif call.dtype in _WRAPS and literal not in (None, 0, 1):
        return opaque(call)
    found = value.moved(lambda part: part.expand(shape))
    found.past = float(literal) if isinstance(literal, (int, float)) else None
    return found


@rule
def _zeros(call: Call) -> Num:
    return _whole(call, field.integers(torch.tensor(0, dtype=torch.int64)))


@rule
def _ones(call: Call) -> Num:
    return _whole(call, field.integers(torch.tensor(1, dtype=torch.int64)))


@rule
def _empty(call: Call) -> Num:
    shape = call.shape or tuple(call.plain("size"))
    here().memory += 1
    return field.random(f"memory {here().memory}", shape)


@rule
def _eye(call: Call) -> Num:
    if any(call.varies("", axis) for axis in (0, 1)):
        return opaque(call)
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
    if call.varies("", 0):  # every position is one of its own
        return add(
            real(as_value(start)),
            mul(real(as_value(step)), function("position", field.integers(places))),
        )
    if isinstance(start, Abstract) or isinstance(step, Abstract):
        return add(real(as_value(start)), mul(real(as_value(step)), field.integers(places)))
    if isinstance(start, float) or isinstance(step, float):
        if call.dtype is not None and not call.dtype.is_floating_point:
            return opaque(call)
        return add(field.number(start), mul(real(as_value(step)), field.integers(places)))
    return field.integers(places * step + start)


# -- arithmetic


def _pairwise(on_reals: Callable[[Num, Num], Num]) -> Callable[[Value, Value], Value]:
    def both(a: Value, b: Value) -> Value:
        if isinstance(a, Num) and isinstance(b, Num):
            return on_reals(a, b)
        zero = field.number(0)
        a, b = (item if isinstance(item, Complex) else Complex(item, zero) for item in (a, b))
        return Complex(on_reals(a.real, b.real), on_reals(a.imag, b.imag))

    return both


_plus, _minus = _pairwise(add), _pairwise(sub)


def times(a: Value, b: Value) -> Value:
    if isinstance(a, Num) and isinstance(b, Num):
        return mul(a, b)
    if isinstance(a, Num):
        a, b = b, a
    assert isinstance(a, Complex)
    if isinstance(b, Num):
        return Complex(mul(a.real, b), mul(a.imag, b))
    real_part = sub(mul(a.real, b.real), mul(a.imag, b.imag))
    return Complex(real_part, add(mul(a.real, b.imag), mul(a.imag, b.real)))


def _with_integers(
    found: Value, a: Value, b: Value, on: Callable[[Tensor, Tensor], Tensor]
) -> Value:
    """Sums and products of literal integers are such."""
    if isinstance(a, Num) and isinstance(b, Num) and a.ints is not None and b.ints is not None:
        return field.integers(on(a.ints, b.ints))
    return found


def _two(call: Call) -> tuple[Value, Value]:
    first, second = list(call.given.values())[:2]
    return as_value(first), as_value(second)


@rule
def _add(call: Call) -> Value:
    a, b = _two(call)
    if call["alpha"] not in (None, 1):
        b = times(b, as_value(call["alpha"]))
    return _with_integers(_plus(a, b), a, b, torch.add)


@rule
def _sub(call: Call) -> Value:
    a, b = _two(call)
    if call.word == "rsub":
        a, b = b, a
    if call["alpha"] not in (None, 1):
        if call.word == "rsub":
            a, b = a, times(b, as_value(call["alpha"]))
        else:
            b = times(b, as_value(call["alpha"]))
    return _with_integers(_minus(a, b), a, b, torch.sub)


@rule
def _mul(call: Call) -> Value:
    factor = list(call.given.values())[1]
    if isinstance(factor, float) and isinstance(call.value, Num):
        return quantising.scaled(call.value, factor)
    a, b = _two(call)
    return _with_integers(times(a, b), a, b, torch.mul)


@rule
def _div(call: Call) -> Value:
    a, b = _two(call)
    mode = call["rounding_mode"]
    if mode == "floor":
        return _floor_quotient(a, b)
    if mode is not None:
        return pointwise(call)
    each, all_of = (side.past if isinstance(side, Num) else None for side in (a, b))
    if isinstance(each, Exponential) and isinstance(all_of, Exponentials):
        value, other = each.value, all_of.value
        if value.shape == other.shape and field.equal(value, other):
            return _shares(call, value, all_of.axis)
    if isinstance(b, Complex):
        size = field.inverse(add(mul(b.real, b.real), mul(b.imag, b.imag)))
        return times(times(a, Complex(b.real, neg(b.imag))), size)
    return times(a, field.inverse(b))


@rule
def _floor_divide(call: Call) -> Value:
    return _floor_quotient(*_two(call))


def _floor_quotient(a: Value, b: Value) -> Num:
    a, b = real(a), real(b)
    if a.ints is not None and b.ints is not None:
        return field.integers(a.ints // b.ints)
    return function("floor of quotient", a, b)


@rule
def _remainder(call: Call) -> Value:
    a, b = map(real, _two(call))
    if a.ints is not None and b.ints is not None:
        return field.integers(a.ints % b.ints)
    return sub(a, mul(b, _floor_quotient(a, b)))


@rule
def _neg(call: Call) -> Value:
    value = call.value
    if isinstance(value, Complex):
        return Complex(neg(value.real), neg(value.imag))
    if isinstance(value.past, quantising.End):
        return neg(value).with_past(replace(value.past, sign=-value.past.sign))
    return field.integers(-value.ints) if value.ints is not None else neg(value)


@rule
def _reciprocal(call: Call) -> Value:
    return field.inverse(real(call.value))


@rule
def _square(call: Call) -> Value:
    return times(call.value, call.value)


@rule
def _sqrt(call: Call) -> Value:
    return field.sqrt(real(call.value))


@rule
def _rsqrt(call: Call) -> Value:
    return field.inverse(field.sqrt(real(call.value)))


@rule
def _pow(call: Call) -> Value:
    base, exponent = _two(call)
    power = call["exponent"]
    if isinstance(power, (int, float)) and abs(power) <= 16:
        if float(power).is_integer():
            if isinstance(base, Complex):
                return times(base, base) if power == 2 else pointwise(call)
            return field.integer_power(base, int(power))
        if abs(power) == 0.5:
            root = field.sqrt(real(base))
            return root if power > 0 else field.inverse(root)
    return call.function("pow", real(base), real(exponent))


@rule
def _addc(call: Call) -> Value:
    second = as_value(call["tensor2"])
    second = second if call.word == "addcmul" else field.inverse(real(second))
    product = times(as_value(call["tensor1"]), second)
    return _plus(as_value(call["self"]), times(product, as_value(call["value"])))


@rule
def _lerp(call: Call) -> Value:
    start, end = as_value(call["self"]), as_value(call["end"])
    return _plus(start, times(_minus(end, start), as_value(call["weight"])))


@rule
def _cos(call: Call) -> Value:
    value = real(call.value)
    return call.function("cos", mul(value, value))


@rule
def _sin(call: Call) -> Value:
    value = real(call.value)
    return mul(value, call.function("sinc", mul(value, value)))


@rule
def _abs(call: Call) -> Value:
    value = call.value
    if isinstance(value, Complex):
        return field.sqrt(add(mul(value.real, value.real), mul(value.imag, value.imag)))
    found = function("abs", mul(value, value))
    return found.with_past(quantising.Absolute(value))


@rule
def _sigmoid(call: Call) -> Num:
    less = call.function("exp", neg(real(call.value)))
    return field.inverse(add(field.number(1), less))


@rule
def _silu(call: Call) -> Num:
    return mul(real(call.value), _sigmoid(call))


@rule
def _relu(call: Call) -> Num:
    return quantising.bounded(real(call.value), 0, None)


@rule
def _softmax(call: Call) -> Num:
    axis = _axis(call)
    return opaque(call) if _are_tokens(call, [axis]) else _shares(call, real(call.value), axis)


def _shares(call: Call, value: Num, axis: int) -> Num:
    """Softmax: of numbers that are all larger by one number it is the same."""
    apart = sub(value, value.moved(lambda part: part.narrow(axis, 0, 1)))
    each = call.function("exp", apart)
    return mul(each, field.inverse(field.total(each, [axis], True)))


@rule
def _round(call: Call) -> Value:
    return pointwise(call) if call["decimals"] else quantising.rounded(real(call.value))


@rule
def _clamped(call: Call) -> Value:
    value, ends = real(call.value), (call["min"], call["max"])
    if all(isinstance(end, Num) for end in ends) and field.equal(neg(ends[0]), ends[1]):
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
        found = quantising.largest_of(a.rows)
        return (
            found if found.shape == sides[0].shape else found.moved(lambda part: part.squeeze(-1))
        )
    return _clip(call, *sides)


@rule
def _smaller(call: Call) -> Value:
    return _clip(call, call.num("self"), call.num("other"))


def _clip(call: Call, *sides: Num) -> Num:
    """``minimum(maximum(v, -limit), limit)``, or the half of it; in the other order where no limit
    is below 0.
    """
    for inner, bound in (sides, sides[::-1]):
        if not isinstance(inner.past, quantising.Bounded) or inner.past.by == call.name:
            continue
        for value, other in (inner.past.sides, inner.past.sides[::-1]):
            limit = bound if call.word == "minimum" else other
            in_order = call.word == "minimum" or quantising.is_size(limit)
            if in_order and field.equal(neg(other), bound):
                return quantising.clipped(value, limit)
    found = real(pointwise(call))
    return found.with_past(quantising.Bounded(call.name, sides))


@rule
def _where(call: Call) -> Value:
    return _chosen(call, "condition", call["self"], call["other"])


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
        return add(mul(chosen, real(as_value(a))), mul(_opposite(chosen), real(as_value(b))))
    one, other = (_read_only(item) for item in (a, b))
    return add(
        call.function("where", chosen, one, other),
        call.function("where", _opposite(chosen), other, one),
    )


def _read_only(item: Any) -> Num:
    """For a function: what is no number of the field is known by its name."""
    is_known = _is_number(item) or not isinstance(item, float)
    return real(as_value(item)) if is_known else function(f"the number {item}")


def _opposite(chosen: Num) -> Num:
    if chosen.ints is not None:
        return field.integers(1 - chosen.ints)
    return sub(field.number(1), chosen)


@rule
def _not(call: Call) -> Value:
    of_bools = call.source == call.dtype == torch.bool
    return _opposite(real(call.value)) if of_bools else pointwise(call)


@rule
def _compare(call: Call) -> Value:
    a, b = _two(call)
    if isinstance(a, Num) and isinstance(b, Num) and a.ints is not None and b.ints is not None:
        return field.integers(getattr(torch, call.word)(a.ints, b.ints).long())
    return pointwise(call)


# -- complex numbers


@rule
def _as_complex(call: Call) -> Value:
    value = real(call.value)
    return Complex(value.moved(lambda part: part[..., 0]), value.moved(lambda part: part[..., 1]))


@rule
def _as_real(call: Call) -> Value:
    value = call.value
    assert isinstance(value, Complex)
    return field.stacked([value.real, value.imag], -1)


@rule
def _part(call: Call) -> Value:
    value = call.value
    if isinstance(value, Num):
        return value if call.word == "real" else mul(value, field.number(0))
    return value.real if call.word == "real" else value.imag


@rule
def _conjugate(call: Call) -> Value:
    value = call.value
    return Complex(value.real, neg(value.imag)) if isinstance(value, Complex) else value


@rule
def _complex(call: Call) -> Value:
    return Complex(call.num("real"), call.num("imag"))


@rule
def _polar(call: Call) -> Value:
    size, angle = call.num("abs"), call.num("angle")
    square = mul(angle, angle)
    sine = mul(angle, call.function("sinc", square))
    return Complex(mul(size, call.function("cos", square)), mul(size, sine))


@rule
def _exp(call: Call) -> Value:
    value = call.value
    if isinstance(value, Num):
        return call.function("exp", value).with_past(Exponential(value))
    square = mul(value.imag, value.imag)
    turned = Complex(call.function("cos", square), mul(value.imag, call.function("sinc", square)))
    is_zero = not bool(value.real.re.any()) and value.real.im is None
    return turned if is_zero else times(turned, call.function("exp", value.real))


# -- sums


def _axes(call: Call, value: Value, name: str = "dim") -> list[int]:
    given = call.plain(name)
    axes = [given] if isinstance(given, int) else list(given or [])
    return [axis % len(value.shape) for axis in axes] or list(range(len(value.shape)))


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
    axes = _axes(call, value)
    _counts(call, axes)
    if isinstance(value, Complex):
        return Complex(field.total(value.real, axes, keep), field.total(value.imag, axes, keep))
    found = field.total(value, axes, keep)
    if isinstance(value.past, Exponential) and keep and len(axes) == 1:
        return found.with_past(Exponentials(value.past.value, axes[0]))
    return found


@rule
def _mean(call: Call) -> Value:
    value = real(call.value)
    axes = _axes(call, value)
    return mul(field.total(value, axes, bool(call["keepdim"])), field.inverse(_counts(call, axes)))


def _variance(call: Call) -> tuple[Num, Num]:
    value, keep = real(call.value), bool(call["keepdim"])
    axes = _axes(call, value)
    count = _counts(call, axes)
    less = call["correction"] if "correction" in call.given else int(call["unbiased"] is not False)
    mean = mul(field.total(value, axes, True), field.inverse(count))
    apart = sub(value, mean)
    squares = field.total(mul(apart, apart), axes, keep)
    fewer = sub(count, real(as_value(1 if less is None else less)))
    if isinstance(less, (int, float)) and prod(value.shape[axis] for axis in axes) <= less:
        raise Undecided(f"{call.name} of too few elements")
    return mul(squares, field.inverse(fewer)), mul(
        field.total(value, axes, keep), field.inverse(count)
    )


@rule
def _var(call: Call) -> Any:
    variance, mean = _variance(call)
    found = field.sqrt(variance) if "std" in call.name else variance
    return [found, mean] if call.name.endswith("_mean") else found


@rule
def _norm(call: Call) -> Value:
    order = call["ord"] if "ord" in call.given else call["p"]
    last = len(call.value.shape) - 1
    if (
        order == float("inf")
        and _axes(call, call.value) == [last]
        and not call.varies("self", last)
    ):
        found = quantising.largest_of(real(call.value))
        return found if call["keepdim"] else found.moved(lambda part: part.squeeze(-1))
    value = real(call.value)
    axes = _axes(call, value)
    if order not in (2, 2.0, None) or _are_tokens(call, axes):
        return opaque(call)
    return field.sqrt(field.total(mul(value, value), axes, bool(call["keepdim"])))


@rule
def _largest(call: Call) -> Any:
    """A function of what the elements are, whatever their order."""
    value = real(call.value)
    if call["other"] is not None:
        return pointwise(call)
    axes, keep = _axes(call, value), bool(call["keepdim"])
    if _are_tokens(call, axes):
        return opaque(call)
    is_least = call.word in ("amin", "min")
    name, in_rows = "least" if is_least else "largest", axes == [len(value.shape) - 1]
    if isinstance(value.past, quantising.Absolute) and in_rows and not is_least:
        found = quantising.largest_of(value.past.value)
        found = found if keep else found.moved(lambda part: part.squeeze(-1))
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


def _einsum(left: Num, right: Num, a: str, b: str, out: str) -> Num:
    """Two operands; a letter that only one of them has and the result has not is summed first."""
    for side, other in ((a, b), (b, a)):
        if any(letter not in other and letter not in out for letter in side) or len(
            set(side)
        ) < len(side):
            raise Undecided(f"einsum {a},{b}->{out}")
    batch = [letter for letter in a if letter in b and letter in out]
    summed = [letter for letter in a if letter in b and letter not in out]
    rows = [letter for letter in a if letter not in b]
    columns = [letter for letter in b if letter not in a]
    sizes = dict(zip(a, left.shape, strict=True)) | dict(zip(b, right.shape, strict=True))

    def arrange(value: Num, labels: str, *groups: list[str]) -> Num:
        order = [labels.index(letter) for group in (batch, *groups) for letter in group]
        shape = [sizes[letter] for letter in batch] + [
            prod(sizes[x] for x in group) for group in groups
        ]
        return value.moved(lambda part: part.permute(order).reshape(shape))

    found = field.matmul(arrange(left, a, rows, summed), arrange(right, b, summed, columns))
    made = [*batch, *rows, *columns]
    shape = [sizes[letter] for letter in made]
    return found.moved(
        lambda part: part.reshape(shape).permute([made.index(letter) for letter in out])
    )


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
def _mm(call: Call) -> Value:
    _sums_along(call)
    a, b = map(real, _two(call))
    return field.matmul(a, b)


@rule
def _matmul(call: Call) -> Value:
    _sums_along(call, next(iter(call.given)))
    a, b = map(real, _two(call))
    if len(b.shape) == 1:
        column = b.moved(lambda part: part.unsqueeze(-1))
        if len(a.shape) == 1:
            a = a.moved(lambda part: part.unsqueeze(0))
            return field.matmul(a, column).moved(lambda part: part.reshape(()))
        return field.matmul(a, column).moved(lambda part: part.squeeze(-1))
    if len(a.shape) == 1:
        row = a.moved(lambda part: part.unsqueeze(0))
        return field.matmul(row, b).moved(lambda part: part.squeeze(-2))
    return field.matmul(a, b)


@rule
def _linear(call: Call) -> Value:
    _sums_along(call, "input")
    weight = call.num("weight").moved(lambda part: part.mT)
    found = field.matmul(call.num("input"), weight)
    return found if call["bias"] is None else add(found, call.num("bias"))


@rule
def _addmm(call: Call) -> Value:
    left, right = ("mat1", "mat2") if call.word == "addmm" else ("batch1", "batch2")
    _sums_along(call, left)
    product = mul(field.matmul(call.num(left), call.num(right)), real(as_value(call["alpha"])))
    return add(product, mul(call.num("self"), real(as_value(call["beta"]))))


@rule
def _einsum_of(call: Call) -> Value:
    equation = call["equation"].replace(" ", "")
    operands = [real(as_value(item)) for item in call["tensors"]]
    if "->" not in equation or "." in equation or len(operands) != 2:
        raise Undecided(f"einsum {equation}")
    inputs, out = equation.split("->")
    left, right = operands
    a, b = inputs.split(",")
    return _einsum(left, right, a, b, out)


@rule
def _transposed_product(call: Call) -> Value:
    if call["bias"] is not None or call["scale"] is not None:
        return opaque(call)
    a, b = map(real, _two(call))
    one, two = (call[name] or [0, 1, 2] for name in ("perm_x1", "perm_x2"))
    _sums_along(call, next(iter(call.given)), one[-1])
    found = field.matmul(
        a.moved(lambda part: part.permute(one)), b.moved(lambda part: part.permute(two))
    )
    order = call["perm_y"] or [1, 0, 2]
    return found.moved(lambda part: part.permute(order))


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
    value = real(call.value)
    if call["smooth_scales"] is not None:
        value = mul(value, call.num("smooth_scales"))
    values, scale = quantising.by_row(value, _format(call))
    return [values, scale.moved(lambda part: part.squeeze(-1))]


@rule
def _mx_quant(call: Call) -> Any:
    """Blocks of 32 neighbours, whose scales lie in pairs."""
    value, _ = real(call.value), _format(call, in_blocks=True)
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
    return [values, scale.moved(lambda part: part.unflatten(-1, (-1, 2)))]


@rule
def _block_quant(call: Call) -> Any:
    """Tiles of 128 neighbours."""
    value, tile, form = real(call.value), call["col_block_size"], _format(call)
    _only(call, min_scale=0, round_mode=form.block_rounding, row_block_size=1, dst_type_max=0)
    if value.shape[-1] % tile:
        raise Undecided("tiles that are cut")
    values, scale = quantising.by_row(
        value.moved(lambda part: part.unflatten(-1, (-1, tile))), form
    )
    return [values.moved(lambda part: part.flatten(-2)), scale.moved(lambda part: part.squeeze(-1))]


@rule
def _quantize(call: Call) -> Num:
    value, scale = real(call.value), call.num("scales")
    shape = [1] * len(value.shape)
    shape[call["axis"]] = -1
    scale = scale.moved(lambda part: part.reshape(shape))
    if call["dtype"] not in (1, 12, torch.int8, torch.qint8):
        raise Undecided(f"{call.name} to {call['dtype']}")
    found = mul(value, scale if call["div_mode"] is False else field.inverse(scale))
    if call["zero_points"] is not None:
        found = add(found, call.num("zero_points").moved(lambda part: part.reshape(shape)))
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
        of_rows = call.num("pertoken_scale").moved(lambda part: part.flatten(-2))
        of_weight = scale.moved(lambda part: part.transpose(1, 2).flatten(0, 1))
        return _as_asked(call, quantising.product_of_blocks(rows, weight, of_rows, of_weight))
    _only(call, scale_dtype=None, pertoken_scale_dtype=None, x1_dtype=HIFLOAT8.number)
    found = field.matmul(quantising.read_as(rows, call["x1_dtype"]), weight)
    found = found if call["bias"] is None else add(found, call.num("bias"))
    if call.dtype == torch.int32:  # the sum, before any scale
        return found
    found = mul(found, scale)
    if call["pertoken_scale"] is not None:
        found = mul(found, call.num("pertoken_scale").moved(lambda part: part.unsqueeze(-1)))
    return _as_asked(call, found)


def _as_asked(call: Call, product: Num) -> Num:
    """The product in the dtype that was asked for: in int8 rounded and saturated."""
    return quantising.saturated(product) if call.dtype == torch.int8 else product


# -- attention, norms and rotations by one operator


@rule
def _attention(call: Call) -> Value:
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    axes = [(name, axis) for name in ("query", "key", "value") for axis in (-2, -1)]
    if any(call.varies(name, axis) for name, axis in axes):
        return opaque(call)
    if call["enable_gqa"]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (
            part.moved(lambda part: part.repeat_interleave(times, -3)) for part in (key, value)
        )
    scale = query.shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
    scores = field.matmul(query, key.moved(lambda part: part.mT))
    scores = mul(scores, real(as_value(scale)))
    if call["is_causal"]:
        mask = field.integers(torch.ones(scores.shape[-2:], dtype=torch.int64).tril())
    if call["is_causal"] or call.holds("attn_mask") == torch.bool:
        given = {"mask": _opposite(mask), "self": scores, "value": -math.inf}
        scores = real(_masked_fill(call.of(torch.ops.aten.masked_fill.Scalar, given)))
    elif mask is not None:
        scores = add(scores, mask)
    return field.matmul(_shares(call, scores, len(scores.shape) - 1), value)


@rule
def _layer_norm(call: Call) -> Any:
    value, rank = call.num("input"), len(call.plain("normalized_shape"))
    axes = list(range(len(value.shape) - rank, len(value.shape)))
    count = field.inverse(_counts(call, axes))
    mean = mul(field.total(value, axes, True), count)
    apart = sub(value, mean)
    variance = mul(field.total(mul(apart, apart), axes, True), count)
    rstd = field.inverse(field.sqrt(add(variance, real(as_value(call["eps"])))))
    found = mul(apart, rstd)
    found = found if call["weight"] is None else mul(found, call.num("weight"))
    found = found if call["bias"] is None else add(found, call.num("bias"))
    return found if call.word == "layer_norm" else [found, mean, rstd]


def rms_norm(value: Num, gamma: Num | None, epsilon: Any, rank: int) -> tuple[Num, Num]:
    axes = list(range(len(value.shape) - rank, len(value.shape)))
    count = prod(value.shape[axis] for axis in axes)
    mean = mul(field.total(mul(value, value), axes, True), field.inverse(field.number(count)))
    here().means.append(mean)
    rstd = field.inverse(field.sqrt(add(mean, real(as_value(epsilon)))))
    normed = mul(value, rstd)
    return (normed if gamma is None else mul(normed, gamma)), rstd


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
    return list(rms_norm(real(call.value), gamma, call["epsilon"], len(gamma.shape)))


@rule
def _npu_add_rms_norm(call: Call) -> Any:
    gamma, both = call.num("gamma"), add(call.num("x1"), call.num("x2"))
    return [*rms_norm(both, gamma, call["epsilon"], len(gamma.shape)), both]


def pairs(value: Num) -> tuple[Num, Num]:
    """The even and the odd elements of the last axis."""
    return value.moved(lambda part: part[..., 0::2]), value.moved(lambda part: part[..., 1::2])


def rotated(value: Num, cos: Num, sin: Num) -> Num:
    """Interleaved pairs in, halves out."""
    even, odd = pairs(value)
    (c0, c1), (s0, s1) = (table.parts(lambda part: part.chunk(2, -1)) for table in (cos, sin))
    halves = [sub(mul(even, c0), mul(odd, s0)), add(mul(odd, c1), mul(even, s1))]
    return field.joined(halves, -1)


def rotated_halves(value: Num, cos: Num, sin: Num) -> Num:
    first, second = value.parts(lambda part: part.chunk(2, -1))
    return add(mul(value, cos), mul(field.joined([neg(second), first], -1), sin))


@rule
def _interleave_rope(call: Call) -> Value:
    return rotated(real(call.value), call.num("cos"), call.num("sin"))


@rule
def _rotary_mul(call: Call) -> Value:
    value, r1, r2 = (real(as_value(item)) for item in list(call.given.values())[:3])
    mode = call["rotary_mode"] or "half"
    if call["rotate"] is not None:
        turned = field.matmul(value, call.num("rotate"))
    elif mode == "half":
        return rotated_halves(value, r1, r2)
    elif mode == "interleave":
        even, odd = pairs(value)
        turned = field.stacked([neg(odd), even], -1).moved(lambda part: part.flatten(-2))
    else:
        return opaque(call)
    return add(mul(value, r1), mul(turned, r2))
