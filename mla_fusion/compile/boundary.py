"""The boundary of a compiled graph: what is done to its inputs before each call.

Weights are packed out here, once per parameter, so the graph that the compiler sees holds nothing but the
kernel. The compiled callable keeps the signature that the caller knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fusion.config import Config
from mla_fusion.fusion.build import GraphBuilder, Recipe
from mla_fusion.fusion.driver import run
from mla_fusion.fusion.report import Report
from mla_fusion.graph.kinds import is_reshape, op_name
from mla_fusion.graph.program import nodes_between
from mla_fusion.graph.sizes import is_symbolic, same_shape
from mla_fusion.inspect import live
from mla_fusion.weights import cache
from mla_fusion.weights.share import Inverse, inverse


@dataclass(frozen=True)
class Same:
    """The caller's argument as it is."""

    position: int

    def __call__(self, args: Sequence[Any]) -> Any:
        return args[self.position]


@dataclass(frozen=True)
class Packed:
    """A weight made of some of the caller's arguments.

    inverse     how the one argument is read out of the packed weight, where it may become a view of it
    """

    program: GraphModule
    signature: str
    positions: tuple[int, ...]
    inverse: Inverse | None = None

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        return cache.packed(self.program, self.signature, self._sources(args), self.inverse)

    def bytes(self, args: Sequence[Any]) -> int:
        """What it takes beside these arguments, once it has been made of them."""
        return cache.bytes_of(self.signature, self._sources(args))

    def _sources(self, args: Sequence[Any]) -> list[torch.Tensor]:
        return [args[position] for position in self.positions]


@dataclass(frozen=True)
class Viewed:
    """A cache seen in the kernel's shape: the caller's memory, no copy. Raises where it is not contiguous."""

    position: int
    shape: tuple[int, ...]

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        cache: torch.Tensor = args[self.position]
        return cache.view(self.shape)


Adaptor = Same | Packed | Viewed


