"""Order, aliases and mutation: whatever stands around a prologue, the fused run leaves and returns
what it should.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import (
    BLOCK_SIZE,
    BLOCKS,
    DR,
    HCKV,
    Base,
    attend,
    paged_args,
    paged_caches,
)
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, both_ways, clones, compiled


class ReadBetweenTheWrites(Base):
    """The rope cache is read, as it was, between the two writes."""

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv_cache.view(-1, HCKV)[slots] = c_kv
        self.seen = kr_cache.view(-1, DR)[slots].float().sum(-1)
        kr_cache.view(-1, DR)[slots] = k_pe

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.seen


class WrittenTwice(Base):
    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)


class Overwritten(Base):
    """A row is cleared right after the write."""

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)
        kv_cache.view(-1, HCKV)[slots[:1]] = 0


class ComputedTwice(Base):
    """One prologue, spelled out twice: nobody has run CSE."""

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        first, _ = super().forward(*args)
        second, _ = super().forward(*args)
        return first + second, first


class ReturnsCaches(Base):
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        scores, _ = super().forward(x, cos, sin, kv_cache, kr_cache, slots)
        return scores, kv_cache, kr_cache


class TwoLayersOnePool(nn.Module):
    """The second layer reads and writes what the first has written."""

    shift = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Base() for _ in range(2))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        first, _ = self.layers[0](x, cos, sin, kv_cache, kr_cache, slots)
        other = (slots + self.shift) % (BLOCKS * BLOCK_SIZE)
        second, _ = self.layers[1](
            x + first.mean().to(x.dtype), cos, sin, kv_cache, kr_cache, other
        )
        return first, second


class TwoLayersOtherRows(TwoLayersOnePool):
    shift = 3


class TiedLayers(nn.Module):
    """Two layers with the same parameters and caches of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Base()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        first, _ = self.layer(x, cos, sin, *caches[:2], slots)
        second, _ = self.layer(x + first.mean().to(x.dtype), cos, sin, *caches[2:], slots)
        return first, second


class CombinedPool(Base):
    """Both caches are columns of one tensor."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        rows = pool.view(-1, HCKV + DR)
        rows[slots, :HCKV] = c_kv
        rows[slots, HCKV:] = self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1)
        return attend(self.absorb(q_nope), self.rotate(q_pe, c, s), rows[:, :HCKV], rows[:, HCKV:])


class SplitStorage(Base):
    """Both caches are parts of one flat tensor, one after the other."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows = BLOCKS * BLOCK_SIZE
        kv_cache = pool[: rows * HCKV].view(BLOCKS, BLOCK_SIZE, 1, HCKV)
        kr_cache = pool[rows * HCKV :].view(BLOCKS, BLOCK_SIZE, 1, DR)
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)


def tied_args() -> tuple[Tensor, ...]:
    x, cos, sin, *_, slots = paged_args()
    return (x, cos, sin, slots, *paged_caches(), *paged_caches())


def pool_args(*shape: int) -> tuple[Tensor, ...]:
    x, cos, sin, *_, slots = paged_args()
    return x, cos, sin, torch.randn(shape).bfloat16(), slots


FLAT = BLOCKS * BLOCK_SIZE * (HCKV + DR)

# name: (model, arguments, placement of every fusion)
LEGAL: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], list[str]]] = {
    "read_between_the_writes": (ReadBetweenTheWrites, paged_args, ["staged"]),
    "written_twice": (WrittenTwice, paged_args, ["staged"]),
    "overwritten": (Overwritten, paged_args, ["in place"]),
    "computed_twice": (ComputedTwice, paged_args, ["in place"]),
    "returns_caches": (ReturnsCaches, paged_args, ["in place"]),
    "two_layers_one_pool": (TwoLayersOnePool, paged_args, ["in place", "staged"]),
    "two_layers_other_rows": (TwoLayersOtherRows, paged_args, ["in place", "staged"]),
    "tied_layers": (TiedLayers, tied_args, ["in place", "in place"]),
    "combined_pool": (
        CombinedPool,
        lambda: pool_args(BLOCKS, BLOCK_SIZE, 1, HCKV + DR),
        ["staged"],
    ),
    "split_storage": (SplitStorage, lambda: pool_args(FLAT), ["staged"]),
}


@pytest.mark.parametrize("name", one_in(2, LEGAL))
def test_fused_run_is_the_models(name: str) -> None:
    torch.manual_seed(0)
    model, args, placements = LEGAL[name]
    module, given = model(), args()
    for report, fused in both_ways(module, given, mf.Config(verify="all")):
        assert [f.placement.partition(":")[0] for f in report.fused] == placements, str(report)
        assert_as_exact(module, given, fused, slack=1.2)


def aliased(args: tuple[Tensor, ...], wide: bool = False) -> tuple[Tensor, ...]:
    """The arguments with both caches in one storage, as a serving stack's pool hands them out."""
    x, cos, sin, kv_cache, kr_cache, slots = clones(args, wide)
    pool = torch.cat([kv_cache.reshape(-1), kr_cache.reshape(-1)])
    kv_cache, kr_cache = (
        part.view_as(c)
        for part, c in zip(
            pool.split([kv_cache.numel(), kr_cache.numel()]), (kv_cache, kr_cache), strict=True
        )
    )
    return x, cos, sin, kv_cache, kr_cache, slots


def test_arguments_that_share_storage() -> None:
    torch.manual_seed(0)
    model, given = Base(), paged_args()
    fused = compiled(model, aliased(given), mf.backend())
    assert len(mf.reports()[-1].fused) == 1
    assert fused[-3].untyped_storage().data_ptr() == fused[-2].untyped_storage().data_ptr()
    assert_as_exact(model, given, fused)


def test_a_prologue_cut_by_a_graph_break_is_left_with_a_reason() -> None:
    class Cut(Base):
        def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
            torch._dynamo.graph_break()
            return super().latent(x)

    torch._dynamo.reset()
    known = len(mf.reports())
    model, given = Cut(), paged_args()
    with torch.no_grad():
        torch.compile(model, backend=mf.backend())(*clones(given))
    reports = mf.reports()[known:]
    assert not [fusion for report in reports for fusion in report.fused]
    assert {item.code for report in reports for item in report.rejected} <= {
        "kv_latent.absent",
        "rope.absent",
        "q_lora.absent",
    }


def test_a_collective_between_the_norm_and_the_projection_keeps_them_apart() -> None:
    """cann-recipes' sequence parallelism gathers c_q over ranks: the kernel has no place for
    that.
    """
    import torch.distributed as dist

    class Gathered(Base):
        def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
            return super().split(
                self.up(
                    torch.ops._c10d_functional.wait_tensor(
                        torch.ops._c10d_functional.all_reduce(q, "sum", "0")
                    )
                )
            )

        def __init__(self) -> None:
            super().__init__()
            self.up, self.q_b_proj = self.q_b_proj, nn.Identity()  # type: ignore[assignment]

    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        from mla_fusion.compile.device_graph import capture

        gm, _ = capture(Gathered(), *paged_args(), device="cpu")
        report = mf.explain(gm)
    finally:
        dist.destroy_process_group()
    assert not report.fused and [item.code for item in report.rejected] == ["q_lora.interrupted"], (
        str(report)
    )
