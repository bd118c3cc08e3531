"""Reloads: what each usual way of changing weights does to a compiled graph, and to one that was
captured.

A captured graph is replayed without Python: it reads the memory that it was captured with. Its
stand-in here are the packed weights that the first call used.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import mla_fusion as mf
from mla_fusion.weights import cache, rounds
from mla_fusion.weights.prepack import _MODULES
from mla_fusion.weights.source import SHARES
from tests.catalogue import prologues
from tests.exhaustive import one_in
from tests.harness import clones
from tests.weights.served import COUNTED, NAMES, STEPPED, WAYS, Served, other

pytestmark = pytest.mark.usefixtures("fresh")

CASES = [(way, name) for way in WAYS for name in NAMES]


def has_copy(name: str) -> bool:
    """On a CPU the others are read where they are."""
    return name in ("q_b_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize(("way", "name"), one_in(20, CASES))
def test_a_change_is_seen_when_it_should_be(
    way: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted before the next call, the rest within one round and with a warning."""
    monkeypatch.setitem(rounds.STEPS_A_LOOK, "cpu", 1)
    monkeypatch.setitem(SHARES, "cpu", 1 << 30)
    monkeypatch.setattr(rounds, "_SAID", set())
    served = Served(monkeypatch, "rounds", prepacked=False)
    WAYS[way](served, name)
    if way not in COUNTED and has_copy(name):
        with caplog.at_level(logging.WARNING, "mla_fusion"):
            for _ in range(2):  # a round
                with torch.no_grad():
                    served.run(*clones(served.args))
        assert f"{name}.weight has changed in a way that torch does not count" in caplog.text
    served.assert_right()


@pytest.mark.parametrize(("way", "name"), one_in(20, CASES, first=7))
def test_every_call_compares_all_bytes(
    way: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(monkeypatch, "every call", prepacked=False)
    WAYS[way](served, name)
    served.assert_right()


@pytest.mark.parametrize(("way", "name"), one_in(30, CASES, first=3))
def test_after_refresh_a_captured_graph_reads_the_new_weights(
    way: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(monkeypatch)
    WAYS[way](served, name)
    mf.refresh(served.model)
    served.assert_replay_right()


# -- what refreshes by itself


class Lora(nn.Module):
    """A tuner's layer as PEFT's: it merges into the memory of the layer that it wraps."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.delta = torch.randn_like(base_layer.weight) * 0.05
        self.merged = False

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def merge(self) -> None:
        self.base_layer.weight.data += self.delta
        self.merged = True

    def unmerge(self) -> None:
        self.base_layer.weight.data = self.base_layer.weight.data - self.delta
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


LOADS = [way for way in COUNTED if "load" in way or "assign" in way]
BY_THEMSELVES = [*STEPPED, *LOADS, "SGD", "AdamW foreach"]


@pytest.mark.parametrize("way", one_in(2, BY_THEMSELVES))
def test_a_prepacked_model_needs_no_refresh(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    WAYS[way](served, "q_b_proj")
    served.assert_replay_right()


def test_a_merge_of_an_adapter_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Lora.merge
    with monkeypatch.context() as patch:
        patch.setattr(prologues, "Neox", Adapted)
        served = Served(monkeypatch)
    for step in ("merge", "unmerge", "merge"):
        for name in ("q_b_proj", "kv_a_proj_with_mqa"):
            getattr(getattr(served.model, name), step)()
        served.assert_replay_right()
    assert Lora.merge is not usual
    mf.release(served.model)
    assert Lora.merge is usual


class Adapted(prologues.Neox):
    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj, self.kv_a_proj_with_mqa = Lora(self.q_b_proj), Lora(self.kv_a_proj_with_mqa)


def anybodys_step() -> None:
    """Takes the hooks of models back that are gone."""
    weight = nn.Parameter(torch.randn(4))
    weight.grad = torch.ones(4)
    torch.optim.SGD([weight], lr=0.1, foreach=False).step()


def test_release_takes_the_hooks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    anybodys_step()  # another test's models
    before = dict(optimizers._global_optimizer_post_hooks)
    first, second = Served(monkeypatch), Served(monkeypatch)
    assert len(optimizers._global_optimizer_post_hooks) == len(before) + 1
    mf.release(first.model)
    assert len(optimizers._global_optimizer_post_hooks) == len(before) + 1
    mf.release(second.model)
    assert dict(optimizers._global_optimizer_post_hooks) == before
    for served in (first, second):
        assert not any(module._load_state_dict_post_hooks for module in served.model.modules())
        assert not any(module in _MODULES for module in served.model.modules())
        served.assert_right()


def test_a_found_change_is_packed_into_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rounds.STEPS_A_LOOK, "cpu", 1)
    monkeypatch.setitem(SHARES, "cpu", 1 << 30)
    served = Served(monkeypatch, "rounds", prepacked=False)
    for name in ("q_b_proj", "kv_a_proj_with_mqa"):
        served.weight(name).data.copy_(other(served.weight(name)))
    with torch.no_grad():
        for _ in range(4):
            served.run(*clones(served.args))
    served.assert_replay_right()
    cache.sweep()
    assert sum(entry.bytes for entry in cache._ENTRIES.values()) > 0
