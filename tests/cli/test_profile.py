"""``mla-fusion profile`` on files made by hand after the columns that the vendor documents."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from mla_fusion.tools import cli

PROFILER = (
    "Step Id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Block Dim,"
    "Input Shapes"
)
MSPROF = (
    "Model ID,Task ID,Stream ID,Infer ID,Op Name,OP Type,Task Type,Task Start Time(us),"
    "Task Duration(us),Task Wait Time(us),Block Num,Input Shapes"
)
OLD_MSPROF = MSPROF.replace("(us)", "(ns)").replace("Infer ID,", "").replace("Num", "Dim")

UNFUSED = [
    ("MatMulV3", "MIX_AIC", 10), ("RmsNorm", "AI_VECTOR_CORE", 5), ("MatMulV3", "MIX_AIC", 20),
    ("BatchMatMulV2", "AI_CORE", 8), ("InterleaveRope", "AI_VECTOR_CORE", 4),
    ("ScatterNdUpdate", "AI_VECTOR_CORE", 3), ("FusedInferAttentionScore", "MIX_AIC", 30),
]  # fmt: skip
STAGED = [
    ("Cast", "AI_VECTOR_CORE", 1), ("MlaPrologV3", "MIX_AIC", 25),
    ("Transpose", "AI_VECTOR_CORE", 2), ("ScatterNdUpdate", "AI_VECTOR_CORE", 3),
    ("FusedInferAttentionScore", "MIX_AIC", 30), ("Cast", "AI_VECTOR_CORE", 7),
    ("MatMulV3", "MIX_AIC", 9),
]  # fmt: skip
Layer = list[tuple[str, str, int]]


def kernels(layer: Layer, layers: int = 2, slower: float = 0.0) -> Iterable[tuple[object, ...]]:
    """Type, core, start, duration and wait: a wait of 1 us before each."""
    start = 100.0
    for kind, core, duration in layer * layers:
        yield kind, core, start, duration + slower, 1.0
        start += duration + slower + 1.0


def profiler(path: Path, layer: Layer, steps: int = 3, header: str = PROFILER) -> str:
    lines = [header]
    for step in range(steps):
        for kind, core, start, us, wait in kernels(layer, slower=step / 10):
            lines.append(f'{step},aclnn_{kind},{kind},{core},{start}\t,{us},{wait},24,"7168,16;1"')
    if not header.startswith("Step"):
        lines = [lines[0], *(line.partition(",")[2] for line in lines[1:])]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def msprof(path: Path, layer: Layer, header: str = MSPROF) -> str:
    unit = 1000 if "(ns)" in header else 1
    infer = "1," if "Infer ID" in header else ""
    lines = [header, f"1,N/A,N/A,{infer}allreduce,allreduce,HCCL,5000,N/A,N/A,0,N/A"]
    for kind, core, start, us, wait in kernels(layer):
        times = ",".join(f"{value * unit:.3f}" for value in (start, us, wait))  # type: ignore[operator]
        lines.append(f"1,7,2,{infer}{kind}_1,{kind},{core},{times},24,; ; ; ;")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    status = cli.main(["profile", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_prologue_and_what_stands_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(capsys, profiler(tmp_path / "kernel_details.csv", STAGED))
    after: dict = found["after"]  # type: ignore[assignment,type-arg]
    (prologue,) = after["prologue"]
    assert status == 0 and found["before"] is None and found["difference"] == {}
    assert (prologue["type"], prologue["core"]) == ("MlaPrologV3", "MIX_AIC")
    assert prologue["calls"] == 2 and prologue["us"] == pytest.approx(2 * 25.1)
    assert prologue["wait"] == pytest.approx(2.0)
    around = {row["type"]: row["calls"] for row in after["around"]}
    # not the cast behind the attention
    assert around == {"Cast": 2, "Transpose": 2, "ScatterNdUpdate": 2}
    assert after["figures"]["kernels"] == [14, 14, 14]
    assert after["figures"]["busy us"] == pytest.approx([154, 155.4, 156.8])
    assert after["figures"]["span us"] == pytest.approx([167, 168.4, 169.8])


@pytest.mark.parametrize("header", [MSPROF, OLD_MSPROF], ids=["new names", "ns, no step"])
def test_files_of_msprof(header: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(capsys, msprof(tmp_path / "op_summary_0.csv", STAGED, header))
    after: dict = found["after"]  # type: ignore[assignment,type-arg]
    assert status == 0 and after["has_steps"] == (header == MSPROF)
    assert after["prologue"][0]["us"] == pytest.approx(50)
    assert after["figures"]["span us"] == pytest.approx([167])
    assert after["figures"]["kernels"] == [14]  # without communication


def test_what_a_fusion_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = profiler(tmp_path / "after.csv", STAGED)
    before = profiler(tmp_path / "before.csv", UNFUSED)
    status, found = run(capsys, after, "--before", before)
    busy: dict = found["difference"]["busy us"]  # type: ignore[index,assignment,type-arg]
    assert status == 0
    assert busy["step"] == pytest.approx(-6) and busy["layer"] == pytest.approx(-3)
    assert (busy["least"], busy["most"]) == (pytest.approx(-8.8), pytest.approx(-3.2))
    assert cli.main(["profile", after, "--before", before]) == 0
    said = capsys.readouterr().out
    assert "3 steps, 2 prologue kernels a step" in said
    row = next(line.split() for line in said.splitlines() if "-6.0" in line and "busy" in line)
    assert row == ["busy", "us", "-6.0", "-8.8", "-3.2", "-3.0"]
    _, found = run(capsys, profiler(tmp_path / "three.csv", STAGED * 3), "--before", after)
    assert found["difference"]["busy us"]["layer"] == pytest.approx(77.7)  # type: ignore[index]


def test_a_profile_without_a_prologue_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", profiler(tmp_path / "a.csv", UNFUSED)]) == 1
    said = capsys.readouterr().out
    assert "0 prologue kernels a step" in said and said.count("  none") == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: no columns of types, durations and start times"),
        (b"a,b\n1,2\n", "line 1: no columns of types, durations and start times"),
        (b"Type,Duration(us)\nCast,1\n", "line 1: no columns of types, durations and start"),
        (b"\xff\xfe\x00", "line 1: 'utf-8' codec can't decode"),
        (f"{PROFILER}\n".encode(), "holds no kernel"),
        (f"{PROFILER}\n1,a,Cast,AI_CORE,1,two,0,1,\n".encode(), "line 2: could not convert"),
        (f"{PROFILER}\n1,a,Cast,AI_CORE,1,nan,0,1,\n".encode(), "line 2: a time is no number"),
        (f"{PROFILER}\n1,a,Cast,AI_C".encode(), "line 2: the row is cut off"),
    ],
)
def test_a_file_that_is_no_profile_is_one_line(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.csv").write_bytes(content)
    assert cli.main(["profile", str(tmp_path / "file.csv")]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1
    assert said.err.startswith("mla-fusion profile: ") and message in said.err
