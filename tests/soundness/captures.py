"""A program as a functional ATen graph, at one token count or at any.

``static`` and ``symbolic`` go through AOT autograd as torch.compile does, without dynamo in front,
which would be most of the time: sizes that are symbolic are inputs of the graph, as dynamo passes
them. Guards that a symbolic capture makes are not checked afterwards; ``Captured.plain`` tells
whether the graph still means the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .program import Named

Program = Callable[[Named], tuple[Tensor, ...]]
PER_TOKEN = ("x", "positions", "cos", "sin", "slots", "mask", "kinds", "other")


@dataclass
class Captured:
    """A graph, the names of its arguments, and a copy that nobody changes."""

    graph: GraphModule
    inputs: list[Any]
    names: list[str]
    plain: GraphModule
    # do the guards of the capture hold for an input?
    serves: Callable[[Named], bool] = lambda _: True

    def args(self, named: Named) -> list[Any]:
        return [len(named["x"]) if name == "tokens" else named[name] for name in self.names]


def static(program: Program, example: Named) -> Captured:
    names = _used(program, example)
    given: list[Any] = [example[name] for name in names]
    return _captured(_aot(_Model(program, names, example), given), names)


def symbolic(program: Program, example: Named) -> Captured:
    """The number of tokens is a symbol, and so is the int ``n`` where the program reads it."""
    names = _used(program, example)
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, static_shapes=False)
    given = [_fake(mode, shapes, name, example[name]) for name in names]
    first = next(place for place, name in enumerate(names) if name in PER_TOKEN)
    size = given[first].shape[0]
    graph = _aot(_Model(program, ["tokens", *names], example), [size, *given])
    captured = _captured(graph, ["tokens", *names])
    captured.serves = _guard(
        shapes, {"tokens": size, **{n: v for n, v in zip(names, given, strict=True) if n in "nm"}}
    )
    return captured


def _guard(shapes: ShapeEnv, sizes: dict[str, Any]) -> Callable[[Named], bool]:
    """Would torch use the graph for these sizes?"""
    symbols = {name: size.node._expr for name, size in sizes.items()}

    def serves(named: Named) -> bool:
        values = {"tokens": len(named["x"]), "n": named["n"], "m": named["m"]}
        given = {symbol: values[name] for name, symbol in symbols.items()}
        for symbol, value in given.items():
            known = shapes.replacements.get(symbol, symbol).subs(given)
            if known.is_number and int(known) != value:
                return False
        return all(bool(guard.expr.subs(given)) for guard in shapes.guards)

    return serves


def copied(gm: GraphModule) -> GraphModule:
    """The same graph again, free to be changed; values of nodes are shared."""
    graph = Graph()
    nodes: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, nodes))
    for node, twin in nodes.items():
        twin.meta = dict(node.meta)
    return GraphModule(gm, graph)


class _Model(nn.Module):
    def __init__(self, program: Program, names: Sequence[str], example: Named) -> None:
        super().__init__()
        self._run, self._names = program, names

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        return self._run(dict(zip(self._names, given, strict=True)))


def _captured(gm: GraphModule, names: list[str]) -> Captured:
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return Captured(gm, inputs, names, copied(gm))


def _used(program: Program, example: Named) -> list[str]:
    """Names that the program reads, in the order of the inputs."""

    class Recorder(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            seen.add(name)
            return super().__getitem__(name)

    seen: set[str] = set()
    given = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in example.items()
    }
    with torch.no_grad():
        program(Recorder(given))
    return [name for name in example if name in seen]


def _fake(mode: FakeTensorMode, shapes: ShapeEnv, name: str, value: Any) -> Any:
    source = ConstantSource(name)
    if isinstance(value, int):
        symbol = shapes.create_symbol(
            value, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        return shapes.create_symintnode(symbol, hint=value, source=source)
    kinds = [DimDynamic.STATIC] * value.dim()
    if name in PER_TOKEN:
        kinds[0] = DimDynamic.DUCK
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(value, symbolic_context=context, source=source)


def _aot(model: nn.Module, given: list[Any]) -> GraphModule:
    found: list[GraphModule] = []

    def compiler(gm: GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    with torch.no_grad():
        aot_module_simplified(
            model,
            given,
            fw_compiler=compiler,
            inference_compiler=compiler,
            keep_inference_input_mutations=True,
        )
    return found[0]
