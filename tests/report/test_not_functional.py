"""Writes to caches in graphs that were not functionalised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.exhaustive import pairs


class Copied(Base):
    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv_cache.view(-1, HCKV).index_copy_(0, slots, c_kv)
        kr_cache.view(-1, DR).index_copy_(0, slots, k_pe)


def exported(model: Base) -> Any:
    return torch.export.export(model, paged_args()).module()


def traced(model: Base) -> Any:
    return make_fx(model)(*paged_args())


def functional(model: Base) -> Any:
    return make_fx(torch.func.functionalize(lambda *args: model(*args)))(*paged_args())


@pytest.mark.parametrize(("trace", "model"), pairs([exported, traced], [Base, Copied]))
def test_rows_written_in_place_are_told_to_functionalise(
    trace: Callable[[Base], Any], model: type[Base]
) -> None:
    """The model writes whole rows by index already: to say so again would not help."""
    with torch.no_grad():
        report = mf.explain(trace(model()))
    (fusion,) = report.fused
    assert fusion.placement.startswith("staged")
    assert "[cache.not_functional]" in str(report) and "Functionalise first" in str(report)


@pytest.mark.parametrize("model", [Base, Copied])
def test_functional_rows_are_written_by_the_kernel(model: type[Base]) -> None:
    with torch.no_grad():
        (fusion,) = mf.explain(functional(model())).fused
    assert fusion.placement == "in place"
