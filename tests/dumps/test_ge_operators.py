"""GE operators by themselves, read as ATen and run: the results are those of their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_fusion.compat import schema_of
from mla_fusion.tools.dumps import Dump, Edge, Operator, Value, ge_operators, names
from mla_fusion.tools.dumps.rebuild_ge import Rebuilder

X = torch.arange(24.0).reshape(2, 3, 4)


def run(kind: str, inputs: list[Any], **attributes: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The operator alone between its inputs and NetOutput; lists are constants."""
    operators, tensors, edges = [], [], []
    for index, given in enumerate(inputs):
        name = f"in{index}"
        edges.append(None if given is None else Edge(name))
        if isinstance(given, torch.Tensor):
            value = Value(str(given.dtype).removeprefix("torch."), tuple(given.shape))
            operators.append(Operator(name, "Data", outputs=[value]))
            tensors.append(given)
        elif given is not None:
            held = {"value": Value("int64", (len(given),)), "numbers": given}
            operators.append(Operator(name, "Const", attributes={"value": held}))
    operators.append(Operator("op", kind, edges, attributes=attributes))
    operators.append(Operator("out", "NetOutput", [Edge("op")]))
    rebuilder = Rebuilder(Dump(Path("graph"), "text", operators).checked())
    gm, _ = rebuilder.graph_module()
    assert not rebuilder.unmapped and not rebuilder.boxed and not rebuilder.lost
    return gm(*tensors)


def one(kind: str, inputs: list[Any], **attributes: Any) -> torch.Tensor:
    (result,) = run(kind, inputs, **attributes)
    return result


@pytest.mark.parametrize(
    ("begin", "end", "masks", "expected"),
    [
        ([0, 1, 0], [2, 3, 4], {}, X[:, 1:3]),
        ([1, 0, 0], [9, 2, 2], {"begin_mask": 2, "end_mask": 5}, X[1:, :2, :]),
        ([1, 0, 2], [2, 3, 3], {"shrink_axis_mask": 5}, X[1, :, 2]),
    ],
)
def test_strided_slice(begin, end, masks, expected):
    assert torch.equal(one("StridedSlice", [X, begin, end, [1] * 3], **masks), expected)


def test_what_strided_slice_cannot_be_is_left_out():
    with pytest.raises(AssertionError):
        run("StridedSlice", [X, [0], [1], [1]], new_axis_mask=1)


def test_scatter_update_writes_rows_of_the_first_axis():
    rows, index = torch.full((2, 3, 4), -1.0), torch.tensor([1, 0])
    var = X.clone()
    run("ScatterUpdate", [var, index, rows])
    assert torch.equal(var, rows[[1, 0]])


def test_scatter_elements():
    index = torch.zeros(1, 3, 4, dtype=torch.int64)
    var = X.clone()
    run("ScatterElements", [var, index, -X[:1]], axis=0)
    assert torch.equal(var, torch.cat([-X[:1], X[1:]]))


def test_dynamic_quant_in_its_symmetric_form():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = torch.ops.npu.npu_dynamic_quant(x)[0]
    assert torch.equal(one("DynamicQuantV2", [x], is_symmetrical=True, dst_type=2), wanted)
    assert torch.equal(one("DynamicQuant", [x]), wanted)


def test_quant_matmul_with_its_sides_turned():
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-9, 9, shape, dtype=torch.int8, generator=generator)
        for shape in ((3, 64), (5, 64))
    )
    scale, token = torch.rand(5, generator=generator), torch.rand(3, generator=generator)
    found = one(
        "QuantBatchMatmulV3", [x, weight, scale, None, None, token], dtype=27, transpose_x2=True
    )
    wanted = torch.ops.npu.npu_quant_matmul(
        x, weight.t(), scale, pertoken_scale=token, output_dtype=torch.bfloat16
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "expected"),
    [
        ("Muls", [X], {"value": 2.0}, 2 * X),
        ("Adds", [X], {"value": 0.5}, X + 0.5),
        ("LpNormV2", [X], {"p": 2, "axes": [-1], "keepdim": True}, X.norm(dim=-1, keepdim=True)),
        ("RepeatInterleave", [X, [2]], {"axis": 2}, X.repeat_interleave(2, 2)),
        ("Tile", [X, [1, 1, 3]], {}, X.repeat(1, 1, 3)),
        ("ClipByValueV2", [X, [2], [5]], {}, X.clamp(2, 5)),
        ("GatherV2", [X, torch.tensor([2, 0]), [1]], {}, X[:, [2, 0]]),
    ],
)
def test_plain_operators(kind, inputs, attributes, expected):
    assert torch.equal(one(kind, inputs, **attributes), expected)


def test_rows_of_the_table_name_operators():
    for row in ge_operators.CALLS.strip().splitlines():
        _, target, *words = row.split()
        schema = schema_of(names.target(target))
        assert len(words) <= len(schema.arguments), row
        for argument in schema.arguments[len(words) :]:
            assert argument.has_default_value(), row
