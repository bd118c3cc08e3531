"""Near misses: one thing is wrong with a projection, with the product with W_uk, or a reader."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_fusion import offline

from .assembled import RowsInPlace, row_args
from .base import (
    DR,
    HCKV,
    HCQ,
    HE,
    Base,
    D,
    HfNorm,
    Prologue,
    attend,
    hf_interleave,
    linear,
    paged_args,
    rotate_half,
    through,
)
from .entry import IN_PLACE, OURS, STAGED, Methods, entry, miss, misses
from .tables import sequences


@miss("absorb.absent", tags="absorb")
class Unabsorbed(Base):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


@miss("linear.bias", tags="weights")
class Bias(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = linear(HCQ, self.heads * (D + DR), bias=True)


@miss("linear.scaled", tags="weights")
class ScaledAddmm(Base):
    def down(self, x: Tensor) -> Tensor:
        return torch.addmm(x.new_zeros(HCQ), x, self.q_a_proj.weight.t(), alpha=2.0)


@miss("quant.mixed", tags="weights")
class QueryInputRounded(Base):
    def down(self, x: Tensor) -> Tensor:
        return self.q_a_proj(through(x, torch.float8_e4m3fn))


@miss("kv_latent.absent", tags="weights")
class QueryInputHalf(Base):
    def down(self, x: Tensor) -> Tensor:
        return self.q_a_proj(through(x, torch.float16))


@miss("dtype.region", tags="weights, run")
class FlatWeightOfBfloat16(Base):
    """Its numbers are bfloat16's today; a product of it is no place where that is seen again."""

    def __init__(self) -> None:
        super().__init__()
        signs = torch.randint(0, 2, self.kv_a_proj_with_mqa.weight.shape).float() * 2 - 1
        self.flat = nn.Parameter((signs / 32).reshape(-1), requires_grad=False)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.flat.view(HCKV + DR, HE)
        product = (x.to(torch.promote_types(x.dtype, weight.dtype)) @ weight.t()).to(x.dtype)
        c_kv, k_pe = product.split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


@miss("step.choice", tags="weights")
class LatentRounded(Base):
    norm = HfNorm

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(through(q, torch.float8_e4m3fn))


class Adapted(nn.Module):
    """A low-rank adapter beside the weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down, self.up = (
            layer,
            linear(layer.in_features, 8),
            linear(8, layer.out_features),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


class Packed(nn.Module):
    """int4 weights, eight to an int32, by an operator of torch_npu alone."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        offline.activate()
        packed = torch.randint(
            -9, 9, (layer.in_features, layer.out_features // 8), dtype=torch.int32
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(1, layer.out_features).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_weight_quant_batchmatmul(x, self.weight, self.scale)


class Scaled8(nn.Module):
    """float8 weights and activations."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        step, one = x.float().abs().max() / 448, torch.ones((), device=x.device)
        rows = (x.float() / step).to(torch.float8_e4m3fn)
        return torch._scaled_mm(rows, self.weight.t(), scale_a=step, scale_b=one, out_dtype=x.dtype)


@miss("linear.hidden", tags="weights")
class Hidden(Base):
    """None of the three layers is a plain product."""

    layer: type[nn.Module] = Adapted
    names: tuple[str, ...] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            setattr(self, name, self.layer(getattr(self, name)))


@miss("linear.hidden", tags="weights")
class AdaptedQuery(Hidden):
    names = ("q_b_proj",)


@miss("linear.hidden", tags="weights")
class AdaptedQueryLatent(Hidden):
    names = ("q_a_proj",)


@miss("linear.hidden", tags="weights")
class AdaptedLatent(Hidden):
    names = ("kv_a_proj_with_mqa",)


def beside_args() -> tuple[Tensor, ...]:
    return *paged_args(), *(torch.randn(n, k).bfloat16() for n, k in [(8, HCQ), (HE, 8), (8, HCQ)])


@miss("norm.absent", tags="weights", args=beside_args)
class LatentPlusArgument(Base):
    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.others = args[-3:]
        return super().forward(*args[:-3])

    def down(self, x: Tensor) -> Tensor:
        return super().down(x) + self.others[0]


@miss("linear.hidden", tags="weights", args=beside_args)
class AdaptedByArguments(LatentPlusArgument):
    def down(self, x: Tensor) -> Tensor:
        return Base.down(self, x) + x @ self.others[1] @ self.others[2]


@miss("norm.absent", tags="operators")
class LatentsConvolved(Base):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(HCQ, HCQ, 4, padding=3, groups=HCQ, dtype=torch.bfloat16)

    def down(self, x: Tensor) -> Tensor:
        return self.conv(super().down(x).T[None])[0, :, : len(x)].T


@miss("linear.hidden", tags="weights, operators")
class PackedLatent(AdaptedLatent):
    layer = Packed


@miss("linear.hidden", tags="weights, operators")
class AllPacked(Hidden):
    layer = Packed


@miss("linear.hidden", tags="weights")
class AllScaled8(Hidden):
    layer = Scaled8


@miss("absorb.absent", tags="absorb, weights")
class PreMerged(Base):
    """W_uq and W_uk multiplied beforehand: the kernel cannot be given the product."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = linear(HCQ, self.heads * HCKV)
        self.q_rope_proj = linear(HCQ, self.heads * DR)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        c_q = self.q_a_layernorm(self.q_a_proj(x))
        query = self.merged(c_q).view(-1, self.heads, HCKV)
        c_kv, k_pe = self.latent(x)
        c, s_ = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe = self.rotate(self.q_rope_proj(c_q).view(-1, self.heads, DR), c, s_)
        self.write(
            kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s_).squeeze(1)
        )
        return attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


@miss("tokens.cut", tags="weights")
class SlicedBehindTheProjections(Base):
    """A batch that is padded to eight tokens, four of them real."""

    def down(self, x: Tensor) -> Tensor:
        return self.q_a_proj(x)[:4]

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x)[:4].split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().forward(x, cos[:4], sin[:4], kv_cache, kr_cache, slots[:4])


