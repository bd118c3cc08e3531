"""``mla-fusion check-proof``: what it prints, and its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mla_fusion.examples.fuse_your_model import example

import mla_fusion as mf
from mla_fusion.tools import cli
from tests.harness import traced_graph


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, arguments = example()
    found = mf.explain(traced_graph(model, *arguments), mf.Config(verify="off"))
    path = tmp_path_factory.mktemp("proof") / "report.json"
    path.write_text(found.to_json())
    return path


def test_a_report_is_accepted(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-proof", str(report), "--points", "20", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert "accepted: " in said and "at 20 points, wrong by a chance below" in said
    assert cli.main(["check-proof", str(report), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["refused"] == 0
        and found["fusions"][0]["accepted"]
        and found["fusions"][0]["chance"] < 1e-15
    )


def test_a_seed_may_hold_any_bytes(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-proof", str(report), "--seed", "\udcff"]) == 0
    assert "accepted: " in capsys.readouterr().out


def test_one_that_was_changed_is_status_1(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(report.read_text())
    data["certificates"][0]["claims"].pop()
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(data))
    assert cli.main(["check-proof", str(changed)]) == 1
    assert capsys.readouterr().out.count("refused: ") == 1
    assert cli.main(["check-proof", str(changed), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fusions"][0]["reason"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fused": 3}', "[" * 100000, "\x00\xff"])
def test_what_is_no_report_is_status_2(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert cli.main(["check-proof", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "is no report" in said[0]
