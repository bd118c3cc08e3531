"""The absorbed product ``q_nope W_uk``, [.., N, D] to [.., N, Hckv]; and where W_uk comes from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.catalogue.base import HCKV, D

from .inputs import Named

npu = torch.ops.npu


# -- W_uk as [N, D, Hckv]


def of_kv_b(i: Named) -> Tensor:
    return i["kv_b"].view(-1, 2 * D, HCKV)[:, :D]


def of_kv_b_split(i: Named) -> Tensor:
    return i["kv_b"].unflatten(0, (-1, 2 * D)).split(D, 1)[0]


def of_kv_b_transposed(i: Named) -> Tensor:
    return i["kv_b_t"].view(HCKV, -1, 2 * D)[..., :D].permute(1, 2, 0)


def own(i: Named) -> Tensor:
    return i["uk"]


def own_transposed(i: Named) -> Tensor:
    return i["uk_t"].transpose(1, 2)


WEIGHTS = {f.__name__: f for f in (of_kv_b, of_kv_b_split, of_kv_b_transposed, own, own_transposed)}


# -- the product


def bmm(q: Tensor, w: Tensor) -> Tensor:
    flat = q.reshape(-1, *q.shape[-2:])
    return torch.bmm(flat.transpose(0, 1), w).transpose(0, 1).view(*q.shape[:-1], HCKV)


def bmm_weight_left(q: Tensor, w: Tensor) -> Tensor:
    flat = q.reshape(-1, *q.shape[-2:])
    turned = torch.bmm(w.transpose(1, 2), flat.permute(1, 2, 0))
    return turned.permute(2, 0, 1).reshape(*q.shape[:-1], HCKV)


def matmul(q: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(q.transpose(-2, -3), w).transpose(-2, -3)


def one_row_matmul(q: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(q.unsqueeze(-2), w).squeeze(-2)


def einsum(q: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...nd,ndc->...nc", q, w)


def einsum_weight_first(q: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("ndc,...nd->...nc", w, q)


def einsum_heads_first(q: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("ntd,ndc->tnc", q.reshape(-1, *q.shape[-2:]).transpose(0, 1), w).view(
        *q.shape[:-1], HCKV
    )


def transpose_batchmatmul(q: Tensor, w: Tensor) -> Tensor:
    flat = q.reshape(-1, *q.shape[-2:])
    out = npu.npu_transpose_batchmatmul(
        flat, w, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    )
    return out.view(*q.shape[:-1], HCKV)


def summed_in_float32(q: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...nd,ndc->...nc", q.float(), w.float()).to(q.dtype)


def baddbmm_like(q: Tensor, w: Tensor) -> Tensor:
    flat = q.reshape(-1, *q.shape[-2:]).transpose(0, 1)
    return torch.stack([torch.mm(flat[n], w[n]) for n in range(w.shape[0])], 1).view(
        *q.shape[:-1], HCKV
    )


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        bmm,
        bmm_weight_left,
        matmul,
        one_row_matmul,
        einsum,
        einsum_weight_first,
        einsum_heads_first,
        transpose_batchmatmul,
        summed_in_float32,
    )
}


# -- mistakes


def weight_heads_reversed(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q, w.flip(0))


def query_heads_reversed(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q.flip(-2), w)


def weight_reinterpreted(q: Tensor, w: Tensor) -> Tensor:
    """[N, D, Hckv] read as [N, Hckv, D] and transposed."""
    return bmm(q, w.reshape(-1, HCKV, D).transpose(1, 2))


def first_head_for_all(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q, w[:1].expand_as(w))


def depth_reversed(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q.flip(-1), w)


def half_the_depth(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q[..., : D // 2], w[:, : D // 2])


def heads_as_tokens(q: Tensor, w: Tensor) -> Tensor:
    """[.., N, D] read as [N, .., D] without a transpose."""
    flat = q.reshape(w.shape[0], -1, D)
    return torch.bmm(flat, w).transpose(0, 1).reshape(*q.shape[:-1], HCKV)


def absolute(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q.abs(), w)


def relu_after(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q, w).relu()


def doubled(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q * 2, w)


def doubled_after(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q, w) * 2


def negated(q: Tensor, w: Tensor) -> Tensor:
    return bmm(-q, w)


def one_head_scaled(q: Tensor, w: Tensor) -> Tensor:
    scale = 1 + (torch.arange(q.shape[-2], device=q.device) == 0).to(q.dtype)
    return bmm(q * scale[:, None], w)


def tokens_reversed(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q.flip(0), w)


def query_through_float8(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q.to(torch.float8_e4m3fn).to(q.dtype), w)


def weight_through_float8(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q, w.to(torch.float8_e4m3fn).to(q.dtype))


def latent_reversed(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q, w).flip(-1)


def clamped(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q.clamp(-1, 1), w)


def with_bias(q: Tensor, w: Tensor) -> Tensor:
    return bmm(q, w) + w.mean(1)


WRONG_PRODUCTS = {
    f.__name__: f
    for f in (
        weight_heads_reversed,
        query_heads_reversed,
        weight_reinterpreted,
        first_head_for_all,
        depth_reversed,
        half_the_depth,
        heads_as_tokens,
        absolute,
        relu_after,
        doubled,
        doubled_after,
        negated,
        one_head_scaled,
        tokens_reversed,
        query_through_float8,
        weight_through_float8,
        latent_reversed,
        clamped,
        with_bias,
    )
}
