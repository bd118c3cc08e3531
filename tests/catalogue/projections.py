"""The projections, and how their weights are held."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, HE, Base, D, attend, linear, paged_args, paged_caches
from .entry import IN_PLACE, OURS, entry


@entry(IN_PLACE, source=OURS, tags="weights, device, symbolic")
class ChunkedWeights(Base):
    """A large weight multiplied chunk by chunk, the chunks cut in the graph."""

    def down(self, x: Tensor) -> Tensor:
        return torch.cat([x @ chunk.t() for chunk in self.q_a_proj.weight.chunk(3)], -1)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = torch.cat(
            [F.linear(x, w) for w in self.kv_a_proj_with_mqa.weight.split(192)], -1
        ).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


@entry(IN_PLACE, source=OURS, tags="weights, device")
class ChunkedHeads(Base):
    """W_uq_qr held as several parameters, cut in the middle of a head."""

    def __init__(self) -> None:
        super().__init__()
        chunks = self.q_b_proj.weight.detach().split([100, 184, 100])
        self.chunks = nn.ParameterList(nn.Parameter(chunk.clone()) for chunk in chunks)
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(torch.cat([F.linear(c_q, chunk) for chunk in self.chunks], -1))


@entry(IN_PLACE, source=OURS, tags="weights, device")
class SeparateUpProjections(Base):
    """W_uq and W_qr, W_dkv and W_kr as four linears."""

    def __init__(self) -> None:
        super().__init__()
        self.uq, self.qr = linear(HCQ, self.heads * D), linear(HCQ, self.heads * DR)
        self.dkv, self.kr = linear(HE, HCKV), linear(HE, DR)
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.uq(q).view(-1, self.heads, D), self.qr(q).view(-1, self.heads, DR)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kv_a_layernorm(self.dkv(x)), self.kr(x)


@entry(IN_PLACE, source=OURS, tags="weights, device, symbolic")
class AllNopeThenAllRope(Base):
    """q_b columns: every head's nope part, then every head's rope part."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        nope, rope = q.split([self.heads * D, self.heads * DR], -1)
        return nope.reshape(-1, self.heads, D), rope.reshape(-1, self.heads, DR)


@entry(IN_PLACE, source=OURS, tags="weights, device")
class RopeBeforeNope(Base):
    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_pe, q_nope = q.view(-1, self.heads, D + DR).split([DR, D], -1)
        return q_nope, q_pe


@entry(IN_PLACE, source="LongCat", tags="weights, device")
class LongCat(Base):
    """Both halves of q scaled after the projection, the latent after its norm."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = super().split(q)
        return q_nope * 2.0, q_pe * 2.0

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return c_kv * 3.46, k_pe


@entry(IN_PLACE, source="cann-recipes", tags="weights, device")
class WeightsInOut(Base):
    """cann-recipes: weights [in, out], x @ W."""

    def __init__(self) -> None:
        super().__init__()
        self.w_dq = nn.Parameter(self.q_a_proj.weight.detach().t().contiguous())

    def down(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.w_dq)


@entry(IN_PLACE, source=OURS, tags="weights, device")
class SlicedWeights(Base):
    """Both down-projections are slices of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(HCQ + HCKV + DR, HE).bfloat16() / 32)

    def down(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w[:HCQ])

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = F.linear(x, self.w[HCQ:]).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


@entry(IN_PLACE, source=OURS, tags="weights, device, symbolic")
class EinsumLinear(Base):
    def down(self, x: Tensor) -> Tensor:
        return torch.einsum("tk,nk->tn", x, self.q_a_proj.weight)


@entry(IN_PLACE, source=OURS, tags="weights, device")
class WideResidual(Base):
    """x arrives in float32 and is cast for every projection."""

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.float().mul(1.0).to(x.dtype), *args)