class BoundaryBuilder(GraphBuilder):
    """Moves packing and viewing out of the graph: what they make becomes an input of its own."""

    has_boundary = True

    def __init__(self, gm: GraphModule, source: Graph, config: Config) -> None:
        super().__init__(gm, source)
        self._share_weights = config.weights == "shared"
        self._originals = source.find_nodes(op="placeholder")
        self._last_input: Node | None = None
        self.made_outside: dict[Node, Packed | Viewed] = {}
        self._caches: dict[Node, Node] = {}
        self.adaptors: list[Adaptor] = []
        self.examples: list[Any] = []
        self.bytes_packed = 0

    def packed(self, name: str, recipe: Recipe, leaves: Sequence[Node]) -> Any:
        program, positions, result = self._program(recipe, leaves)
        if program is None:
            return self.value(result)
        made = Packed(program, cache.describe(program), positions, self._inverse(program, positions))
        return self._input(f"packed_{name}", made, result.meta["val"])

    def _inverse(self, program: GraphModule, positions: tuple[int, ...]) -> Inverse | None:
        if not self._share_weights or len(positions) != 1:
            return None
        parameter = self._originals[positions[0]].meta["val"]
        return None if any(map(is_symbolic, parameter.shape)) else inverse(program, parameter)

    def cache(self, node: Node, shape: Sequence[Any]) -> Node:
        if same_shape(node.meta["val"].shape, shape):
            return self.value(node)
        if node not in self._caches:
            # one size may be symbolic; the caller's tensor tells it
            viewed = Viewed(self._originals.index(node), tuple(-1 if is_symbolic(size) else size for size in shape))
            with self._fake_mode:
                value = node.meta["val"].view(viewed.shape)
            self._caches[node] = self._input(f"viewed_{node.name}", viewed, value)
        return self._caches[node]

    def _input(self, name: str, adaptor: Packed | Viewed, value: Any) -> Node:
        """A new input of the graph; layers that share parameters share the packed weight."""
        for node, known in self.made_outside.items():
            if _key(known) == _key(adaptor):
                return node
        name = f"{name}_{len(self.made_outside)}"
        with self.gm.graph.inserting_after(self._last_input or self.copies[self._originals[-1]]):
            node = self.gm.graph.create_node("placeholder", name, name=self.free_name(name))
        node.meta["val"] = value
        self.made_outside[node] = adaptor
        self._last_input = node
        return node

    def finish(self) -> None:
        """Let the epilogue write the viewed cache, so that the call is in place on an input."""
        for original, viewed in self._caches.items():
            cache = self.copies[original]
            for user in list(cache.users):
                if op_name(user) == "aten::copy_" and user.args[0] is cache:
                    result = user.args[1]
                    source = result.args[0] if isinstance(result, Node) and is_reshape(result) else None
                    if isinstance(source, Node) and same_shape(source.meta["val"].shape, viewed.meta["val"].shape):
                        user.args = (viewed, source)

    def _program(self, recipe: Recipe, leaves: Sequence[Node]) -> tuple[GraphModule | None, tuple[int, ...], Node]:
        """The recipe as a graph over the caller's inputs; no graph where it is one of them as it is."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        needed = dict.fromkeys(node for leaf in leaves for node in nodes_between((), leaf))
        inputs = [node for node in self._originals if node in needed]
        for node in [*inputs, *(node for node in needed if node.op != "placeholder")]:
            copies[node] = graph.node_copy(node, lambda old: copies[old])
        end = graph.output(None)
        inner = _PackingBuilder(GraphModule(self.gm, graph), copies, self._fake_mode, self._share_weights)
        inner.at(end, {})
        result = recipe(inner)
        original = next(
            (node for node, copied in copies.items() if copied is result and node.op == "placeholder"), None
        )
        if original is not None:
            return None, (), original
        end.args = (result,)
        inner.gm.graph.eliminate_dead_code()
        positions = tuple(self._originals.index(node) for node in inputs)
        return GraphModule(inner.gm, inner.gm.graph, "PackWeight"), positions, result

    def close(self) -> None:
        """Settle what the callable around the graph needs."""
        if self.made_outside:
            self.adaptors = self._inputs()
            self.examples = [node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder")]
            self.bytes_packed = self._bytes_packed()

    def _inputs(self) -> list[Adaptor]:
        """Drop inputs that nobody reads any more; how to make each of the rest."""
        self._leave_read_parameters()
        position = {self.copies[node]: place for place, node in enumerate(self._originals)}
        adaptors: list[Adaptor] = []
        for node in self.gm.graph.find_nodes(op="placeholder"):
            if node in self.made_outside:
                adaptors.append(self.made_outside[node])
            elif node.users:
                adaptors.append(Same(position[node]))
            else:
                self.gm.graph.erase_node(node)
        return adaptors

    def _leave_read_parameters(self) -> None:
        """A parameter that the graph reads itself keeps its strides: the graph is compiled for them."""
        for node, made in self.made_outside.items():
            if isinstance(made, Packed):
                sources = (self.copies[self._originals[position]] for position in made.positions)
                if any(source.users for source in sources):
                    self.made_outside[node] = replace(made, inverse=None)

    def _bytes_packed(self) -> int:
        """Of packed weights that are not views of their parameters, nor these (as far as can be told) views of them."""
        return sum(
            node.meta["val"].nbytes
            for node, made in self.made_outside.items()
            if isinstance(made, Packed) and made.inverse is None and not self._is_view(node, made)
        )

    def _is_view(self, node: Node, made: Packed) -> bool:
        storages = {self._originals[place].meta["val"].untyped_storage()._cdata for place in made.positions}
        return node.meta["val"].untyped_storage()._cdata in storages


def _key(adaptor: Packed | Viewed) -> object:
    """Equal for adaptors that make the same input (programs are equal when their signatures are)."""
    return (adaptor.signature, adaptor.positions) if isinstance(adaptor, Packed) else adaptor


class _PackingBuilder(GraphBuilder):
    """Builds a packing program: nodes of the main graph stand for their copies in it."""

    def __init__(self, gm: GraphModule, copies: dict[Node, Node], fake_mode: Any, as_on_npu: bool) -> None:
        super().__init__(gm)
        self._as_on_npu = as_on_npu
        self._copies = {copy.name: copy for copy in gm.graph.nodes}
        self._names = {node: copy.name for node, copy in copies.items()}
        self._fake_mode = fake_mode

    def value(self, node: Node) -> Node:
        return self._copies[self._names[node]]

    def device_type(self, value: Node) -> str:
        """Shared weights are laid out on a CPU as on an NPU: what that does to a model can be tried without one."""
        kind = super().device_type(value)
        return "npu" if kind == "cpu" and self._as_on_npu else kind


def fuse_with_boundary(
    gm: GraphModule, inputs: Sequence[Any], config: Config
) -> tuple[Report, list[Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Fuse ``gm`` in place; the new example inputs, and the wrapper that keeps the caller's signature."""
    made: list[BoundaryBuilder] = []

    class Builder(BoundaryBuilder):
        def __init__(self, gm: GraphModule, source: Graph) -> None:
            super().__init__(gm, source, config)
            made.append(self)

    report = run(gm, config, Builder)
    if not report.fused or not made[-1].made_outside:
        return report, list(inputs), lambda compiled: compiled
    builder = made[-1]
    report.bytes_added = builder.bytes_packed
    live.save(report)
    return report, builder.examples, lambda compiled: _Adapted(compiled, builder.adaptors, report)


class _Adapted:
    """The compiled graph behind its boundary."""

    def __init__(self, compiled: Callable[..., Any], adaptors: Sequence[Adaptor], report: Report) -> None:
        self.compiled, self.adaptors = compiled, tuple(adaptors)
        self._unsettled: Report | None = report if report.config.weights == "shared" else None

    def __call__(self, *args: Any) -> Any:
        inputs = [adaptor(args) for adaptor in self.adaptors]
        if self._unsettled is not None:
            self._settle(self._unsettled, args)
        return self.compiled(*inputs)

    def _settle(self, report: Report, args: Sequence[Any]) -> None:
        """Which parameters could be shared shows in the first call (tied ones look like any other while compiling)."""
        self._unsettled = None
        added = sum(adaptor.bytes(args) for adaptor in self.adaptors if isinstance(adaptor, Packed))
        if added != report.bytes_added:
            report.bytes_added = added
            live.save(report)
