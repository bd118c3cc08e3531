"""The demo at small sizes: every file, every check, and a failed check as an exit status."""

from __future__ import annotations

import json

import pytest

from mla_fusion.tools import cli, demo
from mla_fusion.tools.accuracy import Measurement

SMALL = ["demo", "--quick", "--heads", "2", "--batch", "2", "--layers", "2"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    options = demo.Options(tmp_path_factory.mktemp("out"), layers=2, heads=2, batch=2)
    return demo.run(options.quick())


@pytest.mark.portable
def test_all_checks_pass(outcome):
    assert outcome.problems == []
    assert outcome.lowered.operators["MlaPrologV3"] == 2
    assert "aten.index_put.default" in outcome.lowered.refusal
    assert (
        outcome.lowered.unfused["ScatterNdUpdate"] == 4
        and "MlaPrologV3" not in outcome.lowered.unfused
    )


def test_heads_of_the_attention_are_no_tokens(tmp_path):
    """More heads than sequences, as `make demo` has: the output projection reads them permuted."""
    options = demo.Options(tmp_path, layers=1).quick()
    assert options.heads > options.batch
    assert demo.run(options).problems == []


def test_files(outcome):
    names = {path.name for path in outcome.files}
    assert names == {"report.html", "report.json", "fx_before.txt", "fx_after.txt", "graph.pbtxt"}
    assert all(path.stat().st_size for path in outcome.files)
    assert "npu_mla_prolog_v3" in (outcome.options.out / "fx_after.txt").read_text()


def test_text_and_json(outcome):
    text = str(outcome)
    for part in ("query_rope", "kr_cache", "aten.index_put", "MlaPrologV3", "All checks passed."):
        assert part in text
    data = json.loads(outcome.to_json())
    assert data["problems"] == [] and len(data["report"]["fused"]) == 2


def test_failed_checks_are_named(outcome):
    bad = [
        Measurement("layer 0", "query", 1e-3, 2e-3),
        Measurement("layer 0", "kv_cache", 1e-3, 1e-3, False),
    ]
    lowered = demo.Lowered("", {"MlaPrologV3": 1, "TensorMove": 2})
    failed = demo.Outcome(outcome.options, outcome.report, bad, lowered)
    assert len(failed.problems) == 4
    assert "FAILED: layer 0, query: fused error is 2.00 x the unfused error" in str(failed)


def test_without_torch_npu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert cli.main([*SMALL, "--out", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "torch_npu is not installed" in data["ge"]["missing"]
    assert (tmp_path / "fx_before.txt").is_file() and not (tmp_path / "graph.pbtxt").exists()


def test_without_transformers_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    import sys

    for name in [name for name in sys.modules if name.startswith("transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main([*SMALL, "--out", str(tmp_path)]) == 2
    assert "mla-fusion[hf]" in capsys.readouterr().err


def test_a_file_in_the_way_is_the_users_error(tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    assert cli.main([*SMALL, "--out", str(tmp_path / "out")]) == 2
    assert "out" in capsys.readouterr().err
