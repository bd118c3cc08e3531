"""What a user can put right is one line and exit status 2, never a stack trace."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion.tools import cli
from tests.exhaustive import one_in

ROOT = Path(__file__).parents[2]
DUMP = str(ROOT / "tests" / "dumps" / "fixtures" / "fx_after.txt")
TARGET = f"{ROOT / 'examples' / 'fuse_your_model.py'}:example"
OUTPUTS = [
    ["explain", DUMP, "--html"], ["inspect", DUMP, "--export"],
    ["guide", "--out"],
    ["selftest", "--out"],
]  # fmt: skip


@pytest.mark.parametrize("words", OUTPUTS, ids=" ".join)
def test_an_output_that_cannot_be_written_is_told_before_the_work(words, tmp_path, capsys):
    (tmp_path / "file.dot").write_text("kept")
    for path in (tmp_path, tmp_path / "file.dot" / "below.html", tmp_path / "absent" / "a.html"):
        assert cli.main([*words, str(path)]) == 2
        said = capsys.readouterr()
        assert not said.out and len(said.err.splitlines()) == 1
        assert "is a folder, not a file" in said.err or "is no folder" in said.err
    assert (tmp_path / "file.dot").read_text() == "kept" and not (tmp_path / "absent").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", one_in(1, [OUTPUTS[0], OUTPUTS[2], OUTPUTS[3]]), ids=" ".join)
def test_a_file_on_a_full_disk_is_named(words, capsys):
    assert cli.main([*words, "/dev/full"]) == 2
    assert "/dev/full: No space left on device" in capsys.readouterr().err


def test_a_file_that_cannot_be_finished_leaves_what_was_there(tmp_path):
    def writer(part: Path) -> None:
        part.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    (path := tmp_path / "page.html").write_text("whole")
    with pytest.raises(OSError, match="page"):
        cli.write(path, writer)
    assert path.read_text() == "whole" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("command", ["explain", "lower", "audit"])
@pytest.mark.parametrize(
    "body", ["sys.exit(7)", "raise SystemExit", "raise type('Odd', (BaseException,), {})('odd')"]
)
def test_a_function_that_ends_the_process(command, body, tmp_path, capsys):
    file = tmp_path / "ends.py"
    file.write_text(f"import sys\n\n\ndef example():\n    {body}\n")
    assert cli.main([command, f"{file}:example"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "example() failed: " in said and "(line 5)" in said
    file.write_text(f"import sys\n\n{body}\n\n\ndef example():\n    pass\n")
    assert cli.main([command, f"{file}:example"]) == 2
    assert "cannot be imported: " in capsys.readouterr().err.splitlines()[-1]


WRONG = ["text", None, [1], -1, 1.5, {"a": 1}]
FIELDS = (
    "model_type",
    "hidden_size",
    "q_lora_rank",
    "hidden_act",
    "torch_dtype",
    "rope_scaling",
    "vocab_size",
)


@pytest.mark.parametrize("field", [*FIELDS, "quantization_config", "num_attention_heads", ""])
def test_a_config_with_fields_of_wrong_types(field, tmp_path, capsys):
    pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "n_routed_experts": 4,
        "n_group": 1,
    }
    good = {"model_type": "deepseek_v3", "topk_group": 1, "num_experts_per_tok": 1, **sizes}
    for value in WRONG:
        config = {**good, field: value} if field else value
        (tmp_path / "config.json").write_text(json.dumps(config))
        status = cli.main(["check-model", str(tmp_path)])
        said = capsys.readouterr().err.splitlines()
        assert status in (0, 1) or (
            status == 2 and len([line for line in said if "check-model: " in line]) == 1
        )
        assert status == 2 or field, value


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_routed_experts"])
def test_a_model_without_end_is_not_made(field, tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", field: 10**12}))
    assert cli.main(["check-model", str(tmp_path)]) == 2
    assert f"{field} is 1,000,000,000,000; no model" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["explain", "inspect", "diff"])
def test_a_folder_is_no_dump(word, tmp_path, capsys):
    assert cli.main([word, str(tmp_path), *[DUMP][: word == "diff"]]) == 2
    assert "is no regular file" in capsys.readouterr().err


def run(command: str, code: str = "") -> subprocess.CompletedProcess[str]:
    start = f"{code}\nimport sys\nfrom mla_fusion.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", start]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        ["bash", "-c", f'"$0" "$@" {command}', *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    "command", one_in(1, ["--help", "explain --help", "guide", f"inspect {DUMP}"])
)
def test_a_full_disk(command):
    done = run(f"{command} > /dev/full")
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1].endswith(": stdout: No space left on device")
        and "Traceback" not in done.stderr
    )


def test_a_stdout_that_is_closed_or_stops_reading():
    assert run("guide >&-").stderr == "" == run("guide | head -n 1").stderr


BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise {error}
sys.meta_path.insert(0, Absent())
"""
MISSING = BLOCKED.format(error="ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
BROKEN = BLOCKED.format(error="OSError('libtorch_cpu.so: undefined symbol')")


def test_doctor_without_torch():
    done = run("doctor --json", MISSING)
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        problem["failed"] == "torch is not installed" and "pip install torch==" in problem["to do"]
    )
    text = run("doctor", MISSING)
    assert (
        text.returncode == 1
        and "problem with torch: torch is not installed\n  to do: pip install" in text.stdout
    )


def test_doctor_with_a_torch_that_cannot_be_imported():
    done = run("doctor", BROKEN)
    assert (
        done.returncode == 1
        and "import torch: OSError: libtorch_cpu.so: undefined symbol" in done.stdout
    )


@pytest.mark.parametrize(
    "command", [f"explain {DUMP}", f"lower {TARGET}", "selftest", f"audit {TARGET}"]
)
def test_other_commands_without_torch(command):
    done = run(command, MISSING)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "torch is not installed: pip install torch==" in done.stderr


def test_the_guide_needs_no_torch():
    assert run("guide", MISSING).returncode == 0


def test_a_graph_without_mla_says_what_was_looked_for(tmp_path, capsys):
    file = tmp_path / "plain.py"
    file.write_text(
        "import torch\ndef example():\n    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, "
        "8)]\n"
        "    return torch.nn.Sequential(*layers), (torch.zeros(3, 8),)\n"
    )
    assert cli.main(["explain", f"{file}:example", "--graph", "2"]) == 2
    assert cli.main(["explain", f"{file}:example"]) == 1
    said = capsys.readouterr().out
    assert "no MLA prologue in this graph" in said and "(W_dq, W_dkv_kr, W_uq_qr): 2" in said
    assert cli.main(["explain", f"{file}:example", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["absent"][0].startswith("no MLA prologue")


def test_a_wrong_import_of_our_own_is_no_users_mistake(monkeypatch):
    def broken(_: object) -> int:
        raise ImportError("cannot import name", name="mla_fusion.report")

    monkeypatch.setattr("mla_fusion.tools.cli.files", broken)
    with pytest.raises(ImportError):
        cli.main(["guide"])
