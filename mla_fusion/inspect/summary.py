"""What stands in a dump: operators, MLA prologues, copies of caches and weights, host inputs, dynamic dimensions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from mla_fusion.config import Config
from mla_fusion.dumps import FORMATS, Dump, Edge, Operator, Value, prologues
from mla_fusion.dumps.prologues import Prologue
from mla_fusion.inspect.explain import NotRebuilt, explain
from mla_fusion.page.page import size
from mla_fusion.report import text_tables

_INPUTS = frozenset(("Data", "RefData", "placeholder"))
_CONSTANTS = frozenset(("Const", "Constant", "ConstPlaceHolder"))
_HELD = _INPUTS | _CONSTANTS | {"get_attr"}
# Operators that make a second tensor of the same numbers.
_COPIES = {
    "TensorMove": "copy", "Assign": "write back", "Cast": "cast", "TransData": "format cast", "Transpose": "transpose",
    "TransposeD": "transpose", "aten.clone.default": "copy", "aten.contiguous.default": "copy",
    "aten._to_copy.default": "cast", "npu.npu_format_cast.default": "format cast",
}  # fmt: skip
_VIEWS = frozenset(
    """
    Reshape Identity Unsqueeze Squeeze ExpandDims Bitcast StridedSliceV2 aten.view.default aten.reshape.default
    aten.unsqueeze.default aten.squeeze.dim aten.slice.Tensor aten.alias.default aten.t.default
    aten.transpose.int aten.permute.default aten._unsafe_view.default aten.select.int
    """.split()
)
_PRODUCTS = frozenset(
    """
    MatMul MatMulV2 MatMulV3 BatchMatMul BatchMatMulV2 TransposeBatchMatMul QuantBatchMatmulV3 QuantBatchMatmulV4
    WeightQuantBatchMatmulV2 aten.mm.default aten.matmul.default aten.bmm.default aten.linear.default
    npu.npu_quant_matmul.default npu.npu_transpose_batchmatmul.default
    """.split()
)
_WRITERS = frozenset(
    """
    ScatterNdUpdate ScatterUpdate ScatterElements Scatter KvRmsNormRopeCache aten.index_put.default
    aten.index_copy.default npu.npu_scatter_nd_update.default
    """.split()
)


@dataclass(frozen=True)
class Copy:
    """A cache or weight that the graph copies at every run. ``bytes`` is None where the shape is not known.

    ``folded``: why GE may make no copy of it after all, "" where the copy is certain.
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
class Summary:
    """See the module. ``prologues`` are kernels; ``unfused`` what the pass says of prologues that are not."""

    dump: str
    graph: str
    operators: dict[str, int]
    prologues: list[Prologue]
    unfused: list[str]
    copies: list[Copy]
    host_inputs: dict[str, str]
    dynamic: dict[str, str]
    remarks: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The whole summary as JSON text."""
        return json.dumps(asdict(self), indent=2, default=str)

    def __str__(self) -> str:
        parts = [
            f"{self.dump}: {sum(self.operators.values())} operators",
            text_tables.render(("operator", "count"), list(self.operators.items())),
            *(f"MLA prologues, unfused\n{chr(10).join(self.unfused)}" for _ in self.unfused[:1]),
            *(_kernels(self.prologues) if self.prologues else ()),
            _copies(self.copies),
        ]
        if self.host_inputs:
            parts.append("Inputs on the host\n" + text_tables.render(("", ""), list(self.host_inputs.items())))
        if self.dynamic:
            parts.append("Dynamic inputs\n" + text_tables.render(("", ""), list(self.dynamic.items())))
        parts += [f"note: {remark}" for remark in self.remarks]
        return "\n\n".join(parts)


def summarise(dump: Dump) -> Summary:
    """What stands in a dump; the unfused prologues are those that ``explain`` finds, without running them.

    dump  as :func:`read` gives it
    """
    unfused, remarks = _unfused(dump)
    if dump.format == "python":
        remarks.append("this form is written while converting: GE's passes may have removed copies that stand here")
    inputs = [operator for operator in dump.operators if operator.type in _INPUTS]
    return Summary(
        dump=f"{dump.path} ({FORMATS[dump.format]})",
        graph=dump.graph,
        operators=dict(dump.counts.most_common()),
        prologues=prologues.find(dump),
        unfused=unfused,
        copies=find_copies(dump),
        host_inputs={op.name: str(op.outputs[0]) for op in inputs if op.outputs and _on_host(op.outputs[0])},
        dynamic={op.name: str(op.outputs[0]) for op in inputs if op.outputs and op.outputs[0].dynamic},
        remarks=remarks,
    )


def _unfused(dump: Dump) -> tuple[list[str], list[str]]:
    try:
        report = explain(dump, Config(verify="off"))
    except NotRebuilt as error:
        return [], [f"unfused prologues were not looked for: {error}"]
    lines = [f"  would fuse: {item.nodes[0]} .. {item.nodes[-1]}: {_dims(item.dims)}" for item in report.fused]
    lines += [f"  left: {', '.join(item.nodes[:2])}: [{item.code}] {item.message}" for item in report.rejected]
    return lines, [remark for remark in report.remarks if "fused already" not in remark]


def _dims(dims: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in dims.items())


def _on_host(value: Value) -> bool:
    return value.placement.upper().startswith("CPU") or value.dtype == "Sym"


# -- copies


def find_copies(dump: Dump) -> list[Copy]:
    """Copies of whole caches and weights, in order; other copies are nobody's loss."""
    caches = _caches(dump)
    found = []
    for operator in dump.operators:
        what = _COPIES.get(operator.type)
        edge = next((edge for edge in operator.inputs if edge is not None), None)
        if what is None or edge is None:
            continue
        held = _root(dump, edge)
        if held is None:
            continue
        role = "cache" if held.name in caches else "weight" if _is_weight(dump, operator, held) else ""
        if role == "cache" or (role == "weight" and what not in ("write back",)):
            bytes_ = _bytes(dump, operator, held)
            folded = _folded(dump, operator, held)
            found.append(Copy(operator.name, operator.type, what, held.name, role, bytes_, operator.source, folded))
    return found


