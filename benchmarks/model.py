"""An absorbed DeepSeek decode layer in plain PyTorch: the prologue, and a small attention beside
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    hidden: int = 1024
    heads: int = 2
    q_lora: int = 1536
    latent: int = 512
    nope: int = 128
    rope: int = 64
    blocks: int = 4
    block_size: int = 16
    tokens: int = 8
    eps: float = 1e-6


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    *lead, width = x.shape
    x = x.view(*lead, width // 2, 2).transpose(-1, -2).reshape(*lead, width)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def functional_prologue(
    sizes: Sizes,
    x: Tensor,
    w_dq: Tensor,
    gamma_cq: Tensor,
    w_uq_qr: Tensor,
    w_dkv_kr: Tensor,
    gamma_ckv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_b: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, query_rope, and the new rows of both caches."""
    q = F.linear(rms_norm(F.linear(x, w_dq), gamma_cq, sizes.eps), w_uq_qr)
    q_nope, q_pe = q.view(-1, sizes.heads, sizes.nope + sizes.rope).split(
        [sizes.nope, sizes.rope], -1
    )
    c_kv, k_pe = F.linear(x, w_dkv_kr).split([sizes.latent, sizes.rope], -1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    w_uk = kv_b.view(sizes.heads, -1, sizes.latent)[:, : sizes.nope]
    query = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
    k_pe = rotate(k_pe.unsqueeze(1), c, s).squeeze(1)
    return query, rotate(q_pe, c, s), rms_norm(c_kv, gamma_ckv, sizes.eps), k_pe


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16))

        q_width = sizes.heads * (sizes.nope + sizes.rope)
        self.gamma_in, self.gamma_cq, self.gamma_ckv = (
            weight(sizes.hidden),
            weight(sizes.q_lora),
            weight(sizes.latent),
        )
        self.w_dq, self.w_uq_qr = weight(sizes.q_lora, sizes.hidden), weight(q_width, sizes.q_lora)
        self.w_dkv_kr = weight(sizes.latent + sizes.rope, sizes.hidden)
        self.kv_b = weight(2 * sizes.heads * sizes.nope, sizes.latent)
        self.w_o = weight(sizes.hidden, sizes.heads * sizes.nope)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: Tensor, kr_cache: Tensor
    ) -> Tensor:
        sizes = self.sizes
        weights = (self.w_dq, self.gamma_cq, self.w_uq_qr, self.w_dkv_kr, self.gamma_ckv)
        normed = rms_norm(x, self.gamma_in, sizes.eps)
        query, query_rope, c_kv, k_pe = functional_prologue(
            sizes, normed, *weights, cos, sin, self.kv_b
        )
        kv_cache.view(-1, sizes.latent)[slots] = c_kv
        kr_cache.view(-1, sizes.rope)[slots] = k_pe
        kv, kr = kv_cache.view(-1, sizes.latent), kr_cache.view(-1, sizes.rope)
        scores = torch.matmul(query, kv.t()) + torch.matmul(query_rope, kr.t())
        context = torch.matmul(torch.softmax(scores.float(), -1).to(x.dtype), kv)
        w_uv = self.kv_b.view(sizes.heads, -1, sizes.latent)[:, sizes.nope :]
        values = torch.bmm(context.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
        return x + F.linear(values.reshape(x.shape[0], -1), self.w_o)


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(layers))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *caches: Tensor
    ) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x, cos, sin, slots, caches[2 * place], caches[2 * place + 1])
        return x


def model_arguments(sizes: Sizes, layers: int) -> tuple[Tensor, ...]:
    x, *_, cos, sin, _ = layer_arguments(sizes)
    caches = [
        torch.zeros(sizes.blocks, sizes.block_size, 1, width, dtype=torch.bfloat16)
        for _ in range(layers)
        for width in (sizes.latent, sizes.rope)
    ]
    return x, cos, sin, torch.arange(sizes.tokens), *caches


def layer_arguments(sizes: Sizes) -> list[Tensor]:
    """Arguments of ``functional_prologue``, in its order."""
    q_width = sizes.heads * (sizes.nope + sizes.rope)
    shapes = [
        (sizes.tokens, sizes.hidden),
        (sizes.q_lora, sizes.hidden),
        (sizes.q_lora,),
        (q_width, sizes.q_lora),
        (sizes.latent + sizes.rope, sizes.hidden),
        (sizes.latent,),
        (sizes.tokens, sizes.rope),
        (sizes.tokens, sizes.rope),
        (2 * sizes.heads * sizes.nope, sizes.latent),
    ]
    return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
