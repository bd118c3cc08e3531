"""The command line: what it prints, its exit statuses, and its words for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mla_fusion as mf
from mla_fusion.tools import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "fuse_your_model.py"
TARGET = f"{EXAMPLE}:example"


def test_version_and_help(capsys):
    for flag, text in (
        ("--version", f"mla-fusion {mf.__version__}"),
        ("--help", "mla-fusion demo"),
    ):
        with pytest.raises(SystemExit) as done:
            cli.main([flag])
        assert done.value.code == 0
        assert text in capsys.readouterr().out


def test_explain_as_text_and_page(capsys, tmp_path):
    assert cli.main(["explain", TARGET, "--html", str(tmp_path / "report.html")]) == 0
    assert "would fuse 1, left 0" in capsys.readouterr().out
    assert "Would fuse" in (tmp_path / "report.html").read_text()


def test_explain_as_json(capsys):
    assert cli.main(["explain", TARGET, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["fused"]) == 1


def test_explain_without_a_fusion_is_status_1(capsys, tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("import torch\ndef example():\n    return torch.sin, (torch.zeros(3),)\n")
    assert cli.main(["explain", f"{file}:example"]) == 1
    assert "would fuse 0" in capsys.readouterr().out


def test_lower(capsys, tmp_path):
    assert cli.main(["lower", TARGET, "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["operators"]["MlaPrologV3"] == 1
    assert all(Path(path).is_file() for path in found["files"])
    assert (tmp_path / "graph.pbtxt").is_file()


def test_lower_to_the_acl_graph(capsys):
    assert cli.main(["lower", TARGET, "--mode", "npugraph_ex"]) == 0
    assert "npu_mla_prolog_v3" in capsys.readouterr().out


def test_lower_says_what_torchair_cannot_convert(capsys):
    assert cli.main(["lower", TARGET, "--no-fuse"]) == 2
    assert "no GE converter for aten.index_put.default" in capsys.readouterr().err


def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    assert "npu_mla_prolog_v3_functional" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert "operators" in json.loads(capsys.readouterr().out)


BROKEN = (
    "import torch\n\ndef raises():\n    raise RuntimeError('no such weights')\n\ndef wrong():\n   "
    " return 3\n"
)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("model.py", "no such file: model.py"),
        ("model:1", "not of the form FILE.py:FUNCTION"),
        (
            "broken.py",
            "which function of broken.py? FILE.py:FUNCTION, as broken.py:raises; it "
            "defines raises, wrong",
        ),
        ("absent.py:example", "no such file: absent.py"),
        ("broken.py:absent", "defines no function 'absent'"),
        ("broken.py:raises", "raises() failed: RuntimeError: no such weights (line 4)"),
        ("broken.py:wrong", "returned int, expected (module_or_function, arguments)"),
        ("syntax.py:example", "cannot be imported: SyntaxError"),
        ("notes.txt:example", "notes.txt is not a Python file"),
    ],
)
def test_bad_targets_are_named_without_a_stack_trace(
    target, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "syntax.py").write_text("def example(:\n")
    (tmp_path / "notes.txt").write_text("hello")
    assert cli.main(["explain", target]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_graph_break_is_the_users_error(tmp_path, capsys):
    file = tmp_path / "breaks.py"
    file.write_text(
        "import torch\n\ndef f(x):\n    torch._dynamo.graph_break()\n    return x + 1\n\n"
        "def example():\n    return f, (torch.zeros(3),)\n"
    )
    assert cli.main(["explain", f"{file}:example"]) == 2
    assert "graph break" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "lower", "audit"])
@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            "f, (torch.zeros(3), torch.zeros(3))",
            "f does not take these 2 arguments: too many positional arguments",
        ),
        ("f, (torch.zeros(3, 4),)", " fails when it is run: RuntimeError"),
        ("f, (torch.zeros(3, 5, 2),)", "model.py:4 in f: return x + w"),
        ("g, (torch.zeros(3),)", " fails when it is run: AttributeError"),
    ],
)
def test_a_function_that_does_not_run_is_the_users_error(
    tmp_path, capsys, command, example, message
):
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\nw = torch.zeros(5, 5)\ndef f(x):\n    return x + w\n"
        f"def g(x):\n    return torch.no_such(x)\ndef example():\n    return {example}\n"
    )
    assert cli.main([command, f"{file}:example"]) == 2
    said = capsys.readouterr().err.partition(f"mla-fusion {command}: ")[2]
    assert message in said and len(said.splitlines()) == 1 + ("\n  at " in said)


@pytest.mark.parametrize(
    "arguments", [["demo", "--layers", "0"], ["lower", "m.py:f", "--mode", "eager"], ["fly"]]
)
def test_bad_options_are_status_2(arguments):
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    assert done.value.code == 2


def test_a_report_is_one_line() -> None:
    report = mf.Report(mf.Config())
    assert (
        repr(report)
        == "<Report: fused 0, left 0, in 0 ms, for A3, CANN latest (assumed, no NPU here)>"
    )
    assert "\n" not in repr(report)


def test_a_file_is_no_folder_for_reports(tmp_path) -> None:
    (tmp_path / "report").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        mf.backend(report=tmp_path / "report")


def test_a_module_that_can_be_imported_is_a_target(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(
            [
                "explain",
                "mla_fusion.examples.fuse_your_model:example",
                "--soc",
                "910C",
                "--cann",
                "9.1.0",
            ]
        )
        == 0
    )
    assert "for A3, CANN 9.1\n" in capsys.readouterr().out
    assert cli.main(["explain", "mla_fusion.absent.module:example"]) == 2
    assert "no such file: mla_fusion.absent.module" in capsys.readouterr().err


def test_the_targets_of_a_pass(capsys):
    assert cli.main(["explain", TARGET, "--json", "--targets", "identity"]) == 1
    (left,) = json.loads(capsys.readouterr().out)["rejected"]
    assert left["code"] == "target.unlisted"
    assert cli.main(["explain", TARGET, "--targets", "v4"]) == 2
    assert "'v4'" in capsys.readouterr().err


def test_nothing_in_a_name_steers_the_terminal(capsys) -> None:
    cli.show("q\x1b[2J \u202e norm\x00\tvor Größe\n中文")
    assert capsys.readouterr().out == "q\\x1b[2J \\u202e norm\\x00\tvor Größe\n中文\n"
