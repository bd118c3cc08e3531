"""A step behind projections, of one of them or of all: the report names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, HCQ, HE, Base, D, npu, paged_args
from tests.catalogue.static import H, Static, StaticLinear, static_args
from tests.exhaustive import one_in
from tests.harness import graph_of, refused


class Stepped(nn.Linear):
    """A layer of the user's own: one step behind the product."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], width_in: int, width: int) -> None:
        super().__init__(width_in, width, bias=False, dtype=torch.bfloat16)
        self.vector = nn.Parameter(torch.randn(width).bfloat16())
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(super().forward(x), self.vector)


def replaced(which: str, make: Callable[[int, int], nn.Module], model: Base, width: int) -> Base:
    if "q" in which:
        model.q_a_proj = make(width, HCQ)  # type: ignore[assignment]
    if "k" in which:
        model.kv_a_proj_with_mqa = make(width, HCKV + DR)  # type: ignore[assignment]
    if "u" in which:
        model.q_b_proj = make(HCQ, model.heads * (D + DR))  # type: ignore[assignment]
    return model


STEPS = {
    "bias": (lambda y, v: y + v, "linear.bias", "adds"),
    "bias in float32": (lambda y, v: (y.float() + v.float()).bfloat16(), "linear.bias", "adds"),
    "bias taken off": (lambda y, v: y - v, "linear.bias", "adds"),
    "gate": (lambda y, v: y * v, "", "mul"),
    "tanh": (lambda y, v: torch.tanh(y / 30) * 30, "", "div"),
    "gelu": (lambda y, v: F.gelu(y), "", "gelu"),
    "small number": (lambda y, v: y + 1e-3, "", "add"),
    "float8": (lambda y, v: y.to(torch.float8_e4m3fn).bfloat16(), "", "cast"),
    "clamp": (lambda y, v: y.clamp(-5, 5), "step.choice", "clamp"),
    "mask": (lambda y, v: torch.where(y > 9, 9, y), "step.choice", "gt"),
    "dropout": (lambda y, v: F.dropout(y, 0.1), "step.random", "dropout"),
}
VAGUE = {"q": "norm.absent", "k": "kv_latent.absent", "u": "rope.absent"}


@pytest.mark.parametrize("which", ["q", "k", "u", "qk", "qku"])
@pytest.mark.parametrize("name", one_in(2, STEPS))
def test_it_is_named(name: str, which: str) -> None:
    step, code, named = STEPS[name]
    model = replaced(which, lambda *widths: Stepped(step, *widths), Base(), HE)
    rejection = refused(graph_of(model, *paged_args()))
    if name in ("gate", "gelu") and which == "u":  # of q_nope alone it says more
        code, named = "scale.unequal", "bmm"
    assert rejection.code == (code or VAGUE[which[0]])
    assert named in rejection.message


def test_without_a_step_it_fuses() -> None:
    model = replaced("qku", lambda *widths: Stepped(lambda y, v: y, *widths), Base(), HE)
    (fusion,) = mf.fuse(graph_of(model, *paged_args())).fused
    assert fusion.placement == "in place"


class InInt32(StaticLinear):
    """The product as integers, scaled by a step of its own."""

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(self.scale)
        y = npu.npu_quant_matmul(self.quantised(x), self.weight, ones, output_dtype=torch.int32)
        return (y.float() * self.scale).bfloat16()


class BiasBehind(StaticLinear):
    """Quantised token by token, and a bias added by a step of its own."""

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = npu.npu_dynamic_quant(x)
        kind = {"pertoken_scale": scale, "output_dtype": torch.bfloat16}
        return npu.npu_quant_matmul(rows, self.weight, self.scale, **kind) + self.bias.bfloat16()


@pytest.mark.parametrize(
    "layer, code, named",
    [(InInt32, "norm.absent", "mul"), (BiasBehind, "linear.bias", "adds")],
)
@pytest.mark.parametrize("targets", [("v3",), ("v3", "preprocess")])
def test_of_quantised_layers(
    targets: tuple[str, ...], layer: type[nn.Module], code: str, named: str
) -> None:
    model = replaced("qku", layer, Static(), H)
    for name in ("input_scale", "input_offset"):
        setattr(model.kv_a_proj_with_mqa, name, getattr(model.q_a_proj, name))
    rejection = refused(graph_of(model, *static_args()), mf.Config(targets=targets))
    assert rejection.code == code and named in rejection.message


class ScaledBeside(Base):
    """The key is made of another x; beside the query's latent a product of x is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weights_proj = nn.Linear(HE, 64, bias=False, dtype=torch.bfloat16)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().latent(x.roll(1, -1))

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores, extra = super().forward(x, *args)
        return scores, extra + (self.weights_proj(x) * 0.125 + 1).float() @ args[0].float().T


def test_a_product_of_no_prologue_is_not_blamed() -> None:
    rejection = refused(graph_of(ScaledBeside(), *paged_args()))
    assert rejection.code == "kv_latent.absent" and "weights_proj" not in rejection.message


class SteppedPart(Base):
    """A step on some of a projection's columns."""

    def __init__(self, part: str, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.step = part, step

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        c_kv = self.step(c_kv) if self.part == "c_kv" else c_kv
        return self.kv_a_layernorm(c_kv), self.step(k_pe) if self.part == "k_pe" else k_pe

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(self.step(q_pe) if self.part == "q_pe" else q_pe, c, s)


PARTS = {"c_kv": "kv_latent.absent", "k_pe": "rope.absent", "q_pe": "rope.absent"}
STEPS_OF_PARTS = {
    "mul": lambda y: y * torch.linspace(0.5, 1.5, y.shape[-1]).to(y.dtype),
    "tanh": torch.tanh,
    "softmax": lambda y: y.softmax(-1),
    "cumsum": lambda y: y.cumsum(0),
    "flip": lambda y: y.flip(0),
    "cast": lambda y: y.to(torch.float8_e4m3fn).to(y.dtype),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", one_in(2, STEPS_OF_PARTS))
def test_behind_some_columns(name: str, part: str) -> None:
    rejection = refused(graph_of(SteppedPart(part, STEPS_OF_PARTS[name]), *paged_args()))
    assert rejection.code == PARTS[part]
    assert f"{name} (" in rejection.message and "stands behind" in rejection.message


@pytest.mark.parametrize("part", PARTS)
def test_a_bias_of_some_columns(part: str) -> None:
    bias = torch.linspace(0.5, 1.5, HCKV if part == "c_kv" else DR).bfloat16()
    rejection = refused(graph_of(SteppedPart(part, lambda y: y + bias), *paged_args()))
    assert rejection.code == "linear.bias"