def _folded(dump: Dump, operator: Operator, held: Operator) -> str:
    """GE computes what is made of constants when it compiles, and a product can read its operand transposed."""
    if held.type in _CONSTANTS:
        return "made of a constant when GE compiles"
    readers = [reader for reader, _ in dump.readers[operator.name]]
    if operator.type in ("Transpose", "TransposeD") and readers and all(one.type in _PRODUCTS for one in readers):
        return "part of the product that reads it"
    return ""


def _root(dump: Dump, edge: Edge) -> Operator | None:
    """The input or constant that the value is a view of."""
    operator = dump.producer(edge)
    for _ in range(len(dump.operators)):
        if operator.type in _HELD:
            return operator
        inner = operator.inputs[0] if operator.inputs else None
        if operator.type not in _VIEWS or inner is None:
            return None
        operator = dump.producer(inner)
    return None


def _caches(dump: Dump) -> set[str]:
    """Inputs that the graph writes: by Assign or copy_, by a scatter, by a prologue kernel."""
    found: set[str] = set()
    for operator in dump.operators:
        edges: list[Edge | None] = []
        if operator.type in ("Assign", "aten.copy_.default") or operator.type in _WRITERS - {"KvRmsNormRopeCache"}:
            edges = operator.inputs[:1]
        elif operator.type.startswith("KvRmsNormRopeCache") or "npu_kv_rmsnorm_rope_cache" in operator.type:
            edges = operator.inputs[5:7]
        elif prologues.is_prologue(operator.type):
            roles = prologues.roles_of(dump, operator)
            pairs = zip(roles, operator.inputs, strict=False)
            edges = [edge for role, edge in pairs if role in ("kv_cache", "kr_cache")]
        for edge in edges:
            held = _before_moves(dump, edge)
            if held is not None and held.type in _INPUTS:
                found.add(held.name)
    return found


