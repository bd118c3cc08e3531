"""The rotation in other words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import DR, Base, D, H, Parts, half, hf_interleave, npu, one_token, rotate_half, rotated
from .entry import IN_PLACE, OURS, STAGED, entry, miss, step


@entry(IN_PLACE, source="cann-recipes", tags="rope, operators, device, symbolic")
class NpuRopeHeadsFirst(Base):
    """cann-recipes: [1, N, T, Dr] into npu_interleave_rope."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = c.view(1, 1, -1, DR), s.view(1, 1, -1, DR)
        return (
            npu.npu_interleave_rope(x.unsqueeze(0).transpose(1, 2), c, s)
            .transpose(1, 2)
            .view(*x.shape)
        )


@entry(IN_PLACE, source=OURS, tags="rope, operators, device")
class NpuRotaryMul(Base):
    """Half layout by npu_rotary_mul."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return npu.npu_rotary_mul(x.unsqueeze(0), c.unsqueeze(0), s.unsqueeze(0)).squeeze(0)


@entry(STAGED, source="vLLM and SGLang", tags="rope, device")
class GptjStack(Base):
    """vLLM, SGLang, is_neox_style=False: interleaved in and out, tables repeated by pairs."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (t[..., : DR // 2].repeat_interleave(2, -1) for t in (c, s))
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * c + turned * s


