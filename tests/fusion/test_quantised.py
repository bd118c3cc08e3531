"""int8 prologues: every variant fuses with its weight_quant_mode, no further from exact maths than before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from mla_fusion.paging import dequantise_rows
from tests.catalogue.quantised import (
    HCKV,
    INT8_ATTENTION,
    INT8_CACHES,
    PACKED,
    QUANTISED,
    PackedRows,
    int8_cache_args,
    int8_latent_args,
    packed_args,
)
from tests.harness import assert_as_exact, both_ways, clones, compiled, distance, eager


@pytest.mark.portable
@pytest.mark.parametrize("name", QUANTISED)
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, args, mode, placement = QUANTISED[name]
    module, given = model(), args()
    for report, fused in both_ways(module, given):
        assert [f.placement.partition(":")[0] for f in report.fused] == [placement], str(report)
        assert [f.attributes["weight_quant_mode"] for f in report.fused] == [mode]
        assert_as_exact(module, given, fused, slack=1.1)


@pytest.mark.parametrize("name", QUANTISED)
def test_device_form(name: str) -> None:
    model, args, mode, placement = QUANTISED[name]
    gm, _ = capture(model(), *args(), device="npu")
    report = mf.fuse(gm)
    assert [(f.attributes["weight_quant_mode"], f.placement.partition(":")[0]) for f in report.fused] == [
        (mode, placement)
    ], str(report)


@pytest.mark.parametrize("name", INT8_CACHES)
def test_int8_caches(name: str) -> None:
    """New rows differ by at most one step, in few elements; all other rows keep their bits."""
    torch.manual_seed(0)
    model, mode, placement = INT8_CACHES[name]
    module, given = model(), int8_cache_args()
    unfused = eager(module, clones(given))
    fused = compiled(module, clones(given), mf.backend())
    report = mf.reports()[-1]
    assert [f.placement.partition(":")[0] for f in report.fused] == [placement], str(report)
    assert [f.attributes.get("kv_cache_quant_mode", 0) for f in report.fused] == [mode]
    slots = given[5]
    for before, plain, got in zip(given[3:5], unfused[-3:-1], fused[-3:-1], strict=True):
        rows, width = plain.numel() // plain.shape[-1], plain.shape[-1]
        others = torch.ones(rows, dtype=torch.bool)
        others[slots] = False
        assert torch.equal(got.view(rows, width)[others], before.view(rows, width)[others])
        steps = (got.int() - plain.int()).abs()
        assert steps.max() <= 1 and steps.float().mean() < 0.02
    assert distance(fused[0], unfused[0]) < 2e-2


@pytest.mark.parametrize("name", ["Partial", "FullSmooth", "IndexerReads"])
def test_ge_graph_of_the_real_torchair(name: str) -> None:
    """One kernel; of the quantisation only that of x is left (c_q's is inside), and the indexer's product."""
    torch.manual_seed(0)
    model, args, mode, _ = QUANTISED[name]
    operators = mf.lower(model(), *args()).ge_ops
    assert operators["MlaPrologV3"] == 1
    assert operators["DynamicQuant"] == (0 if mode == 1 else 1)
    assert operators["QuantBatchMatmulV3"] == (1 if name == "IndexerReads" else 0)
    assert not {"TensorMove", "Assign", "RmsNorm"} & operators.keys()


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows(name: str) -> None:
    """Int8 of the latent a step or two apart (bfloat16 rounded once or twice), rows that are not written as before."""
    torch.manual_seed(0)
    model, mode, placement = PACKED[name]
    module, given = model(), packed_args()
    unfused = eager(module, clones(given))
    fused = compiled(module, clones(given), mf.backend())
    assert_fused(mode, placement)
    assert distance(fused[0], unfused[0]) < 2e-2
    plain, got = (run[-3].view(-1, 656) for run in (unfused, fused))
    others = torch.ones(len(got), dtype=torch.bool)
    others[given[5]] = False
    assert torch.equal(got[others], given[3].view(got.shape)[others])
    steps = (got[given[5], :HCKV].int() - plain[given[5], :HCKV].int()).abs()
    assert steps.max() <= 2 and steps.float().mean() < 0.1
    if name != "PackedOtherwise":
        latents = [dequantise_rows(rows[given[5]])[0] for rows in (plain, got)]
        assert distance(*latents) < 1e-2


@pytest.mark.parametrize("name", INT8_ATTENTION)
def test_int8_query_and_cache(name: str) -> None:
    torch.manual_seed(0)
    model, mode, placement = INT8_ATTENTION[name]
    module, given = model(), int8_latent_args()
    unfused = eager(module, clones(given))
    fused = compiled(module, clones(given), mf.backend())
    assert_fused(mode, placement)
    for before, plain, got in zip(given[3:5], unfused[-3:-1], fused[-3:-1], strict=True):
        plain, got, before = (cache.view(-1, cache.shape[-1]) for cache in (plain, got, before))
        others = torch.ones(len(got), dtype=torch.bool)
        others[given[5]] = False
        assert torch.equal(got[others], before[others])
        assert distance(got.float(), plain.float()) < 1e-2
    assert distance(fused[0], unfused[0]) < 2e-2


def assert_fused(mode: int, placement: str) -> None:
    report = mf.reports()[-1]
    assert [fusion.placement[: len(placement)] for fusion in report.fused] == [placement], str(report)
    assert [fusion.attributes.get("kv_cache_quant_mode", 0) for fusion in report.fused] == [mode], str(report)


@pytest.mark.parametrize(("name", "args"), [("PackedByOperators", packed_args), ("Int8Attention", int8_latent_args)])
def test_int8_caches_in_the_ge_graph(name: str, args: Any) -> None:
    """The kernel writes the model's caches: nothing of the packing is left, and no cache is copied."""
    torch.manual_seed(0)
    model, mode, _ = (PACKED | INT8_ATTENTION)[name]
    lowering = mf.lower(model(), *args())
    operators = lowering.ge_ops
    assert lowering.report.fused[0].attributes["kv_cache_quant_mode"] == mode
    assert operators["MlaPrologV3"] == 1 and operators["DynamicQuant"] == 1
    assert operators["TensorMove"] == (1 if mode == 3 else 0)  # of the kr_cache of no elements
    assert not {"Assign", "RmsNorm", "DynamicBlockQuant", "ScatterNdUpdate"} & operators.keys()


def tiles_of(c_kv: Tensor, tile: int = 128, steps: float = 127.0) -> tuple[Tensor, Tensor]:
    """int8 and a scale for each tile, as the kernel has them by default."""
    tiles = c_kv.float().unflatten(-1, (-1, tile))
    scale = tiles.abs().amax(-1, keepdim=True) / steps
    return (tiles / scale).round().clamp(-128, 127).to(torch.int8).flatten(-2), scale.squeeze(-1)


def as_bytes(values: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([values, *(part.contiguous().view(torch.int8) for part in (key, scale))], -1)


# rows of 656 bytes that are not the kernel's, one thing wrong in each
OTHER_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "truncated": lambda c, k: as_bytes((c / tiles_of(c)[1].repeat_interleave(128, -1)).char(), k, tiles_of(c)[1]),
    "tiles of 256": lambda c, k: as_bytes(tiles_of(c, 256)[0], k, tiles_of(c, 256)[1].repeat_interleave(2, -1)),
    "inverse scale": lambda c, k: as_bytes(tiles_of(c)[0], k, 1 / tiles_of(c)[1]),
    "scale of 128 steps": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(c, steps=128.0)[1]),
    "key in float16": lambda c, k: as_bytes(tiles_of(c)[0], k.half(), tiles_of(c)[1]),
    "key doubled": lambda c, k: as_bytes(tiles_of(c)[0], 2 * k, tiles_of(c)[1]),
    "latent turned": lambda c, k: as_bytes(tiles_of(c.roll(128, -1))[0], k, tiles_of(c.roll(128, -1))[1]),
    "sign of the latent": lambda c, k: as_bytes(tiles_of(-c)[0], k, tiles_of(c)[1]),
    "scales in reverse": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(c)[1].flip(-1)),
    "latent doubled": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(2 * c)[1]),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_rows_packed_otherwise_stay_with_the_model(name: str) -> None:
    class Model(PackedRows):
        def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
            kv_cache.view(-1, 656)[slots] = OTHER_ROWS[name](c_kv, k_pe)

    gm, _ = capture(Model(), *packed_args(), device="cpu")
    (fusion,) = mf.fuse(gm, mf.Config(verify="off")).fused
    assert fusion.placement.startswith("staged"), name
