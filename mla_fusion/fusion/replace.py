"""The replacement itself: one call of the kernel, what goes in and what is made of what comes out.

Written against :class:`~mla_fusion.fusion.build.Builder`, so the same lines rewrite the graph and run on tensors
when the fusion is verified.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.cache_write import Slots
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.rope import Table, TableRun
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.fusion.build import Builder
from mla_fusion.fusion.outputs import Replacement
from mla_fusion.fusion.plan import InPlace, Plan
from mla_fusion.graph.kinds import argument, op_name
from mla_fusion.weights.columns import describe

aten = torch.ops.aten
Matrix = Callable[[Builder, Projection], Any]  # a weight as [in, out], or its scales as [1, out]
Arrange = Callable[[Builder, Plan, Matrix], Any]  # their columns as the kernel wants them
FRACTAL_NZ = 29
RESULTS = (
    "query",
    "query_rope",
    "dequant_scale_q_nope",
    "query_norm",
    "dequant_scale_q_norm",
    "kv_cache",
    "kr_cache",
)


def inputs(plan: Plan) -> list[Node]:
    """Nodes of the graph that the replacement reads."""
    q, k = plan.candidate.query, plan.candidate.key
    every = (q.down, q.up_nope, q.up_rope, k.down, k.down_rope)
    weights = [part.weight for item in every for part in item.parts]
    if isinstance(q.absorb, AbsorbFact):
        weights.append(q.absorb.weight)
    weights += scales(plan)
    tables = [run.base for run in (*plan.cos, *plan.sin)]
    gammas = [node for node in (q.norm.gamma, k.gamma) if node is not None]
    caches = (
        [plan.caches.kv_cache, plan.caches.kr_cache, *plan.caches.slots.nodes]
        if isinstance(plan.caches, InPlace)
        else []
    )
    return list(dict.fromkeys([plan.token_x, *weights, *gammas, *tables, *caches]))


def scales(plan: Plan) -> list[Node]:
    """Scales of the int8 products and caches, and what smooths c_q; empty where nothing is quantised."""
    q, k = plan.candidate.query, plan.candidate.key
    found: list[Node | None] = []
    for item in (q.up_nope, q.up_rope, q.down, k.down, k.down_rope):
        found += [part.quantised.weight_scale for part in item.parts if part.quantised is not None]
    if q.up_nope.quantised is not None and q.up_nope.quantised.dynamic is not None:
        found.append(q.up_nope.quantised.dynamic.smooth)
    if q.down.quantised is not None:
        found.append(q.down.quantised.token_scale)
    if isinstance(plan.caches, InPlace):
        found += [scale.node for scale in (plan.caches.kv_scale, plan.caches.kr_scale) if scale is not None]
    return list(dict.fromkeys(node for node in found if node is not None))


def call_kernel(b: Builder, plan: Plan) -> dict[str, Any]:
    """Emit the call; its results by name (with ``c_kv`` and ``k_pe`` where they are staged)."""
    q, k = plan.candidate.query, plan.candidate.key
    assert q.norm.gamma is not None and k.gamma is not None
    x = b.value(plan.token_x)
    lead = plan.token_x.meta["val"].shape[:-1]
    if isinstance(plan.caches, InPlace):
        kv_cache = b.cache(plan.caches.kv_cache, plan.caches.kv_shape)
        kr_cache = b.cache(plan.caches.kr_cache, plan.caches.kr_shape)
        index = {"cache_index": _slots(b, plan, lead)}
    else:
        kv_cache, kr_cache = (_buffer(b, x, lead, width) for width in (len(k.columns), k.rope_dim))
        index = {}
    fused = b.call(
        torch.ops.npu.npu_mla_prolog_v3_functional.default,
        x,
        _weight(b, plan, "weight_dq", _dq, q.down),
        _weight(b, plan, "weight_uq_qr", _uq_qr, q.up_nope, q.up_rope),
        _weight_uk(b, plan),
        _weight(b, plan, "weight_dkv_kr", _dkv_kr, k.down, k.down_rope),
        _vector(b, q.norm.gamma),
        _vector(b, k.gamma),
        _table(b, plan.sin, lead),
        _table(b, plan.cos, lead),
        kv_cache,
        kr_cache,
        **index,
        **_quantisation(b, plan),
        **attributes(plan),
    )
    results = {name: _item(b, fused, place) for place, name in enumerate(RESULTS) if name in _used(plan)}
    if not isinstance(plan.caches, InPlace):
        for name, made, width in (("c_kv", "kv_cache", len(k.columns)), ("k_pe", "kr_cache", k.rope_dim)):
            if made in results:  # rows that nobody reads are not asked for
                results[name] = b.reshape(results.pop(made), (*lead, width))
    if not isinstance(q.absorb, AbsorbFact):
        results["q_nope"] = b.call(aten.slice.Tensor, results.pop("query"), -1, 0, q.absorb.nope_dim)
    for name in plan.interleave & results.keys():
        results[name] = _interleave(b, results[name])
    return results


def attributes(plan: Plan) -> dict[str, Any]:
    """Keyword attributes of the call. Both epsilons are always given: the operator's default is not the models'."""
    given: dict[str, Any] = {
        "rmsnorm_epsilon_cq": plan.eps_cq,
        "rmsnorm_epsilon_ckv": plan.eps_ckv,
        "cache_mode": plan.cache_mode,
    }
    if plan.query_norm:
        given["query_norm_flag"] = True
    if plan.candidate.weight_quant_mode:
        given["weight_quant_mode"] = plan.candidate.weight_quant_mode
    if plan.kv_cache_quant_mode:
        given["kv_cache_quant_mode"] = plan.kv_cache_quant_mode
    if plan.qc_qr_scale != 1.0:
        given["qc_qr_scale"] = plan.qc_qr_scale
    if plan.kc_scale != 1.0:
        given["kc_scale"] = plan.kc_scale
    return given


def _used(plan: Plan) -> set[str]:
    names = {replacement.output for replacement in plan.replacements} | {"query", "query_rope"}
    names |= {"kv_cache"} if "c_kv" in names else set()
    names |= {"kr_cache"} if "k_pe" in names else set()
    return names | ({"kv_cache", "kr_cache"} if isinstance(plan.caches, InPlace) else set())


def _item(b: Builder, results: Any, place: int) -> Any:
    return b.call(operator.getitem, results, place)


def fit(b: Builder, replacement: Replacement, result: Any) -> Any:
    """The kernel's result in the shape, order and dtype of the node that it replaces."""
    wanted = replacement.node.meta["val"]
    order = replacement.order
    if order is not None and order != tuple(range(len(order))):
        moved = [axis for axis, source in enumerate(order) if axis != source]
        if len(moved) == 2:
            result = b.call(aten.transpose.int, result, *moved)
        else:
            result = b.call(aten.permute.default, result, list(order))
    if order is not None:
        result = b.reshape(result, wanted.shape)
    return b.cast(result, wanted.dtype)


