"""``Config(slots="checked")``: a wrong slot is named before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, compiled, fuse_only

CHECKED = mf.Config(slots="checked")
ROWS = base.BLOCKS * base.BLOCK_SIZE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Shifted(prologues.PagedRotateHalf):
    """Slots are computed in the graph."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots // 2 * 2 + slots % 2)


MODELS = [prologues.PagedRotateHalf, prologues.BlockOffset, Shifted]


def with_slots(slots: Tensor) -> tuple[Tensor, ...]:
    *rest, given = base.paged_args()
    assert slots.shape == given.shape
    return (*rest, slots)


def wrong(token: int, slot: int) -> Tensor:
    slots = torch.arange(len(base.paged_args()[-1]))
    slots[token] = slot
    return slots


@pytest.mark.parametrize(("model", "dynamic"), one_in(3, itertools.product(MODELS, (False, True))))
def test_right_slots_pass(model: type[nn.Module], dynamic: bool) -> None:
    module, args = model(), base.paged_args()
    assert_as_exact(
        module, args, compiled(module, clones(args), mf.backend(CHECKED), dynamic=dynamic)
    )
    (fusion,) = mf.reports()[-1].fused
    is_literal = dynamic and model is prologues.BlockOffset  # blocks of 16 in caches of any blocks
    assert (fusion.placement != "in place") is is_literal
    assert not any("slots" in text for text in fusion.assumptions)


@pytest.mark.parametrize(
    "token, slot, message",
    [
        (2, ROWS, rf"slot {ROWS} of token 2 lies outside kv_cache \(.*\), which has {ROWS} rows"),
        (5, 10**9, r"slot 1000000000 of token 5"),
        (3, 1, r"slot 1 is given to token 1 and to token 3 of one write to kv_cache"),
    ],
)
@pytest.mark.parametrize("model", one_in(1, MODELS))
def test_wrong_slots_are_named_before_anything_is_written(
    model: type[nn.Module], token: int, slot: int, message: str
) -> None:
    module = model()
    run = torch.compile(module, backend=mf.backend(CHECKED), fullgraph=True)
    args = with_slots(wrong(token, slot))
    before = clones(args)
    with pytest.raises(mf.SlotError, match=message), torch.no_grad():
        run(*args)
    assert all(torch.equal(now, then) for now, then in zip(args, before, strict=True))
    with torch.no_grad():
        run(*with_slots(wrong(2, 20)))


@pytest.mark.parametrize("model", [prologues.PagedRotateHalf, Shifted])
def test_negative_slots_are_wrong(model: type[nn.Module]) -> None:
    run = torch.compile(model(), backend=mf.backend(CHECKED), fullgraph=True)
    with pytest.raises(ValueError, match="slot -1 of token 4 lies outside"), torch.no_grad():
        run(*with_slots(wrong(4, -1)))


def test_without_a_wrapper_the_report_says_that_nothing_checks() -> None:
    compiled(prologues.PagedRotateHalf(), clones(base.paged_args()), fuse_only(CHECKED))
    assumptions = mf.reports()[-1].fused[0].assumptions
    assert any("nothing checks the slots" in text for text in assumptions)
    assert any("slots are non-negative" in text for text in assumptions)


def test_layers_with_the_same_slots() -> None:
    model = prologues.Layers(count=2)
    run = torch.compile(model, backend=mf.backend(CHECKED), fullgraph=True)
    args = list(prologues.layers_args(count=2))
    with torch.no_grad():
        run(*clones(tuple(args)))
        args[3] = torch.full_like(args[3], ROWS)
        with pytest.raises(mf.SlotError):
            run(*args)


def test_skipped_tokens_are_no_error() -> None:
    model, args = prologues.NpuOperators(version=1), with_slots(wrong(2, -1))
    assert_as_exact(model, args, compiled(model, clones(args), mf.backend(CHECKED)))
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place"
    with pytest.raises(mf.SlotError, match=f"slot {ROWS} of token 2"):
        compiled(model, clones(with_slots(wrong(2, ROWS))), mf.backend(CHECKED))


class InBlocks(base.Base):
    """Two inputs hold the blocks and the places in them."""

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        torch._check(args[3].shape[1] == args[4].shape[1])  # as many blocks are guarded
        return super().forward(*args[:5], args[5:])  # type: ignore[arg-type]

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache[slots[0], slots[1], 0] = c_kv
        kr_cache[slots[0], slots[1], 0] = k_pe


@pytest.mark.parametrize("place", [-1, base.BLOCK_SIZE])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_place_outside_its_block_is_wrong(dynamic: bool, place: int) -> None:
    *others, slots = base.paged_args()
    run = torch.compile(InBlocks(), backend=mf.backend(CHECKED), fullgraph=True)
    places = slots % base.BLOCK_SIZE
    for cache, axis in itertools.product(others[3:] if dynamic else (), (0, 1)):
        torch._dynamo.mark_dynamic(cache, axis)
    with torch.no_grad():
        run(*others, slots // base.BLOCK_SIZE, places)
    assert mf.reports()[-1].fused[0].placement == "in place"
    places[3], caches = place, clones(tuple(others[3:]))
    with (
        pytest.raises(mf.SlotError, match=f"place {place}, outside a block of 16"),
        torch.no_grad(),
    ):
        run(*others, slots // base.BLOCK_SIZE, places)
    assert all(torch.equal(cache, then) for cache, then in zip(others[3:], caches, strict=True))


class FromStarts(base.Base):
    """As many tokens of each sequence as x has, from its own start on."""

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(*(part.flatten(0, 1) for part in args[:3]), *args[3:])

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        for cache, rows in ((kv_cache, c_kv), (kr_cache, k_pe)):
            rows = rows.view(2, -1, rows.shape[-1])
            places = slots[:, None] + torch.arange(rows.shape[1])
            cache[torch.arange(2)[:, None], places] = rows


class InRowsOfAll(FromStarts):
    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        places = slots[:, None] + torch.arange(len(c_kv) // 2)
        places = (places + torch.arange(2)[:, None] * (ROWS // 2)).flatten()
        for cache, rows in ((kv_cache, c_kv), (kr_cache, k_pe)):
            cache.view(-1, rows.shape[-1])[places] = rows


@pytest.mark.parametrize("kind", [FromStarts, InRowsOfAll])
def test_the_last_place_from_a_start_on_is_in_the_sequence(kind: type[base.Base]) -> None:
    *rest, kv_cache, kr_cache, _ = base.paged_args(6)
    caches = [cache.view(2, -1, cache.shape[-1]) for cache in (kv_cache, kr_cache)]
    rest = [part.view(2, 3, -1) for part in rest]
    for tokens in rest:
        torch._dynamo.mark_dynamic(tokens, 1)
    args = (*rest, *caches, torch.tensor([0, ROWS // 2 - 3]))
    run = torch.compile(kind(), backend=mf.backend(CHECKED), fullgraph=True)
    with torch.no_grad():
        run(*args)
        assert mf.reports()[-1].fused[0].placement == "in place"
        args[-1][1] += 1
        with pytest.raises(mf.SlotError, match=f"places {ROWS // 2 - 2} to {ROWS // 2}, outside"):
            run(*args)
