"""Values lowered to tensors, and to nodes of a graph: arguments of the kernel, and its results as the
model has them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from mla_fusion.compat import hint_of
from mla_fusion.fx import normalise
from mla_fusion.fx.build import GraphBuilder, TensorBuilder
from mla_fusion.graph.form import Value, order
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.propose.prologue import Proposal, proposals
from mla_fusion.propose.sites import Projections
from mla_fusion.reference import npu_mla_prolog_v3_functional
from tests.catalogue import ENTRIES
from tests.harness import held_by, traced_graph

aten = torch.ops.aten
ATTRIBUTES = ("rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv")
TOLERANCE = 0.05  # of the largest element, in bfloat16

STATIC = """
AbsorbByEinsum MatrixPerHead LinearPerHead GroupsApart loop PagedRotateHalf PagedFunctionalNorm
EvenOdd ComplexDense Neox NpuOperatorsV2 FusedQkvA OneToken Sequences AsManyAsLongSharedRows Megatron
Functional TokensLast SglangBuffers GptjStack RollWithSigns by_einsum by_matmul scaled_shear
rolled_pairs HalvesAsWindows PairsInPlace CutAgain OnePlusGamma NormOfTensorSize columns_flipped
columns_indexed ChunkedWeights SeparateUpProjections AllNopeThenAllRope WeightOnTheLeft GatheredTables
ChunkedTables CountedPairs OnePosition weight_turned columns_overlap TwoLayersOtherRows Float32Norms
LightLlm ByPermutations RotationMatrices NoRopeScaledQuery HalvesOfTheBatch TablesByVariance
""".split()
DYNAMIC = """
PagedRotateHalf EvenOdd ComplexDense Neox NpuOperatorsV2 Sequences AsManyAsLong Functional
FourSequences by_einsum HalvesAsWindows ComputedTables HeadsFirst GatheredFlat Float32Norms
NothingRotated LightLlm HalvesOfTheQuery NoRopePrefill
""".split()
CASES = [(name, False) for name in STATIC] + [(name, True) for name in DYNAMIC]


class Run(Interpreter):
    """Each node of a graph as it is before its inputs are written."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        is_copy = n.target is aten.copy_.default
        found = self.fetch_args_kwargs_from_env(n)[0][1] if is_copy else super().run_node(n)
        self.values[n] = found
        return found


class Hints:
    """Sizes as they were when the graph was traced."""

    def size(self, size: Any) -> int:
        return int(hint_of(size))


class Case:
    def __init__(self, name: str, dynamic: bool) -> None:
        entry = ENTRIES[name]
        torch.manual_seed(0)
        model, args = entry.model(), entry.args()
        gm = traced_graph(model, *args, dynamic=dynamic)
        self.gm = next(normalise.forms(gm, True))
        self.given = [*held_by(model).values(), *args]
        self.graph = Graph(self.gm)
        found = proposals(Projections(self.graph))
        self.proposals = [one for one in found if isinstance(one, Proposal)]

    @property
    def symbols(self) -> list[int]:
        """Inputs that are sizes come behind the others."""
        return [hint_of(node.meta["val"]) for node in self.inputs if not is_tensor(node)]

    @property
    def inputs(self) -> list[Node]:
        return list(self.gm.graph.find_nodes(op="placeholder"))

    @torch.no_grad()
    def run(self) -> dict[Node, Any]:
        runner = Run(self.gm)
        runner.run(*[one.clone() for one in self.given])
        return runner.values


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def kept(case: Case, proposal: Proposal) -> Any:
    """Is a node no part of what the kernel computes?"""
    made = set[Value]()
    for value in order(case.graph.nodes):
        is_product = value.op == "dot" and value.sources[0] is proposal.x
        if is_product or not made.isdisjoint(value.sources):
            made.add(value)
    return lambda node: made.isdisjoint(values_of(case.graph.readings[node]))


def arguments(lowering: Lowering, proposal: Proposal) -> dict[str, Any]:
    given = {
        name: float(one) if name in ATTRIBUTES else lowering.of(one, torch.bfloat16)
        for name, one in proposal.arguments.items()
        if name in ATTRIBUTES or isinstance(one, Value)
    }
    return given


def call(given: dict[str, Any]) -> dict[str, Tensor]:
    """The results of the CPU kernel, as the proposal names them."""
    tokens = given["token_x"].shape[0]
    caches = {
        name: torch.zeros(tokens, 1, width, dtype=torch.bfloat16)
        for name, width in (("kv_cache", 512), ("kr_cache", 64))
    }
    query, query_rope, _, latents, _, kv_rows, kr_rows = npu_mla_prolog_v3_functional(
        **given, **caches, cache_mode="TND", query_norm_flag=True
    )
    return {
        "query": query,
        "query_rope": query_rope,
        "query_norm": latents,
        "kv_rows": kv_rows,
        "kr_rows": kr_rows,
    }


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_results_of_the_kernel_stand_in_for_nodes(name: str, dynamic: bool) -> None:
    case = Case(name, dynamic)
    values = case.run()
    builder = TensorBuilder(values, Hints())  # type: ignore[arg-type]
    whole = Lowering(builder, case.graph)
    assert case.proposals
    for proposal in case.proposals:
        lowering = Lowering(builder, case.graph, usable=kept(case, proposal))
        with torch.no_grad():
            found = call(arguments(lowering, proposal))
            lowering.known |= {getattr(proposal.results, part): one for part, one in found.items()}
            for claim in proposal.claims:
                kernel = lowering.of(claim.kernel, torch.bfloat16).double()
                model = whole.of(claim.graph, torch.bfloat16).double()
                limit = TOLERANCE * model.abs().max()
                assert kernel.shape == model.shape
                assert bool(((kernel - model).abs() <= limit).all()), claim.part
