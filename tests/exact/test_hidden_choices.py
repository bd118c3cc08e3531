"""Choices that never act where inputs are drawn: floors, counts from the end, sums along tokens.

Each is refused, or the mode that it would need is: verification is off.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import ENTRIES, floats, int8_plain
from tests.catalogue.base import DR, HCKV, HE, Base, npu, paged_args, tables
from tests.exhaustive import one_in
from tests.harness import traced_graph


def report_of(
    model: nn.Module, *args: Tensor, dynamic: bool = False, **options: object
) -> mf.Report:
    config = mf.Config(verify="off", **options)  # type: ignore[arg-type]
    return mf.explain(traced_graph(model, *args, dynamic=dynamic), config, boundary=True)


def floored(v: Tensor) -> Tensor:
    """v above 0.01, and 1e-4 / v below."""
    square = v.float() * v.float() * 1e-7 + 1e-14
    return (v * square.clamp_min(1e-11) / square).to(v.dtype)


def of_row(v: Tensor) -> Tensor:
    """The same of the mean square of a row."""
    mean = v.float().square().mean(-1, keepdim=True) * 1e-7
    return (v * mean.clamp_min(1e-11) / mean).to(v.dtype)


@pytest.mark.parametrize("floor", [floored, of_row])
@pytest.mark.parametrize("name", ["paged", "MxFull", "HifFull"])
def test_a_floor_is_one_under_a_norm_alone(name: str, floor: Callable[[Tensor], Tensor]) -> None:
    kind = Base if name == "paged" else ENTRIES[name].model
    soc, targets = (
        ("A3", ("v3",)) if name == "paged" else (ENTRIES[name].soc, ENTRIES[name].targets)
    )
    args = paged_args() if name == "paged" else ENTRIES[name].args()

    def absorb(self: Base, q_nope: Tensor) -> Tensor:
        return torch.bmm(floor(q_nope).transpose(0, 1), self.w_uk()).transpose(0, 1)

    torch.manual_seed(0)
    changed = type("Changed", (kind,), {"absorb": absorb})()  # type: ignore[arg-type]
    assert not report_of(changed, *args, soc=soc, targets=targets).fused


def place(v: Tensor) -> Tensor:
    return torch.arange(v.shape[0]).reshape(-1, *(1,) * (v.dim() - 1)).float()


def flat(v: Tensor, one: Tensor) -> Tensor:
    return one.reshape(-1, *(1,) * (v.dim() - 1))


def ones(v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(1, v.shape[0]), torch.ones(v.shape[0], 1)


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda v: torch.relu(600.5 - place(v)) / (600.5 - place(v)),
    "floor of 0": lambda v: (600.5 - place(v)).clamp_min(0) / (600.5 - place(v)),
    "size of a wave": lambda v: (place(v) * 0.001).cos().abs() / (place(v) * 0.001).cos(),
    "maximum": lambda v: (
        torch.maximum(600.5 - place(v), torch.zeros_like(place(v))) / (600.5 - place(v))
    ),
    "rows of one": lambda v: flat(v, torch.eye(v.shape[0], 600).sum(1)),
    "sum by a product": lambda v: torch.addmm(torch.zeros(1, 1), *ones(v)) / 5,
    "length of ones": lambda v: torch.linalg.vector_norm(torch.ones(v.shape[0])) ** 2 / 5,
}


def attention_args(tokens: int = 8, blocks: int = 64) -> tuple[Tensor, ...]:
    caches = (
        torch.zeros(blocks, 16, 1, HCKV).to(torch.float8_e4m3fn),
        torch.zeros(blocks, 16, 1, DR).bfloat16(),
    )
    return torch.randn(tokens, HE).bfloat16(), *tables(tokens), *caches, torch.arange(tokens)


@pytest.mark.parametrize("name", one_in(2, FACTORS))
@pytest.mark.parametrize("method", one_in(1, ["to_scale", "quantise"]))
def test_what_is_1_for_the_first_tokens_is_a_factor(name: str, method: str) -> None:
    factor = FACTORS[name]

    def to_scale(self: nn.Module, query: Tensor, scale: Tensor) -> Tensor:
        return (query.float() * (self.kv_scale / scale.unsqueeze(-1) * factor(query))).to(
            query.dtype
        )  # type: ignore[operator]

    def quantise(self: nn.Module, rows: Tensor) -> Tensor:
        return (
            (rows.float() * self.kv_scale * factor(rows)).clamp(-448, 448).to(torch.float8_e4m3fn)
        )  # type: ignore[operator]

    body = {"to_scale": to_scale, "quantise": quantise}[method]
    torch.manual_seed(0)
    model = type("Changed", (ENTRIES["Fp8Attention"].model,), {method: body})()  # type: ignore[arg-type]
    report = report_of(model, *attention_args(), dynamic=True, soc="A5")
    assert not any(item.attributes.get("kv_cache_quant_mode") for item in report.fused), str(report)


def test_a_scale_in_float16_has_another_range() -> None:
    def product(self: floats.HifLinear, x: Tensor, scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(
            x,
            self.weight,
            self.scale,
            pertoken_scale=scale.half().float(),
            output_dtype=torch.bfloat16,
            **self.named(),
        )

    torch.manual_seed(0)
    model = ENTRIES["HifFull"].model()
    model.q_b_proj.__class__ = type("Changed", (floats.HifLinear,), {"product": product})  # type: ignore[union-attr]
    assert not report_of(model, *ENTRIES["HifFull"].args(), soc="A5").fused


@pytest.mark.parametrize(
    ("factor", "is_fused"), [(1.0, True), (2.0**-14, False), (2.0**-20, False)]
)
def test_a_floor_is_one_under_rows_that_no_factor_makes_small(
    factor: float, is_fused: bool
) -> None:
    def quantise(self: int8_plain.PlainLinear, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.float() * factor
        scale = int8_plain.largest(rows).clamp_min(1e-4) / 127
        return int8_plain.to_int8(rows / scale), scale

    def bring_back(self: int8_plain.PlainLinear, sums: Tensor, scale: Tensor) -> Tensor:
        return (sums.float() * scale * self.scale * (1 / factor)).to(torch.bfloat16)

    methods = {"quantise": quantise, "bring_back": bring_back}
    torch.manual_seed(0)
    model = int8_plain.model_of(
        int8_plain.PlainPartial, type("Changed", (int8_plain.PlainLinear,), methods)
    )
    assert bool(report_of(model, *paged_args()).fused) is is_fused
