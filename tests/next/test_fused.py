"""The next core, over the catalogue: what it fuses is placed as the entry says, and gives what the
model gives.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.utils._pytree import tree_leaves

from mla_fusion.fx.normalise import forms
from mla_fusion.next.caches import InPlace
from mla_fusion.next.fuse import Outcome, fuse
from tests.catalogue import ENTRIES, IN_PLACE, STAGED, Entry
from tests.exhaustive import one_in
from tests.harness import clones, held_by, traced_graph

# What this core does not do yet, or does otherwise.
OTHERWISE = frozenset(
    "ScaledByPosition NormByScaledGram CutAgain scaled_shear LongCat SlotsFromQuery NewRowsRead "
    "HalvesOfTheBatch "
    "PartsOfTheBatch both_by_other_blocks no_token OneLayerForTwo LayerCopiedToTheNext "
    "LayersReadTogether LayerByTensor KnownMultiples Scattered AssignedBehindTheHead Float32Norms "
    "ComplexTraining LightLlm QueryByPosition RowOfEachRequest LongRowOfEachRequest "
    "CachesByPosition TwoOfThreeOverlap Normalize FourSequences FromOneBefore "
    "OneBlockForTwo".split()
)
FAR = 0.03  # of the norm of an output in bfloat16, by which two orders of rounding differ

WHOLE = [
    entry
    for entry in ENTRIES.values()
    if {entry.weight_quant_mode, entry.kv_cache_quant_mode} == {0}
    and entry.tags.isdisjoint(("int8", "floats", "static", "key", "unabsorbed", "plain"))
    and set(entry.outcome) <= {IN_PLACE, STAGED}
    and entry.name not in OTHERWISE
]


def placements(outcome: Outcome) -> tuple[str, ...]:
    return tuple(
        IN_PLACE if isinstance(fused.caches, InPlace) else STAGED for fused in outcome.fused
    )


@pytest.mark.parametrize("entry", one_in(1, WHOLE, first=4), ids=str)
def test_what_is_fused_is_placed_as_the_entry_says_and_gives_what_the_model_gives(
    entry: Entry,
) -> None:
    torch.manual_seed(0)
    model, args = entry.model(), entry.args()
    traced = traced_graph(model, *args)
    outcome = fuse(next(forms(traced, boundary=True)))
    assert placements(outcome) == entry.outcome, outcome.refused
    rewritten = outcome.rewritten
    assert rewritten is not None
    if len(rewritten.graph.find_nodes(op="placeholder")) != len(held_by(model)) + len(args):
        return  # layers of a pool are inputs of their own, which a wrapper makes
    both = []
    for gm in (traced, rewritten):
        given = clones(args)
        with torch.no_grad():
            found = Interpreter(gm).run(*held_by(model).values(), *given)
        both.append([one for one in (*tree_leaves(found), *given) if isinstance(one, Tensor)])
    for before, after in zip(*both, strict=True):
        if before.is_floating_point():
            far = (before.double() - after.double()).norm()
            assert far <= FAR * before.double().norm()
        else:
            assert torch.equal(before, after)


# of tokens on one axis: sizes that are computed of several are not lowered yet
SYMBOLIC = "PagedRotateHalf Neox by_einsum".split()


@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_graph_with_symbolic_sizes_is_fused_as_well(name: str) -> None:
    entry = ENTRIES[name]
    traced = traced_graph(entry.model(), *entry.args(), dynamic=True)
    assert placements(fuse(next(forms(traced, boundary=True)))) == entry.outcome
