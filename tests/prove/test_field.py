"""The field against exact rational arithmetic, and rules against torch, on small values."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from mla_fusion.prove import field, operators, quantising
from mla_fusion.prove.cells import Cells
from mla_fusion.prove.field import Num, P

aten = torch.ops.aten


def of(values: list[Fraction], *shape: int) -> Num:
    return Num(torch.tensor([field.residue(value) for value in values]).reshape(shape))


def drawn(rng: random.Random, count: int) -> list[Fraction]:
    return [Fraction(rng.randint(-99, 99), rng.randint(1, 99)) for _ in range(count)]


def run(op: object, *args: object, **kwargs: object) -> Num:
    found = operators.run(operators.called(op, args, kwargs))
    assert isinstance(found, Num)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_products_are_those_of_rationals(seed: int) -> None:
    rng = random.Random(seed)
    a, b = drawn(rng, 6), drawn(rng, 12)
    wanted = [
        sum((a[3 * i + k] * b[4 * k + j] for k in range(3)), Fraction(0))
        for i in range(2)
        for j in range(4)
    ]
    found = of(a, 2, 3) @ of(b, 3, 4)
    assert found.re.flatten().tolist() == [field.residue(value) for value in wanted]


def test_products_of_long_rows_are_exact() -> None:
    a, b = field.random("a", (2, 5000)), field.random("b", (5000, 3))
    rows, columns = a.re.tolist(), b.re.T.tolist()
    wanted = [
        sum(x * y for x, y in zip(row, column, strict=True)) % P
        for row in rows
        for column in columns
    ]
    assert (a @ b).re.flatten().tolist() == wanted


@pytest.mark.parametrize("seed", range(5))
def test_a_norm_squared_is_that_of_rationals(seed: int) -> None:
    """``(x * rsqrt(mean(x ** 2) + eps)) ** 2``, in which no root is left."""
    values = drawn(random.Random(seed), 8)
    mean = sum(value * value for value in values) / 8 + Fraction(1, 1000000)
    normed, _ = operators.rms_norm(of(values, 1, 8), None, 1e-6, 1)
    squares = normed * normed
    assert squares.re.flatten().tolist() == [
        field.residue(value * value / mean) for value in values
    ]
    assert squares.im is None or not squares.im.any()


def test_each_element_has_a_root() -> None:
    values = field.random("values", (1000,))
    root = field.sqrt(values)
    assert field.equal(root * root, values)
    assert field.equal(field.inverse(root) * root, field.number(1))


@pytest.mark.parametrize("n", [2, 3, 5, 7, 192, 512, 576, 1536, 7168])
def test_roots_of_sizes_go_through_products(n: int) -> None:
    values = field.random("values", (100,))
    apart = field.sqrt(values) / field.sqrt(field.number(n))
    assert field.equal(apart, field.sqrt(values / field.number(n)))
    assert field.equal(field.number(n**0.5), field.sqrt(field.number(n)))


@pytest.mark.parametrize(
    ("literal", "wanted"),
    [
        (1e-6, Fraction(1, 10**6)),
        (9.999999974752427e-07, Fraction(1, 10**6)),  # the float32
        (1 / 1536, Fraction(1, 1536)),
        (25 / 24, Fraction(25, 24)),
        (1536 * 1e-5, Fraction(1536, 10**5)),
        (0.0, Fraction(0)),
        (-2.5, Fraction(-5, 2)),
        (1e30, Fraction(10**30)),
    ],
)
def test_literals_are_what_was_written(literal: float, wanted: Fraction) -> None:
    assert field.rational(literal) == wanted


@pytest.mark.parametrize(
    ("a", "b"), [(1e-6, 1.000000001e-6), (1.0, 1 + 2.0**-40), (0.5, 0.5 + 1e-12)]
)
def test_literals_next_to_each_other_are_two(a: float, b: float) -> None:
    assert not field.equal(field.number(a), field.number(b))


def test_a_number_is_seen_with_both_signs() -> None:
    """``sqrt(s * s)`` is no s."""
    same = []
    for point in range(3):
        with field.at(field.Point(point)):
            number = field.of_both_signs("s", (1,), 0, 3)
            same.append(field.equal(field.sqrt(number * number), number))
    assert not all(same)


def test_functions_are_equal_for_equal_arguments_alone() -> None:
    a, b = field.random("a", (50,)), field.random("b", (50,))
    sums = run(aten.tanh.default, a + b), run(aten.tanh.default, b + a)
    assert field.equal(*sums)
    assert not (sums[0].re == run(aten.tanh.default, a).re).any()
    assert not (run(aten.tanh.default, a).re == run(aten.sigmoid.default, a).re).any()
    assert not (run(aten.clamp.default, a, -1e30, 1e30).re == a.re).any()


def test_columns_of_a_weight_are_known_by_their_elements() -> None:
    """A weight that is moved about gives the products of the columns it then has; none is drawn for
    it.
    """
    x = field.random("x", (3, 6))
    weight = Num(None, cells=Cells.of_input(0, (8, 6)))
    whole = x @ weight.moved(lambda part: part.t())
    halves = [weight.moved(lambda part, k=k: part[4 * k : 4 * k + 4].t()) for k in (1, 0)]
    joined = field.joined(halves, -1)
    assert torch.equal((x @ joined).re, whole.re.roll(4, -1))
    turned = x @ weight.moved(lambda part: part.flip(-1).t())
    assert not (turned.re == whole.re).any()
    twice = x * field.number(3) @ weight.moved(lambda part: part.t())
    assert field.equal(twice, whole * field.number(3))
    padded = weight.moved(lambda part: torch.nn.functional.pad(part.t(), (0, 2), value=-1))
    assert torch.equal((x @ padded).re, torch.nn.functional.pad(whole.re, (0, 2)))


@pytest.mark.parametrize(
    ("write", "is_int8"),
    [
        (lambda v: v.round().clamp(-128, 127), True),
        (lambda v: v.clamp(-128, 127).round(), True),
        (lambda v: v.round(), False),
        (lambda v: v.round().clamp(-127, 127), False),
        (lambda v: v.clamp(-128, 127), False),
        (lambda v: v.round().clamp(-128, 127) + 0.0 * v, False),
    ],
)
def test_int8_is_one_function(write: object, is_int8: bool) -> None:
    """Steps in the field, called as torch writes them."""
    names = {"round": aten.round.default, "clamp": aten.clamp.default}

    class Written:
        def __init__(self, value: Num) -> None:
            self.value = value

        def round(self) -> Written:
            return Written(run(names["round"], self.value))

        def clamp(self, least: float, most: float) -> Written:
            return Written(run(names["clamp"], self.value, least, most))

        def __add__(self, other: Written) -> Written:
            return Written(self.value + other.value)

        def __rmul__(self, factor: float) -> Written:
            return Written(run(aten.mul.Tensor, self.value, factor))

    rows = field.random("rows", (4, 16))
    found = write(Written(rows)).value  # type: ignore[operator]
    assert (
        field.equal(quantising.to_bytes(found, torch.int8), quantising.saturated(rows)) is is_int8
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.int8])
def test_a_product_of_bytes_in_the_dtype_that_it_is_asked_for(dtype: torch.dtype) -> None:
    with field.at(field.Point()):
        x, weight = field.random("x", (4, 16)), field.random("weight", (16, 8))
        scale, token = field.random("scale", (8,)), field.random("token", (4,))
        given = operators.called(
            torch.ops.npu.npu_quant_matmul.default,
            (x, weight, scale),
            {"pertoken_scale": token},
            dtype=dtype,
        )
        found = operators.run(given)
        sums = x @ weight
        scaled = sums * scale
        scaled = scaled * token.moved(lambda part: part.unsqueeze(-1))
        wanted = {
            torch.bfloat16: scaled,
            torch.int32: sums,
            torch.int8: quantising.saturated(scaled),
        }
        assert field.equal(found, wanted[dtype])


def test_rows_brought_to_127_need_no_saturation() -> None:
    with field.at(field.Point()):
        rows = field.random("rows", (4, 16))
        values, step = quantising.by_row(rows)
        brought = rows / step
        assert field.equal(quantising.to_bytes(quantising.rounded(brought), torch.int8), values)
        twice = quantising.rounded(brought * field.number(2))
        doubled = quantising.saturated(brought * field.number(2))
        assert not field.equal(quantising.to_bytes(twice, torch.int8), doubled)


@pytest.mark.parametrize(
    ("start", "end", "fixed", "plain"),
    [
        (0, 32, True, True),
        (3, 8, True, True),
        (-32, 1 << 62, True, False),  # the last of as many as there are in this run
        (0, 32, False, False),  # as many as there are, and no more than 32
    ],
)
def test_places_that_literals_name(start: int, end: int, fixed: bool, plain: bool) -> None:
    """Along an axis that is longer in other runs: the same places in each, or rows of a name."""
    value = field.random("values", (37, 4))
    wanted = value.moved(lambda part: part[start:end])
    found = operators.run(
        operators.called(
            aten.slice.Tensor,
            (value, 0, start, end),
            {},
            shape=wanted.shape,
            varies=lambda name, axis: axis == 0 and (name == "self" or not fixed),
            keeps=lambda axis: False,
        )
    )
    assert field.equal(found, wanted) == plain


def test_more_places_than_this_run_has() -> None:
    value = field.random("values", (5, 4))
    of_self = {"varies": lambda name, axis: name == "self", "keeps": lambda axis: False}
    call = operators.called(aten.slice.Tensor, (value, 0, 0, 32), {}, shape=(32, 4), **of_self)
    with pytest.raises(field.Undecided):
        operators.run(call)


def test_parts_by_symbolic_sizes_are_rows_of_that_name() -> None:
    def parts(first: str, second: str, axis: int = 0) -> list[Num]:
        sizes = [operators.Abstract(2, first), operators.Abstract(3, second)]
        call = operators.called(
            aten.split_with_sizes.default,
            (value, sizes, axis),
            {},
            varies=lambda name, axis: axis == 0,
        )
        found = operators.run(call)
        assert isinstance(found, list)
        return found

    with field.at(field.Point()):
        value = field.random("value", (5, 4))
        one, other = parts("s", "t")
        assert one.shape == (2, 4) and other.shape == (3, 4)
        assert field.equal(one, parts("s", "t")[0])
        assert not field.equal(one, parts("t", "s")[0])
        plain = Num(value.re[:2])
        assert not field.equal(one, plain), "of this run alone"


def test_a_diagonal_of_tokens_is_of_tokens_with_tokens() -> None:
    def diagonal(value: Num, of_tokens: set[int], *places: int) -> Num:
        shape = value.re.diagonal(*places).shape
        call = operators.called(
            aten.diagonal.default,
            (value, *places),
            {},
            shape=tuple(shape),
            varies=lambda name, axis: axis in of_tokens,
        )
        found = operators.run(call)
        assert isinstance(found, Num)
        return found

    with field.at(field.Point()):
        value = field.random("value", (5, 5, 3))
        own = Num(value.re.diagonal())
        assert field.equal(diagonal(value, set()), own)
        assert field.equal(diagonal(value, {0, 1}), own)
        assert not field.equal(diagonal(value, {0}), own)
        beside = Num(value.re.diagonal(1))
        assert field.equal(diagonal(value, {2}, 1), beside)
        assert not field.equal(diagonal(value, {0, 1}, 1), beside)
