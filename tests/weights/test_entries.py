"""A packed copy follows its parameter: packed again when it moves, gone when it is."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.weights import cache, release
from tests.harness import clones
from tests.weights.own import entries_of, layers


def packing(like: Tensor) -> cache.Packed:
    """A transposing copy, as a compiled graph holds it."""
    return cache.Packed(make_fx(lambda weight: weight.t().contiguous())(torch.zeros_like(like)))


def pack(made: cache.Packed, tensor: Tensor) -> Tensor:
    packed = made.of([tensor]).packed
    assert packed is not None
    return packed


def test_a_copy_is_released_after_an_update_that_left_no_trace() -> None:
    tensor = torch.randn(3, 4)
    made = packing(tensor)
    pack(made, tensor)
    tensor.data.mul_(2.0)
    assert release([tensor]) == 1
    assert torch.equal(pack(made, tensor), tensor.t())


def test_other_memory_is_packed_again() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    made = packing(parameter)
    pack(made, parameter)
    for data in (torch.randn(4, 4), parameter.detach().t(), torch.randn(8, 4)[4:]):
        parameter.data = data
        assert torch.equal(pack(made, parameter), data.t())


def test_entries_go_with_their_parameters() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    made = packing(parameter)
    storage = torch.multiprocessing.reductions.StorageWeakRef(
        pack(made, parameter).untyped_storage()
    )
    (entry,) = entries_of([parameter])
    del parameter
    cache.sweep()
    assert entry.packed is None and storage.expired()


def test_entries_of_a_model_go_with_it(fresh: None) -> None:
    model, args = layers(1)
    run = torch.compile(model, backend=mf.backend(), fullgraph=True)
    with torch.no_grad():
        run(*clones(args))
    entries = [weakref.ref(entry) for entry in entries_of(model)]
    assert entries
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert not any(entry() for entry in entries)
