"""What a report draws: every step of a real prologue with its nodes, the call that replaces it, the
edges at fault.
"""

from __future__ import annotations

import random

import pytest

from mla_fusion.report.picture import INPUTS, ROLES, Drawing
from mla_fusion.tools.page import drawing
from mla_fusion.tools.page.layout import place
from tests.page import pages


def names(drawn: Drawing, failing: bool) -> list[tuple[str, str]]:
    dots = drawn.dots
    return [
        (dots[arrow.start].step, dots[arrow.end].step)
        for arrow in drawn.arrows
        if arrow.failing == failing
    ]


def test_a_fused_prologue_is_drawn_step_by_step():
    report = pages.fused(1)
    (picture,) = report.pictures
    assert (
        report.fused[0].picture == 0 and picture.layer == "layers.0" and picture.after is not None
    )
    boxes, lines = drawing.steps(picture.before)
    wires = {(boxes[start].title, boxes[end].title) for start, end, _, _ in lines}
    assert wires == {
        ("token_x", "W_dq"), ("weight_dq", "W_dq"), ("W_dq", "RMSNorm c_q"),
        ("rmsnorm_gamma_cq", "RMSNorm c_q"),
        ("RMSNorm c_q", "W_uq_qr"), ("weight_uq_qr", "W_uq_qr"), ("W_uq_qr", "absorb"),
        ("weight_uk", "absorb"),
        ("W_uq_qr", "RoPE q"), ("rope_cos", "RoPE q"), ("rope_sin", "RoPE q"), ("absorb", "query"),
        ("RoPE q", "query_rope"), ("token_x", "W_dkv_kr"), ("weight_dkv_kr", "W_dkv_kr"),
        ("W_dkv_kr", "RMSNorm c_kv"),
        ("rmsnorm_gamma_ckv", "RMSNorm c_kv"), ("W_dkv_kr", "RoPE k"), ("rope_cos", "RoPE k"),
        ("rope_sin", "RoPE k"),
        ("RMSNorm c_kv", "write kv_cache"), ("kv_cache", "write kv_cache"),
        ("cache_index", "write kv_cache"),
        ("RoPE k", "write kr_cache"), ("kr_cache", "write kr_cache"),
        ("cache_index", "write kr_cache"),
        ("write kv_cache", "kv_cache"), ("write kr_cache", "kr_cache"),
    }  # fmt: skip
    assert names(picture.before, failing=True) == []


def test_the_call_has_the_kernels_arguments_and_shapes():
    after = pages.fused(1).pictures[0].after
    tensors = {dot.step: dot.tensor for dot in after.dots if dot.role in INPUTS}
    assert tensors == {
        "token_x": "bfloat16[8, 1024]", "weight_dq": "bfloat16[1024, 1536]",
        "weight_uq_qr": "bfloat16[1536, 768]",
        "weight_uk": "bfloat16[4, 128, 512]", "weight_dkv_kr": "bfloat16[1024, 576]",
        "rmsnorm_gamma_cq": "bfloat16[1536]", "rmsnorm_gamma_ckv": "bfloat16[512]",
        "rope_cos": "bfloat16[8, 64]",
        "rope_sin": "bfloat16[8, 64]", "kv_cache": "bfloat16[8, 128, 1, 512]",
        "kr_cache": "bfloat16[8, 128, 1, 64]",
        "cache_index": "int64[8]",
    }  # fmt: skip
    assert {dot.step for dot in after.dots if dot.role == "output"} == {
        "query",
        "query_rope",
        "kv_cache",
        "kr_cache",
    }


def test_formulas_and_sources():
    before = pages.fused(1).pictures[0].before
    assert before.formulas["RMSNorm c_q"] == "c_q = RMSNorm(x W_dq), eps 1e-06"
    assert before.formulas["write kv_cache"] == "kv_cache[slots] = c_kv"
    norm = [dot for dot in before.dots if dot.step == "RMSNorm c_q"]
    assert len(norm) == 8 and all("rms_norm" in dot.source for dot in norm)
    assert {dot.role for dot in before.dots} <= set(ROLES)


