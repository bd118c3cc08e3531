"""A hand-written call with a mistake in it, and what an audit says.

* ``python examples/audit_a_call.py``
* ``mla-fusion audit examples/audit_a_call.py:by_hand --reference examples/audit_a_call.py:unfused``
"""

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from torch import nn

HE, HCQ, HCKV, N, D, DR = 1024, 1536, 512, 4, 128, 64
torch.manual_seed(0)


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(rows, columns, bias=False, dtype=torch.bfloat16)


class Attention(nn.Module):
    """The unfused prologue of a DeepSeek layer; what attention would read is the result."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_b = linear(HE, HCQ), linear(HCQ, N * (D + DR))
        self.kv_a = linear(HE, HCKV + DR)
        self.q_norm, self.kv_norm = (
            nn.RMSNorm(width, eps=1e-6, dtype=torch.bfloat16) for width in (HCQ, HCKV)
        )
        self.w_uk = nn.Parameter(torch.randn(N, D, HCKV).bfloat16() / D**0.5)

    def forward(self, x, cos, sin, kv_cache, kr_cache, slots):
        q_nope, q_pe = self.q_b(self.q_norm(self.q_a(x))).view(-1, N, D + DR).split([D, DR], -1)
        c_kv, k_pe = self.kv_a(x).split([HCKV, DR], -1)
        kv_cache.view(-1, HCKV)[slots] = self.kv_norm(c_kv)
        kr_cache.view(-1, DR)[slots] = rotate(k_pe, cos, sin)
        query = torch.einsum("tnd,ndc->tnc", q_nope, self.w_uk)
        return query, rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))


def rotate(x, cos, sin):
    """Pairs side by side in, halves out: the order of DeepSeek's checkpoints."""
    x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class ByHand(nn.Module):
    """The same by one call. Its cos and sin are exchanged."""

    def __init__(self, model: Attention) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, cos, sin, kv_cache, kr_cache, slots):
        m = self.model
        query, query_rope, *_ = torch.ops.npu.npu_mla_prolog_v3(
            x,
            m.q_a.weight.T.contiguous(),
            m.q_b.weight.T.contiguous(),
            m.w_uk,
            m.kv_a.weight.T.contiguous(),
            m.q_norm.weight,
            m.kv_norm.weight,
            cos,
            sin,
            kv_cache,
            kr_cache,
            cache_index=slots,
            rmsnorm_epsilon_cq=1e-6,
            rmsnorm_epsilon_ckv=1e-6,
        )
        return query, query_rope


def inputs():
    angles = torch.arange(8).unsqueeze(1) * torch.logspace(0, -4, DR // 2)
    cos, sin = (torch.cat([t, t], -1).bfloat16() for t in (angles.cos(), angles.sin()))
    pages = [torch.randn(4, 16, 1, width).bfloat16() for width in (HCKV, DR)]
    return torch.randn(8, HE).bfloat16(), cos, sin, *pages, torch.randperm(64)[:8]


MODEL, INPUTS = Attention(), inputs()


def by_hand():
    return ByHand(MODEL), INPUTS


def unfused():
    return MODEL, INPUTS


if __name__ == "__main__":
    print(mf.audit(ByHand(MODEL), MODEL, *INPUTS))
