"""Copies of whole caches and weights: each cache followed from where the graph leaves it back to the input that it was.

A cache is an input of the graph that is written (by a kernel, a scatter, ``copy_`` or Assign), or returned with other
rows in it. On the way back an operator keeps the memory, or makes a second tensor of the same numbers: a copy. One that
is neither is named, and nothing is said of that cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.dumps import Dump, Edge, Operator, Value, names, prologues
from mla_fusion.meta.prolog import CACHES

INPUTS = frozenset(("Data", "RefData", "placeholder"))
_CONSTANTS = frozenset(("Const", "Constant", "ConstPlaceHolder"))
_HELD = INPUTS | _CONSTANTS | {"get_attr"}
_ENDS = frozenset(("NetOutput", "output"))
_BACK = frozenset(("Assign", "aten.copy_.default"))  # (input, value)


def _names(text: str) -> frozenset[str]:
    """GE operators as they are; of ATen ones each overload, see :func:`_plain`."""
    return frozenset(text.split())


# No second tensor: another shape, or some of the elements.
_VIEWS = _names(
    """
    Reshape Unsqueeze Squeeze ExpandDims Bitcast aten.view aten.reshape aten._unsafe_view aten.unsqueeze aten.squeeze
    aten.alias aten.detach aten.flatten aten.unflatten aten.lift_fresh aten.view_as_real aten.view_as_complex
    """
)
_PARTS = _names(
    """
    StridedSlice StridedSliceV2 StridedSliceD Slice SliceD GatherV2 Gather SplitV Split SplitD Unpack
    aten.slice aten.select aten.narrow aten.split aten.split_with_sizes aten.unbind aten.chunk aten.index_select
    aten.index aten.diagonal getitem
    """
)
_TURNED = _names("aten.t aten.transpose aten.permute aten.expand aten.movedim aten.swapaxes")  # views of FX alone
# A second tensor of the same numbers.
_COPIES = {
    "TensorMove": "copy", "Identity": "copy", "Cast": "cast", "TransData": "format cast", "Transpose": "transpose",
    "TransposeD": "transpose", "Pad": "pad", "PadV2": "pad", "PadV3": "pad", "BroadcastTo": "copy", "Tile": "copy",
    "aten.clone": "copy", "aten.contiguous": "copy", "aten.lift_fresh_copy": "copy",
    "aten._to_copy": "cast", "npu.npu_dtype_cast": "cast", "npu.npu_format_cast": "format cast",
    "npu._npu_dtype_cast": "cast", "aten.constant_pad_nd": "pad", "aten.repeat": "copy",
    "aten.repeat_interleave": "copy",
}  # fmt: skip
# Put together from parts of the old one and new rows.
_JOINED = _names("ConcatV2 ConcatD Concat ConcatV2D Pack aten.cat aten.concat aten.concatenate aten.stack")
_PICKED = _names("Select SelectV2 MaskedFill MaskedScatter aten.where aten.masked_fill aten.masked_scatter")
# Writes that return the whole, without changing what they are given.
_REBUILT = _names(
    """
    SliceWrite TensorScatterUpdate aten.slice_scatter aten.select_scatter aten.as_strided_scatter
    aten.diagonal_scatter aten.index_put aten._unsafe_index_put aten.index_copy aten.index_add aten.scatter
    aten.scatter_add aten.index_fill aten.fill npu.npu_scatter_nd_update npu.npu_scatter_pa_kv_cache_functional
    npu.scatter_update
    """
)
# Writes into the memory that they are given first.
_IN_PLACE = _names(
    """
    ScatterNdUpdate ScatterUpdate Scatter ScatterElements InplaceUpdate InplaceAdd InplaceIndexAdd
    aten.index_put_ aten._index_put_impl_ aten.index_copy_ aten.scatter_ aten.index_add_ aten.masked_fill_
    aten.masked_scatter_ aten.fill_ aten.zero_ npu.npu_scatter_nd_update_ npu.scatter_update_
    """
)
_PRODUCTS = _names(
    """
    MatMul MatMulV2 MatMulV3 BatchMatMul BatchMatMulV2 TransposeBatchMatMul QuantBatchMatmulV3 QuantBatchMatmulV4
    WeightQuantBatchMatmulV2 aten.mm aten.matmul aten.bmm aten.linear aten.addmm npu.npu_quant_matmul
    npu.npu_transpose_batchmatmul
    """
)
_KEY_OPERATORS = ("KvRmsNormRopeCache", "npu.npu_kv_rmsnorm_rope_cache")


@dataclass(frozen=True)
class Copy:
    """A cache or weight that the graph copies at every run. ``bytes`` is None where the shape is not known.

    role    "cache", "cache, to read it" (on no way to an output), or "weight"
    folded  why GE may make no copy of it after all, "" where the copy is certain
    """

    operator: str
    type: str
    what: str
    of: str
    role: str
    bytes: int | None
    source: str = ""
    folded: str = ""


@dataclass
class Copies:
    """``found``: in order; ``followed``: caches from input to output; ``lost``: of the others, by which operator."""

    found: list[Copy] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    weights: int = 0


def find_copies(dump: Dump) -> Copies:
    """Copies of whole caches and of weights; other copies are nobody's loss."""
    found = Copies()
    made: dict[tuple[str, str], Copy] = {}
    for cache in _caches(dump):
        path = _Path(dump, cache)
        if path.lost:
            found.lost[cache.name] = ", ".join(path.lost)
        elif path.is_cache:
            found.followed.append(cache.name)
        if path.is_cache:
            made |= {(copy.operator, copy.of): copy for copy in path.copies}
    weights = set()
    for operator in dump.operators:
        edge = next((edge for edge in operator.inputs if edge is not None), None)
        held, what = _root(dump, edge), _COPIES.get(_plain(operator.type))
        if held is None or held.name in found.lost:
            continue
        role = "cache, to read it" if held.name in found.followed else "weight"
        if role == "weight" and not _is_weight(dump, operator, held):
            continue
        weights |= {held.name} if role == "weight" else set()
        if what is not None and (role == "weight" or _root(dump, edge, whole=True) is held):
            made.setdefault((operator.name, held.name), _copy(dump, operator, held, what, role))
    place = {operator.name: index for index, operator in enumerate(dump.operators)}
    found.found = sorted(made.values(), key=lambda copy: place[copy.operator])
    found.weights = len(weights)
    return found


