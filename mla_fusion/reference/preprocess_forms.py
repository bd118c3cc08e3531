"""The two overloads of ``torch.ops.atb.npu_mla_preprocess`` on the CPU: fresh results, and results
as arguments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_fusion.meta import bind
from mla_fusion.meta import preprocess as contract
from mla_fusion.reference import preprocess


def npu_mla_preprocess(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Results on copies of the caches. torch_npu returns fresh caches too, in which only the new
    rows are defined; here the other rows are those of the arguments.
    """
    call = bind(contract.OP, args, options)
    caches = (name for name in contract.CACHES if isinstance(call.get(name), Tensor))
    copies = {name: call[name].clone() for name in caches}
    return preprocess.npu_mla_preprocess(**call | copies)


def npu_mla_preprocess_out(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Writes q_out0, q_out1 and the new rows of kv_cache_out0 and kv_cache_out1, usually the caches
    themselves.
    """
    outs = tuple(options.pop(name) for name in contract.RESULTS)
    q_out0, kv_out, q_out1, kr_out = outs
    call = bind(contract.OP, args, options)
    query, _, query_rope, _ = preprocess.npu_mla_preprocess(
        **call | dict(zip(contract.CACHES, (kv_out, kr_out), strict=True))
    )
    q_out0.copy_(query)
    if query_rope.numel():
        q_out1.copy_(query_rope)
    return outs
