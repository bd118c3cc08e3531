"""The two overloads of ``torch.ops.atb.npu_mla_preprocess`` on the CPU: fresh results, and results
as arguments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_fusion.meta import bind
from mla_fusion.reference import preprocess

_CACHES = ("kv_cache", "kv_cache_rope")


def npu_mla_preprocess(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Results on copies of the caches. torch_npu returns fresh caches too, in which only the new
    rows are defined; here the other rows are those of the arguments.
    """
    call = bind(preprocess.contract.OP, args, options)
    copies = {name: call[name].clone() for name in _CACHES if isinstance(call.get(name), Tensor)}
    return preprocess.npu_mla_preprocess(**call | copies)


def npu_mla_preprocess_out(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Writes q_out0, q_out1 and the new rows of kv_cache_out0 and kv_cache_out1, usually the caches
    themselves.
    """
    names = ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1")
    q_out0, kv_out, q_out1, kr_out = outs = tuple(options.pop(name) for name in names)
    call = bind(preprocess.contract.OP, args, options)
    query, _, query_rope, _ = preprocess.npu_mla_preprocess(
        **call | dict(zip(_CACHES, (kv_out, kr_out), strict=True))
    )
    q_out0.copy_(query)
    if query_rope.numel():
        q_out1.copy_(query_rope)
    return outs
