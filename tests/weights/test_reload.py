"""Reloads: what each usual way of changing weights does to a compiled graph, and to one that was captured.

A captured graph is replayed without Python: it reads the memory that it was captured with. Its stand-in here are the
packed weights that the first call used.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import mla_fusion as mf
from mla_fusion.weights import cache, follow, rounds
from mla_fusion.weights.current import Weights
from mla_fusion.weights.fingerprint import SHARES
from mla_fusion.weights.prepack import _MODULES
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import assert_no_worse, clones, eager, exact, flat

pytestmark = pytest.mark.usefixtures("fresh")

NAMES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm")


class Served:
    """A model that is prepacked and compiled; two of its weights are packed as copies (RoPE columns in halves)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, updates: str = "counted", prepacked: bool = True) -> None:
        self.model, self.args = prologues.Neox(), base.paged_args()
        if prepacked:
            mf.prepack(self.model, *self.args)
        self.run = torch.compile(self.model, backend=mf.backend(mf.Config(updates=updates)), fullgraph=True)
        self.captured: list[tuple[Tensor, ...]] = []
        usual = Weights.of

        def of(weights: Weights, args: Any) -> tuple[Tensor, ...]:
            packed = usual(weights, args)
            self.captured.append(packed)
            return packed

        monkeypatch.setattr(Weights, "of", of)
        with torch.no_grad():
            self.run(*clones(self.args))
        del self.captured[1:]

    def weight(self, name: str) -> nn.Parameter:
        weight = getattr(self.model, name).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def weights_of_all(self) -> list[nn.Parameter]:
        return [self.weight(name) for name in NAMES]

    def assert_replay_right(self) -> None:
        """The memory of the first call holds what would be packed now; then a call, which moves nothing."""
        before = [packed.clone() for packed in self.captured[0]]
        places = [packed.data_ptr() for packed in self.captured[0]]
        self.assert_right()
        now = self.captured[-1]
        assert [packed.data_ptr() for packed in now] == places
        assert all(map(torch.equal, before, now)), "the captured graph would have read old weights"

    def assert_right(self) -> None:
        given = clones(self.args)
        with torch.no_grad():
            found = [*flat(self.run(*given)), *given]
        assert_no_worse(exact(self.model, self.args), eager(self.model, self.args), found, slack=1.2)

    def is_right(self) -> bool:
        try:
            self.assert_right()
        except AssertionError:
            return False
        return True


def other(weight: Tensor) -> Tensor:
    """Far enough from what is there that a result shows it."""
    made = torch.randn(weight.shape).to(weight.dtype)
    return made * 0.05 if weight.dim() > 1 else 1 + made * 0.5


# -- ways to change one weight

Way = Callable[[Served, str], None]


def counted(make: Callable[[nn.Parameter, Tensor], Any]) -> Way:
    def change(served: Served, name: str) -> None:
        weight = served.weight(name)
        with torch.no_grad():
            make(weight, other(weight))

    return change


def stepped(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Way:
    def change(served: Served, name: str) -> None:
        weight = served.weight(name)
        optimizer = make([weight], **options)
        for _ in range(2):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        weight.grad = None

    return change


def load(assign: bool, inner: bool) -> Way:
    def change(served: Served, name: str) -> None:
        value = {"weight": other(served.weight(name))}
        if inner:
            getattr(served.model, name).load_state_dict(value, assign=assign)
            return
        state = {key: tensor.clone() for key, tensor in served.model.state_dict().items()}
        served.model.load_state_dict({**state, f"{name}.weight": value["weight"]}, assign=assign)

    return change


def replaced(served: Served, name: str) -> None:
    setattr(getattr(served.model, name), "weight", nn.Parameter(other(served.weight(name))))  # noqa: B010


def saved_and_loaded(served: Served, name: str) -> None:
    file = io.BytesIO()
    torch.save({"weight": other(served.weight(name))}, file)
    file.seek(0)
    getattr(served.model, name).load_state_dict(torch.load(file))


def by_numpy(served: Served, name: str) -> None:
    weight = served.weight(name)
    weight.data.view(torch.int16).numpy()[...] = other(weight).view(torch.int16).numpy()


def by_storage(served: Served, name: str) -> None:
    weight = served.weight(name)
    made = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype)
    made.copy_(other(weight))
    weight.untyped_storage().copy_(made.untyped_storage())


def by_alias(served: Served, name: str) -> None:
    alias = served.weight(name).detach()
    alias.data.copy_(other(alias))


def there_and_back(served: Served, name: str) -> None:
    module = getattr(served.model, name)
    value = other(module.weight)
    module.double()
    module.to(torch.bfloat16)
    module.weight.data = value


