"""Verification as a second witness: what recognition would take for equal, or never tried, does not
pass it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.commit import draws, region, token_counts, verify
from mla_fusion.emit import rows, targets
from mla_fusion.fx.kinds import holds_integers
from mla_fusion.fx.program import Program
from mla_fusion.fx.view import View
from mla_fusion.match.finder import Finder
from mla_fusion.operators.known import operator_of
from mla_fusion.plan.whole import PrologPlanner
from tests.catalogue import base, floats, layouts, prologues, rotations
from tests.harness import traced_graph

aten = torch.ops.aten


def large_cache_args(blocks: int) -> list[Tensor]:
    """As they come to a compiler: without memory."""
    small = base.paged_args()
    caches = [cache.to("meta").new_empty(blocks, *cache.shape[1:]) for cache in small[3:5]]
    return [*(value.to("meta") for value in small[:3]), *caches, small[5].to("meta")]


def planned(gm: GraphModule) -> tuple[View, Any]:
    view = View(gm)
    (candidate,) = Finder(view).find()
    return view, PrologPlanner(view, mf.Config(), candidate).plan()  # type: ignore[arg-type]


def outcome(gm: GraphModule, config: mf.Config | None = None) -> str:
    view, plan = planned(gm)
    try:
        return verify.compare(view, plan).verified
    except mf.report.rejection.Refuse as reason:  # type: ignore[attr-defined]
        return f"{reason.code}: {reason.detail}"


def after(gm: GraphModule, node: Any, op: Any, *args: Any, only: Any = None) -> None:
    """Put a step behind ``node`` without recognition seeing it: the plan was made before."""
    with gm.graph.inserting_after(node):
        made = gm.graph.call_function(op, (node, *args))
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(
        made, lambda user: user is not made and (only is None or user in only)
    )


def changed_in_secret(op: Any, *args: Any, where: str = "norm") -> str:
    """The verdict on a region in which one step was added after the plan had been made."""
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    _view, plan = planned(gm)
    q, k = plan.candidate.query, plan.candidate.key
    node = {"norm": q.norm.node, "kv": k.norm.node, "x": q.down.origin, "cos": plan.cos[0].base}[
        where
    ]
    only = {k.rope.node, *k.rope.node.all_input_nodes} if where == "cos" else None
    if where == "x":
        only = {user for user in node.users if "key" not in user.name and user is not q.down.node}
        only = set(list(only)[:1]) or None
    after(gm, node, op, *args, only=only)
    try:
        return verify.compare(View(gm), plan).verified
    except mf.report.rejection.Refuse as reason:  # type: ignore[attr-defined]
        return f"{reason.code}: {reason.detail}"


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.clamp.default, (-8.0, 8.0)),
        (aten.hardtanh.default, (-10.0, 10.0)),
        (aten.fmod.Scalar, (12.0,)),
        (aten.threshold.default, (-9.0, 0.0)),
        (aten.clamp_max.default, (11.0,)),
    ],
)
@pytest.mark.parametrize("where", ["norm", "kv"])
def test_one_outlier_channel_shows_a_choice_by_value(
    op: Any, args: tuple[Any, ...], where: str
) -> None:
    assert changed_in_secret(op, *args, where=where).startswith("verify.mismatch")


def test_what_is_random_is_known_by_its_tag() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    drawn = [
        aten.native_dropout.default,
        aten.rand_like.default,
        aten.bernoulli.p,
        aten.randperm.default,
    ]
    assert all(operator_of(graph.call_function(op, (x,))).random for op in drawn)
    assert not operator_of(graph.call_function(aten.add.Tensor, (x, x))).random


def test_an_untouched_region_is_verified() -> None:
    view, plan = planned(traced_graph(prologues.PagedRotateHalf(), *base.paged_args()))
    result = verify.compare(view, plan)
    assert result.verified == "verified" and result.left_out == ()
    assert result.compared == f"compared at T = 8, 5 draws, {len(plan.replacements)} outputs"
    assert len(result.figures) == len(plan.replacements)
    assert all(figure.row <= verify.OF_A_ROW * verify.TOLERANCE for figure in result.figures)


@pytest.mark.parametrize("row", [0, 5, 199])
def test_one_wrong_row_does_not_hide_among_many(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is scaled by a tenth: among 200 rows that is 0.7 % of the whole."""
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args(tokens=200))
    right = targets.call_kernel

    def wrong(b: Any, plan: Any) -> Any:
        results = dict(right(b, plan))
        results["query"] = results["query"].clone()
        results["query"][row] *= 1.1
        return results

    view, plan = planned(gm)
    monkeypatch.setattr(targets, "call_kernel", wrong)
    with pytest.raises(mf.report.rejection.Refuse, match="in one row"):  # type: ignore[attr-defined]
        verify.compare(view, plan)


