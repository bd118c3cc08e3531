"""The absorbed product: q_nope of every head by the head's own matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.facts.absorb import AbsorbFact
from tests.facts.reading import HE, read
from tests.fx.tracing import TOKENS, floats, view

N, D, DR, C = 3, 4, 2, 6
WIDTH = N * (D + DR)
Product = Callable[[Tensor, Tensor], Tensor]  # of q [T, N, D] and w [N, D, C]


def absorbed(
    product: Product, cut: Callable[[Tensor], Tensor] | None = None, symbolic: bool = False
) -> AbsorbFact | None:
    def nope(q: Tensor) -> Tensor:
        return q.view(-1, N, D + DR)[..., :D]

    fn = lambda x, w, uk: product((cut or nope)(x @ w), uk)  # noqa: E731
    graph = view(fn, floats(TOKENS, HE), floats(HE, WIDTH), floats(N, D, C), symbolic=symbolic)
    (_, *others), (facts, *_) = read(graph)
    found = [facts.absorb(item) for item in others if item.activation in facts.readings]
    assert len(found) <= 1
    return found[0] if found else None


PRODUCTS: dict[str, Product] = {
    "bmm": lambda q, w: torch.bmm(q.transpose(0, 1), w).transpose(0, 1),
    "einsum": lambda q, w: torch.einsum("tnd,ndc->tnc", q, w),
    "weight first": lambda q, w: torch.einsum("ndc,tnd->tnc", w, q),
    "matmul": lambda q, w: torch.matmul(q.transpose(0, 1), w).transpose(0, 1),
    "one row": lambda q, w: torch.matmul(q.unsqueeze(-2), w).squeeze(-2),
    "in float64": lambda q, w: torch.einsum("tnd,ndc->tnc", q.double(), w.double()),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_spelling(name: str, symbolic: bool) -> None:
    fact = absorbed(PRODUCTS[name], symbolic=symbolic)
    assert fact is not None
    assert fact.columns == tuple(tuple(n * (D + DR) + d for d in range(D)) for n in range(N))
    assert (fact.heads, fact.nope_dim, fact.latent_dim, fact.factor) == (N, D, C, 1.0)


def test_a_factor_is_read_off() -> None:
    fact = absorbed(lambda q, w: torch.einsum("tnd,ndc->tnc", q * 0.25, w))
    assert fact is not None and fact.factor == 0.25


def test_columns_in_another_order_are_read_off() -> None:
    fact = absorbed(PRODUCTS["einsum"], lambda q: q.view(-1, D + DR, N)[:, :D].transpose(1, 2))
    assert fact is not None
    assert fact.columns == tuple(tuple(d * N + n for d in range(D)) for n in range(N))


def test_what_is_summed_over_heads_is_of_one_head() -> None:
    fact = absorbed(lambda q, w: torch.einsum("tnd,ndc->tc", q, w))
    assert fact is not None and fact.heads == 1 and fact.nope_dim == N * D


MISSES: dict[str, Product] = {
    "one head's weight for all": lambda q, w: torch.einsum("tnd,dc->tnc", q, w[0]),
    "clamped": lambda q, w: torch.einsum("tnd,ndc->tnc", q.clamp(-8, 8), w),
    "sizes": lambda q, w: torch.einsum("tnd,ndc->tnc", q.abs(), w),
    "squares": lambda q, w: torch.einsum("tnd,ndc->tnc", q * q, w),
    "tokens flipped": lambda q, w: torch.einsum("tnd,ndc->tnc", q.flip(0), w),
    "tokens read as heads": lambda q, w: torch.bmm(q.reshape(N, -1, D), w),
    "one head scaled": lambda q, w: torch.einsum(
        "tnd,ndc->tnc", q * torch.arange(1, N + 1)[:, None], w
    ),
    "neighbours added": lambda q, w: torch.einsum("tnd,ndc->tnc", q + q.roll(1, -1), w),
    "an offset": lambda q, w: torch.einsum("tnd,ndc->tnc", q + 1, w),
    "noise": lambda q, w: torch.einsum("tnd,ndc->tnc", q + torch.randn_like(q), w),
    "through float8": lambda q, w: torch.einsum(
        "tnd,ndc->tnc", q.to(torch.float8_e4m3fn).float(), w
    ),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", MISSES)
def test_miss(name: str, symbolic: bool) -> None:
    assert absorbed(MISSES[name], symbolic=symbolic) is None


def test_the_value_of_a_tensor_is_no_factor() -> None:
    """A scale that comes in at run time cannot be folded into the weight."""

    def fn(x: Tensor, w: Tensor, uk: Tensor, scale: Tensor) -> Tensor:
        return torch.einsum("tnd,ndc->tnc", (x @ w).view(-1, N, D) * scale, uk)

    graph = view(fn, floats(TOKENS, HE), floats(HE, N * D), floats(N, D, C), torch.tensor(1.0))
    projections, facts = read(graph)
    assert facts[0].absorb(projections[1]) is None
