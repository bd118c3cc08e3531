"""Small graphs of ATen operators, static or with symbolic axes, and their nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_fusion.fx.kinds import op_name
from mla_fusion.fx.view import View

# Axes of these sizes are symbolic in a symbolic graph, and one symbol each.
TOKENS, SEQUENCES, POSITIONS = 7, 11, 13
_SYMBOLIC = (TOKENS, SEQUENCES, POSITIONS, SEQUENCES * POSITIONS)


def trace(fn: Callable[..., Any], *args: Tensor, symbolic: bool = False) -> GraphModule:
    """``fn`` as one functional graph; nothing is run."""
    functional = torch.func.functionalize(fn, remove="mutations")
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, static_shapes=not symbolic)
    fakes = [_fake(mode, f"arg{i}", arg, symbolic) for i, arg in enumerate(args)]
    with torch.no_grad():
        gm = make_fx(functional, tracing_mode="symbolic" if symbolic else "fake")(*fakes)
    gm.graph.eliminate_dead_code()
    return gm


def _fake(mode: FakeTensorMode, name: str, value: Tensor, symbolic: bool) -> Tensor:
    if not symbolic:
        return mode.from_tensor(value)
    kinds = [DimDynamic.DUCK if size in _SYMBOLIC else DimDynamic.STATIC for size in value.shape]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(name))


def view(fn: Callable[..., Any], *args: Tensor, symbolic: bool = False) -> View:
    return View(trace(fn, *args, symbolic=symbolic))


def outputs(view: View) -> list[Node]:
    """What the function returned, one node for each place."""
    (output,) = view.gm.graph.find_nodes(op="output")
    held = output.args[0]
    return list(held) if isinstance(held, (list, tuple)) else [held]


def inputs(view: View) -> list[Node]:
    return view.gm.graph.find_nodes(op="placeholder")


def calls(view: View, name: str) -> list[Node]:
    """Calls of ``aten::name``, in order."""
    return [node for node in view.nodes if op_name(node) == f"aten::{name}"]


def floats(*shape: int) -> Tensor:
    return torch.zeros(shape)


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def masks(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)
