"""Calls of subgraphs become the nodes of their bodies, where that changes nothing; else they
stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx import GraphModule

from mla_fusion.compat import HigherOrderOperator
from mla_fusion.fx import subgraphs
from tests.harness import clones

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def captured(fn: Callable[..., Any], *args: Tensor) -> GraphModule:
    """What a backend behind AOT autograd receives; the calls of one body are those of
    ``invoke_subgraph``.
    """
    kept: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        kept.append(gm)
        return gm.forward

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=keep, inference_compiler=keep)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True)(*clones(args))
    return kept[0]


def bodies(gm: GraphModule) -> list[str]:
    """The operators that call a graph."""
    return [
        node.target.name()
        for node in gm.graph.nodes
        if isinstance(node.target, HigherOrderOperator)
    ]


def inlined(gm: GraphModule) -> GraphModule:
    before = str(gm.graph)
    made = GraphModule(gm, subgraphs.copied(gm))
    made.graph.lint()
    assert str(gm.graph) == before
    return made


def same(one: GraphModule, other: GraphModule, *args: Tensor) -> None:
    """Results, and the arguments as the run left them, are the same bits."""
    given = clones(args), clones(args)
    results = [
        torch.utils._pytree.tree_leaves(gm(*each))
        for gm, each in zip((one, other), given, strict=True)
    ]
    for a, b in zip([*results[0], *given[0]], [*results[1], *given[1]], strict=True):
        assert torch.equal(a, b)


@torch.compiler.nested_compile_region
def region(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).tanh() + 1


@torch.compiler.nested_compile_region
def writing(x: Tensor, cache: Tensor) -> Tensor:
    cache.add_(x)
    return cache * 2


def test_a_region_that_is_called_twice() -> None:
    gm = captured(lambda x, scale: region(region(x, scale) * 2, scale), X, X + 2)
    assert bodies(gm) == ["invoke_subgraph"] * 2 and subgraphs.found(gm)
    made = inlined(gm)
    assert not bodies(made) and not subgraphs.found(made)
    assert [str(node.target) for node in made.graph.nodes].count("aten.tanh.default") == 2
    assert not made.graph.find_nodes(op="get_attr")
    same(gm, made, X, X + 2)


def test_regions_within_regions() -> None:
    @torch.compiler.nested_compile_region
    def outer(x: Tensor, scale: Tensor) -> Tensor:
        return region(x, scale).sin()

    gm = captured(lambda x, scale: outer(x, scale) - region(scale, x), X, X + 2)
    made = inlined(gm)
    assert not bodies(made)
    same(gm, made, X, X + 2)


class WithoutGrad(nn.Module):
    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.weight, self.enabled = nn.Parameter(torch.ones(4)), enabled

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        with torch.set_grad_enabled(self.enabled):
            z = y.exp() + self.weight
        return z * 2


def test_a_body_without_gradients() -> None:
    gm = torch.export.export(WithoutGrad(False), (X,)).module()
    assert subgraphs.found(gm) and "wrap_with_set_grad_enabled" in bodies(gm)
    made = inlined(gm)
    assert [
        node.args[0] for node in made.graph.nodes if isinstance(node.target, HigherOrderOperator)
    ] in ([], [True])
    same(gm, made, X)


def test_a_body_with_gradients_stays() -> None:
    with torch.no_grad():
        gm = torch.export.export(WithoutGrad(True), (X,)).module()
    assert bodies(gm) and not subgraphs.found(gm)
    assert bodies(inlined(gm)) == bodies(gm)


def test_a_body_for_other_shapes_stays() -> None:
    gm = captured(lambda x, scale: region(region(x, scale), scale), X, X + 2)
    call = next(node for node in gm.graph.nodes if isinstance(node.target, HigherOrderOperator))
    body = gm.get_submodule(str(call.args[0].target))
    first, _ = body.graph.find_nodes(op="placeholder")
    first.meta["val"] = first.meta["val"].new_empty(5, 4)
    assert bodies(gm) and not subgraphs.found(gm)


def test_a_region_that_writes_its_argument() -> None:
    gm = captured(lambda x, cache: writing(x, cache) + writing(x + 1, cache), X, X + 2)
    assert bodies(gm) == ["auto_functionalized_v2"] * 2
    made = inlined(gm)
    assert not bodies(made)
    same(gm, made, X, X + 2)
