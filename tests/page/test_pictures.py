"""What a report draws: the parts of a real prologue, the call that replaces it, and in red what the
message names.
"""

from __future__ import annotations

import pytest

from mla_fusion.observe import draw
from mla_fusion.report.picture import ROLES, Drawing
from mla_fusion.tools.page import page
from tests.page import pages


def arrows(drawn: Drawing) -> set[tuple[str, str]]:
    return {(drawn.parts[a].title, drawn.parts[b].title) for a, b in drawn.arrows}


def test_a_fused_prologue_is_drawn_part_by_part() -> None:
    report = pages.fused(2)
    (picture,) = report.pictures  # equal layers share one
    assert [item.picture for item in report.fused] == [0, 0] and picture.layer == "layers.0"
    assert arrows(picture.before) == {
        ("Layers's mul", "W_dq"), ("W_dq", "RMSNorm c_q"), ("RMSNorm c_q", "W_uq, W_qr"),
        ("W_uq, W_qr", "absorb"), ("W_uq, W_qr", "RoPE q"),
        ("absorb", "query"), ("RoPE q", "query_rope"),
        ("Layers's mul", "W_dkv, W_kr"), ("W_dkv, W_kr", "RMSNorm c_kv"), ("W_dkv, W_kr", "RoPE k"),
        ("RMSNorm c_kv", "write kv_cache"), ("RoPE k", "write kr_cache"),
        ("write kv_cache", "kv_cache"), ("write kr_cache", "kr_cache"),
    }  # fmt: skip
    parts = {part.title: part for part in picture.before.parts}
    norm = parts["RMSNorm c_q"]
    assert norm.text == "c_q = RMSNorm(x W_dq), eps 1e-06" and len(norm.steps) == 8
    assert norm.reads == ("q_norm.weight bfloat16[1536]",)
    assert all("RMSNorm" not in step.source and ".py:" in step.source for step in norm.steps)
    assert not any(part.is_red for part in parts.values())
    assert {part.role for part in parts.values()} <= {*ROLES}


def test_the_call_in_place() -> None:
    after = pages.fused(2).pictures[0].after
    assert after is not None
    kernel = "npu_mla_prolog_v3"
    assert arrows(after) == {
        (kernel, name) for name in ("query", "query_rope", "kv_cache", "kr_cache")
    }
    assert "slots int64[4]" in after.parts[0].reads and len(after.parts[0].reads) == 12


def test_what_staging_leaves_is_drawn() -> None:
    after = pages.report_of("SglangDecode").pictures[0].after
    assert after is not None
    kernel = "npu_mla_prolog_v3"
    assert {
        ("staging buffers", kernel), (kernel, "re-interleaving"), ("re-interleaving", "k_pe"),
        (kernel, "c_kv"), ("k_pe", "cache writes"), ("c_kv", "cache writes"),
    } <= arrows(after)  # fmt: skip
    assert after.parts[-1].text == "cat, index_put, copy_"


@pytest.mark.parametrize(
    ("name", "red", "node"),
    [
        ("eps_outside", ["q_a_layernorm's add"], "add"),
        ("Bias", ["W_uq, W_qr"], "addmm"),
        ("ClampedLatent", ["Base's clamp"], "clamp"),
        ("LayerNormInstead", ["q_a_layernorm's native_layer_norm"], "native_layer_norm"),
        ("NormedKey", ["kv_a_layernorm's mul", "Base's mul"], "mul_6"),
    ],
)
def test_red_nodes_and_line_are_of_what_the_message_names(
    name: str, red: list[str], node: str
) -> None:
    report = pages.report_of(name)
    (left,) = report.rejected
    drawn = report.pictures[left.picture or 0].before
    assert [part.title for part in drawn.parts if part.is_red] == red
    assert left.nodes[0] == node
    steps = [step for part in drawn.parts if part.is_red for step in part.steps]
    assert steps and all(title in left.message for title in red if "'s " in title)
    assert left.source in {step.source for step in steps}


@pytest.mark.parametrize(
    ("name", "missing", "behind"),
    [("Unabsorbed", "no W_uk product", "q_b_proj's mm"), ("NoGamma", "no gamma", "RMSNorm c_q")],
)
def test_what_is_absent_hangs_on_what_it_should_follow(
    name: str, missing: str, behind: str
) -> None:
    report = pages.report_of(name)
    drawn = report.pictures[report.rejected[0].picture or 0].before
    assert [part.title for part in drawn.parts if part.is_red] == [missing]
    assert (behind, missing) in arrows(drawn)


def test_the_line_of_a_misplaced_epsilon_is_the_additions() -> None:
    left = pages.report_of("eps_outside").rejected[0]
    assert left.nodes == ("add",) and "+ 1e-2" in left.source


@pytest.mark.parametrize("name", ["PagedRotateHalf", "Unabsorbed", "eps_outside"])
def test_what_is_too_large_is_not_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_MOST", 5)
    report = pages.report_of.__wrapped__(name)
    assert report.pictures == [] and "<svg" not in page.render(report)
