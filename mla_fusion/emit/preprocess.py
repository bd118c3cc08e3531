"""The call of ``npu_mla_preprocess`` in the form that writes its results into tensors: the caches,
and two new ones.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.emit import pack, rows, whole
from mla_fusion.emit.results import result_of
from mla_fusion.emit.target import Target
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.static_quant import One, StaticQuant
from mla_fusion.fx.build import Builder
from mla_fusion.meta.preprocess import ATB, STATIC
from mla_fusion.operators.known import shape_of
from mla_fusion.plan.plan import InPlace, PreprocessPlan
from mla_fusion.plan.preprocess import PreprocessPlanner

aten = torch.ops.aten
KERNEL = replace(ATB, results=("query", "kv_cache", "query_rope", "kr_cache"))
_BLOCK = 128  # rows of a block of the buffers that new rows are staged in


def inputs(plan: PreprocessPlan) -> list[Node]:
    """Nodes of the graph that the call reads."""
    biases = [part.product.bias for part in plan.candidate.projections]
    scales = [
        one.node
        for how in (plan.down, plan.up)
        for one in (how.scale, how.offset)
        if one is not None
    ]
    of_whole = [node for node in whole.inputs(plan) if node is not None]
    more = [node for node in (plan.gamma, *biases, *scales) if isinstance(node, Node)]
    return list(dict.fromkeys([*of_whole, *more]))


def attributes(plan: PreprocessPlan) -> dict[str, Any]:
    return {"cache_mode": "krope_ctkv", "quant_mode": STATIC}


def call_kernel(b: Builder, plan: PreprocessPlan) -> dict[str, Any]:
    """Emit the call; its results by name."""
    q, k = plan.candidate.query, plan.candidate.key
    assert q.norm.gamma is not None and k.gamma is not None and isinstance(q.absorb, AbsorbFact)
    tokens, latent, rope = prod(plan.lead), len(k.columns), k.rope_dim
    x = b.reshape(b.value(plan.token_x), (tokens, shape_of(plan.token_x)[-1]))
    if isinstance(plan.caches, InPlace):
        held = {name: b.target(b.cache(cache, shape)) for name, cache, shape in plan.caches.held}
        slots = rows.checked_slots(b, plan, (tokens,))
    else:
        pool = (-(-tokens // _BLOCK), _BLOCK, 1)
        held = {
            name: _new(b, x, (*pool, width))
            for name, width in (("kv_cache", latent), ("kr_cache", rope))
        }
        slots = b.call(aten.arange.default, tokens, dtype=torch.int32, device=plan.device)
    outs = {
        "query": _new(b, x, (tokens, plan.heads, latent)),
        "query_rope": _new(b, x, (tokens, plan.heads, rope)),
    }
    called = b.call(
        torch.ops.atb.npu_mla_preprocess.out,
        x,
        pack.vector(b, "gamma0", plan.gamma),
        _zeros(b, x, "beta0", b.shape(x)[1]),
        _weight(b, plan, "wdqkv", _of_down),
        _vector(b, plan, "descale0", _of_down, pack.scale_matrix, torch.float32),
        pack.vector(b, "gamma1", q.norm.gamma),
        _zeros(b, x, "beta1", len(q.norm.columns)),
        _weight(b, plan, "wuq", _of_up),
        _vector(b, plan, "descale1", _of_up, pack.scale_matrix, torch.float32),
        pack.vector(b, "gamma2", k.gamma),
        *(
            _table(b, plan, table, without, x)
            for table, without in ((plan.cos, 1.0), (plan.sin, 0.0))
        ),
        pack.weight_uk(b, plan),
        held["kv_cache"],
        held["kr_cache"],
        b.cast(slots, torch.int32),
        **_static(b, x, plan.down, "0"),
        bias0=_vector(b, plan, "bias0", _of_down, _bias_matrix, torch.int32),
        **_static(b, x, plan.up, "1"),
        bias1=_vector(b, plan, "bias1", _of_up, _bias_matrix, torch.int32),
        **attributes(plan),
        q_out0=outs["query"],
        kv_cache_out0=held["kv_cache"],
        q_out1=outs["query_rope"],
        kv_cache_out1=held["kr_cache"],
    )
    made = {name: result_of(b, called, place) for place, name in enumerate(KERNEL.results)}
    results = {name: b.reshape(made[name], (*plan.lead, *b.shape(made[name])[1:])) for name in outs}
    if isinstance(plan.caches, InPlace):
        results |= {name: made[name] for name in ("kv_cache", "kr_cache")}
    asked = {item.output for item in plan.replacements}
    for name, cache, width in (("c_kv", "kv_cache", latent), ("k_pe", "kr_cache", rope)):
        if name in asked and isinstance(plan.caches, InPlace):
            results[name] = rows.written(
                b, made[cache], slots, (*plan.lead, width), plan.caches.mode
            )
        elif name in asked:
            flat = b.reshape(made[cache], (-(-tokens // _BLOCK) * _BLOCK, width))
            results[name] = b.reshape(b.sliced(flat, 0, 0, tokens), (*plan.lead, width))
    for name in sorted(plan.interleave & results.keys()):
        results[name] = rows.interleave(b, results[name])
    return results


def _new(b: Builder, x: Any, shape: tuple[Any, ...]) -> Any:
    return b.call(aten.new_empty.default, x, b.sizes(shape))


def _zeros(b: Builder, x: Any, name: str, width: int) -> Any:
    return b.once((name, width), lambda b: b.call(aten.new_zeros.default, x, [width]))


def _table(b: Builder, plan: PreprocessPlan, table: Any, without: float, x: Any) -> Any:
    width = plan.candidate.key.rope_dim
    return b.reshape(
        rows.table(b, table, (*plan.lead, width), without, x), (prod(plan.lead), width)
    )


def _static(b: Builder, x: Any, how: StaticQuant, stage: str) -> dict[str, Any]:
    """Scale and offset, [1] each."""
    if how.offset is None:
        offset = b.call(aten.new_zeros.default, x, [1], dtype=torch.int8)
    else:
        offset = _one(b, f"quant_offset{stage}", how.offset)
    return {
        f"quant_scale{stage}": _one(b, f"quant_scale{stage}", how.scale),
        f"quant_offset{stage}": offset,
    }


def _one(b: Builder, name: str, one: One) -> Any:
    if not one.repeated:
        return b.reshape(b.value(one.node), (1,))

    def recipe(b: Builder) -> Any:
        first = b.sliced(b.value(one.node), 0, 0, 1)
        if one.inverse:
            first = b.call(aten.reciprocal.default, b.cast(first, torch.float32))
        # memory of its own, whatever the dtypes: a change of any number of the vector is then seen
        return b.contiguous(b.cast(first, one.dtype))

    return b.packed(name, recipe, [one.node], exact=one.exact)


# -- weights, scales and biases: columns of the projections, [C | R | Q], and head by head [D | R],
# halves of RoPE apart


def _of_down(b: Builder, plan: PreprocessPlan, of: pack.Matrix) -> Any:
    q, k = plan.candidate.query, plan.candidate.key
    parts = (k.down, k.columns), (k.down_rope, (*k.first, *k.second)), (q.down, q.norm.columns)
    return b.joined([pack.take(b, of(b, item), columns) for item, columns in parts], 1)


def _of_up(b: Builder, plan: PreprocessPlan, of: pack.Matrix) -> Any:
    q = plan.candidate.query
    nope = tuple(column for head in q.absorb.columns for column in head)
    sides = zip(q.rope.first, q.rope.second, strict=True)
    rope = tuple(column for first, second in sides for column in (*first, *second))
    return pack.by_head(b, plan, of, nope, rope)


def _leaves(plan: PreprocessPlan, arrange: Any) -> list[Projection]:
    q, k = plan.candidate.query, plan.candidate.key
    sides = (k.down, k.down_rope, q.down) if arrange is _of_down else (q.up_nope, q.up_rope)
    return [part for item in sides for part in item.by_weight]


def _weight(b: Builder, plan: PreprocessPlan, name: str, arrange: Any) -> Any:
    """[columns, in]; on a device in blocks of 32, [1, in / 32, columns, 32], cast to FRACTAL_NZ."""

    def recipe(b: Builder) -> Any:
        matrix = b.permuted(arrange(b, plan, pack.matrix), [1, 0])
        if b.device_type(matrix) == "cpu":
            return matrix
        columns, width = b.shape(matrix)
        blocks = b.permuted(b.reshape(matrix, (columns, width // 32, 32)), [1, 0, 2])
        return pack.dense(b, b.reshape(blocks, (1, width // 32, columns, 32)), nz=True)

    return b.packed(name, recipe, [part.weight for part in _leaves(plan, arrange)])


def _vector(
    b: Builder, plan: PreprocessPlan, name: str, arrange: Any, of: pack.Matrix, dtype: torch.dtype
) -> Any:
    """A number for each column."""

    def recipe(b: Builder) -> Any:
        row = arrange(b, plan, of)
        return pack.dense(b, b.cast(b.reshape(row, (b.shape(row)[1],)), dtype), nz=False)

    parts = _leaves(plan, arrange)
    held = [part.product.bias for part in parts]
    if of is pack.scale_matrix:
        held = [
            part.quantised.weight_scale if part.quantised is not None else None for part in parts
        ]
    leaves = [part.weight if node is None else node for part, node in zip(parts, held, strict=True)]
    return b.packed(name, recipe, leaves)


def _bias_matrix(b: Builder, projection: Projection) -> Any:
    """The int32 biases of a projection's columns as [1, out]; zeros where it has none."""
    if projection.pieces:
        return b.joined([_bias_matrix(b, piece) for piece in projection.pieces], 1)
    columns = projection.width
    if projection.product.bias is not None:
        return b.reshape(b.value(projection.product.bias), (1, columns))
    return b.call(
        aten.new_zeros.default, b.value(projection.weight), [1, columns], dtype=torch.int32
    )


TARGET: Target[Any] = Target(
    operator=KERNEL,
    planner=PreprocessPlanner,
    inputs=inputs,
    call=call_kernel,
    attributes=attributes,
)
