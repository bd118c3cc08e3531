"""``mf.explain`` of a dump gives the report of the live graph that the dump came from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from mla_fusion.fx import module_path
from mla_fusion.tools.inspect.explain import DumpReport, NotRebuilt
from tests.catalogue import base, prologues, select
from tests.exhaustive import one_in

FIXTURES = Path(__file__).parents[1] / "dumps" / "fixtures"
UNVERIFIED = mf.Config(verify="off")

CASES = {
    "rotate_half": (prologues.PagedRotateHalf, base.paged_args),
    "sqrt_norm": (prologues.PagedSqrtNorm, base.paged_args),
    "even_odd": (prologues.EvenOdd, base.paged_args),
    "block_offset": (prologues.BlockOffset, base.paged_args),
    "complex_dense": (prologues.ComplexDense, prologues.dense_args),
    "npu_v2": (lambda: prologues.NpuOperators(version=2), base.paged_args),
    "fused_qkv_a": (prologues.FusedQkvA, base.paged_args),
    "indexer": (prologues.WithIndexer, base.paged_args),
}


def facts(report: mf.Report) -> dict[str, Any]:
    """The report without times."""
    data = json.loads(report.to_json())
    keys = ("fused", "rejected", "nodes_before", "nodes_after", "committed", "config")
    return {key: data[key] for key in keys}


def assert_round_trip(gm: torch.fx.GraphModule, file: Path, **options: bool) -> dict[str, Any]:
    # names of modules and arguments, and outer frames, are not in dumps
    for node in gm.graph.nodes:
        node.meta.pop("nn_module_stack", None), node.meta.pop(module_path.NAME, None)
        if "stack_trace" in node.meta:
            node.meta["stack_trace"] = node.meta["stack_trace"][
                node.meta["stack_trace"].rindex("File ") :
            ]
    file.write_text(gm.print_readable(False, **options), encoding="utf-8")
    live, dumped = facts(mf.explain(gm)), facts(mf.explain(str(file)))
    for ours, whole in zip(dumped["fused"], live["fused"], strict=True):
        for step, whole_step in zip(ours["steps"], whole["steps"], strict=True):
            assert step[2] in whole_step[2]  # a dump leaves out results that nothing reads
            step[2] = whole_step[2]
    for ours, whole in zip(dumped["rejected"], live["rejected"], strict=True):
        assert ours["score"] <= whole["score"]  # nor does it say what is a parameter
        ours["score"] = whole["score"]
    assert dumped == live
    assert live["fused"] or live["rejected"]
    return live


def graph_of(
    model: nn.Module, args: tuple[torch.Tensor, ...], dynamic: bool = False
) -> torch.fx.GraphModule:
    with torch._dynamo.config.patch(specialize_float=True):
        return capture(model, *args, device="cpu", dynamic=dynamic)[0]


@pytest.mark.parametrize(("dynamic", "name"), one_in(5, itertools.product((False, True), CASES)))
def test_round_trip(dynamic, name, tmp_path):
    torch.manual_seed(0)
    model, args = CASES[name]
    gm = graph_of(model(), args(), dynamic)
    assert len(assert_round_trip(gm, tmp_path / "graph.txt")["fused"]) == 1
    if not dynamic:
        assert_round_trip(gm, tmp_path / "graph.txt", include_stride=True, include_device=True)


MISSES = select("near miss", without="run, int8, unabsorbed")[::6]
# of an operator that no dump may name, of literals that no dump lists, of arguments like weights
UNLIKE = "OpaqueScale ListedTokens AdaptedByArguments PartsCrossed"
MISSES = [entry for entry in MISSES if entry.name not in UNLIKE.split()]


@pytest.mark.parametrize(
    "entry", one_in(3, [entry for entry in MISSES if entry.targets == ("v3",)]), ids=str
)
def test_round_trip_of_reasons(entry, tmp_path):
    found = assert_round_trip(graph_of(entry.model(), entry.args()), tmp_path / "graph.txt")
    assert (found["rejected"][0]["code"],) == entry.outcome


def test_fixtures_of_the_real_torchair():
    for name in ("fx_before.txt", "fx_strides.txt", "fx_dynamic.txt"):
        report = mf.explain(FIXTURES / name)
        assert isinstance(report, DumpReport) and not report.committed
        assert [item.placement for item in report.fused] == ["in place"], str(report)
        assert report.fused[0].source.startswith(
            "examples/fuse_your_model.py:47 in forward: q = self.q_b"
        )
    assert report.fused[0].dims["T"] == "s77"
    after = mf.explain(FIXTURES / "fx_after.txt")
    assert after.fused == [] and "fused already in this graph: 1 prologue" in str(after)


def test_config_counts():
    assert (
        mf.explain(str(FIXTURES / "fx_before.txt"), mf.Config(verify="off")).fused[0].figures == ()
    )


def test_a_damaged_size_is_refused(tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text(
        (FIXTURES / "fx_before.txt")
        .read_text()
        .replace("bf16[4, 128, 1, 512]", "bf16[4, 0-128, 1, 512]")
    )
    with pytest.raises(NotRebuilt, match="torch accepts no such graph"):
        mf.explain(file)


def listing(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "graph.txt"
    head = ("class G(torch.nn.Module):", '    def forward(self, a: "f32[2, 2]"):')
    file.write_text("\n".join([*head, *("        " + line for line in lines), ""]))
    return file


def test_graph_before_aot_is_refused(tmp_path):
    with pytest.raises(NotRebuilt, match="the graph before AOT autograd"):
        mf.explain(listing(tmp_path, "b = a.view(4)", "return (b,)"))


def test_missing_shapes_are_named(tmp_path):
    with pytest.raises(NotRebuilt, match="line 3: the dump does not tell the shape of b"):
        mf.explain(listing(tmp_path, "b = torch.ops.absent.op(a)", "return (b,)"))


def test_unknown_operators_are_remarked(tmp_path):
    file = listing(tmp_path, 'b: "f32[2, 2]" = torch.ops.absent.op.default(a)', "return (b,)")
    assert "absent.op.default is unknown here: the pass does not look inside (1 calls)" in str(
        mf.explain(file)
    )


def test_constants_without_values_are_remarked(tmp_path):
    file = listing(tmp_path, 'b: "f32[2]" = self.sign', "return (b,)")
    assert "not hold the value of the constant sign;" in str(mf.explain(file))


def test_a_dump_that_contradicts_itself_is_not_fused(tmp_path):
    file = tmp_path / "graph.txt"
    text = (FIXTURES / "fx_before.txt").read_text()
    file.write_text(text.replace('bmm: "bf16[2, 4, 512]"', 'bmm: "bf16[4, 1536]"'))
    assert not mf.explain(file).fused


def test_a_dump_that_the_pass_fails_for_is_refused(tmp_path, caplog, monkeypatch):
    """Nothing is logged as a defect."""

    def failing(*_: Any) -> None:
        raise ValueError("[4, 1536] is no [2, 4, 512]")

    monkeypatch.setattr("mla_fusion.pipeline.Projections", failing)
    file = FIXTURES / "fx_before.txt"
    with pytest.raises(NotRebuilt, match=r"the pass cannot follow this graph .*: was it edited\?"):
        mf.explain(file)
    assert not caplog.records


@pytest.mark.parametrize("size", ["[400000000, 128, 1, 512]", "[4, 1000000000000, 1, 512]"])
def test_sizes_of_a_dump_take_no_memory(size, tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text((FIXTURES / "fx_before.txt").read_text().replace("[4, 128, 1, 512]", size))
    mf.explain(file, UNVERIFIED)
    assert int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) < 16 << 20