def test_a_symbolic_number_of_tokens_is_tried_twice() -> None:
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args(), dynamic=True)
    (fusion,) = mf.fuse(gm).fused
    assert fusion.verified == "verified"
    first, second = (
        fusion.compared.partition(",")[0].removeprefix("compared at T = ").split(" and ")
    )
    assert int(first) < 20 and int(second) >= token_counts.MANY


def test_the_second_run_has_more_sequences_too() -> None:
    view, plan = planned(
        traced_graph(layouts.Sequences(), *layouts.sequence_args(3, 4), dynamic=True)
    )
    sizes = plan.token_x.meta["val"].shape[:-1]
    first, second, *_ = (
        sized.binding.shape(sizes)
        for sized in token_counts.counts(view, plan, region.cut_out(view, plan))
    )
    assert all(few != many for few, many in zip(first, second, strict=True))


def test_what_depends_on_the_number_of_the_token_shows() -> None:
    """Tokens from the sixteenth on are halved: five tokens do not tell."""
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args(), dynamic=True)
    _view, plan = planned(gm)
    node = plan.candidate.query.norm.node
    with gm.graph.inserting_after(node):
        head = gm.graph.call_function(aten.slice.Tensor, (node, 0, 0, 16))
    with gm.graph.inserting_after(head):
        tail = gm.graph.call_function(aten.slice.Tensor, (node, 0, 16, 9223372036854775807))
    with gm.graph.inserting_after(tail):
        half = gm.graph.call_function(aten.mul.Tensor, (tail, 0.5))
    with gm.graph.inserting_after(half):
        joined = gm.graph.call_function(aten.cat.default, ([head, half],))
    for made in (head, tail, half, joined):
        made.meta["val"] = node.meta["val"]
    for user in list(node.users):
        if user not in (head, tail):
            user.replace_input_with(node, joined)
    gm.graph.lint()
    with pytest.raises(mf.report.rejection.Refuse, match="relative error"):  # type: ignore[attr-defined]
        verify.compare(View(gm), plan)


