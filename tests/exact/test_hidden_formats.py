"""One thing hidden between rows and float formats, or before fixed scales: refused, whatever probes
show.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import ENTRIES, floats
from tests.catalogue.base import npu
from tests.exhaustive import one_in
from tests.harness import traced_graph

from .test_hidden_int8 import power

HIF8 = floats.HIF8


def report_of(name: str, *classes: type[nn.Module], **methods: Any) -> mf.Report:
    """Of an entry whose linear layers (or itself) have other methods."""
    entry = ENTRIES[name]
    torch.manual_seed(0)
    model = entry.model()
    for module in model.modules():
        if isinstance(module, classes):
            module.__class__ = type("Changed", (type(module),), methods)
    gm = traced_graph(model, *entry.args(), dynamic="symbolic" in entry.tags)
    return mf.explain(gm, entry.config(verify="off"), boundary=True)


@cache
def unchanged(name: str) -> mf.Report:
    return report_of(name)


def late_rows(self: floats.FloatLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    return type(self).__mro__[1].quantise(self, (x * power(x)).to(x.dtype))  # type: ignore[attr-defined]


def late_steps(self: floats.FloatLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    values, steps = type(self).__mro__[1].quantise(self, x)  # type: ignore[attr-defined]
    return values, (steps * power(steps)).to(steps.dtype)


def of_first_block(self: floats.FloatLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of the first two blocks for all."""
    values, scale = npu.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn)
    return values, scale[..., :1, :].expand_as(scale)


def in_hifloat8(self: floats.FloatLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    return npu.npu_dynamic_quant(x, dst_type=HIF8)


CHANGED: list[tuple[str, type[nn.Module], dict[str, Callable[..., Any]]]] = [
    ("MxFull", floats.MxLinear, {"quantise": late_rows}),
    ("MxFull", floats.MxLinear, {"quantise": of_first_block}),
    ("Fp8Full", floats.RowLinear, {"quantise": late_rows}),
    ("Fp8Full", floats.RowLinear, {"quantise": late_steps}),
    ("HifFull", floats.HifLinear, {"quantise": late_rows}),
    ("HifFull", floats.HifLinear, {"quantise": late_steps}),
]


@pytest.mark.parametrize(("name", "kind", "methods"), one_in(1, CHANGED))
def test_another_quantisation_is_refused(
    name: str, kind: type[nn.Module], methods: dict[str, Callable[..., Any]]
) -> None:
    assert unchanged(name).fused
    report = report_of(name, kind, **methods)
    assert not any(item.attributes.get("weight_quant_mode") for item in report.fused), str(report)
