"""`mf.meta.infer`: releases, older versions, and torch_npu in every scenario; random calls: test_properties."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch

from mla_fusion import meta, reference
from mla_fusion.reference.sample import sample_call


def outline(results: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in results]


def test_absent_results_before_cann_8_5() -> None:
    call = sample_call()
    assert [shape for shape, _ in meta.infer("npu_mla_prolog_v3", cann="8.3", **call)][2:] == [(1,)] * 3
    assert [shape for shape, _ in meta.infer("npu_mla_prolog_v3", cann="8.5", **call)][2:] == [(0,)] * 3


def test_v1_and_v2_results() -> None:
    call = {k: v for k, v in sample_call().items() if isinstance(v, torch.Tensor)}
    assert meta.infer("npu_mla_prolog", **call) == outline(reference.npu_mla_prolog(**call))
    assert meta.infer("npu_mla_prolog_v2", **call) == outline(reference.npu_mla_prolog_v2(**call))


_AGAINST_TORCH_NPU = """
import itertools, mla_fusion as mf
import torch
mf.offline.activate()
import torch_npu
from torch_npu.op_plugin.meta import _meta_registrations as theirs
from mla_fusion.reference.sample import sample_call
theirs.get_soc_version = lambda: 260
scenarios = [(0, 0), (1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)]
scenarios += [(w, k) for w in (3, 4, 5) for k in (0, 1, 3)]
compared = 0
for (wq, kv), lead, flag in itertools.product(scenarios, ((5,), (2, 3), (0,)), (False, True)):
    call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, lead=lead) | {"query_norm_flag": flag}
    call = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    for op, fn in (("npu_mla_prolog_v3", theirs.npu_mla_prolog_v3_forward),
                   ("npu_mla_prolog_v3_functional", theirs.npu_mla_prolog_v3_functional_forward)):
        found = [(tuple(t.shape), t.dtype) for t in fn(**call)]
        assert found == mf.meta.infer(op, **call), (op, wq, kv, lead, flag, found, mf.meta.infer(op, **call))
        compared += 1
theirs.get_soc_version = lambda: 220
names = set(mf.meta.signature("npu_mla_prolog_v2")[0]) | set(mf.meta.signature("npu_mla_prolog_v2")[1])
for (wq, kv), lead in itertools.product([(0, 0), (1, 0), (1, 2), (2, 0), (2, 1)], ((5,), (2, 3))):
    call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, lead=lead)
    call = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items() if k in names}
    found = [(tuple(t.shape), t.dtype) for t in theirs.npu_mla_prolog_v2_forward(**call)]
    assert found == mf.meta.infer("npu_mla_prolog_v2", **call), (wq, kv, lead, found)
    compared += 1
print("compared", compared)
"""


def test_torch_npu_infers_the_same() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-c", _AGAINST_TORCH_NPU],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compared 202" in done.stdout
