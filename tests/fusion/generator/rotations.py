"""RoPE: ``rotate(x, tables)``, x [.., Dr]; by the output's columns, halves or pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.catalogue.base import DR, hf_interleave, rotate_half

from .tables import HALF, Tables

npu = torch.ops.npu
Rotation = Callable[[Tensor, Tables], Tensor]


# -- pairs in, halves out


def deinterleave_rotate_half(x: Tensor, t: Tables) -> Tensor:
    cos, sin = t.full()
    x = hf_interleave(x)
    return x * cos + rotate_half(x) * sin


def even_odd(x: Tensor, t: Tables) -> Tensor:
    cos, sin = t.half()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def real_and_imaginary(x: Tensor, t: Tables) -> Tensor:
    pairs = torch.view_as_complex(x.float().contiguous().view(*x.shape[:-1], HALF, 2)) * t.complex()
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def permuted_columns(x: Tensor, t: Tables) -> Tensor:
    cos, sin = t.full()
    order = torch.cat([torch.arange(0, DR, 2), torch.arange(1, DR, 2)])
    y = x[..., order]
    return y * cos + rotate_half(y) * sin


def npu_interleave_rope(x: Tensor, t: Tables) -> Tensor:
    cos, sin = t.full()
    if x.dim() != 4:
        return deinterleave_rotate_half(x, t)
    return npu.npu_interleave_rope(x, cos.to(x.dtype), sin.to(x.dtype))


# -- halves in, halves out


def neox(x: Tensor, t: Tables) -> Tensor:
    cos, sin = t.full()
    return x * cos + rotate_half(x) * sin


def halves_into_empty(x: Tensor, t: Tables) -> Tensor:
    cos, sin = t.half()
    out = torch.zeros_like(x)
    out[..., :HALF] = x[..., :HALF] * cos - x[..., HALF:] * sin
    out[..., HALF:] = x[..., HALF:] * cos + x[..., :HALF] * sin
    return out


# -- pairs in, pairs out


def complex_product(x: Tensor, t: Tables) -> Tensor:
    pairs = torch.view_as_complex(x.float().contiguous().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * t.complex()).flatten(-2).to(x.dtype)


def stack_pairs(x: Tensor, t: Tables) -> Tensor:
    cos, sin = t.half()
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def repeated_tables(x: Tensor, t: Tables) -> Tensor:
    cos, sin = t.pairs()
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


HALVES_OUT: dict[str, Rotation] = {
    f.__name__: f
    for f in (
        deinterleave_rotate_half,
        even_odd,
        real_and_imaginary,
        permuted_columns,
        npu_interleave_rope,
        neox,
        halves_into_empty,
    )
}
PAIRS_OUT: dict[str, Rotation] = {
    f.__name__: f for f in (complex_product, stack_pairs, repeated_tables)
}
ROTATIONS = HALVES_OUT | PAIRS_OUT

_FULL = "deinterleave_rotate_half permuted_columns npu_interleave_rope neox"
_WIDTH = {
    **dict.fromkeys(_FULL.split(), "full"),
    **dict.fromkeys(("real_and_imaginary", "complex_product"), "complex"),
    "repeated_tables": "pairs",
}


def width(rotation: str) -> str:
    """The form a rotation reads tables in: that halves are equal is not for the pass to assume."""
    return _WIDTH.get(rotation, "half")


# -- arrangements of [.., N, Dr] and its tables around a rotation


def tokens_first(rotate: Rotation, x: Tensor, t: Tables) -> Tensor:
    return rotate(x, t.lifted(lambda table: table.unsqueeze(-2)))


def heads_first(rotate: Rotation, x: Tensor, t: Tables) -> Tensor:
    return rotate(x.transpose(-2, -3), t.lifted(lambda table: table.unsqueeze(-3))).transpose(
        -2, -3
    )


def with_unit_axis(rotate: Rotation, x: Tensor, t: Tables) -> Tensor:
    return rotate(
        x.unsqueeze(-2), t.lifted(lambda table: table.unsqueeze(-2).unsqueeze(-2))
    ).squeeze(-2)


def one_batch_heads_first(rotate: Rotation, x: Tensor, t: Tables) -> Tensor:
    flat = x.reshape(1, -1, *x.shape[-2:]).transpose(1, 2)
    turned = rotate(flat, t.lifted(lambda table: table.reshape(1, 1, -1, table.shape[-1])))
    return turned.transpose(1, 2).reshape(x.shape)


def flat_rows(rotate: Rotation, x: Tensor, t: Tables) -> Tensor:
    """[T, N, Dr] whatever the tokens' shape was."""
    flat = x.reshape(-1, *x.shape[-2:])
    return rotate(flat, t.lifted(lambda table: table.reshape(-1, 1, table.shape[-1]))).view(x.shape)


ARRANGEMENTS = {
    f.__name__: f
    for f in (tokens_first, heads_first, with_unit_axis, one_batch_heads_first, flat_rows)
}