_MADE_FROM = {  # of what a borrower is called with, the sizes and the number are given anew
    "aten::new_zeros": aten.new_zeros,
    "aten::zeros_like": aten.new_zeros,
    "aten::new_ones": aten.new_ones,
    "aten::ones_like": aten.new_ones,
    "aten::new_full": aten.new_full,
    "aten::full_like": aten.new_full,
}


def lend(b: Builder, plan: Plan, borrower: Node) -> Any:
    """What the borrower makes, with the device taken from x instead of a value that goes away."""
    value = borrower.meta["val"]
    new = _MADE_FROM.get(op_name(borrower), aten.new_empty)
    number = [argument(borrower, "fill_value")] if new is aten.new_full else []
    x = b.value(plan.candidate.query.down.origin)
    return b.call(new.default, x, b.sizes(value.shape), *number, dtype=value.dtype)



# -- weights and their scales


def _weight(b: Builder, plan: Plan, name: str, arrange: Arrange, *projections: Projection) -> Any:
    def recipe(b: Builder) -> Any:
        return _dense(b, arrange(b, plan, _matrix), nz=True)

    return b.packed(name, recipe, [part.weight for item in projections for part in item.parts])


def _scale(b: Builder, plan: Plan, name: str, arrange: Arrange, *projections: Projection) -> Any:
    def recipe(b: Builder) -> Any:
        return _dense(b, b.cast(arrange(b, plan, _scale_matrix), torch.float32), nz=False)

    parts = [part for item in projections for part in item.parts]
    return b.packed(name, recipe, [part.quantised.weight_scale for part in parts if part.quantised is not None])


