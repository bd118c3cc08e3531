"""Twelve common mistakes: what the report says is done, nothing else, until the graph is fused or
no remedy is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from mla_fusion.examples.fuse_your_model import DR, HCKV, HCQ, D, N, example
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from mla_fusion.report.rejection import Rejection
from tests.exhaustive import one_in

Layer = nn.Module
Arguments = tuple[Tensor, ...]
# Names of nodes and of AOT autograd's inputs, which no user has ever seen.
INTERNAL = re.compile(
    r"\b(?<!'s )(?<!\.)(?:arg\d+_1|(?:mm|addmm|bmm|matmul|mul|add|view|_to_copy)(?:_\d+)?)\b"
)


class Norm(nn.Module):
    """RMSNorm with one thing to be put right."""

    def __init__(
        self, width: int, eps: float | Tensor = 1e-6, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.weight, self.eps, self.dtype = nn.Parameter(torch.ones(width).bfloat16()), eps, dtype

    def forward(self, x: Tensor) -> Tensor:
        high = x.to(self.dtype)
        return (high * torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        ) * self.weight


class TensorEps(Norm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.eps
        self.register_buffer("eps", torch.tensor(1e-6))


class Clamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-50, 50)


@torch.library.custom_op("mla_fusion_tests::remedied", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return opaque(x)


class Scaled(nn.Module):
    """Half of the columns, those of q_nope, times a number that the others lack."""

    def forward(self, q: Tensor) -> Tensor:
        nope, rope = q.view(-1, N, D + DR).split([D, DR], -1)
        return torch.cat([nope * 0.5, rope], -1).flatten(1)


class Adapted(nn.Module):
    """An adapter beside a weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, wide = layer, {"bias": False, "dtype": torch.bfloat16}
        self.a, self.b = (
            nn.Linear(layer.in_features, 8, **wide),
            nn.Linear(8, layer.out_features, **wide),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x))

    def merged(self) -> nn.Linear:
        self.layer.weight.data += self.b.weight.data @ self.a.weight.data
        return self.layer


