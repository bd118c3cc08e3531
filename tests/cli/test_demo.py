"""The demo at small sizes: every file, every check, and a failed check as an exit status."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mla_fusion.tools import cli, demo

SMALL = ["demo", "--quick", "--heads", "2", "--batch", "2", "--layers", "2"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    options = demo.Options(tmp_path_factory.mktemp("out"), layers=2, heads=2, batch=2)
    return demo.run(options.quick())


@pytest.mark.portable
def test_all_checks_pass(outcome):
    assert outcome.problems == []
    assert outcome.lowered.fused["MlaPrologV3"] == 2
    assert outcome.lowered.unfused["ScatterNdUpdate"] == 4
    assert "MlaPrologV3" not in outcome.lowered.unfused


def test_files(outcome):
    names = {path.name for path in outcome.files}
    assert names == {"report.html", "report.json", "fx_before.txt", "fx_after.txt", "graph.pbtxt"}
    assert all(path.stat().st_size for path in outcome.files)
    assert "npu_mla_prolog_v3" in (outcome.options.out / "fx_after.txt").read_text()


def test_text_and_json(outcome):
    text = str(outcome)
    for part in ("error against float64", "MlaPrologV3", "All checks passed."):
        assert part in text
    data = json.loads(outcome.to_json())
    assert data["problems"] == [] and len(data["report"]["fused"]) == 2


def test_failed_checks_are_named(outcome):
    lowered = demo.Lowered("", {}, {"MlaPrologV3": 1, "TensorMove": 2})
    failed = replace(outcome, difference=0.2, lowered=lowered)
    assert len(failed.problems) == 3
    assert "FAILED: the fused output differs by 2.0e-01, allowed 5e-02" in str(failed)


@pytest.mark.exhaustive
def test_without_torch_npu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert cli.main([*SMALL, "--out", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "torch_npu is not installed" in data["lowered"]["how"]
    assert (tmp_path / "report.html").is_file() and not (tmp_path / "graph.pbtxt").exists()


def test_without_transformers_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    import sys

    for name in [name for name in sys.modules if name.startswith("transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main([*SMALL, "--out", str(tmp_path)]) == 2
    assert "mla-fusion[hf]" in capsys.readouterr().err