class _Path:
    """One input, and all that leads from it to where the graph writes or returns it.

    is_cache   is it written or returned at all?
    copies     on the way
    lost       operators that are not known, on the way
    """

    def __init__(self, dump: Dump, cache: Operator) -> None:
        self.dump, self.cache = dump, cache
        self.below = _behind(dump, cache)
        self.copies: list[Copy] = []
        self.lost: list[str] = []
        self.is_cache = False
        self._seen: set[Edge] = set()
        for operator in dump.operators:
            if operator.name in self.below:
                self._ends(operator)

    def _ends(self, operator: Operator) -> None:
        """Where the operator writes the input, or returns it, what it writes is followed back."""
        kind = _plain(operator.type)
        if operator.type in _BACK and self._is_it(operator.inputs[0]):
            self.is_cache = True
            if _root(self.dump, operator.inputs[0], whole=True) is self.cache:  # else some rows of it are written
                self.copies.append(_copy(self.dump, operator, self.cache, "write back", "cache"))
                self._follow(operator.inputs[1])
        elif kind in _IN_PLACE and self._is_it(operator.inputs[0]):
            self.is_cache = True
        elif kind in _ENDS:
            for edge in operator.inputs:
                if edge is not None and self._is_returned(edge):
                    self.is_cache = True
                    self._follow(edge)
        elif given := _written(self.dump, operator):
            self.is_cache = self.is_cache or any(self._is_it(edge) for _, edge in given)
        elif not _is_known(kind) and any(map(self._is_it, operator.inputs)) and self._may_write(operator):
            self.is_cache = True
            self.lost.append(f"{operator.type} {operator.name}")

    def _may_write(self, operator: Operator) -> bool:
        """Does one result look like the input as an operator in place gives it out?"""
        target = names.target(operator.type) if self.dump.is_fx else None
        if isinstance(target, OpOverload) and not schema_of(target).is_mutable:
            return False
        whole = self.cache.outputs[0] if self.cache.outputs else Value()
        return any((value.bytes, value.dtype) == (whole.bytes, whole.dtype) for value in operator.outputs)

    def _is_it(self, edge: Edge | None) -> bool:
        return _root(self.dump, edge) is self.cache

    def _is_returned(self, edge: Edge) -> bool:
        """Is this output the input with other rows in it? (The hidden state behind a layer is not that of before.)"""
        whole, value = self.cache.outputs[0] if self.cache.outputs else Value(), self.dump.value(edge)
        if whole.shape is None or (value.shape, value.dtype) != (whole.shape, whole.dtype):
            return False
        if self.dump.producer(edge) is self.cache:
            return False
        probe = _Back(self.dump, self.cache, self.below)
        probe.follow(edge)
        return bool(probe.arrived or probe.unknown) and not probe.computed

    def _follow(self, edge: Edge | None) -> None:
        if edge is None:
            return
        back = _Back(self.dump, self.cache, self.below, self._seen)
        back.follow(edge)
        self.copies += back.copies
        self.lost += [name for name in back.unknown if name not in self.lost]


class _Back:
    """Upwards from a value to the input that it was.

    arrived   is it reached by operators that are known?
    computed  does a product, or another computation, lie between?
    unknown   types of operators of which neither is known
    """

    def __init__(self, dump: Dump, cache: Operator, below: set[str], seen: set[Edge] | None = None) -> None:
        self.dump, self.cache, self.below = dump, cache, below
        self.copies: list[Copy] = []
        self.unknown: list[str] = []
        self.arrived = self.computed = False
        self._seen = set() if seen is None else seen

    def follow(self, edge: Edge) -> None:
        stack = [edge]
        while stack:
            current = stack.pop()
            if current in self._seen:
                continue
            self._seen.add(current)
            operator = self.dump.producer(current)
            if operator is self.cache:
                self.arrived = True
            elif operator.name in self.below:
                stack += self._above(operator, current)

    def _above(self, operator: Operator, edge: Edge) -> Iterator[Edge]:
        """What the value is made of, as far as that is of the input."""
        kind = _plain(operator.type)
        inputs = [read for read in operator.inputs if read is not None]
        if kind in _VIEWS or kind in _PARTS or kind in _IN_PLACE or (self.dump.is_fx and kind in _TURNED):
            yield inputs[0]
        elif kind in _COPIES:
            self._copied(operator, _COPIES[kind])
            yield inputs[0]
        elif kind in _REBUILT or kind == "aten.copy":  # the latter is of rows that take the place of others
            if kind in _REBUILT:
                self._copied(operator, "rebuilt")
            yield from inputs
        elif kind in _JOINED or kind in _PICKED:
            self._copied(operator, "rebuilt")
            yield from (read for read in inputs if read.producer in self.below or self._is_cache(read))
        elif given := [read for index, read in _written(self.dump, operator) if index in (edge.index, None)]:
            if "functional" in operator.type:
                self._copied(operator, "rebuilt")
            yield from (read for read in given if read is not None)
        elif _computes(kind):
            self.computed = True
        else:
            self.unknown.append(f"{operator.type} {operator.name}")

    def _is_cache(self, edge: Edge) -> bool:
        return self.dump.producer(edge) is self.cache

    def _copied(self, operator: Operator, what: str) -> None:
        self.copies.append(_copy(self.dump, operator, self.cache, what, "cache"))


# What computes other numbers: no cache comes out of it.
_COMPUTES = _names(
    """
    Relu Gelu GeluV2 Tanh Abs Log Equal Greater Less LogicalAnd Shape Fill Range
    Add AddV2 Sub Mul Muls Div RealDiv Neg Pow Square Sqrt Rsqrt Exp Sigmoid Silu Swish Softmax SoftmaxV2 ReduceMean
    ReduceMeanD ReduceSum ReduceSumD ReduceMax RmsNorm AddRmsNorm DynamicQuant AscendQuant AscendQuantV2 Einsum
    FusedInferAttentionScore PromptFlashAttention IncreFlashAttention Complex Real Imag Maximum Minimum ClipByValue
    aten.relu aten.gelu aten.tanh aten.abs aten.log aten.eq aten.gt aten.lt aten.sym_size aten.new_empty aten.empty_like
    aten.new_zeros aten.zeros_like aten.new_full aten.full_like
    aten.add aten.sub aten.mul aten.div aten.neg aten.pow aten.sqrt aten.rsqrt aten.exp aten.sigmoid aten.silu
    aten._softmax aten._safe_softmax aten.softmax aten.mean aten.sum aten.amax aten.einsum aten.maximum aten.minimum
    aten.clamp aten.round npu.npu_rms_norm npu.npu_add_rms_norm npu.npu_dynamic_quant npu.npu_quantize
    npu.npu_fused_infer_attention_score aten.scaled_dot_product_attention
    """
)


def _is_known(kind: str) -> bool:
    moved = (_VIEWS, _PARTS, _COPIES, _JOINED, _PICKED, _REBUILT, _IN_PLACE, _TURNED, _BACK, _ENDS)
    return any(kind in names for names in moved) or kind == "aten.copy" or _computes(kind)


def _computes(kind: str) -> bool:
    return kind.removesuffix("_") in _COMPUTES or kind in _PRODUCTS


def _plain(kind: str) -> str:
    """The operator without its overload: "aten.slice" of "aten.slice.Tensor"."""
    parts = kind.split(".")
    if kind.startswith("<built-in function getitem"):
        return "getitem"
    return ".".join(parts[:2]) if len(parts) > 2 else kind


def _behind(dump: Dump, start: Operator) -> set[str]:
    """The operators that depend on one."""
    found: set[str] = set()
    stack = [start.name]
    while stack:
        for reader, _ in dump.readers[stack.pop()]:
            if reader.name not in found:
                found.add(reader.name)
                stack.append(reader.name)
    return found


def _caches(dump: Dump) -> list[Operator]:
    """Inputs of two dims or more, which something may write."""
    inputs = (operator for operator in dump.operators if operator.type in INPUTS)
    return [one for one in inputs if not one.outputs or one.outputs[0].shape is None or len(one.outputs[0].shape) > 1]


def _written(dump: Dump, operator: Operator) -> list[tuple[int | None, Edge | None]]:
    """The caches that a kernel is given to write, each with the result that it is afterwards.

    None for a result that its reader picks by an operator of its own, as in FX.
    """
    if prologues.is_prologue(operator.type):
        pairs = zip(prologues.roles_of(dump, operator), operator.inputs, strict=False)
        return [
            (None if dump.is_fx else prologues.result_of(operator.type, role), edge)
            for role, edge in pairs
            if role in CACHES
        ]
    if operator.type.startswith(_KEY_OPERATORS):
        return [(None, edge) for edge in operator.inputs[5:7]]
    if operator.type == "ScatterPaKvCache":
        return [(0, operator.inputs[1]), (1, operator.inputs[4])]
    return []


def _copy(dump: Dump, operator: Operator, held: Operator, what: str, role: str) -> Copy:
    """Of what is written: the result where the dump describes it, else the whole of what is copied."""
    result = operator.outputs[0].bytes if operator.outputs else None
    whole = held.outputs[0].bytes if held.outputs else None
    count = whole if operator.type == "Assign" or result is None or _written(dump, operator) else result
    folded = _folded(dump, operator, held)
    return Copy(operator.name, operator.type, what, held.name, role, count, operator.source, folded)


def _folded(dump: Dump, operator: Operator, held: Operator) -> str:
    """GE computes what is made of constants when it compiles, and a product can read its operand transposed."""
    if held.type in _CONSTANTS:
        return "made of a constant when GE compiles"
    readers = [reader for reader, _ in dump.readers[operator.name]]
    in_product = bool(readers) and all(_plain(one.type) in _PRODUCTS for one in readers)
    if operator.type in ("Transpose", "TransposeD") and in_product:
        return "part of the product that reads it"
    return "an Identity, which GE drops where it can" if operator.type == "Identity" else ""


def _root(dump: Dump, edge: Edge | None, whole: bool = False) -> Operator | None:
    """The input or constant that the value is a view of; ``whole``: of all of its elements."""
    if edge is None:
        return None
    operator = dump.producer(edge)
    for _ in range(len(dump.operators)):
        if operator.type in _HELD:
            return operator
        inner = operator.inputs[0] if operator.inputs else None
        kind = _plain(operator.type)
        is_view = kind in _VIEWS or kind in _TURNED or (kind in _PARTS and kind != "getitem" and not whole)
        if not is_view or inner is None:
            return None
        operator = dump.producer(inner)
    return None


def _is_weight(dump: Dump, operator: Operator, held: Operator) -> bool:
    """A constant, or a static input of two dims or more, that meets a matrix product on its right side."""
    value = held.outputs[0] if held.outputs else Value()
    if value.shape is None or len(value.shape) < 2 or value.dynamic:
        return False
    stack, seen = [operator], {operator.name}
    while stack:
        for reader, place in dump.readers[stack.pop().name]:
            kind = _plain(reader.type)
            if kind in _PRODUCTS:
                if place == 1:
                    return True
            elif prologues.is_prologue(reader.type):
                roles = prologues.roles_of(dump, reader)
                if place < len(roles) and roles[place].startswith("weight"):
                    return True
            elif (kind in _VIEWS or kind in _PARTS or kind in _TURNED or kind in _COPIES) and reader.name not in seen:
                seen.add(reader.name)
                stack.append(reader)
    return False
