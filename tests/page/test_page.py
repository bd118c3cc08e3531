"""The page: well-formed, self-contained, escaped, and every fact of the report stands on it."""

from __future__ import annotations

import html
import re
from dataclasses import asdict
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import mla_fusion as mf
from mla_fusion.report.rejection import Rejection
from mla_fusion.report.report import Figure, Fusion
from mla_fusion.tools.page import page
from tests.harness import traced_graph
from tests.page import pages

EVIL = '</style><script>alert("x")</script><img src=x onerror=1>&amp;'


class Reader(HTMLParser):
    """Checks that elements are nested, and collects them and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self.stack += [tag] if tag != "meta" else []

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.stack[-1:] == ["style"] else f"{data} "


def text_of(report: mf.Report) -> str:
    return re.sub(r"\s+", " ", Reader(page.render(report)).text)


def leaves(value: Any) -> list[Any]:
    """The texts and numbers of nested data."""
    if isinstance(value, dict):
        return [leaf for pair in value.items() for part in pair for leaf in leaves(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    return [value] if isinstance(value, (str, int)) and not isinstance(value, bool) else []


@pytest.mark.parametrize("name", ["PagedRotateHalf", "SglangDecode", "GptjStack"])
def test_every_fact_of_a_fusion_stands_on_the_page(name: str) -> None:
    half = name == "GptjStack"  # whose rotated keys are then stored otherwise
    report = pages.report_of(name, **({"kr_layout": "half"} if half else {}))
    text, fusion = text_of(report), report.fused[0]
    shown = asdict(fusion)
    shown["staged_by"] = [list(one.values()) for one in shown["staged_by"]]
    for other in ("figures", "leaves", "placement", "cache_mode"):
        del shown[other]
    del shown["operators_before"], shown["operators_after"]
    for fact in (*leaves(list(shown.values())), fusion.gain, fusion.cost_of_staging):
        assert re.sub(r"\s+", " ", str(fact)) in text, fact
    for figure in fusion.figures:
        assert f"{figure.output} {figure.relative:.1e} {figure.row:.1e}" in text
    assert all(left.what in text for left in fusion.leaves)
    assert ("Staged: " in text, "In place: " in text) == (
        bool(fusion.staged_by),
        name != "SglangDecode",
    )
    assert ("Warning: " in text) is half
    assert len(fusion.steps) > 30


@pytest.mark.parametrize("name", ["eps_outside", "Unabsorbed", "FullWithChannelCaches"])
def test_every_fact_of_a_rejection_stands_on_the_page(name: str) -> None:
    report = pages.report_of(name)
    text, left = text_of(report), report.rejected[0]
    facts = left.code, left.message, left.remedy, left.source, ", ".join(left.nodes)
    assert all(re.sub(r"\s+", " ", fact) in text for fact in facts)


def test_the_graph_stands_on_the_page() -> None:
    report = pages.fused(2)
    text = text_of(report)
    assert f"{report.nodes_before} before, {report.nodes_after} after" in text
    assert all(f"{stage} {1e3 * time:,.1f}" in text for stage, time in report.timings.items())
    assert "aten.mm 6 0" in text
    assert all(f"{name} {value}" in text for name, value in asdict(report.config).items())
    assert "before," not in text_of(pages.report_of("PagedRotateHalf"))  # nothing was changed


def test_equal_layers_share_a_card() -> None:
    assert "layers.0 and 1 more" in (text := text_of(pages.fused(2)))
    assert text.count("Why it is exact") == 1 and "layers.1" in text
    same = [Rejection("absorb.absent", f"node {i}", (), f"layers.{i}", "m.py:1") for i in range(3)]
    other = Rejection("rope.absent", "none", ("mm",), "layers.9", "m.py:1")
    text = text_of(mf.Report(mf.Config(), rejected=[*same, other]))
    assert text.count("To fuse:") == 2 and "layers.0, layers.1, layers.2" in text


def test_everything_is_escaped() -> None:
    texts = {name: EVIL for name in Fusion.__annotations__ if name != "figures"}
    many: dict[str, Any] = dict.fromkeys(("nodes", "assumptions", "proof", "warnings"), (EVIL,))
    many |= {name: {EVIL: EVIL} for name in ("dims", "attributes", "replaced")}
    many |= {"steps": ((EVIL,) * 4,)}
    many |= {"staged_by": (), "leaves": (), "operators_before": 1, "operators_after": 2}
    figures = (Figure(EVIL, 0.1, 0.1, 9),)
    fusion = Fusion(**{**texts, **many, "figures": figures})  # type: ignore[arg-type]
    rejection = Rejection("absorb.absent", EVIL, (EVIL,), EVIL, EVIL)
    report = mf.Report(mf.Config(), [fusion], [rejection])
    found = Reader(page.render(report, [page.Section(EVIL, EVIL, (EVIL,), [(EVIL,)])]))
    assert not {"script", "img"} & {tag for tag, _ in found.tags} and EVIL in found.text


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = page.render(pages.fused(2))
    assert not re.search(r"https?:|@import|url\(", text)
    assert not any(
        "src" in attributes or "href" in attributes for _, attributes in Reader(text).tags
    )


def test_a_graph_without_a_prologue_says_so() -> None:
    report = mf.explain(traced_graph(torch.nn.Linear(4, 4), torch.randn(2, 4)))
    assert "Nothing to fuse" in (text := text_of(report))
    assert all(line.strip() in text for line in report.absent)


def test_a_callers_table() -> None:
    sections = [
        page.Section("Mine", "words", ("a",), [("<b>",)]),
        page.Section("None", "why", (), []),
    ]
    found = page.render(mf.Report(mf.Config()), sections)
    assert "Mine" in found and "words" in found and html.escape("<b>") in found and "why" in found
