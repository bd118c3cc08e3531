"""Weights and their scales as the kernel wants them, made of whatever the model holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.quant import Quantised
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.fx.build import Builder
from mla_fusion.fx.held import Exact
from mla_fusion.fx.module_path import label
from mla_fusion.fx.sizes import has_symbols
from mla_fusion.meta.number_formats import BLOCK, ELEMENTS
from mla_fusion.operators.forms import order_of
from mla_fusion.operators.known import shape_of
from mla_fusion.plan.cache_modes import scale_shapes
from mla_fusion.plan.plan import InPlace, Plan, QueryPlan
from mla_fusion.weights.columns import describe

aten = torch.ops.aten
# a weight as [in, out], or its scales with as many columns
Matrix = Callable[[Builder, Projection], Any]
Arrange = Callable[[Builder, QueryPlan, Matrix], Any]  # their columns as the kernel wants them
FRACTAL_NZ = 29


def weight(
    b: Builder, plan: QueryPlan, name: str, arrange: Arrange, *projections: Projection
) -> Any:
    def recipe(b: Builder) -> Any:
        return dense(b, arrange(b, plan, matrix), nz=True)

    return b.packed(name, recipe, [part.weight for item in projections for part in item.by_weight])


def _scale(
    b: Builder, plan: QueryPlan, name: str, arrange: Arrange, *projections: Projection
) -> Any:
    def recipe(b: Builder) -> Any:
        arranged = arrange(b, plan, scale_matrix)
        if not _in_blocks(plan):
            return dense(b, b.cast(arranged, torch.float32), nz=False)
        return _as_e8m0(b, dense(b, b.permuted(arranged, [1, 0]), nz=False))

    parts = [part for item in projections for part in item.by_weight]
    return b.packed(
        name, recipe, [part.quantised.weight_scale for part in parts if part.quantised is not None]
    )


def _in_blocks(plan: QueryPlan) -> bool:
    form = plan.candidate.format
    return form is not None and form.in_blocks


def _as_e8m0(b: Builder, codes: Any) -> Any:
    dtype = torch.float8_e8m0fnu
    return codes if b.dtype(codes) == dtype else b.call(aten.view.dtype, codes, dtype)


def quantisation(b: Builder, plan: QueryPlan) -> dict[str, Any]:
    """The scales of a quantised call: [1, columns] and [T, 1] in float32, or [columns, k/32] and
    [T, k/32] in e8m0.
    """
    q, k = plan.candidate.query, plan.candidate.key
    if q.up_nope.quantised is None:
        return {}
    given = {
        "dequant_scale_w_uq_qr": _scale(
            b, plan, "dequant_scale_w_uq_qr", uq_qr, q.up_nope, q.up_rope
        )
    }
    smooth = q.up_nope.quantised.dynamic.smooth if q.up_nope.quantised.dynamic is not None else None
    if smooth is not None:
        given["smooth_scales_cq"] = b.cast(_row(b, b.value(smooth)), torch.float32)
    if q.down.quantised is not None and q.down.quantised.token_scale is not None:
        given["dequant_scale_x"] = _token_scale(b, plan, q.down.quantised)
        given["dequant_scale_w_dq"] = _scale(b, plan, "dequant_scale_w_dq", dq, q.down)
        given["dequant_scale_w_dkv_kr"] = _scale(
            b, plan, "dequant_scale_w_dkv_kr", dkv_kr, k.down, k.down_rope
        )
    if isinstance(plan.caches, InPlace):
        scales = {
            "quant_scale_ckv": plan.caches.kv_scale,
            "quant_scale_ckr": plan.caches.kr_scale,
            "k_nope_clip_alpha": CacheScale(None, factor=plan.caches.clip_alpha or 1.0),
        }
        modes = plan.kv_cache_quant_mode, plan.candidate.weight_quant_mode
        for name, shape in scale_shapes(modes[0], len(k.columns), k.rope_dim, modes[1]).items():
            given[name] = cache_scale(b, scales[name], shape, plan.device)
    return given


def cache_scale(
    b: Builder, scale: CacheScale | None, shape: tuple[int, ...], device: torch.device
) -> Any:
    """What a cache's rows are multiplied by (or clipped at), [1] or one row of channels, [1,
    width].
    """
    assert scale is not None
    if scale.node is None:
        fill = partial(_full, shape=shape, number=scale.factor, device=device)
        return b.once((shape, scale.factor), fill)
    count = scale.node.meta["val"].numel()
    row = b.cast(b.reshape(b.value(scale.node), (*shape[:-1], count)), torch.float32)
    if scale.inverse:
        row = b.call(aten.reciprocal.default, row)
    if scale.factor != 1.0:
        row = b.call(aten.mul.Tensor, row, scale.factor)
    if count == shape[-1]:
        return row
    row = b.call(aten.expand.default, row, list(shape))
    return b.contiguous(row)


def _full(b: Builder, shape: tuple[int, ...], number: float, device: torch.device) -> Any:
    return b.call(aten.full.default, list(shape), number, dtype=torch.float32, device=device)


def _row(b: Builder, value: Any) -> Any:
    shape = b.shape(value)
    return value if len(shape) == 2 else b.reshape(value, (1, shape[-1]))


def _token_scale(b: Builder, plan: QueryPlan, quantised: Quantised) -> Any:
    """One row of scales a token, [T, 1] or [T, He/32], whatever the number of token axes."""
    assert quantised.token_scale is not None
    value = b.value(quantised.token_scale)
    shape = b.shape(value)
    if _in_blocks(plan):
        # the width of x, not that of its scales: a size of an argument may be symbolic
        return _as_e8m0(b, b.reshape(value, (-1, shape_of(plan.token_x)[-1] // BLOCK)))
    column = (
        value if len(shape) == 2 and shape[1] == 1 else b.call(aten.reshape.default, value, [-1, 1])
    )
    column = b.cast(column, torch.float32)
    if quantised.token_inverse:
        column = b.call(aten.reciprocal.default, column)
    return (
        column
        if quantised.token_factor == 1.0
        else b.call(aten.mul.Tensor, column, quantised.token_factor)
    )


def matrix(b: Builder, projection: Projection) -> Any:
    """The weight as [in, out]; of several pieces, side by side."""
    if projection.pieces:
        return b.joined([matrix(b, piece) for piece in projection.pieces], 1)
    weight, labels = _operand(b, projection.weight), projection.weight_labels
    order = [
        labels.index(label)
        for label in (*projection.batch, *projection.summed, *projection.column_labels)
    ]
    order = [axis for axis in range(len(labels)) if axis not in order] + order
    weight = b.permuted(weight, order)
    if len(order) == 2:
        return weight
    shape = shape_of(projection.weight)
    return b.reshape(weight, [shape[axis] for axis in order[-2:]])


def _operand(b: Builder, weight: Node) -> Any:
    """As the kernel multiplies it: a model that adds up in float32 widens its bfloat16 weights."""
    value = b.value(weight)
    return value if b.dtype(value) in ELEMENTS else b.cast(value, torch.bfloat16)


def scale_matrix(b: Builder, projection: Projection) -> Any:
    """The scales of a weight's columns as [1, out], or of its blocks as [in/32, out]: arranged as
    the weight is.
    """
    if projection.pieces:
        return b.joined([scale_matrix(b, piece) for piece in projection.pieces], 1)
    assert projection.quantised is not None
    scale = projection.quantised.weight_scale
    form = projection.quantised.format
    columns = projection.width
    if form is None or not form.in_blocks:
        return b.reshape(b.value(scale), (1, columns))
    pairs = shape_of(scale)[0]
    return b.reshape(b.permuted(b.value(scale), [0, 2, 1]), (2 * pairs, columns))


def take(b: Builder, matrix: Any, columns: tuple[int, ...], groups: int = 1) -> Any:
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
        matrix = b.sliced(matrix, 1, start, start + span)
    if block.groups > 1:
        matrix = b.reshape(matrix, (rows, block.groups, block.stride))
        inner = block.offset - start
        if block.width != block.stride:
            matrix = b.sliced(matrix, 2, inner, inner + block.width)
    if block.paired:
        lead = list(b.shape(matrix))[:-1]
        matrix = b.transposed(b.reshape(matrix, (*lead, 2, block.width // 2)))
    return b.reshape(matrix, (rows, len(columns)))


def pairs(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(column for pair in zip(first, second, strict=True) for column in pair)


def dq(b: Builder, plan: QueryPlan, of: Matrix) -> Any:
    q = plan.candidate.query
    return take(b, of(b, q.down), q.norm.columns)


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
    nope: tuple[tuple[int, ...], ...],
    first: tuple[tuple[int, ...], ...],
    second: tuple[tuple[int, ...], ...],
) -> _HeadColumns:
    rope = tuple(pairs(f, s) for f, s in zip(first, second, strict=True))
    merged = [column for n, r in zip(nope, rope, strict=True) for column in (*n, *r)]
    all_nope, all_rope = (
        tuple(column for head in part for column in head) for part in (nope, rope)
    )
    return _HeadColumns(
        all_nope, all_rope, merged == list(range(len(merged))), len(nope[0]) + len(rope[0])
    )


def uq_qr(b: Builder, plan: QueryPlan, of: Matrix) -> Any:
    """Per head [D nope | Dr rope], the rope columns as interleaved pairs."""
    q = plan.candidate.query
    heads = len(q.absorb.columns)
    columns = _head_columns(q.absorb.columns, q.rope.first, q.rope.second)
    if q.up_nope.node is q.up_rope.node:
        matrix = of(b, q.up_nope)
        if columns.ordered and heads * columns.width == b.shape(matrix)[1]:
            return _more_columns(b, matrix, columns.width * (plan.heads_of_call - heads))
    joined = by_head(b, plan, of, columns.nope, columns.rope)
    return _more_columns(b, joined, columns.width * (plan.heads_of_call - heads))


def by_head(
    b: Builder, plan: QueryPlan, of: Matrix, nope: tuple[int, ...], rope: tuple[int, ...]
) -> Any:
    """Columns of the query's up projections, all heads one after the other, as [nope | rope] of
    each head.
    """
    q = plan.candidate.query
    heads = len(q.absorb.columns)
    parts = []
    for projection, flat in ((q.up_nope, nope), (q.up_rope, rope)):
        taken = take(b, of(b, projection), flat, heads)
        parts.append(b.reshape(taken, (b.shape(taken)[0], heads, len(flat) // heads)))
    joined = b.joined(parts, -1)
    rows, _, width = b.shape(joined)
    return b.reshape(joined, (rows, heads * width))


def _more_columns(b: Builder, matrix: Any, count: int) -> Any:
    """With so many columns of zeros behind its own: heads that the model has not. Before any cast
    to FRACTAL_NZ.
    """
    return b.call(aten.constant_pad_nd.default, matrix, [0, count]) if count else matrix


def dkv_kr(b: Builder, plan: Plan, of: Matrix) -> Any:
    """[latent | key], the key's columns as interleaved pairs."""
    k = plan.candidate.key
    rope = pairs(k.first, k.second)
    if k.down.node is k.down_rope.node:
        matrix = of(b, k.down)
        merged = (*k.columns, *rope)
        if describe(merged, 1) is not None:
            return take(b, matrix, merged)
        parts = [take(b, matrix, k.columns), take(b, matrix, rope)]
    else:
        parts = [take(b, of(b, k.down), k.columns), take(b, of(b, k.down_rope), rope)]
    return b.joined(parts, -1)


