"""Whatever changes a parameter, the next call of a compiled model computes with what it holds
then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.weights import rounds
from mla_fusion.weights.source import SHARES, fingerprint
from tests.catalogue import base, prologues
from tests.exhaustive import one_in, pairs
from tests.harness import assert_no_worse, clones, eager, exact, flat, fused

Update = Callable[[nn.Module], None]


pytestmark = pytest.mark.usefixtures("fresh")


def weights(model: nn.Module) -> list[nn.Parameter]:
    """Those of which prologues.Neox needs packed copies: its rope columns are halves."""
    return [model.kv_a_proj_with_mqa.weight, model.q_b_proj.weight]  # type: ignore[union-attr,list-item]


def delta(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape).to(weight.dtype) * 0.05


def merged_like_peft(model: nn.Module) -> None:
    for weight in weights(model):
        weight.data = weight.data.add_(delta(weight))


def through_data(model: nn.Module) -> None:
    for weight in weights(model):
        weight.data.add_(delta(weight))


def counted(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in weights(model):
            weight.add_(delta(weight))


def other_memory(model: nn.Module) -> None:
    for weight in weights(model):
        weight.data = weight.data + delta(weight)


def twice_other_memory(model: nn.Module) -> None:
    """The allocator may give the second the address of the original."""
    for _ in range(2):
        other_memory(model)


def swapped(model: nn.Module) -> None:
    for module in (model.kv_a_proj_with_mqa, model.q_b_proj):
        other = nn.Parameter(module.weight.detach() + delta(module.weight))  # type: ignore[union-attr,operator,arg-type]
        torch.utils.swap_tensors(module.weight, other)  # type: ignore[union-attr]


def one_element(model: nn.Module) -> None:
    """A change that hardly shows, but the bits of W_dkv are others: its first row is made large."""
    for weight in weights(model):
        weight.data[0, 0] += 30.0


def paged_out(model: nn.Module) -> None:
    """The storage is freed and allocated again: the same one, as a rule at another address. Then
    the weights change.
    """
    for weight in weights(model):
        storage, content = weight.untyped_storage(), weight.data.clone()
        size, address, between = storage.nbytes(), weight.data_ptr(), []
        while weight.data_ptr() == address and len(between) < 8:
            storage.resize_(0)
            between.append(torch.empty(size, dtype=torch.uint8))
            storage.resize_(size)
        weight.data.copy_(content + delta(content))


UPDATES = [
    counted,
    other_memory,
    twice_other_memory,
    paged_out,
    merged_like_peft,
    through_data,
    one_element,
]


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round has as many steps as weights are copied; of prologues.Neox these are two."""
    monkeypatch.setitem(rounds.STEPS_A_LOOK, "cpu", 1)
    monkeypatch.setitem(SHARES, "cpu", 1 << 30)


