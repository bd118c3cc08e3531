"""Caches, and copies of them, among what a model returns: through torchair's own passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compat import storage_id
from tests.catalogue import ENTRIES
from tests.catalogue.prologues import PagedRotateHalf
from tests.exhaustive import one_in, pairs

CONFIG = mf.Config(verify="off")
Returned = Callable[[Tensor, Tensor], object]


class Returning(PagedRotateHalf):
    def __init__(self, before: Returned | None = None, after: Returned | None = None) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, x, cos, sin, kv_cache, kr_cache, slots):  # type: ignore[no-untyped-def, override]
        first = self.before(kv_cache, kr_cache) if self.before is not None else None
        out = super().forward(x, cos, sin, kv_cache, kr_cache, slots)
        return out, first, self.after(kv_cache, kr_cache) if self.after is not None else None


class ReturningNew(PagedRotateHalf):
    """The model leaves the caches that it is given as they are."""

    def forward(self, x, cos, sin, kv_cache, kr_cache, slots):  # type: ignore[no-untyped-def, override]
        new = kv_cache.clone(), kr_cache.clone()
        return super().forward(x, cos, sin, *new, slots), *new


COPIES: dict[str, Returned] = {
    "clone": lambda kv, kr: kv.clone(),
    "of a view": lambda kv, kr: kv.view(-1, 512).clone()[:, None],
    "cat of one": lambda kv, kr: torch.cat([kr]),
    "repeat": lambda kv, kr: kr.repeat(1, 1, 1, 1),
    "pad by nothing": lambda kv, kr: torch.nn.functional.pad(kr, (0, 0)),
    "to the first power": lambda kv, kr: kr**1,
    "both": lambda kv, kr: (kv.clone(), kr.clone(), kv.clone().clone()),
    "cast": lambda kv, kr: kv.to(torch.bfloat16, copy=True),
}


def lowered(model: torch.nn.Module, mode: str, hook: bool = False) -> mf.Lowering:
    return mf.lower(model, *ENTRIES["PagedRotateHalf"].args(), mode=mode, config=CONFIG, hook=hook)


@pytest.mark.parametrize(("name", "hook"), pairs(list(COPIES)[:2], [False, True]))
def test_a_copy_taken_behind_the_write_is_none_of_the_cache(name: str, hook: bool) -> None:
    low = lowered(Returning(after=COPIES[name]), "npugraph_ex", hook)
    assert [item.placement for item in low.report.fused] == ["in place"]
    assert low.fx_ops["npu.npu_mla_prolog_v3.default"] == 1
    graph = low.fx_after.graph
    caches = [
        node
        for node in graph.find_nodes(op="placeholder")
        if node.meta["val"].shape[-1] in (512, 64)
    ]
    made_of = {storage_id(node.meta["val"]) for node in caches}
    for out in graph.output_node().args[0][1:]:
        while out.target in (torch.ops.aten.unsqueeze.default, torch.ops.aten.reshape.default):
            out = out.args[0]
        assert out not in caches
        assert storage_id(out.meta["val"]) not in made_of


@pytest.mark.parametrize("name", one_in(1, COPIES))
def test_a_copy_taken_before_the_write_is_staged(name: str) -> None:
    low = lowered(Returning(before=COPIES[name]), "npugraph_ex")
    (fusion,) = low.report.fused
    assert "cache.old_rows_read" in {one.code for one in fusion.staged_by}
    outs = low.fx_after.graph.output_node().args[0][1:]
    assert all(out.op == "call_function" for out in outs)


@pytest.mark.parametrize("mode", ["ge", "npugraph_ex"])
def test_new_caches_are_not_said_to_be_written_in_place(mode: str) -> None:
    low = lowered(ReturningNew(), mode)
    (fusion,) = low.report.fused
    assert fusion.placement.startswith("written by the kernel into new caches")
    assert "kv_cache, kr_cache" in fusion.placement and "in place" not in str(low.report)
