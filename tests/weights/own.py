"""A model whose packed weights can all be views of its parameters; what its memory holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.weights import cache
from tests.catalogue import base, prologues


class OwnAbsorb(prologues.PagedRotateHalf):
    """W_uk is a parameter of its own, heads and rows in one axis."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        del self.kv_b_proj
        self.uk = nn.Parameter((torch.randn(heads * base.D, base.HCKV) / base.D**0.5).bfloat16())

    def w_uk(self) -> Tensor:
        return self.uk.view(self.heads, base.D, base.HCKV)


def layers(count: int = 3) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return prologues.Layers(OwnAbsorb, count), prologues.layers_args(count=count)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_values(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def entries_of(model: nn.Module | list[Tensor]) -> list[Any]:
    """The packed weights of a model or of tensors (earlier tests' may be collected any time)."""
    cache.sweep()
    tensors = list(model.parameters() if isinstance(model, nn.Module) else model)
    own = {tensor.untyped_storage()._cdata for tensor in tensors}
    entries = [entry for entry in cache._ENTRIES.values() if entry.packed is not None]
    return [entry for entry in entries if any(source.storage in own for source in entry.sources)]
