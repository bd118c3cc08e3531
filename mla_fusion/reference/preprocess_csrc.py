"""vllm-ascend's fork of MlaPreprocess on the CPU, with the roundings of its
`mla_preprocess_mix_*.hpp` kernels.

The steps are those of `mla_fusion.reference.preprocess`, on hidden states that the caller has
normed; see `mla_fusion.meta.preprocess_csrc` for what sets the fork apart.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_fusion.meta import bind, preprocess, preprocess_csrc
from mla_fusion.reference.preprocess import prologue


def mla_preprocess_csrc(
    *args: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fills q_out0, kv_cache_out0, q_out1, kv_cache_out1 and inner_out, and returns them.

    Arguments as `torch.ops._C_ascend.mla_preprocess`, by position or by name: hiddenState, wdqkv,
    descale0, gamma1, beta1, wuq, descale1, gamma2, cos, sin, wuk, kv_cache, kv_cache_rope,
    slotmapping, quant_scale0, quant_offset0, bias0, quant_scale1, quant_offset1, bias1, ctkv_scale,
    q_nope_scale, cache_mode, quant_mode, enable_inner_out, q_out0, kv_cache_out0, q_out1,
    kv_cache_out1, inner_out; what may be None may be left out.

    The rows go to kv_cache_out0 and kv_cache_out1, where a caller usually passes the caches again;
    kv_cache and kv_cache_rope themselves are not written. inner_out is touched only with
    ``enable_inner_out``, q_out1 and kv_cache_out1 not in mode kvcache. Every cache mode is computed
    with every quant mode, also where the device has no kernel (`mla_fusion.meta.check` refuses
    those). Raises ContractError.
    """
    full = preprocess.arguments_of(preprocess_csrc.CSRC, bind(preprocess_csrc.OP, args, options))
    bound = preprocess_csrc.bind_tensors(full)
    preprocess.check_slots(bound)
    if full["quant_mode"] == preprocess_csrc.NO_QUANT:
        full["beta1"] = None  # read by the kernel and not added
    hidden: Tensor = full["hiddenState"]
    made = prologue(hidden.float(), full, bound.dims, hidden.dtype)
    form = preprocess.CACHE_FORMS[full["cache_mode"]]
    query, query_rope = made.store(form, full["kv_cache_out0"], full["kv_cache_out1"], full)
    full["q_out0"].copy_(query)
    if query_rope is not None:
        full["q_out1"].copy_(query_rope)
    if full["enable_inner_out"]:
        full["inner_out"].copy_(made.q_norm)
    return (
        full["q_out0"],
        full["kv_cache_out0"],
        full["q_out1"],
        full["kv_cache_out1"],
        full["inner_out"],
    )
