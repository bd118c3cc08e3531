"""Readers of dumps: every form that torchair writes, and words for files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_fusion.tools.dumps import Dump, DumpError, Edge, Value, read, recognise
from mla_fusion.tools.dumps.fx_text import annotated
from mla_fusion.tools.dumps.prototext import parse, unescape

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(path.name for path in FIXTURES.iterdir())


def fixture(name: str) -> Dump:
    return read(FIXTURES / name)


def shape_of_graph(dump: Dump) -> list[object]:
    return [
        (
            op.name,
            op.type,
            op.inputs,
            op.roles,
            op.results,
            op.outputs,
            sorted(map(str, op.attributes.items())),
        )
        for op in dump.operators
    ]


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("fused.pbtxt", "pbtxt", 14),
        ("fused.txt", "text", 14),
        # TensorMove and Assign, which GE's passes removed, are in the listing
        ("fused_py.txt", "python", 18),
        ("fused_original.pbtxt", "pbtxt", 18),
        ("unfused.pbtxt", "pbtxt", 109),
        ("unfused_py.txt", "python", 111),
        ("dynamic.txt", "text", 18),
        ("ge_proto_fused.txt", "text", 14),
        ("ge_proto_unfused.txt", "text", 109),
        ("ge_onnx_fused.pbtxt", "onnx", 14),
        ("ge_onnx_unfused.pbtxt", "onnx", 109),
        ("fx_before.txt", "fx", 71),
        ("fx_strides.txt", "fx", 71),
        ("fx_after.txt", "fx", 20),
        ("fx_dynamic.txt", "fx", 75),
    ],
)
def test_format_and_size(name, kind, count):
    dump = fixture(name)
    assert (dump.format, len(dump.operators)) == (kind, count)
    assert set(FILES) == {path.name for path in FIXTURES.iterdir()}


def test_both_forms_of_a_graph_read_the_same():
    assert shape_of_graph(fixture("fused.pbtxt")) == shape_of_graph(fixture("fused.txt"))


def test_ges_own_forms_read_the_same():
    text = fixture("unfused.pbtxt")
    assert shape_of_graph(fixture("ge_proto_unfused.txt")) == shape_of_graph(text)
    onnx = fixture("ge_onnx_unfused.pbtxt")
    for ours, theirs in zip(onnx.operators, text.operators, strict=True):
        assert (ours.name, ours.type, ours.inputs) == (theirs.name, theirs.type, theirs.inputs)
        assert ours.roles == (theirs.roles if theirs.inputs else [])
        assert [value.dtype for value in ours.outputs] == [value.dtype for value in theirs.outputs]
    constants = [
        [op.attributes["value"]["numbers"] for op in dump.of_type("Const")] for dump in (onnx, text)
    ]
    assert constants[0] == constants[1]
    inputs = [[op.outputs for op in dump.of_type("Data")] for dump in (onnx, text)]
    assert inputs[0] == inputs[1]


def test_an_onnx_dump_without_strings_still_has_roles_and_shapes():
    (kernel,) = fixture("ge_onnx_fused.pbtxt").of_type("MlaPrologV3")
    assert kernel.roles[:5] == [
        "token_x",
        "weight_dq",
        "weight_uq_qr",
        "weight_uk",
        "weight_dkv_kr",
    ]
    assert "cache_mode" not in kernel.attributes and kernel.attributes[
        "rmsnorm_epsilon_cq"
    ] == pytest.approx(1e-6)


def test_subgraphs_keep_their_names_apart(tmp_path):
    op = 'op { name: "x" type: "Data" } op { name: "out" type: "NetOutput" input: "x:0" }'
    file = tmp_path / "ge_proto.txt"
    file.write_text(
        f'name: "model"\ngraph {{ name: "root" {op} }}\ngraph {{ name: "branch" {op} }}\n'
    )
    dump = read(file)
    assert dump.graph == "root" and list(dump.by_name) == ["x", "out", "branch/x", "branch/out"]
    node = (
        'node { name: "x" op_type: "ge:Data" } node { input: "x:0" name: "out" op_type: '
        '"ge:NetOutput" }'
    )
    branch = (
        f'node {{ name: "branch" op_type: "subgraph" attribute {{ name: "graph" g {{ {node} }} '
        f"type: GRAPH }} }}"
    )
    file.write_text(f'ir_version: 6\ngraph {{ {node} {branch} name: "root" }}\n')
    dump = read(file)
    assert dump.graph == "root" and list(dump.by_name) == ["x", "out", "branch/x", "branch/out"]
    assert dump.by_name["branch/out"].inputs == [Edge("branch/x")]


def test_an_onnx_model_of_no_ge_graph_is_refused(tmp_path):
    file = tmp_path / "model.pbtxt"
    file.write_text('ir_version: 8\ngraph {\n  node { name: "a" op_type: "Relu" }\n}\n')
    with pytest.raises(DumpError, match="an ONNX model, not a GE graph: op_type 'Relu'"):
        read(file)


def test_a_truncated_onnx_dump_is_told(tmp_path):
    text = (FIXTURES / "ge_onnx_fused.pbtxt").read_text()
    file = tmp_path / "cut.pbtxt"
    file.write_text(text[: text.rindex("name: ")])
    with pytest.raises(DumpError, match="the file ends inside 'graph' of line 4: truncated"):
        read(file)


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
        {(op.name, op.type, tuple(op.inputs)) for op in dump.operators} for dump in (graph, listing)
    ]
    assert wired[0] == wired[1]


def test_generated_python_holds_constants_and_sources():
    dump = fixture("unfused_py.txt")
    mean = next(dump.of_type("ReduceMean"))
    axes = dump.producer(mean.inputs[1])  # type: ignore[arg-type]
    assert axes.attributes["value"]["numbers"] == [-1]
    assert mean.source.startswith("examples/fuse_your_model.py:24 in forward: return (high *")
    split = next(dump.of_type("SplitV"))
    assert [op.type for op, _ in dump.readers[split.name]] == ["Transpose", "SplitV", "Mul"]


def test_constants_read_as_the_model_wrote_them():
    dump = fixture("unfused.pbtxt")
    numbers = [op.attributes["value"]["numbers"] for op in dump.of_type("Const")]
    assert [1e-6] in numbers and [1, 0] in numbers


def test_dynamic_dimensions():
    dump = fixture("dynamic.txt")
    (kernel,) = dump.of_type("MlaPrologV3")
    symbols = [dump.value(edge).shape for edge in kernel.inputs[:1]]
    assert symbols == [("s77", 1024)]
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


def test_what_logs_and_inductor_write_around_a_listing(tmp_path):
    text = (FIXTURES / "fx_before.txt").read_text()
    for name in ("<lambda>", "GraphModule"):
        head = (
            "I1 aot [0/0] TRACED GRAPH\n ===== Forward graph 0 =====\n "
            f"/lib/fx/_lazy_graph_module.py class {name}("
        )
        logged = tmp_path / "log.txt"
        logged.write_text(text.replace("class GraphModule(", head) + "\n\n\nafter\n")
        assert len(read(logged).operators) == 71


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("bf16[8, 1024][1024, 1]cpu", Value("bfloat16", (8, 1024), "", "cpu", (1024, 1))),
        ("f32[]", Value("float32", ())),
        ("i64[s0]npu:0", Value("int64", ("s0",), "", "npu:0")),
        ("bf16[2*s0, Max(1, s1)]", Value("bfloat16", ("2*s0", "Max(1, s1)"))),
        ("Sym(s0 + 1)", Value("Sym", ("s0 + 1",))),
        ("something else", Value()),
    ],
)
def test_annotations(text, value):
    assert annotated(text) == value


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


def test_size_in_bytes():
    assert Value("bfloat16", (4, 128)).bytes == 1024
    assert Value("int4", (3,)).bytes == 2
    assert Value("float8_e4m3fn", (3,)).bytes == 3
    assert Value("bfloat16", (-1, 4)).bytes is Value("", (4,)).bytes is Value("int8").bytes is None


def test_prototext():
    found = parse('a: 1 b { c: "x\\"\\n\\101" d: DT_BF16 }  # note\nb: { c: \'y\' }\nf: -1e-6\n')
    assert [(name, value) for name, value, _ in found if name != "b"] == [("a", 1), ("f", -1e-6)]
    assert [value[0][1] for name, value, _ in found if name == "b"] == ['x"\nA', "y"]
    assert unescape(r"\377\x41") == "\xffA"


@pytest.mark.parametrize(
    ("name", "keep", "message"),
    [
        ("fused.pbtxt", 0.5, "the file ends inside"),
        ("unfused.pbtxt", 0.8, None),
        ("fused.txt", 0.3, "not protobuf text|the file ends inside"),
        ("fused_py.txt", 0.9, None),
        ("fx_before.txt", 0.7, None),
    ],
)
def test_truncated(tmp_path, name, keep, message):
    text = (FIXTURES / name).read_text()
    file = tmp_path / name
    file.write_text(text[: int(len(text) * keep)])
    with pytest.raises(DumpError, match=message) as raised:
        read(file)
    error = raised.value
    assert error.path == file and error.line > 1 and error.offset > 100 and str(file) in str(error)


def test_truncated_between_operators(tmp_path):
    text = (FIXTURES / "fused.pbtxt").read_text()
    file = tmp_path / "cut.pbtxt"
    file.write_text(
        text[: text.index('node {\n    name: "NetOutput"')] if "NetOutput" in text else ""
    )
    with pytest.raises(DumpError, match="no NetOutput: truncated"):
        read(file)


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


def test_recognised_by_content():
    for name in FILES:
        assert recognise((FIXTURES / name).read_text()) == fixture(name).format
