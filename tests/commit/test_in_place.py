"""In-place steps of graphs that are not functional: what is read must not change under it."""

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
from tests.exhaustive import pairs
from tests.harness import clones, distance, flat, traced_graph


class Doubled(prologues.PagedRotateHalf):
    """A weight is changed in place in front of the prologue."""

    def forward(self, *args: Tensor) -> Any:
        self.q_a_layernorm.weight.mul_(2)
        return super().forward(*args)


def exported(model: nn.Module, args: tuple[Tensor, ...]) -> GraphModule:
    with torch.no_grad():
        return torch.export.export(model, args).module()


def traced(model: nn.Module, args: tuple[Tensor, ...]) -> GraphModule:
    with torch.no_grad():
        return make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


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


@pytest.mark.parametrize(
    ("what", "compiles"), pairs(["slots", "pages", "x", "random"], [True, False])
)
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
    """The query is read, and the call placed, before the step that changes the slots' source."""

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
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement.startswith("staged") is changes  # the model's own writes stay


def test_a_layer_that_reads_no_changed_memory_still_fuses() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = prologues.PagedRotateHalf(), Doubled()

        def forward(self, x: Tensor, *args: Tensor) -> Any:
            return self.first(x, *args), self.second(x + 1, *args)

    report = mf.fuse(exported(Two(), base.paged_args()))
    assert len(report.fused) == 1 and [item.code for item in report.rejected] == [
        "graph.not_functional"
    ]


@pytest.mark.parametrize(
    ("model", "hook"), pairs([int8_caches.PackedRows, int8_caches.PackedClipped], [False, True])
)
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


@torch.library.custom_op("mla_fusion_tests_in_place::add_into", mutates_args=("into",))
def add_into(into: Tensor, rows: Tensor) -> None:
    into.add_(rows)


@add_into.register_fake
def _(into: Tensor, rows: Tensor) -> None:
    return None


class Buffered(base.Base):
    """Results go into a buffer, and rows into the caches by one of their own, step by step."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def absorb(self, q_nope: Tensor) -> Tensor:
        query = super().absorb(q_nope)
        return query.mul_(0.125) if self.step == "scaled" else query

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        if self.step == "cleared":
            kv_cache.zero_()
        if self.step == "rows":
            c_kv = c_kv.mul_(2)
        if self.step == "row buffer":
            rows = c_kv.new_empty(len(c_kv), base.HCKV + base.DR)
            rows[:, : base.HCKV].copy_(c_kv)
            rows[:, base.HCKV :].copy_(k_pe)
            c_kv, k_pe = rows[:, : base.HCKV], rows[:, base.HCKV :]
        if self.step == "clone":
            clone = kv_cache.clone()
            clone.view(-1, base.HCKV)[slots] = c_kv
            kv_cache.copy_(clone)
            kr_cache.view(-1, base.DR)[slots] = k_pe
            return
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)
        if self.step == "between":
            kv_cache[0].zero_()

    def forward(self, buffer: Tensor, *args: Tensor) -> Any:  # type: ignore[override]
        scores, _ = super().forward(*args)
        if self.step == "parts":
            buffer[:4].copy_(scores[:4])
            buffer[4:].copy_(scores[4:])
        if self.step == "split":
            first, last = buffer.split(4)
            first.copy_(last.zero_())
        if self.step == "unbind":
            first, *_, last = buffer.unbind(0)
            first.copy_(scores[0])
            last.zero_()
            return scores, buffer * 2
        if self.step == "out":
            torch.add(scores, 1.0, out=buffer)
        if self.step == "operator":
            own = torch.zeros_like(scores)
            add_into(own, scores)
            add_into(buffer, scores)
            return scores, own * 2, buffer * 2
        return scores


STEPS = {"scaled": 0, "rows": 0, "cleared": 1, "row buffer": 1, "clone": 1, "between": 1}
STEPS |= dict.fromkeys(("parts", "split", "unbind", "out", "operator"), 1)


@pytest.mark.parametrize("capture", [exported, traced])
@pytest.mark.parametrize(("step", "fused"), STEPS.items())
def test_a_step_writes_the_memory_that_it_wrote(
    step: str, fused: int, capture: Callable[..., GraphModule]
) -> None:
    """What it writes into is never a new tensor of the same numbers."""
    torch.manual_seed(0)
    model, args = Buffered(step).eval(), base.paged_args()
    with torch.no_grad():
        scores, _ = base.Base.forward(model, *clones(args))
    args = (torch.randn_like(scores), *args)
    gm = capture(model, args)
    report = mf.fuse(gm, mf.Config(strict=True))
    assert len(report.fused) == fused, str(report)
    assert fused or {one.code for one in report.rejected} == {"graph.not_functional"}
    with torch.no_grad():
        got = [*flat(gm(*(mine := clones(args)))), *mine]
        want = [*flat(model(*(theirs := clones(args)))), *theirs]
    assert all(distance(one, other) < 0.02 for one, other in zip(got, want, strict=True))
