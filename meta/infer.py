"""Infers shapes and dtypes of the results. Sizes may be symbolic."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from mla_fusion.meta.binder import Binder, Result
from mla_fusion.meta.limits import known_path, known_releases
from mla_fusion.meta.prolog import CACHES, Operator
from mla_fusion.meta.signature import OTHERS, complete, operator_named
from mla_fusion.meta.spec import INFERSHAPE


def implied_quant_modes(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Returns ``(weight_quant_mode, kv_cache_quant_mode)``, which v1 and v2 read off the dtypes
    (`mla_prolog_tiling.cpp`).
    """
    int8 = torch.int8
    kv_int8 = arguments["kv_cache"].dtype == int8
    if arguments["token_x"].dtype == int8:
        return (2, 1) if kv_int8 else (2, 0)
    if arguments["weight_uq_qr"].dtype == int8:
        return (1, 2) if kv_int8 else (1, 0)
    return 0, 0


def quant_modes(operator: Operator, full: Mapping[str, Any]) -> tuple[int, int]:
    """Returns ``(weight_quant_mode, kv_cache_quant_mode)`` of a complete call."""
    if operator.version != "v3":
        return implied_quant_modes(full)
    return full["weight_quant_mode"], full["kv_cache_quant_mode"]


# the tensors from which the results follow, and the ranks that they may have
_READ: Mapping[str, tuple[int, ...]] = {
    "token_x": (2, 3),
    "weight_uk": (3,),
    "weight_uq_qr": (2, 4),
    "rmsnorm_gamma_cq": (1,),
    "rope_sin": (2, 3),
}


def infer(op: str, *, cann: str = "latest", path: str = "graph", **arguments: Any) -> list[Result]:
    """Returns ``[(shape, dtype), ...]`` in the operator's result order. The caches of the
    functional form come last.

    op, arguments  as `check` takes them
    cann       the release whose inference it is
    path       "graph": what the operator's own inference says in that release; "eager": what
               torch_npu allocates

    The two differ before CANN 8.5, where query_norm and its scale are ``[1]`` whatever
    ``query_norm_flag`` says, and in 8.5, where the scale of mxfp8 is ``[T, 1]`` float32. Absent
    results are ``[0]`` from CANN 8.5 on, ``[1]`` before it and for dequant_scale_q_nope of v2.
    Raises ContractError for a missing or unknown argument, a CANN release or path that does not
    exist, and a tensor without the axes of a result. All other rules are in `check`.
    """
    eager = known_path(path) == "eager"
    operator = operator_named(op)
    full = complete(operator.name, arguments)
    if operator.name in OTHERS:
        return OTHERS[operator.name](full).results()
    releases = known_releases(cann)
    absent = (0,) if "8.5" in releases else (1,)
    bound = Binder(operator, INFERSHAPE, full)
    for argument, ranks in _READ.items():
        bound.rank(argument, *ranks)
    is_v3 = operator.version == "v3"
    wq, kv = quant_modes(operator, full)
    lead = tuple(full["token_x"].shape[:-1])
    tokens = prod(lead)
    n, _, hckv = full["weight_uk"].shape
    (hcq,), activation = full["rmsnorm_gamma_cq"].shape, full["rmsnorm_gamma_cq"].dtype
    has_norm = is_v3 and full["query_norm_flag"] and (eager or "8.5" in releases)
    scale_width, scale_dtype = 1, torch.float32
    if wq == 3 and (eager or "9.0" in releases):
        scale_width, scale_dtype = hcq // 32, torch.float8_e8m0fnu
    scale_q_nope = absent if is_v3 else (1,)
    results: dict[str, Result] = {
        "query": ((*lead, n, hckv), full["token_x"].dtype if kv == 1 else activation),
        "query_rope": ((*lead, n, full["rope_sin"].shape[-1]), activation),
        "dequant_scale_q_nope": ((tokens, n, 1) if kv == 1 else scale_q_nope, torch.float32),
        "query_norm": ((*lead, hcq) if has_norm else absent, full["weight_uq_qr"].dtype),
        "dequant_scale_q_norm": (
            (tokens, scale_width) if has_norm and wq else absent,
            scale_dtype,
        ),
        **{name: (tuple(full[name].shape), full[name].dtype) for name in CACHES},
    }
    return [results[name] for name in operator.results]