@miss("reader.latent", tags="readers")
class RawLatentRead(Base):
    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return c_q_raw.sum(-1)


@miss("reader.latent", tags="readers")
class UnrotatedKeyRead(Base):
    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return k_pe.sum(-1)


@miss("linear.scaled", tags="absorb")
class HeadsScaled(Base):
    """The whole query, by a factor of each head that a buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.tensor([1.0, 0.5]).bfloat16())

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        factors: Any = self.factors
        return super().split((q.view(-1, self.heads, D + DR) * factors[:, None]).flatten(1))


@miss("absorb.absent", tags="absorb, rope")
class QueryNeitherRotatedNorAbsorbed(Base):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return q_pe

    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


@miss(STAGED, of="RowsInPlace", tags="absorb, layout, run", args=row_args)
class ScaledByPosition(RowsInPlace):
    """The whole query, by a factor that grows with the position, before W_uk."""

    def growing(self, q: Tensor) -> Tensor:
        return q * (1 + 0.1 * torch.log1p(torch.arange(q.shape[0], device=q.device)))[
            :, None, None
        ].to(q.dtype)

    def absorb(self, q_nope: Tensor) -> Tensor:
        return super().absorb(self.growing(q_nope))

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.growing(super().rotate_q(q_pe, c, s))


@miss("q_lora.absent", tags="absorb, layout, run", args=sequences)
class AbsorbedFromX(Prologue):
    """No query latent and no rotation at all, yet absorbed: linear-attention hybrids."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(HE, self.heads * (D + DR))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor
    ) -> tuple[Tensor, ...]:
        q_nope, q_pe = (
            self.q_proj(x).view(2, 3, self.heads, D + DR).transpose(1, 2).split([D, DR], -1)
        )
        c_kv, k_pe = (part.unsqueeze(1) for part in self.latent(x))
        kv, kr = torch.cat([kv, c_kv], 2), torch.cat([kr, k_pe], 2)
        return (q_nope @ self.w_uk()) @ kv.mT + q_pe @ kr.mT, kv, kr


# -- one method of the base prologue, compiled and run


def per_head(*products: Any) -> Any:
    """A loop over two heads with a product of its own for each; given q, w_uk."""

    def absorb(self: Any, q: Tensor) -> Tensor:
        return torch.stack([product(q, self.w_uk()) for product in products], 1)

    return absorb


def first(q: Tensor, w: Tensor) -> Tensor:
    return q[:, 0] @ w[0]


def split_of(*columns: slice) -> Any:
    """q_nope and q_pe as columns of a head."""

    def split(self: Any, q: Tensor) -> tuple[Tensor, ...]:
        q = q.view(-1, self.heads, D + DR)
        return tuple(q[..., part] for part in columns)

    return split


