"""The call of the whole prologue's operator: what goes in, and its results by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.emit import pack, rows
from mla_fusion.emit.results import result_of
from mla_fusion.emit.target import Target
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.fx.build import Builder
from mla_fusion.meta import limits
from mla_fusion.meta.prolog import V3_FUNCTIONAL as KERNEL
from mla_fusion.plan import cache_modes, weight_modes
from mla_fusion.plan.plan import InPlace, PrologPlan
from mla_fusion.plan.whole import PrologPlanner
from mla_fusion.report.rejection import Refuse

aten = torch.ops.aten


def inputs(plan: PrologPlan) -> list[Node]:
    """Nodes of the graph that the replacement reads."""
    q, k = plan.candidate.query, plan.candidate.key
    every = (q.down, q.up_nope, q.up_rope, k.down, k.down_rope)
    weights = [part.weight for item in every for part in item.by_weight]
    if isinstance(q.absorb, AbsorbFact):
        weights += q.absorb.weights
        weights += [q.absorb.times] if q.absorb.times is not None else []
    weights += scales(plan)
    tables = [run.base for run in (*plan.cos, *plan.sin)]
    gammas = [node for node in (q.norm.gamma, k.gamma) if node is not None]
    caches = (*plan.caches.inputs, *plan.caches.slots.nodes)
    return list(dict.fromkeys([plan.token_x, *weights, *gammas, *tables, *caches]))


def scales(plan: PrologPlan) -> list[Node]:
    """Scales of the quantised products and caches, and what smooths c_q; empty where nothing is
    quantised.
    """
    q, k = plan.candidate.query, plan.candidate.key
    found: list[Node | None] = []
    for item in (q.up_nope, q.up_rope, q.down, k.down, k.down_rope):
        found += [
            part.quantised.weight_scale for part in item.by_weight if part.quantised is not None
        ]
    if q.up_nope.quantised is not None and q.up_nope.quantised.dynamic is not None:
        found.append(q.up_nope.quantised.dynamic.smooth)
    if q.down.quantised is not None:
        found.append(q.down.quantised.token_scale)
    found += [scale.node for scale in plan.caches.scales]
    return list(dict.fromkeys(node for node in found if node is not None))


_PER_HEAD = frozenset({"query", "q_nope", "query_rope", "dequant_scale_q_nope"})  # [.., N, width]


def call_kernel(b: Builder, plan: PrologPlan) -> dict[str, Any]:
    """Emit the call; its results by name (with ``c_kv`` and ``k_pe`` where they are staged)."""
    q, k = plan.candidate.query, plan.candidate.key
    assert q.norm.gamma is not None and k.gamma is not None
    x = b.value(plan.token_x)
    lead = plan.lead
    if isinstance(plan.caches, InPlace):
        held = {name: b.cache(cache, shape) for name, cache, shape in plan.caches.held}
        kv_cache, kr_cache = (
            held["kv_cache"],
            held["kr_cache"] if "kr_cache" in held else rows.nothing(b, x),
        )
        index = {"cache_index": rows.checked_slots(b, plan, lead, skips=k.operator is not None)}
    else:
        kv_cache, kr_cache = (
            rows.buffer(b, x, lead, width) for width in (len(k.columns), k.rope_dim)
        )
        index = {}
    fused = b.call(
        getattr(torch.ops.npu, KERNEL.name).default,
        x,
        pack.weight(b, plan, "weight_dq", pack.dq, q.down),
        pack.weight(b, plan, "weight_uq_qr", pack.uq_qr, q.up_nope, q.up_rope),
        pack.weight_uk(b, plan),
        pack.weight(b, plan, "weight_dkv_kr", pack.dkv_kr, k.down, k.down_rope),
        pack.vector(b, "rmsnorm_gamma_cq", q.norm.gamma),
        pack.vector(b, "rmsnorm_gamma_ckv", k.gamma),
        rows.table(b, plan.sin, (*lead, k.rope_dim), 0.0, x),
        rows.table(b, plan.cos, (*lead, k.rope_dim), 1.0, x),
        kv_cache,
        kr_cache,
        **index,
        **pack.quantisation(b, plan),
        **attributes(plan),
    )
    results = {
        name: result_of(b, fused, place)
        for place, name in enumerate(KERNEL.results)
        if name in _used(plan)
    }
    asked = {replacement.output for replacement in plan.replacements}
    for name, made, width in (
        ("c_kv", "kv_cache", len(k.columns)),
        ("k_pe", "kr_cache", k.rope_dim),
    ):
        if name in asked and index:
            results[name] = rows.written(
                b, results[made], index["cache_index"], (*lead, width), plan.cache_mode
            )
        elif name in asked:
            results[name] = b.reshape(results.pop(made), (*lead, width))
    if isinstance(q.absorb, AbsorbFact) and q.absorb.times is not None:
        results["query"] = rows.multiplied(b, results["query"], q.absorb.times)
    if not isinstance(q.absorb, AbsorbFact):
        results["q_nope"] = b.sliced(results.pop("query"), -1, 0, q.absorb.nope_dim)
    for name in sorted(plan.interleave & results.keys()):
        results[name] = rows.interleave(b, results[name])
    if plan.kernel_heads > plan.heads:
        for name in sorted(_PER_HEAD & results.keys()):
            results[name] = b.sliced(results[name], -2, 0, plan.heads)
    return results


def attributes(plan: PrologPlan) -> dict[str, Any]:
    """Keyword attributes of the call. Both epsilons are always given: the operator's default is not
    the models'.
    """
    given: dict[str, Any] = {
        "rmsnorm_epsilon_cq": plan.eps_cq,
        "rmsnorm_epsilon_ckv": plan.eps_ckv,
        "cache_mode": plan.cache_mode,
    }
    if plan.query_norm:
        given["query_norm_flag"] = True
    given |= weight_modes.attributes(plan.candidate.weight_quant_mode, plan.kv_cache_quant_mode)
    given |= cache_modes.attributes(plan.kv_cache_quant_mode)
    if plan.qc_qr_scale != 1.0:
        given["qc_qr_scale"] = plan.qc_qr_scale
    if plan.kc_scale != 1.0:
        given["kc_scale"] = plan.kc_scale
    return given


def _used(plan: PrologPlan) -> set[str]:
    names = {replacement.output for replacement in plan.replacements} | {"query", "query_rope"}
    names |= {"kv_cache"} if "c_kv" in names else set()
    names |= {"kr_cache"} if "k_pe" in names else set()
    return names | {name for name, _, _ in plan.caches.held}


def ask(plan: PrologPlan, config: Config) -> None:
    """Raise ``Refuse`` where the operator takes a call and does not give what the model reads."""
    soc, cann = config.machine.soc, config.machine.cann
    if plan.query_norm and not limits(KERNEL.name, soc, cann, "graph").gives_query_norm:
        message = (
            f"query_norm_flag: the operator takes it with CANN {cann} and gives no query_norm, "
            "which is read here"
        )
        raise Refuse("contract:query_norm_flag", message, (plan.candidate.query.norm.node,))


TARGET = Target(
    operator=KERNEL,
    planner=PrologPlanner,
    inputs=inputs,
    call=call_kernel,
    attributes=attributes,
    ask=ask,
)
