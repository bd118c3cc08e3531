"""What GE operators mean in ATen. Each function is named in the table below it and gets its operator's results.

Arguments stand in the order of GE's own operator definitions, which torchair keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

import mla_fusion.ops  # noqa: F401  # npu:: operators, where torch_npu has not defined them
from mla_fusion.inspect.dumps import Operator, dtypes
from mla_fusion.inspect.ge_values import Constant, Unmapped

if TYPE_CHECKING:
    from mla_fusion.inspect.rebuild_ge import Rebuilder

aten, npu = torch.ops.aten, torch.ops.npu
Convert = Callable[["Rebuilder", Operator], Sequence[Any]]
_END = 2**31 - 1


def convert(r: Rebuilder, operator: Operator) -> Sequence[Any]:
    """The operator's results, None for an unknown one. Raises Unmapped, or LookupError for an unknown argument."""
    converter = _TABLE.get(operator.type)
    return r.opaque(operator) if converter is None else converter(r, operator)


# -- element by element


def _unary(target: Any) -> Convert:
    return lambda r, op: [r.call(target, r.node(op, 0))]


def _binary(target: Any, commutes: bool) -> Convert:
    """A number on the right, or on the left where sides do not matter, stays a number."""

    def converter(r: Rebuilder, op: Operator) -> Sequence[Any]:
        left, right = r.argument(op, 0), r.argument(op, 1)
        if commutes and not isinstance(left, Node) and isinstance(right, Node):
            left, right = right, left
        scalar = None if isinstance(right, Node) else right.scalar
        return [r.call(target, r.as_node(left), r.as_node(right) if scalar is None else scalar)]

    return converter


def _remainder(r: Rebuilder, op: Operator) -> Sequence[Any]:
    return [r.call(aten.remainder.Scalar, r.node(op, 0), r.number(op, 1))]


def _extreme(target: Any) -> Convert:
    return lambda r, op: [r.call(target, r.node(op, 0), r.node(op, 1))]


def _pow(r: Rebuilder, op: Operator) -> Sequence[Any]:
    exponent = r.number(op, 1)
    whole = int(exponent) if float(exponent).is_integer() else exponent
    return [r.call(aten.pow.Tensor_Scalar, r.node(op, 0), whole)]


def _cast(r: Rebuilder, op: Operator) -> Sequence[Any]:
    stated = op.attributes.get("dst_type")
    name = dtypes.from_number(stated) if isinstance(stated, int) else str(stated)
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise Unmapped
    source = r.argument(op, 0)
    if isinstance(source, Constant):
        return [Constant(source.numbers, source.shape, name)]
    if source.meta["val"].dtype == dtype:  # torchair casts after every promotion, needed or not
        return [source]
    return [r.call(aten._to_copy.default, source, dtype=dtype)]


# -- reductions and products


def _reduce(target: Any) -> Convert:
    def converter(r: Rebuilder, op: Operator) -> Sequence[Any]:
        return [r.call(target, r.node(op, 0), r.numbers(op, 1), bool(op.attributes.get("keep_dims", False)))]

    return converter


def _matmul(first: str, second: str) -> Convert:
    def converter(r: Rebuilder, op: Operator) -> Sequence[Any]:
        sides = [r.node(op, 0), r.node(op, 1)]
        for place, name in enumerate((first, second)):
            if op.attributes.get(name):
                sides[place] = r.call(aten.transpose.int, sides[place], -2, -1)
        three = all(side.meta["val"].dim() == 3 for side in sides)
        same = three and sides[0].meta["val"].shape[0] == sides[1].meta["val"].shape[0]
        product = r.call(aten.bmm.default if same else aten.matmul.default, *sides)
        if r.has(op, 2):
            product = r.call(aten.add.Tensor, product, r.node(op, 2))
        return [product]

    return converter


def _transposed_matmul(r: Rebuilder, op: Operator) -> Sequence[Any]:
    if r.has(op, 2) or r.has(op, 3):
        raise Unmapped
    orders = {name: list(op.attributes[name]) for name in ("perm_x1", "perm_x2", "perm_y") if op.attributes.get(name)}
    split = int(op.attributes.get("batch_split_factor", 1))
    call = npu.npu_transpose_batchmatmul.default
    return [r.call(call, r.node(op, 0), r.node(op, 1), **orders, batch_split_factor=split)]


def _softmax(r: Rebuilder, op: Operator) -> Sequence[Any]:
    (axis,) = op.attributes["axes"]
    return [r.call(aten._softmax.default, r.node(op, 0), axis, False)]


# -- views


def _alias(r: Rebuilder, op: Operator) -> Sequence[Any]:
    return [r.argument(op, 0)]


