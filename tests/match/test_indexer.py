"""An indexer beside a prologue: recognised by what it computes, reported, and left as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import DR, HCQ, HE, Base, linear, paged_args
from tests.harness import traced_graph

HEADS, WIDTH = 4, 128


class Indexed(Base):
    """Scores of a query of c_q, four heads of which half is rotated, with normed keys of x in a
    cache.
    """

    key_width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm = (
            linear(HCQ, HEADS * WIDTH),
            linear(HE, self.key_width),
            nn.LayerNorm(WIDTH),
        )
        self.k_norm = self.k_norm.bfloat16()

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        kr_cache: Tensor,
        slots: Tensor,
        keys: Tensor,
    ) -> tuple[Tensor, ...]:
        self.given = x, cos.unsqueeze(1), sin.unsqueeze(1), slots, keys
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        x, c, s, slots, keys = self.given
        q = self.wq_b(c_q).view(-1, HEADS, WIDTH)
        q = torch.cat([self.rotate(q[..., :DR], c, s), q[..., DR:]], -1)
        k = self.k_norm(self.wk(x)[..., :WIDTH]).unsqueeze(1)
        keys[slots] = torch.cat([self.rotate(k[..., :DR], c, s), k[..., DR:]], -1).squeeze(1)
        return self.scores(q, keys)

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        return F.relu(torch.einsum("thd,sd->ths", q.float(), keys.float()))


class WiderKey(Indexed):
    """A projection of x that is not as wide as the query's heads."""

    key_width = WIDTH + DR


class Apart(Indexed):
    """Query and keys do not meet."""

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        return q.float().sum(-1) + keys.float().sum()


@pytest.mark.parametrize(("model", "found"), [(Indexed, True), (WiderKey, False), (Apart, False)])
def test_an_indexer_is_reported_beside_the_fusion(model: type[nn.Module], found: bool) -> None:
    keys = torch.zeros(64, WIDTH).bfloat16()
    report = mf.explain(traced_graph(model(), *paged_args(), keys), mf.Config(verify="off"))
    (fusion,) = report.fused
    assert fusion.placement == "in place" and fusion.attributes["query_norm_flag"]
    expected = f"an indexer of {HEADS} heads, {WIDTH} wide, {DR} columns rotated, its keys kept in "
    assert fusion.beside.startswith(expected) if found else fusion.beside == ""
    assert ("beside it" in str(report)) is found
