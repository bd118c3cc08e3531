"""Near misses: one thing is wrong with the rotation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import DR, Base, H, half, hf_interleave, rotate_half, rotated, through
from .entry import IN_PLACE, STAGED, Methods, miss, misses
from .rotations import by_einsum, matrices
from .tables import CountedPositions, sequences


@miss("rope.heads_differ", tags="rope")
class OneRotatedHead(Base):
    """The first head's rotated part stands for all heads."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = super().split(q)
        return q_nope, q_pe[:, :1]


@miss("rope.tables_differ", tags="rope")
class TablesSwappedOnKey(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe, s, c)


@miss("rope.tables_differ", tags="rope")
class KeyOnePositionLater(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe, c.roll(1, 0), s.roll(1, 0))


@miss(STAGED, tags="run, rope")
class LayoutsDiffer(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd, c, s = k_pe[..., 0::2], k_pe[..., 1::2], c[..., : DR // 2], s[..., : DR // 2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd, c, s = q_pe[..., 0::2], q_pe[..., 1::2], c[..., : DR // 2], s[..., : DR // 2]
        return torch.cat([even * c - odd * s, odd * c + even * s], -1)


@miss("scale.unequal", tags="rope")
class ScaledRope(Base):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(2.0 * q_pe, c, s)


@miss("rope.tables_differ", tags="rope, tables")
class KeyTableRounded(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe, through(c, torch.float8_e4m3fn), through(s, torch.float8_e4m3fn))


@torch.library.custom_op("mla_fusion_test::own_scale", mutates_args=())
def own_scale(x: Tensor) -> Tensor:
    return x * 1.0


@own_scale.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@miss("step.unknown", tags="rope")
class OpaqueScale(Base):
    """An operator of the model's own before RoPE of the query."""

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(own_scale(q_pe), c, s)


@miss("rope.absent", tags="rope")
class RopeOnHalfTheColumns(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        first = hf_interleave(first)
        return torch.cat(
            [first * c[..., : DR // 2] + rotate_half(first) * s[..., : DR // 2], second], -1
        )


@miss("rope.absent", tags="rope")
class RopeMixesHeads(Base):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        q_pe = hf_interleave(q_pe)
        return q_pe * c + rotate_half(q_pe.flip(1)) * s


@miss("rope.tables_differ", of="CountedPositions", tags="rope, tables, run", args=sequences)
class KeyCountedOneLater(CountedPositions):
    """The key's positions are counted from another one."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor
    ) -> tuple[Tensor, ...]:
        q_nope, q_pe = (part.transpose(1, 2) for part in self.query(x))
        c_kv, k_pe = (part.unsqueeze(1) for part in self.latent(x))
        c, sn = self.tables(x, cos, sin)
        later_c, later_sn = (t[1:] for t in self.tables(torch.cat([x, x[:, :1]], 1), cos, sin))
        kv, kr = torch.cat([kv, c_kv], 2), torch.cat([kr, self.rotate(k_pe, later_c, later_sn)], 2)
        return (q_nope @ self.w_uk()) @ kv.mT + self.rotate(q_pe, c, sn) @ kr.mT, kv, kr


# -- one method of the base prologue, compiled and run


def turned(order: str) -> Any:
    """Rotation by a 2x2 matrix of entries [[a, b], [c, d]] given as "abcd" of c, s, -s (n)."""

    def rotate(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        entries = {"c": half(c), "s": half(sn), "n": -half(sn)}
        matrix = torch.stack([entries[letter] for letter in order], -1).unflatten(-1, (2, 2))
        return (
            torch.einsum("...rij,...rj->...ri", matrix, x.unflatten(-1, (H, 2)))
            .transpose(-1, -2)
            .flatten(-2)
        )

    return rotate


def later(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    return by_einsum(self, x, c.roll(1, 0), sn.roll(1, 0))


def pairs_left(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    return torch.einsum("...rij,...rj->...ri", matrices(c, sn), x.unflatten(-1, (H, 2))).flatten(-2)


def homogeneous(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """3x3 matrices, which also move."""
    matrix, pairs = (
        F.pad(matrices(c, sn), (0, 1, 0, 1), value=0.5),
        F.pad(x.unflatten(-1, (H, 2)), (0, 1), value=1.0),
    )
    return torch.einsum("...rij,...rj->...ri", matrix, pairs)[..., :2].transpose(-1, -2).flatten(-2)


def of_other_heads(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    tables = (torch.cat([table, table.roll(1, 0)], 1) for table in (c, sn))
    return rotated(x, *tables)


def doubled_tables(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    return rotated(x, c * c - sn * sn, 2 * sn * c)


def cosines_doubled(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    return rotated(x, 2 * c, sn)


MISSES: dict[str, tuple[Methods, str]] = {
    "k_turned_back": (dict(rotate_q=by_einsum, rotate_k=turned("csnc")), "rope.tables_differ"),
    "k_swapped": (dict(rotate_q=by_einsum, rotate_k=turned("nccs")), IN_PLACE),
    "k_reflected": (dict(rotate_q=by_einsum, rotate_k=turned("cssc")), "rope.tables_differ"),
    "k_cos_doubled": (dict(rotate_k=cosines_doubled), "rope.tables_differ"),
    "k_one_token_later": (dict(rotate_q=by_einsum, rotate_k=later), STAGED),
    "k_pairs_left": (dict(rotate_q=by_einsum, rotate_k=pairs_left), STAGED),
    "moved": (dict(rotate=homogeneous), STAGED),
    "q_of_twice_the_angle": (
        dict(rotate_q=doubled_tables, rotate_k=by_einsum),
        "rope.tables_differ",
    ),
    "q_of_other_heads": (dict(rotate_q=of_other_heads), "rope.tables_differ"),
}
misses("rope", MISSES)


@miss("step.unknown", tags="rope")
class OverlappingWindows(Base):
    """Each column meets its neighbour, not its pair."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.unfold(-1, 2, 1).unbind(-1)
        c, s = half(c), half(s)
        first, second = first[..., :H], second[..., :H]
        return torch.cat((first * c - second * s, second * c + first * s), -1)


@miss("step.unknown", tags="rope")
class WindowsOfTokens(Base):
    """Each token meets the one behind it."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        behind = torch.cat((x, x[:1]))
        _, x = behind.unfold(0, 2, 1).unbind(-1)
        return super().rotate(x, c, s)


@miss("rope.tables_differ", tags="rope")
class QueryByRoundedAngles(Base):
    """By angles in bfloat16, the key by the same in float32: far positions differ."""

    def turned(self, x: Tensor, c: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
        angles = (c.float() * 1000 + s.float()).to(dtype).float()
        return self.rotate(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.turned(q_pe, c, s, torch.bfloat16)

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.turned(k_pe, c, s, torch.float32)
