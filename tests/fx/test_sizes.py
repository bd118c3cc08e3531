"""Symbolic sizes: equal for every value of their symbols or not, and the numbers that stand for
them.
"""

from __future__ import annotations

from typing import Any

import pytest

from mla_fusion.fx.sizes import Binding, SizeNodes, exceeds_one, is_symbolic, same, same_shape
from tests.fx.tracing import POSITIONS, SEQUENCES, TOKENS, floats, inputs, outputs, view


def sizes() -> tuple[Any, Any, Any]:
    """Three symbols."""
    graph = view(
        lambda a, b: (a, b), floats(TOKENS, 4), floats(SEQUENCES, POSITIONS), symbolic=True
    )
    (t, _), (s, p) = (node.meta["val"].shape for node in inputs(graph))
    return t, s, p


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda t, s: t, lambda t, s: t),
        (lambda t, s: t + s, lambda t, s: s + t),
        (lambda t, s: t * 2, lambda t, s: t + t),
        (lambda t, s: t * t // t, lambda t, s: t),
        (lambda t, s: t * s + s, lambda t, s: s + s * t),
    ],
)
def test_equal_sizes(a: Any, b: Any) -> None:
    t, s, _ = sizes()
    assert same(a(t, s), b(t, s)) and same_shape([4, a(t, s)], [4, b(t, s)])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda t, s: t, lambda t, s: s),
        (lambda t, s: t, lambda t, s: TOKENS),  # the example's size is not every size
        (lambda t, s: t + 1, lambda t, s: t),
        (lambda t, s: t // 2 * 2, lambda t, s: t),
        (lambda t, s: (t + 1) // 2 * 2, lambda t, s: t + 1),
        (lambda t, s: t * s, lambda t, s: t + s),
    ],
)
def test_unequal_sizes(a: Any, b: Any) -> None:
    t, s, _ = sizes()
    assert not same(a(t, s), b(t, s)) and not same_shape([4, a(t, s)], [4, b(t, s)])


def test_shapes_of_other_rank_are_unequal() -> None:
    assert same_shape([2, 3], (2, 3)) and not same_shape([2, 3], [2, 3, 1])


def test_every_symbol_has_a_number_of_its_own() -> None:
    t, s, p = sizes()
    binding = Binding()
    numbers = binding.shape((t, s, p))
    assert len(set(numbers)) == 3 and all(number > 1 for number in numbers)
    assert binding.shape((t + s, 2 * p)) == (numbers[0] + numbers[1], 2 * numbers[2])
    assert binding.size(17) == 17


def test_no_symbol_stands_for_a_literal_of_the_graph() -> None:
    t, *_ = sizes()
    first = Binding().size(t)
    binding = Binding()
    binding.avoid({first})
    assert binding.size(t) != first


def test_sizes_taken_for_one() -> None:
    t, s, p = sizes()
    binding = Binding()
    assert not binding.same(t, s)
    binding.equate(t, s)
    assert binding.same(t, s) and binding.size(t) == binding.size(s) and not binding.same(t, p)
    assert not same(t, s), "of these graphs alone"


@pytest.mark.parametrize(
    ("equations", "follows"),
    [
        (lambda t, s, p: [(4 * t, 4 * s)], lambda t, s, p: (t, s)),
        (lambda t, s, p: [(t, s * p)], lambda t, s, p: (t - 1, p * s - 1)),
        (lambda t, s, p: [(8, 2 * t)], lambda t, s, p: (t, 4)),
        (lambda t, s, p: [(t, s), (s, p)], lambda t, s, p: (p, t)),
        (lambda t, s, p: [(t // 2, 3)], lambda t, s, p: (t // 2, 3)),
        (lambda t, s, p: [((t + 1) // 2, 64), (t - (t + 1) // 2, 64)], lambda t, s, p: (t, 128)),
        (lambda t, s, p: [(t, 2 * (t // 2))], lambda t, s, p: (t // 2 + t // 2, t)),
        (
            lambda t, s, p: [((t + 1) // 2, (s + 1) // 2), (t - (t + 1) // 2, s - (s + 1) // 2)],
            lambda t, s, p: (t, s),
        ),
        (lambda t, s, p: [(t // 2, s // 3)], lambda t, s, p: (2 * (s // 3), 2 * (t // 2))),
    ],
)
def test_equations_are_solved(equations: Any, follows: Any) -> None:
    symbols = sizes()
    binding = Binding()
    assert not binding.same(*follows(*symbols))
    for a, b in equations(*symbols):
        binding.equate(a, b)
    assert binding.same(*follows(*symbols))
    for one, other in (*equations(*symbols), follows(*symbols)):
        assert binding.size(one) == binding.size(other)
    for symbol, by in zip(symbols, (2, 3), strict=False):
        assert binding.size(symbol // by) == binding.size(symbol) // by


@pytest.mark.parametrize(
    "equation",
    [
        lambda t, s, p: (t * s, p * s),  # of no s there may be any t
        lambda t, s, p: (2 * t, 3 * s),
        lambda t, s, p: (t - (t + 1) // 2, 64),  # 128 or 129
    ],
)
def test_equations_that_are_left(equation: Any) -> None:
    symbols = sizes()
    binding = Binding()
    binding.equate(*equation(*symbols))
    assert all(map(binding.varies, symbols)) and len({binding.size(size) for size in symbols}) == 3


def test_an_axis_that_is_cut_is_as_long() -> None:
    graph = view(lambda x: x[:, :12], floats(TOKENS, POSITIONS), symbolic=True)
    (x,) = inputs(graph)
    assert graph.binding.size(x.meta["val"].shape[1]) > 12


def test_a_difference_leaves_room() -> None:
    t, s, _ = sizes()
    binding = Binding()
    binding.admit([t - s])
    assert binding.size(t - s) >= 2


def test_room_for_more() -> None:
    t, *_ = sizes()
    binding = Binding()
    now = binding.size(t)
    assert binding.roomier(t, now) is binding
    assert binding.roomier(t, now + 100).size(t) >= now + 100 and binding.size(t) == now
    assert binding.raised(t, now + 50).size(t) >= now + 50
    in_step = binding.roomier(t, now, 16)
    assert in_step.size(t) % 16 == 0 and in_step.roomier(t, 3, 8) is in_step


def test_dynamo_compiles_sizes_of_one_apart() -> None:
    t, *_ = sizes()
    assert is_symbolic(t) and exceeds_one(t) and exceeds_one(2) and not exceeds_one(1)


def test_the_node_that_holds_a_size() -> None:
    graph = view(lambda x: x.new_zeros(x.shape[0]), floats(TOKENS, 4), symbolic=True)
    size = inputs(graph)[0].meta["val"].shape[0]
    node = SizeNodes(graph.gm.graph).find(size)
    assert node is not None and node in outputs(graph)[0].all_input_nodes
    assert SizeNodes(graph.gm.graph).find(size + 1) is None
