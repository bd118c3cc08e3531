"""Every matrix product as one einsum: its labels, run on numbers, give what the operator gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Interpreter

from mla_fusion.fx import contraction
from tests.fx.tracing import calls, floats, trace, view

T, K, C, B = 3, 4, 5, 2
Product = Callable[..., Tensor]

# (function, shapes of its operands)
PRODUCTS: dict[str, tuple[Product, tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((T, K), (K, C))),
    "bmm": (torch.bmm, ((B, T, K), (B, K, C))),
    "matmul of sequences": (torch.matmul, ((B, T, K), (K, C))),
    "matmul of heads": (torch.matmul, ((B, T, K), (B, K, C))),
    "linear": (F.linear, ((T, K), (C, K))),
    # torch repeats the weight for each row of x
    "linear of strided x": (lambda x, w: F.linear(x.transpose(0, 1), w), ((T, B, K), (C, K))),
    "repeated weight": (lambda x, w: torch.bmm(x, w.expand(B, K, C)), ((B, T, K), (K, C))),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), ((T, K), (K, C), (C,))),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), ((B, T, K), (B, K, C), (B, 1, C))),
    "weight first": (lambda w, x: w @ x, ((C, K), (K, T))),
    "npu_transpose_batchmatmul": (
        lambda x, w: torch.ops.npu.npu_transpose_batchmatmul(
            x, w, perm_x1=(1, 0, 2), perm_y=(1, 0, 2)
        ),
        ((T, B, K), (B, K, C)),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_labels_are_those_of_the_product(name: str) -> None:
    fn, shapes = PRODUCTS[name]
    values = [
        torch.randn(*shape).bfloat16() if "npu" in name else torch.randn(*shape) for shape in shapes
    ]
    gm = trace(fn, *values)
    found = [item for node in gm.graph.nodes if (item := contraction.read(node)) is not None]
    assert len(found) == 1
    (product,) = found
    held = {}

    class Keep(Interpreter):
        def run_node(self, n):  # type: ignore[no-untyped-def]
            held[n] = super().run_node(n)
            return held[n]

    Keep(gm).run(*values)
    left, right = held[product.left].float(), held[product.right].float()
    result = torch.einsum(
        left, list(product.left_labels), right, list(product.right_labels), list(product.out_labels)
    )
    if product.bias is not None:
        result = product.factors[0] * result + product.factors[1] * held[product.bias]
    torch.testing.assert_close(result, held[product.node].float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.0), (0.5, 3.0)])
def test_factors_of_a_bias_and_of_the_product(alpha: float, beta: float) -> None:
    gm = trace(
        lambda x, w, b: torch.addmm(b, x, w, alpha=alpha, beta=beta),
        floats(T, K),
        floats(K, C),
        floats(C),
    )
    (product,) = (item for node in gm.graph.nodes if (item := contraction.read(node)) is not None)
    assert product.factors == (alpha, beta)


@pytest.mark.parametrize("fn", [torch.mul, torch.add, lambda x, w: (x * w).sum(-1)])
def test_what_is_no_product(fn: Product) -> None:
    gm = trace(fn, floats(T, K), floats(T, K))
    assert [contraction.read(node) for node in gm.graph.nodes] == [None] * len(gm.graph.nodes)


def joined(fn: Product, *shapes: tuple[int, ...]) -> contraction.Contraction | None:
    graph = view(fn, *(floats(*shape) for shape in shapes))
    known = {node: item for node in graph.nodes if (item := contraction.read(node)) is not None}
    (cat,) = calls(graph, "cat")
    return contraction.join(cat, known)


def test_a_weight_in_chunks_is_one_product() -> None:
    found = joined(lambda x, v, w: torch.cat([x @ v, x @ w], -1), (T, K), (K, 2), (K, 3))
    assert found is not None and len(found.pieces) == 2


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, v, w: torch.cat([x @ v, x @ w], 0),  # rows
        lambda x, v, w: torch.cat([x @ v, (x @ w) * 2], -1),  # a step between
        lambda x, v, w: torch.cat([x @ v, w[:3]], -1),  # no product
    ],
)
def test_what_is_no_weight_in_chunks(fn: Product) -> None:
    assert joined(fn, (3, 3), (3, 3), (3, 3)) is None


@pytest.mark.parametrize(
    "equation",
    ["...k,kc->...c", "b...k,kc->...bc", "...nk,nkc->...nc", "k...,...->k...", "tk,kc->tc"],
)
def test_terms_of_an_equation_are_those_of_torch(equation: str) -> None:
    sizes = {"b": 2, "t": 3, "k": 4, "c": 5, "n": 2, "x": 6, "y": 2}
    left, right = (
        torch.randn([sizes[letter] for letter in term.replace("...", "xy")])
        for term in equation.partition("->")[0].split(",")
    )
    terms = contraction.einsum_terms(equation, [left.dim(), right.dim()])
    assert terms is not None
    numbers = {label: number for number, label in enumerate(sorted({*terms[0], *terms[1]}))}
    a, b, out = ([numbers[label] for label in term] for term in terms)
    assert torch.equal(torch.einsum(left, a, right, b, out), torch.einsum(equation, left, right))


@pytest.mark.parametrize("equation", ["tk,kc", "tk->tk", "tt,tc->tc", "tk,kc,cb->tb"])
def test_equations_that_are_not_read(equation: str) -> None:
    assert contraction.einsum_terms(equation, [2, 2]) is None
