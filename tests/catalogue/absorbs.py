"""The product with W_uk in other words."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCKV, Base, D, Parts, Prologue, linear, npu, through
from .entry import IN_PLACE, OURS, entry, step


@entry(IN_PLACE, source=OURS, tags="absorb, device, symbolic")
class AbsorbByEinsum(Base):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("tnd,ndc->tnc", q_nope, self.w_uk())


@entry(IN_PLACE, source="ktransformers", tags="absorb, device")
class AbsorbUnsqueezed(Base):
    """ktransformers: 4-D by 3-D matmul."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.matmul(q_nope.unsqueeze(2), self.w_uk()).squeeze(2)


@entry(IN_PLACE, source=OURS, tags="absorb, device, symbolic")
class AbsorbOnTheLeft(Base):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return (self.w_uk().transpose(1, 2) @ q_nope.unsqueeze(-1)).squeeze(-1)


@entry(IN_PLACE, source="madsys", tags="absorb, device")
class AbsorbTransposedWeight(Base):
    """madsys: W_uk kept as [N, Hckv, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.w_uk_t = nn.Parameter(torch.randn(self.heads, HCKV, D).bfloat16() / 8)

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.bmm(q_nope.transpose(0, 1), self.w_uk_t.transpose(1, 2)).transpose(0, 1)


@entry(IN_PLACE, source=OURS, tags="absorb, operators, device")
class AbsorbNpu(Base):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return npu.npu_transpose_batchmatmul(
            q_nope, self.w_uk(), perm_x1=(1, 0, 2), perm_y=(1, 0, 2)
        )


@entry(IN_PLACE, source=OURS, tags="absorb, readers, device")
class QueryReadRounded(Base):
    """Something reads the query through float8: the rounding must stay."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        return through(super().absorb(q_nope), torch.float8_e4m3fn)


@entry(IN_PLACE, source=OURS, tags="absorb, layout, device, symbolic")
class QueryAssembled(Parts):
    """query and query_rope go into one buffer, made like q_nope, which the kernel keeps."""

    def scores(self, q_nope: Tensor, q_pe: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
        query = q_nope.new_empty(*q_nope.shape[:-1], HCKV + DR)
        query[..., :HCKV] = self.absorb(q_nope)
        query[..., HCKV:] = q_pe
        return query.float().flatten(0, 1) @ torch.cat([kv_rows, kr_rows], -1).float().T


@entry(IN_PLACE, source=OURS, tags="absorb, weights, symbolic")
class MatrixPerHead(Base):
    """W_uk is a parameter for every head."""

    def __init__(self) -> None:
        super().__init__()
        del self.kv_b_proj
        self.w_uks = nn.ParameterList(
            (torch.randn(D, HCKV) / D**0.5).bfloat16() for _ in range(self.heads)
        )

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.stack([q_nope[:, head] @ weight for head, weight in enumerate(self.w_uks)], 1)


@entry(IN_PLACE, source=OURS, tags="absorb, weights, device")
class LinearPerHead(Base):
    """W_uk is a layer for every head, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        del self.kv_b_proj
        self.ups = nn.ModuleList(linear(D, HCKV) for _ in range(self.heads))

    def absorb(self, q_nope: Tensor) -> Tensor:
        out = q_nope.new_empty(*q_nope.shape[:2], HCKV)
        for head, up in reversed(list(enumerate(self.ups))):
            out[:, head] = up(q_nope[:, head])
        return out


@entry(IN_PLACE, source=OURS, tags="absorb, weights")
class GroupsApart(Base):
    """W_uk is held for two groups of two heads."""

    def __init__(self) -> None:
        Prologue.__init__(self, 4)
        del self.kv_b_proj
        self.groups = nn.ParameterList(
            (torch.randn(2, D, HCKV) / D**0.5).bfloat16() for _ in range(2)
        )

    def absorb(self, q_nope: Tensor) -> Tensor:
        parts = zip(q_nope.chunk(2, 1), self.groups, strict=True)
        return torch.cat([torch.einsum("tnd,ndc->tnc", q, weight) for q, weight in parts], 1)


# -- one method of the base prologue: absorb(q_nope), q_nope [T, N, D]


@step("absorb", IN_PLACE, tags="absorb, device, symbolic", heads=8)
def loop(self: Any, q: Tensor) -> Tensor:
    return torch.stack([q[:, head] @ self.w_uk()[head] for head in range(self.heads)], 1)


@step("absorb", IN_PLACE, tags="absorb")
def loop_of_linears(self: Any, q: Tensor) -> Tensor:
    """Heads beside each other in the last axis."""
    parts = [F.linear(q[:, head], self.w_uk()[head].t()) for head in range(self.heads)]
    return torch.cat(parts, -1).view(-1, self.heads, HCKV)


@step("absorb", IN_PLACE, tags="absorb")
def loop_into_buffer(self: Any, q: Tensor) -> Tensor:
    out = q.new_empty(q.shape[0], self.heads, HCKV)
    for head, (part, weight) in enumerate(zip(q.unbind(1), self.w_uk().unbind(0), strict=True)):
        out[:, head] = part @ weight
    return out


@step("absorb", IN_PLACE, tags="absorb, device", heads=4)
def two_groups(self: Any, q: Tensor) -> Tensor:
    parts = (
        torch.einsum("tnd,ndc->tnc", q[:, part], self.w_uk()[part])
        for part in (slice(0, 2), slice(2, 4))
    )
    return torch.cat(list(parts), 1)


@step("absorb", IN_PLACE, tags="absorb, device")
def onto_zeros(self: Any, q: Tensor) -> Tensor:
    return torch.baddbmm(q.new_zeros(1, 1, 1), q.transpose(0, 1), self.w_uk()).transpose(0, 1)