def _move(r: Rebuilder, op: Operator) -> Sequence[Any]:
    """A copy that torchair makes so that a write does not reach the original: FX has no such writes."""
    source = r.node(op, 0)
    if source in r.rows:
        r.copied.add(r.rows[source].placeholder)
    return [source]


def _reshape(r: Rebuilder, op: Operator) -> Sequence[Any]:
    source, sizes = r.argument(op, 0), r.numbers(op, 1)
    if isinstance(source, Constant):
        return [Constant(source.numbers, tuple(sizes), source.dtype)] if all(size >= 0 for size in sizes) else [source]
    symbolic = [place for place, size in enumerate(sizes) if not isinstance(size, int)]
    if len(symbolic) > 1 or (symbolic and -1 in sizes):
        raise Unmapped
    plain = [-1 if place in symbolic else size for place, size in enumerate(sizes)]
    return [r.view(aten.reshape.default, source, plain)]


def _transpose(r: Rebuilder, op: Operator) -> Sequence[Any]:
    order = op.attributes["perm"] if "perm" in op.attributes else r.numbers(op, 1)
    return [r.call(aten.permute.default, r.node(op, 0), list(order))]


def _unsqueeze(r: Rebuilder, op: Operator) -> Sequence[Any]:
    found = r.node(op, 0)
    for axis in op.attributes["axes"]:
        found = r.view(aten.unsqueeze.default, found, axis)
    return [found]


def _expand_dims(r: Rebuilder, op: Operator) -> Sequence[Any]:
    return [r.view(aten.unsqueeze.default, r.node(op, 0), r.number(op, 1))]


def _squeeze(r: Rebuilder, op: Operator) -> Sequence[Any]:
    axes = op.attributes.get("axis") or op.attributes.get("axes") or []
    return [r.view(aten.squeeze.dims, r.node(op, 0), list(axes))]


def _parts(r: Rebuilder, source: Node, sizes: list[Any], axis: int) -> Sequence[Any]:
    if -1 in sizes:
        whole = source.meta["val"].shape[axis]
        sizes = [whole - sum(other for other in sizes if other != -1) if size == -1 else size for size in sizes]
    split = r.call(aten.split_with_sizes.default, source, sizes, axis)
    return [r.call(getitem, split, index) for index in range(len(sizes))]


def _split_v(r: Rebuilder, op: Operator) -> Sequence[Any]:
    return _parts(r, r.node(op, 0), r.numbers(op, 1), r.number(op, 2))