@entry(STAGED, source=OURS, tags="rope, device")
class GptjOneByOne(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = c[..., : DR // 2], s[..., : DR // 2]
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack((x1 * c - x2 * s, x2 * c + x1 * s), -1).flatten(-2)


@entry(IN_PLACE, source=OURS, tags="rope, device")
class RollWithSigns(Base):
    """Rotate-half by roll and a constant vector of signs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "signs", torch.cat([-torch.ones(DR // 2), torch.ones(DR // 2)]).bfloat16()
        )

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        signs = torch.cat([x.new_full((DR // 2,), -1.0), x.new_ones(DR // 2)])
        return x * c + x.roll(DR // 2, -1) * signs * s


@entry(IN_PLACE, source=OURS, tags="rope, device")
class WideRope(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x.float(), c.float(), s.float()).to(x.dtype)


@entry(IN_PLACE, source=OURS, tags="rope, device")
class UnbindPairs(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        x = torch.cat((even, odd), -1)
        return x * c + rotate_half(x) * s


@entry(IN_PLACE, source=OURS, tags="rope, layout, device, symbolic")
class RotatedTogether(Parts):
    """The one key head is rotated as one more query head."""

    def rotated(
        self, q_nope: Tensor, q_pe: Tensor, k_pe: Tensor, c: Tensor, sn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_pe, k_pe = self.rotate(torch.cat([q_pe, k_pe], 1), c, sn).split([self.heads, 1], 1)
        return q_nope, q_pe, k_pe


@entry(IN_PLACE, source="transformers", tags="rope, layout, device")
class JoinedAndSplitAgain(Parts):
    """Hugging Face's habit, absorbed: q is joined after RoPE, and split for the two products."""

    def rotated(
        self, q_nope: Tensor, q_pe: Tensor, k_pe: Tensor, c: Tensor, sn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_nope, q_pe = torch.cat([q_nope, self.rotate(q_pe, c, sn)], -1).split([D, DR], -1)
        return q_nope, q_pe, self.rotate(k_pe, c, sn)


@entry(IN_PLACE, source=OURS, tags="rope, tables")
class WholeHeads(Parts):
    """Heads of 192 columns meet tables that begin with ones and zeros."""

    def rotated(
        self, q_nope: Tensor, q_pe: Tensor, k_pe: Tensor, c: Tensor, sn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, ones = (
            torch.cat([q_nope, hf_interleave(q_pe)], -1),
            torch.ones(c.shape[0], 1, D, dtype=c.dtype),
        )
        turned = torch.cat([q_nope, rotate_half(heads[..., D:])], -1)
        heads = heads * torch.cat([ones, c], -1) + turned * torch.cat([0 * ones, sn], -1)
        return heads[..., :D], heads[..., D:], rotated(k_pe, c, sn)


def pairs(x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """Pairs stay where they are."""
    a, b, c, sn = x[..., ::2], x[..., 1::2], c[..., : DR // 2], sn[..., : DR // 2]
    return torch.stack((a * c - b * sn, b * c + a * sn), -1).flatten(-2)


# -- one method of the base prologue: rotate(x, cos, sin), x [T, heads, Dr], tables [T, 1, Dr]


def matrices(c: Tensor, sn: Tensor) -> Tensor:
    """[.., Dr/2, 2, 2]"""
    c, sn = half(c), half(sn)
    return torch.stack([torch.stack([c, -sn], -1), torch.stack([sn, c], -1)], -2)


@step("rotate", IN_PLACE, tags="rope, device, symbolic")
def by_einsum(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    pairs = torch.einsum("...rij,...rj->...ri", matrices(c, sn), x.unflatten(-1, (H, 2)))
    return pairs.transpose(-1, -2).flatten(-2)


@step("rotate", IN_PLACE, tags="rope", args=one_token)
def by_einsum_of_one_token(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    return by_einsum(self, x, c, sn)


@step("rotate", STAGED, tags="rope, device")
def by_matmul(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    return (matrices(c, sn) @ x.unflatten(-1, (H, 2)).unsqueeze(-1)).squeeze(-1).flatten(-2)


@step("rotate", IN_PLACE, tags="rope, device")
def by_row_vectors(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    pairs = torch.matmul(x.view(*x.shape[:-1], H, 1, 2), matrices(c, sn).mT)
    return pairs.view(*x.shape[:-1], H, 2).mT.reshape(x.shape)


@step("rotate", IN_PLACE, tags="rope")
def by_sums(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    c, sn = half(c), half(sn)
    rows = torch.stack([torch.stack([c, -sn], -2), torch.stack([sn, c], -2)], -3)
    return (rows * x.unflatten(-1, (2, H)).unsqueeze(-3)).sum(-2).flatten(-2)


@step("rotate", IN_PLACE, tags="rope")
def stacked_first(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    both, tables = (
        torch.stack([hf_interleave(x), rotate_half(hf_interleave(x))]),
        torch.stack([c, sn]),
    )
    return (both * tables).sum(0)


@step("rotate", IN_PLACE, tags="rope, device")
def dot_of_two(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    x = hf_interleave(x)
    both = torch.stack([x, rotate_half(x)], -1)
    return torch.einsum("tndk,tndk->tnd", both, torch.stack([c, sn], -1).expand(*both.shape))


@step("rotate", IN_PLACE, tags="rope, device", source="ancestors of GPT-J")
def by_literal_matrix(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """GPT-J's ancestors: x @ P, with P written down."""
    x = hf_interleave(x)
    one, none = torch.eye(H, dtype=x.dtype, device=x.device), x.new_zeros(H, H)
    return x * c + (x @ torch.cat([torch.cat([none, one], 1), torch.cat([-one, none], 1)])) * sn


@step("rotate", IN_PLACE, tags="rope")
def flipped_pairs(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    pairs, signs = x.unflatten(-1, (H, 2)), torch.tensor([-1.0, 1.0], dtype=x.dtype)
    turned = pairs * half(c).unsqueeze(-1) + pairs.flip(-1) * signs * half(sn).unsqueeze(-1)
    return turned.transpose(-1, -2).flatten(-2)


@step("rotate", STAGED, tags="rope")
def by_where(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """Every two, by a mask: pairs stay where they are."""
    c, sn = half(c).repeat_interleave(2, -1), half(sn).repeat_interleave(2, -1)
    return x * c + torch.where(torch.arange(DR) % 2 == 0, -x.roll(-1, -1), x.roll(1, -1)) * sn


@step("rotate", IN_PLACE, tags="rope")
def by_vmap(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    def one(head: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        head = head.view(-1, H, 2).transpose(1, 2).reshape(-1, DR)
        return head * c + rotate_half(head) * sn

    return torch.func.vmap(one, in_dims=(1, None, None), out_dims=1)(x, c.squeeze(1), sn.squeeze(1))


@step("rotate", STAGED, tags="rope")
def scaled_shear(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """No rotation, but tables can say it, the halves of one from tensors of unequal rank."""
    c, sn = half(c), half(sn)
    rows = torch.stack([torch.stack([c, -sn], -1), torch.stack([0 * sn, c], -1)], -2)
    return (
        torch.einsum("...rij,...rj->...ri", rows, x.unflatten(-1, (H, 2)))
        .transpose(-1, -2)
        .flatten(-2)
    )


@step("rotate", IN_PLACE, tags="rope")
def rolled_pairs(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """Pairs in no regular order, so the weights' columns are taken by index."""
    pairs = x.unflatten(-1, (2, H)).transpose(-1, -2).roll(1, -2)
    return torch.einsum("...rij,...rj->...ri", matrices(c, sn), pairs).transpose(-1, -2).flatten(-2)


@entry(IN_PLACE, source=OURS, tags="rope, symbolic")
class HalvesAsWindows(Base):
    """Two windows of 32 columns."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.unfold(-1, H, H).unbind(-2)
        c, s = half(c), half(s)
        return torch.cat((first * c - second * s, second * c + first * s), -1)


@entry(IN_PLACE, source=OURS, tags="rope, symbolic")
class PairsAsWindows(Base):
    """32 windows of two columns."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.unfold(-1, 2, 2).unbind(-1)
        c, s = half(c), half(s)
        return torch.cat((first * c - second * s, second * c + first * s), -1)


# -- columns taken by a list of numbers

HALVES = [*range(0, DR, 2), *range(1, DR, 2)]
SWAPPED = [HALVES[1], HALVES[0], *HALVES[2:]]
REPEATED = [HALVES[1], HALVES[1], *HALVES[2:]]
LISTS: dict[str, tuple[list[int], list[int]]] = {
    "halves": (HALVES, HALVES),
    "from the end": ([place - DR for place in HALVES], HALVES),
    # pairs of other columns: those of the weight are put in order
    "pairs swapped": (SWAPPED, SWAPPED),
    "the key's as they are": (HALVES, [*range(DR)]),
    "the key's swapped": (HALVES, SWAPPED),
    "the query's swapped": (SWAPPED, HALVES),
    "the key's reversed": (HALVES, HALVES[::-1]),
    "one twice": (REPEATED, REPEATED),
}


class Listed(Base):
    orders: tuple[list[int], list[int]] = HALVES, HALVES

    def turned(self, x: Tensor, order: list[int], c: Tensor, s: Tensor) -> Tensor:
        x = x[..., order]
        return x * c + rotate_half(x) * s

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.turned(q_pe, self.orders[0], c, s)

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.turned(k_pe, self.orders[1], c, s)


for name, orders in LISTS.items():
    kind = type(f"columns listed, {name}", (Listed,), {"orders": orders})
    if name == "one twice":
        miss("rope.tables_differ", tags="rope")(kind)
    else:
        entry(IN_PLACE, source=OURS, tags="rope, symbolic")(kind)


@miss("rope.absent", tags="rope")
class HeldOrder(Listed):
    """The order lies in a buffer, which somebody may load anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor(HALVES))

    def turned(self, x: Tensor, order: list[int], c: Tensor, s: Tensor) -> Tensor:
        x = x.index_select(-1, self.places)
        return x * c + rotate_half(x) * s


@miss("rope.absent", tags="rope")
class ListedTokens(Listed):
    """A list that swaps tokens of the key."""

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate_k(k_pe[[1, 0, 2, 3, 4, 5, 6, 7]], c, s)
