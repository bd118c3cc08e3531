"""Summaries, differences and exports of dumps, and their commands."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from mla_fusion.inspect import Dump, ExportError, diff, export, read, summarise
from mla_fusion.tools import cli

FIXTURES = Path(__file__).parents[1] / "dumps" / "fixtures"
KV, KR = 4 * 128 * 512 * 2, 4 * 128 * 64 * 2


def fixture(name: str) -> Dump:
    return read(FIXTURES / name)


# -- inspect


@pytest.mark.parametrize(
    "name", ["fused.pbtxt", "fused.txt", "fused_original.pbtxt", "fused_py.txt", "fx_after.txt"]
)
def test_the_kernel_of_every_form(name):
    (kernel,) = summarise(fixture(name)).prologues
    shapes = {item.role: str(item.value) for item in kernel.inputs}
    assert shapes["token_x"] == "bfloat16[4, 1024]"
    assert shapes["weight_uq_qr"] == "bfloat16[1536, 384]"
    assert shapes["kv_cache"] == "bfloat16[4, 128, 1, 512]"
    assert shapes["cache_index"] == "int64[4]"
    assert (kernel.attributes["cache_mode"], kernel.attributes["weight_quant_mode"]) == (
        "PA_BSND",
        0,
    )
    assert kernel.attributes["rmsnorm_epsilon_ckv"] == 1e-6


def test_copies_of_caches():
    found = summarise(fixture("fused_original.pbtxt")).copies
    assert [(copy.type, copy.of, copy.role, copy.bytes) for copy in found] == [
        ("TensorMove", "arg9_1", "cache", KV),
        ("TensorMove", "arg11_1", "cache", KR),
        ("Assign", "arg9_1", "cache", KV),
        ("Assign", "arg11_1", "cache", KR),
    ]
    assert summarise(fixture("fused.pbtxt")).copies == []
    text = str(summarise(fixture("fused.pbtxt")))
    assert "Followed from input to output, and not copied: arg9_1, arg11_1." in text


def test_unfused_prologues_are_named():
    assert "would fuse 1, left 0" in str(summarise(fixture("fx_before.txt")))


def test_unknown_operators_are_named(tmp_path):
    file, text = tmp_path / "graph.txt", (FIXTURES / "fx_before.txt").read_text()
    file.write_text(text.replace("torch.ops.aten.rsqrt.default", "torch.ops.mylib.rms.default"))
    found = summarise(read(file))
    assert found.unknown == {"mylib.rms.default": 2}
    assert "Operators that the pass does not know\n  mylib.rms.default  2" in str(found)
    assert summarise(fixture("fx_before.txt")).unknown == {}
    assert summarise(fixture("fx_after.txt")).unknown == {}


def test_dynamic_inputs():
    found = summarise(fixture("fx_dynamic.txt"))
    assert found.dynamic["arg5_1"] == "bfloat16[s77, 1024]"


def test_summary_as_json():
    data = json.loads(summarise(fixture("fused_original.pbtxt")).to_json())
    assert data["operators"]["MlaPrologV3"] == 1 and data["copies"][0]["bytes"] == KV


# -- diff


@pytest.mark.parametrize(
    ("first", "second"),
    [("fused.pbtxt", "fused.txt"), ("fx_before.txt", "fx_strides.txt"), ("fused.txt", "fused.txt")],
)
def test_equal_graphs(first, second):
    assert diff(fixture(first), fixture(second)).equal


def test_names_count_for_nothing(tmp_path):
    file = tmp_path / "renamed.pbtxt"
    text = (FIXTURES / "unfused.pbtxt").read_text()
    for name in ("MatMul_1", "Reshape_3", "arg4_1", "Const_7", "Mul_2"):
        text = text.replace(f'"{name}"', f'"other{name}"').replace(f'"{name}:', f'"other{name}:')
    file.write_text(text)
    assert diff(fixture("unfused.pbtxt"), read(file)).equal


def test_what_passes_removed():
    found = diff(fixture("fused_original.pbtxt"), fixture("fused.pbtxt"))
    assert sorted(change.type for change in found.removed) == [
        "Assign",
        "Assign",
        "TensorMove",
        "TensorMove",
    ]
    assert found.added == [] and found.rewired == [("NetOutput", "NetOutput", "NetOutput")]


def test_a_changed_attribute_and_a_swapped_input(tmp_path):
    text = (FIXTURES / "unfused.pbtxt").read_text()
    file = tmp_path / "changed.pbtxt"
    file.write_text(
        text.replace(
            'input: "Cast:0"\n    input: "Rsqrt:0"', 'input: "Rsqrt:0"\n    input: "Cast:0"'
        )
    )
    found = diff(fixture("unfused.pbtxt"), read(file))
    assert found.rewired == [("Mul", "Mul", "Mul")] and not found.removed and not found.added
    file.write_text(text.replace("keep_dims", "keep_other", 1))
    found = diff(fixture("unfused.pbtxt"), read(file))
    assert [change.type for change in found.removed + found.added] == ["ReduceMean", "ReduceMean"]


def test_fx_and_ge_are_not_compared():
    with pytest.raises(ValueError, match="no operators in common"):
        diff(fixture("fx_before.txt"), fixture("fused.pbtxt"))


# -- export


def test_dot(tmp_path):
    text = export(fixture("fused.pbtxt"), tmp_path / "graph.dot").read_text()
    assert '"arg9_1" -> "MlaPrologV3" [label="kv_cache"];' in text
    assert text.count("{") == text.count("}") == 1


def test_unknown_suffix(tmp_path):
    with pytest.raises(ExportError, match=r"the suffix must be \.dot; `dot -Tsvg` draws it"):
        export(fixture("fused.pbtxt"), tmp_path / "graph.svg")


@pytest.mark.parametrize("use", [summarise, partial(export, path="a.dot"), partial(diff, None)])
def test_what_is_no_dump(use):
    with pytest.raises(TypeError, match="expected what mla_fusion"):
        use("fused.pbtxt")


# -- the command line


def test_inspect_command(capsys, tmp_path):
    paths = [str(FIXTURES / name) for name in ("fused_original.pbtxt", "fx_before.txt")]
    assert cli.main(["inspect", *paths]) == 0
    printed = capsys.readouterr().out
    assert "Copies at every run: 1.1 MiB" in printed and "would fuse 1, left 0" in printed
    assert cli.main(["inspect", paths[0], "--json", "--export", str(tmp_path / "graph.dot")]) == 0
    assert json.loads(capsys.readouterr().out)[0]["prologues"][0]["type"] == "MlaPrologV3"
    assert (tmp_path / "graph.dot").is_file()


def test_explain_command_takes_dumps(capsys):
    assert cli.main(["explain", str(FIXTURES / "fx_before.txt")]) == 0
    assert cli.main(["explain", str(FIXTURES / "fx_after.txt")]) == 1
    assert "fused already in this graph: 1 prologue" in capsys.readouterr().out
    for name in ("unfused.pbtxt", "fused.txt", "unfused_py.txt"):
        assert cli.main(["explain", str(FIXTURES / name)]) == 2
        error = capsys.readouterr().err
        assert "TORCH_COMPILE_DEBUG=1" in error and "000_aot_forward_graph.txt" in error
        assert error.count("\n") == 1


def test_diff_command(capsys):
    first, second = (str(FIXTURES / name) for name in ("fused_original.pbtxt", "fused.pbtxt"))
    assert cli.main(["diff", first, first]) == 0
    assert cli.main(["diff", first, second, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out.partition("equal\n")[2])["removed"]) == 4
    assert cli.main(["diff", second, str(FIXTURES / "fx_before.txt")]) == 2


@pytest.mark.parametrize(
    "command", [["inspect"], ["explain"], ["diff", str(FIXTURES / "fused.txt")]]
)
def test_bad_files(command, capsys, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("no graph\n")
    assert cli.main([*command, str(file)]) == 2
    assert f"{file}:1: no graph dump of a known format" in capsys.readouterr().err


def test_export_of_two_dumps_is_refused(capsys, tmp_path):
    file = str(FIXTURES / "fused.txt")
    assert cli.main(["inspect", file, file, "--export", str(tmp_path / "a.dot")]) == 2
    assert "--export takes one dump" in capsys.readouterr().err
