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
from mla_fusion.compat import withdraw
from mla_fusion.compile.device_graph import capture
from mla_fusion.fx import module_path
from mla_fusion.tools.dumps import names
from mla_fusion.tools.inspect.explain import DumpReport, NotRebuilt
from tests.catalogue import (
    base,
    int8,
    int8_caches,
    norms,
    projections,
    prologues,
    rotations,
    select,
    tables,
    writes,
)
from tests.dumps import ge_files
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
    return {
        key: data[key]
        for key in ("fused", "rejected", "nodes_before", "nodes_after", "committed", "config")
    }


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
# of an operator that no dump may name
MISSES = [entry for entry in MISSES if entry.name != "OpaqueScale"]


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
            "examples/fuse_your_model.py:46 in forward: q = self.q_b"
        )
    assert report.fused[0].dims["T"] == "s77"
    assert mf.explain(FIXTURES / "fx_after.txt").fused == []


def test_config_counts():
    assert (
        mf.explain(str(FIXTURES / "fx_before.txt"), mf.Config(verify="off")).fused[0].figures == ()
    )


@pytest.mark.parametrize(
    "name", ["unfused.pbtxt", "unfused_py.txt", "ge_proto_unfused.txt", "ge_onnx_unfused.pbtxt"]
)
def test_ge_fixtures(name):
    report = mf.explain(FIXTURES / name)
    live = mf.explain(FIXTURES / "fx_before.txt")
    assert meaning(report) == meaning(live)
    assert report.fused[0].nodes[0] == "MatMul"


def test_fused_dumps_say_so():
    forms = (
        "fused.txt",
        "fused_py.txt",
        "dynamic.txt",
        "fx_after.txt",
        "ge_proto_fused.txt",
        "ge_onnx_fused.pbtxt",
    )
    for name in forms:
        assert "fused already in this graph: 1 prologue" in str(mf.explain(FIXTURES / name))


def outputs(item: Any) -> list[str]:
    """Names of the results that are read; GE has one operator for both versions of the fused cache
    write.
    """
    return sorted(set(item.replaced.values()))


def meaning(report: mf.Report) -> list[object]:
    """What was recognised, without the names of nodes, which a reason for staging may hold."""
    found = [
        (
            item.dims,
            item.cache_mode,
            item.placement.partition(":")[0],
            item.rope,
            item.attributes,
            outputs(item),
        )
        for item in report.fused
    ]
    return [*found, *(item.code for item in report.rejected)]


GE_CASES = {
    "functional_norm": (prologues.PagedFunctionalNorm, base.paged_args),
    "even_odd": (prologues.EvenOdd, base.paged_args),
    "neox": (prologues.Neox, base.paged_args),
    "npu_v2": (lambda: prologues.NpuOperators(version=2), base.paged_args),
    "fused_qkv_a": (prologues.FusedQkvA, base.paged_args),
    "npu_v1": (lambda: prologues.NpuOperators(version=1), base.paged_args),
    "block_offset": (prologues.BlockOffset, base.paged_args),
    "int8_up": (int8.PartialSmooth, base.paged_args),
    "int8": (int8.FullTransposed, base.paged_args),
    "int8_indexer": (int8.IndexerReads, base.paged_args),
    "int8_caches": (int8_caches.PlainCache, int8_caches.int8_cache_args),
    "int8_operator_cache": (int8_caches.OperatorCache, int8_caches.int8_cache_args),
    "longcat": (projections.LongCat, base.paged_args),
    "vector_norm": (norms.VectorNorm, base.paged_args),
    "computed_tables": (tables.ComputedTables, base.paged_args),
    "gptj": (rotations.GptjStack, base.paged_args),
    "scatter_rows": (writes.ScatterRows, base.paged_args),
    "both_caches_at_once": (writes.BothByOneOperator, base.paged_args),
}


@pytest.mark.parametrize("name", one_in(5, GE_CASES))
def test_ge_dump_means_what_the_live_graph_means(name, tmp_path, monkeypatch):
    from mla_fusion import converters
    from mla_fusion.compile import torchair_bridge

    runners = []
    compile_graph = torchair_bridge.compile_graph

    def keeping(*arguments):
        runners.append(compile_graph(*arguments))
        return runners[-1]

    monkeypatch.setattr(torchair_bridge, "compile_graph", keeping)
    torch.manual_seed(0)
    model, args = GE_CASES[name]
    mf.offline.activate()
    with converters.unfused_registered():
        lowered = mf.lower(model(), *args(), config=mf.Config(enable=False))
    live = meaning(mf.explain(lowered.fx_before, UNVERIFIED))
    for kind in ("pbtxt", "py"):
        runners[-1].runner.dump(str(tmp_path / f"graph.{kind}"))
        assert meaning(mf.explain(tmp_path / f"graph.{kind}", UNVERIFIED)) == live
    for form in (ge_files.proto, ge_files.onnx):
        file = tmp_path / form.__name__
        file.write_text(form(runners[-1].runner.graph._proto))
        assert meaning(mf.explain(file, UNVERIFIED)) == live


def test_ge_operator_without_counterpart_is_remarked(tmp_path):
    file = tmp_path / "graph.pbtxt"
    file.write_text((FIXTURES / "unfused.pbtxt").read_text().replace('op: "Rsqrt"', 'op: "Absent"'))
    report = mf.explain(file)
    assert report.fused == [] and "no ATen counterpart here for Absent x 2: opaque" in str(report)


def test_names_that_python_does_not_take(tmp_path):
    file = tmp_path / "graph.pbtxt"
    file.write_text(
        (FIXTURES / "unfused.pbtxt").read_text().replace('"arg9_1', '"layers.0/cache-1')
    )
    assert len(mf.explain(file).fused) == 1


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
    assert "no values of constants (sign)" in str(mf.explain(file))


def test_operators_are_those_that_are_there_now():
    """torch_npu may be loaded after the first dump was read, and defines its operators anew."""
    found = []
    for _ in range(2):
        library = torch.library.Library("atb", "FRAGMENT")
        library.define("moved_by_a_test(Tensor x) -> Tensor")
        found.append(names.target("atb.moved_by_a_test.default"))
        assert found[-1] is torch.ops.atb.moved_by_a_test.default
        withdraw(library)
        if hasattr(torch.ops.atb, "moved_by_a_test"):
            delattr(torch.ops.atb, "moved_by_a_test")
    assert found[0] is not found[1] and names.target("atb.moved_by_a_test.default") is None


def test_a_dump_that_contradicts_itself_is_refused_with_the_line(tmp_path, caplog):
    """Where the pass fails for it; nothing is logged as a defect."""
    file = tmp_path / "graph.txt"
    text = (FIXTURES / "fx_before.txt").read_text()
    file.write_text(text.replace('bmm: "bf16[2, 4, 512]"', 'bmm: "bf16[4, 1536]"'))
    with pytest.raises(
        NotRebuilt,
        match=r"line 31: bmm is no result of aten.bmm.default: the "
        r"dump says ",
    ):
        mf.explain(file)
    assert not caplog.records


@pytest.mark.parametrize("size", ["[400000000, 128, 1, 512]", "[4, 1000000000000, 1, 512]"])
def test_sizes_of_a_dump_take_no_memory(size, tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text((FIXTURES / "fx_before.txt").read_text().replace("[4, 128, 1, 512]", size))
    mf.explain(file, UNVERIFIED)
    assert int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) < 16 << 20