def weight_uk(b: Builder, plan: QueryPlan) -> Any:
    absorb = plan.candidate.query.absorb
    if isinstance(absorb, AbsorbFact):
        more = plan.heads_of_call - plan.heads
        return b.packed("weight_uk", lambda b: _absorbed(b, absorb, more), absorb.weights)
    shape = (plan.heads_of_call, absorb.nope_dim, absorb.latent_dim)
    device = plan.device
    return b.once(
        ("identity", shape),
        lambda b: b.packed("weight_uk", lambda b: identity(b, shape, device), []),
    )


def _absorbed(b: Builder, absorb: AbsorbFact, more: int) -> Any:
    """``more``: heads of zeros behind the model's."""
    weight = b.joined([_heads(b, part) for part in absorb.by_weight])
    return dense(
        b,
        b.call(aten.constant_pad_nd.default, weight, [0, 0, 0, 0, 0, more]) if more else weight,
        nz=False,
    )


def _heads(b: Builder, absorb: AbsorbFact) -> Any:
    """[heads, D, Hckv]"""
    weight = b.permuted(_operand(b, absorb.weight), absorb.to_ndc)
    return b.reshape(weight, (absorb.heads, absorb.nope_dim, absorb.latent_dim))


def identity(b: Builder, shape: tuple[int, int, int], device: torch.device) -> Any:
    """[I | 0] for every head: the product with it is q_nope itself, then zeros."""
    rows, columns = (b.call(aten.arange.default, size, device=device) for size in shape[1:])
    # torchair has no converter for eye
    eye = b.call(aten.eq.Tensor, b.reshape(rows, (shape[1], 1)), columns)
    heads = b.call(aten.expand.default, b.cast(eye, torch.bfloat16), list(shape))
    return b.contiguous(heads)


