"""npu_mla_prolog (v1) and npu_mla_prolog_v2: v3's arithmetic, the scenario read off the dtypes,
older results.

Both schemas are pure, yet the device writes the caches in place (v2 even returns the very same
tensors). Here the inputs are written too and the results are copies of them: what a pure schema
returns may not share memory with its arguments, and a caller reading either sees the updated cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta.prolog import V1, V2, Operator
from mla_fusion.reference.functional import kernel
from mla_fusion.reference.prolog import npu_mla_prolog_v3


@kernel(V1)
def npu_mla_prolog(call: Any) -> tuple[Tensor, ...]:
    """v1: ``(query, query_rope, kv_cache, kr_cache)``; arguments as `torch_npu.npu_mla_prolog`."""
    return _prolog(V1, call)[:4]


@kernel(V2)
def npu_mla_prolog_v2(call: Any) -> tuple[Tensor, ...]:
    """v2: ``(query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope)``; the last is ``[1]``
    when absent.
    """
    return _prolog(V2, call)


def _prolog(operator: Operator, call: Any) -> tuple[Tensor, ...]:
    meta.check_structure(operator.name, vars(call))
    wq, kv = meta.implied_quant_modes(vars(call))
    if kv == 1:  # a [1, Hckv] row of which the kernel reads one float
        call.quant_scale_ckv = call.quant_scale_ckv.reshape(-1)[:1]
    query, query_rope, dequant_scale_q_nope, _, _ = npu_mla_prolog_v3(
        **vars(call), weight_quant_mode=wq, kv_cache_quant_mode=kv, query_quant_mode=int(kv == 1)
    )
    scale = dequant_scale_q_nope if kv == 1 else torch.empty(1, dtype=torch.float32).zero_()
    return query, query_rope, call.kv_cache.clone(), call.kr_cache.clone(), scale
