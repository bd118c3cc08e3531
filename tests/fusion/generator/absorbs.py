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


def of_kv_b_transposed(i: Named) -> Tensor:
    return i["kv_b_t"].view(HCKV, -1, 2 * D)[..., :D].permute(1, 2, 0)


def own(i: Named) -> Tensor:
    return i["uk"]


WEIGHTS = {f.__name__: f for f in (of_kv_b, of_kv_b_transposed, own)}


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


def einsum(q: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...nd,ndc->...nc", q, w)


def transpose_batchmatmul(q: Tensor, w: Tensor) -> Tensor:
    flat = q.reshape(-1, *q.shape[-2:])
    out = npu.npu_transpose_batchmatmul(
        flat, w, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    )
    return out.view(*q.shape[:-1], HCKV)


def summed_in_float32(q: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...nd,ndc->...nc", q.float(), w.float()).to(q.dtype)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (bmm, bmm_weight_left, matmul, einsum, transpose_batchmatmul, summed_in_float32)
}
