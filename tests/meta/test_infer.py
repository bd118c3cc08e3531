"""`mf.meta.infer`: releases, older versions, and torch_npu in every scenario; random calls:
test_properties.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mla_fusion import meta, offline, reference
from tests.samples import sample_call


def outline(results: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in results]


def test_absent_results_before_cann_8_5() -> None:
    call = sample_call()
    assert [shape for shape, _ in meta.infer("npu_mla_prolog_v3", cann="8.3", **call)][2:] == [
        (1,)
    ] * 3
    assert [shape for shape, _ in meta.infer("npu_mla_prolog_v3", cann="8.5", **call)][2:] == [
        (0,)
    ] * 3


def test_v1_and_v2_results() -> None:
    call = {k: v for k, v in sample_call().items() if isinstance(v, torch.Tensor)}
    assert meta.infer("npu_mla_prolog", **call) == outline(reference.npu_mla_prolog(**call))
    assert meta.infer("npu_mla_prolog_v2", **call) == outline(reference.npu_mla_prolog_v2(**call))


SCENARIOS = [
    (0, 0),
    (1, 0),
    (1, 2),
    (1, 3),
    (2, 0),
    (2, 1),
    (2, 3),
    *itertools.product((3, 4, 5), (0, 1, 3)),
]


def on_meta(wq: int, kv: int, lead: tuple[int, ...]) -> dict[str, Any]:
    call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, lead=lead)
    return {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }


def test_torch_npu_infers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    offline.activate()
    from torch_npu.op_plugin.meta import _meta_registrations as theirs

    monkeypatch.setattr(theirs, "get_soc_version", lambda: 260)
    for (wq, kv), lead, flag in itertools.product(SCENARIOS, ((5,), (2, 3), (0,)), (False, True)):
        call = on_meta(wq, kv, lead) | {"query_norm_flag": flag}
        for op in ("npu_mla_prolog_v3", "npu_mla_prolog_v3_functional"):
            found = getattr(theirs, f"{op}_forward")(**call)
            assert outline(found) == meta.infer(op, **call), (op, wq, kv, lead, flag)
    monkeypatch.setattr(theirs, "get_soc_version", lambda: 220)
    required, optional = meta.signature("npu_mla_prolog_v2")
    for (wq, kv), lead in itertools.product(
        [(0, 0), (1, 0), (1, 2), (2, 0), (2, 1)], ((5,), (2, 3))
    ):
        call = {
            name: value
            for name, value in on_meta(wq, kv, lead).items()
            if name in {*required, *optional}
        }
        found = theirs.npu_mla_prolog_v2_forward(**call)
        assert outline(found) == meta.infer("npu_mla_prolog_v2", **call), (wq, kv, lead)
