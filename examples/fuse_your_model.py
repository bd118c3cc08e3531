"""Compile a model of your own and see what became of its MLA prologue.

    python examples/fuse_your_model.py

The same lines run on an NPU, through torchair, and on a laptop, through the CPU reference kernel.
"""

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from torch import nn

HE, HCQ, HCKV, N, D, DR = 1024, 1536, 512, 2, 128, 64  # sizes that the kernel takes


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        high = x.float()
        scale = torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (high * scale).to(x.dtype) * self.weight


def rotate(x, cos, sin):
    """RoPE in the half layout, as Hugging Face spells it for most models."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """The part of an MLA layer before attention proper, written as without this project."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a = nn.Linear(HE, HCQ, bias=False)
        self.q_norm = RMSNorm(HCQ)
        self.q_b = nn.Linear(HCQ, N * (D + DR), bias=False)
        self.kv_a = nn.Linear(HE, HCKV + DR, bias=False)
        self.kv_norm = RMSNorm(HCKV)
        self.w_uk = nn.Parameter(torch.randn(N, D, HCKV) * D**-0.5)

    def forward(self, x, cos, sin, slots, kv_cache, kr_cache):
        q = self.q_b(self.q_norm(self.q_a(x))).view(-1, N, D + DR)
        q_nope, q_pe = q.split([D, DR], dim=-1)
        query = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        query_rope = rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        c_kv, k_pe = self.kv_a(x).split([HCKV, DR], dim=-1)
        kv_cache.view(-1, HCKV)[slots] = self.kv_norm(c_kv)
        kr_cache.view(-1, DR)[slots] = rotate(k_pe, cos, sin)
        return query, query_rope


def example():
    """A model and arguments; also the target of `mla-fusion explain` and `mla-fusion lower`."""
    torch.manual_seed(0)
    model = Attention().to(torch.bfloat16).eval().requires_grad_(False)
    angles = torch.arange(4).unsqueeze(1) * 10000.0 ** -torch.linspace(0, 1, DR // 2)
    cos, sin = (torch.cat((t, t), dim=-1).bfloat16() for t in (angles.cos(), angles.sin()))
    caches = (torch.zeros(4, 128, 1, HCKV).bfloat16(), torch.zeros(4, 128, 1, DR).bfloat16())
    x, slots = torch.randn(4, HE).bfloat16(), torch.tensor([3, 130, 257, 511])
    return model, (x, cos, sin, slots, *caches)


def main() -> None:
    model, arguments = example()
    *inputs, kv_cache, kr_cache = arguments
    expected = model(*inputs, kv_cache.clone(), kr_cache.clone())

    compiled = torch.compile(model, backend=mf.backend())
    found = compiled(*inputs, kv_cache, kr_cache)

    print(mf.reports()[-1])
    for name, want, got in zip(("query", "query_rope"), expected, found, strict=True):
        error = (got.float() - want.float()).norm() / want.float().norm()
        print(f"{name} {list(got.shape)}: relative difference from eager {error:.1e}")
        assert error < 2e-2


if __name__ == "__main__":
    main()
