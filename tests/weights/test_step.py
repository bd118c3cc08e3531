"""A step whose weights have not changed reads a share of their bytes, and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import mla_fusion as mf
from mla_fusion.compat import aot_autograd
from mla_fusion.serving.vllm_ascend import vllm_ascend_pass
from mla_fusion.weights import cache, rounds
from mla_fusion.weights.current import Weights
from mla_fusion.weights.source import SHARES
from tests.catalogue import base, prologues
from tests.harness import clones

WAITS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
}


pytestmark = pytest.mark.usefixtures("fresh")


def as_backend(config: mf.Config) -> Any:
    return mf.backend(config)


def as_manager(config: mf.Config) -> Any:
    """As vLLM-Ascend's manager runs the pass: the graph is executed as it is."""
    fusion = vllm_ascend_pass(config)

    def compiler(gm: Any, _: Any) -> Any:
        fusion(gm)
        return gm.forward

    return aot_autograd(
        fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True
    )


WAYS: dict[str, Callable[[mf.Config], Any]] = {"backend": as_backend, "manager": as_manager}


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of graphs that other tests have made, and that are still there, are out of sight."""
    monkeypatch.setattr(cache, "_ENTRIES", WeakValueDictionary())


def entries() -> list[cache.Entry]:
    return [entry for entry in cache._ENTRIES.values() if entry.packed is not None]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_waits_for_nothing_and_reads_a_share(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rounds.STEPS_A_LOOK, "cpu", 1)
    monkeypatch.setitem(SHARES, "cpu", 1 << 12)
    model, args = prologues.Neox(), base.paged_args()
    run = torch.compile(model, backend=WAYS[way](mf.Config()), fullgraph=True)
    # of the checks alone; the profiler sees operators whatever modes are left
    events: list[Any] = []
    usual = Weights.of

    def profiled(*given: Any) -> Any:
        with torch.autograd.profiler.profile(use_device=None, record_shapes=True) as profile:
            packed = usual(*given)
        events.extend(profile.function_events)
        return packed

    with torch.no_grad():
        for _ in range(3):
            run(*clones(args))
        monkeypatch.setattr(Weights, "of", profiled)
        run(*clones(args))
    names = {event.name for event in events}
    assert "aten::sum" in names and not WAITS & names, WAITS & names
    shifts = [event.input_shapes[0] for event in events if event.name == "aten::__rshift__"]
    assert shifts == [[(1 << 12) // 8]]  # one share, in lanes of 8 bytes


def test_a_packed_weight_that_is_void_is_held_by_nobody() -> None:
    """A step that remembers its weights would keep memory that was let go."""
    model, args = prologues.Neox(), base.paged_args()
    run = torch.compile(model, backend=mf.backend(), fullgraph=True)
    with torch.no_grad():
        run(*clones(args))
        memories = [
            StorageWeakRef(entry.packed.untyped_storage())
            for entry in entries()
            if not entry.is_view
        ]
        assert len(memories) == 2
        for name in ("q_b_proj", "kv_a_proj_with_mqa"):
            weight = getattr(model, name).weight
            weight.data = weight.data.clone()
    assert all(memory.expired() for memory in memories)


@pytest.mark.parametrize("updates", ["counted", "rounds"])
def test_the_manager_heeds_updates(updates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rounds.STEPS_A_LOOK, "cpu", 1)
    monkeypatch.setitem(SHARES, "cpu", 1 << 30)
    model, args = prologues.Neox(), base.paged_args()
    run = torch.compile(model, backend=as_manager(mf.Config(updates=updates)), fullgraph=True)

    def result() -> Any:
        found = run(*clones(args))
        return found[0] if isinstance(found, tuple) else found

    with torch.no_grad():
        before = result()
        model.q_b_proj.weight.data.mul_(2)
        after = [result() for _ in range(16)][-1]
    assert torch.equal(after, before) == (updates == "counted")
