"""What a report says of graphs that were never made functional: that comes first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.harness import clones, distance, flat, traced_graph


class IntoTheProduct(prologues.PagedRotateHalf):
    """As vLLM does: rotated columns go back into the product that they were taken from."""

    def query(self, x: Tensor) -> Any:
        rows = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        self.rows = rows.view(len(x), -1, base.D + base.DR)
        return self.rows.split([base.D, base.DR], -1)

    def absorb(self, q_nope: Tensor) -> Tensor:
        self.rows[..., base.D :].mul_(2)
        return super().absorb(q_nope)


class InputInPlace(prologues.PagedRotateHalf):
    """The key's side reads x once it has been changed."""

    def latent(self, x: Tensor) -> Any:
        return super().latent(x.relu_())


def test_a_value_that_a_step_changes() -> None:
    with torch.no_grad():
        gm = torch.export.export(InputInPlace(), base.paged_args()).module()
    before = str(gm.graph)
    report = mf.fuse(gm)
    assert not report.fused and str(gm.graph) == before
    assert report.rejected[0].code == "graph.not_functional"


def test_what_is_changed_behind_all_that_read_it() -> None:
    model, args = IntoTheProduct(), base.paged_args()
    with torch.no_grad():
        gm = torch.export.export(model, args).module()
        (fusion,) = mf.fuse(gm).fused
        ours, theirs = clones(args), clones(args)
        found, wanted = [*flat(gm(*ours)), *ours], [*flat(model(*theirs)), *theirs]
    assert fusion.placement.startswith("staged")
    assert all(distance(one, other) < 0.02 for one, other in zip(found, wanted, strict=True))


def test_the_copies_that_end_a_functional_graph_are_no_reason() -> None:
    gm = traced_graph(InputInPlace(), *base.paged_args())
    codes = {item.code for item in mf.fuse(gm).rejected}
    assert codes and "graph.not_functional" not in codes
