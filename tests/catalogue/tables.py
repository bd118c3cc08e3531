"""Where the rows of cos and sin come from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import (
    DR,
    HCKV,
    HE,
    Base,
    Prologue,
    attend,
    npu,
    one_token,
    paged_args,
    rotate_half,
    rotated,
    tables,
)
from .entry import IN_PLACE, OURS, STAGED, entry, miss
from .rotations import pairs


@entry(IN_PLACE, source=OURS, tags="tables, device")
class GatheredTables(Base):
    """Tables of all positions, indexed in the graph; slots serve as positions."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        positions = slots % 8
        return super().forward(
            x, cos[positions], sin.index_select(0, positions), kv_cache, kr_cache, slots
        )


@entry(IN_PLACE, source=OURS, tags="tables, device")
class TablesLookedUpTwice(Base):
    """Each side of the attention looks its rows up with an operator of its own."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.tables, self.positions = (cos, sin), slots % 8
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (table[self.positions].unsqueeze(1) for table in self.tables)
        return self.rotate(q_pe, c, s)

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (F.embedding(self.positions, table).unsqueeze(1) for table in self.tables)
        return self.rotate(k_pe, c, s)


@entry(IN_PLACE, source=OURS, tags="tables")
class TablesOfNumbers(Base):
    """The key reads them without an axis of heads."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(x)), 10.0 ** -(torch.arange(DR) % (DR // 2) / 8))
        angles = angles.view(len(x), *[1] * (x.dim() - 2), DR)
        return rotated(x, angles.cos().bfloat16(), angles.sin().bfloat16())

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe.squeeze(1), c, s).unsqueeze(1)


def halves_of_a_table() -> tuple[Tensor, ...]:
    x, cos, sin, *rest = paged_args(5)
    return (x, torch.cat([cos, sin], -1), *rest)


@entry(IN_PLACE, source=OURS, tags="tables", args=halves_of_a_table)
class OneTableIsAnArgument(Base):
    """cos and sin are the halves of one argument."""

    def forward(self, x: Tensor, joined: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, *joined.chunk(2, -1), *others)  # type: ignore[misc]


@miss("rope.tables_differ", tags="tables, run", of="OneTableIsAnArgument", args=halves_of_a_table)
class OtherHalvesForTheKey(OneTableIsAnArgument):
    """The key is rotated by the halves in the other order."""

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe, s, c)


def longer_table_args() -> tuple[Tensor, ...]:
    x, _, _, *rest = paged_args(5)
    return (x, *tables(13), *rest)


@entry(IN_PLACE, source=OURS, tags="tables, device, symbolic", args=longer_table_args)
class TablesFromTheEnd(Base):
    """Tables of every position so far, of which the last rows are the new tokens'."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        before = cos.shape[0] - x.shape[0]
        return super().forward(x, cos[before:], sin[before:], kv_cache, kr_cache, slots)


@entry(IN_PLACE, source="transformers", tags="tables, device, symbolic")
class ComputedTables(Base):
    """Hugging Face: frequencies times positions, in float32."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        inverse = 1.0 / (
            10000 ** (torch.arange(0, DR, 2, device=x.device, dtype=torch.float32) / DR)
        )
        angles = (inverse[:, None] @ slots[None, :].float()).transpose(0, 1)
        both = torch.cat((angles, angles), -1)
        return super().forward(
            x, both.cos().to(x.dtype), both.sin().to(x.dtype), kv_cache, kr_cache, slots
        )


@entry(IN_PLACE, source="SGLang", tags="tables, device")
class ChunkedTables(Base):
    """SGLang: one table [cos | sin], chunked and repeated."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        joined = torch.cat([cos[:, : DR // 2], sin[:, : DR // 2]], -1)[slots % 8]
        c, s_ = joined.chunk(2, -1)
        return super().forward(x, c.repeat(1, 2), s_.repeat(1, 2), kv_cache, kr_cache, slots)


@entry(IN_PLACE, source=OURS, tags="tables, device, symbolic")
class OneRowOfABuffer(Base):
    """All tokens are rotated by one row [Dr] of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for name, table in zip(("cos", "sin"), tables(16), strict=True):
            self.register_buffer(name, table)

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * self.cos[7] + rotate_half(x) * self.sin[7]