def dense(b: Builder, weight: Any, nz: bool) -> Any:
    """Contiguous, and on a device in the format that the kernel reads (weight_uk stays ND)."""
    if b.device_type(weight) == "cpu":
        # the reference kernel reads any strides; copying weights at every call would be waste
        return weight
    if not _lies_right(weight, nz):
        weight = b.contiguous(weight)
    on_cpu = weight.meta["val"].device.type == "cpu"  # laid out as on an NPU: a CPU has no formats
    if nz and b.device_type(weight) == "npu" and (not on_cpu or _is_input(weight)):
        weight = b.call(torch.ops.npu.npu_format_cast.default, weight, FRACTAL_NZ)
    return weight


def _lies_right(weight: Any, nz: bool) -> bool:
    """Whether a value needs no copy to be contiguous in memory that holds nothing else.

    A format cast works on the whole memory, in the shape in which it was allocated. So a view that
    is to be cast has to be an input transposed, as ``mla_fusion.prepack`` leaves parameters.
    """
    if _is_input(weight):
        return True
    value = weight.meta["val"]
    if has_symbols((*value.shape, *value.stride())) or not value.is_contiguous():
        return False
    turned = order_of(weight) is not None and _is_input(weight.args[0])
    return not nz or (turned and value.untyped_storage().nbytes() == value.nbytes)


def _is_input(weight: Any) -> bool:
    return isinstance(weight, Node) and weight.op in ("placeholder", "get_attr")


def vector(b: Builder, name: str, gamma: Node, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The weight of a norm; one that is wider than ``dtype`` holds its numbers (the verdict has
    seen to that).
    """
    value = gamma.meta["val"]

    def recipe(b: Builder) -> Any:
        return b.cast(b.reshape(b.value(gamma), (value.shape[-1],)), dtype)

    if value.dtype == dtype:
        return recipe(b)
    what = (
        f"the numbers of {label(gamma)}, a norm weight in {value.dtype}, are not all {dtype} "
        "numbers"
    )
    return b.packed(
        name, recipe, [gamma], exact=Exact("norm.gamma_dtype", what.replace("torch.", ""))
    )
