"""A prologue, and the same with the call written by hand, read by steps that every release traces
alike.

Before torch 2.10 AOT autograd takes every composite operator apart while it traces, a matrix
product of the model's attention by the strides that the query has then: those of the unfused
product in one graph, of the kernel in the other. From 2.10 on it takes apart only what autograd
does, and torch_npu has a kernel of its own for matmul. So what reads the results here is no
product, and equal graphs are asked for on every release.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.catalogue import base


def read(query: Tensor, query_rope: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
    """One number made of all that the prologue made."""
    return (
        query.float().sum()
        + query_rope.float().sum()
        + kv_rows.float().sum()
        + kr_rows.float().sum()
    )


class ByHand(nn.Module):
    """Packed weights and one call of the operator, in place or its functional form."""

    def __init__(self, functional: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.functional = functional

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape).bfloat16())

        self.dq = weight(base.HE, base.HCQ)
        self.uq_qr = weight(base.HCQ, heads * (base.D + base.DR))
        self.uk = weight(heads, base.D, base.HCKV)
        self.dkv_kr = weight(base.HE, base.HCKV + base.DR)
        self.gamma_cq = weight(base.HCQ)
        self.gamma_ckv = weight(base.HCKV)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        operator = (
            torch.ops.npu.npu_mla_prolog_v3_functional
            if self.functional
            else torch.ops.npu.npu_mla_prolog_v3
        )
        weights = (self.dq, self.uq_qr, self.uk, self.dkv_kr, self.gamma_cq, self.gamma_ckv)
        epsilons = {"rmsnorm_epsilon_cq": 1e-6, "rmsnorm_epsilon_ckv": 1e-6}
        results = operator(x, *weights, sin, cos, kv_cache, kr_cache, cache_index=slots, **epsilons)
        if self.functional:
            kv_cache.copy_(results[5])
            kr_cache.copy_(results[6])
        return read(
            results[0], results[1], kv_cache.view(-1, base.HCKV), kr_cache.view(-1, base.DR)
        )
