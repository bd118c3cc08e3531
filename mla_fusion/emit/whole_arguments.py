"""The tensors of a call of the whole prologue's operator, for its contract."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.emit import whole
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.meta import limits
from mla_fusion.plan import weight_modes
from mla_fusion.plan.cache_modes import scale_shapes
from mla_fusion.plan.plan import InPlace, PrologPlan
from mla_fusion.report.rejection import Refuse


def ask(plan: PrologPlan, config: Config) -> None:
    """Raise ``Refuse`` where the operator takes a call and does not give what the model reads."""
    soc, cann = config.machine.soc, config.machine.cann
    if plan.query_norm and not limits(whole.KERNEL.name, soc, cann, "graph").gives_query_norm:
        message = (
            f"query_norm_flag: the operator takes it with CANN {cann} and gives no query_norm, "
            "which is read here"
        )
        raise Refuse("contract:query_norm_flag", message, (plan.candidate.query.norm.node,))


def arguments(plan: PrologPlan) -> dict[str, Any]:
    """The call's tensors by name, as fake values of the planned shapes."""
    q, k = plan.candidate.query, plan.candidate.key
    x = plan.token_x.meta["val"]
    lead = list(x.shape[:-1])
    heads, nope, rope = plan.kernel_heads, q.absorb.nope_dim, q.rope.rope_dim

    def like(*shape: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return x.new_empty(shape, dtype=dtype)

    mode = plan.candidate.weight_quant_mode
    element = weight_modes.elements(mode)
    arguments: dict[str, Any] = {
        "token_x": x,
        "weight_dq": like(x.shape[-1], len(q.norm.columns), dtype=element["weight_dq"]),
        "weight_uq_qr": like(
            len(q.norm.columns), heads * (nope + rope), dtype=element["weight_uq_qr"]
        ),
        "weight_uk": like(heads, nope, q.absorb.latent_dim),
        "weight_dkv_kr": like(
            x.shape[-1], len(k.columns) + k.rope_dim, dtype=element["weight_dkv_kr"]
        ),
        "rmsnorm_gamma_cq": like(len(q.norm.columns)),
        "rmsnorm_gamma_ckv": like(len(k.columns)),
        "rope_sin": like(*lead, rope),
        "rope_cos": like(*lead, rope),
    }
    sizes = {
        "He": x.shape[-1],
        "Hcq": len(q.norm.columns),
        "Hckv": len(k.columns),
        "N": heads,
        "D": nope,
        "Dr": rope,
    }
    for name, (shape, dtype) in weight_modes.scales(mode, sizes | {"tokens": prod(lead)}).items():
        arguments[name] = like(*shape, dtype=dtype)
    dynamic = q.up_nope.quantised.dynamic if q.up_nope.quantised is not None else None
    if dynamic is not None and dynamic.smooth is not None:
        arguments["smooth_scales_cq"] = like(
            1, dynamic.smooth.meta["val"].numel(), dtype=torch.float32
        )
    if isinstance(plan.caches, InPlace):
        arguments["kr_cache"] = like(0)
        for name, cache, shape in plan.caches.held:
            arguments[name] = like(*shape, dtype=cache.meta["val"].dtype)
        arguments["cache_index"] = like(*lead, dtype=torch.int64)
        for name, shape in scale_shapes(
            plan.kv_cache_quant_mode, len(k.columns), k.rope_dim, mode
        ).items():
            arguments[name] = like(*shape, dtype=torch.float32)
    else:
        arguments["kv_cache"] = like(*lead, 1, len(k.columns))
        arguments["kr_cache"] = like(*lead, 1, k.rope_dim)
    return arguments


def nodes(plan: PrologPlan) -> dict[str, Node]:
    """Nodes of the graph that stand for arguments, by name."""
    q, k = plan.candidate.query, plan.candidate.key
    by_name = {
        "token_x": plan.token_x,
        "weight_dq": q.down.weight,
        "weight_uq_qr": q.up_rope.weight,
        "weight_uk": q.absorb.weight if isinstance(q.absorb, AbsorbFact) else q.up_nope.weight,
        "weight_dkv_kr": k.down.weight,
    }
    if isinstance(plan.caches, InPlace):
        by_name |= {name: cache for name, cache, _ in plan.caches.held}
    return by_name
