"""Every variant fuses, with the boundary and without, in the CPU form and in the device's, as exactly as before."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import spellings as s
from tests.catalogue.mixtures import MIXTURES
from tests.catalogue.variants import IN_PLACE, STAGED, VARIANTS
from tests.harness import assert_as_exact, both_ways, clones, compiled

ALL = {name: (model, args, [placement]) for name, (model, args, placement) in VARIANTS.items()} | MIXTURES


@pytest.mark.parametrize("name", ALL)
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, args, placements = ALL[name]
    module, given = model(), args()
    for report, fused in both_ways(module, given):
        assert [f.placement.partition(":")[0] for f in report.fused] == placements, str(report)
        assert_as_exact(module, given, fused, slack=1.2)


@pytest.mark.parametrize("name", ALL)
def test_device_form(name: str) -> None:
    model, args, placements = ALL[name]
    gm, _ = capture(model(), *args(), device="npu")
    report = mf.fuse(gm)
    assert [f.placement.partition(":")[0] for f in report.fused] == placements, str(report)


# What symbolic sizes change most: products that einsum lowers by views, weights of three axes, writes of rows.
SYMBOLIC = """
    AbsorbByEinsum AllNopeThenAllRope ChunkedWeights CombinedCache ComputedTables EinsumLinear InPlaceQuery
    NpuRopeHeadsFirst QueryAssembled RotatedTogether ScatterRows Sequences StaticCache TablesFromTheEnd
    WeightOfThreeAxes WeightOnTheLeft ZeroResidual
""".split()


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(name: str) -> None:
    torch.manual_seed(0)
    model, args, placements = ALL[name]
    compiled(model(), args(), "mla_fusion", dynamic=True)
    report = mf.reports()[-1]
    assert [f.placement.partition(":")[0] for f in report.fused] == placements, str(report)


@pytest.mark.parametrize(
    ("model", "marked", "placement"),
    [
        (s.PagedRotateHalf(), (0, 1, 2, 5), IN_PLACE),
        (s.PagedRotateHalf(), (0, 1, 2), STAGED),
        (s.NpuOperators(), (0, 1, 2, 5), IN_PLACE),
    ],
)
def test_tokens_marked_dynamic(model: torch.nn.Module, marked: tuple[int, ...], placement: str) -> None:
    """``mark_dynamic`` gives every tensor a symbol of its own; the operators themselves say what must be as many."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = s.paged_args(8)
    for place in marked:
        torch._dynamo.mark_dynamic(args[place], 0)
    with torch.no_grad():
        compiled_model = torch.compile(model, backend="mla_fusion", fullgraph=True)
        compiled_model(*args)
        report = mf.reports()[-1]
        assert [f.placement.partition(":")[0] for f in report.fused] == [placement], str(report)
        if placement == IN_PLACE:
            graphs = len(mf.reports())
            given = s.paged_args(13)
            fused = [compiled_model(*(ours := clones(given))), *ours]
            assert len(mf.reports()) == graphs, "another number of tokens needs no second graph"
            assert_as_exact(model, given, fused)
