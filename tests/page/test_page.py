"""The page: well-formed, self-contained, escaped, folded, and the report's JSON in it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from mla_fusion.commit.verify import Figure
from mla_fusion.config import Config
from mla_fusion.report import text_tables
from mla_fusion.report.picture import ROLES, Arrow, Dot, Drawing, Picture
from mla_fusion.report.rejection import Rejection
from mla_fusion.report.report import Fusion, Report
from mla_fusion.tools.page import page

EVIL = '</script><script>alert("x")</script><img src=x onerror=1>&amp;'
VOID = {"meta", "br", "img", "link", "input"}
NODES = ("mm", "mul_6", "mm_1", "bmm", "cat_1", "mm_2", "mul_8", "cat_2")


class Reader(HTMLParser):
    """Checks nesting and collects what the tests ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.data = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "script":
            self.data += data if self.tags[-1][1].get("id") == "report" else ""
        elif self.stack and self.stack[-1] != "style":
            self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.stack == []
    return reader


def fusion(
    layer: str, nodes: tuple[str, ...] = NODES, figures: tuple[Figure, ...] = (), **other: object
) -> Fusion:
    values = {
        "layer": layer,
        "nodes": nodes,
        "dims": {"T": "8", "He": 7168},
        "cache_mode": "PA_BSND",
        "placement": "in place",
        "rope": "interleaved in, half out",
        "attributes": {"rmsnorm_epsilon_cq": 1e-6},
        "replaced": {"view_10": "query", "view_3": "kv_cache"},
        "assumptions": (),
        "verified": "verified",
        "figures": figures,
        "source": "model.py:55 in forward: q = self.q(x)",
    }
    return Fusion(**{**values, **other})  # type: ignore[arg-type]


def report(*fusions: Fusion, rejected: tuple[Rejection, ...] = ()) -> Report:
    return Report(
        Config(),
        list(fusions),
        list(rejected),
        {"view": 0.001, "match": 0.2, "plan": 0.01, "verify": 0.3, "rewrite": 0.02, "total": 0.54},
        324,
        208,
        operators={
            "before": {"aten.mm.default": 14},
            "after": {"aten.mm.default": 8, "npu.x.default": 2},
        },
    )


def test_json_round_trip(tmp_path):
    one = report(
        fusion("layers.0"), rejected=(Rejection("absorb.absent", EVIL, ("mm",), "layers.1", EVIL),)
    )
    path = one.to_html(tmp_path / "deep" / "report.html")
    reader = read(path.read_text(encoding="utf-8"))
    assert json.loads(reader.data) == json.loads(one.to_json())


def test_everything_is_escaped():
    texts = {"source": EVIL, "attributes": {EVIL: EVIL}, "rope": EVIL}
    evil = fusion(EVIL, tuple(EVIL + name for name in NODES), picture=0, **texts)
    rejection = Rejection("absorb.absent", EVIL, (EVIL,), EVIL, EVIL, picture=0)
    sections = [page.Section(EVIL, EVIL, (EVIL,), [(EVIL,)])]
    one = report(evil, rejected=(rejection,))
    dots = tuple(Dot(EVIL, EVIL, role, EVIL + role, EVIL, EVIL) for role in ROLES)
    drawn = Drawing(
        dots, (Arrow(0, 1, True, EVIL), Arrow(1, 2)), {EVIL + role: EVIL for role in ROLES}
    )
    one.pictures.append(Picture(EVIL, drawn, drawn))
    reader = read(page.render(one, sections))
    assert [tag for tag, _ in reader.tags if tag == "img"] == []
    assert [attributes for tag, attributes in reader.tags if tag == "script"] == [
        {"type": "application/json", "id": "report"},
        {},
    ]
    assert EVIL in "".join(reader.text)


def test_nothing_is_loaded_from_elsewhere():
    text = page.render(report(fusion("layers.0")))
    assert not re.search(r"https?://|@import|url\(", text)
    tags = read(text).tags
    assert all("src" not in attributes for _, attributes in tags)
    links = [attributes["href"] for _, attributes in tags if "href" in attributes]
    names = {f"#{attributes['id']}" for _, attributes in tags if "id" in attributes}
    assert links and names.issuperset(links)


def test_equal_layers_share_a_card_that_keeps_the_figures():
    figure = Figure("query", 4.2e-3, 0.1, 100)
    cards = page.fused_cards(
        report(
            fusion("layers.0"),
            fusion("layers.1", figures=(figure,)),
            fusion("layers.2", cache_mode="TND"),
            fusion("layers.3"),
        )
    )
    assert [card.layers for card in cards] == [["layers.0", "layers.1", "layers.3"], ["layers.2"]]
    assert cards[0].item.figures == (figure,)
    assert cards[0].title == "layers.0 … layers.3 (3 layers)"


def test_equal_rejections_share_a_card():
    same = [
        Rejection("absorb.absent", f"node {i}", (f"mm_{i}",), f"layers.{i}", "m.py:1 in f: x")
        for i in range(3)
    ]
    other = Rejection("rope.absent", "none", ("mm",), "layers.9", "m.py:1 in f: x")
    text = "".join(read(page.render(report(rejected=(*same, other)))).text)
    assert text.count("To fuse:") == 2
    assert "layers.0, layers.1, layers.2" in text


def test_explained_report_says_would(tmp_path):
    one = report(fusion("layers.0"))
    one.committed = False
    assert "Would fuse" in page.render(one)


def test_empty_report_is_a_page():
    reader = read(page.render(Report(Config())))
    assert "0 fused, 0 left" in "".join(reader.text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (2048, "2.0 KiB"), (83623936, "79.8 MiB")],
)
def test_size(count, text):
    assert text_tables.size(count) == text


def test_text_table_aligns_numbers_to_the_right():
    assert text_tables.render(("op", "n"), [("mm", 3), ("index_put", 14)], "").splitlines() == [
        "op          n",
        "---------  --",
        "mm          3",
        "index_put  14",
    ]


def test_operator_table_puts_changes_first():
    before, after = (
        {"aten.mm.default": 3, "aten.add.Tensor": 9},
        {"aten.mm.default": 1, "aten.add.Tensor": 9},
    )
    rows = text_tables.operators(before, after)
    assert rows == [("aten.mm", 3, 1), ("aten.add.Tensor", 9, 9)]
