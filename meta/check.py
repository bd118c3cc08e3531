"""`check`: one call against the specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.call import Call
from mla_fusion.meta.errors import known_name
from mla_fusion.meta.limits import known_path, limits
from mla_fusion.meta.others import OTHERS
from mla_fusion.meta.signature import OPERATORS, complete, named

_VALIDATION = (torch.bfloat16, torch.float32, torch.float64)


def check(
    op: str,
    *,
    soc: str = "A3",
    cann: str = "latest",
    path: str = "eager",
    values: bool = False,
    **arguments: Any,
) -> None:
    """Raise ContractError unless the operator takes this call on ``soc`` with CANN ``cann``.

    op         an operator of torch_npu: ``npu_mla_prolog``, ``_v2``, ``_v3``, ``_v3_functional``,
               ``npu_kv_rmsnorm_rope_cache``, ``_v2``, ``_v2_functional``, ``npu_mla_preprocess``
               (also ``mla_preprocess``), or ``npu_fused_infer_attention_score_v2`` in its form for
               absorbed MLA
    soc, cann  whose limits hold
    path       how the call reaches the device: "eager", by hand through torch_npu, or "graph",
               where GE infers the shapes of the results first and takes less: no 4-D storage of
               weight_dq from 9.1 on, for one
    values     also read cache_index and actual_seq_len, which the device does not check, and
               lengths given as tensors
    arguments  the operator's own, by name; tensors may be meta or fake, sizes symbolic: a symbolic
               size is never specialised, only what is statically known to be wrong is refused

    What "graph" takes, "eager" takes too. The default is for calls made by hand; ask "graph" of a
    call that is compiled, as the pass does.
    """
    bound(op, soc, cann, path, values, arguments)


def bound(
    op: str, soc: str, cann: str, path: str, values: bool, arguments: Mapping[str, Any]
) -> Binder:
    """A call that has passed `check`, with the sizes on which that depends (``undecided``)."""
    known_path(path)
    name = known_name("op", named(op), OPERATORS)
    if name in OTHERS:
        return OTHERS[name].check(name, soc, cann, values, complete(name, arguments))
    call = checked(op, soc, cann, arguments, path)
    if values:
        call.values()
    return call


def checked(
    op: str, soc: str, cann: str, arguments: Mapping[str, Any], path: str = "eager"
) -> Call:
    """A call that has passed `check`, with its modes and the sizes of its axes."""
    allowed = limits(op, soc, cann, path)
    where = f"{soc}, CANN {cann}"
    call = Call(op, complete(op, arguments), allowed)
    call.modes(where)
    call.tensors(torch.bfloat16)
    call.within_limits(where)
    call.ranks(where if path == "eager" else f"{where} in a graph")
    call.memory(where)
    return call


def check_structure(op: str, arguments: Mapping[str, Any]) -> None:
    """`check` without the tables of sizes and the strides, and with float32 or float64 in place of
    bfloat16.

    What the CPU reference kernel asks of a call: modes that exist, tensors that fit together.
    """
    call = Call(op, complete(op, arguments), None)
    call.modes("")
    gamma = call.full["rmsnorm_gamma_cq"]
    call.tensors(gamma.dtype if gamma.dtype in _VALIDATION else torch.bfloat16)
