"""Report files while models compile: by environment variable, or by keyword for one backend."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from mla_fusion.examples.fuse_your_model import example

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture


def run(**options) -> None:
    torch._dynamo.reset()
    model, arguments = example()
    with torch.no_grad():
        torch.compile(model, backend=mf.backend(**options))(*arguments)


def written(folder: Path) -> list[dict]:
    files = sorted(folder.glob("*.json"))
    assert [file.with_suffix(".html") for file in files] == sorted(folder.glob("*.html"))
    return [json.loads(file.read_text()) for file in files]


def test_keyword_of_the_backend(tmp_path, monkeypatch):
    monkeypatch.delenv("MLA_FUSION_REPORT", raising=False)
    run(report=tmp_path / "deep" / "reports")
    (report,) = written(tmp_path / "deep" / "reports")
    assert len(report["fused"]) == 1
    assert report["bytes_added"] == mf.reports()[-1].bytes_added
    run()
    assert len(written(tmp_path / "deep" / "reports")) == 1


def test_environment_variable_serves_every_entry_point(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_FUSION_REPORT", str(tmp_path))
    run()
    model, arguments = example()
    gm, inputs = capture(model, *arguments, device="cpu")
    mf.explain(gm)  # compiles nothing, writes nothing
    mf.torchair_pass()(gm, inputs, None)
    mf.lower(model, *arguments)
    assert [len(report["fused"]) for report in written(tmp_path)] == [1, 1, 1]


def test_both_folders_get_the_report(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_FUSION_REPORT", str(tmp_path / "a"))
    run(report=tmp_path / "b")
    assert len(written(tmp_path / "a")) == len(written(tmp_path / "b")) == 1


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    with caplog.at_level(logging.WARNING, "mla_fusion"):
        run(report=file / "reports")
    assert "no report was written" in caplog.text


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr("mla_fusion.report.store._warn_once", logging.warning)