def test_layers_of_equal_structure_share_a_picture():
    report = pages.fused(3)
    assert [item.picture for item in report.fused] == [0, 0, 0] and len(report.pictures) == 1


def test_the_edge_at_fault():
    report = pages.left(pages.Biased)
    before = report.pictures[report.rejected[0].picture].before
    (wrong,) = [arrow for arrow in before.arrows if arrow.failing]
    assert (before.dots[wrong.start].name, before.dots[wrong.end].name) == report.rejected[0].nodes[
        ::-1
    ]
    boxes, lines = drawing.steps(before)
    red = [(boxes[start].title, boxes[end].title) for start, end, failing, _ in lines if failing]
    assert red == [("q_b.bias", "W_uq_qr")]


def test_the_step_at_fault_hangs_on_the_product_that_it_reads():
    report = pages.left(pages.Cut)
    assert report.rejected[0].code == "step.choice"
    before = report.pictures[report.rejected[0].picture].before
    (wrong,) = [arrow for arrow in before.arrows if arrow.failing]
    assert before.dots[wrong.end].name == report.rejected[0].nodes[0]
    assert before.dots[wrong.start].role == "product"


def test_titles_leave_out_the_path_of_the_layer():
    report = pages.left(pages.Inside)
    titles = [box.title for box in drawing.steps(report.pictures[0].before)[0]]
    assert report.rejected[0].layer == "layers.0"
    assert not [title for title in titles if "layers.0." in title] and any(
        "q_a" in title for title in titles
    ), titles


def test_what_is_absent_hangs_on_the_product():
    report = pages.left(pages.Unabsorbed)
    before = report.pictures[report.rejected[0].picture].before
    (wrong,) = [arrow for arrow in before.arrows if arrow.failing]
    assert (
        before.dots[wrong.end].name == "no W_uk product"
        and before.dots[wrong.end].role == "missing"
    )
    assert before.dots[wrong.start].op == "aten.mm"
    roles = [box.role for box in drawing.steps(before)[0]]
    assert roles.count("norm") == 1 and roles.count("rope") == 1


@pytest.mark.parametrize("across", [True, False])
def test_boxes_do_not_overlap(across):
    before = pages.fused(1).pictures[0].before
    boxes, lines = drawing.steps(before) if across else drawing.nodes(before)
    laid = place([(box.width, 40) for box in boxes], [line[:2] for line in lines], across)
    places = zip(boxes, laid.middles, strict=True)
    corners = [(x - box.width / 2, y - 20, x + box.width / 2, y + 20) for box, (x, y) in places]
    for index, (left, top, right, bottom) in enumerate(corners):
        assert (
            left > -1e-6
            and top > -1e-6
            and right < laid.width + 1e-6
            and bottom < laid.height + 1e-6
        )
        for other in corners[:index]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


@pytest.mark.parametrize("seed", range(20))
def test_boxes_of_any_graph_do_not_overlap(seed):
    draw = random.Random(seed)
    count = draw.randrange(5, 40)
    edges = {tuple(sorted(draw.sample(range(count), 2))) for _ in range(2 * count)}
    widths = [draw.choice((60, 110, 224)) for _ in range(count)]
    laid = place([(width, 40) for width in widths], sorted(edges), across=True)
    sides = [
        (x - width / 2, y - 20, x + width / 2, y + 20)
        for width, (x, y) in zip(widths, laid.middles, strict=True)
    ]
    for index, one in enumerate(sides):
        for two in sides[:index]:
            assert one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]
    inside = [
        0 <= x <= laid.width and 0 <= y <= laid.height for line in laid.edges for x, y in line
    ]
    assert all(inside), "edges pass inside the picture"
    ends = [(points[0], points[-1]) for points in laid.edges]
    assert ends == [(laid.middles[start], laid.middles[end]) for start, end in sorted(edges)]


def test_arrows_point_forward():
    before = pages.fused(1).pictures[0].before
    boxes, lines = drawing.steps(before)
    laid = place([(box.width, 40) for box in boxes], [line[:2] for line in lines], across=True)
    assert all(laid.middles[start][0] < laid.middles[end][0] for start, end, _, _ in lines)