def _quantisation(b: Builder, plan: Plan) -> dict[str, Any]:
    """The scales of weight_quant_mode 1 and 2, [1, columns] and [T, 1] in float32."""
    q, k = plan.candidate.query, plan.candidate.key
    if q.up_nope.quantised is None:
        return {}
    given = {"dequant_scale_w_uq_qr": _scale(b, plan, "dequant_scale_w_uq_qr", _uq_qr, q.up_nope, q.up_rope)}
    smooth = q.up_nope.quantised.dynamic.smooth if q.up_nope.quantised.dynamic is not None else None
    if smooth is not None:
        given["smooth_scales_cq"] = b.cast(_row(b, b.value(smooth)), torch.float32)
    if q.down.quantised is not None and q.down.quantised.token_scale is not None:
        given["dequant_scale_x"] = _token_scale(b, b.value(q.down.quantised.token_scale))
        given["dequant_scale_w_dq"] = _scale(b, plan, "dequant_scale_w_dq", _dq, q.down)
        given["dequant_scale_w_dkv_kr"] = _scale(b, plan, "dequant_scale_w_dkv_kr", _dkv_kr, k.down, k.down_rope)
    if plan.kv_cache_quant_mode:
        assert isinstance(plan.caches, InPlace)
        for name, scale, width in (
            ("quant_scale_ckv", plan.caches.kv_scale, len(k.columns)),
            ("quant_scale_ckr", plan.caches.kr_scale, k.rope_dim),
        ):
            given[name] = _channels(b, scale, width, plan.token_x.meta["val"].device)
    return given


def _channels(b: Builder, scale: CacheScale | None, width: int, device: torch.device) -> Any:
    """What a cache's rows are multiplied by, as one row of channels, [1, width]."""
    assert scale is not None
    if scale.node is None:
        return b.call(aten.full.default, [1, width], scale.factor, dtype=torch.float32, device=device)
    row = b.cast(b.reshape(b.value(scale.node), (1, scale.node.meta["val"].numel())), torch.float32)
    if scale.inverse:
        row = b.call(aten.reciprocal.default, row)
    if scale.factor != 1.0:
        row = b.call(aten.mul.Tensor, row, scale.factor)
    if b.shape(row)[1] == width:
        return row
    row = b.call(aten.expand.default, row, [1, width])
    return b.call(aten.clone.default, row, memory_format=torch.contiguous_format)


def _row(b: Builder, value: Any) -> Any:
    shape = b.shape(value)
    return value if len(shape) == 2 else b.reshape(value, (1, shape[-1]))


def _token_scale(b: Builder, value: Any) -> Any:
    """One scale a token, [T, 1] whatever the number of token axes."""
    shape = b.shape(value)
    column = value if len(shape) == 2 and shape[1] == 1 else b.call(aten.reshape.default, value, [-1, 1])
    return b.cast(column, torch.float32)


def _matrix(b: Builder, projection: Projection) -> Any:
    """The weight as [in, out]; of several pieces, side by side."""
    if projection.pieces:
        return b.call(aten.cat.default, [_matrix(b, piece) for piece in projection.pieces], 1)
    weight, labels = b.value(projection.weight), projection.weight_labels
    order = [labels.index(label) for label in (*projection.batch, *projection.summed, *projection.column_labels)]
    order = [axis for axis in range(len(labels)) if axis not in order] + order
    if len(order) == 2:
        return weight if order == [0, 1] else b.call(aten.t.default, weight)
    if order != list(range(len(order))):
        weight = b.call(aten.permute.default, weight, order)
    shape = projection.weight.meta["val"].shape
    return b.reshape(weight, [shape[axis] for axis in order[-2:]])


def _scale_matrix(b: Builder, projection: Projection) -> Any:
    """The scales of an int8 weight's columns as [1, out], so that they are arranged as the weight is."""
    if projection.pieces:
        return b.call(aten.cat.default, [_scale_matrix(b, piece) for piece in projection.pieces], 1)
    assert projection.quantised is not None
    scale = projection.quantised.weight_scale
    columns = projection.weight.meta["val"].shape[projection.weight_labels.index(projection.column_labels[0])]
    return b.reshape(b.value(scale), (1, columns))


