"""A pass is seen by no other thread, and depends on no choice that is made for all of them."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch

import mla_fusion as mf
from tests.catalogue import Entry, prologues, select
from tests.exhaustive import one_in
from tests.harness import traced_graph


@pytest.fixture
def graph() -> torch.fx.GraphModule:
    torch.manual_seed(0)
    model = prologues.Layers(prologues.PagedRotateHalf, 3)
    gm = traced_graph(model, *prologues.layers_args(count=3))
    return gm


class Sampler(threading.Thread):
    """What the settings of the process are, over and over; the last three by new threads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[object] = set()
        self.looks = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            self.look()
            # a thread asks for its settings when it begins
            fresh = threading.Thread(target=self.look)
            fresh.start()
            fresh.join()

    def look(self) -> None:
        made = torch.empty(1)
        self.seen.add(
            (torch.get_default_dtype(), made.dtype, torch.get_num_threads(), gc.isenabled())
        )
        self.looks += 1


def test_other_threads_see_nothing_of_a_pass(graph: torch.fx.GraphModule) -> None:
    torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(3)
    sampler = Sampler()
    try:
        sampler.start()
        for _ in range(3):
            report = mf.fuse(copy.deepcopy(graph), mf.Config(verify="all"))
            assert len(report.fused) == 3
            assert torch.get_num_threads() == 3
        sampler.is_over.set()
        sampler.join()
    finally:
        sampler.is_over.set()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
    assert sampler.looks > 10
    assert sampler.seen == {(torch.bfloat16, torch.bfloat16, 3, True)}


@pytest.mark.parametrize("entry", one_in(3, select()[::20]), ids=str)
def test_the_default_dtype_of_the_process_changes_nothing(entry: Entry) -> None:
    """What is said of a graph, and every figure."""

    def said(default: torch.dtype) -> list[object]:
        torch.set_default_dtype(default)
        try:
            report = mf.explain(copy.deepcopy(gm), entry.config(verify="all"), boundary=True)
        finally:
            torch.set_default_dtype(torch.float32)
        fused = [(fusion.placement, fusion.attributes, fusion.figures) for fusion in report.fused]
        return [fused, [(rejection.code, rejection.message) for rejection in report.rejected]]

    torch.manual_seed(0)
    with torch.no_grad():
        gm = traced_graph(entry.model(), *entry.args())
    assert said(torch.float32) == said(torch.bfloat16) == said(torch.float64)
