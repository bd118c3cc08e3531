"""Makes the calls of the self-test: all modes that the specification has for a SoC and a CANN
release, with seeded random arguments.
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
    """Returns noise of variance 1 / ``fan_in`` in the shape and dtype of ``empty``. Noise of int8
    is uniform.
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
    """Returns the arguments of a legal ``npu_mla_prolog_v3`` call, by name.

    The values make every intermediate of order one; the caches are noise.

    lead  ``(T,)`` or ``(B, S)``
    form  further options of `outline`
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
            # int8 operands have standard deviation 73: each product becomes of order one again
            of_q = name == "dequant_scale_w_uq_qr"
            typical = 1.0 / (73.0 * (dims["Hcq"] ** 0.5 if of_q else dims["He"] ** 0.25))
        noise = torch.rand(empty.shape, generator=make, dtype=torch.float32)
        call[name] = (typical * (0.5 + noise)).to(empty.dtype)
    return call | sample_index(options["cache_mode"], lead, dims, make) | options


def sample_index(
    cache_mode: str, lead: Sequence[int], dims: Mapping[str, int], make: torch.Generator
) -> dict[str, Tensor]:
    """Returns the arguments by which a cache mode places rows.

    Slots are distinct, and -1 (skipped) for tokens that the cache has no room for. In block-wise
    modes, one axis of tokens is two sequences.
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
    """Returns a sample call of v3 as another version or release takes it.

    v1 and v2 have no modes. Some releases take a row for quant_scale_ckv, of which the kernel reads
    one float.
    """
    required, defaults = signature(op)
    names = {*required, *defaults}
    arguments = {name: value for name, value in call.items() if name in names}
    takes_row = limits(op, "A3", cann).kv_scale == spec.QUANT_SCALE_CKV_ROW
    if takes_row and call["kv_cache_quant_mode"] == 1:
        width = call["rmsnorm_gamma_ckv"].shape[0]
        arguments["quant_scale_ckv"] = call["quant_scale_ckv"].reshape(1, 1).repeat(1, width)
    return arguments


@dataclass(frozen=True)
class Call:
    """A call of an operator that writes caches.

    name     a name that no other call of the self-test has
    op       the operator, as `mla_fusion.meta.check` names it
    make     returns the seeded arguments, on the CPU
    results  the names of the results, in order
    caches   the names of the arguments that are caches
    kind     is equal for calls that differ only in the layout of caches
    """

    name: str
    op: str
    make: Callable[[], Arguments]
    results: Sequence[str]
    caches: Sequence[str] = CACHES
    kind: object = None


def calls(soc: str, cann: str, small: bool = True) -> list[Call]:
    """Returns a call for every mode of every operator, with few tokens, of DeepSeek-V3's sizes or
    ``small`` ones.

    Raises ContractError for a ``soc`` or ``cann`` that is not in the tables.
    """
    prologs = (call for op in VERSIONS for call in _prolog_calls(op, soc, cann, small))
    return [*prologs, *_key_calls(soc)]


def _prolog_calls(op: str, soc: str, cann: str, small: bool) -> Iterator[Call]:
    """Yields the calls of one prologue operator."""
    known = limits(op, soc, cann)
    if not known.cache_modes:  # this SoC does not have the operator
        return
    dims = DEEPSEEK_V3 | {"BlockNum": 8}
    if small:
        dims |= {"N": 4, "He": min(known.dims["He"].listed)}
    for weight, cache in sorted(known.quant_modes):
        for mode in known.cache_modes:
            if mode not in spec.CACHE_QUANTS[cache].cache_modes:
                continue
            # tokens have one axis if the mode has a slot for each token
            lead = (8,) if 2 in spec.CACHE_MODES[mode].index else (8, 1)
            name = f"{op} w{weight} kv{cache} {mode}"
            form = dict(weight_quant_mode=weight, kv_cache_quant_mode=cache, cache_mode=mode)
            make = partial(_prolog_arguments, op, cann, lead=lead, dims=dims, **form)
            yield Call(name, op, make, PROLOGS[op].results, kind=(op, weight, cache))


def _prolog_arguments(op: str, cann: str, **form: Any) -> Arguments:
    """Returns the arguments of one call of a prologue operator."""
    return as_operator(op, sample_call(**form), cann)


def _key_calls(soc: str) -> Iterator[Call]:
    """Yields the calls of the key's operator: its modes, and rows of int8 if the SoC has them."""
    op, caches = key_operator.V2.name, ("k_cache", "ckv_cache")
    for mode in ("PA_BNSD", "PA_NZ", "Norm"):
        for int8 in (False, True) if mode != "Norm" or soc == "A5" else (False,):
            make = partial(sample_key, mode, int8)
            results = ("k_embed", "y") if mode != "Norm" else ()
            yield Call(f"{op} {mode}{' int8' * int8}", op, make, results, caches)


def sample_key(mode: str = "PA_BNSD", int8: bool = False) -> Arguments:
    """Returns the arguments of a call of the key's operator on 8 tokens: one sequence on scattered
    slots, or in mode "Norm" two sequences, each with a cache of its own.
    """
    make, is_norm = torch.Generator().manual_seed(0), mode == "Norm"
    latent, rope, rope_scale, latent_scale = 512, 64, *key_operator.SCALES

    def noise(*shape: int) -> Tensor:
        """Returns normal numbers in bfloat16."""
        return torch.randn(shape, generator=make, dtype=torch.float32).bfloat16()

    batches, pool = (2, (2, 1, 16)) if is_norm else (1, (4, 32, 1))
    lead, rows = (batches, 1, 8 // batches), prod(pool) // batches
    index = torch.stack([torch.randperm(rows, generator=make)[: lead[2]] for _ in range(batches)])
    arguments = {
        "kv": noise(*lead, latent + rope),
        "gamma": 1 + noise(latent) / 8,
        "cos": noise(*lead, rope),
        "sin": noise(*lead, rope),
        "index": index if is_norm else index[0],
    }
    caches = ("k_cache", rope, rope_scale), ("ckv_cache", latent, latent_scale)
    for name, width, scale in caches:
        arguments[name] = noise(*pool, width)
        if int8:
            arguments[name] = (20 * arguments[name]).to(torch.int8)
            arguments[scale] = 20 + 10 * torch.rand(width, generator=make, dtype=torch.float32)
    return arguments | {"cache_mode": mode, "is_output_kv": not is_norm, "epsilon": 1e-6}