@entry(IN_PLACE, source="vLLM", tags="weights, layout, device, symbolic")
class InPlaceQuery(Base):
    """vLLM: the rotated part is written back into q, which is split again."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(-1, self.heads, D + DR)
        c_kv, k_pe = self.latent(x)
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        q[..., D:] = self.rotate(q[..., D:], c, sn)
        q_nope, q_pe = q.split([D, DR], -1)
        self.write(
            kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, sn).squeeze(1)
        )
        scores = attend(self.absorb(q_nope), q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))
        return scores, torch.zeros(1)


@entry(IN_PLACE, source=OURS, tags="weights, device, symbolic")
class WeightOnTheLeft(Base):
    """Column-major habits: (W x^T)^T."""

    def down(self, x: Tensor) -> Tensor:
        return (self.q_a_proj.weight @ x.T).T


@entry(IN_PLACE, source="ports to JAX", tags="weights, absorb, device, symbolic")
class WeightOfThreeAxes(Base):
    """JAX ports: W_uq_qr is [Hcq, N, 192], W_uk [Hckv, N, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.w_uq_qr = nn.Parameter((torch.randn(HCQ, self.heads, D + DR) / 32).bfloat16())
        self.w_uk_cnd = nn.Parameter((torch.randn(HCKV, self.heads, D) / 8).bfloat16())
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.einsum("tc,cnd->tnd", c_q, self.w_uq_qr)
        return q[..., :D], q[..., D:]

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("tnd,cnd->tnc", q_nope, self.w_uk_cnd)


@entry(IN_PLACE, source=OURS, tags="weights, device, symbolic")
class WeightOfEachHead(Base):
    """W_uq_qr is [N, Hcq, 192]: c_q times the matrix of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.by_head = nn.Parameter((torch.randn(self.heads, HCQ, D + DR) / 32).bfloat16())
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def down(self, x: Tensor) -> Tensor:  # beta 0: nothing is added
        return torch.addmm(x[0, :1], x, self.q_a_proj.weight.T, beta=0)

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        q = (c_q @ self.by_head).transpose(0, 1)
        return q[..., :D], q[..., D:]


@entry(IN_PLACE, source=OURS, tags="weights")
class HeadsInALoop(WeightOfEachHead):
    """One product a head, and attention's values by head behind them."""

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.stack([c_q @ matrix for matrix in self.by_head], 1)
        return q[..., :D], q[..., D:]

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.stack([q @ w for q, w in zip(q_nope.unbind(1), self.w_uk(), strict=True)], 1)

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        scores, extra = super().forward(x, *args)
        values = (scores.to(x.dtype) @ args[2].view(-1, HCKV)).view(-1, self.heads, HCKV)
        return torch.bmm(values.transpose(0, 1), self.w_uk().mT), extra


@entry(IN_PLACE, source="DeepSeek's own code, V3.2", tags="weights, readers, device")
class IndexerBeside(Base):
    """A sparse-attention indexer projects c_q and x by weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_b, self.wk = linear(HCQ, 256), linear(HE, 128)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.wq_b(c_q)


def two_paged_args() -> tuple[Tensor, ...]:
    return *paged_args(), *paged_caches()


@entry(IN_PLACE, IN_PLACE, source=OURS, tags="weights, device", args=two_paged_args)
class TwoOnOneX(nn.Module):
    """Two attentions of one x, each with its key behind its query."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Base(), Base()])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        c, s, slots = cos.unsqueeze(1), sin.unsqueeze(1), args[2]
        results: list[Tensor] = []
        for layer in self.layers:
            q_nope, q_pe = layer.split(layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))))
            query = layer.absorb(q_nope), layer.rotate(q_pe, c, s)
            results += *query, *layer.latent(x)
        for layer, k, caches in zip(self.layers, (2, 6), (args[:2], args[3:]), strict=True):
            k_pe = layer.rotate(results[k + 1].unsqueeze(1), c, s).squeeze(1)
            layer.write(*caches, slots, results[k], k_pe)
        return *results[:2], *results[4:6]


class WideLinear(nn.Linear):
    """Weights held in bfloat16, sums in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


@entry(IN_PLACE, source=OURS, tags="weights")
class WideProducts(Base):
    def __init__(self) -> None:
        super().__init__()
        for layer in (self.q_a_proj, self.q_b_proj, self.kv_a_proj_with_mqa):
            layer.__class__ = WideLinear

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("tnd,ndc->tnc", q_nope.float(), self.w_uk().float()).bfloat16()
