"""How vLLM's weight reloads have failed (its RFC on their correctness), in terms of packed
weights.
"""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from tests.weights.served import Served, other

pytestmark = pytest.mark.usefixtures("fresh")


def test_1_storage_is_not_replaced_through_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding after loading was assigned through .data."""
    served = Served(monkeypatch)
    places = [weight.data_ptr() for weight in served.weights_of_all[:4]]
    for weight in served.weights_of_all:
        wider = torch.nn.functional.pad(other(weight), (0, 16))
        weight.data = wider[..., : weight.shape[-1]]  # a view of wider memory
    mf.refresh(served.model)
    served.assert_replay_right()
    assert [weight.data_ptr() for weight in served.weights_of_all[:4]] == places


def test_2_nobody_is_left_with_what_was_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's object was built anew, and the captured graph kept the old one's tensors: here,
    compiled again.
    """
    served = Served(monkeypatch)
    torch._dynamo.reset()
    for weight in served.weights_of_all:
        weight.data.copy_(other(weight))
    mf.refresh(served.model)
    served.run = torch.compile(
        served.model, backend=mf.backend(mf.Config(updates="counted")), fullgraph=True
    )
    first = [packed.clone() for packed in served.captured[0]]
    served.assert_right()
    assert all(map(torch.equal, first, served.captured[-1]))


def test_3_what_no_module_registers_stays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces and indices outside of any module moved: packed copies are such, over ten
    reloads.
    """
    served = Served(monkeypatch)
    for _ in range(10):
        served.model.load_state_dict(
            {name: other(value) for name, value in served.model.state_dict().items()}
        )
    served.assert_replay_right()


def test_4_a_converted_copy_follows_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks were converted once, and a later load updated the source alone. Norm weights are such
    here.
    """
    served = Served(monkeypatch)
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        served.weight(name).data.copy_(other(served.weight(name)))
    mf.refresh(served.model)
    served.assert_replay_right()


def test_5_a_part_of_a_reload_is_no_mixture_of_old_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
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
