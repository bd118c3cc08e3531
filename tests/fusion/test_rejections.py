"""Every rejection: its code, its message, and the graph left exactly as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.commit import verify
from mla_fusion.compile.device_graph import capture
from mla_fusion.fx.view import View
from mla_fusion.match.candidate import Candidate
from mla_fusion.match.finder import Finder
from mla_fusion.plan import verdict
from mla_fusion.report.rejection import CODES
from tests.catalogue import near_misses, quantised_misses
from tests.catalogue import spellings as s
from tests.harness import assert_as_exact, clones, compiled


def graph_of(model: torch.nn.Module, *args: torch.Tensor, device: str = "cpu", **options: Any) -> GraphModule:
    with torch._dynamo.config.patch(specialize_float=True):
        return capture(model, *args, device=device, **options)[0]


def refused(gm: GraphModule, config: mf.Config | None = None) -> mf.report.rejection.Rejection:  # type: ignore[name-defined]
    before = str(gm.graph)
    report = mf.fuse(gm, config)
    assert report.fused == [], str(report)
    assert str(gm.graph) == before
    rejection, *_ = report.rejected
    assert rejection.message.startswith(CODES[rejection.code.partition(":")[0]][0])
    assert rejection.nodes and rejection.remedy
    return rejection


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("name", near_misses.REFUSED)
def test_near_miss(name: str, device: str) -> None:
    code, model = near_misses.REFUSED[name]
    assert refused(graph_of(model(), *s.paged_args(), device=device)).code == code


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("name", quantised_misses.REFUSED)
def test_quantised_near_miss(name: str, device: str) -> None:
    code, model, args = quantised_misses.REFUSED[name]
    assert refused(graph_of(model(), *args(), device=device)).code == code


def test_explain_gives_the_reason_that_fuse_gives() -> None:
    gm = graph_of(near_misses.Bias(), *s.paged_args())
    assert mf.explain(gm).rejected == mf.fuse(gm).rejected


def test_explain_changes_nothing() -> None:
    gm = graph_of(s.PagedRotateHalf(), *s.paged_args())
    before = str(gm.graph)
    assert len(mf.explain(gm).fused) == 1
    assert str(gm.graph) == before


class GroupedQuery(torch.nn.Module):
    """Two layers of ordinary attention over keys that come from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = s.linear(256, 384), s.linear(256, 256)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q = self.qkv(x)[..., :256].view(-1, 4, 64).transpose(0, 1)
            rows = torch.bmm(torch.bmm(q, keys).softmax(-1), values)
            x = x + self.out(rows.transpose(0, 1).reshape(-1, 256))
        return x


def test_other_attention_is_no_near_miss() -> None:
    args = (torch.randn(shape).bfloat16() for shape in ((8, 256), (4, 64, 32), (4, 32, 64)))
    assert mf.explain(graph_of(GroupedQuery(), *args)).rejected == []


def test_a_defect_costs_one_layer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    judged = []

    def judge(view: View, candidate: Candidate) -> None:
        judged.append(candidate)
        if len(judged) == 2:
            raise KeyError("of the second layer")

    monkeypatch.setattr(verdict, "judge", judge)
    report = mf.fuse(graph_of(s.Layers(), *s.layers_args()), mf.Config(strict=False))
    assert len(report.fused) == 2
    (rejection,) = report.rejected
    assert rejection.code == "pass.failed" and "KeyError: 'of the second layer'" in rejection.message
    assert rejection.nodes == tuple(node.name for node in judged[1].nodes)
    assert "raise KeyError" in caplog.text


def test_a_graph_that_the_pass_cannot_read_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(self: Finder) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Finder, "find", find)
    model, args = s.PagedRotateHalf(), s.paged_args()
    got, want = (
        compiled(model, clones(args), backend) for backend in (mf.backend(mf.Config(strict=False)), "aot_eager")
    )
    assert [rejection.code for rejection in mf.reports()[-1].rejected] == ["pass.failed"]
    assert all(map(torch.equal, got, want))


def test_a_predicate_that_raises_is_the_callers_error() -> None:
    gm = graph_of(s.PagedRotateHalf(), *s.paged_args())
    with pytest.raises(RuntimeError, match=r"in Config.skip raised AttributeError"):
        mf.fuse(gm, mf.Config(skip=(lambda candidate: candidate.no_such_fact,)))


