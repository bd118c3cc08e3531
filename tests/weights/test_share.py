"""``Config(weights="shared")``: parameters become views of their packed weights, and memory does
not grow.
"""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.compile.boundary import Packed, fuse_with_boundary
from mla_fusion.compile.device_graph import capture
from mla_fusion.weights import cache, release
from mla_fusion.weights.share import Inverse, inverse
from tests.catalogue import base, prologues
from tests.harness import assert_as_exact, assert_no_worse, clones, eager, exact

SHARED = mf.Config(weights="shared")
PACKINGS: list[cache.Packed] = []


class OwnAbsorb(prologues.PagedRotateHalf):
    """W_uk is a parameter of its own, heads and rows in one axis."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        del self.kv_b_proj
        self.uk = nn.Parameter((torch.randn(heads * base.D, base.HCKV) / base.D**0.5).bfloat16())

    def w_uk(self) -> Tensor:
        return self.uk.view(self.heads, base.D, base.HCKV)


@pytest.fixture(autouse=True)
def no_packings(fresh: None) -> Iterator[None]:
    yield
    PACKINGS.clear()


def compiled(model: nn.Module, config: mf.Config = SHARED) -> Callable[..., Any]:
    run = torch.compile(model, backend=mf.backend(config), fullgraph=True)
    return torch.no_grad()(run)


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
    """The packed weights of a model or of tensors (those of earlier tests may be collected at any
    time).
    """
    cache.sweep()
    tensors = list(model.parameters() if isinstance(model, nn.Module) else model)
    own = {tensor.untyped_storage()._cdata for tensor in tensors}
    entries = [entry for entry in cache._ENTRIES.values() if entry.packed is not None]
    return [entry for entry in entries if any(source.storage in own for source in entry.sources)]


def bytes_of(model: nn.Module | list[Tensor]) -> int:
    return sum(entry.bytes for entry in entries_of(model))


# -- the whole of it


def test_memory_of_a_device_graph_does_not_grow() -> None:
    """The packing that a device graph asks for, done to the real parameters of several layers."""
    model, args = layers()
    wanted, before = values(model), storage_bytes(model.parameters())
    gm, inputs = capture(model, *args, device="npu")
    report, _, wrap = fuse_with_boundary(gm, inputs, SHARED)
    assert len(report.fused) == 3 and report.bytes_added == 0
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in model.parameters():
        by_shape.setdefault(parameter.shape, []).append(parameter)
    packings = [adaptor for adaptor in wrap(lambda: None).adaptors if isinstance(adaptor, Packed)]  # type: ignore
    assert len(packings) == 3 * 4
    results = []
    for packing in packings:
        (position,) = packing.positions
        parameter = by_shape[inputs[position].shape].pop(0)
        plain = packing.program(parameter.detach().clone())
        results.append(packing({position: parameter}))  # type: ignore[arg-type]
        assert torch.equal(results[-1], plain) and results[-1].is_contiguous()
        assert packing.of([parameter]).bytes == 0
    assert storage_bytes([*model.parameters(), *results]) == before
    assert_values(model, wanted)


@pytest.mark.portable
def test_compiled_and_eager_results_stay() -> None:
    model, args = layers()
    unfused, wanted, accurate = eager(model, clones(args)), values(model), exact(model, args)
    before = storage_bytes(model.parameters())
    old = [
        torch.multiprocessing.reductions.StorageWeakRef(p.untyped_storage())
        for p in model.parameters()
    ]
    torch._dynamo.reset()
    run, compiles = compiled(model), len(mf.reports())
    results = [run(*clones(args)) for _ in range(4)]
    # once more for the strides that the first call changed
    assert len(mf.reports()) - compiles == 2
    assert bytes_of(model) == 0 and mf.reports()[-1].bytes_added == 0
    assert storage_bytes(model.parameters()) == before
    gone = [ref.expired() for ref in old]
    # W_uk lies as the kernel reads it
    assert (
        sum(gone) == 3 * 3
        and sum(not parameter.is_contiguous() for parameter in model.parameters()) == 3 * 3
    )
    assert_values(model, wanted)
    # each reads the same packed weights
    assert all(torch.equal(result, results[0]) for result in results)
    assert_no_worse(accurate, unfused, [results[0], *unfused[1:]])
    # So does a prefill that is not compiled. Other strides may mean another order of the terms of a
    # product.
    assert_no_worse(accurate, unfused, eager(model, clones(args)))


def test_updates_in_place_reach_the_packed_weight() -> None:
    model, args = layers(1)
    run = compiled(model)
    for _ in range(2):  # the second compiles for the new strides
        run(*clones(args))
    entries = entries_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-2)  # as a LoRA merge does
    merged = run(*clones(args))
    model.layers[0].q_b_proj.weight.data.mul_(2.0)  # type: ignore[union-attr]  # no version tells of this one
    doubled = run(*clones(args))
    assert entries_of(model) == entries  # nothing was packed again
    for result in (merged, doubled):
        assert not torch.equal(result, args[0])
    assert not torch.equal(merged, doubled)
    assert_as_exact(model, args, [doubled, *eager(model, clones(args))[1:]])


def test_a_state_dict_is_loaded_saved_and_assigned() -> None:
    model, args = layers(1)
    other, _ = layers(1)
    run = compiled(model)
    for _ in range(2):  # the second compiles for the new strides
        run(*clones(args))
    entries = entries_of(model)
    model.load_state_dict(other.state_dict())
    assert_values(model, other.state_dict())
    loaded = run(*clones(args))
    assert entries_of(model) == entries
    assert_as_exact(other, args, [loaded, *eager(other, clones(args))[1:]])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert_values(other, torch.load(file))
    file.seek(0)
    model.load_state_dict(torch.load(file), assign=True)
    assert torch.equal(run(*clones(args)), loaded)
    assert len(entries_of(model)) == 4 and bytes_of(model) == 0
    gc.collect()
    assert not any(entry in cache._ENTRIES.values() for entry in entries)


def test_a_state_dict_that_is_held_keeps_parameters_where_they_are() -> None:
    model, args = layers(1)
    held = model.state_dict()
    compiled(model)(*clones(args))
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert all(
        held[name].data_ptr() == parameter.data_ptr()
        for name, parameter in model.named_parameters()
    )
    assert mf.reports()[-1].bytes_added == bytes_of(model) > 0


def test_safetensors_wants_contiguous_tensors() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, args = layers(1)
    compiled(model)(*clones(args))
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.save(model.state_dict())
    read = safetensors.load(
        safetensors.save({name: value.contiguous() for name, value in model.state_dict().items()})
    )
    assert_values(model, read)


def test_released_parameters_have_memory_of_their_own() -> None:
    model, args = layers(1)
    wanted, run = values(model), compiled(model)
    fused = run(*clones(args))
    assert release(model.parameters()) == 4 and release(model.parameters()) == 0
    assert not entries_of(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert_values(model, wanted)
    assert torch.equal(run(*clones(args)), fused)
    assert not model.layers[0].q_a_proj.weight.is_contiguous()  # type: ignore[union-attr]  # shared again


def test_a_copy_is_released_after_an_update_that_left_no_trace() -> None:
    tensor = torch.randn(3, 4)
    pack(tensor)
    tensor.data.mul_(2.0)
    assert release([tensor]) == 1
    assert torch.equal(pack(tensor), tensor.t())


# -- what is left alone


def test_tied_weights_are_copied() -> None:
    model, args = layers(1)
    layer = model.layers[0]  # type: ignore[index]
    alias = nn.Parameter(layer.q_a_proj.weight.detach())  # another parameter over the same memory
    run = compiled(model)
    fused = run(*clones(args))
    weight = layer.q_a_proj.weight
    assert weight.is_contiguous() and weight.data_ptr() == alias.data_ptr()
    assert mf.reports()[-1].bytes_added == weight.nbytes
    with torch.no_grad():
        alias.mul_(2.0)
        weight.mul_(0.5)
    assert torch.equal(run(*clones(args)), fused)
    assert mf.reports()[-1].bytes_added == weight.nbytes


def test_slices_of_a_merged_weight_are_copied() -> None:
    model, args = prologues.FusedQkvA(), base.paged_args()
    compiled(model)(*clones(args))
    merged = model.fused_qkv_a_proj.weight
    assert merged.is_contiguous() and model.kv_b_proj.weight.is_contiguous()
    assert not model.q_b_proj.weight.is_contiguous()
    assert mf.reports()[-1].bytes_added == merged.nbytes + model.kv_b_proj.weight.nbytes // 2


class ReadTwice(OwnAbsorb):
    """The graph reads W_dq besides the kernel."""

    def forward(self, *args: Tensor) -> Any:  # type: ignore[override]
        return super().forward(*args), self.q_a_proj.weight.float().sum(0)


def test_a_parameter_that_the_graph_reads_too_is_copied() -> None:
    model, args = ReadTwice(), base.paged_args()
    run = compiled(model)
    run(*clones(args))
    assert model.q_a_proj.weight.is_contiguous() and not model.q_b_proj.weight.is_contiguous()
    assert mf.reports()[-1].bytes_added == model.q_a_proj.weight.nbytes


def transposed(weight: Tensor) -> Tensor:
    return weight.t().clone(memory_format=torch.contiguous_format)


def doubly_transposed(weight: Tensor) -> Tensor:
    return weight.t().unsqueeze(0).clone(memory_format=torch.contiguous_format)


def pack(tensor: Tensor, packing: Callable[[Tensor], Tensor] = transposed) -> Tensor:
    """Packed as a compiled graph does it that lives to the end of the test."""
    program = make_fx(packing)(tensor.detach().clone())
    PACKINGS.append(cache.Packed(program, inverse(program, tensor)))
    packed = PACKINGS[-1].of([tensor]).packed
    assert packed is not None
    return packed


def in_training() -> Tensor:
    parameter = nn.Parameter(torch.randn(3, 4))
    parameter.sum().backward()
    return parameter


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return nn.Parameter(torch.randn(3, 4), requires_grad=False)


@pytest.mark.parametrize(
    "make",
    [
        in_training,
        in_inference_mode,
        lambda: torch.randn(3, 4),  # no parameter
        # part of a larger storage, that no other tensor reads any more
        lambda: nn.Parameter(torch.randn(5, 4)[:3]),
    ],
)
def test_other_tensors_are_copied(make: Callable[[], Tensor]) -> None:
    tensor = make()
    strides, address = tensor.stride(), tensor.data_ptr()
    packed = pack(tensor)
    assert torch.equal(packed, tensor.t()) and packed.is_contiguous()
    assert (tensor.stride(), tensor.data_ptr()) == (strides, address)
    assert bytes_of([tensor]) == tensor.nbytes


def test_of_two_packings_of_one_parameter_the_first_is_shared() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    first, second = pack(parameter), pack(parameter, doubly_transposed)
    assert parameter.data_ptr() == first.data_ptr() != second.data_ptr()
    assert bytes_of([parameter]) == parameter.nbytes
    with torch.no_grad():
        parameter.mul_(2.0)
    assert pack(parameter) is first and torch.equal(first, parameter.t())
    assert torch.equal(pack(parameter, doubly_transposed), parameter.t().unsqueeze(0))


def test_a_parameter_under_inference_mode_stays_a_normal_tensor() -> None:
    parameter = nn.Parameter(torch.randn(3, 4), requires_grad=False)
    with torch.inference_mode():
        packed = pack(parameter)
    assert packed.data_ptr() == parameter.data_ptr() and not parameter.is_inference()
    parameter.mul_(2.0)
    assert torch.equal(packed, parameter.t())


# -- entries


@pytest.mark.parametrize("shared", [False, True])
def test_other_memory_is_packed_again(shared: bool) -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    other = None if shared else parameter.detach()  # a second reader, so that it is copied
    packed = pack(parameter)
    assert (packed.data_ptr() == parameter.data_ptr()) is shared
    for data in (torch.randn(4, 4), parameter.detach().t(), torch.randn(8, 4)[4:]):
        parameter.data = data
        assert torch.equal(pack(parameter), data.t())
    del other


def test_entries_go_with_their_parameters() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    storage = torch.multiprocessing.reductions.StorageWeakRef(pack(parameter).untyped_storage())
    (entry,) = entries_of([parameter])
    del parameter
    cache.sweep()
    assert entry.packed is None and storage.expired()


def test_entries_of_a_model_go_with_it() -> None:
    model, args = layers(1)
    compiled(model)(*clones(args))
    entries = [weakref.ref(entry) for entry in entries_of(model)]
    assert len(entries) == 4
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not any(entry() for entry in entries)


def test_a_failure_leaves_the_parameter_as_it_was() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    wanted, address = parameter.detach().clone(), parameter.data_ptr()
    program = make_fx(transposed)(parameter.detach())
    with pytest.raises(RuntimeError):
        cache.Packed(program, Inverse((0, 1), (12,)[:0])).of([parameter])
    assert parameter.data_ptr() == address and torch.equal(parameter, wanted)


def test_the_choice_is_checked() -> None:
    with pytest.raises(ValueError, match="weights must be one of copy, shared"):
        mf.Config(weights="free")