def turned_latent(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    c_kv, k_pe = Prologue.latent(self, x.roll(1, 0))
    return c_kv, k_pe


MISSES: dict[str, tuple[Methods, str]] = {
    "one_matrix_for_both": (
        dict(absorb=lambda m, q: torch.matmul(q.unsqueeze(2), m.w_uk()[:1]).squeeze(2)),
        IN_PLACE,
    ),
    "one_head_scaled": (
        dict(absorb=per_head(first, lambda q, w: (2 * q[:, 1]) @ w[1])),
        "scale.unequal",
    ),
    "one_head_added_to": (dict(absorb=per_head(first, lambda q, w: q[:, 1] @ w[1] + 1)), IN_PLACE),
    "one_head_of_other_tokens": (
        dict(absorb=per_head(first, lambda q, w: q[:, 1].flip(0) @ w[1])),
        "absorb.absent",
    ),
    "onto_a_bias": (
        dict(
            absorb=lambda m, q: torch.baddbmm(
                m.w_uk()[:, :1], q.transpose(0, 1), m.w_uk()
            ).transpose(0, 1)
        ),
        "linear.bias",
    ),
    "another_x_for_kv": (dict(latent=turned_latent), "kv_latent.absent"),
    "nope_halved": (
        dict(
            split=lambda m, q: (lambda nope, pe: (nope * 0.5, pe))(
                *split_of(slice(D), slice(D, None))(m, q)
            )
        ),
        "scale.unequal",
    ),
    # weights that are not W_uk, head by head, but are packed as what they are
    "one_weight_for_both": (dict(absorb=per_head(first, lambda q, w: q[:, 1] @ w[0])), IN_PLACE),
    "weights_swapped": (
        dict(absorb=per_head(lambda q, w: q[:, 0] @ w[1], lambda q, w: q[:, 1] @ w[0])),
        IN_PLACE,
    ),
    "weight_turned": (dict(absorb=per_head(first, lambda q, w: q[:, 1] @ w[1].flip(0))), IN_PLACE),
    "one_head_rounded": (
        dict(absorb=per_head(first, lambda q, w: q[:, 1] @ w[1].to(torch.float8_e5m2).to(w.dtype))),
        IN_PLACE,
    ),
    # columns that the weights can be cut for, whatever they mean
    "columns_overlap": (dict(split=split_of(slice(D), slice(D - 32, D + 32))), IN_PLACE),
}
misses("absorb", MISSES)


class TokensCut(Prologue):
    """Serving pads the batch: of what is named in ``at`` the first tokens go on."""

    at = ""

    def part(self, name: str, value: Tensor) -> Tensor:
        return value[:5] if name in self.at.split() else value

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        def rotate(value: Tensor) -> Tensor:
            value, (c, s) = hf_interleave(value), (table[: len(value)] for table in (cos, sin))
            return value * c.unsqueeze(1) + rotate_half(value) * s.unsqueeze(1)

        c_q = self.part("c_q", self.q_a_layernorm(self.q_a_proj(x)))
        q = self.part("q", self.q_b_proj(c_q)).view(-1, self.heads, D + DR)
        q_nope, q_pe = q.split([D, DR], -1)
        q_nope, q_pe = self.part("q_nope", q_nope), self.part("q_pe", q_pe)
        c_kv, k_pe = self.latent(x)
        k_pe = rotate(self.part("k_pe", k_pe).unsqueeze(1)).squeeze(1)
        query_rope = self.part("query_rope", rotate(q_pe))
        rows = min(len(c_kv), len(k_pe))
        kv.view(-1, HCKV)[slots[:rows]] = c_kv[:rows]
        kr.view(-1, DR)[slots[:rows]] = k_pe
        return torch.einsum("tnd,ndc->tnc", q_nope, self.w_uk()), query_rope


for at in ("q", "q_nope", "q_pe", "q_nope q_pe", "k_pe", "c_q", "c_q k_pe"):
    kind = type(f"tokens cut of {at}", (TokensCut,), {"at": at})
    miss("tokens.cut", tags="layout")(kind)
entry(IN_PLACE, source=OURS, tags="layout", name="tokens cut of query_rope")(
    type("Cut", (TokensCut,), {"at": "query_rope"})
)