def test_source_line_is_the_models() -> None:
    rejection = refused(graph_of(near_misses.Bias(), *s.paged_args()))
    assert "near_misses.py" in rejection.source


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ({}, 1152, "contract:dims.he"),
        ({"cann": "8.5"}, 1056, "contract:dims.he"),
    ],
)
def test_hidden_size_that_the_kernel_refuses(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, str], value: int, code: str
) -> None:
    monkeypatch.setattr(s, "HE", value)
    rejection = refused(graph_of(s.PagedRotateHalf(), *s.paged_args()), mf.Config(**option))
    assert rejection.code == code
    assert str(value) in rejection.message


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_model_dtype(dtype: torch.dtype) -> None:
    model = s.PagedRotateHalf().to(dtype)
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in s.paged_args())
    rejection = refused(graph_of(model, *args))
    assert rejection.code in ("dtype.region", "norm.gamma_dtype")
    assert str(dtype).removeprefix("torch.") in rejection.message


def test_block_size_that_the_kernel_refuses_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "BLOCK_SIZE", 8)
    args = s.paged_args()
    report = mf.fuse(graph_of(s.PagedRotateHalf(), *args))
    assert "the kernel refuses the caches" in report.fused[0].placement
    rejection = refused(graph_of(s.PagedRotateHalf(), *args), mf.Config(staging="never"))
    assert rejection.code.startswith("contract:dims.") and "BlockSize" in rejection.message


def test_runtime_epsilon() -> None:
    gm, _ = capture(s.PagedRotateHalf(), *s.paged_args(), device="cpu", dynamic=True)
    assert refused(gm).code == "norm.runtime_eps"


def test_staging_forbidden() -> None:
    gm = graph_of(s.ComplexDense(), *s.dense_args())
    rejection = refused(gm, mf.Config(staging="never"))
    assert rejection.code == "cache.staging_forbidden"


