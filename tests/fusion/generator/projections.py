"""``x W^T`` for a weight stored [out, in], as models write it; and how a product's columns are
parted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.catalogue.base import HCKV, HCQ


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x, w.transpose(0, 1))


def mm(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x.reshape(-1, x.shape[-1]), w.t()).view(*x.shape[:-1], -1)


def weight_left(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(w, x.reshape(-1, x.shape[-1]).t()).t().view(*x.shape[:-1], -1)


def einsum(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...k,nk->...n", x, w)


def einsum_weight_first(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("nk,...k->...n", w, x)


def addmm_of_zeros(x: Tensor, w: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return torch.addmm(x.new_zeros(w.shape[0]), flat, w.t()).view(*x.shape[:-1], -1)


def addmm_without_bias(x: Tensor, w: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return torch.addmm(flat[:, :1], flat, w.t(), beta=0).view(*x.shape[:-1], -1)


def bmm_of_one(x: Tensor, w: Tensor) -> Tensor:
    flat = x.reshape(1, -1, x.shape[-1])
    return torch.bmm(flat, w.t().unsqueeze(0)).view(*x.shape[:-1], -1)


def tensordot(x: Tensor, w: Tensor) -> Tensor:
    return torch.tensordot(x, w, dims=([-1], [1]))


def inner(x: Tensor, w: Tensor) -> Tensor:
    return torch.inner(x, w)


def one_row_matmul(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x.unsqueeze(-2), w.t()).squeeze(-2)


def two_column_halves(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([F.linear(x, half) for half in w.chunk(2, 0)], -1)


def bias_of_zeros(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w, torch.zeros(w.shape[0], dtype=x.dtype, device=x.device))


def summed_in_float32(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w.float()).to(x.dtype)


PRODUCTS = {
    f.__name__: f
    for f in (
        linear,
        matmul,
        mm,
        einsum,
        einsum_weight_first,
        addmm_of_zeros,
        addmm_without_bias,
        bmm_of_one,
        tensordot,
        inner,
        one_row_matmul,
        bias_of_zeros,
        summed_in_float32,
    )
}
UP_PRODUCTS = {
    **PRODUCTS,
    "weight_left": weight_left,  # of x itself the pass cannot tell which operand is the weight
    "two_column_halves": two_column_halves,
}


# -- parts of the last axis


def split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(x.split(sizes, -1))


def slices(x: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [x[..., end - size : end] for size, end in zip(sizes, ends, strict=True)]


def narrow(x: Tensor, sizes: list[int]) -> list[Tensor]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [x.narrow(-1, start, size) for start, size in zip(starts, sizes, strict=True)]


def tensor_split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return list(torch.tensor_split(x, ends, -1))


def index_select(x: Tensor, sizes: list[int]) -> list[Tensor]:
    columns = torch.arange(x.shape[-1], device=x.device).split(sizes)
    return [x.index_select(-1, part) for part in columns]


def contiguous(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [part.contiguous() for part in x.split(sizes, -1)]


def from_the_end(x: Tensor, sizes: list[int]) -> list[Tensor]:
    if len(sizes) != 2:
        return slices(x, sizes)
    return [x[..., : -sizes[1]], x[..., -sizes[1] :]]


PARTS = {f.__name__: f for f in (split, slices, narrow, tensor_split, contiguous, from_the_end)}


# -- mistakes


def one_column_late(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """The first part starts one column late (its width kept)."""
    first, *rest = slices(x, sizes)
    return [x[..., 1 : sizes[0] + 1], *rest] if len(sizes) > 1 else [first]


def columns_reversed(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return slices(x.flip(-1), sizes)


def parts_from_the_other_end(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(reversed(x.split(sizes[::-1], -1)))


def last_part_clamped(x: Tensor, sizes: list[int]) -> list[Tensor]:
    *rest, last = slices(x, sizes)
    return [*rest, last.clamp(-0.5, 0.5)]


def first_part_through_float8(x: Tensor, sizes: list[int]) -> list[Tensor]:
    first, *rest = slices(x, sizes)
    return [first.to(torch.float8_e4m3fn).to(x.dtype), *rest]


def first_part_doubled(x: Tensor, sizes: list[int]) -> list[Tensor]:
    first, *rest = slices(x, sizes)
    return [first * 2, *rest]


def first_part_of_next_token(x: Tensor, sizes: list[int]) -> list[Tensor]:
    first, *rest = slices(x, sizes)
    return [first.roll(1, 0), *rest]


def last_part_of_next_token(x: Tensor, sizes: list[int]) -> list[Tensor]:
    *rest, last = slices(x, sizes)
    return [*rest, last.roll(1, 0)]


def parts_summed(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """What follows the first part leaks into it."""
    first, *rest = slices(x, sizes)
    return [first + rest[-1].mean(-1, keepdim=True), *rest]


WRONG_PARTS = {
    f.__name__: f
    for f in (
        one_column_late,
        columns_reversed,
        parts_from_the_other_end,
        last_part_clamped,
        first_part_through_float8,
        first_part_doubled,
        first_part_of_next_token,
        last_part_of_next_token,
        parts_summed,
    )
}


def halves_of_other_rows(x: Tensor, w: Tensor) -> Tensor:
    """The second half of the columns is projected from the token before."""
    first, second = w.chunk(2, 0)
    return torch.cat([F.linear(x, first), F.linear(x.roll(1, 0), second)], -1)


def halves_of_halves(x: Tensor, w: Tensor) -> Tensor:
    """Each half of the columns is projected from a half of x."""
    k = x.shape[-1] // 2
    first, second = w.chunk(2, 0)
    return torch.cat([F.linear(x[..., :k], first[:, :k]), F.linear(x[..., k:], second[:, :k])], -1)


def biased(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w, w[:, 0])


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(x.new_zeros(w.shape[0]), x.reshape(-1, x.shape[-1]), w.t(), alpha=2).view(
        *x.shape[:-1], -1
    )


def of_absolute(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.abs(), w)


def of_absolute_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.abs())


def residual_added(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) + x.mean(-1, keepdim=True)


def relu_after(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w))


def tokens_reversed(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.flip(0), w)


def input_through_float8(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.to(torch.float8_e4m3fn).to(x.dtype), w)


def weight_through_float8(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.to(torch.float8_e4m3fn).to(x.dtype))


def input_through_int(x: Tensor, w: Tensor) -> Tensor:
    return F.linear((x * 8).to(torch.int8).to(x.dtype), w)


def weight_scaled_by_columns(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(
        x, w * torch.arange(1, w.shape[0] + 1, device=w.device).to(w.dtype)[:, None] / w.shape[0]
    )


def weight_rows_rolled(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.roll(1, 0))


def sum_over_part(x: Tensor, w: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.linear(x[..., :half], w[:, :half])


WRONG_PRODUCTS = {
    f.__name__: f
    for f in (
        halves_of_other_rows,
        halves_of_halves,
        biased,
        scaled,
        of_absolute,
        of_absolute_weight,
        residual_added,
        relu_after,
        tokens_reversed,
        input_through_float8,
        weight_through_float8,
        input_through_int,
        weight_scaled_by_columns,
        weight_rows_rolled,
        sum_over_part,
    )
}

QKV = [HCQ, HCKV, 64]
