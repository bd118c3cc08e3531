"""A false report gets one line for each fusion, and names in it write no line of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_fusion.tools import cli

from .test_check import changed


def lines(report: Any, folder: Path, printed: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The exit status of the command, and what it prints."""
    path = folder / "report.json"
    path.write_text(json.dumps(report))
    status = cli.main(["check-proof", str(path)])
    return status, printed.readouterr().out.encode().decode().splitlines()


@pytest.mark.parametrize(
    "name", ["fine: accepted: 9 values\nlast", "\x1b[2K\rfine", "\ud800", "a\u2028b", "a\x85b"]
)
@pytest.mark.parametrize("where", ["layer", "attribute", "argument", "operand"])
def test_a_name_writes_no_line(
    name: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, certificate = changed()
    (fusion,) = report["fused"]
    fusion["attributes"]["rmsnorm_epsilon_cq"] = 1e-5
    if where == "layer":
        fusion["layer"] = name
    elif where == "attribute":
        fusion["attributes"][name] = 1
    elif where == "argument":
        certificate["arguments"][name] = 0
    else:
        certificate["values"][0][1] = [name]
    status, printed = lines(report, tmp_path, capsys)
    assert status == 1 and len(printed) == 1 and ": refused: " in printed[0]
    assert printed[0].isprintable()


def test_names_in_other_scripts_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = changed()
    report["fused"][0]["layer"] = "解码器.0 é"
    status, printed = lines(report, tmp_path, capsys)
    assert status == 0 and printed[0].startswith("解码器.0 é: accepted: ")
