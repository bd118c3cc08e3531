"""A model that is prepacked, fused and captured, and the ways to change one of its weights."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.weights.current import Weights
from tests.catalogue import base, prologues
from tests.harness import assert_no_worse, clones, eager, exact, flat, fused

NAMES = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "q_a_layernorm",
    "kv_a_layernorm",
)


class Served:
    """A model, prepacked and fused; two weights are packed as copies (RoPE columns in halves)."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        updates: str = "counted",
        prepacked: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        self.model = prologues.Neox() if model is None else model
        self.args = self.arguments()
        if prepacked:
            mf.prepack(self.model, *self.args)
        self.run = fused(self.model, self.args, mf.Config(updates=updates))
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

    @staticmethod
    def arguments() -> tuple[Tensor, ...]:
        return base.paged_args()

    def weight(self, name: str) -> nn.Parameter:
        weight = getattr(self.model, name).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def assert_replay_right(self) -> None:
        """The memory of the first call holds what would be packed now; a call moves nothing."""
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
        assert_no_worse(
            exact(self.model, self.args), eager(self.model, self.args), found, slack=1.2
        )

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
        optimizer, before = make([weight], **options), weight.detach().clone()
        for _ in range(2):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        weight.grad = None
        assert not torch.equal(weight, before)  # SGD(fused=True) does nothing to bfloat16 on a CPU

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


def by_dlpack(served: Served, name: str) -> None:
    weight = served.weight(name)
    torch.from_dlpack(weight.detach()).copy_(other(weight))


def swapped(served: Served, name: str) -> None:
    weight = served.weight(name)
    torch.utils.swap_tensors(weight, nn.Parameter(other(weight)))


def shared(served: Served, name: str) -> None:
    """The same numbers at another address of the same storage."""
    served.weight(name).share_memory_()


def paged_out(served: Served, name: str) -> None:
    """The storage is freed and allocated again, as a rule at another address, and holds others."""
    weight = served.weight(name)
    storage, new = weight.untyped_storage(), other(weight)
    size, address, between = storage.nbytes(), weight.data_ptr(), []
    while weight.data_ptr() == address and len(between) < 8:
        storage.resize_(0)
        between.append(torch.empty(size, dtype=torch.uint8))
        storage.resize_(size)
    weight.data.copy_(new)


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
    "dlpack": by_dlpack,
}
STEPPED: dict[str, Way] = {
    "Adagrad fused": stepped(torch.optim.Adagrad, lr=0.1, fused=True),
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
    "data = twice": counted(
        lambda weight, new: [setattr(weight, "data", new + 1), setattr(weight, "data", new)]
    ),
    "new parameter": replaced,
    "swap_tensors": swapped,
    "storage freed": paged_out,
    "shared memory": shared,
    "dtype and back": there_and_back,
}
WAYS = {**COUNTED, **STEPPED, **UNCOUNTED}
