"""Says what the operators of dumps do with the memory of a tensor that they read.

GE operators are listed by their type, ATen ones without their overload (:func:`plain`).
"""

from __future__ import annotations

import re

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.meta import key_operator
from mla_fusion.meta.prolog import CACHES, PROLOGS, V1, V2, V3_FUNCTIONAL
from mla_fusion.tools.dumps import Operator, names
from mla_fusion.tools.dumps.python_text import edges_in

INPUTS = frozenset(("Data", "RefData", "placeholder"))
CONSTANTS = frozenset(("Const", "Constant", "ConstPlaceHolder"))
HELD = INPUTS | CONSTANTS | {"get_attr"}
ENDS = frozenset(("NetOutput", "output"))
# By what becomes of the tensor. "back": the second operand is written into the first. "view": no
# second tensor. "part": some of its elements; a GE graph makes a second tensor of them. "rebuilt":
# the whole tensor with other rows. "read": the result does not hold its elements. "computed": other
# numbers, element by element.
_KINDS = {
    name: kind
    for kind, listed in {
        "end": "NetOutput output",
        "back": "Assign aten.copy_",
        "view": """
            Reshape Unsqueeze Squeeze ExpandDims Flatten FlattenV2 Bitcast aten.view
            aten._unsafe_view aten.reshape aten.flatten aten.unsqueeze aten.squeeze aten.alias
            aten.detach aten.unflatten aten.lift_fresh aten.view_as_real aten.view_as_complex aten.t
            aten.transpose aten.permute aten.expand aten.movedim aten.swapaxes aten.as_strided
            getitem
            """,
        "part": """
            StridedSlice StridedSliceV2 StridedSliceD Slice SliceD SplitV Split SplitD SplitVD
            Unpack aten.slice aten.select aten.narrow aten.split aten.split_with_sizes aten.unbind
            aten.chunk aten.diagonal
            """,
        "gathered": """
            GatherV2 Gather GatherNd GatherElements Index IndexByTensor aten.index_select aten.index
            aten._unsafe_index aten.gather aten.embedding
            """,
        "copy": """
            TensorMove Identity BroadcastTo Tile aten.clone aten.lift_fresh_copy aten.repeat
            aten.repeat_interleave aten.flip aten.roll aten.contiguous aten.copy
            """,
        "cast": """
            Cast aten._to_copy aten.to npu.npu_dtype_cast npu._npu_dtype_cast
            prims.convert_element_type
            """,
        "format cast": "TransData npu.npu_format_cast",
        "transpose": "Transpose TransposeD",
        "pad": "Pad PadV2 PadV3 aten.constant_pad_nd",
        "joined": """
            ConcatV2 ConcatD Concat ConcatV2D Pack aten.cat aten.concat aten.concatenate aten.stack
            Select SelectV2 MaskedFill MaskedScatter aten.where aten.masked_fill aten.masked_scatter
            """,
        "rebuilt": """
            TensorScatterUpdate aten.index_put aten._unsafe_index_put aten.index_copy aten.index_add
            aten.scatter aten.scatter_add npu.npu_scatter_nd_update aten.fill
            npu.npu_scatter_pa_kv_cache_functional npu.scatter_update SliceWrite aten.slice_scatter
            aten.select_scatter aten.as_strided_scatter aten.diagonal_scatter aten.index_fill
            """,
        "in place": """
            ScatterNdUpdate ScatterUpdate Scatter ScatterElements InplaceUpdate InplaceAdd
            InplaceIndexAdd aten._index_put_impl_
            """,
        "product": """
            MatMul MatMulV2 MatMulV3 BatchMatMul BatchMatMulV2 TransposeBatchMatMul
            QuantBatchMatmulV3 QuantBatchMatmulV4 WeightQuantBatchMatmulV2 Einsum aten.mm
            aten.matmul aten.bmm aten.linear aten.addmm aten.baddbmm aten.einsum
            npu.npu_quant_matmul npu.npu_transpose_batchmatmul
            """,
        "read": """
            Shape Size Rank aten.sym_size aten.sym_numel aten.new_empty aten.empty_like
            aten.new_zeros aten.zeros_like aten.new_ones aten.ones_like aten.new_full aten.full_like
            aten.new_empty_strided ReduceMean ReduceMeanD ReduceSum ReduceSumD ReduceMax ReduceMaxD
            ReduceMin ArgMaxV2 aten.mean aten.sum aten.amax aten.amin aten.argmax aten.any aten.all
            """,
        "computed": """
            Relu Gelu GeluV2 Tanh Abs Log Equal NotEqual Greater GreaterEqual Less LessEqual
            LogicalAnd LogicalOr LogicalNot Fill Range Add AddV2 Axpy Sub Mul Muls Adds Div RealDiv
            FloorDiv Mod FloorMod Neg Pow Square Sqrt Rsqrt Reciprocal Exp Sin Cos Sigmoid Silu
            Swish Softmax SoftmaxV2 RmsNorm AddRmsNorm DynamicQuant AscendQuant AscendQuantV2
            AscendDequant Complex Real Imag Maximum Minimum ClipByValue ClipByValueV2 Round Sign
            aten.relu aten.gelu aten.tanh aten.abs aten.log aten.eq aten.ne aten.gt aten.ge aten.lt
            aten.le aten.add aten.sub aten.rsub aten.mul aten.div aten.neg aten.pow aten.sqrt
            aten.rsqrt aten.reciprocal aten.exp aten.sin aten.cos aten.sigmoid aten.silu
            aten._softmax aten._safe_softmax aten.softmax aten.maximum aten.minimum aten.clamp
            aten.clamp_min aten.clamp_max aten.round aten.sign aten.logical_not aten.bitwise_not
            npu.npu_rms_norm npu.npu_add_rms_norm npu.npu_dynamic_quant npu.npu_quantize
            """,
    }.items()
    for name in listed.split()
}
_ATTENTION = re.compile(r"attention|indexer|ring_mla", re.IGNORECASE)


