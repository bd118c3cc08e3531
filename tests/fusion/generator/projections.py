"""``x W^T`` for a weight stored [out, in], as models write it; how columns are parted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def addmm_of_zeros(x: Tensor, w: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return torch.addmm(x.new_zeros(w.shape[0]), flat, w.t()).view(*x.shape[:-1], -1)


def bmm_of_one(x: Tensor, w: Tensor) -> Tensor:
    flat = x.reshape(1, -1, x.shape[-1])
    return torch.bmm(flat, w.t().unsqueeze(0)).view(*x.shape[:-1], -1)


def tensordot(x: Tensor, w: Tensor) -> Tensor:
    return torch.tensordot(x, w, dims=([-1], [1]))


def summed_in_float32(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w.float()).to(x.dtype)


PRODUCTS = {
    f.__name__: f
    for f in (linear, matmul, mm, einsum, addmm_of_zeros, bmm_of_one, tensordot, summed_in_float32)
}
UP_PRODUCTS = {
    **PRODUCTS,
    "weight_left": weight_left,  # of x itself the pass cannot tell which operand is the weight
}


# -- parts of the last axis


def split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(x.split(sizes, -1))


def slices(x: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [x[..., end - size : end] for size, end in zip(sizes, ends, strict=True)]


def tensor_split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return list(torch.tensor_split(x, ends, -1))


def from_the_end(x: Tensor, sizes: list[int]) -> list[Tensor]:
    if len(sizes) != 2:
        return slices(x, sizes)
    return [x[..., : -sizes[1]], x[..., -sizes[1] :]]


PARTS = {f.__name__: f for f in (split, slices, tensor_split, from_the_end)}
