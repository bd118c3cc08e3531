"""What a report says of the comparison: how many tokens, which outputs, which errors."""

from __future__ import annotations

import mla_fusion as mf
from tests.catalogue import base, prologues, rotations
from tests.harness import traced_graph


def test_few_and_many_tokens_are_compared() -> None:
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args(), dynamic=True)
    (fusion,) = mf.fuse(gm).fused
    counts = fusion.compared.partition(",")[0].removeprefix("compared at T = ")
    first, second = map(int, counts.split(" and "))
    assert fusion.verified == "verified" and first < 20 and second >= 100


def test_a_cache_of_any_size_is_compared() -> None:
    """4 GiB of latents, of which nothing is allocated here."""
    x, cos, sin, kv, kr, slots = (value.to("meta") for value in base.paged_args())
    caches = (cache.new_empty(65536, *cache.shape[1:]) for cache in (kv, kr))
    gm = traced_graph(prologues.PagedRotateHalf().to("meta"), x, cos, sin, *caches, slots)
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement == "in place" and fusion.verified == "verified"
    sizes = {figure.output: figure.elements for figure in fusion.figures}
    assert 0 < sizes["kv_cache"] < 1 << 20 and sizes["kr_cache"] > 0


def test_half_rows_are_compared_in_the_models_order() -> None:
    gm = traced_graph(rotations.GptjStack(), *base.paged_args())
    (fusion,) = mf.fuse(gm, mf.Config(kr_layout="half")).fused
    assert fusion.verified == "verified" and "half" not in fusion.placement
    assert {"query_rope", "kr_cache"} <= {figure.output for figure in fusion.figures}


def test_errors_against_float64_stand_beside_those_of_the_unfused_run() -> None:
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    (fusion,) = mf.explain(gm, boundary=True).fused
    errors = {figure.output: figure.float64 for figure in fusion.figures}
    assert {"query", "query_rope", "kv_cache", "kr_cache"} == errors.keys()
    for fused, unfused in filter(None, errors.values()):
        assert 0 < fused < 1.5 * unfused < 2e-2
    assert None not in errors.values()
