"""Caches of sequences, [B, S_max, width], as ports and teaching code write them, each in this
project's words; and slots that are spread over sequences so that two tokens have one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import BLOCK_SIZE, DR, HCKV, HE, Base, paged_caches, rotated, tables
from .entry import IN_PLACE, OURS, STAGED, entry, miss


def batch(sequences: int, length: int) -> tuple[Tensor, ...]:
    cos, sin = tables(sequences * length)
    x, lead = torch.randn(sequences, length, HE).bfloat16(), (sequences, length)
    return x, cos.view(*lead, DR), sin.view(*lead, DR)


def caches(sequences: int, *rows: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(sequences, *rows, width).bfloat16() for width in (HCKV, DR))


def of_each(sequences: int = 3, length: int = 5, rows: int = 32) -> Tensor:
    return torch.stack([torch.randperm(rows)[:length] for _ in range(sequences)])


def one_token_each() -> tuple[Tensor, ...]:
    return *batch(6, 1), *caches(6, 32), torch.randint(0, 32, (6,))


def positions_of_each() -> tuple[Tensor, ...]:
    return *batch(3, 5), *caches(3, 32), of_each()


def positions_of_all() -> tuple[Tensor, ...]:
    return *batch(3, 5), *caches(4, 2048), torch.randperm(2048)[:5]


class Dense(Base):
    """Rows are stored by ``store``, and read by every sequence from its own."""

    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        raise NotImplementedError

    def of_key(self, where: Tensor) -> Tensor:
        return where

    def rows(self, cache: Tensor, sequences: int) -> Tensor:
        return cache[:sequences]

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        kr_cache: Tensor,
        where: Tensor,
        *more: Tensor,
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        self.store(kv_cache, c_kv, where, *more)
        self.store(kr_cache, rotated(k_pe, cos, sin), self.of_key(where), *more)
        query = torch.einsum("bshd,hdc->bshc", q_nope, self.w_uk())
        q_pe = rotated(q_pe, cos.unsqueeze(2), sin.unsqueeze(2))
        kv, kr = (self.rows(cache, len(x)) for cache in (kv_cache, kr_cache))
        scores = torch.einsum("bshc,btc->bhst", query, kv)
        return scores + torch.einsum("bshr,btr->bhst", q_pe, kr)


@entry(
    IN_PLACE, source="batched decoders of teaching code", tags="cache", alone=(STAGED,),
    args=one_token_each,
)  # fmt: skip
class OwnRowOfTheBatch(Dense):
    """Each sequence stores one row, at its own position."""

    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        cache[torch.arange(len(rows)), where] = rows.squeeze(1)


@entry(
    IN_PLACE, source="ports of Llama's cache", tags="cache", alone=(STAGED,), args=positions_of_each
)
class OwnPositions(Dense):
    def sequences(self, rows: Tensor) -> Tensor:
        return torch.arange(len(rows))[:, None]

    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        cache[self.sequences(rows), where] = rows


@entry(IN_PLACE, source=OURS, tags="cache", alone=(STAGED,), args=positions_of_each)
class PositionsWithTheirSequences(OwnPositions):
    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        cache.index_put_((self.sequences(rows).expand_as(where), where), rows)


@entry(IN_PLACE, source=OURS, tags="cache", alone=(STAGED,), args=positions_of_each)
class PositionsInRowsOfAll(OwnPositions):
    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        slots = self.sequences(rows) * cache.shape[1] + where
        cache.view(-1, rows.shape[-1])[slots.flatten()] = rows.flatten(0, 1)


@entry(STAGED, source=OURS, tags="cache", args=positions_of_each)
class SharedRows(PositionsInRowsOfAll):
    def sequences(self, rows: Tensor) -> Tensor:
        return super().sequences(rows) // 2


@entry(
    IN_PLACE, source="ports to torch.export", tags="cache, symbolic", alone=(STAGED,),
    args=positions_of_each,
)  # fmt: skip
class KnownMultiples(OwnPositions):
    """The model says that its caches are whole blocks, however long they are."""

    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        torch._check(cache.shape[1] % BLOCK_SIZE == 0)
        super().store(cache, rows, where)


@entry(
    IN_PLACE, source="ports of Llama's cache", tags="cache", alone=(STAGED,), args=positions_of_all
)
class OnePositionForAll(OwnPositions):
    """Positions are the same in all sequences; there is room for more of these."""


@entry(IN_PLACE, source="gpt-fast", tags="cache", alone=(STAGED,), args=positions_of_each)
class Scattered(Dense):
    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        cache.scatter_(1, where.unsqueeze(-1).expand(-1, -1, rows.shape[-1]), rows)


def one_stream() -> tuple[Tensor, ...]:
    return *batch(1, 5), *caches(1, 32), torch.randperm(32)[:5]


@entry(IN_PLACE, source="gpt-fast", tags="cache", alone=(STAGED,), args=one_stream)
class OneStream(Dense):
    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        cache.index_copy_(1, where, rows)


def head_of_one() -> tuple[Tensor, ...]:
    return *batch(2, 3), *caches(2, 1, 32), torch.zeros(4)


@entry(IN_PLACE, source="ports of transformers", tags="cache", alone=(STAGED,), args=head_of_one)
class AssignedBehindTheHead(Dense):
    """[B, 1, S_max, width], from the fifth row on."""

    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        cache[:, :, len(where) : len(where) + rows.shape[1]] = rows.unsqueeze(1)

    def rows(self, cache: Tensor, sequences: int) -> Tensor:
        return cache.squeeze(1)


@entry(STAGED, source="ports of Flax", tags="cache, symbolic", args=one_token_each)
class OneHot(Dense):
    """Where a mask says so, the new row stands in place of the old one."""

    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        here = torch.arange(cache.shape[1]) == where[:, None]
        cache.copy_(torch.where(here.unsqueeze(-1), rows, cache))


# -- places that are not the tokens' own


def _of(what: str) -> str:
    return f"rows of sequences, {what}"


@miss(IN_PLACE, tags="cache, run", of=_of("by sequence and place"), args=positions_of_each)
class FromOneBefore(OwnPositions):
    def sequences(self, rows: Tensor) -> Tensor:
        return torch.arange(len(rows))[:, None] - 1


@miss(STAGED, tags="cache, run", of=_of("by one position for all"), args=positions_of_all)
class KeyInAnotherOrder(OwnPositions):
    def of_key(self, where: Tensor) -> Tensor:
        return where.flip(0)


def as_many_as_long() -> tuple[Tensor, ...]:
    return *batch(3, 3), *caches(3, 32), of_each(3, 3)


@miss(STAGED, tags="cache, run", of=_of("that are scattered"), args=as_many_as_long)
class KeyOfAnotherSequence(Scattered):
    def of_key(self, where: Tensor) -> Tensor:
        return where.t()


@miss(STAGED, tags="cache, run", of=_of("by one position for all"), args=as_many_as_long)
class TokensOfAnotherSequence(OwnPositions):
    def store(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        super().store(cache, rows.transpose(0, 1), where)


class Paged(Dense):
    """Rows of all sequences in one pool; ``slots`` are those of two by three tokens."""

    def slots(self, where: Tensor, *more: Tensor) -> Tensor:
        raise NotImplementedError

    def store(self, cache: Tensor, rows: Tensor, where: Tensor, *more: Tensor) -> None:
        cache.view(-1, rows.shape[-1])[self.slots(where, *more)] = rows

    def rows(self, cache: Tensor, sequences: int) -> Tensor:
        return cache.view(1, -1, cache.shape[-1]).expand(sequences, -1, -1)


def pool_and(*where: Tensor) -> tuple[Tensor, ...]:
    return *batch(2, 3), *paged_caches(), *where


def blocks_and_positions() -> tuple[Tensor, ...]:
    return pool_and(torch.randperm(4)[:2], torch.tensor([0, 16, 33]))


@miss(STAGED, tags="cache, run", of=_of("in blocks"), args=blocks_and_positions)
class PlacesMeetInABlock(Paged):
    """Positions of one place each, in the one block of each sequence."""

    def slots(self, where: Tensor, *more: Tensor) -> Tensor:
        (positions,) = more
        return where[:, None] * BLOCK_SIZE + positions % BLOCK_SIZE


def table_and_places() -> tuple[Tensor, ...]:
    return pool_and(torch.randperm(64).view(4, 16), torch.tensor([0, 5, 3]))


@miss(STAGED, tags="cache, run", of=_of("looked up in a table"), args=table_and_places)
class OneEntryForAll(Paged):
    """Every sequence looks up the row of the first."""

    def slots(self, where: Tensor, *more: Tensor) -> Tensor:
        (places,) = more
        return where[torch.zeros(2, 1, dtype=torch.int64), places]


@miss(
    STAGED, tags="cache, run", of=_of("bounded below"),
    args=lambda: pool_and(torch.randperm(64)[:3]),
)  # fmt: skip
class SpreadByABound(Paged):
    def slots(self, where: Tensor, *more: Tensor) -> Tensor:
        return torch.maximum(where, torch.zeros(2, 1, dtype=torch.int64))


def blocks_and_places() -> tuple[Tensor, ...]:
    return pool_and(torch.randperm(4), torch.randperm(4)[:3], torch.randperm(16)[:3])


@miss(STAGED, tags="cache, run", of=_of("by block and place"), args=blocks_and_places)
class OneBlockForAll(Paged):
    def store(self, cache: Tensor, rows: Tensor, where: Tensor, *more: Tensor) -> None:
        entries, places = more
        blocks = where[entries].expand(2, 3)
        cache[blocks, places.expand(2, 3)] = rows.unsqueeze(2)