UNCOUNTED: dict[str, Way] = {
    "data.copy_": counted(lambda weight, new: weight.data.copy_(new)),
    "data.add_": counted(lambda weight, new: weight.data.add_(new)),
    "data.mul_": counted(lambda weight, new: weight.data.mul_(-0.5)),
    "data[:]": counted(lambda weight, new: weight.data.__setitem__(slice(None), new)),
    "data.view": counted(lambda weight, new: weight.data.reshape_as(weight).copy_(new)),
    "numpy": by_numpy,
    "storage.copy_": by_storage,
    "alias": by_alias,
}
STEPPED: dict[str, Way] = {
    "SGD fused": stepped(torch.optim.SGD, lr=1.0, fused=True),
    "AdamW fused": stepped(torch.optim.AdamW, lr=0.1, fused=True),
    "Adam fused": stepped(torch.optim.Adam, lr=0.1, fused=True),
}
COUNTED: dict[str, Way] = {
    "copy_": counted(lambda weight, new: weight.copy_(new)),
    "add_": counted(lambda weight, new: weight.add_(new)),
    "mul_": counted(lambda weight, new: weight.mul_(-0.5)),
    "[:]": counted(lambda weight, new: weight.__setitem__(slice(None), new)),
    "foreach": counted(lambda weight, new: torch._foreach_add_([weight], [new])),
    "detach().copy_": counted(lambda weight, new: weight.detach().copy_(new)),
    "SGD": stepped(torch.optim.SGD, lr=1.0, foreach=False),
    "AdamW foreach": stepped(torch.optim.AdamW, lr=0.1, foreach=True),
    "load_state_dict": load(assign=False, inner=False),
    "load_state_dict of a module": load(assign=False, inner=True),
    "assign": load(assign=True, inner=False),
    "assign to a module": load(assign=True, inner=True),
    "torch.load": saved_and_loaded,
    "data =": counted(lambda weight, new: setattr(weight, "data", new)),
    "data = twice": counted(lambda weight, new: [setattr(weight, "data", new + 1), setattr(weight, "data", new)]),
    "new parameter": replaced,
    "dtype and back": there_and_back,
}
WAYS = {**COUNTED, **STEPPED, **UNCOUNTED}
CASES = [(way, name) for way in WAYS for name in NAMES]


def has_copy(name: str) -> bool:
    """On a CPU the others are read where they are."""
    return name in ("q_b_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize(("way", "name"), one_in(10, CASES))
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


@pytest.mark.parametrize(("way", "name"), one_in(10, CASES, first=3))
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


@pytest.mark.parametrize("way", one_in(3, BY_THEMSELVES))
@pytest.mark.parametrize("name", ["q_b_proj", "q_a_proj"])
def test_a_prepacked_model_needs_no_refresh(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    WAYS[way](served, name)
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


def test_release_takes_the_hooks_back(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_optimizer_of_another_model_refreshes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    asked: list[Any] = []
    monkeypatch.setattr(follow.cache, "renew", lambda *given: asked.append(given))
    weight = nn.Parameter(torch.randn(4))
    weight.grad = torch.ones(4)
    torch.optim.SGD([weight], lr=0.1).step()
    assert not asked
    stepped(torch.optim.SGD, lr=0.1)(served, "q_b_proj")
    assert asked


# -- vLLM's seven categories of failed reloads (its RFC on reload correctness), in terms of packed weights


def test_1_a_derived_weight_is_not_rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    """W_UK_T was made anew after capture."""
    served = Served(monkeypatch)
    for weight in served.weights_of_all:
        weight.data.copy_(other(weight))
    mf.refresh(served.model)
    served.assert_replay_right()


def test_2_a_parameter_that_was_laid_out_otherwise_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffle replaced parameters that graphs had captured."""
    served = Served(monkeypatch)
    for weight in served.weights_of_all:
        weight.data = other(weight)
    mf.refresh(served.model)
    served.assert_replay_right()


def test_3_storage_is_not_replaced_through_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding after loading was assigned through .data."""
    served = Served(monkeypatch)
    places = [weight.data_ptr() for weight in served.weights_of_all[:4]]
    for weight in served.weights_of_all:
        wider = torch.nn.functional.pad(other(weight), (0, 16))
        weight.data = wider[..., : weight.shape[-1]]  # a view of wider memory
    mf.refresh(served.model)
    served.assert_replay_right()
    assert [weight.data_ptr() for weight in served.weights_of_all[:4]] == places


def test_4_nobody_is_left_with_what_was_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's object was built anew, and the captured graph kept the old one's tensors: here, compiled again."""
    served = Served(monkeypatch)
    torch._dynamo.reset()
    for weight in served.weights_of_all:
        weight.data.copy_(other(weight))
    mf.refresh(served.model)
    served.run = torch.compile(served.model, backend=mf.backend(mf.Config(updates="counted")), fullgraph=True)
    first = [packed.clone() for packed in served.captured[0]]
    served.assert_right()
    assert all(map(torch.equal, first, served.captured[-1]))


def test_5_what_no_module_registers_stays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces and indices outside of any module moved: packed copies are such, over ten reloads."""
    served = Served(monkeypatch)
    for _ in range(10):
        served.model.load_state_dict({name: other(value) for name, value in served.model.state_dict().items()})
    served.assert_replay_right()


def test_6_a_converted_copy_follows_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks were converted once, and a later load updated the source alone. Norm weights are such here."""
    served = Served(monkeypatch)
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        served.weight(name).data.copy_(other(served.weight(name)))
    mf.refresh(served.model)
    served.assert_replay_right()


def test_7_a_part_of_a_reload_is_no_mixture_of_old_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, or some names alone: what was loaded is new, the rest is as it was."""
    served = Served(monkeypatch)
    state = served.model.state_dict()
    for name in ("q_b_proj.weight", "kv_a_proj_with_mqa.weight"):
        served.model.load_state_dict({name: other(state[name])}, strict=False)
        served.assert_replay_right()
    with pytest.raises(RuntimeError, match="size mismatch"):
        served.model.load_state_dict({**state, "q_b_proj.weight": torch.ones(3, 3)})
    served.assert_right()


def test_memory_that_somebody_keeps_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old values in a variable stay what they are; the copy then has other memory."""
    served = Served(monkeypatch)
    weight = served.weight("q_b_proj")
    backup = weight.data
    held = backup.clone()
    weight.data = other(weight)
    mf.refresh(served.model)
    assert torch.equal(backup, held)
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
    assert cache.bytes_held() > 0
