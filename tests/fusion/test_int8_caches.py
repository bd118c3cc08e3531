"""int8 caches and attention: rows a step apart at most, others as they were; int8's GE graphs."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from tests.catalogue import ENTRIES


@pytest.mark.parametrize("name", ["Partial", "FullSmooth", "IndexerReads"])
def test_ge_graph_of_the_real_torchair(name: str) -> None:
    """One kernel; of the quantisation only that of x is left, and the indexer's product."""
    torch.manual_seed(0)
    entry = ENTRIES[name]
    operators = mf.lower(entry.model(), *entry.args()).ge_ops
    assert operators["MlaPrologV3"] == 1
    assert operators["DynamicQuant"] == (0 if entry.weight_quant_mode == 1 else 1)
    assert operators["QuantBatchMatmulV3"] == (1 if name == "IndexerReads" else 0)
    assert not {"TensorMove", "Assign", "RmsNorm"} & operators.keys()


@pytest.mark.parametrize("name", ["PackedByOperators", "Int8Attention"])
def test_int8_caches_in_the_ge_graph(name: str) -> None:
    """The kernel writes the model's caches: no packing is left, no cache is copied."""
    torch.manual_seed(0)
    entry = ENTRIES[name]
    mode = entry.kv_cache_quant_mode
    lowering = mf.lower(entry.model(), *entry.args())
    operators = lowering.ge_ops
    assert lowering.report.fused[0].attributes["kv_cache_quant_mode"] == mode
    assert operators["MlaPrologV3"] == 1 and operators["DynamicQuant"] == 1
    assert operators["TensorMove"] == (1 if mode == 3 else 0)  # of the kr_cache of no elements
    assert not {"Assign", "RmsNorm", "DynamicBlockQuant", "ScatterNdUpdate"} & operators.keys()
