"""Static scales and offsets repeated for every channel: followed where they change, refused where
they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary
from mla_fusion.weights import WeightError
from tests.catalogue import static
from tests.catalogue.base import DR, HCQ, D
from tests.harness import assert_no_worse, clones, eager, exact, traced

CONFIG = mf.Config(targets=("preprocess",), verify="off")


def told(model: nn.Module, args: tuple[Tensor, ...]) -> mf.Report:
    """As the backend has it, without dynamo's time."""
    gm, weights = traced(model, args)
    given = [*weights, *args]
    return fuse_with_boundary(gm, given, CONFIG, given)[0]


def built(
    model: nn.Module, args: tuple[Tensor, ...], **config: Any
) -> tuple[mf.Report, Callable[..., Any]]:
    """Compiled, and called once."""
    torch._dynamo.reset()
    backend = mf.backend(replace(CONFIG, **{"updates": "every call", **config}))
    run = torch.compile(model, backend=backend, fullgraph=True)
    run(*clones(args))
    return mf.reports()[-1], run


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def repeated() -> tuple[static.RepeatedScales, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return static.RepeatedScales(), static.static_args()


@pytest.mark.parametrize("updates", ["every call"])
def test_updates_are_packed_anew_or_refused(updates: str) -> None:
    model, args = repeated()
    report, run = built(model, args, updates=updates)
    (fusion,) = report.fused
    assert any("repeat one number" in text for text in fusion.assumptions)
    run(*clones(args))
    model.q_b_proj.input_scale_reciprocal.mul_(0.5)  # another number, of every channel
    model.fused.input_offset.copy_(torch.full_like(model.fused.input_offset, -2))
    fused = run(*(given := clones(args)))
    assert_no_worse(exact(model, args), eager(model, clones(args)), [*fused, *given])
    named = r"quant.not_static\] the numbers of (fused|q_b_proj)\.input_\w+ are not all"
    for vector in (model.fused.input_scale_reciprocal, model.q_b_proj.input_offset):
        held = vector[1500].clone()
        vector[1500] = held + 1  # one of many
        given = clones(args)
        with pytest.raises(WeightError, match=named):
            run(*given)
        # nothing was written
        assert all(torch.equal(a, b) for a, b in zip(given, args, strict=True))
        vector[1500] = held
        assert torch.equal(run(*clones(args))[0], fused[0])


def test_one_memory_of_a_scale_that_needs_no_cast() -> None:
    """What is packed of it is no view of its first number: the others would change unseen."""
    torch.manual_seed(0)
    model, args = static.StaticW8A8(), static.static_args()
    scales = nn.Parameter(model.q_b_proj.input_scale.repeat(HCQ), requires_grad=False)
    model.q_b_proj.input_scale = scales
    report, run = built(model, args)
    assert len(report.fused) == 1
    scales.data[-1] *= 2
    with pytest.raises(WeightError, match="one bfloat16 number"):
        run(*clones(args))


def test_two_layers_share_a_vector_and_a_third_has_its_own() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(static.RepeatedScales() for _ in range(3))
            first, second, third = self.layers
            second.q_b_proj.input_scale_reciprocal = first.q_b_proj.input_scale_reciprocal
            third.q_b_proj.input_scale_reciprocal.data.mul_(2)

        def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
            return tuple(
                layer(x * (1 + place), *args)[0] for place, layer in enumerate(self.layers)
            )

    torch.manual_seed(0)
    model, args = Layers(), static.static_args()
    report, run = built(model, args, staging="always")
    assert len(report.fused) == 3
    got = [*run(*(given := clones(args))), *given]
    assert_no_worse(exact(model, args), eager(model, clones(args)), got)
    model.layers[0].q_b_proj.input_scale_reciprocal[3] += 1
    with pytest.raises(WeightError):
        run(*clones(args))


class OneOf(static.RepeatedScales):
    """The vectors of q_b are changed before anything is compiled."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        held = self.q_b_proj.input_scale_reciprocal
        self.q_b_proj.input_scale_reciprocal = nn.Parameter(change(held.data), requires_grad=False)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "the last is another": (lambda s: torch.cat([s[:-1], s[-1:] * 1.01]), "differ"),
    "too short": (lambda s: s[:700], "has 700 numbers for 1536 channels"),
    "no reciprocal": (
        lambda s: torch.full_like(s, 1.484375),
        "not all the reciprocal of one bfloat16 number: 1.48438",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_refused_when_it_is_compiled(change: str) -> None:
    torch.manual_seed(0)
    how, why = CHANGES[change]
    report = told(OneOf(how), static.static_args())
    assert [item.code for item in report.rejected] == [
        "quant.not_static"
    ] and why in report.rejected[0].message


def test_one_number_without_memory_for_each() -> None:
    torch.manual_seed(0)
    model, args = OneOf(lambda s: s[:1].expand(HCQ)), static.static_args()
    assert model.q_b_proj.input_scale_reciprocal.stride() == (0,)
    report, run = built(model, args)
    assert len(report.fused) == 1
    fused = run(*(given := clones(args)))
    assert_no_worse(exact(model, args), eager(model, clones(args)), [*fused, *given])


def test_an_argument_is_no_weight() -> None:
    """A vector that the caller hands in may be another one at every call, whatever it holds now."""

    class Given(static.StaticFused):
        def __init__(self) -> None:
            super().__init__()
            self.q_b_proj = static.StaticLinear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]
            del self.q_b_proj.input_scale

        def forward(self, scales: Tensor, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            self.q_b_proj.input_scale = scales
            return super().forward(x, *args)

    args = (torch.full((HCQ,), 0.03125).bfloat16(), *static.static_args())
    report = told(Given(), args)
    assert [item.code for item in report.rejected] == ["quant.not_static"]
    assert "cannot be looked at here" in report.rejected[0].message


def test_a_lowered_graph_knows_parameters_and_buffers() -> None:
    for model in (static.RepeatedScales(), static.RepeatedBuffers()):
        lowered = mf.lower(model, *static.static_args(), mode="npugraph_ex", config=CONFIG)
        assert lowered.report is not None and len(lowered.report.fused) == 1
        assert any("packed_quant_scale0" in node.name for node in lowered.fx_after.graph.nodes)
