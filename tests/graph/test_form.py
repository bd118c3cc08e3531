"""Constructors keep what is computed: random chains of steps, done to Values and to tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from math import prod

import pytest
import torch
from torch import Tensor

from mla_fusion.graph import bounds
from mla_fusion.graph.form import Form, Value
from mla_fusion.graph.numbers import literal, number
from tests.graph.real import Real

LEAVES = {"a": (4, 5), "wx": (5, 6), "y": (4, 6), "g": (6,), "w": (6, 3), "u": (3, 6, 6)}
LEAVES |= {"u2": (2, 1, 6, 6), "u3": (1, 6, 6), "u4": (1, 2, 2, 6, 6)}
MODEL = ("wx", "g", "w", "u", "u2", "u3", "u4")
FRACTIONS = [Fraction(text) for text in "1 -1 2 1/3 -5/2 1/1024".split()]


class Chain:
    """Values beside the tensors that each step gives."""

    def __init__(self, seed: int) -> None:
        self.rng, self.form = random.Random(seed), Form()
        self.numbers = torch.Generator().manual_seed(seed)
        self.leaves = {
            name: torch.randn(shape, generator=self.numbers, dtype=torch.float64)
            for name, shape in LEAVES.items()
        }
        self.values = {
            name: self.form.leaf(name, shape, torch.float32, name in MODEL)
            for name, shape in LEAVES.items()
        }
        self.x = self.form.dot(self.values["a"], self.values["wx"])
        start = self.x, self.leaves["a"] @ self.leaves["wx"]
        self.known = [start, (self.values["y"], self.leaves["y"])]
        self.known += [(self.values["g"], self.leaves["g"])]
        self.value, self.tensor = self.rng.choice(self.known)

    def run(self) -> None:
        for _ in range(self.rng.randint(3, 8)):
            of = self.rng.choice(STEPS)
            for _ in range(2 if of in TWICE and self.rng.random() < 0.7 else 1):
                self.step(of)

    def step(self, of: Step) -> None:
        found = of(self, self.value, self.tensor)
        if found is not None and found[1].dim() and found[1].numel() < 3000:
            self.value, self.tensor = found
            assert self.value.shape == self.tensor.shape
            self.known.append(found)

    def axis(self, value: Value) -> int:
        return self.rng.randrange(len(value.shape))

    def other(self, value: Value) -> tuple[Value, Tensor]:
        """One that is known, of a shape that broadcasts with that of a Value."""
        form, (one, tensor) = self.form, self.rng.choice(self.known)
        if one.shape == value.shape:
            return one, tensor
        if prod(one.shape) == prod(value.shape):
            return form.reshape(one, value.shape), tensor.reshape(value.shape)
        axes = tuple(range(len(one.shape)))
        return form.reduce(one, axes), tensor.sum()


Made = tuple[Value, Tensor] | None
Step = Callable[[Chain, Value, Tensor], Made]


def reshaped(c: Chain, value: Value, tensor: Tensor) -> Made:
    sizes = [1] * c.rng.randint(0, 1)
    rest = prod(value.shape)
    for prime in (2, 3, 5, 7):
        while rest % prime == 0:
            rest //= prime
            if sizes and c.rng.random() < 0.4:
                sizes[-1] *= prime
            else:
                sizes.append(prime)
    c.rng.shuffle(sizes)
    shape = *sizes, *([rest] if rest > 1 else [])
    return c.form.reshape(value, shape), tensor.reshape(shape)


def flattened(c: Chain, value: Value, tensor: Tensor) -> Made:
    shape = (4, -1) if tensor.numel() % 4 == 0 else (-1,)
    found = tensor.reshape(shape)
    return c.form.reshape(value, found.shape), found


def permuted(c: Chain, value: Value, tensor: Tensor) -> Made:
    order = c.rng.sample(range(tensor.dim()), tensor.dim())
    return c.form.permute(value, order), tensor.permute(order)


def expanded(c: Chain, value: Value, tensor: Tensor) -> Made:
    at = c.rng.randint(0, tensor.dim())
    if c.rng.random() < 0.3:  # as a broadcast has it
        wide = 2, *value.shape
        return c.form.expand(value, wide), tensor.expand(wide)
    one = *value.shape[:at], 1, *value.shape[at:]
    wide = *value.shape[:at], c.rng.randint(2, 3), *value.shape[at:]
    return c.form.expand(c.form.reshape(value, one), wide), tensor.reshape(one).expand(wide)


def sliced(c: Chain, value: Value, tensor: Tensor) -> Made:
    axis = c.axis(value)
    size = value.shape[axis]
    start, step = c.rng.randrange(size), c.rng.randint(1, 2)
    stop = c.rng.randint(start + 1, size)
    places = torch.arange(start, stop, step)
    return c.form.slice(value, axis, start, stop, step), tensor.index_select(axis, places)


def joined(c: Chain, value: Value, tensor: Tensor) -> Made:
    axis = c.axis(value)
    at = c.rng.randint(0, value.shape[axis])
    times = c.rng.choice(FRACTIONS)
    parts = [c.form.slice(value, axis, 0, at), c.form.slice(value, axis, at, value.shape[axis])]
    tensors = [tensor.narrow(axis, 0, at), tensor.narrow(axis, at, tensor.shape[axis] - at)]
    parts.append(c.form.scaled(value, number(times)))
    tensors.append(tensor * float(times))
    order = c.rng.sample(range(3), c.rng.randint(2, 3))
    return (
        c.form.join([parts[k] for k in order], axis),
        torch.cat([tensors[k] for k in order], axis),
    )


def joined_with_another(c: Chain, value: Value, tensor: Tensor) -> Made:
    other, its = c.other(value)
    if other.shape != value.shape:
        return None
    axis = c.axis(value)
    return c.form.join([value, other, value], axis), torch.cat((tensor, its, tensor), axis)


def taken(c: Chain, value: Value, tensor: Tensor) -> Made:
    axis = c.axis(value)
    places = [c.rng.randrange(value.shape[axis]) for _ in range(c.rng.randint(1, 5))]
    return c.form.take(value, axis, places), tensor.index_select(axis, torch.tensor(places))


def gathered(c: Chain, value: Value, tensor: Tensor) -> Made:
    axis = c.axis(value)
    index = torch.randint(0, value.shape[axis], (2, 2), generator=c.numbers)
    name = f"index {len(c.leaves)}"
    c.leaves[name] = index
    made = c.form.gather(value, axis, c.form.leaf(name, (2, 2), torch.int64, False))
    return made, tensor.index_select(axis, index.reshape(-1)).reshape(made.shape)


def reduced(c: Chain, value: Value, tensor: Tensor) -> Made:
    axes, keep = [c.axis(value)], c.rng.random() < 0.5
    if tensor.dim() < 2 and not keep:
        return None
    return c.form.reduce(value, axes, keep), tensor.sum(axes, keep)


def averaged(c: Chain, value: Value, tensor: Tensor) -> Made:
    axis = c.axis(value)
    return c.form.mean(value, [axis]), tensor.mean(axis, True)


def added(c: Chain, value: Value, tensor: Tensor) -> Made:
    """With another, itself and a number; it may be that all but the number cancels."""
    other, its = c.other(value)
    times = c.rng.choices(FRACTIONS, k=3)
    terms = list(zip(times, (value, other, value), strict=True))
    offset = c.rng.choice((Fraction(0), Fraction(1), Fraction(-2, 3)))
    found = float(times[0]) * tensor + float(times[1]) * its + float(times[2]) * tensor
    return c.form.total(terms, offset), found + float(offset)


def multiplied(c: Chain, value: Value, tensor: Tensor) -> Made:
    other, its = c.other(value)
    powers = c.rng.choices((1, 1, 2, 3), k=2)
    times = c.rng.choice(FRACTIONS)
    found = float(times) * tensor ** powers[0] * its ** powers[1]
    factors = zip((value, other), powers, strict=True)
    return c.form.product(factors, number(times)), found


def rooted(c: Chain, value: Value, tensor: Tensor) -> Made:
    """Of what is above 0."""
    exponent = c.rng.choice((Fraction(1, 2), Fraction(-1, 2), Fraction(-1), Fraction(3, 2)))
    times = c.rng.choice((Fraction(1), Fraction(1, 7), Fraction(9, 4)))
    square = c.form.power(value, 2)
    if exponent > 0 and c.rng.random() < 0.3:
        return c.form.power(square, exponent), (tensor**2) ** float(exponent)
    radicand = c.form.total([(times, square)], Fraction(1, 10))
    found = (float(times) * tensor**2 + 0.1) ** float(exponent)
    return c.form.power(radicand, exponent), found


def scaled_by_a_root(c: Chain, value: Value, tensor: Tensor) -> Made:
    times = number(c.rng.choice((2, 3, 12))).power(c.rng.choice((Fraction(1, 2), Fraction(-1, 3))))
    assert times is not None
    return c.form.scaled(value, times), tensor * float(times)


def normed(c: Chain, value: Value, tensor: Tensor) -> Made:
    squares = c.form.mean(c.form.power(value, 2), [-1])
    step = c.form.power(c.form.total([(Fraction(1), squares)], Fraction(1, 10**6)), Fraction(-1, 2))
    return c.form.times(value, step), tensor * (tensor.square().mean(-1, True) + 1e-6).rsqrt()


def gated(c: Chain, value: Value, tensor: Tensor) -> Made:
    return c.form.function("sigmoid", value), tensor.sigmoid()


def cast(c: Chain, value: Value, tensor: Tensor) -> Made:
    """There and back: a float is not rounded here."""
    narrow = c.form.cast(value, torch.bfloat16)
    return c.form.bare(c.form.cast(narrow, torch.float32), c.rng.random() < 0.5), tensor


def multiplied_by_a_weight(c: Chain, value: Value, tensor: Tensor) -> Made:
    if value.shape[-1:] != (6,):
        return None
    return c.form.dot(value, c.values["w"]), tensor @ c.leaves["w"]


def multiplied_by_matrices(c: Chain, value: Value, tensor: Tensor) -> Made:
    """Of all, of one, or of two leading axes."""
    if value.shape[-1:] != (6,) or tensor.numel() > 300:
        return None
    name, form = c.rng.choice(("u", "u2", "u3", "u4")), c.form
    weight, its = c.values[name], c.leaves[name]
    left, rows = form.reshape(value, (tensor.numel() // 6, 6)), tensor.reshape(-1, 6)
    lead = tuple(torch.broadcast_shapes((2, 1, 1), its.shape[:-2]))
    wide = *lead, 6, 6
    left = form.expand(left, (*lead, *rows.shape))
    return form.dot(left, form.expand(weight, wide)), rows.expand(*lead, *rows.shape) @ its


def multiplied_by_another(c: Chain, value: Value, tensor: Tensor) -> Made:
    if tensor.dim() < 2:
        return None
    other, its = c.rng.choice(c.known)
    other, its = (other, its) if other.shape == value.shape else (value, tensor)
    times = number(c.rng.choice(FRACTIONS))
    other = c.form.scaled(c.form.transposed(other), times)
    return c.form.dot(value, other), tensor @ its.mT * float(times)


def weight_on_the_left(c: Chain, value: Value, tensor: Tensor) -> Made:
    if tensor.dim() != 2 or value.shape[0] != 6 or value.model:
        return None
    left = c.form.transposed(c.values["w"])
    return c.form.dot(left, value), c.leaves["w"].t() @ tensor


STEPS: list[Step] = [
    reshaped, flattened, flattened, permuted, expanded, sliced, joined, joined_with_another, taken,
    gathered, reduced, averaged, added, added, multiplied, multiplied, rooted, scaled_by_a_root,
    normed, gated, cast, multiplied_by_a_weight, multiplied_by_matrices, multiplied_by_another,
    weight_on_the_left,
]  # fmt: skip
TWICE = permuted, sliced, taken  # moves that compose
SEEDS = 400


def assert_close(found: Tensor, wanted: Tensor) -> None:
    scale = max(float(wanted.abs().max()), 1.0)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9 * scale)


def chains(few: int = 1) -> list[Chain]:
    found = []
    for seed in range(SEEDS // few):
        chain = Chain(seed)
        chain.run()
        found.append(chain)
    return found


def test_a_chain_is_what_its_steps_compute() -> None:
    for chain in chains():
        assert_close(Real(chain.leaves)(chain.value), chain.tensor)


@pytest.mark.parametrize("by", ["another", "a number", "a multiple", "a sum"])
def test_substitution_is_the_same_chain_of_another_value(by: str) -> None:
    for chain in chains(4):
        form, x = chain.form, chain.x
        if by == "another":
            new = form.leaf("other", x.shape, torch.float32, False)
        elif by == "a number":
            new = form.filled(Fraction(1, 2), x.shape, torch.float32)
        elif by == "a multiple":
            new = form.scaled(x, number(Fraction(-2, 3)))
        else:
            new = form.plus(x, form.expand(chain.values["g"], x.shape))
        leaves = chain.leaves | {"other": chain.leaves["y"] + 1.0}
        given = {x: Real(leaves)(new)}
        wanted = Real(leaves, given)(chain.value)
        if not bool(wanted.isfinite().all()):
            continue
        assert_close(Real(leaves)(form.substituted(chain.value, {x: new})), wanted)


# -- whole numbers


def test_bounds_hold_every_element() -> None:
    for seed in range(200):
        rng, form = random.Random(seed), Form()
        kinds = {"i": torch.int8, "j": torch.int32, "k": torch.int64}
        spread = {"i": 127, "j": 2**31 - 1, "k": 2**40}
        numbers = torch.Generator().manual_seed(seed)
        leaves = {
            name: torch.randint(-most - (name != "k"), most + 1, (9,), generator=numbers)
            for name, most in spread.items()
        }
        known = [form.leaf(name, (9,), kind, False) for name, kind in kinds.items()]
        known += [form.count(9), form.constant(leaves["i"] % 7)]
        for _ in range(6):
            one, other = rng.choice(known), rng.choice(known)
            step = rng.randrange(7)
            if step == 0:
                terms = [(Fraction(rng.randint(-3, 3)), one), (Fraction(1), other)]
                known.append(form.total(terms, rng.randint(-5, 5), torch.int64))
            elif step == 1:
                known.append(form.product([(one, 1), (other, 1)], number(-2), torch.int64))
            elif step == 2:
                divisor = form.number(rng.randint(1, 9), torch.int64)
                known.append(form.function("quotient", one, divisor, dtype=torch.int64))
            elif step == 3:
                known.append(form.cast(one, rng.choice((torch.int8, torch.int32, torch.int64))))
            elif step == 4:
                known.append(form.join([form.slice(one, 0, 0, 4), form.slice(other, 0, 4, 9)], 0))
            elif step == 5:
                known.append(form.expand(form.reduce(form.slice(one, 0, 0, 3), [0]), (9,)))
            else:
                known.append(form.gather(one, 0, form.constant(torch.arange(9).flip(0))))
            least_and_most = bounds.of(known[-1])
            if least_and_most is None:
                continue
            if max(map(abs, least_and_most)) >= 2**62:
                known.pop()
                continue
            found = Real(leaves)(known[-1])
            assert least_and_most[0] <= int(found.min()), (seed, known[-1])
            assert int(found.max()) <= least_and_most[1], (seed, known[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_literal_is_the_number_that_was_written(dtype: torch.dtype) -> None:
    written = [1e-6, 0.1, 1 / 1536, 1.25, -0.7, 3.0, 0.0, 1e-30, 65504.0]
    roots = {192: Fraction(-1, 2), 3: Fraction(1, 2)}
    for given in [*written, *(float(base) ** float(power) for base, power in roots.items())]:
        held = torch.tensor(given, dtype=dtype).item()
        found = torch.tensor(float(literal(held, dtype)), dtype=dtype).item()
        assert found == pytest.approx(held, rel=1e-15, abs=0)
    if dtype != torch.bfloat16:
        assert literal(torch.tensor(1e-6, dtype=dtype).item(), dtype) == number(Fraction(1, 10**6))
    for base, power in roots.items():
        assert literal(float(base) ** float(power)) == number(base).power(power)


def test_a_join_has_a_dtype_that_holds_all_parts() -> None:
    form, dtypes = Form(), (torch.int8, torch.bfloat16, torch.float16)
    parts = [form.leaf(str(dtype), (2,), dtype, True) for dtype in dtypes]
    assert [form.join(parts[:n], 0).dtype for n in (1, 2, 3)] == [*dtypes[:2], torch.float32]