def _take(b: Builder, matrix: Any, columns: tuple[int, ...], groups: int = 1) -> Any:
    """``matrix[:, columns]`` by views where the columns are regular groups, else by index."""
    rows, width = b.shape(matrix)
    if columns == tuple(range(width)):
        return matrix
    block = describe(columns, 1) or describe(columns, groups)
    if block is None or block.groups * block.stride > width:
        return b.call(aten.index_select.default, matrix, 1, b.constant(columns, matrix))
    span = block.groups * block.stride if block.groups > 1 else block.width
    start = min(block.offset, width - span)
    if span != width:
        matrix = b.call(aten.slice.Tensor, matrix, 1, start, start + span)
    if block.groups > 1:
        matrix = b.reshape(matrix, (rows, block.groups, block.stride))
        inner = block.offset - start
        if block.width != block.stride:
            matrix = b.call(aten.slice.Tensor, matrix, 2, inner, inner + block.width)
    if block.paired:
        lead = list(b.shape(matrix))[:-1]
        matrix = b.reshape(matrix, (*lead, 2, block.width // 2))
        matrix = b.call(aten.transpose.int, matrix, -1, -2)
    return b.reshape(matrix, (rows, len(columns)))


def _pairs(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(column for pair in zip(first, second, strict=True) for column in pair)


def _dq(b: Builder, plan: Plan, of: Matrix) -> Any:
    q = plan.candidate.query
    return _take(b, of(b, q.down), q.norm.columns)


class _HeadColumns(NamedTuple):
    """Columns of W_uq_qr: nope and rope parts, all heads one after the other.

    ``ordered``: head by head, [D | Dr], they are columns 0, 1, 2, ..; ``width`` is D + Dr.
    """

    nope: tuple[int, ...]
    rope: tuple[int, ...]
    ordered: bool
    width: int


@lru_cache(maxsize=64)  # equal layers ask the same
def _head_columns(
    nope: tuple[tuple[int, ...], ...], first: tuple[tuple[int, ...], ...], second: tuple[tuple[int, ...], ...]
) -> _HeadColumns:
    rope = tuple(_pairs(f, s) for f, s in zip(first, second, strict=True))
    merged = [column for n, r in zip(nope, rope, strict=True) for column in (*n, *r)]
    all_nope, all_rope = (tuple(column for head in part for column in head) for part in (nope, rope))
    return _HeadColumns(all_nope, all_rope, merged == list(range(len(merged))), len(nope[0]) + len(rope[0]))


def _uq_qr(b: Builder, plan: Plan, of: Matrix) -> Any:
    """Per head [D nope | Dr rope], the rope columns as interleaved pairs."""
    q = plan.candidate.query
    heads = len(q.absorb.columns)
    columns = _head_columns(q.absorb.columns, q.rope.first, q.rope.second)
    if q.up_nope.node is q.up_rope.node:
        matrix = of(b, q.up_nope)
        if columns.ordered and heads * columns.width == b.shape(matrix)[1]:
            return matrix
    parts = []
    for projection, flat in ((q.up_nope, columns.nope), (q.up_rope, columns.rope)):
        taken = _take(b, of(b, projection), flat, heads)
        parts.append(b.reshape(taken, (b.shape(taken)[0], heads, len(flat) // heads)))
    joined = b.call(aten.cat.default, parts, -1)
    rows, _, width = b.shape(joined)
    return b.reshape(joined, (rows, heads * width))


def _dkv_kr(b: Builder, plan: Plan, of: Matrix) -> Any:
    k = plan.candidate.key
    rope = _pairs(k.first, k.second)
    if k.down.node is k.down_rope.node:
        matrix = of(b, k.down)
        merged = (*k.columns, *rope)
        if describe(merged, 1) is not None:
            return _take(b, matrix, merged)
        parts = [_take(b, matrix, k.columns), _take(b, matrix, rope)]
    else:
        parts = [_take(b, of(b, k.down), k.columns), _take(b, of(b, k.down_rope), rope)]
    return b.call(aten.cat.default, parts, -1)


def _weight_uk(b: Builder, plan: Plan) -> Any:
    absorb = plan.candidate.query.absorb
    if isinstance(absorb, AbsorbFact):
        return b.packed("weight_uk", lambda b: _absorbed(b, absorb), [absorb.weight])
    shape = (absorb.heads, absorb.nope_dim, absorb.latent_dim)
    device = plan.token_x.meta["val"].device
    return b.once(("identity", shape), lambda b: b.packed("weight_uk", lambda b: _identity(b, shape, device), []))


def _absorbed(b: Builder, absorb: AbsorbFact) -> Any:
    weight = b.value(absorb.weight)
    if absorb.to_ndc != tuple(range(len(absorb.to_ndc))):
        weight = b.call(aten.permute.default, weight, list(absorb.to_ndc))
    weight = b.reshape(weight, (absorb.heads, absorb.nope_dim, absorb.latent_dim))
    return _dense(b, weight, nz=False)


def _identity(b: Builder, shape: tuple[int, int, int], device: torch.device) -> Any:
    """[I | 0] for every head: the product with it is q_nope itself, then zeros."""
    rows, columns = (b.call(aten.arange.default, size, device=device) for size in shape[1:])
    eye = b.call(aten.eq.Tensor, b.reshape(rows, (shape[1], 1)), columns)  # torchair has no converter for eye
    heads = b.call(aten.expand.default, b.cast(eye, torch.bfloat16), list(shape))
    return b.call(aten.clone.default, heads, memory_format=torch.contiguous_format)


def _dense(b: Builder, weight: Any, nz: bool) -> Any:
    """Contiguous, and on a device in the format that the kernel reads (weight_uk stays ND)."""
    if b.device_type(weight) == "cpu":
        return weight  # the reference kernel reads any strides; copying weights at every call would be waste
    if not _is_input(weight):
        weight = b.call(aten.clone.default, weight, memory_format=torch.contiguous_format)
    if nz and b.device_type(weight) == "npu":
        weight = b.call(torch.ops.npu.npu_format_cast.default, weight, FRACTAL_NZ)
    return weight


def _is_input(weight: Any) -> bool:
    return isinstance(weight, Node) and weight.op in ("placeholder", "get_attr")


def _vector(b: Builder, gamma: Node) -> Any:
    value = b.value(gamma)
    shape = gamma.meta["val"].shape
    return value if len(shape) == 1 else b.reshape(value, (shape[-1],))


# -- tables, slots, buffers


def _table(b: Builder, table: Table, lead: Sequence[Any]) -> Any:
    """The full-width table, lead + [Dr], in bfloat16."""
    return b.once(("table", table, tuple(map(str, lead))), lambda b: _build_table(b, table, lead))


def _build_table(b: Builder, table: Table, lead: Sequence[Any]) -> Any:
    parts = {run: _run(b, run) for run in dict.fromkeys(table)}
    value = (
        next(iter(parts.values())) if len(table) == 1 else b.call(aten.cat.default, [parts[run] for run in table], -1)
    )
    width = sum(run.count for run in table)
    rows = table[0].rows
    if rows == "token":
        value = b.reshape(value, (*lead, width))
    else:
        first, last = lead[0], lead[-1]  # [B, S]: the planner lets no other tokens share rows
        shared = {"position": (1, last), "sequence": (first, 1), "one": (1,) * len(lead)}[rows]
        value = b.reshape(value, (*shared, width))
        value = b.call(aten.expand.default, value, b.sizes((*lead, width)))
        value = b.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    return b.cast(value, torch.bfloat16)


def _run(b: Builder, run: TableRun) -> Any:
    value = b.value(run.base)
    if run.field:
        value = b.call(aten.select.int, b.call(aten.view_as_real.default, value), -1, int(run.field == "imag"))
    width = run.base.meta["val"].shape[-1]
    if (run.start, run.step, run.count) != (0, 1, width):
        stop = run.start + run.step * (run.count - 1) + 1
        value = b.call(aten.slice.Tensor, value, -1, run.start, stop, run.step)
    if run.factor == -1.0:
        return b.call(aten.neg.default, value)
    return value if run.factor == 1.0 else b.call(aten.mul.Tensor, value, run.factor)


def _slots(b: Builder, plan: Plan, lead: Sequence[Any]) -> Any:
    assert isinstance(plan.caches, InPlace)
    slots: Slots = plan.caches.slots
    block_size = plan.caches.kv_shape[1]

    def build(b: Builder) -> Any:
        if slots.index is not None:
            value = b.value(slots.index)
        else:
            assert slots.block is not None and slots.offset is not None
            value = b.call(aten.mul.Tensor, b.value(slots.block), b.sizes([block_size])[0])
            value = b.call(aten.add.Tensor, value, b.value(slots.offset))
        return b.cast(b.reshape(value, lead), torch.int64)

    return b.once(("slots", slots, tuple(map(str, lead))), build)


def _buffer(b: Builder, x: Any, lead: Sequence[Any], width: int) -> Any:
    """Room for the new rows, [B, S, 1, width] or [T, 1, width] in bfloat16; every row is written."""
    dtype = {} if b.dtype(x) == torch.bfloat16 else {"dtype": torch.bfloat16}
    return b.call(aten.new_empty.default, x, b.sizes((*lead, 1, width)), **dtype)


def _interleave(b: Builder, value: Any) -> Any:
    """Half layout to interleaved pairs: [a0..a31 | b0..b31] -> [a0, b0, a1, b1, ..]. Exact."""
    shape = list(b.shape(value))
    halves = b.reshape(value, (*shape[:-1], 2, shape[-1] // 2))
    return b.reshape(b.call(aten.transpose.int, halves, -1, -2), shape)
