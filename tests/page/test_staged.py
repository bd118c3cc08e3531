"""The page of a staged fusion, and of one that stores the key otherwise than the model does."""

from __future__ import annotations

import html
import re
from functools import cache

import torch

import mla_fusion as mf
from mla_fusion.tools.page import page
from mla_fusion.tools.page.cost import roofline
from tests.catalogue import ENTRIES
from tests.harness import graph_of


@cache
def report_of(name: str, **config: str) -> mf.Report:
    found = ENTRIES[name]
    given = found.config(verify="off", **config)
    return mf.explain(graph_of(found.model(), *found.args()), given, boundary=True)


def text_of(report: mf.Report) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", page.render(report).partition("<script")[0]))


def test_a_staged_fusion_is_not_one_call() -> None:
    report = report_of("SglangDecode")
    text, fusion = text_of(report), report.fused[0]
    assert "Staged: correct, but slower than in place" in text and "To write in place:" in text
    assert f"one call, and {fusion.launches_left} launches beside it" in text
    assert all(one.message in text and one.remedy in text for one in fusion.staged_by)


def test_what_stays_is_drawn() -> None:
    after = report_of("SglangDecode").pictures[0].after
    assert after is not None
    steps = [dot.step for dot in after.dots]
    wires = {(steps[arrow.start], steps[arrow.end]) for arrow in after.arrows}
    kernel = "npu_mla_prolog_v3_functional"
    assert {
        ("staging buffers", kernel),
        (kernel, "pairs of k_pe"),
        ("pairs of k_pe", "k_pe"),
    } <= wires
    assert {("k_pe", "cache writes"), ("c_kv", "cache writes")} <= wires
    assert "cat, index_put" in after.formulas["cache writes"]


def test_an_in_place_fusion_is_one_call() -> None:
    report = report_of("PagedRotateHalf")
    text = text_of(report)
    assert "After one call" in re.sub(r"\s+", " ", text) and "launches beside it" not in text
    after = report.pictures[0].after
    assert after is not None and not {"staging buffers", "cache writes"} & {
        dot.step for dot in after.dots
    }


def test_the_roofline_counts_what_stays() -> None:
    report = report_of("SglangDecode")
    fusion, machine = report.fused[0], report.config.machine
    found = roofline(fusion, machine)
    assert found is not None
    column = dict(zip(found.header, zip(*found.rows, strict=True), strict=True))
    assert column["T"] == ("8 unfused", "8 staged")
    assert int(column["kernels"][1]) == 1 + fusion.launches_left
    assert "re-interleaving" in found.note
    in_place = roofline(report_of("PagedRotateHalf").fused[0], machine)
    assert (
        in_place is not None and [row[1] for row in in_place.rows if "fused" in row[0]][-1] == "1"
    )
    moved = 8 * sum(one.bytes_per_token for one in fusion.leaves) / 1e6
    assert float(column["MB moved"][1]) > float(in_place.rows[1][3]) + 0.9 * moved


def test_the_page_opens_with_the_gain() -> None:
    for name, verdict in (("SglangDecode", "staged"), ("PagedRotateHalf", "in place")):
        report = report_of(name)
        text, fusion = re.sub(r"\s+", " ", text_of(report)), report.fused[0]
        assert fusion.operators_after == 1 + fusion.launches_left
        assert 20 < fusion.operators_before < 60
        gain = f"{fusion.operators_before} operators become {fusion.operators_after}"
        assert f"{gain}: {verdict}. Estimate" in text
        assert f"{verdict}, {gain}" in str(report)
        assert text.index(gain) < text.index("Why it is exact")


def test_a_page_of_a_graph_without_a_prologue_says_so() -> None:
    report = mf.explain(graph_of(torch.nn.Linear(4, 4), torch.randn(2, 4)))
    text = text_of(report)
    assert "Nothing to fuse" in text and all(line.strip() in text for line in report.absent)
    assert "Nothing to fuse" not in text_of(report_of("PagedRotateHalf"))


def test_half_rows_are_warned_of() -> None:
    report = report_of("GptjStack", kr_layout="half")
    assert f"Warning: {report.fused[0].warnings[0]}" in text_of(report)


def test_what_would_be_done_has_no_count_of_nodes_after() -> None:
    """Nothing is changed: as many nodes after as before would read as nothing gained."""
    assert "nodes after" not in text_of(report_of("PagedRotateHalf"))
