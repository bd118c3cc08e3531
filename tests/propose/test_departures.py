"""Why near misses stay as they are, in the next core: the code of the entry or one that is as true,
one reason for each prologue, and no reason where there is no prologue.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.report.rejection import CODES
from tests.catalogue import ENTRIES, IN_PLACE, STAGED, Entry
from tests.catalogue.base import HE, HfNorm, linear, rotate_half, tables
from tests.exhaustive import one_in
from tests.harness import as_for_backend, graph_of, outcome

# Another code than the entry's, as true: what the nearest step is, not what it comes to.
AS_TRUE = {
    "OwnWeights": "linear.hidden",
    "MxInOtherBlocks": "linear.hidden",
    "MxGivenInRows": "linear.hidden",
    "MxKeyScaleOfAnotherRow": "quant.tokens_differ",
    "MxSmoothed": "contract:forbidden.smooth_scales_cq",
    "QueryInputRounded": "quant.mixed",
    "QueryInputHalf": "kv_latent.absent",
    "LatentRounded": "step.choice",
    "NormsSoftlyCapped": "norm.absent",
    "OverlappingWindows": "step.unknown",
    "WindowsOfTokens": "step.unknown",
    "RopeOnHalfTheColumns": "rope.absent",
    "q_of_other_heads": "rope.tables_differ",
    "AMatrixForEachSequence": "proof.differs",
    "one_head_scaled": "scale.unequal",
    "QueryNeitherRotatedNorAbsorbed": "absorb.absent",
    "NormElsewhere": "absorb.absent",
    "Dots3Unabsorbed": "absorb.absent",
    "of another tensor": "quant.scale",
    "of the next row": "quant.scale",
    "in float8": "quant.scale",
    "no token scale": "quant.scale",
    "token scale twice": "quant.scale",
    "scales added": "quant.scale",
    "scales in float8": "quant.scale",
    "in int8": "linear.hidden",
    "with a bias": "linear.bias",
    "sums added to": "linear.bias",
    "bias": "linear.bias",
    "rescaled to int8": "absorb.absent",
    "weight as uint8": "contract:dtype.weight_uq_qr",
    "weight in float8": "contract:dtype.weight_uq_qr",
    "in float16": "dtype.region",
}
# What the next core fuses, with the numbers that the model gives, or does not read yet.
FUSED = frozenset(
    "OneScale Fp8OneScale one_matrix_for_both one_head_added_to SlotsFromSizeOfQuery LayoutsDiffer "
    "k_pairs_left k_swapped k_one_token_later moved".split()
) | {"over 127 again"}
LATER = frozenset(
    "OneScaledCache FullWithChannelCaches OperatorNormMode OperatorAndSum KeptCopies".split()
)
MISSES = [
    entry
    for entry in ENTRIES.values()
    if "near miss" in entry.tags
    and "unabsorbed" not in entry.tags
    and not set(entry.outcome) & {IN_PLACE, STAGED}
    and entry.name not in FUSED | LATER
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def explained(entry: Entry) -> mf.Report:
    if entry.name == "LatentDropout":  # what AOT makes of a dropout
        gm = graph_of(entry.model(), *entry.args())
    else:
        gm, _ = as_for_backend(entry.model(), entry.args())
    return mf.explain(gm, entry.config(verify="off", strict=True), boundary=True)


@pytest.mark.parametrize("entry", one_in(1, MISSES, first=3), ids=str)
def test_a_near_miss_has_one_reason_with_the_code_of_the_entry(entry: Entry) -> None:
    report = explained(entry)
    assert not report.fused
    (rejection,) = report.rejected
    assert outcome(report) == (AS_TRUE.get(entry.name, *entry.outcome),), str(report)
    assert rejection.nodes and 0 < rejection.score <= 1
    meaning, _ = CODES[rejection.code.partition(":")[0]]
    assert rejection.message.startswith(f"{meaning} (")


def test_two_nodes_with_one_name_are_told_apart() -> None:
    entry = ENTRIES["QueryInChunks"]
    report = mf.explain(graph_of(entry.model(), *entry.args()), entry.config(verify="off"))
    (rejection,) = report.rejected
    name = re.escape("q_nope_proj's mm [4, 256]")
    assert re.search(f"{name} and another {name}", rejection.message), rejection.message


@pytest.mark.parametrize("name", ["weights_swapped", "one_head_rounded", "one_weight_for_both"])
def test_a_fused_prologue_has_no_reason_beside_it(name: str) -> None:
    report = explained(ENTRIES[name])
    assert report.fused and not report.rejected


class Gqa(nn.Module):
    """Attention with grouped heads, and a gated layer: no latents.

    ``has_norms``: heads are normed before they are rotated
    """

    def __init__(self, has_norms: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = linear(HE, 512), linear(HE, 128), linear(HE, 128)
        self.o, self.gate, self.down = linear(512, HE), linear(HE, 2048), linear(1024, HE)
        self.norm = HfNorm(HE)
        self.of_heads = HfNorm(64) if has_norms else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 64)) for one in (self.q, self.k, self.v))
        q, k = (
            one * cos[:, None] + rotate_half(one) * sin[:, None]
            for one in (self.of_heads(q), self.of_heads(k))
        )
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        scores = torch.einsum("thd,shd->hts", q, k).softmax(-1)
        x = x + self.o(torch.einsum("hts,shd->thd", scores, v).flatten(1))
        gate, up = self.gate(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class RelativePositions(nn.Module):
    """Two layers whose queries meet weights head by head, beside keys that are cached."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = HfNorm(HE), linear(HE, 512), linear(HE, 512)
        self.o, self.by_head = linear(64, HE), nn.Parameter(torch.randn(8, 64, 64).bfloat16())

    def forward(self, x: Tensor, keys: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            q, k = (one(self.norm(x)).unflatten(-1, (8, 64)) for one in (self.q, self.k))
            keys = keys.index_put((slots,), k)
            query = torch.bmm(q.transpose(0, 1), self.by_head)
            x = x + self.o(torch.einsum("htd,shd->hts", query, keys)[0])
        return x, keys


WITHOUT = {
    "grouped": lambda: (Gqa(False), *tables(8)),
    "grouped, normed": lambda: (Gqa(True), *tables(8)),
    "relative": lambda: (
        RelativePositions(),
        torch.randn(64, 8, 64).bfloat16(),
        torch.arange(8),
    ),
}


@pytest.mark.parametrize("make", WITHOUT.values(), ids=WITHOUT)
def test_of_a_graph_without_a_prologue_nothing_is_said_but_what_it_has(
    make: Callable[[], tuple[Any, ...]],
) -> None:
    model, *args = make()
    gm, _ = as_for_backend(model, (torch.randn(8, HE).bfloat16(), *args))
    report = mf.explain(gm, mf.Config(verify="off"), boundary=True)
    assert not report.fused and not report.rejected
    assert "no MLA prologue in this graph" in report.absent[0]
