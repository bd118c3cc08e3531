"""A bare product of integers that multiplications bring to scale: where it ends, and which scales
it met.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.fx import contraction, scaled_product
from mla_fusion.fx.contraction import Contraction
from mla_fusion.fx.view import View
from tests.fx.tracing import floats, inputs, integers, outputs, view

T, HE, W = 5, 16, 6
# of int32 sums, the token scale and the scales of the columns
Back = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(x: Tensor, w: Tensor) -> Tensor:
    return x.int() @ w.int()


def read(
    back: Back, multiply: Callable[[Tensor, Tensor], Tensor] = plain
) -> tuple[Contraction | None, View]:
    x, w = integers(T, HE, dtype=torch.int8), integers(HE, W, dtype=torch.int8)
    graph = view(lambda x, w, t, c: back(multiply(x, w), t, c), x, w, floats(T, 1), floats(W))
    (product,) = (item for node in graph.nodes if (item := contraction.read(node)) is not None)
    return scaled_product.read(product), graph


SPELLINGS: dict[str, Back] = {
    "row by row": lambda s, t, c: s.float() * t * c,
    "columns first": lambda s, t, c: s.float() * c * t,
    "by both at once": lambda s, t, c: s.float() * (t * c),
    "without a cast": lambda s, t, c: s * t * c,
    "rounded at the end": lambda s, t, c: (s.float() * t * c).bfloat16(),
    "a number among them": lambda s, t, c: s.float() * t * c / 127,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    found, graph = read(SPELLINGS[name])
    _, _, token, column = inputs(graph)
    assert found is not None and found.scales is not None and found.node is outputs(graph)[0]
    assert (found.scales.token, found.scales.weight) == (token, column)


def test_a_scale_of_the_next_step_does_not_belong_to_it() -> None:
    found, graph = read(lambda s, t, c: (s.float() * t * c) * 0.07)
    assert found is not None and found.node is outputs(graph)[0].args[0]


MISSES: dict[str, Back] = {
    "no column scale": lambda s, t, c: s.float() * t,
    "no scale": lambda s, t, c: s.float() * 2 + t + c,
    "added to": lambda s, t, c: (s.float() + 3000) * t * c,
    "divided by the column scale": lambda s, t, c: s.float() / c * t,
    "scales added": lambda s, t, c: s.float() * (t + c),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_none(name: str) -> None:
    assert read(MISSES[name])[0] is None


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "wraps in int8": lambda x, w: x @ w,
    "weight as uint8": lambda x, w: x.float() @ w.to(torch.uint8).float(),
    "numbers changed": lambda x, w: (x.int() * 2) @ w.int(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_are_not_of_int8_numbers(name: str) -> None:
    assert read(SPELLINGS["row by row"], PRODUCTS[name])[0] is None
