"""The scales of an int8 product: by one operator or in steps, for each column and for each
token.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from mla_fusion.facts import projection
from mla_fusion.facts.quant import Quantised
from tests.fx.tracing import TOKENS, floats, inputs, integers, view

npu = torch.ops.npu
T, HE, W = TOKENS, 16, 8
# of int8 x, int8 w, token and column scales
Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def read(
    product: Product, tokens: int = T, columns: int = W
) -> tuple[Quantised | None, list[Node]]:
    x, w = (integers(*shape, dtype=torch.int8) for shape in ((T, HE), (HE, W)))
    graph = view(product, x, w, floats(tokens, 1), floats(columns))
    (item,) = projection.find(graph)
    return item.quantised, inputs(graph)


# each with (token factor, token inverse)
PRODUCTS: dict[str, tuple[Product, float, bool]] = {
    "row by row": (lambda x, w, t, c: (x.int() @ w.int()).float() * t * c, 1.0, False),
    "columns first": (lambda x, w, t, c: (x.int() @ w.int()).float() * c * t, 1.0, False),
    "in floats": (lambda x, w, t, c: (x.float() @ w.float()) * t * c, 1.0, False),
    "outer product": (lambda x, w, t, c: (x.float() @ w.float()) * (t * c), 1.0, False),
    "over 127 at the end": (
        lambda x, w, t, c: (x.float() @ w.float()) * t * c / 127,
        1 / 127,
        False,
    ),
    "divided by the inverse": (lambda x, w, t, c: (x.float() @ w.float()) / t * c, 1.0, True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_scales_in_steps(name: str) -> None:
    product, factor, inverse = PRODUCTS[name]
    found, (_, _, token, column) = read(product)
    assert found is not None
    assert (found.token_scale, found.weight_scale, found.offset) == (token, column, None)
    assert found.token_factor == pytest.approx(factor) and found.token_inverse == inverse
    assert found.dynamic is None, "the activation comes in as int8"


MISSES: dict[str, Product] = {
    "no scale of the columns": lambda x, w, t, c: (x.float() @ w.float()) * t,
    "a scale of the wrong axis": lambda x, w, t, c: (x.float() @ w.float()) * t.t()[:, :1] * c[:1],
    "added": lambda x, w, t, c: (x.float() @ w.float()) + t + c,
    "a step between": lambda x, w, t, c: ((x.float() @ w.float()) + 3000) * t * c,
    "wrapped in int8": lambda x, w, t, c: (x @ w).float() * t * c,
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_no_scaled_product(name: str) -> None:
    found, _ = read(MISSES[name])
    assert found is None or found.token_scale is None


def test_by_one_operator() -> None:
    def product(x: Tensor, w: Tensor, t: Tensor, c: Tensor) -> Tensor:
        return npu.npu_quant_matmul(x, w, c, pertoken_scale=t.view(-1), output_dtype=torch.bfloat16)

    found, (_, _, _, column) = read(product)
    assert found is not None and found.weight_scale is column and found.token_scale is not None


def test_without_a_scale_for_each_token() -> None:
    found, _ = read(lambda x, w, t, c: npu.npu_quant_matmul(x, w, c, output_dtype=torch.bfloat16))
    assert found is not None and found.token_scale is None