class ByPosition(prologues.PagedRotateHalf):
    """Tables computed from positions; the key's from positions that are cut, wrapped or rounded."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *rest: Tensor) -> Any:
        return super().forward(x, *self.tables(positions, cos), *rest)

    def tables(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        width = like.shape[-1] // 2
        frequencies = 10000.0 ** (-torch.arange(width) / width)
        angles = positions.double().unsqueeze(-1) * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def test_tables_are_made_from_positions_far_out() -> None:
    x, cos, sin, *rest = base.paged_args()
    gm = traced_graph(ByPosition(""), x, cos, sin, torch.arange(len(x)), *rest)
    view, plan = planned(gm)
    cut = region.cut_out(view, plan)
    (positions,) = (
        leaf for leaf, role in cut.leaves.items() if role == "" and holds_integers(leaf)
    )
    drawn = draws.Draws(view, plan, cut, None, False, 0)
    seen = torch.cat(
        [drawn.values(kind, draws.CEILINGS[0])[positions].reshape(-1) for kind in draws.KINDS]
    )
    assert int(seen.min()) == 0 and int(seen.max()) > 1 << 15
    assert verify.compare(view, plan).verified == "verified"


def test_positions_that_are_cut_show_far_out() -> None:
    x, cos, sin, *rest = base.paged_args()
    gm = traced_graph(ByPosition(""), x, cos, sin, torch.arange(len(x)), *rest)
    _view, plan = planned(gm)
    table = plan.cos[0].base
    with gm.graph.inserting_after(table):
        cut = gm.graph.call_function(aten.neg.default, (table,))
    cut.meta["val"] = table.meta["val"]
    readers = [user for user in table.users if user is not cut]
    readers[0].replace_input_with(table, cut)
    with pytest.raises(mf.report.rejection.Refuse):  # type: ignore[attr-defined]
        verify.compare(View(gm), plan)


def test_gathered_tables_keep_within_their_rows() -> None:
    class Gathered(prologues.PagedRotateHalf):
        def forward(
            self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *rest: Tensor
        ) -> Any:
            return super().forward(x, cos[positions], sin[positions], *rest)

    x, _cos, _sin, *rest = base.paged_args()
    args = (
        x,
        torch.randn(37, 64).bfloat16(),
        torch.randn(37, 64).bfloat16(),
        torch.arange(len(x)),
        *rest,
    )
    view, plan = planned(traced_graph(Gathered(), *args))
    cut = region.cut_out(view, plan)
    drawn = draws.Draws(view, plan, cut, None, False, 0)
    (positions,) = (leaf for leaf in drawn._bounds)
    assert drawn._bounds[positions] == 37
    ends = {int(drawn.values(kind, draws.CEILINGS[0])[positions].max()) for kind in draws.KINDS}
    assert max(ends) == 36
    assert verify.compare(view, plan).verified == "verified"


def test_slots_are_distinct_and_hold_both_ends() -> None:
    view, plan = planned(traced_graph(prologues.PagedRotateHalf(), *base.paged_args()))
    cut = region.cut_out(view, plan)
    (slots,) = (leaf for leaf, role in cut.leaves.items() if role == "slots")
    blocks, size = plan.caches.kv_shape[:2]
    for kind in draws.KINDS:
        drawn = draws.Draws(view, plan, cut, None, False, 0).values(kind, 1)[slots]
        assert len(set(drawn.tolist())) == drawn.numel()
        assert {0, int(blocks * size) - 1} <= set(drawn.tolist())


def test_a_cache_of_any_size_is_compared() -> None:
    """4 GiB of latents, of which nothing is allocated here."""
    gm = traced_graph(prologues.PagedRotateHalf().to("meta"), *large_cache_args(65536))
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement == "in place" and fusion.verified == "verified"
    sizes = {figure.output: figure.elements for figure in fusion.figures}
    assert 0 < sizes["kv_cache"] < 1 << 20 and sizes["kr_cache"] > 0


def test_a_wrong_slot_shows_in_a_large_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rows.slots
    monkeypatch.setattr(rows, "slots", lambda b, plan, lead: right(b, plan, lead).flip(0))
    gm = traced_graph(prologues.PagedRotateHalf().to("meta"), *large_cache_args(8192))
    assert outcome(gm).startswith("verify.mismatch")


def test_half_rows_are_compared_in_the_models_order() -> None:

    report = mf.fuse(
        traced_graph(rotations.GptjStack(), *base.paged_args()), mf.Config(kr_layout="half")
    )
    (fusion,) = report.fused
    assert fusion.verified == "verified" and "half" not in fusion.placement
    assert {"query_rope", "kr_cache"} <= {figure.output for figure in fusion.figures}


def refusal(gm: GraphModule, plan: Any) -> str:
    try:
        return verify.compare(View(gm), plan).verified
    except mf.report.rejection.Refuse as reason:  # type: ignore[attr-defined]
        return f"{reason.code}: {reason.detail}"


@pytest.mark.parametrize("where", ["norm", "kv"])
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.clamp.default, (-1e9, 1e9)),
        (aten.hardtanh.default, (-1e4, 1e4)),
        (aten.clamp_max.default, (1e18,)),
        (aten.fmod.Scalar, (1e12,)),
        (aten.hardshrink.default, (1e-9,)),
        (aten.add.Scalar, (1e-15,)),
    ],
)
def test_what_acts_on_very_large_or_small_numbers_alone_shows(
    op: Any, args: tuple[Any, ...], where: str
) -> None:
    assert changed_in_secret(op, *args, where=where).startswith("verify.mismatch")


def test_a_model_that_makes_much_of_its_own_rounding_is_not_excused() -> None:
    """What bfloat16 leaves of a number, 1000 times over: over the real numbers it is nothing."""
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    _view, plan = planned(gm)
    node = plan.candidate.query.norm.node
    readers = list(node.users)
    last = node

    def step(op: Any, *args: Any, dtype: torch.dtype = torch.float32) -> Any:
        nonlocal last
        with gm.graph.inserting_after(last):
            casts = {"dtype": dtype} if op is aten._to_copy.default else {}
            last = gm.graph.call_function(op, args, casts)
        last.meta["val"] = node.meta["val"].to(dtype)
        return last

    def cast(value: Any, dtype: torch.dtype) -> Any:
        return step(aten._to_copy.default, value, dtype=dtype)

    scaled = step(aten.mul.Tensor, cast(node, torch.float32), 1.1)
    rounded = cast(scaled, torch.bfloat16)
    rest = step(aten.mul.Tensor, step(aten.sub.Tensor, scaled, rounded), 1000.0)
    changed = cast(step(aten.add.Tensor, node, rest), torch.bfloat16)
    for reader in readers:
        reader.replace_input_with(node, changed)
    gm.graph.lint()
    assert refusal(gm, plan).startswith("verify.mismatch")


@pytest.mark.parametrize("tokens", [1, 8])
def test_draws_of_float64_span_forty_decades(tokens: int) -> None:
    view, plan = planned(traced_graph(prologues.PagedRotateHalf(), *base.paged_args(tokens=tokens)))
    cut = region.cut_out(view, plan)
    drawn = draws.Draws(view, plan, cut, None, False, 0)
    (x,) = (leaf for leaf, role in cut.leaves.items() if role == "x")
    gammas = [leaf for leaf, role in cut.leaves.items() if role == "gamma"]
    small, large = (drawn.values(kind, 1) for kind in draws.WIDE)
    rows = torch.cat([small[x], large[x]]).abs().amax(-1)
    assert rows.dtype == torch.float64
    assert rows.min() < 1e-19 and rows.max() > 1e20
    assert all(torch.equal(large[gamma], small[gamma] * 1e20) for gamma in gammas) and gammas


def test_the_witness_does_not_run_what_facts_are_read_by(monkeypatch: pytest.MonkeyPatch) -> None:
    view, plan = planned(traced_graph(prologues.PagedRotateHalf(), *base.paged_args()))
    monkeypatch.setattr(Program, "run", None)
    monkeypatch.setattr(Program, "__init__", None)
    assert verify.compare(view, plan).verified == "verified"


def halved_and_twice(codes: Tensor, scales: Tensor) -> None:
    """The first block of each token by another power of two, as its rounded largest may have it."""
    codes[..., :32] = (codes[..., :32].float() / 2).to(codes.dtype)
    of_block(scales).copy_(of_block(scales) + 1)


def twice_alone(codes: Tensor, scales: Tensor) -> None:
    of_block(scales).copy_(of_block(scales) + 1)


def in_the_next_block(codes: Tensor, scales: Tensor) -> None:
    codes[..., 32:64] = (codes[..., 32:64].float() / 2).to(codes.dtype)
    of_block(scales).copy_(of_block(scales) + 1)


def four_times(codes: Tensor, scales: Tensor) -> None:
    """More than a rounding does."""
    codes[..., :32] = (codes[..., :32].float() / 4).to(codes.dtype)
    of_block(scales).copy_(of_block(scales) + 2)


def of_block(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8).flatten(1)[:, :1]


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (halved_and_twice, True),
        (twice_alone, False),
        (in_the_next_block, False),
        (four_times, False),
    ],
)
def test_numbers_in_blocks_are_compared_in_their_scales(
    change: Any, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    gm = traced_graph(floats.MxIndexed(), *base.paged_args())
    call = targets.call_kernel

    def changed(builder: Any, plan: Any) -> Any:
        results = call(builder, plan)
        change(results["query_norm"], results["dequant_scale_q_norm"])
        return results

    monkeypatch.setattr(targets, "call_kernel", changed)
    assert outcome(gm, mf.Config(soc="A5")).startswith("verified") == is_same


def test_errors_against_float64_stand_beside_those_of_the_unfused_run() -> None:
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    (fusion,) = mf.explain(gm, boundary=True).fused
    errors = {figure.output: figure.float64 for figure in fusion.figures}
    assert {"query", "query_rope", "kv_cache", "kr_cache"} == errors.keys()
    for fused, unfused in filter(None, errors.values()):
        assert 0 < fused < 1.5 * unfused < 2e-2
    assert None not in errors.values()
