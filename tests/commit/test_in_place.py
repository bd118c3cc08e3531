"""In-place steps in graphs that were never made functional: what a prologue reads must not change
under it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.compile import torchair_bridge
from tests.catalogue import base, int8_caches, prologues
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, distance, traced_graph


class Steps(prologues.PagedRotateHalf):
    """A step in place before the prologue, and one after it."""

    def __init__(self, before: str = "", after: str = "") -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, x: Tensor, *args: Tensor) -> Any:
        self.step(self.before, x, *args)
        result = super().forward(x, *args)
        self.step(self.after, x, *args)
        return result

    def step(
        self, name: str, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor, slots: Tensor
    ) -> None:
        if name == "x":
            x.mul_(2)
        elif name == "view of x":
            x[:2].view(-1).zero_()
        elif name == "diagonal of x":
            x.diagonal().mul_(50)
        elif name == "memory of x":
            x.as_strided((3, 5), (2, 1)).mul_(2)
        elif name == "cos":
            cos.neg_()
        elif name == "slots":
            slots.sub_(slots.min())
        elif name == "cache":
            kv.zero_()
        elif name == "weight":
            self.kv_b_proj.weight.mul_(2)
        elif name == "gamma":
            self.q_a_layernorm.weight.mul_(2)


def exported(model: nn.Module, args: tuple[Tensor, ...]) -> GraphModule:
    with torch.no_grad():
        return torch.export.export(model, args).module()


def traced(model: nn.Module, args: tuple[Tensor, ...]) -> GraphModule:
    with torch.no_grad():
        return make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


CAPTURES = {"export": exported, "make_fx": traced}


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "what",
    one_in(2, ["x", "view of x", "diagonal of x", "memory of x", "cos", "weight", "gamma"]),
)
def test_a_step_on_what_the_call_reads(
    what: str, when: str, capture: Callable[..., GraphModule]
) -> None:
    gm = capture(Steps(**{when: what}), base.paged_args())
    before = str(gm.graph)
    report = mf.fuse(gm)
    assert not report.fused and str(gm.graph) == before
    (rejection,) = report.rejected  # a changed W_uk is none that the recogniser knows as a weight
    assert rejection.code == "graph.not_functional" or (what, when, rejection.code) == (
        "weight",
        "before",
        "absorb.absent",
    )


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["slots", "cache"])
def test_a_step_on_what_the_models_own_write_reads(what: str, when: str) -> None:
    """Staged, the call reads neither slots nor caches: the steps and the write stay in their
    order.
    """
    torch.manual_seed(0)
    model, args = Steps(**{when: what}), base.paged_args()
    gm = exported(model, args)
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement.startswith("staged")
    with torch.no_grad():
        got = gm(*(given := clones(args)))
    assert_as_exact(model, args, [*([got] if isinstance(got, Tensor) else got), *given], slack=1.3)


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize("what", ["x", "gamma"])
def test_a_copy_into_what_was_read(what: str, capture: Callable[..., GraphModule]) -> None:
    """The model has read it, and the call, which stands further down, would read it again."""

    class Copies(prologues.PagedRotateHalf):
        def forward(self, x: Tensor, *args: Tensor) -> Any:
            self.target = x if what == "x" else self.q_a_layernorm.weight
            return super().forward(x, *args)

        def absorb(self, q_nope: Tensor) -> Tensor:
            self.target.copy_(self.target.flip(0))
            return super().absorb(q_nope)

    report = mf.fuse(capture(Copies(), base.paged_args()))
    assert [item.code for item in report.rejected] == ["graph.not_functional"]


class Advances(prologues.PagedRotateHalf):
    """Slots, or x, that are computed of memory which is changed later in the graph."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("table", torch.tensor([[0, 1], [2, 3]] * 4))
        self.register_buffer("rows", torch.randn(64, base.HE).to(torch.bfloat16))

    def forward(self, count: Tensor, x: Tensor, *args: Tensor) -> Any:  # type: ignore[override]
        slots = count + torch.arange(len(x))
        if self.what == "pages":
            places = count + torch.arange(len(x))
            pages = self.table[: len(x)].gather(1, (places // base.BLOCK_SIZE)[:, None])
            slots = pages[:, 0] * base.BLOCK_SIZE + places % base.BLOCK_SIZE
        if self.what == "x":
            x, slots = self.rows[slots], args[-1]
        if self.what == "random":
            x, slots = x + torch.rand_like(x), args[-1]
        result = super().forward(x, *args[:-1], slots)
        count.view(-1).add_(8 + torch.rand(1).long())
        return result, torch.rand(3)


@pytest.mark.parametrize("compiles", [True, False], ids=["compile", "make_fx"])
@pytest.mark.parametrize("what", ["slots", "pages", "x", "random"])
def test_what_the_call_is_given_is_computed_where_it_was(what: str, compiles: bool) -> None:
    torch.manual_seed(0)
    model, args = Advances(what).eval(), (torch.zeros(1, dtype=torch.int64), *base.paged_args())
    if compiles:
        run: Any = torch.compile(model, backend=mf.backend(), fullgraph=True)
    else:
        run = traced(model, args)
        assert len(mf.fuse(run).fused) == 1
    with torch.no_grad():
        drawn = [torch.manual_seed(1), run(*(given := clones(args)))][1]
        wanted = [torch.manual_seed(1), model(*(expected := clones(args)))][1]
    assert torch.equal(drawn[1], wanted[1]) and torch.equal(given[0], expected[0])
    assert len(mf.reports()[-1].fused) == 1
    for got, want in zip((*drawn[0], *given[1:]), (*wanted[0], *expected[1:]), strict=True):
        assert distance(got, want) < 0.02


@pytest.mark.parametrize("changes", [True, False])
def test_what_would_move_ahead_of_a_step(changes: bool) -> None:
    """The query is read, and the call placed, before the step that changes what the slots are
    computed of.
    """

    class Late(prologues.PagedRotateHalf):
        def absorb(self, q_nope: Tensor) -> Tensor:
            query = super().absorb(q_nope)
            self.early = query * 2
            return query

        def forward(self, x: Tensor, *args: Tensor) -> Any:
            return super().forward(x, *args[:-1], args[-1] + 1), self.early

    *args, slots = base.paged_args()
    gm = traced_graph(Late(), *args, slots.clamp_max(62))
    (reader,) = (n for n in gm.graph.nodes if "mul" in n.name and n.args[1:] == (2,))
    inputs = gm.graph.find_nodes(op="placeholder")
    (given,) = (node for node in inputs if node.meta["val"].dtype == torch.int64)
    late = min(given.users)
    reader.append(late)  # the step comes between
    with gm.graph.inserting_before(late):
        fresh = gm.graph.call_function(torch.ops.aten.zeros_like.default, (given,))
        fresh.meta["val"] = given.meta["val"]
        target = given if changes else fresh
        step = gm.graph.call_function(torch.ops.aten.copy_.default, (target, fresh))
        step.meta["val"] = given.meta["val"]
    report = mf.fuse(gm)
    assert bool(report.fused) is not changes
    assert [item.code for item in report.rejected] == ["graph.not_functional"] * changes


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize(
    "write", [lambda q: q.unfold(-1, 8, 8).mul_(2), lambda q: q.diagonal(0, 1, 2).zero_()]
)
def test_a_step_on_a_view_of_the_query(
    write: Callable[[Tensor], Any], capture: Callable[..., GraphModule]
) -> None:
    class Writes(prologues.PagedRotateHalf):
        def absorb(self, q_nope: Tensor) -> Tensor:
            write(q_nope)
            return super().absorb(q_nope)

    assert not mf.fuse(capture(Writes(), base.paged_args())).fused


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
def test_a_step_on_something_else(capture: Callable[..., GraphModule]) -> None:
    torch.manual_seed(0)

    class Counts(prologues.PagedRotateHalf):
        def forward(self, count: Tensor, *args: Tensor) -> Any:  # type: ignore[override]
            count.add_(1)
            return super().forward(*args)

    model, args = Counts(), (torch.zeros(3), *base.paged_args())
    gm = capture(model, args)
    assert len(mf.fuse(gm).fused) == 1
    with torch.no_grad():
        got = gm(*(given := clones(args)))
    assert_as_exact(model, args, [*([got] if isinstance(got, Tensor) else got), *given], slack=1.3)


def test_a_layer_that_reads_no_changed_memory_still_fuses() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = prologues.PagedRotateHalf(), Steps(before="gamma")

        def forward(self, x: Tensor, *args: Tensor) -> Any:
            return self.first(x, *args), self.second(x + 1, *args)

    report = mf.fuse(exported(Two(), base.paged_args()))
    assert len(report.fused) == 1 and [item.code for item in report.rejected] == [
        "graph.not_functional"
    ]


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("model", [int8_caches.PackedRows, int8_caches.PackedClipped])
def test_npugraph_ex_writes_packed_rows_in_place(model: type[nn.Module], hook: bool) -> None:
    lowered = mf.lower(model(), *int8_caches.packed_args(), mode="npugraph_ex", hook=hook)
    (fusion,) = lowered.report.fused
    assert fusion.placement == "in place" and fusion.attributes["kv_cache_quant_mode"] == 3
    (call,) = [node for node in lowered.fx_after.graph.nodes if "mla_prolog" in str(node.target)]
    assert str(call.target) == "npu.npu_mla_prolog_v3.default" and call.args[9].op == "placeholder"
    assert "aten.copy_.default" not in lowered.fx_ops


def test_what_torchair_leaves_copied_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a user has switched its pass off."""
    usual = torchair_bridge.compiler_config

    def without_the_pass(mode: str = "ge") -> Any:
        config = usual(mode)
        config.input_inplace_pass = False
        return config

    monkeypatch.setattr(torchair_bridge, "compiler_config", without_the_pass)
    lowered = mf.lower(prologues.PagedRotateHalf(), *base.paged_args(), mode="npugraph_ex")
    assert lowered.fx_ops["aten.copy_.default"] == 2
    assert lowered.report.fused[0].placement.startswith("written by the kernel, copied by copy_")
