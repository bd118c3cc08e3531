"""int8 caches and int8 attention: rows a step apart at most, all others as they were; and the GE
graphs of int8.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import ENTRIES
from tests.catalogue.int8_caches import PackedRows, packed_args
from tests.exhaustive import one_in
from tests.harness import traced_graph


@pytest.mark.parametrize("name", ["Partial", "FullSmooth", "IndexerReads"])
def test_ge_graph_of_the_real_torchair(name: str) -> None:
    """One kernel; of the quantisation only that of x is left (c_q's is inside), and the indexer's
    product.
    """
    torch.manual_seed(0)
    entry = ENTRIES[name]
    operators = mf.lower(entry.model(), *entry.args()).ge_ops
    assert operators["MlaPrologV3"] == 1
    assert operators["DynamicQuant"] == (0 if entry.weight_quant_mode == 1 else 1)
    assert operators["QuantBatchMatmulV3"] == (1 if name == "IndexerReads" else 0)
    assert not {"TensorMove", "Assign", "RmsNorm"} & operators.keys()


@pytest.mark.parametrize("name", ["PackedByOperators", "Int8Attention"])
def test_int8_caches_in_the_ge_graph(name: str) -> None:
    """The kernel writes the model's caches: nothing of the packing is left, and no cache is
    copied.
    """
    torch.manual_seed(0)
    entry = ENTRIES[name]
    mode = entry.kv_cache_quant_mode
    lowering = mf.lower(entry.model(), *entry.args())
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
    "truncated": lambda c, k: as_bytes(
        (c / tiles_of(c)[1].repeat_interleave(128, -1)).char(), k, tiles_of(c)[1]
    ),
    "tiles of 256": lambda c, k: as_bytes(
        tiles_of(c, 256)[0], k, tiles_of(c, 256)[1].repeat_interleave(2, -1)
    ),
    "inverse scale": lambda c, k: as_bytes(tiles_of(c)[0], k, 1 / tiles_of(c)[1]),
    "scale of 128 steps": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(c, steps=128.0)[1]),
    "key in float16": lambda c, k: as_bytes(tiles_of(c)[0], k.half(), tiles_of(c)[1]),
    "key doubled": lambda c, k: as_bytes(tiles_of(c)[0], 2 * k, tiles_of(c)[1]),
    "latent turned": lambda c, k: as_bytes(
        tiles_of(c.roll(128, -1))[0], k, tiles_of(c.roll(128, -1))[1]
    ),
    "sign of the latent": lambda c, k: as_bytes(tiles_of(-c)[0], k, tiles_of(c)[1]),
    "scales in reverse": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(c)[1].flip(-1)),
    "latent doubled": lambda c, k: as_bytes(tiles_of(c)[0], k, tiles_of(2 * c)[1]),
}


@pytest.mark.parametrize("name", one_in(2, OTHER_ROWS))
def test_rows_packed_otherwise_stay_with_the_model(name: str) -> None:
    class Model(PackedRows):
        def write(
            self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
        ) -> None:
            kv_cache.view(-1, 656)[slots] = OTHER_ROWS[name](c_kv, k_pe)

    gm = traced_graph(Model(), *packed_args())
    (fusion,) = mf.fuse(gm, mf.Config(verify="off")).fused
    assert fusion.placement.startswith("staged"), name