def _split(r: Rebuilder, op: Operator) -> Sequence[Any]:
    axis, source, count = r.number(op, 0), r.node(op, 1), op.attributes["num_split"]
    return _parts(r, source, [source.meta["val"].shape[axis] // count] * count, axis)


def _concat(r: Rebuilder, op: Operator) -> Sequence[Any]:
    axis = op.attributes.get("concat_dim")
    count = len(op.inputs) - (axis is None)
    axis = r.number(op, count) if axis is None else axis
    found = [r.argument(op, place) for place in range(count)]
    if all(isinstance(item, Constant) for item in found):
        numbers = [number for item in found if isinstance(item, Constant) for number in item.numbers]
        return [Constant(tuple(numbers), (len(numbers),), found[0].dtype)]  # type: ignore[union-attr]
    return [r.call(aten.cat.default, [r.as_node(item) for item in found], axis)]


def _pack(r: Rebuilder, op: Operator) -> Sequence[Any]:
    found = [r.argument(op, place) for place in range(len(op.inputs))]
    if all(isinstance(item, Constant) and item.shape == () for item in found):
        numbers = tuple(item.numbers[0] for item in found if isinstance(item, Constant))
        return [Constant(numbers, (len(numbers),), found[0].dtype)]  # type: ignore[union-attr]
    return [r.call(aten.stack.default, [r.as_node(item) for item in found], op.attributes.get("axis", 0))]


def _unpack(r: Rebuilder, op: Operator) -> Sequence[Any]:
    parts = r.call(aten.unbind.int, r.node(op, 0), op.attributes.get("axis", 0))
    return [r.call(getitem, parts, index) for index in range(len(parts.meta["val"]))]


def _strided_slice(r: Rebuilder, op: Operator) -> Sequence[Any]:
    found = r.node(op, 0)
    starts, stops = r.numbers(op, 1), r.numbers(op, 2)
    axes = r.numbers(op, 3) if r.has(op, 3) else list(range(len(starts)))
    steps = r.numbers(op, 4) if r.has(op, 4) else [1] * len(starts)
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        end = stop if not isinstance(stop, int) or stop < _END else 2**63 - 1
        if (start, end, step) != (0, 2**63 - 1, 1):
            found = r.view(aten.slice.Tensor, found, axis, start, end, step)
    return [found]


def _broadcast(r: Rebuilder, op: Operator) -> Sequence[Any]:
    return [r.call(aten.expand.default, r.node(op, 0), r.numbers(op, 1))]


# -- sizes and rows


def _const(r: Rebuilder, op: Operator) -> Sequence[Any]:
    held = op.attributes.get("value")
    if not isinstance(held, dict) or held["numbers"] is None:
        raise Unmapped
    return [Constant(tuple(held["numbers"]), tuple(held["value"].shape or ()), held["value"].dtype)]


def _shape(r: Rebuilder, op: Operator) -> Sequence[Any]:
    sizes = tuple(r.node(op, 0).meta["val"].shape)
    return [Constant(sizes, (len(sizes),), "int64")]


def _gather(r: Rebuilder, op: Operator) -> Sequence[Any]:
    source, index = r.argument(op, 0), r.argument(op, 1)
    axis = r.number(op, 2) if r.has(op, 2) else 0
    if isinstance(source, Constant) and isinstance(index, Constant):
        picked = tuple(source.numbers[place] for place in index.numbers)
        return [Constant(picked, index.shape, source.dtype)]
    rows = r.as_node(index)
    if rows.meta["val"].dim() == 1:
        return [r.call(aten.index_select.default, r.as_node(source), axis, rows)]
    return [r.call(aten.index.Tensor, r.as_node(source), [None] * axis + [rows])]


def _index(r: Rebuilder, op: Operator) -> Sequence[Any]:
    if sum(map(bool, op.attributes["indices_mask"])) != len(op.inputs) - 1:
        raise Unmapped
    used = iter(range(1, len(op.inputs)))
    indices = [r.node(op, next(used)) if mask else None for mask in op.attributes["indices_mask"]]
    return [r.call(aten.index.Tensor, r.node(op, 0), indices)]


def _scatter(r: Rebuilder, op: Operator) -> Sequence[Any]:
    var, updates = r.node(op, 0), r.node(op, 2)
    indices = _row_indices(r, op, var)
    return [r.write(var, r.call(aten.index_put.default, var, indices, updates))]


def _row_indices(r: Rebuilder, op: Operator, var: Node) -> list[Node]:
    """The index tensors whose stack, ``[rows, count]``, the operator takes.

    ``index_put`` counts negative indices from the end and GE does not, so converters bring them into range with
    FloorMod; together that is index_put's own reading of the index below.
    """
    edge = op.inputs[1]
    stacked = r.dump.producer(edge) if edge is not None else op
    if stacked.type in ("Unsqueeze", "Reshape", "ExpandDims") and r.node(op, 1).meta["val"].shape[-1] == 1:
        return [_unwrapped(r, stacked, 0, var.meta["val"].shape[0])]
    if stacked.type == "Pack":
        return [_unwrapped(r, stacked, place, var.meta["val"].shape[place]) for place in range(len(stacked.inputs))]
    found = r.node(op, 1)
    columns = found.meta["val"].shape[-1]
    return [r.call(aten.select.int, found, -1, column) for column in range(int(columns))]


def _unwrapped(r: Rebuilder, reader: Operator, place: int, size: Any) -> Node:
    edge = reader.inputs[place]
    inner = r.dump.producer(edge) if edge is not None else reader
    if inner.type == "FloorMod" and r.has(inner, 1) and _is_number(r, inner, size):
        return r.node(inner, 0)
    return r.node(reader, place)


def _is_number(r: Rebuilder, op: Operator, size: Any) -> bool:
    found = r.argument(op, 1)
    return not isinstance(found, Node) and list(found.numbers) == [size]


def _assign(r: Rebuilder, op: Operator) -> Sequence[Any]:
    target, value = r.node(op, 0), r.node(op, 1)
    r.written[target] = value
    return [value]


# -- fused operators


def _rms_norm(r: Rebuilder, op: Operator) -> Sequence[Any]:
    both = r.call(npu.npu_rms_norm.default, r.node(op, 0), r.node(op, 1), float(op.attributes["epsilon"]))
    return [r.call(getitem, both, index) for index in range(2)]


def _add_rms_norm(r: Rebuilder, op: Operator) -> Sequence[Any]:
    x1, x2, gamma = (r.node(op, place) for place in range(3))
    found = r.call(npu.npu_add_rms_norm.default, x1, x2, gamma, float(op.attributes["epsilon"]))
    return [r.call(getitem, found, index) for index in range(3)]


def _interleave_rope(r: Rebuilder, op: Operator) -> Sequence[Any]:
    return [r.call(npu.npu_interleave_rope.default, r.node(op, 0), r.node(op, 1), r.node(op, 2))]


def _rotary(r: Rebuilder, op: Operator) -> Sequence[Any]:
    mode = op.attributes.get("mode", 0)
    if mode not in (0, 1) or r.has(op, 3):
        raise Unmapped
    name = "half" if mode == 0 else "interleave"
    return [r.call(npu.npu_rotary_mul.default, r.node(op, 0), r.node(op, 1), r.node(op, 2), name)]


_KV_OPTIONS = ("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v")


def _kv_rmsnorm_rope_cache(r: Rebuilder, op: Operator) -> Sequence[Any]:
    """GE returns the caches first, the functional operator of torch_npu last."""
    needed = [r.node(op, place) for place in range(7)]
    options: dict[str, Any] = {
        name: r.node(op, place) for place, name in enumerate(_KV_OPTIONS, 7) if r.has(op, place)
    }
    options |= {name: op.attributes[name] for name in ("cache_mode", "is_output_kv") if name in op.attributes}
    options["epsilon"] = float(op.attributes["epsilon"])
    found = r.call(npu.npu_kv_rmsnorm_rope_cache_v2_functional.default, *needed, **options)
    parts = [r.call(getitem, found, index) for index in (2, 3, 0, 1)]
    return [r.write(needed[5], parts[0]), r.write(needed[6], parts[1]), *parts[2:]]


_TABLE: dict[str, Convert] = {
    "Abs": _unary(aten.abs.default), "Neg": _unary(aten.neg.default), "Exp": _unary(aten.exp.default),
    "Sqrt": _unary(aten.sqrt.default), "Rsqrt": _unary(aten.rsqrt.default), "Sin": _unary(aten.sin.default),
    "Cos": _unary(aten.cos.default), "Reciprocal": _unary(aten.reciprocal.default), "Tanh": _unary(aten.tanh.default),
    "Square": lambda r, op: [r.call(aten.pow.Tensor_Scalar, r.node(op, 0), 2)],
    "Sigmoid": _unary(aten.sigmoid.default), "Relu": _unary(aten.relu.default), "Silu": _unary(aten.silu.default),
    "ZerosLike": _unary(aten.zeros_like.default), "OnesLike": _unary(aten.ones_like.default),
    "Add": _binary(aten.add.Tensor, True), "AddV2": _binary(aten.add.Tensor, True),
    "Sub": _binary(aten.sub.Tensor, False), "Mul": _binary(aten.mul.Tensor, True),
    "Div": _binary(aten.div.Tensor, False), "RealDiv": _binary(aten.div.Tensor, False),
    "FloorMod": _remainder, "Maximum": _extreme(aten.maximum.default),
    "Minimum": _extreme(aten.minimum.default), "Pow": _pow, "Cast": _cast,
    "ReduceMean": _reduce(aten.mean.dim), "ReduceSum": _reduce(aten.sum.dim_IntList),
    "ReduceMax": _reduce(aten.amax.default), "SoftmaxV2": _softmax,
    "MatMul": _matmul("transpose_x1", "transpose_x2"), "MatMulV2": _matmul("transpose_x1", "transpose_x2"),
    "MatMulV3": _matmul("transpose_x1", "transpose_x2"), "BatchMatMul": _matmul("adj_x1", "adj_x2"),
    "BatchMatMulV2": _matmul("adj_x1", "adj_x2"), "TransposeBatchMatMul": _transposed_matmul,
    "Identity": _alias, "TensorMove": _move, "Reshape": _reshape, "Transpose": _transpose, "TransposeD": _transpose,
    "Unsqueeze": _unsqueeze, "ExpandDims": _expand_dims, "Squeeze": _squeeze, "SplitV": _split_v, "Split": _split,
    "ConcatV2": _concat, "ConcatD": _concat, "Pack": _pack, "Unpack": _unpack, "StridedSliceV2": _strided_slice,
    "BroadcastTo": _broadcast, "Const": _const, "Constant": _const, "Shape": _shape, "Gather": _gather,
    "GatherV2": _gather, "IndexByTensor": _index, "ScatterNdUpdate": _scatter, "Assign": _assign,
    "RmsNorm": _rms_norm, "AddRmsNorm": _add_rms_norm, "InterleaveRope": _interleave_rope, "RotaryMul": _rotary,
    "RotaryPositionEmbedding": _rotary, "KvRmsNormRopeCache": _kv_rmsnorm_rope_cache,
}  # fmt: skip
