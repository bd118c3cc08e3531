"""A prologue, and the same with the call written by hand, read by steps that every release traces alike.

Before torch 2.10 AOT autograd takes every composite operator apart while it traces, a matrix product of the model's
attention by the strides that the query has then: those of the unfused product in one graph, of the kernel in the
other. From 2.10 on it takes apart only what autograd does, and torch_npu has a kernel of its own for matmul. So what
reads the results here is no product, and equal graphs are asked for on every release.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion import spellings as s


def read(query: Tensor, query_rope: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
    """One number made of all that the prologue made."""
    return query.float().sum() + query_rope.float().sum() + kv_rows.float().sum() + kr_rows.float().sum()


class ByHand(nn.Module):
    """Packed weights and one call of the operator, in place or its functional form."""

    def __init__(self, functional: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.functional = functional

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape).bfloat16())

        self.dq = weight(s.HE, s.HCQ)
        self.uq_qr = weight(s.HCQ, heads * (s.D + s.DR))
        self.uk = weight(heads, s.D, s.HCKV)
        self.dkv_kr = weight(s.HE, s.HCKV + s.DR)
        self.gamma_cq = weight(s.HCQ)
        self.gamma_ckv = weight(s.HCKV)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:
        operator = torch.ops.npu.npu_mla_prolog_v3_functional if self.functional else torch.ops.npu.npu_mla_prolog_v3
        weights = (self.dq, self.uq_qr, self.uk, self.dkv_kr, self.gamma_cq, self.gamma_ckv)
        epsilons = {"rmsnorm_epsilon_cq": 1e-6, "rmsnorm_epsilon_ckv": 1e-6}
        results = operator(x, *weights, sin, cos, kv_cache, kr_cache, cache_index=slots, **epsilons)
        if self.functional:
            kv_cache.copy_(results[5])
            kr_cache.copy_(results[6])
        return read(results[0], results[1], kv_cache.view(-1, s.HCKV), kr_cache.view(-1, s.DR))
