"""``MLA_FUSION_GRAPHS``: the graph as files, before the pass and after each stage."""

from __future__ import annotations

from pathlib import Path

import pytest

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base, prologues


def test_each_stage_leaves_a_listing_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_FUSION_GRAPHS", str(tmp_path / "graphs"))
    gm, _ = capture(prologues.PagedRotateHalf(), *base.paged_args(), device="cpu")
    mf.fuse(gm)
    given, normalised, fused = (
        mf.inspect.read(path) for path in sorted((tmp_path / "graphs").iterdir())
    )
    kernel = "npu.npu_mla_prolog_v3_functional.default"
    assert given.counts["aten.mm.default"] == normalised.counts["aten.mm.default"] > 2
    assert fused.counts[kernel] == 1 and kernel not in given.counts


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLA_FUSION_GRAPHS", str(tmp_path / "file"))
    gm, _ = capture(prologues.PagedRotateHalf(), *base.paged_args(), device="cpu")
    assert len(mf.fuse(gm).fused) == 1
