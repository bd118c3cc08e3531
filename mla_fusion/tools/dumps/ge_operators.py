"""What GE operators mean in ATen. Each function is named in the table below it and gets its
operator's results.

Arguments stand in the order of GE's own operator definitions, which torchair keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

import mla_fusion.ops  # noqa: F401  # npu:: operators, where torch_npu has not defined them
from mla_fusion.tools.dumps import Operator, dtypes, ge_fused_operators, names
from mla_fusion.tools.dumps.ge_values import Constant, OperatorReader, Unmapped

aten, npu = torch.ops.aten, torch.ops.npu
Convert = Callable[[OperatorReader, Operator], Sequence[Any]]
_END = 2**31 - 1
_AXES = 64  # torch's own limit
# numbers of a constant that is joined here; a dump can double one with every line
_LONGEST = 1 << 20


def convert(r: OperatorReader, operator: Operator) -> Sequence[Any]:
    """The operator's results, None for an unknown one. Raises Unmapped, or LookupError for an
    unknown argument.
    """
    converter = _TABLE.get(operator.type)
    return r.opaque(operator) if converter is None else converter(r, operator)


# -- element by element


def _unary(target: Any) -> Convert:
    return lambda r, op: [r.call(target, r.node(op, 0))]


def _binary(target: Any, commutes: bool) -> Convert:
    """A number on the right, or on the left where sides do not matter, stays a number."""

    def converter(r: OperatorReader, op: Operator) -> Sequence[Any]:
        left, right = r.argument(op, 0), r.argument(op, 1)
        if commutes and not isinstance(left, Node) and isinstance(right, Node):
            left, right = right, left
        scalar = None if isinstance(right, Node) else right.scalar
        return [r.call(target, r.as_node(left), r.as_node(right) if scalar is None else scalar)]

    return converter


def _remainder(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.call(aten.remainder.Scalar, r.node(op, 0), r.number(op, 1))]


def _extreme(target: Any) -> Convert:
    return lambda r, op: [r.call(target, r.node(op, 0), r.node(op, 1))]


def _pow(r: OperatorReader, op: Operator) -> Sequence[Any]:
    if isinstance(r.argument(op, 0), Constant):
        return [r.call(aten.pow.Scalar, r.number(op, 0), r.node(op, 1))]
    exponent = r.number(op, 1)
    whole = int(exponent) if float(exponent).is_integer() else exponent
    return [r.call(aten.pow.Tensor_Scalar, r.node(op, 0), whole)]


def _cast(r: OperatorReader, op: Operator) -> Sequence[Any]:
    stated = op.attributes.get("dst_type")
    name = dtypes.from_number(stated) if isinstance(stated, int) else str(stated)
    dtype = names.dtype(name)
    if dtype is None:
        raise Unmapped
    source = r.argument(op, 0)
    if isinstance(source, Constant):
        return [Constant(source.numbers, source.shape, name)]
    if source.meta["val"].dtype == dtype:  # torchair casts after every promotion, needed or not
        return [source]
    return [r.call(aten._to_copy.default, source, dtype=dtype)]


def _clip(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.call(aten.clamp.default, r.node(op, 0), r.number(op, 1), r.number(op, 2))]


def _floor_divide(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.call(aten.div.Tensor_mode, r.node(op, 0), r.number(op, 1), rounding_mode="floor")]


def _by_number(r: OperatorReader, op: Operator) -> Sequence[Any]:
    target = aten.mul.Tensor if op.type == "Muls" else aten.add.Tensor
    return [r.call(target, r.node(op, 0), op.attributes["value"])]


def _complex(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.call(aten.complex.default, r.node(op, 0), r.node(op, 1))]


def _part(index: int) -> Convert:
    """Real or imaginary part."""
    return lambda r, op: [
        r.call(aten.select.int, r.call(aten.view_as_real.default, r.node(op, 0)), -1, index)
    ]


# -- reductions and products


def _reduce(target: Any) -> Convert:
    def converter(r: OperatorReader, op: Operator) -> Sequence[Any]:
        return [
            r.call(
                target, r.node(op, 0), r.numbers(op, 1), bool(op.attributes.get("keep_dims", False))
            )
        ]

    return converter


def _norm(r: OperatorReader, op: Operator) -> Sequence[Any]:
    axes, keep = list(op.attributes["axes"]), bool(op.attributes.get("keepdim", False))
    if op.attributes.get("epsilon"):
        raise Unmapped
    return [
        r.call(
            aten.linalg_vector_norm.default, r.node(op, 0), op.attributes.get("p", 2.0), axes, keep
        )
    ]


def _matmul(first: str, second: str) -> Convert:
    def converter(r: OperatorReader, op: Operator) -> Sequence[Any]:
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


def _transposed_matmul(r: OperatorReader, op: Operator) -> Sequence[Any]:
    if r.has(op, 2) or r.has(op, 3):
        raise Unmapped
    orders = {
        name: list(op.attributes[name])
        for name in ("perm_x1", "perm_x2", "perm_y")
        if op.attributes.get(name)
    }
    split = int(op.attributes.get("batch_split_factor", 1))
    call = npu.npu_transpose_batchmatmul.default
    return [r.call(call, r.node(op, 0), r.node(op, 1), **orders, batch_split_factor=split)]


def _softmax(r: OperatorReader, op: Operator) -> Sequence[Any]:
    (axis,) = op.attributes["axes"]
    return [r.call(aten._softmax.default, r.node(op, 0), axis, False)]


# -- views


def _alias(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.argument(op, 0)]


def _move(r: OperatorReader, op: Operator) -> Sequence[Any]:
    """A copy that torchair makes so that a write does not reach the original: FX has no such
    writes.
    """
    source = r.node(op, 0)
    if source in r.rows:
        r.copied.add(r.rows[source].placeholder)
    return [source]


def _reshape(r: OperatorReader, op: Operator) -> Sequence[Any]:
    source, sizes = r.argument(op, 0), r.numbers(op, 1)
    if isinstance(source, Constant):
        return (
            [Constant(source.numbers, tuple(sizes), source.dtype)]
            if all(size >= 0 for size in sizes)
            else [source]
        )
    symbolic = [place for place, size in enumerate(sizes) if not isinstance(size, int)]
    if len(symbolic) > 1 or (symbolic and -1 in sizes):
        raise Unmapped
    target = [-1 if place in symbolic else size for place, size in enumerate(sizes)]
    return [r.view(aten.reshape.default, source, target)]


def _transpose(r: OperatorReader, op: Operator) -> Sequence[Any]:
    order = op.attributes["perm"] if "perm" in op.attributes else r.numbers(op, 1)
    return [r.call(aten.permute.default, r.node(op, 0), list(order))]


def _unsqueeze(r: OperatorReader, op: Operator) -> Sequence[Any]:
    found = r.node(op, 0)
    for axis in op.attributes["axes"]:
        found = r.view(aten.unsqueeze.default, found, axis)
    return [found]


def _expand_dims(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.view(aten.unsqueeze.default, r.node(op, 0), r.number(op, 1))]


def _squeeze(r: OperatorReader, op: Operator) -> Sequence[Any]:
    axes = op.attributes.get("axis") or op.attributes.get("axes") or []
    return [r.view(aten.squeeze.dims, r.node(op, 0), list(axes))]


def _parts(r: OperatorReader, source: Node, sizes: list[Any], axis: int) -> Sequence[Any]:
    if -1 in sizes:
        whole = source.meta["val"].shape[axis]
        sizes = [
            whole - sum(other for other in sizes if other != -1) if size == -1 else size
            for size in sizes
        ]
    split = r.call(aten.split_with_sizes.default, source, sizes, axis)
    return [r.call(getitem, split, index) for index in range(len(sizes))]


def _split_v(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return _parts(r, r.node(op, 0), r.numbers(op, 1), r.number(op, 2))


def _split(r: OperatorReader, op: Operator) -> Sequence[Any]:
    axis, source, count = r.number(op, 0), r.node(op, 1), op.attributes["num_split"]
    if count > names.MOST_PARTS:
        raise Unmapped
    return _parts(r, source, [source.meta["val"].shape[axis] // count] * count, axis)


def _concat(r: OperatorReader, op: Operator) -> Sequence[Any]:
    axis = op.attributes.get("concat_dim")
    count = len(op.inputs) - (axis is None)
    axis = r.number(op, count) if axis is None else axis
    found = [r.argument(op, place) for place in range(count)]
    if all(isinstance(item, Constant) for item in found):
        numbers = [
            number for item in found if isinstance(item, Constant) for number in item.numbers
        ]
        if len(numbers) > _LONGEST:
            raise Unmapped
        return [Constant(tuple(numbers), (len(numbers),), found[0].dtype)]  # type: ignore[union-attr]
    return [r.call(aten.cat.default, [r.as_node(item) for item in found], axis)]


def _pack(r: OperatorReader, op: Operator) -> Sequence[Any]:
    found = [r.argument(op, place) for place in range(len(op.inputs))]
    if all(isinstance(item, Constant) and item.shape == () for item in found):
        numbers = tuple(item.numbers[0] for item in found if isinstance(item, Constant))
        return [Constant(numbers, (len(numbers),), found[0].dtype)]  # type: ignore[union-attr]
    return [
        r.call(
            aten.stack.default, [r.as_node(item) for item in found], op.attributes.get("axis", 0)
        )
    ]


def _unpack(r: OperatorReader, op: Operator) -> Sequence[Any]:
    parts = r.call(aten.unbind.int, r.node(op, 0), op.attributes.get("axis", 0))
    return [r.call(getitem, parts, index) for index in range(len(parts.meta["val"]))]


def _strided_slice(r: OperatorReader, op: Operator) -> Sequence[Any]:
    found = r.node(op, 0)
    starts, stops = r.numbers(op, 1), r.numbers(op, 2)
    axes = r.numbers(op, 3) if r.has(op, 3) else list(range(len(starts)))
    steps = r.numbers(op, 4) if r.has(op, 4) else [1] * len(starts)
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        end = stop if not isinstance(stop, int) or stop < _END else 2**63 - 1
        if (start, end, step) != (0, 2**63 - 1, 1):
            found = r.view(aten.slice.Tensor, found, axis, start, end, step)
    return [found]


def _strided_slice_v1(r: OperatorReader, op: Operator) -> Sequence[Any]:
    """TensorFlow's: bit i of a mask says that the i-th begin or end does not count, or that its
    axis is dropped.
    """
    if op.attributes.get("ellipsis_mask") or op.attributes.get("new_axis_mask"):
        raise Unmapped
    begins, ends, steps = (r.numbers(op, place) for place in (1, 2, 3))
    masks = {
        name: int(op.attributes.get(f"{name}_mask", 0)) for name in ("begin", "end", "shrink_axis")
    }
    found = r.node(op, 0)
    dropped = [axis for axis in range(len(begins)) if masks["shrink_axis"] >> axis & 1]
    for axis, (begin, end, step) in enumerate(zip(begins, ends, steps, strict=True)):
        begin = 0 if masks["begin"] >> axis & 1 else begin
        end = (
            2**63 - 1 if masks["end"] >> axis & 1 or (isinstance(end, int) and end >= _END) else end
        )
        if axis not in dropped and (begin, end, step) != (0, 2**63 - 1, 1):
            found = r.view(aten.slice.Tensor, found, axis, begin, end, step)
    for axis in reversed(dropped):
        found = r.view(aten.select.int, found, axis, begins[axis])
    return [found]


def _repeat_interleave(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [
        r.call(
            aten.repeat_interleave.self_int, r.node(op, 0), r.number(op, 1), op.attributes["axis"]
        )
    ]


def _tile(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.call(aten.repeat.default, r.node(op, 0), r.numbers(op, 1))]


def _broadcast(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.call(aten.expand.default, r.node(op, 0), r.numbers(op, 1))]


# -- sizes and rows


def _const(r: OperatorReader, op: Operator) -> Sequence[Any]:
    held = op.attributes.get("value")
    if not isinstance(held, dict) or held["numbers"] is None:
        raise Unmapped
    return [Constant(tuple(held["numbers"]), tuple(held["value"].shape or ()), held["value"].dtype)]


def _shape(r: OperatorReader, op: Operator) -> Sequence[Any]:
    sizes = tuple(r.node(op, 0).meta["val"].shape)
    return [Constant(sizes, (len(sizes),), "int64")]


def _range(r: OperatorReader, op: Operator) -> Sequence[Any]:
    start, stop, step = (r.number(op, place) for place in range(3))
    first = r.argument(op, 0)
    dtype = names.dtype(first.dtype) if isinstance(first, Constant) else None
    return [
        r.call(aten.arange.start_step, start, stop, step, dtype=dtype, device=torch.device("cpu"))
    ]


def _fill(r: OperatorReader, op: Operator) -> Sequence[Any]:
    value = r.argument(op, 1)
    dtype = names.dtype(value.dtype) if isinstance(value, Constant) else None
    if dtype is None:
        raise Unmapped
    return [
        r.call(
            aten.full.default,
            r.numbers(op, 0),
            r.number(op, 1),
            dtype=dtype,
            device=torch.device("cpu"),
        )
    ]


def _gather(r: OperatorReader, op: Operator) -> Sequence[Any]:
    source, index = r.argument(op, 0), r.argument(op, 1)
    axis = r.number(op, 2) if r.has(op, 2) else 0
    if isinstance(source, Constant) and isinstance(index, Constant):
        picked = tuple(source.numbers[place] for place in index.numbers)
        return [Constant(picked, index.shape, source.dtype)]
    if isinstance(index, Constant) and isinstance(source, Node) and isinstance(index.scalar, int):
        return [r.view(aten.select.int, source, axis, index.scalar)]
    rows = r.as_node(index)
    if rows.meta["val"].dim() == 1:
        return [r.call(aten.index_select.default, r.as_node(source), axis, rows)]
    if not 0 <= axis < _AXES:
        raise Unmapped
    return [r.call(aten.index.Tensor, r.as_node(source), [None] * axis + [rows])]


def _index(r: OperatorReader, op: Operator) -> Sequence[Any]:
    if sum(map(bool, op.attributes["indices_mask"])) != len(op.inputs) - 1:
        raise Unmapped
    used = iter(range(1, len(op.inputs)))
    indices = [r.node(op, next(used)) if mask else None for mask in op.attributes["indices_mask"]]
    return [r.call(aten.index.Tensor, r.node(op, 0), indices)]


def _scatter(r: OperatorReader, op: Operator) -> Sequence[Any]:
    var, updates = r.node(op, 0), r.node(op, 2)
    indices = _row_indices(r, op, var)
    return [r.write(var, r.call(aten.index_put.default, var, indices, updates))]


def _scatter_elements(r: OperatorReader, op: Operator) -> Sequence[Any]:
    if op.attributes.get("reduction", "none") != "none":
        raise Unmapped
    data, updates, axis = r.node(op, 0), r.node(op, 2), int(op.attributes.get("axis", 0))
    place = _one_place(r, op)
    if place is not None and updates.meta["val"].shape[axis] == 1:
        rows = _before_unsqueeze(r, op, axis) or r.call(aten.select.int, updates, axis, 0)
        return [r.write(data, r.call(aten.select_scatter.default, data, rows, axis, place))]
    index = r.node(op, 1)
    return [r.write(data, r.call(aten.scatter.src, data, axis, index, updates))]


def _before_unsqueeze(r: OperatorReader, op: Operator, axis: int) -> Node | None:
    """The updates without the axis of size 1 that was only put in for the operator."""
    wanted = list(r.node(op, 2).meta["val"].shape)
    del wanted[axis]
    reader, place = op, 2
    while (edge := reader.inputs[place]) is not None:
        found = r.results.get((edge.producer, edge.index))
        if isinstance(found, Node) and list(found.meta["val"].shape) == wanted:
            return found
        reader, place = r.dump.producer(edge), 0
        if reader.type not in ("BroadcastTo", "Unsqueeze", "ExpandDims"):
            break
    return None


def _one_place(r: OperatorReader, op: Operator) -> int | None:
    """The index that all elements have, where a constant was spread to be their index."""
    edge = op.inputs[1]
    spread = r.dump.producer(edge) if edge is not None else op
    found = r.argument(spread, 0) if spread.type == "BroadcastTo" else None
    return found.numbers[0] if isinstance(found, Constant) and len(found.numbers) == 1 else None


def _scatter_update(r: OperatorReader, op: Operator) -> Sequence[Any]:
    """Whole rows of the first axis."""
    var, index, updates = (r.node(op, place) for place in range(3))
    if index.meta["val"].dim() != 1:
        raise Unmapped
    return [r.write(var, r.call(aten.index_copy.default, var, 0, index, updates))]


def _index_add(r: OperatorReader, op: Operator) -> Sequence[Any]:
    var, index, updates = (r.node(op, place) for place in range(3))
    alpha = r.number(op, 3) if r.has(op, 3) else 1
    return [
        r.write(
            var,
            r.call(aten.index_add.default, var, op.attributes["axis"], index, updates, alpha=alpha),
        )
    ]


def _row_indices(r: OperatorReader, op: Operator, var: Node) -> list[Node]:
    """The index tensors whose stack, ``[rows, count]``, the operator takes.

    ``index_put`` counts negative indices from the end and GE does not, so converters bring them
    into range with FloorMod; together that is index_put's own reading of the index below.
    """
    edge = op.inputs[1]
    stacked = r.dump.producer(edge) if edge is not None else op
    if (
        stacked.type in ("Unsqueeze", "Reshape", "ExpandDims")
        and r.node(op, 1).meta["val"].shape[-1] == 1
    ):
        return [_unwrapped(r, stacked, 0, var.meta["val"].shape[0])]
    if stacked.type == "Pack":
        return [
            _unwrapped(r, stacked, place, var.meta["val"].shape[place])
            for place in range(len(stacked.inputs))
        ]
    found = r.node(op, 1)
    columns = found.meta["val"].shape[-1]
    if int(columns) > _AXES:
        raise Unmapped
    return [r.call(aten.select.int, found, -1, column) for column in range(int(columns))]


def _unwrapped(r: OperatorReader, reader: Operator, place: int, size: Any) -> Node:
    edge = reader.inputs[place]
    inner = r.dump.producer(edge) if edge is not None else reader
    if inner.type == "FloorMod" and r.has(inner, 1) and _is_number(r, inner, size):
        return r.node(inner, 0)
    return r.node(reader, place)


def _is_number(r: OperatorReader, op: Operator, size: Any) -> bool:
    found = r.argument(op, 1)
    return not isinstance(found, Node) and list(found.numbers) == [size]


def _assign(r: OperatorReader, op: Operator) -> Sequence[Any]:
    target, value = r.node(op, 0), r.node(op, 1)
    r.written[target] = value
    return [value]


_TABLE: dict[str, Convert] = {
    "Abs": _unary(aten.abs.default), "Neg": _unary(aten.neg.default),
    "Exp": _unary(aten.exp.default),
    "Sqrt": _unary(aten.sqrt.default), "Rsqrt": _unary(aten.rsqrt.default),
    "Sin": _unary(aten.sin.default),
    "Cos": _unary(aten.cos.default), "Reciprocal": _unary(aten.reciprocal.default),
    "Tanh": _unary(aten.tanh.default),
    "Square": lambda r, op: [r.call(aten.pow.Tensor_Scalar, r.node(op, 0), 2)],
    "Sigmoid": _unary(aten.sigmoid.default), "Relu": _unary(aten.relu.default),
    "Silu": _unary(aten.silu.default),
    "ZerosLike": _unary(aten.zeros_like.default), "OnesLike": _unary(aten.ones_like.default),
    "Add": _binary(aten.add.Tensor, True), "AddV2": _binary(aten.add.Tensor, True),
    "Sub": _binary(aten.sub.Tensor, False), "Mul": _binary(aten.mul.Tensor, True),
    "Div": _binary(aten.div.Tensor, False), "RealDiv": _binary(aten.div.Tensor, False),
    "FloorMod": _remainder, "Maximum": _extreme(aten.maximum.default),
    "Minimum": _extreme(aten.minimum.default), "Pow": _pow, "Cast": _cast,
    "ReduceMean": _reduce(aten.mean.dim), "ReduceSum": _reduce(aten.sum.dim_IntList),
    "ReduceMax": _reduce(aten.amax.default), "SoftmaxV2": _softmax,
    "MatMul": _matmul("transpose_x1", "transpose_x2"),
    "MatMulV2": _matmul("transpose_x1", "transpose_x2"),
    "MatMulV3": _matmul("transpose_x1", "transpose_x2"), "BatchMatMul": _matmul("adj_x1", "adj_x2"),
    "BatchMatMulV2": _matmul("adj_x1", "adj_x2"), "TransposeBatchMatMul": _transposed_matmul,
    "Identity": _alias, "TensorMove": _move, "Reshape": _reshape, "Transpose": _transpose,
    "TransposeD": _transpose,
    "Unsqueeze": _unsqueeze, "ExpandDims": _expand_dims, "Squeeze": _squeeze, "SplitV": _split_v,
    "Split": _split,
    "ConcatV2": _concat, "ConcatD": _concat, "Pack": _pack, "Unpack": _unpack,
    "StridedSliceV2": _strided_slice,
    "BroadcastTo": _broadcast, "Const": _const, "Constant": _const, "Shape": _shape,
    "Gather": _gather,
    "GatherV2": _gather, "IndexByTensor": _index, "ScatterNdUpdate": _scatter, "Assign": _assign,
    "Round": _unary(aten.round.default), "ClipByValueV2": _clip, "FloorDiv": _floor_divide,
    "Muls": _by_number,
    "Adds": _by_number, "LpNormV2": _norm, "RepeatInterleave": _repeat_interleave, "Tile": _tile,
    "StridedSlice": _strided_slice_v1, "Range": _range, "Fill": _fill,
    "ScatterElements": _scatter_elements,
    "ScatterUpdate": _scatter_update, "InplaceIndexAdd": _index_add, "Complex": _complex,
    "Real": _part(0),
    "Imag": _part(1), **ge_fused_operators.TABLE,
}  # fmt: skip