@entry(IN_PLACE, source=OURS, tags="tables, device, symbolic")
class AnglesByAProduct(Base):
    """Angles of three positions, as of pictures: positions [T, 3] times a buffer [3, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(3, DR // 2))

    def forward(self, x: Tensor, cos: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.stack([args[-1] % 8, args[-1] // 8, args[-1]], -1).float()
        angles = torch.cat([places @ self.frequencies.float()] * 2, -1)
        return super().forward(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), *args[1:])


@entry(IN_PLACE, source=OURS, tags="tables, device, symbolic")
class TurnedByALiteralMatrix(Base):
    """Rows [T, N, Dr] times a literal matrix, which torch repeats for each token."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        half = torch.eye(DR // 2, dtype=x.dtype, device=x.device)
        zeros = torch.zeros_like(half)
        matrix = torch.cat([torch.cat([zeros, half], 1), torch.cat([-half, zeros], 1)])
        return (x * c).addcmul_(x @ matrix, s, value=1)


def sequences() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = paged_args(6)
    past = torch.randn(2, 1, 7, HCKV).bfloat16(), torch.randn(2, 1, 7, DR).bfloat16()
    return x.view(2, 3, HE), cos[:3], sin[:3], *past


@entry(STAGED, source=OURS, tags="layout, symbolic", args=sequences)
class HeadsFirst(Prologue):
    """[B, N, S, ..], the rotated query scaled before it meets the keys of its own sequence."""

    def rotate(self, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        return rotated(x, c, sn)

    def tables(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor
    ) -> tuple[Tensor, ...]:
        q_nope, q_pe = (part.transpose(1, 2) for part in self.query(x))
        c_kv, k_pe = (part.unsqueeze(1) for part in self.latent(x))
        c, sn = self.tables(x, cos, sin)
        kv, kr = torch.cat([kv, c_kv], 2), torch.cat([kr, self.rotate(k_pe, c, sn)], 2)
        score = (q_nope @ self.w_uk()) @ kv.mT + (self.rotate(q_pe, c, sn) * 0.0625) @ kr.mT
        return score, kv, kr


def flat_positions() -> tuple[Tensor, ...]:
    x, *_, kv_cache, kr_cache, slots = paged_args(15)
    positions = torch.randint(1, 40, (3, 5))
    return x.view(3, 5, HE), positions, *tables(40), kv_cache, kr_cache, slots.view(3, 5)


@entry(IN_PLACE, source="vLLM", tags="tables, layout, symbolic", args=flat_positions)
class GatheredFlat(Prologue):
    """[B, S] tokens, whose rows of the tables are taken all at once."""

    def forward(self, *given: Tensor) -> Tensor:
        x, positions, all_cos, all_sin, kv_cache, kr_cache, slots = given
        flat = (table.index_select(0, positions.flatten()) for table in (all_cos, all_sin))
        c, sn = (table.view(*positions.shape, 1, DR) for table in flat)
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        query = torch.einsum("bshd,hdc->bshc", q_nope, self.w_uk())
        kv_cache.view(-1, HCKV)[slots.flatten()] = c_kv.flatten(0, 1)
        kr_cache.view(-1, DR)[slots.flatten()] = rotated(k_pe.unsqueeze(2), c, sn).flatten(0, 2)
        rows = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        return attend(query, rotated(q_pe, c, sn), *rows)


@entry(STAGED, source=OURS, tags="tables, layout", args=sequences)
class CountedPositions(HeadsFirst):
    """Angles from literals alone: positions counted, frequencies computed."""

    def tables(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.exp2(
            -torch.arange(DR // 2, device=x.device) / (DR // 2) * 13.287712379549449
        )
        angles = torch.arange(7, 7 + x.shape[1], device=x.device)[:, None] * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@entry(STAGED, source=OURS, tags="tables, rope, layout, device", args=sequences)
class CountedPairs(CountedPositions):
    def rotate(self, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        return pairs(x, c, sn)


@entry(IN_PLACE, source=OURS, tags="tables, symbolic, device")
class FrequenciesTimesPositions(Base):
    """transformers: a matrix product of frequencies, which the model keeps, with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 10000 ** (-torch.arange(DR // 2) / (DR // 2)))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        angles = (self.inverse[None, :, None] @ slots[None, None].to(self.inverse.dtype)).transpose(
            1, 2
        )[0]
        cos, sin = (
            part.to(x.dtype) for part in (angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin())
        )
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)


def joined_args() -> tuple[Tensor, ...]:
    x, cos, sin, *others = paged_args()
    return (x, torch.cat([cos, sin], -1), *others)


@entry(IN_PLACE, source=OURS, tags="tables, operators", args=joined_args)
class JoinedForOperator(Base):
    """A table [T, 2 Dr]: cos, then sin."""

    def of_key(self, table: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table.chunk(2, -1)
        return cos, sin

    of_query = of_key

    def forward(  # type: ignore[override]
        self, x: Tensor, table: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        cos, sin = self.of_query(table)
        query_rope = self.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        npu.npu_kv_rmsnorm_rope_cache_v2(
            self.kv_a_proj_with_mqa(x).view(-1, 1, 1, HCKV + DR),
            self.kv_a_layernorm.weight,
            *(part.reshape(-1, 1, 1, DR) for part in self.of_key(table)),
            slots,
            kr_cache,
            kv_cache,
            epsilon=1e-6,
            cache_mode="PA_BNSD",
        )
        query = self.absorb(q_nope)
        return attend(query, query_rope, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


@entry(IN_PLACE, source=OURS, tags="tables, operators", args=joined_args)
class InterleavedForOperator(JoinedForOperator):
    """cos and sin by turns."""

    def of_key(self, table: Tensor) -> tuple[Tensor, Tensor]:
        return table[..., ::2], table[..., 1::2]

    of_query = of_key


@miss("rope.tables_differ", tags="tables, operators", of="JoinedForOperator", args=joined_args)
class SwappedForOperator(JoinedForOperator):
    def of_key(self, table: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table.chunk(2, -1)
        return sin, cos


@miss("rope.tables_differ", tags="tables, operators", of="JoinedForOperator", args=joined_args)
class ReadAsInterleaved(JoinedForOperator):
    """The key's table is read as one by turns."""

    of_key = InterleavedForOperator.of_key


@entry(IN_PLACE, source=OURS, tags="tables")
class TokensBySlots(Base):
    """Tokens by their slots."""

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, cos, sin, kv_cache, kr_cache, slots = args
        order = slots.argsort()
        return super().forward(x[order], cos[order], sin[order], kv_cache, kr_cache, slots)


@entry(IN_PLACE, source=OURS, tags="tables")
class SortedTables(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, c[c[:, 0, 0].sort()[1]], s)


@entry(IN_PLACE, source=OURS, tags="tables")
class TablesByVariance(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, c + torch.var_mean(c, -1, keepdim=True)[0], s)


@miss("rope.tables_differ", tags="tables")
class SortedOtherwise(SortedTables):
    def rotate_k(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return Base.rotate(self, x, c[c[:, 0, 0].sort(descending=True)[1]], s)


@miss("rope.tables_differ", tags="tables")
class TablesByMean(TablesByVariance):
    def rotate_k(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return Base.rotate(self, x, c + torch.var_mean(c, -1, keepdim=True)[1], s)


@miss("rope.tables_differ", tags="tables")
class NoisyTables(Base):
    """Query and key draw noise of their own."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, c + torch.randn_like(c), s)


@miss("rope.tables_differ", tags="tables")
class DroppedTables(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, F.dropout(c, 0.3), s)


@entry(IN_PLACE, source=OURS, tags="tables", args=one_token)
class OnePosition(Base):
    """Tables of one position, [Dr], for every token."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        c, s = c.reshape(-1)[: DR // 2], s.reshape(-1)[: DR // 2]
        return torch.cat([first * c - second * s, second * c + first * s], -1)
