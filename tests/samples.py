"""Arguments of legal calls: the self-test's of small sizes, calls on meta, ATB's MlaPreprocess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from mla_fusion.meta import preprocess
from mla_fusion.meta.binder import size_of
from torch import Tensor

from mla_fusion.observe.outline import outline
from mla_fusion.tools.selftest.samples import filled, sample_index
from mla_fusion.tools.selftest.samples import sample_call as sample_call_of

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
sample_call = partial(sample_call_of, dims=SMALL)

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


def call_on_meta(
    *,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    lead: Sequence[int] = (8,),
    dims: Mapping[str, int],
    **form: Any,
) -> dict[str, Any]:
    """`sample_call` of any sizes: nothing is allocated."""
    tensors, options = outline(weight_quant_mode, kv_cache_quant_mode, lead, dims, **form)
    index = sample_index(options["cache_mode"], lead, dims, torch.Generator().manual_seed(0))
    return tensors | {name: tensor.to("meta") for name, tensor in index.items()} | options


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
    make = torch.Generator().manual_seed(7)

    def drawn(sizes: Sequence[int], kind: torch.dtype, fan_in: float = 1.0) -> Tensor:
        empty = torch.empty(sizes, dtype=kind, device="meta")
        return empty if device == "meta" else filled(make, empty, fan_in)

    def sized(axes: str) -> list[int]:
        return [size_of(axis, dims) for axis in axes.split()]

    rows = dims["BlockNum"] * dims["BlockSize"]

    def descale(axes: str, k: int) -> Tensor:
        noise = torch.rand(sized(axes), generator=make, dtype=torch.float32)
        scale = (0.5 + noise) / (73 * 40 * k**0.5)
        if dtype == torch.bfloat16:
            return scale
        return scale.view(torch.int32).to(torch.int64) & 0xFFFFFFFF

    call: dict[str, Any] = {
        name: drawn(sized(axes), dtype, 100 if name.startswith("beta") else 1)
        for name, axes in preprocess.SHAPES.items()
    }
    call |= {
        "wdqkv": drawn(sized(f"{preprocess.DOWN} H"), weight, dims["H"]),
        "descale0": descale(preprocess.DOWN, dims["H"]),
        "wuq": drawn(sized(f"{preprocess.UP} Q"), weight, dims["Q"]),
        "descale1": descale(preprocess.UP, dims["Q"]),
        "wuk": drawn(sized("N D C"), dtype, dims["D"]),
        "slotmapping": torch.randperm(rows, generator=make)[: dims["T"]].int(),
        "cache_mode": cache_mode,
        "quant_mode": quant_mode,
        "kv_cache": drawn(sized(form.kv), torch.int8 if form.int8 else dtype),
        "kv_cache_rope": torch.zeros(0, dtype=dtype)
        if form.kr is None
        else drawn(sized(form.kr), dtype),
    }
    if quant_mode == "per_tensor_quant_asymm":
        for stage, width in (("0", preprocess.DOWN), ("1", preprocess.UP)):
            call["quant_scale" + stage] = torch.tensor([0.03], dtype=dtype)
            call["quant_offset" + stage] = torch.tensor([3], dtype=torch.int8)
            call["bias" + stage] = torch.randint(
                -10, 10, sized(width), generator=make, dtype=torch.int32
            )
    if form.int8:
        call["ctkv_scale"] = torch.tensor([0.02], dtype=dtype)
        call["q_nope_scale"] = torch.linspace(20, 40, dims["N"], dtype=torch.float32).to(dtype)
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }
