"""However the graph was captured: make_fx real, fake, symbolic; no decompositions, core ATen's."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import clones, distance

SPELLINGS = (prologues.PagedRotateHalf, prologues.PagedFunctionalNorm)
WAYS = itertools.product(("real", "fake", "symbolic"), (False, True), SPELLINGS)


@pytest.mark.parametrize(("mode", "core", "spelling"), one_in(3, WAYS))
def test_make_fx(mode: str, core: bool, spelling: type[torch.nn.Module]) -> None:
    """Core ATen's decomposition of rms_norm adds epsilon in place, below functionalisation."""
    torch.manual_seed(0)
    model, args = spelling().requires_grad_(False), base.paged_args()
    options: dict[str, Any] = {"decomposition_table": core_aten_decompositions() if core else None}
    options["_allow_non_fake_inputs"] = mode != "real"
    gm = make_fx(
        torch.func.functionalize(lambda *given: model(*given)), tracing_mode=mode, **options
    )(*args)
    unfused = copy.deepcopy(gm)
    assert [f.placement for f in mf.fuse(gm).fused] == ["in place"]
    before, after = clones(args), clones(args)
    assert distance(gm(*after), unfused(*before)) < 1e-2
    for plain, fused in zip(before, after, strict=True):
        assert distance(fused, plain) < 1e-2