def assert_current(model: nn.Module, run: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    given = clones(args)
    with torch.no_grad():
        found = [*flat(run(*given)), *given]
    assert_no_worse(exact(model, args), eager(model, clones(args)), found, slack=1.2)


def follow(model: nn.Module, update: Update, updates: str = "rounds", steps: int = 0) -> None:
    """``steps``: how many calls may use the old weights."""
    args = base.paged_args()
    run = fused(model, args, mf.Config(updates=updates))
    assert_current(model, run, args)
    assert len(mf.reports()[-1].fused) == 1 and mf.reports()[-1].bytes_added > 0
    for _ in range(2):
        update(model)
        with torch.no_grad():
            for _ in range(steps):
                run(*clones(args))
        assert_current(model, run, args)


@pytest.mark.portable
@pytest.mark.parametrize("update", one_in(2, UPDATES))
def test_every_call_compares_all_bytes(update: Update) -> None:
    follow(prologues.Neox(), update, "every call")


def unchanged_elsewhere(model: nn.Module) -> None:
    """The same content at another address of the same storage."""
    for weight in weights(model):
        weight.share_memory_()


@pytest.mark.parametrize("updates", one_in(1, ["every call", "counted"]))
def test_parameters_moved_to_shared_memory(updates: str) -> None:
    follow(prologues.Neox(), unchanged_elsewhere, updates)


@pytest.mark.parametrize("updates", one_in(1, ["rounds", "counted"]))
def test_swapped_parameters(updates: str) -> None:
    """Nothing of ours refers to parameters. Of dynamo's own references those of a backend without a
    name stay.
    """
    with torch._dynamo.config.patch(invalidate_compile_context_weakrefs=True):
        follow(prologues.Neox(), swapped, updates)


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize("updates", one_in(1, ["rounds", "every call"]))
def test_parameters_made_under_inference_mode_are_reloaded(updates: str) -> None:
    with torch.inference_mode():
        model = prologues.Neox()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    assert all(weight.is_inference() for weight in weights(model))

    def reload(model: nn.Module) -> None:
        other = prologues.Neox().state_dict()
        with torch.inference_mode():
            model.load_state_dict(other)

    args = base.paged_args()
    run = torch.compile(model, backend=mf.backend(mf.Config(updates=updates)), fullgraph=True)
    for _ in range(3):
        given = clones(args)
        with torch.inference_mode():
            found = [*flat(run(*given)), *given]
            plain = eager(model, clones(args))
        copied = prologues.Neox()
        copied.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        assert_no_worse(exact(copied, args), plain, found, slack=1.2)
        reload(model)
        for _ in range(2 if updates == "rounds" else 0):
            given = clones(args)  # inference tensors would be another graph
            with torch.inference_mode():
                run(*given)


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize(("updates", "by_data"), pairs(["rounds", "every call"], [False, True]))
def test_views_of_a_flat_buffer_that_is_updated(updates: str, by_data: bool) -> None:
    """As FSDP and ZeRO keep parameters."""
    model = prologues.Neox()
    flat = torch.cat([weight.detach().flatten() for weight in weights(model)])
    pieces = flat.split([weight.numel() for weight in weights(model)])
    for module, piece in zip((model.kv_a_proj_with_mqa, model.q_b_proj), pieces, strict=True):
        if by_data:
            module.weight.data = piece.view_as(module.weight)
        else:
            module.weight = nn.Parameter(piece.view_as(module.weight), requires_grad=False)

    def update(_: nn.Module) -> None:
        flat.data.add_(delta(flat))

    follow(model, update, updates, steps=2 if updates == "rounds" else 0)


def test_counted_parameters_are_released_after_an_update_without_a_trace() -> None:
    model, args = prologues.Neox(), base.paged_args()
    run = torch.compile(model, backend=mf.backend(mf.Config(updates="counted")), fullgraph=True)
    assert_current(model, run, args)
    through_data(model)
    assert mf.weights.release(model.parameters()) > 0
    assert_current(model, run, args)


class Typed(nn.Parameter):
    """A parameter with a class of its own, as quantisation libraries make them."""


@pytest.mark.parametrize("update", [merged_like_peft, counted])
def test_parameters_of_a_subclass(update: Update) -> None:
    model = prologues.Neox()
    for module in (model.kv_a_proj_with_mqa, model.q_b_proj):
        module.weight = Typed(module.weight.detach())
    follow(model, update, "every call")


def test_an_update_between_two_graphs_reaches_both() -> None:
    """What is merged, used by one graph and unmerged again, is not left in the other."""
    model, args = prologues.Neox(), base.paged_args()
    backend = mf.backend(mf.Config(updates="every call"))
    first = torch.compile(model, backend=backend, fullgraph=True)
    assert_current(model, first, args)
    torch._dynamo.reset()
    second = torch.compile(model, backend=backend, fullgraph=True)
    kept = [weight.detach().clone() for weight in weights(model)]
    merged_like_peft(model)
    assert_current(model, second, args)
    for weight, value in zip(weights(model), kept, strict=True):
        weight.data.copy_(value)
    assert_current(model, first, args)
    assert_current(model, second, args)


# -- fingerprints


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(64, 32), (7, 3), (5,), (3, 4, 8), (16, 0), ()])
def test_fingerprints_tell_every_element(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    tensor = torch.randint(-100, 100, shape).to(bits).view(dtype)
    before = fingerprint(tensor)
    assert torch.equal(before, fingerprint(tensor.clone()))
    flat = tensor.view(bits).view(-1)
    for place in range(0, flat.numel(), 13):
        for changed in (flat[place] ^ 1, flat[place] ^ torch.iinfo(bits).min):
            kept, flat[place] = flat[place].clone(), changed
            assert not torch.equal(before, fingerprint(tensor))
            flat[place] = kept
    assert torch.equal(before, fingerprint(tensor))


def test_fingerprints_tell_signs_and_places() -> None:
    tensor = torch.randn(8, 16).bfloat16()
    before = fingerprint(tensor)
    for columns in ([3, 7], [3, 7, 11, 15], [0, 1]):
        other = tensor.clone()
        other[:, columns] *= -1
        assert not torch.equal(before, fingerprint(other))
    assert not torch.equal(before, fingerprint(tensor[torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])]))
    assert not torch.equal(before, fingerprint(tensor.flip(-1)))


@pytest.mark.portable
def test_fingerprints_do_not_depend_on_threads() -> None:
    tensor, threads = torch.randn(300, 512), torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(fingerprint(tensor))
    torch.set_num_threads(threads)
    assert torch.equal(*found)
