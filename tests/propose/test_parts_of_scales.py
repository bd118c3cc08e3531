"""Scales of cache rows that are parts of a longer tensor."""

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV
from tests.catalogue.int8_attention import Int8AttentionByQuantize, int8_latent_args
from tests.catalogue.int8_caches import PlainCache, int8_cache_args
from tests.harness import clones, outcome, traced_graph


class OneVector(PlainCache):
    """Scales of both caches in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(20 + 10 * torch.rand(HCKV + DR), requires_grad=False)

    def parts(self) -> tuple[Tensor, Tensor]:
        return self.scales[:HCKV], self.scales[HCKV:]

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        of_kv, of_kr = self.parts()
        kv_cache.view(-1, HCKV)[slots] = self.quantise(c_kv, of_kv)
        kr_cache.view(-1, DR)[slots] = self.quantise(k_pe, of_kr)


class Elements(OneVector):
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.scales[3], self.scales[5:6]


class Flipped(OneVector):
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.scales[:HCKV].flip(0), self.scales[::9]


@pytest.mark.parametrize("kind", [OneVector, Elements, Flipped])
def test_part_of_a_vector_is_a_scale(kind: type[OneVector]) -> None:
    model, args = kind(), int8_cache_args()
    with torch.no_grad():
        run = torch.compile(model, backend=mf.backend(mf.Config(verify="all")), fullgraph=True)
        for factor in 1.0, 0.5:
            model.scales.mul_(factor)
            plain, fused = clones(args), clones(args)
            model(*plain)
            run(*fused)
            for want, found in zip(plain[3:5], fused[3:5], strict=True):
                apart = (want.int() - found.int()).abs()
                assert apart.max() <= 1 and (apart > 0).float().mean() < 0.02
    assert outcome(mf.reports()[-1]) == ("in place",)


class OfSteps(Int8AttentionByQuantize):
    """The step of rows, and that of the query, are elements of one parameter."""

    of_rows, of_query = 1, 1

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.tensor([0.04, 0.05, 0.06]), requires_grad=False)

    def quantise(self, rows: Tensor) -> Tensor:
        step = self.steps[self.of_rows : self.of_rows + 1]
        return torch.ops.npu.npu_quantize(rows, step, None, torch.int8, -1, True)

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        step = self.steps[self.of_query]
        return (query_rope.float() / (scale.unsqueeze(-1) * step)).to(query_rope.dtype)


class OfOtherSteps(OfSteps):
    of_query = 0


@pytest.mark.parametrize(
    ("kind", "placement"), [(OfSteps, "in place"), (OfOtherSteps, "staged")], ids=str
)
def test_query_is_brought_to_the_rows_own_element(kind: type[OfSteps], placement: str) -> None:
    report = mf.fuse(traced_graph(kind(), *int8_latent_args()), mf.Config(strict=True))
    assert outcome(report) == (placement,), str(report)