# by the name in a dump; in an FX graph without the overload
PROLOGUES = {f"npu.{name}": operator for name, operator in PROLOGS.items()} | {
    operator.ge_type: operator for operator in (V1, V2, V3_FUNCTIONAL)
}
# of other kernels: the result that is the cache afterwards, or None, and the place of the input
_KEY = f"npu.{key_operator.V1.name}"
_WRITTEN: dict[str, list[tuple[int | None, int]]] = {
    key_operator.V1.ge_type: [(0, 5), (1, 6)],
    _KEY: [(0, 5), (1, 6)],
    f"{_KEY}_v2": [(None, 5), (None, 6)],
    f"{_KEY}_v2_functional": [(2, 5), (3, 6)],
    "ScatterPaKvCache": [(0, 1), (1, 4)],
}


def plain(kind: str) -> str:
    """Returns an operator without its overload: "aten.slice" for "aten.slice.Tensor"."""
    return ".".join(kind.split(".")[:2])


def kind_of(operator: Operator) -> str:
    """Returns what becomes of the first operand, as listed above; "" for an unknown operator."""
    name, target = plain(operator.type), names.target(operator.type)
    if isinstance(target, OpOverload) and name not in _KINDS:
        first = schema_of(target).arguments[:1]
        if any(item.alias_info is not None and item.alias_info.is_write for item in first):
            return "in place"
    return "read" if _ATTENTION.search(name) else _KINDS.get(name, "")


def is_prologue(kind: str) -> bool:
    """Returns True for a prologue operator, with or without its overload."""
    return plain(kind) in PROLOGUES


def roles_of(operator: Operator) -> list[str]:
    """Returns the role of each input of a prologue operator: in an FX graph the schema's name."""
    if operator.type in PROLOGUES:
        return operator.roles or list(PROLOGUES[operator.type].ge_inputs)
    target = names.target(operator.type)
    args, kwargs = operator.call
    arguments = schema_of(target).arguments if isinstance(target, OpOverload) else ()
    places = [argument.name for argument in arguments] + [""] * len(args)
    named = [*zip(places, args, strict=False), *kwargs.items()]
    return [name for name, item in named for _ in edges_in(item)]


def written(operator: Operator) -> list[tuple[int | None, int]]:
    """Returns a pair for each cache that a kernel writes: the result that is the cache afterwards,
    or None, and the place of the input.
    """
    kind = plain(operator.type)
    if kind not in PROLOGUES:
        return _WRITTEN.get(kind, [])
    kernel = PROLOGUES[kind]
    results = kernel.ge_results if kind == kernel.ge_type else kernel.results
    return [
        (results.index(role) if role in results else None, place)
        for place, role in enumerate(roles_of(operator))
        if role in CACHES
    ]
