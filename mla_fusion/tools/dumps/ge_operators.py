"""What GE operators mean in ATen: a table of those that are one call, and a function for each of
the others, which gives its operator's results.

Arguments stand in the order of GE's own operator definitions, which torchair keeps.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.fx import Node

import mla_fusion.ops  # noqa: F401  # npu:: operators, where torch_npu has not defined them
from mla_fusion.operators.known import dtype_of, shape_of
from mla_fusion.tools.dumps import Edge, names
from mla_fusion.tools.dumps.ge_values import (
    Constant,
    OperatorReader,
    Result,
    Unmapped,
    known_dtype,
)

Found = Node | Constant | Sequence[Result]
Convert = Callable[[OperatorReader], Found]
_END, _WHOLE = 2**31 - 1, 2**63 - 1  # the end of an axis, to GE and to torch
# numbers of a constant that is joined here; a dump can double one with every line
_LONGEST = 1 << 20

# GE's name, the call, and its arguments: a tensor, number or list of numbers that GE is given at
# this place; [an attribute=its default]; a literal.
CALLS = """
Abs               aten.abs.default                       tensor
Neg               aten.neg.default                       tensor
Exp               aten.exp.default                       tensor
Sqrt              aten.sqrt.default                      tensor
Rsqrt             aten.rsqrt.default                     tensor
Sin               aten.sin.default                       tensor
Cos               aten.cos.default                       tensor
Reciprocal        aten.reciprocal.default                tensor
Tanh              aten.tanh.default                      tensor
Sigmoid           aten.sigmoid.default                   tensor
Relu              aten.relu.default                      tensor
Silu              aten.silu.default                      tensor
Round             aten.round.default                     tensor
ZerosLike         aten.zeros_like.default                tensor
OnesLike          aten.ones_like.default                 tensor
Square            aten.pow.Tensor_Scalar                 tensor 2
FloorMod          aten.remainder.Scalar                  tensor number
Maximum           aten.maximum.default                   tensor tensor
Minimum           aten.minimum.default                   tensor tensor
Complex           aten.complex.default                   tensor tensor
ClipByValueV2     aten.clamp.default                     tensor number number
Muls              aten.mul.Tensor                        tensor [value]
Adds              aten.add.Tensor                        tensor [value]
ReduceMean        aten.mean.dim                          tensor numbers [keep_dims=False]
ReduceSum         aten.sum.dim_IntList                   tensor numbers [keep_dims=False]
ReduceMax         aten.amax.default                      tensor numbers [keep_dims=False]
ExpandDims        aten.unsqueeze.default                 tensor number
Unpack            aten.unbind.int                        tensor [axis=0]
RepeatInterleave  aten.repeat_interleave.self_int        tensor number [axis]
Tile              aten.repeat.default                    tensor numbers
BroadcastTo       aten.expand.default                    tensor numbers
RmsNorm           npu.npu_rms_norm.default               tensor tensor [epsilon]
AddRmsNorm        npu.npu_add_rms_norm.default           tensor tensor tensor [epsilon]
InterleaveRope    npu.npu_interleave_rope.default        tensor tensor tensor
"""


def convert(r: OperatorReader) -> Sequence[Result]:
    """The operator's results, None for an unknown one. Raises Unmapped, or LookupError for an
    unknown argument.
    """
    found = _TABLE.get(r.operator.type, OperatorReader.opaque)(r)
    if isinstance(found, Node):
        return r.parts(found) if isinstance(found.meta["val"], (tuple, list)) else [found]
    return [found] if isinstance(found, Constant) else found


def _call(target: str, *words: str) -> Convert:
    """The converter of a row of the table."""
    reads = [_argument(word, place) for place, word in enumerate(words)]
    return lambda r: r.call(target, *(read(r) for read in reads))


def _argument(word: str, place: int) -> Callable[[OperatorReader], Any]:
    if word in _GIVEN:
        return lambda r: _GIVEN[word](r, place)
    name, _, default = word.strip("[]").partition("=")
    value = literal_eval(default) if default else None
    return (lambda r: r.attribute(name, value)) if word[0] == "[" else lambda r: literal_eval(word)


_GIVEN: dict[str, Callable[[OperatorReader, int], Any]] = {
    "tensor": OperatorReader.node,
    "number": OperatorReader.number,
    "numbers": OperatorReader.numbers,
}


# -- element by element


def _binary(target: str, commutes: bool = True) -> Convert:
    """A number on the right, or on the left where sides do not matter, stays a number."""

    def converter(r: OperatorReader) -> Node:
        left, right = r.argument(0), r.argument(1)
        if commutes and isinstance(left, Constant) and isinstance(right, Node):
            left, right = right, left
        scalar = None if isinstance(right, Node) else right.scalar
        return r.call(target, r.as_node(left), r.as_node(right) if scalar is None else scalar)

    return converter


def _pow(r: OperatorReader) -> Node:
    if isinstance(r.argument(0), Constant):
        return r.call("aten.pow.Scalar", r.number(0), r.node(1))
    exponent = r.number(1)
    whole = int(exponent) if float(exponent).is_integer() else exponent
    return r.call("aten.pow.Tensor_Scalar", r.node(0), whole)


def _cast(r: OperatorReader) -> Found:
    name, source = r.dtype_name("dst_type"), r.argument(0)
    dtype = known_dtype(name)
    if isinstance(source, Constant):
        return Constant(source.numbers, source.shape, name)
    if dtype_of(source) == dtype:  # torchair casts after every promotion, needed or not
        return source
    return r.call("aten._to_copy.default", source, dtype=dtype)


def _floor_divide(r: OperatorReader) -> Node:
    return r.call("aten.div.Tensor_mode", r.node(0), r.number(1), rounding_mode="floor")


def _part(index: int) -> Convert:
    """Real or imaginary part."""
    return lambda r: r.call(
        "aten.select.int", r.call("aten.view_as_real.default", r.node(0)), -1, index
    )


# -- reductions and products


def _norm(r: OperatorReader) -> Node:
    if r.attribute("epsilon", 0.0):
        raise Unmapped
    power, axes = r.operator.attributes.get("p", 2.0), list(r.attribute("axes"))
    keep = r.attribute("keepdim", False)
    return r.call("aten.linalg_vector_norm.default", r.node(0), power, axes, keep)


def _sides(r: OperatorReader) -> list[Node]:
    """Both sides of a product, each transposed where an attribute says so."""
    sides = r.nodes(2)
    for place, side in enumerate(sides):
        if any(r.operator.attributes.get(f"{name}_x{place + 1}") for name in ("transpose", "adj")):
            sides[place] = r.call("aten.transpose.int", side, -2, -1)
    return sides


def _matmul(r: OperatorReader) -> Node:
    sides = _sides(r)
    shapes = [shape_of(side) for side in sides]
    batches = all(len(shape) == 3 for shape in shapes) and shapes[0][0] == shapes[1][0]
    product = r.call("aten.bmm.default" if batches else "aten.matmul.default", *sides)
    return r.call("aten.add.Tensor", product, r.node(2)) if r.has(2) else product


def _transposed_matmul(r: OperatorReader) -> Node:
    if r.has(2) or r.has(3):
        raise Unmapped
    given = r.operator.attributes
    orders = {
        name: list(given[name]) for name in ("perm_x1", "perm_x2", "perm_y") if given.get(name)
    }
    split = r.attribute("batch_split_factor", 1)
    call = "npu.npu_transpose_batchmatmul.default"
    return r.call(call, *r.nodes(2), **orders, batch_split_factor=split)


def _softmax(r: OperatorReader) -> Node:
    (axis,) = r.attribute("axes")
    return r.call("aten._softmax.default", r.node(0), axis, False)


# -- views


def _move(r: OperatorReader) -> Node:
    """A copy that torchair makes so that a write does not reach the original: FX has no such
    writes.
    """
    source = r.node(0)
    if source in r.rows:
        r.copied.add(r.rows[source].placeholder)
    return source


def _reshape(r: OperatorReader) -> Found:
    source, sizes = r.argument(0), r.numbers(1)
    if isinstance(source, Constant):
        known = all(size >= 0 for size in sizes)
        return Constant(source.numbers, tuple(sizes), source.dtype) if known else source
    target = [size if isinstance(size, int) else -1 for size in sizes]
    if target.count(-1) > 1:
        raise Unmapped
    return r.call("aten.reshape.default", source, target)


def _transpose(r: OperatorReader) -> Node:
    order = r.operator.attributes.get("perm")
    return r.call("aten.permute.default", r.node(0), list(r.numbers(1) if order is None else order))


def _unsqueeze(r: OperatorReader) -> Node:
    found = r.node(0)
    for axis in r.attribute("axes"):
        found = r.call("aten.unsqueeze.default", found, axis)
    return found


def _squeeze(r: OperatorReader) -> Node:
    axes = r.operator.attributes.get("axis") or r.operator.attributes.get("axes") or []
    return r.call("aten.squeeze.dims", r.node(0), list(axes))


def _split_v(r: OperatorReader) -> Node:
    source, sizes, axis = r.node(0), r.numbers(1), r.number(2)
    if -1 in sizes:
        rest = shape_of(source)[axis] - sum(size for size in sizes if size != -1)
        sizes = [rest if size == -1 else size for size in sizes]
    return r.call("aten.split_with_sizes.default", source, sizes, axis)


def _split(r: OperatorReader) -> Node:
    axis, source, count = r.number(0), r.node(1), r.attribute("num_split")
    if count > names.MOST_PARTS:
        raise Unmapped
    sizes = [shape_of(source)[axis] // count] * count
    return r.call("aten.split_with_sizes.default", source, sizes, axis)


def _concat(r: OperatorReader) -> Found:
    found, axis = r.arguments(), r.operator.attributes.get("concat_dim")
    if axis is None:
        axis = r.number(len(found) - 1)
        del found[-1]
    constants = [one for one in found if isinstance(one, Constant)]
    return _joined(r, "aten.cat.default", found, constants, axis)


def _pack(r: OperatorReader) -> Found:
    found = r.arguments()
    scalars = [one for one in found if isinstance(one, Constant) and one.shape == ()]
    return _joined(r, "aten.stack.default", found, scalars, r.attribute("axis", 0))


def _joined(
    r: OperatorReader,
    target: str,
    found: Sequence[Node | Constant],
    constants: Sequence[Constant],
    axis: int,
) -> Found:
    """A call, or one constant where all of them are such."""
    if len(constants) < len(found):
        return r.call(target, [r.as_node(one) for one in found], axis)
    numbers = tuple(chain.from_iterable(one.numbers for one in constants))
    if len(numbers) > _LONGEST:
        raise Unmapped
    return Constant(numbers, (len(numbers),), constants[0].dtype)


Span = tuple[int, Any, Any, Any]  # axis, begin, end, step


def _sliced(r: OperatorReader, spans: Iterable[Span]) -> Node:
    found = r.node(0)
    for axis, begin, end, step in spans:
        end = _WHOLE if isinstance(end, int) and end >= _END else end
        if (begin, end, step) != (0, _WHOLE, 1):
            found = r.call("aten.slice.Tensor", found, axis, begin, end, step)
    return found


def _strided_slice(r: OperatorReader) -> Node:
    begins, ends = r.numbers(1), r.numbers(2)
    axes = r.numbers(3) if r.has(3) else range(len(begins))
    steps = r.numbers(4) if r.has(4) else [1] * len(begins)
    return _sliced(r, zip(axes, begins, ends, steps, strict=True))


def _strided_slice_v1(r: OperatorReader) -> Node:
    """TensorFlow's: bit i of a mask says that the i-th begin or end does not count, or that its
    axis is dropped.
    """
    *whole, new, ellipsis, dropped = (
        r.attribute(f"{name}_mask", 0)
        for name in ("begin", "end", "new_axis", "ellipsis", "shrink_axis")
    )
    if new or ellipsis:
        raise Unmapped
    begins, ends, steps = (r.numbers(place) for place in (1, 2, 3))
    spans = [
        (axis, 0 if whole[0] >> axis & 1 else begin, _END if whole[1] >> axis & 1 else end, step)
        for axis, (begin, end, step) in enumerate(zip(begins, ends, steps, strict=True))
    ]
    found = _sliced(r, (span for span in spans if not dropped >> span[0] & 1))
    for axis in reversed(range(len(begins))):
        if dropped >> axis & 1:
            found = r.call("aten.select.int", found, axis, begins[axis])
    return found


# -- sizes and rows


def _const(r: OperatorReader) -> Constant:
    held = r.operator.attributes.get("value")
    if not isinstance(held, dict) or held["numbers"] is None:
        raise Unmapped
    value = held["value"]
    return Constant(tuple(held["numbers"]), tuple(value.shape or ()), value.dtype)


def _shape(r: OperatorReader) -> Constant:
    sizes = tuple(shape_of(r.node(0)))
    return Constant(sizes, (len(sizes),), "int64")


def _range(r: OperatorReader) -> Node:
    return _made(
        r, "aten.arange.start_step", r.argument(0), *(r.number(place) for place in range(3))
    )


def _fill(r: OperatorReader) -> Node:
    return _made(r, "aten.full.default", r.argument(1), r.numbers(0), r.number(1))


def _made(r: OperatorReader, target: str, like: Node | Constant, *args: Any) -> Node:
    """A tensor of numbers, of the dtype of a constant."""
    assert isinstance(like, Constant)
    return r.call(target, *args, dtype=known_dtype(like.dtype), device=torch.device("cpu"))


def _gather(r: OperatorReader) -> Found:
    source, index = r.argument(0), r.argument(1)
    axis = r.number(2) if r.has(2) else 0
    if isinstance(source, Constant) and isinstance(index, Constant):
        picked = tuple(source.numbers[place] for place in index.numbers)
        return Constant(picked, index.shape, source.dtype)
    if isinstance(index, Constant) and isinstance(index.scalar, int):
        return r.call("aten.select.int", source, axis, index.scalar)
    rows, tensor = r.as_node(index), r.as_node(source)
    if rows.meta["val"].dim() == 1:
        return r.call("aten.index_select.default", tensor, axis, rows)
    if not 0 <= axis < names.MOST_AXES:
        raise Unmapped
    return r.call("aten.index.Tensor", tensor, [None] * axis + [rows])


def _index(r: OperatorReader) -> Node:
    masks, places = r.attribute("indices_mask"), range(1, len(r.operator.inputs))
    if sum(map(bool, masks)) != len(places):
        raise Unmapped
    used = iter(places)
    indices = [r.node(next(used)) if mask else None for mask in masks]
    return r.call("aten.index.Tensor", r.node(0), indices)


def _scatter(r: OperatorReader) -> Node:
    var, updates = r.node(0), r.node(2)
    return r.write(var, r.call("aten.index_put.default", var, _row_indices(r, var), updates))


def _scatter_elements(r: OperatorReader) -> Node:
    if r.attribute("reduction", "none") != "none":
        raise Unmapped
    data, updates, axis = r.node(0), r.node(2), r.attribute("axis", 0)
    place = _one_place(r)
    if place is not None and shape_of(updates)[axis] == 1:
        rows = r.call("aten.select.int", updates, axis, 0)
        return r.write(data, r.call("aten.select_scatter.default", data, rows, axis, place))
    return r.write(data, r.call("aten.scatter.src", data, axis, r.node(1), updates))


def _one_place(r: OperatorReader) -> int | None:
    """The index that all elements have, where a constant was spread to be their index."""
    spread = r.producer(r.operator.inputs[1])
    found = r.result(spread.inputs[0]) if spread.type == "BroadcastTo" else None
    return found.numbers[0] if isinstance(found, Constant) and len(found.numbers) == 1 else None


def _scatter_update(r: OperatorReader) -> Node:
    """Whole rows of the first axis."""
    var, index, updates = r.nodes(3)
    if index.meta["val"].dim() != 1:
        raise Unmapped
    return r.write(var, r.call("aten.index_copy.default", var, 0, index, updates))


def _index_add(r: OperatorReader) -> Node:
    var, index, updates = r.nodes(3)
    axis, alpha = r.attribute("axis"), r.number(3) if r.has(3) else 1
    return r.write(var, r.call("aten.index_add.default", var, axis, index, updates, alpha=alpha))


def _row_indices(r: OperatorReader, var: Node) -> list[Node]:
    """The index tensors whose stack, ``[rows, count]``, the operator takes.

    ``index_put`` counts negative indices from the end and GE does not, so converters bring them
    into range with FloorMod; together that is index_put's own reading of the index below.
    """
    stacked, sizes = r.producer(r.operator.inputs[1]), shape_of(var)
    if stacked.type == "Pack":
        return [_unwrapped(r, edge, sizes[place]) for place, edge in enumerate(stacked.inputs)]
    found = r.node(1)
    columns = shape_of(found)[-1]
    if stacked.type in ("Unsqueeze", "Reshape", "ExpandDims") and columns == 1:
        return [_unwrapped(r, stacked.inputs[0], sizes[0])]
    if int(columns) > names.MOST_AXES:
        raise Unmapped
    return [r.call("aten.select.int", found, -1, column) for column in range(int(columns))]


def _unwrapped(r: OperatorReader, edge: Edge | None, size: Any) -> Node:
    inner = r.producer(edge)
    if inner.type == "FloorMod" and inner.input(1) is not None:
        modulus = r.result(inner.inputs[1])
        if isinstance(modulus, Constant) and list(modulus.numbers) == [size]:
            edge = inner.inputs[0]
    return r.as_node(r.result(edge))


def _assign(r: OperatorReader) -> Node:
    target, value = r.nodes(2)
    r.written[target] = value
    return value


# -- norms, rotations, quantisation, writes of both caches


def _rotary(r: OperatorReader) -> Node:
    mode = r.attribute("mode", 0)
    if mode not in (0, 1) or r.has(3):
        raise Unmapped
    name = "half" if mode == 0 else "interleave"
    return r.call("npu.npu_rotary_mul.default", *r.nodes(3), name)


def _kv_rmsnorm_rope_cache(r: OperatorReader) -> Sequence[Result]:
    """GE returns the caches first, the functional operator of torch_npu last."""
    needed = r.nodes(7)
    given: dict[str, Any] = {
        **r.optional(7, "k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v")
    }
    for name in ("cache_mode", "is_output_kv"):
        if name in r.operator.attributes:
            given[name] = r.attribute(name)
    call = "npu.npu_kv_rmsnorm_rope_cache_v2_functional.default"
    *rows, k_cache, kv_cache = r.parts(
        r.call(call, *needed, **given, epsilon=r.attribute("epsilon"))
    )
    return [r.write(needed[5], k_cache), r.write(needed[6], kv_cache), *rows]


def _dynamic_quant(r: OperatorReader) -> Node:
    # left out, it is int8
    if "dst_type" in r.operator.attributes and r.dtype("dst_type") is not torch.int8:
        raise Unmapped
    given = r.optional(1, "smooth_scales", "group_index")
    return r.call("npu.npu_dynamic_quant.default", r.node(0), **given)


def _dynamic_quant_v2(r: OperatorReader) -> Sequence[Result]:
    """Its symmetric form, one scale a token, is ``DynamicQuant``; the others have no counterpart in
    the pass.
    """
    symmetric = r.attribute("is_symmetrical", False)
    if not symmetric or r.attribute("quant_mode", "pertoken") != "pertoken":
        return r.opaque()
    return [*r.parts(_dynamic_quant(r)), None]


def _quant_matmul(r: OperatorReader) -> Node:
    """GE's order: x1, x2, scale, offset, bias, pertoken_scale."""
    sides, given = _sides(r), r.optional(3, "offset", "bias", "pertoken_scale")
    call, dtype = "npu.npu_quant_matmul.default", r.dtype("dtype")
    return r.call(call, *sides, r.node(2), **given, output_dtype=dtype)


