"""Seeded random arguments of legal calls, built from the specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import preprocess, signature, spec
from mla_fusion.meta.binder import size_of
from mla_fusion.meta.limits import limits
from mla_fusion.reference import hifloat8
from mla_fusion.reference.outline import outline

# small sizes; the operator's own are in mla_fusion.meta.limits
SMALL = {
    "He": 256,
    "Hcq": 96,
    "N": 4,
    "D": 32,
    "Dr": 16,
    "Hckv": 64,
    "BlockNum": 6,
    "BlockSize": 16,
    "Nkv": 1,
}
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


class Drawn:
    """Seeded random tensors; on the meta device nothing is allocated."""

    def __init__(self, seed: int, device: str) -> None:
        self.device, self.make = device, torch.Generator().manual_seed(seed)

    def filled(self, sizes: Sequence[int], kind: torch.dtype, fan_in: float = 1.0) -> Tensor:
        """Noise of variance 1 / ``fan_in``; the whole range of int8."""
        if self.device == "meta":
            return torch.empty(sizes, dtype=kind, device=self.device)
        if kind == torch.int8:
            return torch.randint(-127, 128, sizes, generator=self.make, dtype=torch.int8)
        noise = torch.randn(sizes, generator=self.make, dtype=torch.float32) / fan_in**0.5
        return hifloat8.encode(noise) if kind == torch.uint8 else noise.to(kind)

    def scale(self, sizes: Sequence[int], typical: float) -> Tensor:
        """float32 numbers around ``typical``, half of it to one and a half."""
        make, device = self.make, self.device
        noise = torch.rand(sizes, generator=make, dtype=torch.float32, device=device)
        return typical * (0.5 + noise)


def sample_call(
    *,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    cache_mode: str = "PA_BSND",
    lead: Sequence[int] = (8,),
    dims: Mapping[str, int] = SMALL,
    dtype: torch.dtype = torch.bfloat16,
    smooth: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments by name of a legal ``npu_mla_prolog_v3`` call; ``lead`` is ``(T,)`` or ``(B, S)``.

    Values are scaled so that every intermediate is of order one; caches hold noise; slots are
    distinct, and -1 (skipped) where the cache is too small for the tokens. With block-wise cache
    modes and a 2-D token_x the tokens are two sequences. On ``device="meta"`` nothing is allocated.
    """
    modes = weight_quant_mode, kv_cache_quant_mode
    tensors, options = outline(
        *modes, lead, dims, cache_mode=cache_mode, dtype=dtype, smooth=smooth
    )
    drawn, call = Drawn(seed, device), dict[str, Any]()
    is_int8 = spec.WEIGHT_MODES[weight_quant_mode].element == torch.int8
    for name, empty in tensors.items():
        sizes = list(empty.shape)
        if not name.startswith(("quant", "dequant", "smooth", "k_nope")):
            fan_in = sizes[-2] if name.startswith("weight") else 1
            call[name] = drawn.filled(sizes, empty.dtype, fan_in)
            continue
        typical = 0.9 if name == "k_nope_clip_alpha" else 30.0 if name.startswith("quant") else 1.0
        if name.startswith("dequant") and is_int8:
            # int8 operands have standard deviation 73: bring each product sum back to order one
            of_q = name == "dequant_scale_w_uq_qr"
            typical = 1.0 / (73.0 * (dims["Hcq"] ** 0.5 if of_q else dims["He"] ** 0.25))
        call[name] = drawn.scale(sizes, typical).to(empty.dtype)
    index = _index(spec.CACHE_MODES[cache_mode], lead, dims, drawn.make)
    return call | {name: tensor.to(device) for name, tensor in index.items()} | options


def _index(
    mode: spec.CacheMode, lead: Sequence[int], dims: Mapping[str, int], make: torch.Generator
) -> dict[str, Tensor]:
    if mode.index[len(lead) + 1] is None:
        return {}
    tokens, block_num, block_size = prod(lead), dims["BlockNum"], dims["BlockSize"]
    places = block_num if mode.actual_seq_len else block_num * block_size
    unused = torch.full((tokens,), -1, dtype=torch.int64)
    blocks = torch.cat((torch.randperm(places, generator=make), unused))
    if not mode.actual_seq_len:
        return {"cache_index": blocks[:tokens].reshape(list(lead))}
    if len(lead) == 2:
        per_batch = -(-lead[1] // block_size)
        return {"cache_index": blocks[: lead[0] * per_batch].reshape(lead[0], per_batch)}
    first = lead[0] // 2
    ends = torch.tensor([first, lead[0]], dtype=torch.int32)
    count = -(-first // block_size) + -(-(lead[0] - first) // block_size)
    return {"cache_index": blocks[:count], "actual_seq_len": ends}


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
    drawn = Drawn(7, device)

    def sized(axes: str) -> list[int]:
        return [size_of(axis, dims) for axis in axes.split()]

    rows = dims["BlockNum"] * dims["BlockSize"]

    def descale(axes: str, k: int) -> Tensor:
        scale = drawn.scale(sized(axes), 1 / (73 * 40 * k**0.5))
        if dtype == torch.bfloat16:
            return scale
        return scale.view(torch.int32).to(torch.int64) & 0xFFFFFFFF

    call: dict[str, Any] = {
        name: drawn.filled(sized(axes), dtype, 100 if name.startswith("beta") else 1)
        for name, axes in preprocess.SHAPES.items()
    }
    call |= {
        "wdqkv": drawn.filled(sized(f"{preprocess.DOWN} H"), weight, dims["H"]),
        "descale0": descale(preprocess.DOWN, dims["H"]),
        "wuq": drawn.filled(sized(f"{preprocess.UP} Q"), weight, dims["Q"]),
        "descale1": descale(preprocess.UP, dims["Q"]),
        "wuk": drawn.filled(sized("N D C"), dtype, dims["D"]),
        "slotmapping": torch.randperm(rows, generator=drawn.make)[: dims["T"]].int(),
        "cache_mode": cache_mode,
        "quant_mode": quant_mode,
        "kv_cache": drawn.filled(sized(form.kv), torch.int8 if form.int8 else dtype),
        "kv_cache_rope": torch.zeros(0, dtype=dtype)
        if form.kr is None
        else drawn.filled(sized(form.kr), dtype),
    }
    if quant_mode == "per_tensor_quant_asymm":
        for stage, width in (("0", preprocess.DOWN), ("1", preprocess.UP)):
            call["quant_scale" + stage] = torch.tensor([0.03], dtype=dtype)
            call["quant_offset" + stage] = torch.tensor([3], dtype=torch.int8)
            call["bias" + stage] = torch.randint(
                -10, 10, sized(width), generator=drawn.make, dtype=torch.int32
            )
    if form.int8:
        call["ctkv_scale"] = torch.tensor([0.02], dtype=dtype)
        call["q_nope_scale"] = torch.linspace(20, 40, dims["N"], dtype=torch.float32).to(dtype)
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }
