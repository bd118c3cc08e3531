"""What is reported where a quantisation is not read, never nothing; and where it is read, what
stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.catalogue.int8 import Partial
from tests.catalogue.int8_plain import PlainFull, PlainLinear, PlainPartial, largest, to_int8
from tests.catalogue.int8_plain_models import model_of
from tests.harness import graph_of, refused

F8 = torch.float8_e4m3fn


class Static(PlainLinear):
    """One scale, fixed ahead of time."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.step = nn.Parameter(torch.tensor(0.03), requires_grad=False)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return to_int8(x.float() / self.step), self.step


class OneDynamic(PlainLinear):
    """One scale for all tokens, found anew each time."""

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = x.float().abs().amax() / 127
        return to_int8(x.float() / step), step


class Float8(PlainLinear):
    """float8 rows by plain operators."""

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = largest(x.float()) / 448
        return (x.float() / step).clamp(-448, 448).to(F8), step

    def multiply(self, values: Tensor, matrix: Tensor) -> Tensor:
        return values.float() @ matrix.float()


UNSCALED = "no scale of each column, and of each row"


@pytest.mark.parametrize(
    "linear, why", [(Static, UNSCALED), (OneDynamic, UNSCALED), (Float8, "int8 alone is read")]
)
def test_where_all_layers_quantise_none_is_passed_over(linear: type[PlainLinear], why: str) -> None:
    rejection = refused(graph_of(model_of(PlainFull, linear), *paged_args()))
    assert rejection.code == "quant.dynamic" and why in rejection.message


class OneScale(PlainLinear):
    """One scale for all columns of the weight."""

    def bring_back(self, sums: Tensor, scale: Tensor) -> Tensor:
        return (sums.float() * scale * self.scale[:1].reshape(())).to(torch.bfloat16)


class Biased(PlainLinear):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features), requires_grad=False)

    def bring_back(self, sums: Tensor, scale: Tensor) -> Tensor:
        return (sums.float() * scale * self.scale + self.bias).to(torch.bfloat16)


class BroughtToScale(PlainLinear):
    """The rows are multiplied by their scale before the product."""

    def forward(self, x: Tensor) -> Tensor:
        values, scale = self.quantise(x)
        sums = (values.float() * scale) @ self.matrix().float()
        return (sums * self.scale).to(torch.bfloat16)


@pytest.mark.parametrize(
    "linear, code",
    [(OneScale, "quant.dynamic"), (Biased, "linear.bias"), (BroughtToScale, "q_lora.interrupted")],
)
def test_the_code_is_of_what_is_wrong(linear: type[PlainLinear], code: str) -> None:
    assert refused(graph_of(model_of(PlainPartial, linear), *paged_args())).code == code


def clamped(self: Base, q: Tensor) -> Any:
    return Base.split(self, q.clamp(-50, 50))


@pytest.mark.parametrize("base", [Base, Partial, PlainPartial])
def test_a_step_behind_a_quantisation_that_is_read(base: type[Base]) -> None:
    model: Callable[[], Base] = type("Clamped", (base,), {"split": clamped})
    rejection = refused(graph_of(model(), *paged_args()))
    assert rejection.code == "step.choice" and "clamp" in rejection.message


class GivenRows(PlainFull):
    """x comes quantised, with its scales."""

    def forward(self, *args: Tensor) -> Any:
        values, scales, cos, sin, kv_cache, kr_cache, slots = args
        q_a, kv_a = (
            layer.bring_back(torch._int_mm(values, layer.matrix()), scales)
            for layer in (self.q_a_proj, self.kv_a_proj_with_mqa)
        )
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(q_a)))
        c_kv, k_pe = kv_a.split([HCKV, DR], -1)
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        k_pe = self.rotate_k(k_pe.unsqueeze(1), c, sn).squeeze(1)
        self.write(kv_cache, kr_cache, slots, self.kv_a_layernorm(c_kv), k_pe)
        return self.absorb(q_nope), self.rotate_q(q_pe, c, sn)


def test_the_dtype_of_a_scale_is_named() -> None:
    x, *rest = paged_args()
    step = largest(x.float()) / 127
    values = to_int8(x.float() / step)
    model = model_of(GivenRows, PlainLinear)
    assert mf.fuse(graph_of(model, values, step, *rest)).fused
    rejection = refused(graph_of(model, values, step.half(), *rest))
    assert rejection.code == "quant.scale"
    assert "is float16 [8, 1], float32 or bfloat16 [8] is needed" in rejection.message
