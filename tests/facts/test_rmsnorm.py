"""RMSNorm: one fact for every spelling, and none for what comes near one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.facts.reading import norms
from tests.fx.tracing import TOKENS, floats

W, EPS = 8, 1e-6
Step = Callable[[Tensor, Tensor], Tensor]


def statistic(v: Tensor) -> Tensor:
    return v.pow(2).mean(-1, keepdim=True)


SPELLINGS: dict[str, Step] = {
    "rsqrt": lambda v, g: g * (v * torch.rsqrt(statistic(v) + EPS)),
    "x * x": lambda v, g: v * (v * v).mean(-1, keepdim=True).add(EPS).rsqrt() * g,
    "sqrt and division": lambda v, g: v / (v.square().sum(-1, keepdim=True) / W + EPS).sqrt() * g,
    "negative power": lambda v, g: v * (statistic(v) + EPS).pow(-0.5) * g,
    "F.rms_norm": lambda v, g: F.rms_norm(v, (W,), g, EPS),
    "weight into the statistic": lambda v, g: (g * v) * torch.rsqrt(statistic(v) + EPS),
    "by heads and back": lambda v, g: (
        (v * torch.rsqrt(statistic(v) + EPS)).view(-1, 2, 4).reshape(-1, W) * g
    ),
    "inert clamp": lambda v, g: v * torch.rsqrt(statistic(v).clamp_min(0) + EPS) * g,
    "vector norm": lambda v, g: (
        v / (torch.linalg.vector_norm(v, dim=-1, keepdim=True).square() / W + EPS).sqrt() * g
    ),
    "einsum": lambda v, g: v * torch.rsqrt(torch.einsum("tc,tc->t", v, v)[:, None] / W + EPS) * g,
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str, symbolic: bool) -> None:
    found = norms(SPELLINGS[name], W, floats(W), tokens=TOKENS, symbolic=symbolic)
    assert len(found) == 1
    (fact,) = found
    assert fact.columns == tuple(range(W)) and fact.gamma is not None
    assert (fact.eps, fact.scale, fact.runtime_eps, fact.low_precision) == (EPS, 1.0, None, None)


def test_columns_scale_and_epsilon_are_read_off() -> None:
    step = lambda v, g: g * F.rms_norm(v[:, 2:6].flip(-1), (4,), None, 1e-5) * 3  # noqa: E731
    *_, fact = norms(step, W, floats(4))
    assert fact.columns == (5, 4, 3, 2) and fact.scale == 3.0 and fact.eps == 1e-5


def test_a_norm_without_a_weight() -> None:
    (fact,) = norms(lambda v: F.rms_norm(v, (W,), None, EPS), W)
    assert fact.gamma is None


def test_the_floor_of_normalize_is_its_epsilon() -> None:
    width = 512  # in a narrower row it shows at the smallest probe
    (fact,) = norms(lambda v, g: F.normalize(v, dim=-1) * g, width, floats(width))
    assert fact.scale == pytest.approx(width**-0.5) and 0 < fact.eps < 1e-20


def test_a_product_of_weights_is_a_weight() -> None:
    (fact,) = norms(
        lambda v, g, h: (g * h) * v * torch.rsqrt(statistic(v) + EPS), W, floats(W), floats(W)
    )
    assert fact.gamma is not None and fact.gamma.name.startswith("mul")


def test_an_epsilon_from_outside_is_named() -> None:
    step = lambda v, g, eps: g * v * torch.rsqrt(statistic(v) + eps)  # noqa: E731
    (fact,) = norms(step, W, floats(W), torch.tensor(EPS))
    assert fact.runtime_eps is not None


def test_a_statistic_in_bfloat16_is_named() -> None:
    (fact,) = norms(lambda v, g: g * v * torch.rsqrt(statistic(v.bfloat16()) + EPS), W, floats(W))
    assert fact.low_precision is not None


MISSES: dict[str, Step] = {
    "mean subtracted": lambda v, g: F.layer_norm(v, (W,), g, None, EPS),
    "mean of half the columns": lambda v, g: g * v * torch.rsqrt(statistic(v[:, :4]) + EPS),
    "statistic of the next token": lambda v, g: g * v * torch.rsqrt(statistic(v.roll(1, 0)) + EPS),
    "statistic of all tokens": lambda v, g: g * v * torch.rsqrt(v.pow(2).mean() + EPS),
    "cubes": lambda v, g: g * v * torch.rsqrt(v.abs().pow(3).mean(-1, keepdim=True) + EPS),
    "mean of sizes": lambda v, g: g * v / (v.abs().mean(-1, keepdim=True) + EPS),
    "largest": lambda v, g: g * v / v.abs().amax(-1, keepdim=True),
    "epsilon beside the root": lambda v, g: g * v / (statistic(v).sqrt() + 1e-3),
    "root of the root": lambda v, g: g * v * (statistic(v) + EPS).pow(-0.25),
    "bias": lambda v, g: g * v * torch.rsqrt(statistic(v) + EPS) + 1,
    "weight twice": lambda v, g: g * (v * torch.rsqrt(statistic(v) + EPS)) * g,
    "weight in another order": lambda v, g: g * (v * torch.rsqrt(statistic(v) + EPS)).flip(-1) * g,
    "weighted statistic": lambda v, g: v * torch.rsqrt(statistic(v * g) + EPS),
    "clamped before": lambda v, g: F.rms_norm(v.clamp(-8, 8), (W,), g, EPS),
    "clamped behind": lambda v, g: g * F.rms_norm(v, (W,), None, EPS).clamp(-8, 8),
    "floor under the statistic": lambda v, g: g * v * torch.rsqrt(statistic(v).clamp_min(1e-3)),
    "ceiling over the statistic": lambda v, g: (
        g * v * torch.rsqrt(statistic(v).clamp_max(1e4) + EPS)
    ),
    "outliers masked": lambda v, g: F.rms_norm(v.masked_fill(v.abs() > 11, 0.0), (W,), g, EPS),
    "noise": lambda v, g: F.rms_norm(v + 1e-3 * torch.randn_like(v), (W,), g, EPS),
    "through float8": lambda v, g: F.rms_norm(v.to(torch.float8_e4m3fn).float(), (W,), g, EPS),
    "tokens flipped": lambda v, g: F.rms_norm(v, (W,), g, EPS).flip(0),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", MISSES)
def test_miss(name: str, symbolic: bool) -> None:
    """No norm with a weight, in the graph's own order; what a miss has inside may be a norm without
    one.
    """
    found = norms(MISSES[name], W, floats(W), tokens=TOKENS, symbolic=symbolic)
    results = [fact for fact in found if not any(user.op != "output" for user in fact.node.users)]
    assert not results
