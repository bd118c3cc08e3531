"""A5's float formats: the GE graph is the handwritten call's, modes go with chip and release."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from mla_fusion.meta import number_formats
from mla_fusion.meta.number_formats import FP8, HIFLOAT8, MXFP8, NumberFormat
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import ENTRIES, base
from tests.exhaustive import one_in
from tests.harness import refused, traced_graph

from .ge_graphs import called_by_hand, same_wiring

npu = torch.ops.npu
A5 = {"soc": "A5"}
FORMATS = {"MxMerged": MXFP8, "Fp8Full": FP8, "HifFull": HIFLOAT8}


class ByHand(nn.Module):
    """As engineers write for A5: x quantised by an operator, weights and scales packed, a call."""

    def __init__(self, form: NumberFormat, heads: int = 2) -> None:
        super().__init__()
        self.form = form
        shapes = {
            "weight_dq": (base.HE, base.HCQ),
            "weight_uq_qr": (base.HCQ, heads * (base.D + base.DR)),
            "weight_dkv_kr": (base.HE, base.HCKV + base.DR),
        }
        held = {name: torch.zeros(shape, dtype=form.element) for name, shape in shapes.items()}
        for name, (rows, columns) in shapes.items():
            shape = (columns, rows // number_formats.BLOCK) if form.in_blocks else (1, columns)
            held[f"dequant_scale_{name.replace('weight', 'w')}"] = torch.ones(shape).to(
                form.scale_dtype
            )
        held["weight_uk"] = torch.randn(heads, base.D, base.HCKV).bfloat16()
        held["gamma_cq"], held["gamma_ckv"] = (
            torch.ones(base.HCQ).bfloat16(),
            torch.ones(base.HCKV).bfloat16(),
        )
        for name, value in held.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.form.in_blocks:
            dst_type = self.form.number or torch.float8_e4m3fn
            x, scale = npu.npu_dynamic_quant(x, dst_type=dst_type)
            return x, scale.view(-1, 1)
        x, scale = npu.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn)
        return x, scale.view(-1, base.HE // number_formats.BLOCK).view(torch.float8_e8m0fnu)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        x, scale = self.quantised(x)
        named = (
            ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr") if self.form.number else ()
        )
        options: dict[str, Any] = {f"{name}_dtype": self.form.number for name in named}
        scales = ("dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
        options |= {name: getattr(self, name) for name in scales}
        options |= {"dequant_scale_x": scale, "weight_quant_mode": self.form.full}
        return called_by_hand(self, x, cos, sin, (kv_cache, kr_cache), slots, **options)


class First(nn.Module):
    """The scores of an entry of the catalogue, alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args)[0]


@cache
def lowered(name: str, mode: str, dynamic: bool = False) -> tuple[mf.Lowering, mf.Lowering]:
    """Fused, and written by hand."""
    torch.manual_seed(0)
    args = base.paged_args()
    fused = mf.lower(
        First(ENTRIES[name].model()), *args, mode=mode, dynamic=dynamic, config=mf.Config(**A5)
    )
    as_it_is = mf.Config(enable=False, **A5)
    return fused, mf.lower(
        ByHand(FORMATS[name]), *args, mode=mode, dynamic=dynamic, config=as_it_is
    )


def without(operators: Counter[str], name: str) -> Counter[str]:
    """But for the detach that AOT adds to ``view(dtype)``."""
    return Counter({other: count for other, count in operators.items() if other != name})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_ge_graph_is_the_handwritten_one(name: str, dynamic: bool) -> None:
    fused, by_hand = lowered(name, "ge", dynamic)
    assert fused.ge_ops == without(by_hand.ge_ops, "Identity")
    assert same_wiring(fused.ge_graph, by_hand.ge_graph)
    assert fused.ge_ops["MlaPrologV3"] == 1
    assert fused.ge_ops["TensorMove"] == fused.ge_ops["Assign"] == 0
    assert not {"QuantBatchMatmulV4", "RmsNorm"} & fused.ge_ops.keys()


@pytest.mark.parametrize("name", one_in(3, FORMATS))
def test_npugraph_ex_calls_as_by_hand(name: str) -> None:
    fused, by_hand = lowered(name, "npugraph_ex")
    assert fused.fx_ops == without(by_hand.fx_ops, "aten.detach.default")
    (call,) = [
        node
        for node in fused.fx_after.graph.nodes
        if str(node.target) == "npu.npu_mla_prolog_v3.default"
    ]
    assert call.kwargs["weight_quant_mode"] == FORMATS[name].full
    assert [cache.op for cache in call.args[9:11]] == ["placeholder", "placeholder"]


@pytest.mark.parametrize(
    ("name", "machine", "code"),
    [
        ("MxFull", {"soc": "A3"}, "contract:quant.weight_quant_mode"),
        ("MxFull", {"soc": "A5", "cann": "8.5"}, "contract:quant.weight_quant_mode"),
        ("Fp8Full", {"soc": "A5", "cann": "9.0"}, "contract:quant.weight_quant_mode"),
        ("HifFull", {"soc": "A2"}, "contract:quant.weight_quant_mode"),
    ],
)
def test_modes_go_with_their_chip_and_release(
    name: str, machine: dict[str, str], code: str
) -> None:
    gm = traced_graph(ENTRIES[name].model(), *base.paged_args())
    assert refused(gm, mf.Config(**machine)).code == code


@pytest.mark.parametrize(
    "name", one_in(1, ["MxAttentionByOperator", "HifAttentionByOperator", "HifPacked", "MxPacked"])
)
def test_caches_in_the_ge_graph(name: str) -> None:
    """The kernel writes the model's caches; none but one in hifloat8 is copied."""
    torch.manual_seed(0)
    entry = ENTRIES[name]
    lowering = mf.lower(entry.model(), *entry.args(), config=entry.config())
    operators = lowering.ge_ops
    assert lowering.report.fused[0].attributes["kv_cache_quant_mode"] == entry.kv_cache_quant_mode
    assert operators["MlaPrologV3"] == 1
    # of the kr_cache of no elements; of a hifloat8 cache, which the converter has to read as
    # another type
    copies = [entry.kv_cache_quant_mode == 3, entry.weight_quant_mode == HIFLOAT8.full]
    assert operators["TensorMove"] == sum(copies)
    assert not {"Assign", "RmsNorm", "DynamicBlockQuant", "ScatterNdUpdate"} & operators.keys()
