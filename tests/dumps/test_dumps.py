"""Readers of dumps: every form that torchair writes, and words for files that are none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mla_fusion.inspect import summarise
from mla_fusion.tools.dumps import Dump, DumpError, Edge, Value, read

FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name: str) -> Dump:
    return read(FIXTURES / name)


def shape_of_graph(dump: Dump) -> list[object]:
    return [
        (op.name, op.type, op.inputs, op.roles, op.outputs, sorted(map(str, op.attributes.items())))
        for op in dump.operators
    ]


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("fused.pbtxt", "text", 14),
        ("fused.txt", "text", 14),
        # TensorMove and Assign, which GE's passes removed, are in the listing
        ("fused_py.txt", "python", 18),
        ("fused_original.pbtxt", "text", 18),
        ("unfused.pbtxt", "text", 109),
        ("unfused_py.txt", "python", 81),
        ("dynamic.txt", "text", 18),
        ("fx_before.txt", "fx", 71),
        ("fx_strides.txt", "fx", 71),
        ("fx_after.txt", "fx", 20),
        ("fx_dynamic.txt", "fx", 75),
    ],
)
def test_format_and_size(name, kind, count):
    dump = fixture(name)
    assert (dump.format, len(dump.operators)) == (kind, count)


def test_both_forms_of_a_graph_read_the_same():
    assert shape_of_graph(fixture("fused.pbtxt")) == shape_of_graph(fixture("fused.txt"))


def test_the_kernel_with_roles_and_shapes():
    dump = fixture("fused.pbtxt")
    (kernel,) = dump.of_type("MlaPrologV3")
    given = {
        kernel.roles[i]: dump.value(edge)
        for i, edge in enumerate(kernel.inputs)
        if edge is not None
    }
    assert given["token_x"] == Value("bfloat16", (4, 1024), "ND", "NPU")
    assert given["kv_cache"].shape == (4, 128, 1, 512)
    assert given["cache_index"].dtype == "int64"
    assert kernel.inputs[12:] == [None] * 9
    assert kernel.attributes["cache_mode"] == "PA_BSND"
    assert kernel.attributes["rmsnorm_epsilon_cq"] == 1e-6


def test_generated_python_has_the_wiring_of_the_graph():
    graph, listing = fixture("fused_original.pbtxt"), fixture("fused_py.txt")
    wired = [
        {(op.name.partition(" at line ")[0], op.type, tuple(op.inputs)) for op in dump.operators}
        for dump in (graph, listing)
    ]
    assert wired[0] == wired[1]


def test_dynamic_dimensions():
    dump = fixture("dynamic.txt")
    (kernel,) = dump.of_type("MlaPrologV3")
    assert dump.value(kernel.inputs[0]).shape == (-1, 1024)
    assert dump.value(kernel.inputs[0]).bytes is None


def test_fx_listing():
    plain, strides = fixture("fx_before.txt"), fixture("fx_strides.txt")
    assert plain.by_name["arg9_1"].outputs == [Value("bfloat16", (4, 128, 1, 512))]
    assert strides.by_name["t"].outputs == [Value("bfloat16", (1024, 1536), "", "npu:0", (1, 1024))]
    mean = plain.by_name["mean"]
    assert (mean.type, mean.inputs, mean.call) == (
        "aten.mean.dim", [Edge("pow_1")], ((Edge("pow_1"), [-1], True), {}),
    )  # fmt: skip
    assert plain.by_name["getitem_1"].call == ((Edge("split_with_sizes"), 1), {})
    assert plain.by_name["matmul"].source.startswith("examples/fuse_your_model.py")
    assert plain.operators[-1].inputs == [Edge("transpose_1"), Edge("add_1")]


def test_graph_before_aot_is_read_too(tmp_path):
    file = tmp_path / "dynamo_out_graph.txt"
    file.write_text(
        "class GraphModule(torch.nn.Module):\n"
        '    def forward(self, L_x_: "f32[4]", L_i_: "i64[1]"):\n'
        "        l_x_ = L_x_\n"
        '        view: "f32[2, 2]" = l_x_.view(-1, 2)\n'
        "        view[L_i_] = 1.0;  setitem = view;  view = setitem = None\n"
        "        return (l_x_,)\n"
    )
    assert [op.type for op in read(file).operators][2:] == [
        "alias",
        "Tensor.view",
        "setitem",
        "alias",
        "output",
    ]


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"\x89PNG\r\n\x1a\n\xff", b"ir_version: 8\n", b"import torch\n"]
)
def test_foreign_files(tmp_path, content):
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    with pytest.raises(DumpError) as raised:
        read(file)
    assert raised.value.line >= 1


def test_an_edge_to_nowhere(tmp_path):
    file = tmp_path / "bad.pbtxt"
    file.write_text(
        (FIXTURES / "fused.pbtxt").read_text().replace('input: "arg2_1:0"', 'input: "absent:0"')
    )
    with pytest.raises(DumpError, match="reads 'absent', which the dump lacks") as raised:
        read(file)
    assert raised.value.line > 500


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent.pbtxt")


def test_a_circle_is_refused(tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text(
        'op { name: "a" type: "TensorMove" input: "b:0" }\n'
        'op { name: "b" type: "TensorMove" input: "a:0" }\n'
        'op { name: "n" type: "NetOutput" input: "a:0" }\n'
    )
    with pytest.raises(DumpError, match="read one another in a circle"):
        read(file)


def test_what_is_larger_than_any_dump_is_not_read(tmp_path):
    file = tmp_path / "graph.txt"
    with file.open("wb") as written:
        written.truncate((64 << 20) + 1)
    with pytest.raises(DumpError, match="larger than 64 MiB"):
        read(file)


def test_damage_is_refused_in_one_line_or_harmless(tmp_path):
    """300 draws of truncation and flipped bits, each read, summed up and explained."""
    contents = [path for path in sorted(FIXTURES.iterdir()) if len(path.read_bytes()) < 30_000]
    draw, refused = random.Random(20260101), 0
    for _ in range(300):
        path = draw.choice(contents)
        content = bytearray(path.read_bytes())
        content = content[: draw.randrange(len(content))] if draw.random() < 0.4 else content
        for _ in range(draw.choice((0, 1, 1, 2, 8)) if content else 0):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (file := tmp_path / path.name).write_bytes(content)
        try:
            str(summarise(read(file)))
        except DumpError as error:
            assert error.path == file and "\n" not in str(error)
            refused += 1
    assert refused > 100
