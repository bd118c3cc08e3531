"""Functions that no probe tells from the identity are refused, at default settings and without verification.

Behind the kernel's results they stay in the graph, and the fused model is as exact as before.
"""

from __future__ import annotations

import random

import pytest
import torch

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.harness import assert_as_exact, clones, compiled, graph_of

from .hidden import BEFORE, BEHIND, At, BiasOfProduct, Function, of_size, of_token

UNVERIFIED = mf.Config(verify="off")


def member(seed: int, places: tuple[str, ...]) -> tuple[str, str, Function, bool]:
    rng = random.Random(seed)
    of_tokens = rng.random() < 0.5
    name, function = (of_token if of_tokens else of_size)(rng)
    return rng.choice(places), name, function, of_tokens or rng.random() < 0.5


def some(count: int, each_time: int) -> list[object]:
    """Seeds; behind the first ones exhaustive."""
    marks = [[] if seed < each_time else [pytest.mark.exhaustive] for seed in range(count)]
    return [pytest.param(seed, marks=mark) for seed, mark in enumerate(marks)]


@pytest.mark.parametrize("seed", some(240, 24))
def test_before_a_result_it_is_refused(seed: int) -> None:
    torch.manual_seed(0)
    place, name, function, dynamic = member(seed, BEFORE)
    gm = graph_of(At(place, function), *paged_args(), dynamic=dynamic)
    report = mf.explain(gm, UNVERIFIED, boundary=True)
    assert not report.fused and report.rejected, (place, name, str(report))


@pytest.mark.parametrize("seed", some(24, 3))
def test_behind_a_result_it_stays(seed: int) -> None:
    torch.manual_seed(0)
    place, _, function, dynamic = member(seed, BEHIND)
    model, args = At(place, function), paged_args()
    fused = compiled(model, clones(args), mf.backend(UNVERIFIED), dynamic=dynamic)
    assert mf.reports()[-1].fused
    assert_as_exact(model, args, fused)


@pytest.mark.parametrize("which", ["q_a", "kv_a", "w_uk"])
def test_a_bias_of_later_tokens_is_one(which: str) -> None:
    gm = graph_of(BiasOfProduct(which), *paged_args(), dynamic=True)
    assert [item.code for item in mf.explain(gm, UNVERIFIED, boundary=True).rejected] == ["linear.bias"]


def test_a_fusion_says_what_was_proved() -> None:
    gm = graph_of(At("", torch.clone), *paged_args())
    (fusion,) = mf.explain(gm, UNVERIFIED, boundary=True).fused
    assert any("proved in exact arithmetic" in line and "chance below 1e-16" in line for line in fusion.proof)
