"""Module attributes under ``dynamic=True``: numbers again, with a guard; arguments are inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.dynamo import specialise
from tests.catalogue import base, prologues
from tests.harness import assert_as_exact, clones


def test_fuses_and_follows_a_changed_epsilon() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = prologues.PagedRotateHalf()
    compiled = torch.compile(model, backend="mla_fusion", dynamic=True, fullgraph=True)
    graphs = []
    for tokens, eps in ((8, 1e-6), (11, 1e-6), (8, 3e-5)):
        model.q_a_layernorm.eps = eps
        args = base.paged_args(tokens)
        given = clones(args)
        with torch.no_grad():
            fused = [compiled(*given), *given]
        assert_as_exact(model, args, fused)
        (fusion,) = mf.reports()[-1].fused
        assert fusion.placement == "in place" and fusion.attributes["rmsnorm_epsilon_cq"] == eps
        graphs.append(len(mf.reports()))
    assert graphs[0] == graphs[1] < graphs[2], (
        "another number of tokens is the same graph, another epsilon is not"
    )


class NormOfItsClass(base.HfNorm):
    eps = 3e-5

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.eps

    def forward(this, x: Tensor) -> Tensor:
        return super().forward(x)


class OfClasses(base.Base):
    norm = NormOfItsClass


def test_a_float_of_a_class() -> None:
    """A module is reached by any name, its class through it."""
    torch._dynamo.reset()
    model = OfClasses()
    compiled = torch.compile(
        lambda module, *args: module(*args), backend="mla_fusion", dynamic=True, fullgraph=True
    )
    with torch.no_grad():
        compiled(model, *base.paged_args())
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place" and fusion.attributes["rmsnorm_epsilon_cq"] == 3e-5


def test_lowered_as_the_backend_would() -> None:
    lowered = mf.lower(prologues.PagedRotateHalf(), *base.paged_args(), dynamic=True)
    assert (
        lowered.ge_ops["MlaPrologV3"] == 1
        and not lowered.ge_ops["TensorMove"] + lowered.ge_ops["Assign"]
    )


def test_arguments_stay_inputs() -> None:
    torch._dynamo.reset()
    left: list[list[torch.fx.Node]] = []

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = 0.25

        def forward(self, x: Tensor, temperature: float) -> Tensor:
            return x / temperature + self.offset

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        specialise(gm)
        left.append(gm.graph.find_nodes(op="call_method", target="item"))
        return gm.forward

    model = Scaled()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for temperature in (0.5, 0.7, 0.9):
        x = torch.rand(3)
        assert torch.equal(compiled(x, temperature), model(x, temperature))
    assert len(left) == 1 and len(left[0]) == 1, "the temperature is an input, the offset is none"
