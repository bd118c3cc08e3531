"""Head counts that a release refuses: heads of zeros are added to weights, and cut off again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base, int8, int8_attention, prologues
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, both_ways, clones, compiled, distance, eager

RELEASE = "9.1"
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], int]] = {
    "paged": (lambda: prologues.PagedRotateHalf(12), base.paged_args, 16),
    "one_more_than_a_power": (lambda: prologues.PagedRotateHalf(5), base.paged_args, 8),
    "staged": (lambda: prologues.ComplexDense(3), prologues.dense_args, 4),
    "half_layout": (lambda: prologues.Neox(3), base.paged_args, 4),
    "operators": (lambda: prologues.NpuOperators(3), base.paged_args, 4),
    "int8": (lambda: with_heads(int8.Full()), base.paged_args, 4),
    "int8_query": (
        lambda: with_heads(int8_attention.Int8Attention()),
        int8_attention.int8_latent_args,
        4,
    ),
}


def with_heads(
    model: base.Base, heads: int = 3, linear: type[nn.Module] = int8.QuantLinear
) -> nn.Module:
    """The model with another number of heads."""
    model.heads = heads
    model.q_b_proj = linear(base.HCQ, heads * (base.D + base.DR))  # type: ignore[assignment]
    model.kv_b_proj = base.linear(base.HCKV, heads * (base.D + base.DV))
    return model


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, args, padded = CASES[name]
    module, given = model(), args()
    for report, fused in both_ways(module, given, mf.Config(cann=RELEASE)):
        (fusion,) = report.fused
        assert fusion.dims["N_padded"] == padded
        assert any(line.startswith(f"heads: {fusion.dims['N']}, and") for line in fusion.proof)
        if name == "int8_query":  # rows of an int8 cache may be a step apart
            assert distance(fused[0], eager(module, clones(given))[0]) < 2e-2
        else:
            assert_as_exact(module, given, fused, slack=1.5 if name == "staged" else 1.2)


def test_the_call_has_a_legal_number_of_heads() -> None:
    gm, _ = capture(prologues.PagedRotateHalf(12), *base.paged_args(), device="npu")
    report = mf.fuse(gm, mf.Config(cann=RELEASE))
    (call,) = gm.graph.find_nodes(
        op="call_function", target=torch.ops.npu.npu_mla_prolog_v3_functional.default
    )
    weight_uq_qr, weight_uk = call.args[2], call.args[3]
    assert weight_uk.meta["val"].shape[0] == 16
    assert weight_uq_qr.meta["val"].numel() == 16 * (base.D + base.DR) * base.HCQ
    assert call.meta["val"][0].shape[-2] == 16
    assert report.fused[0].placement == "in place"


def test_more_heads_than_the_kernel_has_are_refused() -> None:
    gm, _ = capture(prologues.PagedRotateHalf(136), *base.paged_args())
    (rejection,) = mf.fuse(gm, mf.Config(cann=RELEASE)).rejected
    assert rejection.code.startswith("contract:")


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_compiled(dynamic: bool) -> None:
    torch.manual_seed(0)
    module, given = prologues.PagedRotateHalf(12), base.paged_args()
    fused = compiled(module, clones(given), mf.backend(mf.Config(cann=RELEASE)), dynamic=dynamic)
    assert mf.reports()[-1].fused[0].placement == "in place"
    assert_as_exact(module, given, fused, slack=1.2)


class Padding(base.Parts):
    """What attention reads is padded to sixteen heads, as its operator wants; its result is cut."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + base.rotate_half(x) * s

    def padded(self, query: Tensor, query_rope: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.pad(query, (0, 0, 0, 4)), nn.functional.pad(query_rope, (0, 0, 0, 4))

    def scores(self, q_nope: Tensor, q_pe: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
        return base.attend(*self.padded(self.absorb(q_nope), q_pe), kv_rows, kr_rows)[:, :12]


class PaddingPairs(Padding):
    """The rotation leaves interleaved pairs."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        c, s = (table[..., : base.DR // 2] for table in (c, s))
        return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)


class PaddingWithOnes(Padding):
    def padded(self, query: Tensor, query_rope: Tensor) -> tuple[Tensor, Tensor]:
        pad = nn.functional.pad
        return pad(query, (0, 0, 0, 4), value=1.0), pad(query_rope, (0, 0, 0, 4), value=1.0)


@pytest.mark.parametrize(
    ("model", "cann", "left"),
    one_in(
        3,
        [
            (Padding, "latest", 2),
            (Padding, RELEASE, 0),
            (PaddingPairs, "latest", 2),
            (PaddingPairs, RELEASE, 1),
            (PaddingWithOnes, RELEASE, 2),
            (PaddingWithOnes, "latest", 2),
        ],
    ),
)
def test_pads_for_attention_are_carried_by_the_weights(
    model: type[base.Base], cann: str, left: int
) -> None:
    """Where the call must have these heads."""
    torch.manual_seed(0)
    module, given = model(12), base.paged_args()
    gm, _ = capture(module, *given)
    report = mf.fuse(gm, mf.Config(cann=cann))
    assert len(report.fused) == 1
    call = next(node for node in gm.graph.nodes if "npu_mla_prolog_v3" in str(node.target))
    pads = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)
    assert len([pad for pad in pads if call < pad]) == left
    for report, fused in both_ways(module, given, mf.Config(cann=cann)):
        assert report.fused
        assert_as_exact(module, given, fused, slack=1.2)
