"""npu_kv_rmsnorm_rope_cache: its tensors by role, its mode, and arguments that the kernel has no
counterpart of.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion.facts.kv_operator import KvOperatorFact, find, is_one
from tests.fx.tracing import floats, inputs, integers, view

npu = torch.ops.npu
T, HCKV, DR = 4, 512, 64


def read(version: int = 1, **options: Any) -> tuple[KvOperatorFact, list[Any]]:
    def fn(
        latent: Tensor,
        gamma: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: Tensor,
        kr: Tensor,
        kv: Tensor,
    ) -> Any:
        operator = (npu.npu_kv_rmsnorm_rope_cache, npu.npu_kv_rmsnorm_rope_cache_v2_functional)[
            version - 1
        ]
        return operator(latent, gamma, cos, sin, index, kr, kv, **options)

    shapes = ((T, 1, 1, HCKV + DR), (HCKV,), (T, 1, 1, DR), (T, 1, 1, DR))
    caches = (floats(2, 16, 1, width).bfloat16() for width in (DR, HCKV))
    graph = view(fn, *(floats(*shape).bfloat16() for shape in shapes), integers(T), *caches)
    (found,) = find(graph)
    assert is_one(found.node)
    return found, inputs(graph)


@pytest.mark.parametrize("version", [1, 2])
def test_tensors_by_their_roles(version: int) -> None:
    fact, (latent, gamma, cos, sin, index, kr, kv) = read(version, cache_mode="PA")
    assert (fact.latent, fact.gamma, fact.cos, fact.sin) == (latent, gamma, cos, sin)
    assert (fact.index, fact.kr_cache, fact.kv_cache) == (index, kr, kv)
    assert (fact.kv_scale, fact.kr_scale, fact.other) == (None, None, None)
    assert fact.hidden_write == (version == 1)


@pytest.mark.parametrize(
    ("mode", "kernels"),
    [("PA", "PA_BSND"), ("PA_BNSD", "PA_BSND"), ("PA_NZ", "PA_NZ"), ("PA_BLK_BNSD", None)],
)
def test_the_kernels_word_for_a_mode(mode: str, kernels: str | None) -> None:
    assert read(cache_mode=mode)[0].cache_mode == kernels


def test_without_a_mode_it_is_no_paged_cache() -> None:
    assert read()[0].cache_mode is None


def test_epsilon_and_rows() -> None:
    fact, _ = read(cache_mode="PA", epsilon=3e-5, is_output_kv=True)
    assert (fact.eps, fact.gives_rows) == (3e-5, True)
    plain, _ = read(cache_mode="PA")
    assert (plain.eps, plain.gives_rows) == (1e-5, False)


def test_another_operator_is_none() -> None:
    graph = view(
        lambda x, w: npu.npu_rms_norm(x, w)[0], floats(T, HCKV).bfloat16(), floats(HCKV).bfloat16()
    )
    assert find(graph) == [] and not any(map(is_one, graph.nodes))
