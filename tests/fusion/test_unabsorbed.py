"""Prologues without a W_uk product, under ``Config(targets=("v3", "identity"))``: q_nope is the
kernel's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import Entry, select
from tests.catalogue.base import DR, HCKV, HCQ, HE, Base, D, linear, paged_args
from tests.catalogue.int8 import Full
from tests.harness import assert_as_exact, both_ways, clones, compiled, outcome, traced_graph

IDENTITY = mf.Config(targets=("v3", "identity"), verify="all")


class Padded(Base):
    """q_nope padded to the latent's width, so that the core reads it where the absorbed query
    was.
    """

    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


class PaddedInt8(Full):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


class ReadTwice(Padded):
    """Two slices of q, each with a reader of its own."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        self.again = q.view(-1, self.heads, D + DR)[..., :D]
        return super().split(q)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.again.float().sum(-1)


class SeparateProjections(Padded):
    """W_uq and W_qr apart."""

    def __init__(self) -> None:
        super().__init__()
        self.uq, self.qr = linear(HCQ, self.heads * D), linear(HCQ, self.heads * DR)
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.uq(q).view(-1, self.heads, D), self.qr(q).view(-1, self.heads, DR)


class RopeFirst(Padded):
    """Columns of a head: rope, then nope."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_pe, q_nope = q.view(-1, self.heads, DR + D).split([DR, D], -1)
        return q_nope, q_pe


class NothingRotated(Padded):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


class QueryAloneRotated(NothingRotated):
    def rotate_q(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super(NothingRotated, self).rotate(x, c, s)


class QueryMultiplied(NothingRotated):
    """By numbers, one for each column."""

    def rotate_q(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c


MODELS: dict[str, Callable[[], nn.Module]] = {
    model.__name__: model
    for model in (Padded, PaddedInt8, ReadTwice, SeparateProjections, RopeFirst, NothingRotated)
}


@pytest.mark.parametrize("name", MODELS)
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, given = MODELS[name](), paged_args()
    for report, fused in both_ways(model, given, IDENTITY):
        (fusion,) = report.fused
        assert fusion.placement == "in place"
        assert any("identity" in text for text in fusion.assumptions)
        assert_as_exact(model, given, fused)


@pytest.mark.parametrize("entry", select("unabsorbed"), ids=str)
def test_entries_of_the_catalogue(entry: Entry) -> None:
    torch.manual_seed(0)
    module, given = entry.model(), entry.args()
    for report, fused in both_ways(module, given, mf.Config(targets=("v3", "identity"))):
        assert outcome(report) == entry.outcome, str(report)
        assert_as_exact(module, given, fused, entry.slack)


@pytest.mark.parametrize("kind", [QueryAloneRotated, QueryMultiplied])
def test_rotated_on_one_side_or_otherwise(kind: type[Padded]) -> None:
    torch.manual_seed(0)
    gm = traced_graph(kind(), *paged_args())
    report = mf.fuse(gm, mf.Config(targets=("v3", "identity"), verify="off"))
    assert not report.fused


def test_off_by_default() -> None:
    gm = traced_graph(Padded(), *paged_args())
    report = mf.fuse(gm)
    assert [item.code for item in report.rejected] == ["absorb.absent"]


def test_q_nope_is_the_projection_bit_for_bit() -> None:
    """The kernel's own q_nope, before W_uk: what the product with the identity gives is it and
    zeros.
    """
    torch.manual_seed(0)
    model, given = Padded(), paged_args()
    gm = traced_graph(model, *given)
    mf.fuse(gm, IDENTITY)
    (call,) = (node for node in gm.graph.nodes if "npu_mla_prolog_v3" in str(node.target))
    values = torch.randn(8, 2, D).bfloat16()
    weight_uk = torch.cat((torch.eye(D), torch.zeros(D, HCKV - D)), 1).bfloat16().expand(2, D, HCKV)
    query = torch.bmm(values.transpose(0, 1), weight_uk).transpose(0, 1)
    assert torch.equal(query[..., :D], values) and not query[..., D:].any()
    assert call.args[3].meta["val"].shape == (2, D, HCKV)


class HuggingFace(nn.Module):
    """Hugging Face's DeepseekV3Attention as it is, without a cache: per-head keys and values from
    kv_b_proj.
    """

    def __init__(self) -> None:
        super().__init__()
        mf.offline.activate()  # transformers imports torch_npu where it is installed
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3Attention,
            DeepseekV3RotaryEmbedding,
        )

        config = DeepseekV3Config(
            hidden_size=HE,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=HCQ,
            num_hidden_layers=1,
            attn_implementation="sdpa",
        )
        self.attention = DeepseekV3Attention(config, 0).bfloat16()
        self.rotary = DeepseekV3RotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        return self.attention(x, self.rotary(x, positions), attention_mask=None)[0]


def test_hugging_face_attention_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = HuggingFace().eval(), (torch.randn(2, 5, HE).bfloat16(),)
    fused = compiled(model, clones(x), mf.backend(IDENTITY))
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement.startswith("staged") and fusion.dims["D"] == 128
    assert_as_exact(model, x, fused)


@pytest.mark.parametrize("hook", [False, True])
def test_ge_graph_of_the_real_torchair(hook: bool) -> None:
    operators = mf.lower(Padded(), *paged_args(), config=IDENTITY, hook=hook).ge_ops
    assert operators["MlaPrologV3"] == 1 and "RmsNorm" not in operators
