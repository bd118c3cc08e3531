"""int8 prologues with int8 caches: a scale for each channel, or rows packed with tile scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, HE, Base, attend, linear, npu, paged_args
from .entry import IN_PLACE, OURS, STAGED, entry
from .int8 import Full, Partial


def int8_cache_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x, cos, sin, (kv_cache * 20).to(torch.int8), (kr_cache * 20).to(torch.int8), slots


def packed_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return (
        x,
        cos,
        sin,
        torch.randint(-9, 9, (*kv_cache.shape[:3], 656), dtype=torch.int8),
        kr_cache,
        slots,
    )


by_channel = partial(
    entry,
    source=OURS,
    tags="int8, cache, operators",
    args=int8_cache_args,
    weight_quant_mode=1,
    kv_cache_quant_mode=2,
)


@by_channel(IN_PLACE)
class OperatorCache(Partial):
    """int8 caches written by the fused cache operator, a scale per channel."""

    scales = (HCKV, DR)

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale, self.kr_scale = (
            nn.Parameter(20 + 10 * torch.rand(width)) for width in self.scales
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        query_rope = self.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        tables = [table.view(-1, 1, 1, DR) for table in (cos, sin)]
        latent = self.kv_a_proj_with_mqa(x).view(-1, 1, 1, HCKV + DR)
        npu.npu_kv_rmsnorm_rope_cache_v2(
            latent,
            self.kv_a_layernorm.weight,
            *tables,
            slots,
            kr_cache,
            kv_cache,
            k_rope_scale=self.kr_scale,
            c_kv_scale=self.kv_scale,
            epsilon=1e-6,
            cache_mode="PA_BNSD",
        )
        caches = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        return attend(self.absorb(q_nope), query_rope, *caches)


@by_channel(IN_PLACE)
class OperatorCacheOneScale(OperatorCache):
    scales = (1, 1)


@by_channel(IN_PLACE)
class PlainCache(Partial):
    """int8 caches, rows quantised by plain operators."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale, self.kr_scale = (
            nn.Parameter(20 + 10 * torch.rand(width)) for width in (HCKV, DR)
        )

    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp(torch.round(rows.float() * scale), -128, 127).to(torch.int8)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV)[slots] = self.quantise(c_kv, self.kv_scale)
        kr_cache.view(-1, DR)[slots] = self.quantise(k_pe, self.kr_scale)


@by_channel(IN_PLACE)
class DividedRows(PlainCache):
    """The scale is what a step is worth, and one for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale, self.kr_scale = (nn.Parameter(torch.tensor([0.04])) for _ in range(2))

    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (rows.float() / scale).round().clamp(-128, 127).char()


@by_channel(IN_PLACE)
class LiteralScale(PlainCache):
    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp((rows.float() * 25.0).round(), -128, 127).to(torch.int8)


@by_channel(STAGED, kv_cache_quant_mode=0)
class SymmetricClamp(PlainCache):
    """-127 is the lowest code: not the kernel's saturation."""

    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp(torch.round(rows.float() * scale), -127, 127).to(torch.int8)


@by_channel(STAGED, kv_cache_quant_mode=0)
class Truncated(PlainCache):
    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp(rows.float() * scale, -128, 127).to(torch.int8)


@by_channel(STAGED, weight_quant_mode=2, kv_cache_quant_mode=0)
class FullPlainCache(Full):
    """Per-channel caches with all three projections int8: no mode of the kernel."""

    write = PlainCache.write
    quantise = PlainCache.quantise

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale, self.kr_scale = (
            nn.Parameter(20 + 10 * torch.rand(width)) for width in (HCKV, DR)
        )


@by_channel(STAGED, kv_cache_quant_mode=0)
class KeyScaledByToken(PlainCache):
    """A scale for each token is none for each channel."""

    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        factors = torch.arange(1, len(rows) + 1)[:, None] if rows.shape[-1] == DR else 1
        return super().quantise(rows * factors, scale)


# -- one cache of packed rows


def tiles_of(c_kv: Tensor, tile: int = 128, steps: float = 127.0) -> tuple[Tensor, Tensor]:
    """int8 and a scale for each tile, as the kernel has them by default."""
    tiles = c_kv.float().unflatten(-1, (-1, tile))
    scale = tiles.abs().amax(-1, keepdim=True) / steps
    return (tiles / scale).round().clamp(-128, 127).to(torch.int8).flatten(-2), scale.squeeze(-1)


