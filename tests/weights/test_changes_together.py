"""Uncounted changes come together: the look that finds one finds all."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.weights import rounds
from tests.catalogue import base, prologues
from tests.harness import assert_no_worse, clones, eager, exact

pytestmark = pytest.mark.usefixtures("fresh")


def test_one_look_finds_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(rounds.STEPS_A_LOOK, "cpu", 1)
    monkeypatch.setattr(rounds, "_SAID", set())
    model, args = prologues.Neox(), base.paged_args()
    run = torch.compile(model, backend=mf.backend(), fullgraph=True)
    with torch.no_grad():
        run(*clones(args))
    packed = [model.kv_a_proj_with_mqa.weight, model.q_b_proj.weight]
    for weight in packed:
        weight.data.mul_(2)
    wanted, unfused = exact(model, args), eager(model, clones(args))
    for _ in range(100):
        given = clones(args)
        with torch.no_grad():
            found = [run(*given), *given]
        if caplog.records:
            break
    (record,) = caplog.records
    assert "(and 1 more) has changed" in record.getMessage()
    assert_no_worse(wanted, unfused, found)