def _scatter_pa(r: OperatorReader) -> Sequence[Result]:
    """GE's order: key, key_cache, slot_mapping, value, value_cache."""
    key, key_cache, slots, value, value_cache = r.nodes(5)
    given = r.optional(5, "compress_lens", "compress_seq_offsets", "seq_lens")
    if r.attribute("scatter_mode", "None") != "None":
        raise Unmapped
    mode = r.attribute("cache_mode", "Norm")
    call = "npu.npu_scatter_pa_kv_cache_functional.default"
    both = r.parts(
        r.call(call, key, value, key_cache, value_cache, slots, **given, cache_mode=mode)
    )
    return [r.write(key_cache, both[0]), r.write(value_cache, both[1])]


_CONVERTERS: dict[str, Convert] = {
    "Add AddV2": _binary("aten.add.Tensor"), "Mul": _binary("aten.mul.Tensor"),
    "Sub": _binary("aten.sub.Tensor", commutes=False),
    "Div RealDiv": _binary("aten.div.Tensor", commutes=False),
    "FloorDiv": _floor_divide, "Pow": _pow, "Cast": _cast, "Real": _part(0), "Imag": _part(1),
    "LpNormV2": _norm, "SoftmaxV2": _softmax,
    "MatMul MatMulV2 MatMulV3 BatchMatMul BatchMatMulV2": _matmul,
    "TransposeBatchMatMul": _transposed_matmul, "QuantBatchMatmulV3": _quant_matmul,
    "Identity": lambda r: r.argument(0), "TensorMove": _move, "Reshape": _reshape,
    "Transpose TransposeD": _transpose, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze,
    "SplitV": _split_v, "Split": _split, "ConcatV2 ConcatD": _concat, "Pack": _pack,
    "StridedSliceV2": _strided_slice, "StridedSlice": _strided_slice_v1,
    "Const Constant": _const, "Shape": _shape, "Range": _range, "Fill": _fill,
    "Gather GatherV2": _gather, "IndexByTensor": _index, "ScatterNdUpdate": _scatter,
    "ScatterElements": _scatter_elements, "ScatterUpdate": _scatter_update,
    "InplaceIndexAdd": _index_add, "Assign": _assign,
    "RotaryMul RotaryPositionEmbedding": _rotary, "KvRmsNormRopeCache": _kv_rmsnorm_rope_cache,
    "DynamicQuant": _dynamic_quant, "DynamicQuantV2": _dynamic_quant_v2,
    "ScatterPaKvCache": _scatter_pa,
}  # fmt: skip
_TABLE = {
    **{name: _call(*words) for name, *words in map(str.split, CALLS.strip().splitlines())},
    **{kind: made for kinds, made in _CONVERTERS.items() for kind in kinds.split()},
}