def as_bytes(values: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([values, *(part.contiguous().view(torch.int8) for part in (key, scale))], -1)


packed = partial(
    entry,
    source=OURS,
    tags="int8, cache, layout, operators",
    args=packed_args,
    weight_quant_mode=2,
    kv_cache_quant_mode=3,
)


@packed(IN_PLACE)
class PackedRows(Full):
    """One cache of 656-byte rows: int8 tiles of the latent, the bfloat16 key, a scale per tile."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, 656)[slots] = self.rows(c_kv, k_pe)

    def rows(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        values, scale = tiles_of(c_kv)
        return as_bytes(values, k_pe, scale)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1))
        return torch.cat([self.absorb(q_nope), self.rotate(q_pe, c, s)], -1)


@packed(IN_PLACE, source="vllm-ascend")
class PackedByOperators(PackedRows):
    """vllm-ascend's sparse C8: npu_dynamic_block_quant, cat, npu_scatter_nd_update_."""

    min_scale = 0.0

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        options = {"row_block_size": 1, "col_block_size": 128, "min_scale": self.min_scale}
        values, scale = npu.npu_dynamic_block_quant(c_kv, **options)
        packed = torch.cat([values, k_pe.contiguous().view(torch.int8), scale.view(torch.int8)], -1)
        npu.npu_scatter_nd_update_(kv_cache.view(-1, 656), slots.view(-1, 1), packed)


@packed(STAGED, kv_cache_quant_mode=0)
class PackedWithFloor(PackedByOperators):
    """No scale below a hundredth, which ordinary rows do not reach."""

    min_scale = 0.01


@packed(IN_PLACE, weight_quant_mode=1)
class PackedClipped(PackedRows):
    """Every tile clipped to 0.9 of its largest magnitude; only W_uq_qr is int8."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.kv_a_proj_with_mqa = linear(HE, HCQ), linear(HE, HCKV + DR)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        tiles = c_kv.float().unflatten(-1, (4, 128))
        limit = 0.9 * tiles.abs().amax(-1, keepdim=True)
        scale = (limit / 127).clamp(min=1e-8)
        values = (
            torch.maximum(torch.minimum(tiles, limit), -limit).div(scale).round().to(torch.int8)
        )
        as_bytes = [part.contiguous().view(torch.int8) for part in (k_pe, scale.squeeze(-1))]
        index = torch.stack([slots // 16, slots % 16])
        kv_cache.view(-1, 16, 656)[index[0], index[1]] = torch.cat(
            [values.flatten(-2), *as_bytes], -1
        )


@packed(STAGED, kv_cache_quant_mode=0)
class PackedOtherwise(PackedRows):
    """The scales before the key: no row of the kernel's."""

    def rows(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        values, scale = npu.npu_dynamic_block_quant(c_kv)
        return as_bytes(values, scale, k_pe)


@packed(STAGED, kv_cache_quant_mode=0)
class PackedAndRead(PackedRows):
    """The new rows are read as they are, too."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)
        self.last = c_kv

    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([super().forward(*args).flatten(1), self.last], -1)


@packed(
    STAGED, weight_quant_mode=0, kv_cache_quant_mode=0, detail="are written to no cache as they are"
)
class PackedUnquantised(PackedRows):
    """bfloat16 weights: packed rows do not go with them."""

    def __init__(self) -> None:
        Base.__init__(self)


@packed(STAGED, kv_cache_quant_mode=0)
class PackedBounded(PackedRows):
    """No tile's largest counts for more than fifty, which ordinary rows do not reach."""

    def rows(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        tiles = c_kv.float().view(-1, 4, 128)
        scale = tiles.abs().amax(-1, keepdim=True).clamp(max=50.0) / 127
        values = torch.round(tiles / scale).clamp(-128, 127).to(torch.int8).flatten(1)
        return as_bytes(values, k_pe, scale.squeeze(-1))


@by_channel(IN_PLACE, tags="int8, cache")
class PlainByInteger(PlainCache):
    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (rows.float() * 25).round().clamp(-128, 127).to(torch.int8)


@by_channel(IN_PLACE, tags="int8, cache")
class PlainByIntegerOverScale(PlainCache):
    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (rows.float() * 127 / scale).round().clamp(-128, 127).to(torch.int8)


# rows of 656 bytes that are not the kernel's, one thing wrong in each
OTHER_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "truncated": lambda c, k: as_bytes(
        (c / tiles_of(c)[1].repeat_interleave(128, -1)).char(), k, tiles_of(c)[1]
    ),
    "tiles of 256": lambda c, k: as_bytes(
        tiles_of(c, 256)[0], k, tiles_of(c, 256)[1].repeat_interleave(2, -1)
    ),
    "inverse scale": lambda c, k: as_bytes(tiles_of(c)[0], k, 1 / tiles_of(c)[1]),
    "scale of 128 steps": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(c, steps=128.0)[1]),
    "key in float16": lambda c, k: as_bytes(tiles_of(c)[0], k.half(), tiles_of(c)[1]),
    "key doubled": lambda c, k: as_bytes(tiles_of(c)[0], 2 * k, tiles_of(c)[1]),
    "latent turned": lambda c, k: as_bytes(
        tiles_of(c.roll(128, -1))[0], k, tiles_of(c.roll(128, -1))[1]
    ),
    "sign of the latent": lambda c, k: as_bytes(tiles_of(-c)[0], k, tiles_of(c)[1]),
    "scales in reverse": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(c)[1].flip(-1)),
    "latent doubled": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(2 * c)[1]),
}


def others(rows: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    return {"rows": lambda self, c_kv, k_pe: rows(c_kv, k_pe)}


for name, rows in OTHER_ROWS.items():
    packed(STAGED, kv_cache_quant_mode=0)(type(f"packed, {name}", (PackedRows,), others(rows)))


class OneVector(PlainCache):
    """Scales of both caches in one parameter."""

    parts: tuple[Any, Any] = slice(HCKV), slice(HCKV, None)

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(20 + 10 * torch.rand(HCKV + DR), requires_grad=False)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        of_kv, of_kr = (self.scales[part] for part in self.parts)
        kv_cache.view(-1, HCKV)[slots] = self.quantise(c_kv, of_kv)
        kr_cache.view(-1, DR)[slots] = self.quantise(k_pe, of_kr)


by_channel(IN_PLACE)(OneVector)


@by_channel(IN_PLACE)
class ElementsOfAVector(OneVector):
    parts = 3, slice(5, 6)


@by_channel(IN_PLACE)
class StridedPartsOfAVector(OneVector):
    parts = slice(1, HCKV + 1), slice(None, None, 9)
