"""A spelling as a functional ATen graph; its structure as a hash; runs of it, as is or wide."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx import Graph, GraphModule, Node

from . import prologue as p
from .inputs import Named, draw
from .prologue import Choices


@dataclass(frozen=True)
class Case:
    """A graph whose placeholders are named after the inputs that they take."""

    graph: GraphModule
    choices: Choices

    def inputs(self) -> Named:
        """Fresh inputs, of the placeholders alone."""
        drawn = draw(p.LEADS[self.choices["tokens"]], int(self.choices["heads"]))
        return {
            str(node.target): drawn[str(node.target)]
            for node in self.graph.graph.find_nodes(op="placeholder")
        }

    @cached_property
    def exact(self) -> Result:
        """The float64 run."""
        return run(self.graph, self.inputs(), wide=True)

    def copy(self) -> Case:
        """The same graph again, free to be changed."""
        graph = Graph()
        copied: dict[Node, Node] = {}
        graph.output(graph.graph_copy(self.graph.graph, copied))
        for node, twin in copied.items():
            twin.meta = dict(node.meta)
        return replace(self, graph=GraphModule(self.graph, graph))


def capture(choices: Choices) -> Case:
    """The inference graph as AOT autograd makes it, each input mutation a ``copy_`` at the end."""
    drawn = draw(p.LEADS[choices["tokens"]], int(choices["heads"]))
    names = sorted(_used(choices, drawn), key=list(drawn).index)

    class Model(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return p.prologue(choices, dict(zip(names, tensors, strict=True)))

    with torch.no_grad():
        gm = _inference_graph(Model(), [drawn[name] for name in names])
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
    gm.graph.eliminate_dead_code()
    for node in gm.graph.find_nodes(op="placeholder"):
        if not node.users and not str(node.target).endswith("_other"):
            gm.graph.erase_node(node)
    gm.recompile()
    return Case(gm, choices)


def _used(choices: Choices, drawn: Named) -> set[str]:
    """Names of the inputs that the spelling reads, and those kept for changes to read instead."""

    class Recorder(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            names.add(name)
            return super().__getitem__(name)

    names = {name for name in drawn if name.endswith("_other")}
    p.prologue(choices, Recorder({name: tensor.to("meta") for name, tensor in drawn.items()}))
    return names


def _inference_graph(model: torch.nn.Module, inputs: list[Tensor]) -> GraphModule:
    found: list[GraphModule] = []

    def compiler(gm: GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    aot_module_simplified(
        model,
        inputs,
        fw_compiler=compiler,
        inference_compiler=compiler,
        keep_inference_input_mutations=True,
    )
    return found[0]


def structure(gm: GraphModule) -> str:
    """Equal for graphs of the same operators, arguments and wiring, on inputs of equal shapes."""
    number = {node: index for index, node in enumerate(gm.graph.nodes)}

    def plain(value: Any) -> Any:
        return torch.fx.node.map_arg(value, lambda node: f"%{number[node]}")

    text = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        shape = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
        name = "" if node.op == "placeholder" else node.target
        text.append(f"{node.op} {name} {plain(node.args)} {plain(node.kwargs)} {shape}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


# -- runs


@dataclass(frozen=True)
class Result:
    """What a run returns, and the caches as it leaves them."""

    outputs: tuple[Tensor, ...]
    caches: Named


def run(gm: GraphModule, inputs: Mapping[str, Tensor], wide: bool = False) -> Result:
    """Run by node. ``wide``: in float64, bfloat16/float32/float64 casts erased, others done."""
    memory: dict[Node, Any] = {}
    last = _last_uses(gm.graph)
    given = {name: widened(tensor) if wide else tensor for name, tensor in inputs.items()}
    outputs: Any = ()
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                memory[node] = given[str(node.target)]
            elif node.op == "get_attr":
                value = getattr(gm, str(node.target))
                memory[node] = widened(value) if wide else value
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), memory.__getitem__)
                if node.op == "output":
                    outputs = args[0]
                    break
                memory[node] = (
                    _wide_call(node.target, args, kwargs) if wide else node.target(*args, **kwargs)
                )
            for used in last.get(node, ()):
                del memory[used]
    caches = {name: tensor for name, tensor in given.items() if "cache" in name or name == "pool"}
    return Result(tuple(outputs), caches)


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """The values that nobody reads after a node."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op != "output":
            found.setdefault(max(node.users, default=node), []).append(node)
    return found


_WIDE = {
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def _wide_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = tuple(_WIDE.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
    kwargs = {
        key: _WIDE.get(value, value) if isinstance(value, torch.dtype) else value
        for key, value in kwargs.items()
    }
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        target = torch.ops.aten.reshape.default  # a cast erased may leave other strides
    return target(*args, **kwargs)
