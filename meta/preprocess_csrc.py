"""The contract of vllm-ascend's fork of MlaPreprocess (``torch.ops._C_ascend.mla_preprocess``).

Here it is called ``mla_preprocess_csrc``, after the directory it is built from, because ATB's
operator has the same name. Read from that repository's `csrc/torch_binding.cpp`,
`mla_preprocess_torch_adpt.h`, `op_host/mla_preprocess.h` and the kernels it instantiates
(`mla_preprocess_kernel.cpp`). What differs from ATB's:

* no gamma0 and beta0: hiddenState is normed by the caller and only quantised;
* ``quant_mode`` "no_quant": weights of the activation dtype, no scales, no beta1;
* cos and sin may both be None: no rotation;
* ``enable_inner_out``: inner_out receives RMSNorm 1 with its beta, before quantisation;
* results are arguments, and the rows go to kv_cache_out0 and kv_cache_out1: pass the caches again
  there;
* caches are [BlockNum, BlockSize, width], with or without a head axis of 1; in NZ modes also the
  physical [BlockNum, width/C0, BlockSize, C0], of any BlockSize. Their first axis may be strided,
  no other;
* a combination of modes without a kernel writes nothing and reports nothing, so `check` refuses it
  (its host code also knows "per_token_quant_asymm", for which there is none at all).

Axes as in `mla_fusion.meta.preprocess`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.layout import contiguous, shares_memory, writable
from mla_fusion.meta.preprocess import (
    CACHE_FORMS,
    CACHE_MODES,
    OPTIONAL,
    QUANT_MODES,
    CacheForm,
    Operator,
    activation_of,
    arguments_of,
    bind_cache_scales,
    bind_descales,
    bind_static_scales,
    bind_weights,
    check_devices,
    check_ranges,
    check_slots,
    check_where,
)
from mla_fusion.meta.symbolic import different

OP = "mla_preprocess_csrc"
SOURCE = "vllm-ascend csrc/mla_preprocess"
NO_QUANT = "no_quant"
_ALL = tuple(CACHE_FORMS)
# (quant_mode, activation dtype) -> cache modes with a kernel, and those of them that can fill
# inner_out
KERNELS: Mapping[tuple[str, torch.dtype], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("per_tensor_quant_asymm", torch.bfloat16): (("kvcache", "krope_ctkv", "nzcache"),) * 2,
    ("per_tensor_quant_asymm", torch.float16): (("kvcache", "krope_ctkv"), ()),
    ("per_token_quant_symm", torch.bfloat16): (_ALL, _ALL),
    (NO_QUANT, torch.bfloat16): (("krope_ctkv",), ()),
}
RESULTS = ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1", "inner_out")
_BEFORE_SCALES = tuple(
    "hiddenState wdqkv descale0 gamma1 beta1 wuq descale1 gamma2 cos sin wuk kv_cache "
    "kv_cache_rope slotmapping".split()
)
_OPEN = ("descale0", "beta1", "descale1", "cos", "sin")
CSRC = Operator(
    OP,
    SOURCE,
    (*_BEFORE_SCALES, *OPTIONAL, "cache_mode", "quant_mode", "enable_inner_out", *RESULTS),
    (*(name for name in _BEFORE_SCALES if name not in _OPEN), *RESULTS),
    (*_OPEN, *OPTIONAL),
    {"cache_mode": tuple(CACHE_MODES), "quant_mode": (*QUANT_MODES, NO_QUANT)},
    {"enable_inner_out": False},
)
_TENSORS = (*CSRC.required, *CSRC.optional)
_CACHES = ("kv_cache", "kv_cache_rope", "kv_cache_out0", "kv_cache_out1")
_SIZES = {"C": ("wuk", 512), "R": ("kv_cache_rope", 64)}


def check_csrc(soc: str, cann: str, values: bool, given: Mapping[str, Any]) -> None:
    """`mla_fusion.meta.check` of ``mla_preprocess_csrc``: a kernel that exists, structure,
    sizes.
    """
    check_where(CSRC, soc, cann)
    full = arguments_of(CSRC, given)
    _check_kernel(full)
    bound = bind_tensors(full)
    for axis, (argument, size) in _SIZES.items():
        if different(bound.dims[axis], size):
            bound.refuse(
                f"dims.{axis.lower()}", argument, f"{axis} {size}", f"{axis} {bound.dims[axis]}"
            )
    check_ranges(bound, "hiddenState")
    check_devices(bound, _TENSORS)
    for name in _TENSORS:
        if full[name] is not None and name not in _CACHES and not contiguous(full[name]):
            found = f"strides {list(full[name].stride())}"
            bound.refuse(
                f"contiguous.{name}",
                name,
                "a contiguous tensor: the kernel gets its address",
                found,
            )
    if values:
        check_slots(bound)


def _check_kernel(full: Mapping[str, Any]) -> None:
    bound = Binder(OP, SOURCE, full)
    kind, quant, cache = activation_of(bound, "hiddenState"), full["quant_mode"], full["cache_mode"]
    if (quant, kind) not in KERNELS:
        expected = "one of " + ", ".join(mode for mode, dtype in KERNELS if dtype == kind)
        bound.refuse("quant_mode.kernel", "quant_mode", f"{expected} with {kind}", quant)
    modes, inner = KERNELS[quant, kind]
    if cache not in modes:
        expected = f"one of {', '.join(modes)} with {quant}, {kind}"
        bound.refuse("cache_mode.kernel", "cache_mode", expected, cache)
    if full["enable_inner_out"] and cache not in inner:
        bound.refuse("inner_out.kernel", "enable_inner_out", f"False with {quant}, {kind}", True)


def bind_tensors(full: Mapping[str, Any]) -> Binder:
    """Dtypes, presence, agreement of all shapes and strides; the binder holds the sizes of the
    axes.
    """
    bound = Binder(OP, SOURCE, full)
    kind, quant = activation_of(bound, "hiddenState"), full["quant_mode"]
    form = CACHE_FORMS[full["cache_mode"]]
    for name, shape in (("hiddenState", "T H"), ("gamma1", "Q"), ("gamma2", "C")):
        bound.tensor(name, shape, kind)
    _bind_caches(bound, form, kind)
    _bind_rope(bound, kind)
    if full["wuk"].dim() != 3:
        bound.refuse(
            "rank.wuk",
            "wuk",
            "[N, D, C]: the host code reads the sizes off it",
            list(full["wuk"].shape),
        )
    bind_weights(bound, kind, kind if quant == NO_QUANT else torch.int8)
    if quant != NO_QUANT:
        bound.needed("beta1", "Q", kind, quant)
        bind_descales(bound, kind)
    if quant == "per_tensor_quant_asymm":
        bind_static_scales(bound, kind)
    if form.int8:
        bind_cache_scales(bound, kind)
    bound.tensor("slotmapping", "T", torch.int32)
    _bind_results(bound, form, kind)
    return bound


def _bind_rope(bound: Binder, kind: torch.dtype) -> None:
    given = [name for name in ("cos", "sin") if bound.full[name] is not None]
    if len(given) == 1:
        absent = "sin" if given == ["cos"] else "cos"
        bound.refuse(f"required.{absent}", absent, f"a tensor, as {given[0]} is given", "nothing")
    for name in given:
        bound.tensor(name, "T R", kind)


def _bind_caches(bound: Binder, form: CacheForm, kind: torch.dtype) -> None:
    """R is read off kv_cache_rope, also in mode kvcache, which does not write it."""
    rope = bound.full["kv_cache_rope"]
    if rope.dim() == 0:
        bound.refuse("rank.kv_cache_rope", "kv_cache_rope", "a tensor whose last axis is R", "0-D")
    if form.kr is None:
        bound.dtype("kv_cache_rope", kind)
        bound.dims["R"] = rope.shape[-1]
        bound.dims["C+R"] = bound.dims["C"] + bound.dims["R"]
    else:
        _cache(bound, "kv_cache_rope", "R", kind, form)
    _cache(bound, "kv_cache", "C" if form.kr else "C+R", torch.int8 if form.int8 else kind, form)


def _cache(bound: Binder, name: str, width: str, dtype: torch.dtype, form: CacheForm) -> None:
    bound.dtype(name, dtype)
    tensor = bound.full[name]
    bound.sizes(name, block_row_width(tuple(tensor.shape), form.nz), f"BlockNum BlockSize {width}")
    if (
        form.nz
        and is_physical(tuple(tensor.shape))
        and different(tensor.shape[3], 32 // tensor.element_size())
    ):
        c0 = 32 // tensor.element_size()
        bound.refuse(
            f"shape.{name}", name, f"[BlockNum, {width}/{c0}, BlockSize, {c0}]", list(tensor.shape)
        )
    if not writable(tensor, first_axis_free=True, ones_free=True):
        bound.refuse(
            f"contiguous.{name}",
            name,
            "contiguous axes, the first excepted",
            f"strides {list(tensor.stride())}",
        )


def is_physical(sizes: tuple[Any, ...]) -> bool:
    """Whether an NZ cache is declared as it lies in memory; axis 2 tells, as it does for the
    operator.
    """
    return len(sizes) == 4 and different(sizes[2], 1)


def block_row_width(sizes: tuple[Any, ...], nz: bool) -> tuple[Any, ...]:
    """(BlockNum, BlockSize, width) of a cache in any of its spellings; other shapes as they are."""
    if nz and is_physical(sizes):
        return sizes[0], sizes[2], sizes[1] * sizes[3]
    if len(sizes) == 4 and not different(sizes[2], 1):
        return sizes[0], sizes[1], sizes[3]
    return sizes


def _bind_results(bound: Binder, form: CacheForm, kind: torch.dtype) -> None:
    full = bound.full
    results = {"q_out0": (form.q_out0, torch.int8 if form.int8 else kind)}
    if form.kr is not None:
        results["q_out1"] = ("T N R", kind)
    if full["enable_inner_out"]:
        results["inner_out"] = ("T Q", kind)
    for name, (shape, dtype) in results.items():
        bound.tensor(name, shape, dtype)
        if shares_memory(full[name]):
            found = f"strides {list(full[name].stride())}"
            bound.refuse(f"contiguous.{name}", name, "memory of its own for every element", found)
    _same_layout(bound, "kv_cache", "kv_cache_out0")
    if form.kr is not None:
        _same_layout(bound, "kv_cache_rope", "kv_cache_out1")


def _same_layout(bound: Binder, cache: str, out: str) -> None:
    """The kernel addresses a result cache by the shape and strides of the cache argument."""
    one, other = bound.full[cache], bound.full[out]
    if one is other:
        return
    bound.dtype(out, one.dtype)
    layouts = [(list(tensor.shape), list(tensor.stride())) for tensor in (one, other)]
    if len(one.shape) != len(other.shape) or any(
        different(a, b) for pair in zip(*layouts, strict=True) for a, b in zip(*pair, strict=True)
    ):
        texts = [f"shape {shape}, strides {strides}" for shape, strides in layouts]
        bound.refuse(f"shape.{out}", out, f"{texts[0]}, as {cache} has", texts[1])


def infer_csrc(given: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """q_out0, kv_cache_out0, q_out1, kv_cache_out1, inner_out: the arguments of those names, handed
    back.
    """
    full = arguments_of(CSRC, given)
    return [(tuple(full[name].shape), full[name].dtype) for name in RESULTS]
