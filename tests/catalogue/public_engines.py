"""Absorbed prologues as engines assemble, join and cut them, in our words; and near ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import (
    BLOCK_SIZE,
    DR,
    HCKV,
    HCQ,
    HE,
    Base,
    D,
    H,
    Parts,
    attend,
    linear,
    npu,
    paged_args,
    rotated,
)
from .entry import IN_PLACE, STAGED, entry, miss
from .prologues import NpuOperators
from .public_serving import ROW, Compressed, halves, pairs, sequences


def half_tables(tokens: int = 8) -> tuple[Tensor, ...]:
    x, cos, sin, *caches = paged_args(tokens)
    return x, cos[:, :H].contiguous(), sin[:, :H].contiguous(), *caches


def half_tables_and_rows(tokens: int = 8) -> tuple[Tensor, ...]:
    x, cos, sin, *_ = half_tables(tokens)
    return x, cos, sin, torch.randn(64, 1, ROW).bfloat16(), torch.randperm(64)[:tokens]


# -- norm and rotation are written over what they read


class OneDownProduct(Base):
    """Everything is a view of one product of x."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_a_proj = linear(HE, HCQ + ROW)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return halves(x, cos, sin)

    def assembled(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        c_q, kv = self.qkv_a_proj(x).split([HCQ, ROW], -1)
        q, kv = (
            self.q_b_proj(self.q_a_layernorm(c_q)).view(-1, self.heads, D + DR),
            kv.view(-1, 1, ROW),
        )
        kv[..., :HCKV].copy_(self.kv_a_layernorm(kv[..., :HCKV]))
        for rope in (q[..., -DR:], kv[..., -DR:]):
            rope.copy_(self.turn(rope, cos.unsqueeze(1), sin.unsqueeze(1)))
        return q, kv

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q, kv = self.assembled(x, cos, sin)
        kv_rows, kr_rows = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        kv_rows[slots], kr_rows[slots] = kv[:, 0, :HCKV], kv[:, 0, HCKV:]
        return attend(self.absorb(q[..., :-DR]), q[..., -DR:], kv_rows, kr_rows)


entry(
    IN_PLACE,
    source="LightLLM",
    tags="whole, layout, cache, device, symbolic",
    args=half_tables,
    name="LightLlm",
)(OneDownProduct)


@entry(STAGED, source="LightLLM", tags="whole, layout, cache, symbolic", args=half_tables_and_rows)
class LightLlmRows(OneDownProduct):
    """Whole rows, rotated in pairs."""

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return pairs(x, cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        q, kv = self.assembled(x, cos, sin)
        rows[slots] = kv
        return attend(self.absorb(q[..., :-DR]), q[..., -DR:], rows[:, 0, :HCKV], rows[:, 0, HCKV:])


@miss("q_lora.interrupted", tags="layout, norm", of="LightLLM's rows", args=half_tables_and_rows)
class NormedOverTheQuery(LightLlmRows):
    """The latent's norm is written one column too far to the left, over the query's latent."""

    def assembled(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        product = self.qkv_a_proj(x)
        c_q, kv = product[:, :HCQ], product[:, HCQ:].view(-1, 1, ROW)
        product[:, HCQ - 1 : HCQ + HCKV - 1].copy_(self.kv_a_layernorm(kv[:, 0, :HCKV]))
        q = self.q_b_proj(self.q_a_layernorm(c_q)).view(-1, self.heads, D + DR)
        for rope in (q[..., -DR:], kv[..., -DR:]):
            rope.copy_(self.turn(rope, cos.unsqueeze(1), sin.unsqueeze(1)))
        return q, kv


# -- joins of which parts are read


@entry(IN_PLACE, source="dlinfer", tags="layout, readers, cache, device, symbolic")
class DlInfer(Base):
    """The latent is joined with the key before its rotation, and cut out of that to be written."""

    start = 0

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        key = torch.cat([c_kv, k_pe], -1)
        self.write(
            kv_cache,
            kr_cache,
            slots,
            key[..., self.start : self.start + HCKV],
            rotated(k_pe, cos, sin),
        )
        q_pe = rotated(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        return attend(self.absorb(q_nope), q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


@miss("reader.latent", tags="layout, readers", of="dlinfer's join")
class OneColumnLater(DlInfer):
    """What is written has the first column of the key in it, before its rotation."""

    start = 1


@entry(IN_PLACE, source="small engines", tags="layout, cache, device")
class JoinedForTwoCaches(Base):
    """A latent row is made, and split again before it is written, by block and place."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        row = torch.cat([c_kv.unsqueeze(1), k_pe.unsqueeze(1)], -1)
        block, place = slots // 16, slots % 16
        kv_cache[block, place], kr_cache[block, place] = row.split([HCKV, DR], -1)


@miss(STAGED, tags="layout, cache, run", of="a row that is split again")
class JoinedTheOtherWay(JoinedForTwoCaches):
    """Cut at the same place, but the key stands first."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        row = torch.cat([k_pe, c_kv], -1)
        kv_cache.view(-1, HCKV)[slots], kr_cache.view(-1, DR)[slots] = row.split([HCKV, DR], -1)


@entry(IN_PLACE, source="llama.cpp's graph", tags="layout, device, symbolic")
class QueryJoinedAndSplit(Parts):
    """Query and query_rope are one tensor, which attention splits."""

    def scores(self, q_nope: Tensor, q_pe: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
        query = torch.cat([self.absorb(q_nope), q_pe], -1)
        return attend(*query.split([HCKV, DR], -1), kv_rows, kr_rows)


def hidden_and_tables() -> tuple[Tensor, ...]:
    return paged_args()[:3]


@entry(
    STAGED, source="training code", tags="layout, readers, symbolic", args=hidden_and_tables,
    detail="the rows of kv_cache are written to no cache as they are",
)  # fmt: skip
class RowReturned(Base):
    """The latent row is given back, and no cache is written."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        row = torch.cat([c_kv, rotated(k_pe, cos, sin)], -1)
        return self.absorb(q_nope), rotated(q_pe, cos.unsqueeze(1), sin.unsqueeze(1)), row


# -- one key for all heads


@entry(IN_PLACE, source="a streaming engine for CPUs", tags="rope, layout, device, symbolic")
class KeyOfEveryHead(Base):
    """The key is repeated for the heads, rotated beside the query, and kept once."""

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.kept(self.rotate(self.scaled(k_pe.expand(-1, self.heads, -1)), c, s))

    def scaled(self, keys: Tensor) -> Tensor:
        return keys

    def kept(self, keys: Tensor) -> Tensor:
        return keys[:, :1]


@miss("scale.unequal", tags="rope", of="a key that is rotated for each head")
class OneKeyDoubled(KeyOfEveryHead):
    """The key of the last head is doubled, and kept."""

    def scaled(self, keys: Tensor) -> Tensor:
        return torch.cat([keys[:, :-1], 2 * keys[:, -1:]], 1)

    def kept(self, keys: Tensor) -> Tensor:
        return keys[:, -1:]


@miss("reader.latent", tags="rope, readers", of="a key that is rotated for each head")
class EveryHeadReturned(KeyOfEveryHead):
    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.keys

    def kept(self, keys: Tensor) -> Tensor:
        self.keys = keys
        return keys[:, :1]


# -- products with W_uk


@entry(STAGED, source="optimum-habana", tags="whole, absorb, device, symbolic", args=sequences)
class Habana(Compressed):
    """W_uk is repeated over the sequences, which stand behind the heads."""

    def matrices(self) -> Tensor:
        return self.w_uk().unsqueeze(1)

    def scores(self, q_nope: Tensor, q_pe: Tensor, rows: Tensor, rope: Tensor) -> Tensor:
        query = torch.matmul(q_nope.transpose(0, 1), self.matrices()).transpose(0, 1)
        return torch.matmul(query, rows.unsqueeze(1).mT) + q_pe @ rope.unsqueeze(1).mT


@miss("proof.differs", tags="absorb", of="a W_uk that is repeated over sequences", args=sequences)
class AMatrixForEachSequence(Habana):
    """As many sequences as heads, and the matrices are theirs."""

    def matrices(self) -> Tensor:
        return self.w_uk().unsqueeze(0)


@miss("absorb.absent", tags="absorb", of="a W_uk that is repeated over sequences", args=sequences)
class OtherHeadsInOneSequence(Habana):
    def matrices(self) -> Tensor:
        return torch.stack([self.w_uk(), self.w_uk().flip(0)], 1)


# -- views of the caches that the module keeps, so that the graph gives them out


def flat_caches() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x, cos, sin, kv_cache.view(-1, 1, HCKV), kr_cache.view(-1, 1, DR), slots


@entry(
    IN_PLACE, source="SGLang on an NPU", tags="whole, operators, cache, symbolic", args=flat_caches,
    alone=("reader.latent",),
)  # fmt: skip
class KeptViews(NpuOperators):
    """The first version of the operator: its schema does not say that it writes."""

    def paged(self, cache: Tensor, width: int) -> Tensor:
        return cache.view(-1, BLOCK_SIZE, 1, width)

    def kept(self, cache: Tensor) -> Tensor:
        return cache

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        c, s = cos.view(-1, 1, 1, DR), sin.view(-1, 1, 1, DR)
        q_nope, q_pe = self.query(x)
        q_pe = npu.npu_interleave_rope(q_pe.unsqueeze(2), c, s).squeeze(2)
        latent, gamma = self.kv_a_proj_with_mqa(x).view(-1, 1, 1, ROW), self.kv_a_layernorm
        kv, kr = self.paged(kv_cache, HCKV), self.paged(kr_cache, DR)
        self.kv_cache, self.kr_cache = self.kept(kv), self.kept(kr)
        rows = npu.npu_kv_rmsnorm_rope_cache(
            latent, gamma.weight, c, s, slots, kr, kv, epsilon=gamma.eps, cache_mode="PA_BNSD"
        )
        return self.absorb(q_nope), q_pe, *rows[:2]


@miss("reader.latent", tags="operators, cache", of="views of the caches that a module keeps")
class KeptCopies(KeptViews):
    """What is kept is the cache as it was before: a copy of rows that the kernel overwrites."""

    def paged(self, cache: Tensor, width: int) -> Tensor:
        return cache

    def kept(self, cache: Tensor) -> Tensor:
        return cache.clone()


# -- a factor for each token


def with_positions() -> tuple[Tensor, ...]:
    return *paged_args(), torch.arange(8) * 4000


@entry(
    IN_PLACE,
    source="Mistral 4 in NeMo",
    tags="whole, absorb, layout, device, symbolic",
    args=with_positions,
)
class QueryByPosition(Base):
    """The whole query times a number for each position, behind its rotation and before W_uk."""

    def factor(self, positions: Tensor, q: Tensor) -> Tensor:
        return (1 + 0.1 * torch.log1p(torch.floor(positions / 8192)))[:, None, None].to(q.dtype)

    def scaled(
        self, q_nope: Tensor, q_pe: Tensor, c: Tensor, s: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = torch.cat([q_nope, rotated(q_pe, c, s)], -1)
        q_nope, q_pe = (q * self.factor(positions, q)).split([D, DR], -1)
        return q_nope, q_pe

    def forward(self, *given: Tensor) -> Tensor:
        x, cos, sin, kv_cache, kr_cache, slots, positions = given
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        q_nope, q_pe = self.scaled(q_nope, q_pe, cos.unsqueeze(1), sin.unsqueeze(1), positions)
        self.write(kv_cache, kr_cache, slots, c_kv, rotated(k_pe, cos, sin))
        return attend(self.absorb(q_nope), q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


@entry(IN_PLACE, source="Mistral 4", tags="absorb, symbolic", args=with_positions)
class PartsByPosition(QueryByPosition):
    def scaled(
        self, q_nope: Tensor, q_pe: Tensor, c: Tensor, s: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        factor = self.factor(positions, q_nope)
        return q_nope * factor, rotated(q_pe, c, s) * factor


@miss(
    "scale.unequal",
    tags="absorb, rope",
    of="a query that is scaled by position",
    args=with_positions,
)
class ScaledBeforeRotation(QueryByPosition):
    def scaled(
        self, q_nope: Tensor, q_pe: Tensor, c: Tensor, s: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        factor = self.factor(positions, q_nope)
        return q_nope * factor, rotated(q_pe * factor, c, s)


@miss("scale.unequal", tags="absorb", of="a query that is scaled by position", args=with_positions)
class ScaledByColumnAndPosition(QueryByPosition):
    """The number differs from column to column of a head."""

    def factor(self, positions: Tensor, q: Tensor) -> Tensor:
        return super().factor(positions, q) + self.q_a_layernorm.weight[: q.shape[-1]]


@miss("scale.unequal", tags="absorb", of="a query that is scaled by position", args=with_positions)
class ScaledByNeighbour(QueryByPosition):
    """As many numbers as tokens, but one for each head and half the tokens."""

    def factor(self, positions: Tensor, q: Tensor) -> Tensor:
        return (
            super().factor(positions, q)[:4].reshape(1, 2, 2, 1).expand(4, 2, 2, 1).reshape(8, 2, 1)
        )


# -- caches of requests, and slots that are looked up


def tables_of_blocks(tokens: int = 6) -> tuple[Tensor, ...]:
    *given, _ = paged_args(tokens)
    table = torch.randperm(4)[None].expand(tokens, 4).contiguous()
    return *given, table, torch.arange(tokens) * 7


@entry(IN_PLACE, source="gLLM", tags="cache, device, symbolic", args=tables_of_blocks)
class BlocksGathered(Base):
    """Each token has a row of block numbers; its own is gathered by its position."""

    def entry_of(self, positions: Tensor) -> Tensor:
        return torch.div(positions, BLOCK_SIZE, rounding_mode="floor")[:, None]

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        *given, table, positions = given  # type: ignore[assignment]
        block = torch.gather(table, 1, self.entry_of(positions))[:, 0]
        return super().forward(*given, block * BLOCK_SIZE + positions % BLOCK_SIZE)


@miss(STAGED, tags="cache, run", of="gathered blocks", args=tables_of_blocks)
class OneBlockForTwo(BlocksGathered):
    """Two tokens may have one entry of the table and one place."""

    def entry_of(self, positions: Tensor) -> Tensor:
        return torch.div(positions, 2 * BLOCK_SIZE, rounding_mode="floor")[:, None]


def requests_and_positions(requests: int = 6) -> tuple[Tensor, ...]:
    x, cos, sin, *_ = paged_args(requests)
    caches = (torch.randn(8, 32, width).bfloat16() for width in (HCKV, DR))
    return x, cos, sin, *caches, torch.randperm(8)[:requests], torch.randint(0, 32, (requests,))


@entry(IN_PLACE, source="nano engines", tags="cache", alone=(STAGED,), args=requests_and_positions)
class RowOfEachRequest(Base):
    """A dense cache for each request, written at its own position."""

    def forward(self, *given: Tensor) -> Tensor:
        x, cos, sin, kv_cache, kr_cache, requests, positions = given
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        kv_cache[requests, positions] = c_kv
        kr_cache[requests, positions] = rotated(k_pe, cos, sin)
        q_pe = rotated(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        scores = torch.einsum("thc,tsc->ths", self.absorb(q_nope), kv_cache[requests])
        return scores + torch.einsum("thr,tsr->ths", q_pe, kr_cache[requests])


def many_rows_for_each() -> tuple[Tensor, ...]:
    *given, positions = requests_and_positions()
    caches = (torch.randn(8, 2048, width).bfloat16() for width in (HCKV, DR))
    return *given[:3], *caches, given[-1], positions + 1500


@entry(IN_PLACE, source="nano engines", tags="cache", alone=(STAGED,), args=many_rows_for_each)
class LongRowOfEachRequest(RowOfEachRequest):
    """More rows than a block has."""


def one_place_of_each_sequence() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = paged_args(2)
    caches = (torch.randn(2, 48, width).bfloat16() for width in (HCKV, DR))
    return x.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1), *caches, torch.tensor([5])


@entry(
    IN_PLACE,
    source="gpt-fast",
    tags="cache, layout",
    alone=(STAGED,),
    slack=1.3,
    args=one_place_of_each_sequence,
)
class CachesByPosition(Base):
    def forward(self, *given: Tensor) -> Tensor:
        x, cos, sin, kv_cache, kr_cache, positions = given
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        kv_cache[:, positions], kr_cache[:, positions] = c_kv, rotated(k_pe, cos, sin)
        query = torch.einsum("bshd,hdc->bshc", q_nope, self.w_uk())
        q_pe = rotated(q_pe, cos.unsqueeze(2), sin.unsqueeze(2))
        scores = torch.einsum("bshc,btc->bhst", query, kv_cache)
        return scores + torch.einsum("bshr,btr->bhst", q_pe, kr_cache)


# -- ports


def half_rows(tokens: int = 8) -> tuple[Tensor, ...]:
    x, cos, sin, *_ = half_tables(tokens)
    return x, cos, sin, torch.randn(8, BLOCK_SIZE, ROW).bfloat16(), torch.randperm(128)[:tokens]


@entry(STAGED, source="TensorRT-LLM", tags="whole, layout, cache, symbolic", args=half_rows)
class FusedQuery(OneDownProduct):
    """One buffer takes the absorbed query and its rotated part, one page table row the latents."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        c_q, c_kv, k_pe = self.qkv_a_proj(x).split([HCQ, HCKV, DR], -1)
        q = self.q_b_proj(self.q_a_layernorm(c_q)).view(-1, self.heads, D + DR)
        fused = x.new_empty(len(x), self.heads, ROW)
        fused[..., :HCKV].transpose(0, 1).copy_(torch.bmm(q[..., :D].transpose(0, 1), self.w_uk()))
        fused[..., HCKV:] = pairs(q[..., D:], cos.unsqueeze(1), sin.unsqueeze(1))
        row = torch.cat([self.kv_a_layernorm(c_kv), pairs(k_pe, cos, sin)], -1)
        pool.view(-1, ROW).index_copy_(0, slots, row)
        return torch.einsum("thc,sc->ths", fused.float(), pool.view(-1, ROW).float())


@entry(IN_PLACE, source="FastDeploy", tags="whole, layout, device, symbolic", args=half_tables)
class ByPermutations(OneDownProduct):
    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        c_q, c_kv, k_pe = torch.split(self.qkv_a_proj(x), [HCQ, HCKV, DR], dim=-1)
        q = self.q_b_proj(self.q_a_layernorm(c_q)).reshape([-1, self.heads, D + DR])
        c, s = cos[:, None], sin[:, None]
        q_pe, k_pe = halves(q[..., D:], c, s), halves(k_pe.reshape([-1, 1, DR]), c, s)
        self.write(kv_cache, kr_cache, slots, self.kv_a_layernorm(c_kv), k_pe.squeeze(1))
        query = torch.bmm(q[..., :D].permute([1, 0, 2]), self.w_uk()).permute([1, 0, 2])
        return attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


def matrices() -> tuple[Tensor, ...]:
    """A rotation for each token, as the matrix that it is."""
    angles, pair = torch.rand(8, H) * 6, 2 * torch.arange(H)
    turn = torch.zeros(8, DR, DR)
    turn[:, pair, pair] = turn[:, pair + 1, pair + 1] = angles.cos()
    turn[:, pair, pair + 1], turn[:, pair + 1, pair] = angles.sin(), -angles.sin()
    x, _, _, *caches = paged_args()
    return x, turn.bfloat16(), *caches


@entry(
    STAGED,
    source="ports of RoFormer",
    tags="rope, tables, device, symbolic",
    args=matrices,
    slack=1.3,
)
class RotationMatrices(Base):
    """The kernel turns by no angle; the model's own products stay."""

    def forward(  # type: ignore[override]
        self, x: Tensor, turn: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        k_pe = torch.einsum("tr,trs->ts", k_pe, turn)
        self.write(kv_cache, kr_cache, slots, c_kv, k_pe)
        q_pe = torch.einsum("thr,trs->ths", q_pe, turn)
        return attend(self.absorb(q_nope), q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))
