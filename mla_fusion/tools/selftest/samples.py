"""Seeded random arguments of legal calls of the prologue, built from the specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import signature, spec
from mla_fusion.meta.limits import limits
from mla_fusion.observe.outline import outline
from mla_fusion.reference import hifloat8

DEEPSEEK_V3 = {
    "He": 7168,
    "Hcq": 1536,
    "N": 16,
    "D": 128,
    "Dr": 64,
    "Hckv": 512,
    "BlockNum": 64,
    "BlockSize": 128,
    "Nkv": 1,
}


def filled(make: torch.Generator, empty: Tensor, fan_in: float = 1.0) -> Tensor:
    """Noise of variance 1 / ``fan_in`` in the shape and dtype of ``empty``; the whole range of
    int8.
    """
    if empty.dtype == torch.int8:
        return torch.randint(-127, 128, empty.shape, generator=make, dtype=torch.int8)
    noise = torch.randn(empty.shape, generator=make, dtype=torch.float32) / fan_in**0.5
    return hifloat8.encode(noise) if empty.dtype == torch.uint8 else noise.to(empty.dtype)


def sample_call(
    *,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    lead: Sequence[int] = (8,),
    dims: Mapping[str, int],
    seed: int = 0,
    **form: Any,
) -> dict[str, Any]:
    """Arguments by name of a legal ``npu_mla_prolog_v3`` call; ``lead`` is ``(T,)`` or ``(B, S)``,
    ``form`` what `outline` takes by name.

    Values are scaled so that every intermediate is of order one; caches hold noise.
    """
    tensors, options = outline(weight_quant_mode, kv_cache_quant_mode, lead, dims, **form)
    make, call = torch.Generator().manual_seed(seed), dict[str, Any]()
    is_int8 = spec.WEIGHT_MODES[weight_quant_mode].element == torch.int8
    for name, empty in tensors.items():
        if not name.startswith(("quant", "dequant", "smooth", "k_nope")):
            call[name] = filled(make, empty, empty.shape[-2] if name.startswith("weight") else 1)
            continue
        typical = 0.9 if name == "k_nope_clip_alpha" else 30.0 if name.startswith("quant") else 1.0
        if name.startswith("dequant") and is_int8:
            # int8 operands have standard deviation 73: bring each product sum back to order one
            of_q = name == "dequant_scale_w_uq_qr"
            typical = 1.0 / (73.0 * (dims["Hcq"] ** 0.5 if of_q else dims["He"] ** 0.25))
        noise = torch.rand(empty.shape, generator=make, dtype=torch.float32)
        call[name] = (typical * (0.5 + noise)).to(empty.dtype)
    return call | sample_index(options["cache_mode"], lead, dims, make) | options


def sample_index(
    cache_mode: str, lead: Sequence[int], dims: Mapping[str, int], make: torch.Generator
) -> dict[str, Tensor]:
    """Where the rows go, as a cache mode has it: slots are distinct, and -1 (skipped) where the
    cache is too small for the tokens. With block-wise modes and one axis of tokens they are two
    sequences.
    """
    mode = spec.CACHE_MODES[cache_mode]
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
