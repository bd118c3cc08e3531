"""What stands around a prologue: readers between its writes, several layers of one pool, empty
slices, hidden states that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .base import (
    BLOCK_SIZE,
    BLOCKS,
    DR,
    HCKV,
    HCQ,
    HE,
    Base,
    D,
    HfNorm,
    attend,
    paged_args,
    paged_caches,
)
from .entry import IN_PLACE, OURS, STAGED, entry, miss
from .layouts import Sequences, sequence_args
from .prologues import PagedRotateHalf


def tied_args() -> tuple[Tensor, ...]:
    x, cos, sin, *_, slots = paged_args()
    return (x, cos, sin, slots, *paged_caches(), *paged_caches())


def two_args() -> tuple[Tensor, ...]:
    return (*paged_args(), *paged_caches())


def pool_of(*shape: int) -> tuple[Tensor, ...]:
    x, cos, sin, *_, slots = paged_args()
    return x, cos, sin, torch.randn(shape).bfloat16(), slots


@entry(STAGED, source=OURS, tags="cache, readers")
class ReadBetweenTheWrites(Base):
    """The rope cache is read, as it was, between the two writes."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV)[slots] = c_kv
        self.seen = kr_cache.view(-1, DR)[slots].float().sum(-1)
        kr_cache.view(-1, DR)[slots] = k_pe

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.seen


@entry(STAGED, source=OURS, tags="cache")
class WrittenTwiceAlike(Base):
    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)


@entry(IN_PLACE, source=OURS, tags="cache")
class Overwritten(Base):
    """A row is cleared right after the write."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)
        kv_cache.view(-1, HCKV)[slots[:1]] = 0


@entry(IN_PLACE, source=OURS, tags="cache, readers")
class ReturnsCaches(Base):
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        scores, _ = super().forward(x, cos, sin, kv_cache, kr_cache, slots)
        return scores, kv_cache, kr_cache


@entry(IN_PLACE, STAGED, source=OURS, tags="cache")
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


@entry(IN_PLACE, STAGED, source=OURS, tags="cache")
class TwoLayersOtherRows(TwoLayersOnePool):
    shift = 3


@entry(IN_PLACE, IN_PLACE, source=OURS, tags="cache", args=tied_args)
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


@entry(STAGED, source=OURS, tags="cache", args=lambda: pool_of(BLOCKS, BLOCK_SIZE, 1, HCKV + DR))
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


@entry(
    IN_PLACE,
    alone=(STAGED,),
    source=OURS,
    tags="cache",
    args=lambda: pool_of(BLOCKS * BLOCK_SIZE * (HCKV + DR)),
)
class SplitStorage(Base):
    """Both caches are parts of one flat tensor, one after the other."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows = BLOCKS * BLOCK_SIZE
        kv_cache = pool[: rows * HCKV].view(BLOCKS, BLOCK_SIZE, 1, HCKV)
        kr_cache = pool[rows * HCKV :].view(BLOCKS, BLOCK_SIZE, 1, DR)
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)


@entry(IN_PLACE, source=OURS, tags="rope, layout")
class PartialRope(Base):
    """``cat((rotated, the rest))``, where the rest is empty."""

    def rotate(self, x: Tensor, c: Tensor, s_: Tensor) -> Tensor:
        width = c.shape[-1]
        return torch.cat((super().rotate(x[..., :width], c, s_), x[..., width:]), -1)


@entry(IN_PLACE, source=OURS, tags="readers")
class EmptyReader(Base):
    """Somebody keeps a slice of the raw query that is empty."""

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return c_q_raw[:, c_q_raw.shape[1] :].clone()


@entry(IN_PLACE, IN_PLACE, source=OURS, tags="cache", args=two_args)
class TwoAttentions(nn.Module):
    """Both read x, with weights and caches of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = PagedRotateHalf(), PagedRotateHalf()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        kv, kr, slots, other_kv, other_kr = rest
        return self.first(x, cos, sin, kv, kr, slots), self.second(
            x, cos, sin, other_kv, other_kr, slots
        )


def transposed() -> tuple[Tensor, ...]:
    x, *rest = sequence_args()
    return (x.transpose(0, 1).contiguous(), *rest)


def longer() -> tuple[Tensor, ...]:
    _, *rest = sequence_args()
    return (torch.randn(2, 8, HE).bfloat16(), *rest)


@entry(IN_PLACE, source=OURS, tags="layout", args=transposed)
class SequencesTurned(Sequences):
    """Hidden states are [S, B, He], as Megatron lays them out."""

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1), *args)


@entry(IN_PLACE, source=OURS, tags="layout", args=transposed)
class TurnedByEachLayer(SequencesTurned):
    """The layer before it keeps them [S, B, He]."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(HE, HE, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(self.before(x), *args)


@entry(IN_PLACE, source=OURS, tags="layout", args=longer)
class LastOnes(Sequences):
    """Of a longer sequence."""

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(x[:, -3:], *args)


@entry(IN_PLACE, source=OURS, tags="absorb")
class OneForAllHeads(Base):
    """One W_uk, repeated for each head: what is repeated along heads stays head by head."""

    def w_uk(self) -> Tensor:
        return self.kv_b_proj.weight[:D].expand(self.heads, D, HCKV)


class ForEachSequence(nn.Module):
    """Each sequence has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, HE, HCQ).bfloat16() * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


@miss("linear.hidden", tags="weights", of="Sequences", args=sequence_args)
class OwnWeights(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = ForEachSequence()  # type: ignore[assignment]


@entry(IN_PLACE, source=OURS, tags="readers")
class GateOnX(PagedRotateHalf):
    """Of experts, beside the query: those of other groups are at minus infinity."""

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        scores = torch.where(x[:, :8] > 0, x @ self.q_a_proj.weight[:8].T, -torch.inf)
        return *super().forward(x, *args), scores.sigmoid()


class KeepingNorm(HfNorm):
    """Keeps the normed rows as they are before they are rounded."""

    wide: Tensor

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        self.wide = self.weight.float() * (wide * scale)
        return self.wide.to(x.dtype)


@entry(IN_PLACE, source=OURS, tags="readers")
class WideAndRoundedRows(PagedRotateHalf):
    """The kernel returns a value once: who reads it, and the same value rounded, gets both."""

    norm = KeepingNorm

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        scores = super().forward(*args)
        wide = self.kv_a_layernorm.wide
        narrow = wide.to(torch.bfloat16)
        joined = torch.cat((wide, narrow.float()), -1)
        return scores, joined, narrow.half() - narrow, narrow.float() - narrow * 2


# -- inputs that the model writes beside its caches


def slots_first() -> tuple[Tensor, ...]:
    *args, slots = paged_args()
    return (slots, *args)


@entry(IN_PLACE, source=OURS, tags="cache, layout", args=slots_first)
class SlotsAdvanced(Base):
    """The slots of the next step."""

    def forward(self, slots: Tensor, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        found = super().forward(*args, slots)
        slots.add_(1)
        return found


@entry(IN_PLACE, source=OURS, tags="cache, layout", args=slots_first)
class SlotsAndHiddenAdvanced(SlotsAdvanced):
    def forward(self, slots: Tensor, x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        found = super().forward(slots, x, *args)
        x.add_(found[0].flatten(1).repeat(1, 8))  # rows of 128 numbers to one of 1024
        return found


@entry(IN_PLACE, source=OURS, tags="cache, layout")
class HiddenCleared(Base):
    """The hidden states are no longer needed."""

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        found = super().forward(x, *args)
        x.zero_()
        return found


def with_another() -> tuple[Tensor, ...]:
    args = paged_args()
    return (args[3].clone() + 1, *args)


@entry(IN_PLACE, source=OURS, tags="cache, layout", args=with_another)
class CacheKeptBehind(Base):
    """The cache as it is afterwards, in another input, which comes first."""

    def forward(self, kept: Tensor, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        found = super().forward(*args)
        kept.copy_(args[3])
        return found


@entry(STAGED, source=OURS, tags="cache, layout", args=with_another)
class CacheKeptBefore(Base):
    """The cache as it was."""

    def forward(self, kept: Tensor, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        kept.copy_(args[3])
        return super().forward(*args)


@entry(IN_PLACE, STAGED, source=OURS, tags="readers")
class TwoQueries(PagedRotateHalf):
    """A second query goes with the latent of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Base()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *held: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        first = super().forward(x, cos, sin, *held)
        q_nope, q_pe = self.other.query(x)
        q_pe = self.other.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        rows = held[0].view(-1, HCKV), held[1].view(-1, DR)
        return first, attend(self.other.absorb(q_nope), q_pe, *rows)


# -- copies of caches that the graph writes, which stay as they were


class OldCacheReturned(Base):
    """Gives out a cache as it was before the write."""

    copy: Callable[[Tensor], Tensor]

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        old = self.copy(kv_cache)
        return *super().forward(x, cos, sin, kv_cache, kr_cache, slots), old


class CopiesWritten(OldCacheReturned):
    """Leaves what it was given as it was."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        super().write(self.copy(kv_cache), self.copy(kr_cache), slots, c_kv, k_pe)


class CopiesWrittenBack(OldCacheReturned):
    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        own = self.copy(kv_cache), self.copy(kr_cache)
        super().write(*own, slots, c_kv, k_pe)
        for cache, written in zip((kv_cache, kr_cache), own, strict=True):
            cache.copy_(written)
            written.zero_()


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "by a join": lambda t: torch.cat((t, t[:0])),
    "by an assignment": lambda t: torch.slice_scatter(torch.zeros_like(t), t, 0, 0, t.shape[0]),
    "by clone": torch.clone,
}
for how, copy in COPIES.items():
    for model in (OldCacheReturned, CopiesWritten, CopiesWrittenBack):
        kind = type(f"{model.__name__} {how}", (model,), {"copy": staticmethod(copy)})
        if model is CopiesWritten:  # nobody reads the rows
            miss("kv_latent.absent", of="copies of caches", tags="cache, readers")(kind)
        else:
            entry(STAGED, source=OURS, tags="cache, readers")(kind)
