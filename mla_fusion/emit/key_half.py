"""The call of ``npu_kv_rmsnorm_rope_cache``: the key's products go in, caches and new rows come
out.

In place, tokens are one sequence, [1, 1, T, ..]: the newest releases ask for as many blocks as
there are sequences. Staged, the operator's mode for caches of sequences writes dense buffers [B, 1,
S, ..].
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.emit import pack, rows
from mla_fusion.emit.results import result_of
from mla_fusion.emit.target import Target
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.rope import Table
from mla_fusion.fx.build import Builder
from mla_fusion.meta.key_operator import V2_FUNCTIONAL as KERNEL
from mla_fusion.operators.known import shape_of
from mla_fusion.plan.key_half import KeyPlanner
from mla_fusion.plan.plan import InPlace, KeyPlan

aten = torch.ops.aten


def inputs(plan: KeyPlan) -> list[Node]:
    """Nodes of the graph that the call reads."""
    k, caches = plan.candidate.key, plan.caches
    found = [*plan.candidate.taken, *(run.base for run in (*plan.cos, *plan.sin))]
    found += [k.gamma] if k.gamma is not None else []
    if isinstance(caches, InPlace):
        found += [*caches.inputs, *caches.slots.nodes]
        found += [scale.node for _, scale, _ in _scales(plan) if scale.node is not None]
    return list(dict.fromkeys(found))


def call_kernel(b: Builder, plan: KeyPlan) -> dict[str, Any]:
    """Emit the call; its results by name."""
    k, lead = plan.candidate.key, _lead(plan)
    assert k.gamma is not None
    kv = b.reshape(_rows(b, plan), (lead[0], 1, lead[1], len(k.columns) + k.rope_dim))
    tables = [
        _table(b, plan, table, without, kv) for table, without in ((plan.cos, 1.0), (plan.sin, 0.0))
    ]
    if isinstance(plan.caches, InPlace):
        held = {name: b.cache(cache, shape) for name, cache, shape in plan.caches.held}
        index = rows.checked_slots(b, plan, (prod(plan.lead),))
    else:
        widths = {"kr_cache": k.rope_dim, "kv_cache": len(k.columns)}
        held = {name: _buffer(b, kv, _shape(lead, width)) for name, width in widths.items()}
        index = b.once(("places", tuple(map(str, lead))), lambda b: _places(b, plan, lead))
    scales = {
        name: pack.cache_scale(b, scale, (1, width), plan.device)
        for name, scale, width in _scales(plan)
    }
    gamma = pack.vector(b, "gamma", k.gamma, plan.candidate.dtype)
    operator = getattr(torch.ops.npu, KERNEL.name).default
    given = attributes(plan)
    called = b.call(
        operator, kv, gamma, *tables, index, held["kr_cache"], held["kv_cache"], **scales, **given
    )
    asked = {item.output for item in plan.replacements}
    staged = {} if isinstance(plan.caches, InPlace) else {"k_pe": "kr_cache", "c_kv": "kv_cache"}
    results = {}
    for name in sorted(asked | {name for name in held if not staged}):
        results[name] = result_of(b, called, KERNEL.results.index(staged.get(name, name)))
    for name, width in (("c_kv", len(k.columns)), ("k_pe", k.rope_dim)):
        if name in results:
            results[name] = b.reshape(results[name], (*plan.lead, width))
    for name in sorted(plan.interleave & results.keys()):
        results[name] = rows.interleave(b, results[name])
    return results


def attributes(plan: KeyPlan) -> dict[str, Any]:
    """Keyword attributes of the call. The epsilon is always given: the operator's default is not
    the models'.
    """
    in_place = isinstance(plan.caches, InPlace)
    given = {"epsilon": plan.candidate.key.eps, "cache_mode": "PA_BNSD" if in_place else "Norm"}
    return given | ({"is_output_kv": True} if plan.gives_rows else {})


def _lead(plan: KeyPlan) -> tuple[Any, Any]:
    """[B, S] as the operator is given them."""
    if isinstance(plan.caches, InPlace):
        return 1, prod(plan.lead)
    return (1, plan.lead[0]) if len(plan.lead) == 1 else (plan.lead[0], plan.lead[1])


def _shape(lead: tuple[Any, Any], width: int) -> tuple[Any, ...]:
    return lead[0], 1, lead[1], width


def _table(b: Builder, plan: KeyPlan, table: Table, without: float, kv: Any) -> Any:
    width = plan.candidate.key.rope_dim
    made = rows.table(b, table, (*plan.lead, width), without, kv, plan.candidate.dtype)
    return b.reshape(made, _shape(_lead(plan), width))


def _buffer(b: Builder, kv: Any, shape: tuple[Any, ...]) -> Any:
    return b.call(aten.new_empty.default, kv, b.sizes(shape, kv))


def _places(b: Builder, plan: KeyPlan, lead: tuple[Any, Any]) -> Any:
    """Row s of sequence b is row s of its cache."""
    places = b.call(aten.arange.default, b.size(lead[1]), dtype=torch.int64, device=plan.device)
    return (
        b.call(aten.expand.default, places, b.sizes(lead))
        if lead[0] != 1
        else b.reshape(places, lead)
    )


def _rows(b: Builder, plan: KeyPlan) -> Any:
    """[T, Hckv + Dr]: the latent's columns of its product, then those of the key as interleaved
    pairs.
    """
    return pack.dkv_kr(b, plan, lambda b, side: _product(b, plan, side))


def _product(b: Builder, plan: KeyPlan, projection: Projection) -> Any:
    """The product as [T, columns]."""
    value, labels = b.value(projection.node), projection.product.out_labels
    axis = labels.index(projection.column_labels[0])
    width = shape_of(projection.node)[axis]
    order = [place for place in range(len(labels)) if place != axis]
    return b.reshape(b.permuted(value, [*order, axis]), (prod(plan.lead), width))


def _scales(plan: KeyPlan) -> list[tuple[str, Any, int]]:
    """What an int8 cache's rows are multiplied by: argument, scale, width."""
    if not isinstance(plan.caches, InPlace):
        return []
    k, caches = plan.candidate.key, plan.caches
    every = (
        ("k_rope_scale", caches.kr_scale, k.rope_dim),
        ("c_kv_scale", caches.kv_scale, len(k.columns)),
    )
    return [(name, scale, width) for name, scale, width in every if scale is not None]


TARGET = Target(
    operator=KERNEL,
    planner=KeyPlanner,
    inputs=inputs,
    call=call_kernel,
    attributes=attributes,
)
