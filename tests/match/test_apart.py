"""Halves of one prologue that read two forms of one x: one reason, the true one, and the key's half
beside it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import int8, keys, static
from tests.catalogue.base import DR, HCKV, HE, Base, paged_args
from tests.harness import graph_of, refused, traced_graph


class KeyDoubled(Base):
    """The key reads 2 x."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().latent(2 * x)


class KeyNormed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.own_norm = self.norm(HE)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().latent(self.own_norm(x))


class QuantisedDoubled(int8.Full):
    """The key quantises 2 x."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().latent(2 * x)


class KeyAloneQuantised(KeyDoubled):
    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = int8.QuantLinear(HE, HCKV + DR)  # type: ignore[assignment]


class KeyStatic(int8.Full):
    """The key has a scale fixed ahead of time."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = keys.StaticLinear(HE, HCKV + DR)  # type: ignore[assignment]


class KeyStaticAlone(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = keys.StaticLinear(HE, HCKV + DR)  # type: ignore[assignment]


TRUE = {
    KeyDoubled: ("kv_latent.absent", "multiplies"),
    KeyNormed: ("kv_latent.absent", "own_norm"),
    QuantisedDoubled: ("quant.tokens_differ", "kv_a_proj_with_mqa"),
    KeyAloneQuantised: ("quant.mixed", "kv_a_proj_with_mqa"),
    KeyStatic: ("quant.static", "kv_a_proj_with_mqa"),
    KeyStaticAlone: ("quant.static", "kv_a_proj_with_mqa"),
}


@pytest.mark.parametrize("model", TRUE)
def test_one_reason_for_both(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    code, said = TRUE[model]
    gm = graph_of(model(), *paged_args())
    (rejection,) = mf.explain(gm).rejected
    assert rejection.code == code and said in rejection.message
    report = mf.explain(gm, mf.Config(targets=("v3", "key")))
    assert [fusion.target for fusion in report.fused] == ["key"] and report.rejected == []
    assert report.fused[0].instead_of.startswith(f"[{code}]")
    alone = mf.explain(gm, mf.Config(targets=("key",)))
    assert [fusion.instead_of for fusion in alone.fused] == [""] and alone.rejected == []


def test_static_scales_of_two_kinds() -> None:
    """By the whole's target scales are no obstacle as such; that there are two is."""
    gm = traced_graph(static.TwoScales(), *static.static_args())
    for targets, code in ((("v3",), "quant.static"), (("v3", "preprocess"), "quant.tokens_differ")):
        report = mf.explain(gm, mf.Config(targets=targets))
        assert [item.code for item in report.rejected] == [code]


@pytest.mark.parametrize("linear", [int8.QuantLinear, keys.StaticLinear])
def test_a_query_from_the_hidden_state_is_what_is_wrong(linear: type[nn.Module]) -> None:
    model = keys.Lite()
    model.kv_a_proj_with_mqa = linear(HE, HCKV + DR)  # type: ignore[assignment, call-arg]
    assert refused(traced_graph(model, *paged_args())).code == "q_lora.absent"


class TwoLayers(nn.Module):
    """The first has no key, the second no query: between them is a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = (
            Base(),
            keys.Lite(),
            nn.Linear(8, HE, bias=False, dtype=torch.bfloat16),
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        q_nope, q_pe = self.first.query(x)
        q_pe, query = (
            self.first.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1)),
            self.first.absorb(q_nope),
        )
        x = x + self.out(query.flatten(1)[:, :8])
        return q_pe, query, self.second(x, cos, sin, kv, kr, slots)[0]


def test_layers_are_kept_apart() -> None:
    report = mf.explain(traced_graph(TwoLayers(), *paged_args()))
    assert [item.code for item in report.rejected] == ["kv_latent.absent", "q_lora.absent"]


def test_each_layer_has_its_own_reason() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList((KeyDoubled(), KeyNormed(), Base()))

        def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
            return tuple(
                layer(x * (1 + place), *args)[0] for place, layer in enumerate(self.layers)
            )

    report = mf.explain(graph_of(Layers(), *paged_args()), mf.Config(staging="always"))
    assert [item.code for item in report.rejected] == ["kv_latent.absent"] * 2
    assert [item.layer for item in report.rejected] == ["layers.0", "layers.1"] and len(
        report.fused
    ) == 1
