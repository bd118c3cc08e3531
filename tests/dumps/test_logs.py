"""Listings as torch writes them: TORCH_LOGS of a real run, colours, quoting, several graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mla_fusion.examples.fuse_your_model import example

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from mla_fusion.inspect import DumpError, NotRebuilt, diff, read, summarise
from mla_fusion.tools import cli

MODEL = """
import sys, torch
from mla_fusion.examples.fuse_your_model import example
model, arguments = example()
with torch.no_grad():
    torch.compile(model, backend=sys.argv[1])(*arguments)
if sys.argv[1] == "aot_eager":
    weight = torch.randn(4, 4, requires_grad=True)
    step = torch.compile(lambda x: (x @ weight).sin().sum(), backend="aot_eager")
    step(torch.randn(3, 4)).backward()
"""


def log_of(folder: Path, logs: str, backend: str) -> Path:
    """The file that ``TORCH_LOGS=.. python model.py 2> log`` leaves."""
    file = folder / "all.log"
    # a graph that Inductor has in its cache is not printed
    variables = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCH_LOGS": logs}
    with file.open("w") as log:
        command = [sys.executable, "-c", MODEL, backend]
        subprocess.run(command, env=variables, stderr=log, check=True)
    return file


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory):
    """A file of what torch logs of one of two graphs of a process; only the named logs are on."""
    folder = tmp_path_factory.mktemp("logs")
    every = log_of(folder, "graph_code,aot_graphs,aot_joint_graph", "aot_eager").read_text()

    def select(logs: str, trained: bool = False) -> Path:
        file = folder / f"{logs}-{trained}.log"
        wanted = tuple(f"[__{name}]" for name in logs.split(","))
        lines = [
            line
            for line in every.splitlines(keepends=True)
            if f"[{int(trained)}/0" in line and any(name in line for name in wanted)
        ]
        file.write_text("".join(lines))
        return file

    return select


def assert_fuses(file: Path) -> None:
    assert all(line[:1] in "VI" for line in file.read_text().splitlines() if "aten" in line)
    report = mf.explain(file)
    assert [item.placement for item in report.fused] == ["in place"]
    assert report.fused[0].source.partition(" in ")[2].startswith("forward: q = self.q_b")
    assert "graphs" not in str(report)


def test_graphs_of_aot_fuse(logged):
    assert_fuses(logged("aot_graphs"))


@pytest.mark.exhaustive
def test_the_whole_log_of_aot_fuses(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "MODEL", MODEL.partition("if sys")[0])
    assert_fuses(log_of(tmp_path, "+aot", "aot_eager"))


@pytest.mark.exhaustive  # Inductor compiles for half a minute
def test_graph_of_inductor_is_read(tmp_path):
    dump = read(log_of(tmp_path, "post_grad_graphs", "inductor"))
    assert dump.counts["aten.mm.default"] == 3


def test_graph_before_aot_is_summed_up_and_not_explained(logged, capsys):
    file = logged("graph_code")
    assert summarise(read(file)).operators["torch._C._nn.linear"] == 3
    with pytest.raises(
        NotRebuilt, match=r"before AOT autograd; .* TORCH_LOGS=aot_graphs prints it"
    ):
        mf.explain(file)
    assert cli.main(["explain", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_of_several_graphs_says_so(logged, capsys):
    file = logged("graph_code,aot_graphs")
    with pytest.raises(NotRebuilt, match=r"the file holds 2 graphs; this is graph 1\. --graph N"):
        mf.explain(file)
    assert len(mf.explain(file, graph=2).fused) == 1
    assert cli.main(["explain", str(file), "--graph", "2"]) == 0
    assert "the file holds 2 graphs; this is graph 2" in capsys.readouterr().out
    assert cli.main(["inspect", str(file)]) == 0
    assert f"{file} (FX graph, readable text, graph 1 of 2)" in capsys.readouterr().out
    assert cli.main(["diff", str(file), str(file), "--graph", "2"]) == 0
    assert "graph 2 of 2" in capsys.readouterr().out
    for number in ("0", "3"):
        assert cli.main(["inspect", str(file), "--graph", number]) == 2
        assert f"holds 2 graphs, and no graph {number}" in capsys.readouterr().err


def test_joint_forward_and_backward(logged):
    file = logged("aot_joint_graph,aot_graphs", trained=True)
    joint, forward, backward = (read(file, number) for number in (1, 2, 3))
    assert joint.graphs == 3
    inputs = [one.name for one in joint.of_type("placeholder")]
    assert inputs == ["primals_1", "primals_2", "tangents_1"]
    assert joint.by_name["primals_1"].output.shape == (3, 4)
    assert joint.operators[-1].inputs[0] == forward.operators[-1].inputs[0]
    assert backward.counts["aten.cos.default"] == 1
    assert "no MLA prologue" in str(mf.explain(file))


def test_a_ge_dump_holds_one_graph():
    file = Path(__file__).parent / "fixtures" / "fused.pbtxt"
    with pytest.raises(DumpError, match="a GE dump holds 1 graph, and no graph 2"):
        read(file, 2)


@pytest.fixture(scope="module")
def graph():
    model, arguments = example()
    return capture(model, *arguments, device="cpu")[0]


def quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.split("\n"))


@pytest.mark.parametrize("change", [str, quoted, lambda text: f"Hi,\n\n{text}\n\n\nbye\n"])
@pytest.mark.parametrize("colored", [False, True])
def test_colours_and_quoting(colored, change, graph, tmp_path):
    text = graph.print_readable(print_output=False, colored=colored)
    assert ("\x1b[" in text) is colored
    plain, file = tmp_path / "plain.txt", tmp_path / "graph.txt"
    plain.write_text(graph.print_readable(print_output=False))
    file.write_text(change(text))
    assert diff(read(plain), read(file)).equal
    assert len(mf.explain(file).fused) == 1