class FirstTokensHalved(near_misses.Base):
    def latent(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c_kv, k_pe = super().latent(x)
        return c_kv, torch.cat([k_pe[:16] / 2, k_pe[16:]])


def test_tokens_are_treated_differently() -> None:
    args = s.paged_args(40)
    for index in (0, 1, 2, 5):
        torch._dynamo.mark_dynamic(args[index], 0)
    rejection = refused(graph_of(FirstTokensHalved(), *args))
    assert rejection.code == "tokens.mixed" and "takes some of the tokens" in rejection.message


class SomeHeads(s.Prologue):
    """The first heads of a larger weight: how many, a number says."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> Any:
        kv_cache, kr_cache, slots, heads = rest
        q = self.q_a_layernorm(self.q_a_proj(x)) @ self.q_b_proj.weight[: heads * (s.D + s.DR)].T
        q_nope, q_pe = q.view(-1, heads, s.D + s.DR).split([s.D, s.DR], -1)
        c_kv, k_pe = self.latent(x)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            x = s.hf_interleave(x)
            return x * cos.unsqueeze(1) + s.rotate_half(x) * sin.unsqueeze(1)

        query = torch.einsum("tnd,ndc->tnc", q_nope, self.w_uk()[:heads])
        kv_cache.view(-1, s.HCKV)[slots] = c_kv
        kr_cache.view(-1, s.DR)[slots] = rotate(k_pe.unsqueeze(1)).squeeze(1)
        return query, rotate(q_pe)


def test_a_symbolic_number_of_heads() -> None:
    model, args = SomeHeads(4), s.paged_args()
    run = torch.compile(model, backend=mf.backend(), fullgraph=True, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        for heads in (2, 3):
            given = clones(args)
            torch.testing.assert_close(run(*given, heads), model(*clones(args), heads), rtol=2e-2, atol=2e-2)
    assert [item.code for report in mf.reports() for item in report.rejected] == ["linear.symbolic"]


class SlotsLowered(near_misses.Base):
    def slots(self, slots: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return slots - 1


def test_slots_may_be_negative() -> None:
    gm = graph_of(SlotsLowered(), *s.paged_args())
    assert refused(gm, mf.Config(staging="never")).code == "slots.unproven"
    (fusion,) = mf.explain(gm).fused
    assert fusion.placement.startswith("staged: sub may be negative")


def test_operator_cache_mode() -> None:
    gm = graph_of(s.NpuOperators(), *s.paged_args())
    for node in gm.graph.nodes:
        if "kv_rmsnorm_rope_cache" in str(node.target):
            node.kwargs = {**node.kwargs, "cache_mode": "Norm"}
    assert refused(gm).code == "cache.operator_mode"


def _table(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None] * 10000 ** -torch.linspace(0, 1, s.DR // 2)
    both = torch.cat([angles, angles], -1)
    return both.cos().bfloat16(), both.sin().bfloat16()


@pytest.mark.parametrize(
    ("tokens", "change"), [(1, torch.neg), (1, lambda at: at * 2), (8, lambda at: at % 8), (8, lambda at: at.clamp(1))]
)
def test_key_at_other_positions(tokens: int, change: Any) -> None:
    """Positions that agree where they are drawn as 0, or below the number of tokens."""

    class Elsewhere(near_misses.Base):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: torch.Tensor) -> Any:
            *_, self.positions = rest
            return super().forward(x, *_table(self.positions), *rest)

        def rotate_k(self, k_pe: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            c, s = (table.unsqueeze(1) for table in _table(change(self.positions)))
            return super().rotate_k(k_pe, c, s)

    gm = graph_of(Elsewhere(), *s.paged_args(tokens))
    assert refused(gm, mf.Config(verify="off")).code == "rope.tables_differ"


def test_operator_with_fewer_slots_than_tokens() -> None:
    *args, slots = s.paged_args(8)
    rejection = refused(graph_of(s.NpuOperators(), *args, slots[:4]))
    assert rejection.code == "cache.slots" and "[4] slots" in rejection.message


def test_call_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(verify.call, "call_kernel", fail)
    rejection = refused(graph_of(s.PagedRotateHalf(), *s.paged_args()))
    assert rejection.code == "verify.mismatch" and "no such kernel" in rejection.message


def test_graph_that_is_not_functional() -> None:
    class InPlace(near_misses.Base):
        def rotate_q(self, q_pe: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            rotated = self.rotate(q_pe, c, s)
            seen = rotated.sum()  # before the change, and it must stay so
            return rotated.mul_(seen / seen)

    gm = torch.export.export(InPlace(), s.paged_args()).module()
    assert isinstance(gm, GraphModule)
    assert refused(gm).code == "graph.not_functional"


def test_exported_programs() -> None:
    """torch.export's graph keeps its cache writes in place (staged); decomposed, it is functional."""
    program = torch.export.export(s.PagedRotateHalf(), s.paged_args())
    gm = program.module()
    assert isinstance(gm, GraphModule)
    assert [f.placement.partition(":")[0] for f in mf.fuse(gm).fused] == ["staged"]
    assert [f.placement for f in mf.fuse(program.run_decompositions().graph_module).fused] == ["in place"]


def test_a_prologue_that_nobody_reads() -> None:
    """Dead ends that no clean-up has taken away: the last values are there, and nothing after them."""
    gm = graph_of(near_misses.Base(), *s.paged_args())
    (fusion,) = mf.explain(gm).fused
    *nodes, output = gm.graph.nodes
    made = [node for node in nodes if node.name in fusion.replaced]
    rows = [node for write in made for node in write.all_input_nodes if "index_put" in str(write.target)]
    output.args = ((nodes[0],),)
    after = {*made, *rows}
    for node in nodes:
        if after.intersection(node.all_input_nodes):
            after.add(node)
    kept = {node for node in made if "cache" not in fusion.replaced[node.name]}
    for node in reversed(nodes):
        if node in after and node not in kept and node.op == "call_function" and not node.users:
            gm.graph.erase_node(node)
    assert refused(gm).code == "graph.unread"


def test_mixed_streams() -> None:
    gm = graph_of(s.PagedRotateHalf(), *s.paged_args())
    mm = next(node for node in gm.graph.nodes if "mm" in node.name)
    mm.meta["stream_label"] = "11"
    assert refused(gm).code == "stream.mixed"


def test_tokens_of_rank_four() -> None:
    x, *rest = s.paged_args()
    gm = graph_of(near_misses.RankFour(), x.view(2, 2, 2, s.HE), *rest, device="npu")
    assert refused(gm).code == "token_x.layout"


def test_table_shared_by_sequences_needs_a_sequence_axis() -> None:
    x, _, _, *caches = s.paged_args(8)
    gm = graph_of(near_misses.SharedRows(), x, *s.tables(4), *caches)
    assert refused(gm).code == "rope.table_shape"


def test_every_code_is_provoked_here() -> None:
    """A code that no test provokes is a promise nobody keeps."""
    source = "".join(Path(module).read_text() for module in (__file__, near_misses.__file__, quantised_misses.__file__))
    assert [code for code in CODES if f'"{code}' not in source] == []


def test_verification_catches_a_wrong_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_fusion.emit import rows

    right = rows.table
    monkeypatch.setattr(rows, "table", lambda b, table, lead: b.call(torch.ops.aten.neg.default, right(b, table, lead)))
    rejection = refused(graph_of(s.PagedRotateHalf(), *s.paged_args()))
    assert rejection.code == "verify.mismatch"
    assert str(verify.TOLERANCE) in rejection.message


def test_failure_while_committing_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_fusion.commit import rewrite

    gm = graph_of(s.Layers(), *s.layers_args())
    before, calls = str(gm.graph), []
    right = rewrite.call.fit

    def fails_late(b: Any, *args: Any) -> Any:
        calls.append(b)
        if type(b).__name__ == "GraphBuilder" and len(calls) > 9:
            raise RuntimeError("out of luck")
        return right(b, *args)

    monkeypatch.setattr(rewrite.call, "fit", fails_late)
    with pytest.raises(RuntimeError, match="out of luck"):
        mf.fuse(gm)
    assert str(gm.graph) == before


def test_gradients_are_declined() -> None:
    torch._dynamo.reset()
    model = s.PagedRotateHalf()
    args = clones(s.paged_args())
    out = torch.compile(model, backend=mf.backend())(*args)
    assert out.requires_grad
    assert [r.code for r in mf.reports()[-1].rejected] == ["autograd"]


@pytest.mark.parametrize(
    "entry", ["layers.1", lambda candidate: "layers.1" in str(candidate.nodes[0].meta["nn_module_stack"])]
)
def test_skip_by_layer_and_predicate(entry: Any) -> None:
    gm = graph_of(s.Layers(), *s.layers_args())
    report = mf.fuse(gm, mf.Config(skip=(entry,)))
    assert len(report.fused) == 2
    assert [(r.code, r.layer) for r in report.rejected] == [("skip", "layers.1")]


@pytest.mark.parametrize("entry", ["contract", "contract:dims.he"])
def test_skip_by_code_is_silent(entry: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(s, "HE", 1152)
    gm = graph_of(s.PagedRotateHalf(), *s.paged_args())
    rejection = refused(gm, mf.Config(skip=(entry,)))
    assert rejection.code == "skip" and "contract:dims.he is in Config.skip" in rejection.message
    assert not caplog.records
    assert refused(gm).code == "contract:dims.he" and len(caplog.records) == 1


class InABranch(torch.nn.Module):
    """The prologue writes no cache here: a branch may not change what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.prologue = near_misses.Base()

    def forward(self, flag: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def computed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            p = self.prologue
            q_nope, q_pe = p.split(p.q_b_proj(p.q_a_layernorm(p.q_a_proj(x))))
            c_kv, k_pe = p.latent(x)
            c, s_ = cos.unsqueeze(1), sin.unsqueeze(1)
            k = p.rotate(k_pe.unsqueeze(1), c, s_).squeeze(1)
            return s.attend(p.absorb(q_nope), p.rotate(q_pe, c, s_), c_kv, k)

        def nothing(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return computed(x, cos, sin) * 0

        return torch.cond(flag, computed, nothing, (x, cos, sin))


def test_a_prologue_in_a_branch_is_named() -> None:
    x, cos, sin, *_ = s.paged_args()
    rejection = refused(graph_of(InABranch(), torch.tensor(True), x, cos, sin))
    assert rejection.code == "graph.branch" and "cond" in rejection.message


def test_disabled_pass_leaves_the_graph() -> None:
    gm = graph_of(s.PagedRotateHalf(), *s.paged_args())
    before = str(gm.graph)
    report = mf.fuse(gm, mf.Config(enable=False))
    assert (report.fused, report.rejected, str(gm.graph)) == ([], [], before)


def test_exact_variations_still_fuse() -> None:
    """What looks odd but changes nothing the kernel computes: a gate on the latent stays outside."""
    torch.manual_seed(0)
    model, args = near_misses.GatedLatent(), s.paged_args()
    fused = compiled(model, clones(args), mf.backend())
    assert mf.reports()[-1].fused[0].placement.startswith("staged")
    assert_as_exact(model, args, fused)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: mf.fuse(torch.nn.Linear(2, 2)), TypeError, "GraphModule"),  # type: ignore[arg-type]
        (lambda: mf.fuse(torch.fx.symbolic_trace(torch.nn.Linear(2, 2))), ValueError, "meta"),
        (lambda: mf.Config(verify="sometimes"), ValueError, "off, first, all"),
        (lambda: mf.Config(cann="9.9"), ValueError, "9.0, 9.1, latest"),
        (lambda: mf.Config(soc="910B"), ValueError, "A2, A3, A5"),
        (lambda: mf.Config(skip="layers.1"), ValueError, "sequence"),  # type: ignore[arg-type]
        (lambda: mf.torchair_pass(mf.Config(skip=(lambda c: True,))), ValueError, "module-level"),
    ],
)
def test_bad_calls(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_config_can_be_copied() -> None:
    assert copy.deepcopy(mf.Config(verify="all")) == mf.Config(verify="all")
