"""The field against exact rational arithmetic, and rules against torch, on small values."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from mla_fusion.prove import field, operators
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