class Unabsorbed(nn.Module):
    """The same layer, which hands out q_nope."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        layer, (cos, sin, slots, kv_cache, kr_cache) = self.layer, rest
        q = layer.q_b(layer.q_norm(layer.q_a(x))).view(-1, N, D + DR)
        q_nope, q_pe = q.split([D, DR], dim=-1)
        c_kv, k_pe = layer.kv_a(x).split([HCKV, DR], dim=-1)
        kv_cache.view(-1, HCKV)[slots] = layer.kv_norm(c_kv)
        kr_cache.view(-1, DR)[slots] = _rotate(k_pe, cos, sin)
        return q_nope, _rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def put(
    **parts: Callable[[Layer], nn.Module],
) -> Callable[[Layer, Arguments], tuple[Layer, Arguments]]:
    """A step that exchanges modules of the layer."""

    def step(layer: Layer, arguments: Arguments) -> tuple[Layer, Arguments]:
        for name, make in parts.items():
            setattr(layer, name, make(layer))
        return layer, arguments

    return step


def to(dtype: torch.dtype) -> Callable[[Layer, Arguments], tuple[Layer, Arguments]]:
    def step(layer: Layer, arguments: Arguments) -> tuple[Layer, Arguments]:
        return layer.to(dtype), tuple(
            one.to(dtype) if one.is_floating_point() else one for one in arguments
        )

    return step


def in_front(name: str, part: nn.Module) -> Callable[[Layer, Arguments], tuple[Layer, Arguments]]:
    return put(**{name: lambda layer: nn.Sequential(part, getattr(layer, name))})


def out_again(name: str, place: int = 1) -> Callable[[Layer, Arguments], tuple[Layer, Arguments]]:
    return put(**{name: lambda layer: getattr(layer, name)[place]})


def wide(out: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(HCQ, out, bias=bias, dtype=torch.bfloat16)


Step = Callable[[Layer, Arguments], tuple[Layer, Arguments]]


@dataclass(frozen=True)
class Mistake:
    """``remedies``: (code, words of the remedy or message that say what to do, that done); None
    where there is none.
    """

    made: Step
    remedies: tuple[tuple[str, str, Step | None], ...]


MISTAKES = {
    "a float16 model": Mistake(
        to(torch.float16), (("dtype.region", "model.to(torch.bfloat16)", to(torch.bfloat16)),)
    ),
    "a float32 model": Mistake(
        to(torch.float32), (("dtype.region", "model.to(torch.bfloat16)", to(torch.bfloat16)),)
    ),
    "an epsilon held as a tensor": Mistake(
        put(q_norm=lambda _: TensorEps(HCQ)),
        (("norm.runtime_eps", "Make it a Python float", put(q_norm=lambda _: Norm(HCQ))),),
    ),
    "a norm weight in float32": Mistake(
        put(kv_norm=lambda layer: layer.kv_norm.float()),
        (("norm.gamma_dtype", "norm weights in bfloat16",
          put(kv_norm=lambda layer: layer.kv_norm.bfloat16())),),
    ),
    "a statistic in bfloat16": Mistake(
        put(q_norm=lambda _: Norm(HCQ, dtype=torch.bfloat16)),
        (("norm.low_precision", "Upcast to float32 behind the projection",
          put(q_norm=lambda _: Norm(HCQ))),),
    ),
    "LayerNorm": Mistake(
        put(q_norm=lambda _: nn.LayerNorm(HCQ, dtype=torch.bfloat16)),
        (("norm.absent", "Write RMSNorm", put(q_norm=lambda _: Norm(HCQ))),),
    ),
    "a clamp": Mistake(
        in_front("kv_norm", Clamp()), (("step.choice", "Leave the step out", out_again("kv_norm")),)
    ),
    "dropout in training": Mistake(
        in_front("kv_norm", nn.Dropout(0.1).train()),
        (("step.random", "model.eval()", lambda layer, arguments: (layer.eval(), arguments)),),
    ),
    "an operator of one's own": Mistake(
        in_front("kv_norm", Opaque()),
        (("step.unknown", "operators of torch", out_again("kv_norm")),)
    ),
    "an adapter beside a weight": Mistake(
        put(q_b=lambda layer: Adapted(layer.q_b)),
        (("linear.hidden", "merge adapters into the weights",
          put(q_b=lambda layer: layer.q_b.merged())),),
    ),
    "a query that is not absorbed": Mistake(
        lambda layer, arguments: (Unabsorbed(layer), arguments),
        (("absorb.absent", "Multiply q_nope by W_uk",
          lambda layer, arguments: (layer.layer, arguments)),),
    ),
    "q_nope scaled, q_pe not": Mistake(
        put(q_b=lambda layer: nn.Sequential(layer.q_b, Scaled())),
        (("scale.unequal", "Scale the whole query", out_again("q_b", 0)),),
    ),
    "a bias, and float16 before": Mistake(
        lambda layer, arguments: to(torch.float16)(
            *put(q_b=lambda _: wide(N * (D + DR)))(layer, arguments)
        ),
        (
            ("linear.bias", "Remove a bias of zeros",
             put(q_b=lambda _: wide(N * (D + DR), bias=False).half())),
            ("dtype.region", "model.to(torch.bfloat16)", to(torch.bfloat16)),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(2, MISTAKES))
def test_the_remedies_followed_end_in_a_fused_graph(name: str) -> None:
    mistake = MISTAKES[name]
    layer, arguments = mistake.made(*example())
    for code, words, remedy in mistake.remedies:
        (left,) = report(layer, arguments).rejected
        assert left.code == code, left.message
        assert words in left.remedy
        assert not (found := INTERNAL.findall(left.message.rpartition(". (")[2])), (
            f"{found} in {left.message}"
        )
        assert left.layer and left.source
        if remedy is None:
            return
        layer, arguments = remedy(layer, arguments)
    fused = report(layer, arguments)
    assert [item.placement for item in fused.fused] == ["in place"] and not fused.rejected


def report(layer: Layer, arguments: Arguments) -> mf.Report:
    gm, _ = capture(layer, *arguments, device="cpu")
    return mf.explain(gm, mf.Config(verify="off"), boundary=True)


def test_a_block_size_is_refused_with_the_legal_ones() -> None:
    layer, arguments = example()
    caches = tuple(torch.zeros(4, 8, 1, width).bfloat16() for width in (HCKV, DR))
    gm, _ = capture(layer, *arguments[:4], *caches, device="cpu")
    (left,) = mf.explain(gm, mf.Config(verify="off", staging="never")).rejected
    assert left.code.startswith("contract:") and "16..1024, a multiple of 16" in left.message


def test_a_graph_with_gradients_names_its_layers() -> None:
    layer, arguments = example()
    layer.requires_grad_(True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=mf.backend())
    compiled(arguments[0], *(one.clone() for one in arguments[1:]))
    (left,) = mf.reports()[-1].rejected
    assert (left.code, left.layer) == ("autograd", "Attention") and "torch.no_grad()" in left.remedy
    with torch.no_grad():
        compiled(*arguments)
    assert len(mf.reports()[-1].fused) == 1


def test_the_absent_product_points_at_the_line_of_the_query() -> None:
    layer, arguments = example()
    (left,) = report(Unabsorbed(layer), arguments).rejected
    assert "q = layer.q_b(" in left.source and "docs/absorb.md" in left.remedy
    assert isinstance(left, Rejection) and replace(left, layer="").where == ", ".join(
        left.nodes[:2]
    )
