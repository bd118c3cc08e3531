"""Seeded arguments of the operators beside v3, and of v3 in the sizes of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import preprocess, signature, spec
from mla_fusion.meta.limits import limits
from mla_fusion.reference.sample import SMALL, Drawn

DEEPSEEK_V3 = SMALL | {
    "He": 7168,
    "Hcq": 1536,
    "N": 16,
    "D": 128,
    "Dr": 64,
    "Hckv": 512,
    "BlockNum": 64,
    "BlockSize": 128,
}


# those of the device are in mla_fusion.meta.preprocess
SMALL_PREPROCESS = {
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
LEGAL_PREPROCESS = {
    **SMALL_PREPROCESS,
    "T": 4,
    "BlockNum": 2,
    "H": 7168,
    "Q": 1536,
    "C": 512,
    "R": 64,
    "D": 128,
}


def as_operator(op: str, call: Mapping[str, Any], cann: str = "latest") -> dict[str, Any]:
    """A sample call of v3 as another version or release has it.

    v1 and v2 have no modes; some want a row for quant_scale_ckv, of which the kernel reads one
    float.
    """
    required, defaults = signature(op)
    kept = {name: value for name, value in call.items() if name in required or name in defaults}
    row = limits(op, "A3", cann).kv_scale == spec.QUANT_SCALE_CKV_ROW
    if row and call["kv_cache_quant_mode"] == 1:
        width = call["rmsnorm_gamma_ckv"].shape[0]
        kept["quant_scale_ckv"] = (
            call["quant_scale_ckv"].reshape(1, 1).expand(1, width).contiguous()
        )
    return kept


def sample_preprocess(
    *,
    cache_mode: str = "krope_ctkv",
    quant_mode: str = "per_token_quant_symm",
    dtype: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.int8,
    dims: Mapping[str, int] = SMALL_PREPROCESS,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments by name of ``npu_mla_preprocess``.

    Values are scaled so that every intermediate is of order one; caches hold noise; slots are
    distinct. NZ caches have 128 rows a block. ``weight`` is the dtype of the two projections. On
    ``device="meta"`` neither weights nor caches are allocated.
    """
    form = preprocess.CACHE_FORMS[cache_mode]
    dims = {**dims, "BlockSize": preprocess.NZ_BLOCK if form.nz else dims["BlockSize"]}
    drawn = Drawn(dims, 7, device)
    rows = dims["BlockNum"] * dims["BlockSize"]

    def descale(axes: str, k: int) -> Tensor:
        scale = drawn.scale(axes, 1 / (73 * 40 * k**0.5))
        if dtype == torch.bfloat16:
            return scale
        return scale.view(torch.int32).to(torch.int64) & 0xFFFFFFFF

    call: dict[str, Any] = {
        name: drawn.filled(axes, dtype, 100 if name.startswith("beta") else 1)
        for name, axes in preprocess.SHAPES.items()
    }
    call |= {
        "wdqkv": drawn.filled(f"{preprocess.DOWN} H", weight, dims["H"]),
        "descale0": descale(preprocess.DOWN, dims["H"]),
        "wuq": drawn.filled(f"{preprocess.UP} Q", weight, dims["Q"]),
        "descale1": descale(preprocess.UP, dims["Q"]),
        "wuk": drawn.filled("N D C", dtype, dims["D"]),
        "slotmapping": torch.randperm(rows, generator=drawn.make)[: dims["T"]].int(),
        "cache_mode": cache_mode,
        "quant_mode": quant_mode,
        "kv_cache": drawn.filled(form.kv, torch.int8 if form.int8 else dtype),
        "kv_cache_rope": torch.zeros(0, dtype=dtype)
        if form.kr is None
        else drawn.filled(form.kr, dtype),
    }
    if quant_mode == "per_tensor_quant_asymm":
        for stage, width in (("0", preprocess.DOWN), ("1", preprocess.UP)):
            call["quant_scale" + stage] = torch.tensor([0.03], dtype=dtype)
            call["quant_offset" + stage] = torch.tensor([3], dtype=torch.int8)
            call["bias" + stage] = torch.randint(
                -10, 10, drawn.shape(width), generator=drawn.make, dtype=torch.int32
            )
    if form.int8:
        call["ctkv_scale"] = torch.tensor([0.02], dtype=dtype)
        call["q_nope_scale"] = torch.linspace(20, 40, dims["N"], dtype=torch.float32).to(dtype)
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }
