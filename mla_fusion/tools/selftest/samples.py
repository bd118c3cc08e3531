"""The calls of the self-test: all modes that the specification has on one SoC, at one CANN release,
with seeded random arguments that are built from the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import key_operator, signature, spec
from mla_fusion.meta.limits import VERSIONS, limits
from mla_fusion.meta.prolog import CACHES, PROLOGS
from mla_fusion.observe.outline import outline
from mla_fusion.reference import hifloat8

Arguments = dict[str, Any]  # of an operator, by name


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
) -> Arguments:
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


def as_operator(op: str, call: Mapping[str, Any], cann: str = "latest") -> Arguments:
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


@dataclass(frozen=True)
class Call:
    """One call of an operator that writes caches.

    name     unique among the calls of the self-test
    op       the operator, as `mla_fusion.meta.check` names it
    make     its seeded arguments, on the CPU
    results  names of what operator and reference return, in order
    caches   names of arguments
    nz       the weights that are in FRACTAL_NZ on an NPU
    kind     equal for calls that differ in the layout of caches alone
    """

    name: str
    op: str
    make: Callable[[], Arguments]
    results: Sequence[str]
    caches: Sequence[str] = CACHES
    nz: Sequence[str] = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
    kind: object = None


def calls(soc: str, cann: str, small: bool = True) -> list[Call]:
    """Every mode of every operator, on few tokens, of DeepSeek-V3's sizes or ``small`` ones.

    Raises ContractError for a ``soc`` or ``cann`` that is not in the tables.
    """
    return [
        *(call for op in VERSIONS for call in _of_prolog(op, soc, cann, small)),
        *_of_key(soc),
    ]


def _of_prolog(op: str, soc: str, cann: str, small: bool) -> Iterator[Call]:
    known = limits(op, soc, cann)
    if not known.cache_modes:  # the operator is not there on this SoC
        return
    dims = DEEPSEEK_V3 | {"BlockNum": 8}
    if small:
        dims |= {"N": 4, "He": min(known.dims["He"].listed)}
    for weight, cache in sorted(known.quant_modes):
        modes = [one for one in known.cache_modes if one in spec.CACHE_QUANTS[cache].cache_modes]
        for mode in modes:
            # tokens of one axis, where the mode has a slot for each
            lead = (8,) if 2 in spec.CACHE_MODES[mode].index else (8, 1)
            name = f"{op} w{weight} kv{cache} {mode}"
            form = dict(weight_quant_mode=weight, kv_cache_quant_mode=cache, cache_mode=mode)
            make = partial(_prolog, op, cann, lead=lead, dims=dims, **form)
            yield Call(name, op, make, PROLOGS[op].results, kind=(op, weight, cache))


def _prolog(op: str, cann: str, **form: Any) -> Arguments:
    return as_operator(op, sample_call(**form), cann)


def _of_key(soc: str) -> Iterator[Call]:
    """The modes that the pass emits, and the NZ layout; int8 rows where the SoC has them."""
    op, caches = key_operator.V2.name, ("k_cache", "ckv_cache")
    for mode in ("PA_BNSD", "PA_NZ", "Norm"):
        for int8 in (False, True) if mode != "Norm" or soc == "A5" else (False,):
            make = partial(sample_key, mode, int8)
            results = ("k_embed", "y") if mode != "Norm" else ()
            yield Call(f"{op} {mode}{' int8' * int8}", op, make, results, caches, ())


def sample_key(mode: str = "PA_BNSD", int8: bool = False) -> Arguments:
    """8 tokens, as one sequence on scattered slots, or in mode "Norm" as two, on rows of their own
    caches.
    """
    make, is_norm = torch.Generator().manual_seed(0), mode == "Norm"
    latent, rope = DEEPSEEK_V3["Hckv"], DEEPSEEK_V3["Dr"]

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float32).bfloat16()

    batches, pool = (2, (2, 1, 16)) if is_norm else (1, (4, 32, 1))
    lead, rows = (batches, 1, 8 // batches), prod(pool) // batches
    index = torch.stack([torch.randperm(rows, generator=make)[: lead[2]] for _ in range(batches)])
    arguments: Arguments = {
        "kv": noise(*lead, latent + rope),
        "gamma": 1 + noise(latent) / 8,
        "cos": noise(*lead, rope),
        "sin": noise(*lead, rope),
        "index": index if is_norm else index[0],
    }
    named = zip(("k_cache", "ckv_cache"), (rope, latent), key_operator.SCALES, strict=True)
    for name, width, scale in named:
        arguments[name] = noise(*pool, width)
        if int8:
            arguments[name] = (20 * arguments[name]).to(torch.int8)
            arguments[scale] = 20 + 10 * torch.rand(width, generator=make, dtype=torch.float32)
    return arguments | {"cache_mode": mode, "is_output_kv": not is_norm, "epsilon": 1e-6}