def _before_moves(dump: Dump, edge: Edge | None) -> Operator | None:
    held = _root(dump, edge) if edge is not None else None
    if held is None and edge is not None:
        operator = dump.producer(edge)
        while operator.type in _VIEWS and operator.inputs and operator.inputs[0] is not None:
            operator = dump.producer(operator.inputs[0])
        if operator.type == "TensorMove" and operator.inputs and operator.inputs[0] is not None:
            return _root(dump, operator.inputs[0])
    return held


def _is_weight(dump: Dump, operator: Operator, held: Operator) -> bool:
    """A constant, or a static input of two dims or more, that meets a matrix product on its right side."""
    value = held.outputs[0] if held.outputs else Value()
    if value.shape is None or len(value.shape) < 2 or value.dynamic:
        return False
    stack, seen = [operator], {operator.name}
    while stack:
        for reader, place in dump.readers[stack.pop().name]:
            if reader.type in _PRODUCTS:
                if place == 1:
                    return True
            elif prologues.is_prologue(reader.type):
                roles = prologues.roles_of(dump, reader)
                if place < len(roles) and roles[place].startswith("weight"):
                    return True
            elif (reader.type in _VIEWS or reader.type in _COPIES) and reader.name not in seen:
                seen.add(reader.name)
                stack.append(reader)
    return False


def _bytes(dump: Dump, operator: Operator, held: Operator) -> int | None:
    """Of what is written: the result where the dump describes it, else the whole of what is copied."""
    result = operator.outputs[0].bytes if operator.outputs else None
    whole = held.outputs[0].bytes if held.outputs else None
    if operator.type == "Assign" or result is None:
        return whole
    return result


# -- text


def _kernels(found: list[Prologue]) -> list[str]:
    """Equal prologues once, with how many layers share them."""
    groups: dict[str, list[Prologue]] = {}
    for item in found:
        shapes = [(one.role, str(one.value)) for one in item.inputs]
        groups.setdefault(str((item.type, shapes, item.attributes)), []).append(item)
    return [_kernel(group) for group in groups.values()]


def _kernel(group: list[Prologue]) -> str:
    first = group[0]
    places = f"layer {first.place}" if len(group) == 1 else f"{len(group)} layers, {first.place} to {group[-1].place}"
    rows = [(item.role, item.producer, str(item.value)) for item in first.inputs]
    attributes = ", ".join(f"{name} {value}" for name, value in first.attributes.items())
    table = text_tables.render(("input", "from", "tensor"), rows)
    return f"{text_tables.short_name(first.type)} {first.name}: {places}\n{table}\n  {attributes}"


def _copies(found: list[Copy]) -> str:
    certain = [item for item in found if not item.folded]
    parts = [_copied("Copies at every run", certain)] if certain else ["No copies of caches or weights."]
    for why in dict.fromkeys(item.folded for item in found if item.folded):
        parts.append(_copied(f"Copies in this graph that GE may fold ({why})", [i for i in found if i.folded == why]))
    return "\n\n".join(parts)


def _copied(title: str, found: list[Copy]) -> str:
    groups: dict[tuple[str, str, str, int | None], list[Copy]] = {}
    for item in found:
        groups.setdefault((item.role, item.type, item.what, item.bytes), []).append(item)
    rows = [
        (role, type_, what, len(items), "?" if each is None else size(each), items[0].of)
        for (role, type_, what, each), items in groups.items()
    ]
    known = sum(item.bytes for item in found if item.bytes is not None)
    header = ("copied", "operator", "how", "count", "each", "first of")
    return f"{title}: {size(known)}\n{text_tables.render(header, rows)}"


