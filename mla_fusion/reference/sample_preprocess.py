"""Seeded random arguments of a legal call of ATB's MlaPreprocess."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import preprocess

# small sizes; those of the device are in mla_fusion.meta.preprocess
SMALL = {
    "T": 5,
    "H": 128,
    "Q": 64,
    "C": 64,
    "R": 32,
    "D": 32,
    "N": 2,
    "BlockNum": 3,
    "BlockSize": 16,
}
LEGAL = {
    "T": 4,
    "H": 7168,
    "Q": 1536,
    "C": 512,
    "R": 64,
    "D": 128,
    "N": 2,
    "BlockNum": 2,
    "BlockSize": 16,
}


def sample_preprocess(
    *,
    cache_mode: str = "krope_ctkv",
    quant_mode: str = "per_token_quant_symm",
    dtype: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.int8,
    dims: Mapping[str, int] = SMALL,
    seed: int = 7,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments by name of ``npu_mla_preprocess``.

    Values are scaled so that every intermediate is of order one; caches hold noise; slots are
    distinct. NZ caches have 128 rows a block. ``weight`` is the dtype of the two projections. On
    ``device="meta"`` neither weights nor caches are allocated.
    """
    make = torch.Generator().manual_seed(seed)
    form = preprocess.CACHE_FORMS[cache_mode]
    block = preprocess.NZ_BLOCK if form.nz else dims["BlockSize"]
    t, h, q, c, r, d, n = (dims[axis] for axis in ("T", "H", "Q", "C", "R", "D", "N"))
    wide, up = c + r + q, n * (d + r)

    def noise(*sizes: int, scale: float = 1.0) -> Tensor:
        if device == "meta":
            return torch.empty(sizes, dtype=dtype, device=device)
        return (torch.randn(sizes, generator=make, dtype=torch.float32) * scale).to(dtype)

    def linear(rows: int, k: int) -> Tensor:
        if device == "meta":
            return torch.empty(rows, k, dtype=weight, device=device)
        if weight == torch.int8:
            return torch.randint(-127, 128, (rows, k), generator=make, dtype=torch.int8)
        return noise(rows, k, scale=k**-0.5)

    def descale(rows: int, k: int) -> Tensor:
        scale = (0.5 + torch.rand(rows, generator=make, dtype=torch.float32)) / (73 * 40 * k**0.5)
        return (
            scale
            if dtype == torch.bfloat16
            else scale.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        )

    call: dict[str, Any] = {
        "input": noise(t, h),
        "gamma0": noise(h),
        "beta0": noise(h, scale=0.1),
        "wdqkv": linear(wide, h),
        "descale0": descale(wide, h),
        "gamma1": noise(q),
        "beta1": noise(q, scale=0.1),
        "wuq": linear(up, q),
        "descale1": descale(up, q),
        "gamma2": noise(c),
        "cos": noise(t, r),
        "sin": noise(t, r),
        "wuk": noise(n, d, c, scale=d**-0.5),
        "slotmapping": torch.randperm(dims["BlockNum"] * block, generator=make)[:t].int(),
        "cache_mode": cache_mode,
        "quant_mode": quant_mode,
    }
    known = {"BlockNum": dims["BlockNum"], "BlockSize": block, "C+R": c + r, "C": c, "R": r}
    known |= {"C/32": c // 32, "C/16": c // 16, "R/16": r // 16}

    def rows(shape: str, kind: torch.dtype) -> Tensor:
        sizes = [int(axis) if axis.isdigit() else known[axis] for axis in shape.split()]
        if device == "meta":
            return torch.empty(sizes, dtype=kind, device=device)
        return torch.randint(-9, 9, sizes, generator=make).to(kind)

    call["kv_cache"] = rows(form.kv, torch.int8 if form.int8 else dtype)
    call["kv_cache_rope"] = torch.zeros(0, dtype=dtype) if form.kr is None else rows(form.kr, dtype)
    if quant_mode == "per_tensor_quant_asymm":
        for stage, width in (("0", wide), ("1", up)):
            call["quant_scale" + stage] = torch.tensor([0.03], dtype=dtype)
            call["quant_offset" + stage] = torch.tensor([3], dtype=torch.int8)
            call["bias" + stage] = torch.randint(
                -10, 10, (width,), generator=make, dtype=torch.int32
            )
    if form.int8:
        call["ctkv_scale"] = torch.tensor([0.02], dtype=dtype)
        call["q_nope_scale"] = torch.linspace(20, 40, n, dtype=torch.float32).to(dtype)
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }
