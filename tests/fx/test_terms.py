"""Integers as terms: each rule as an equality, and what comes near it as none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .tracing import POSITIONS, TOKENS, floats, integers, masks, outputs, view

Fn = Callable[..., Any]
EDGES = [
    0,
    1,
    5,
    15,
    16,
    17,
    257,
    4095,
    4096,
    20011,
    2**24 + 1,
    2**31 - 1,
    2**31,
    2**40 + 7,
    -1,
    -16,
    -17,
]


def _div(mode: str) -> Fn:
    return lambda s, by: torch.div(s, by, rounding_mode=mode)


# Pairs of functions of s (int64, of any sign).
EQUAL: dict[str, tuple[Fn, Fn]] = {
    "quotient and remainder": (lambda s: (s // 16) * 16 + s % 16, lambda s: s),
    "the other way round": (lambda s: s % 16 + 16 * (s // 16), lambda s: s),
    "by shift and mask": (lambda s: ((s >> 4) << 4) + (s & 15), lambda s: s),
    "mixed": (lambda s: (s >> 4) * 16 + s.remainder(16), lambda s: s),
    "remainder by subtraction": (lambda s: s - (s // 12) * 12, lambda s: s % 12),
    "and with the factor first": (lambda s: s - 12 * (s // 12), lambda s: s % 12),
    "shift and quotient": (lambda s: s >> 3, lambda s: s // 8),
    "quotient by div": (lambda s: _div("floor")(s, 8), lambda s: s // 8),
    "mask and remainder": (lambda s: s & 127, lambda s: s % 128),
    "shift and product": (lambda s: s << 5, lambda s: s * 32),
    "plus nothing": (lambda s: s + 0, lambda s: s),
    "times one": (lambda s: 1 * s, lambda s: s),
    "less nothing": (lambda s: s - 0, lambda s: s),
    "sums commute": (lambda s: s + (s // 2), lambda s: (s // 2) + s),
    "products commute": (lambda s: s * (s % 3), lambda s: (s % 3) * s),
    "reshaped": (lambda s: s.view(2, -1).flatten().unsqueeze(-1), lambda s: s),
    "widened": (lambda s: (s % 16).int().long(), lambda s: s % 16),
    "truncation of what is not negative": (
        lambda s: _div("trunc")(s % 64, 16),
        lambda s: (s % 64) // 16,
    ),
    "fmod of what is not negative": (lambda s: (s % 64).fmod(16), lambda s: (s % 64) % 16),
    "one element literals": (lambda s: s + torch.full((1,), 3), lambda s: s + 3),
    "floats of one position": (lambda s: s.view(2, -1).float().flatten(), lambda s: s.float()),
    "gathers of one place": (
        lambda s: torch.arange(5, 45)[s % 32],
        lambda s: torch.arange(5, 45)[s & 31],
    ),
}

UNEQUAL: dict[str, tuple[Fn, Fn]] = {
    "remainder of another size": (lambda s: (s // 16) * 16 + s % 8, lambda s: s),
    "product with another size": (lambda s: (s // 16) * 8 + s % 16, lambda s: s),
    "remainder of another value": (lambda s: (s // 16) * 16 + (s + 1) % 16, lambda s: s),
    "ring buffer": (lambda s: (s // 16) % 4 * 16 + s % 16, lambda s: s),
    "truncated": (lambda s: _div("trunc")(s, 16), lambda s: s // 16),
    "truncated and put together": (lambda s: _div("trunc")(s, 16) * 16 + s % 16, lambda s: s),
    "fmod": (lambda s: s.fmod(16), lambda s: s % 16),
    "masked by no power of two": (lambda s: s & 11, lambda s: s % 12),
    "clamped": (lambda s: s.clamp(max=4095), lambda s: s),
    "wrapped at 4096": (lambda s: s % 4096, lambda s: s),
    "one number replaced": (lambda s: torch.where(s == 20011, 0, s), lambda s: s),
    "narrowed to int32": (lambda s: (s * 3).int().long(), lambda s: s * 3),
    "narrowed to int8": (lambda s: (s % 256).to(torch.int8), lambda s: s % 256),
    "through bfloat16": (lambda s: s.bfloat16().long(), lambda s: s),
    "through float32": (lambda s: s.float().long(), lambda s: s),
    "bfloat16 for float32": (lambda s: s.bfloat16().float(), lambda s: s.float()),
    "float32 for float64": (lambda s: s.float().double(), lambda s: s.double()),
    "sides of a difference": (lambda s: s - s // 2, lambda s: s // 2 - s),
    "shifted by another": (lambda s: s >> 3, lambda s: s >> 4),
    "in another order": (lambda s: s.flip(0), lambda s: s),
    "transposed": (lambda s: s.view(2, -1).t().reshape(-1), lambda s: s),
    "scaled sum": (lambda s: torch.add(s, s // 2, alpha=2), lambda s: s + s // 2),
    "product in int32": (
        lambda s: ((s % 65536).int() * 65536).long(),
        lambda s: (s % 65536) * 65536,
    ),
    "added one": (lambda s: s + 1, lambda s: s),
    "negated": (lambda s: -s, lambda s: s),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_terms(name: str) -> None:
    graph = view(lambda s: tuple(f(s) for f in EQUAL[name]), integers(6))
    a, b = outputs(graph)
    assert graph.terms.same(a, b)


@pytest.mark.parametrize("name", EQUAL)
def test_equal_terms_hold_equal_numbers(name: str) -> None:
    """The rules themselves, on both sides of every edge."""
    values = torch.tensor([*EDGES, *(edge + 1 for edge in EDGES)])
    a, b = (f(values) for f in EQUAL[name])
    assert torch.equal(a.reshape(-1), b.reshape(-1))


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_terms(name: str) -> None:
    graph = view(lambda s: tuple(f(s) for f in UNEQUAL[name]), integers(6))
    a, b = outputs(graph)
    assert not graph.terms.same(a, b)


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_terms_hold_unequal_numbers(name: str) -> None:
    values = torch.tensor([*EDGES, 65535])
    a, b = (f(values) for f in UNEQUAL[name])
    assert not torch.equal(a.reshape(-1), b.reshape(-1))


# of s, and sizes a and b, which are symbols
OF_SIZES: dict[str, tuple[Fn, Fn, bool]] = {
    "put together": (lambda s, a, b: (s // a) * a + s % a, lambda s, a, b: s, True),
    "by subtraction": (lambda s, a, b: s - _div("floor")(s, a) * a, lambda s, a, b: s % a, True),
    "of twice the size": (lambda s, a, b: s // (2 * a), lambda s, a, b: s // (a + a), True),
    "remainder of another size": (lambda s, a, b: (s // a) * a + s % b, lambda s, a, b: s, False),
    "product with another size": (lambda s, a, b: (s // a) * b + s % a, lambda s, a, b: s, False),
    "a number that it may be": (lambda s, a, b: s // TOKENS, lambda s, a, b: s // a, False),
    "by what may be nothing": (
        lambda s, a, b: (s // (a - 5)) * (a - 5) + s % (a - 5),
        lambda s, a, b: s,
        False,
    ),
}


@pytest.mark.parametrize("name", OF_SIZES)
def test_terms_of_symbolic_sizes(name: str) -> None:
    *both, are_same = OF_SIZES[name]
    graph = view(
        lambda s, v: tuple(f(s, *v.shape) for f in both),
        integers(6),
        floats(TOKENS, POSITIONS),
        symbolic=True,
    )
    a, b = outputs(graph)
    assert graph.terms.same(a, b) == are_same


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_sums_wrap_at_the_width_in_which_they_are_made(dtype: torch.dtype) -> None:
    graph = view(lambda s: ((s + 1).long(), s.long() + 1), integers(6, dtype=dtype))
    a, b = outputs(graph)
    assert not graph.terms.same(a, b)


def test_two_inputs_are_two_values() -> None:
    graph = view(lambda s, t: (s + t, t + s, s - t, t - s, s, t), integers(6), integers(6))
    ab, ba, difference, turned, s, t = outputs(graph)
    assert graph.terms.same(ab, ba)
    assert not graph.terms.same(difference, turned)
    assert not graph.terms.same(s, t)


def test_what_is_broadcast_is_no_plain_sum() -> None:
    """Which element of a column meets which of a row, the shapes say."""
    graph = view(
        lambda s, t: (s.view(6, 1) - t.view(1, 6), s.view(1, 6) - t.view(6, 1)),
        integers(6),
        integers(6),
    )
    a, b = outputs(graph)
    assert not graph.terms.same(a, b)


def test_gathers_of_one_table_at_one_place() -> None:
    def gathers(table: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return table[s // 16], table[s >> 4], table[s % 16], table[(s + 16) // 16]

    graph = view(gathers, integers(6), integers(6))
    a, b, c, d = outputs(graph)
    assert graph.terms.same(a, b)
    assert not graph.terms.same(a, c) and not graph.terms.same(a, d)


def test_masks_are_compared_by_what_they_are_made_of() -> None:
    def chosen(m: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return torch.where(m, s, 0), torch.where(m, s + 0, 0), torch.where(~m, s, 0)

    graph = view(chosen, masks(6), integers(6))
    a, b, c = outputs(graph)
    assert graph.terms.same(a, b) and not graph.terms.same(a, c)


def test_random_integers_equal_nothing() -> None:
    graph = view(lambda s: (s + torch.randint(9, (6,)), s + torch.randint(9, (6,))), integers(6))
    a, b = outputs(graph)
    assert not graph.terms.same(a, b)


def test_quotient_and_remainder_name_their_number() -> None:
    graph = view(lambda s: (s >> 4, s & 15, s % 8, (s + 1) & 15, s // 8), integers(6))
    block, place, narrower, later, smaller = outputs(graph)
    terms = graph.terms
    (s,) = graph.gm.graph.find_nodes(op="placeholder")
    assert terms.quotient_and_remainder(block, place, 16) == terms.number(s)
    assert terms.quotient_and_remainder(block, place, 8) is None
    assert terms.quotient_and_remainder(block, narrower, 16) is None
    assert terms.quotient_and_remainder(block, later, 16) is None
    assert terms.quotient_and_remainder(smaller, place, 16) is None
    assert terms.quotient_and_remainder(place, block, 16) is None


def test_symbolic_sizes_are_part_of_a_term() -> None:
    def positions(v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.arange(v.shape[0]) + 0,
            torch.arange(v.shape[0]) + 0,
            torch.arange(w.shape[0]) + 0,
            v[:, 0],
            w[:, 0],
        )

    graph = view(positions, floats(TOKENS, 4), floats(11, 4), symbolic=True)
    a, b, c, *_ = outputs(graph)
    assert graph.terms.same(a, b) and not graph.terms.same(a, c)
