"""Prepares a compiled graph for its wrapper: moves work on weights and caches out of the graph.

Weights are packed outside, once for each parameter, so the compiler's graph holds only the kernel.
The compiled callable keeps the signature of the caller's graph.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import expression_of, storage_id
from mla_fusion.compile.adapted import Adapted, Adaptor, SizeOrigin, SlotCheck, Viewed
from mla_fusion.compile.dynamo import differs_by_call, mark_numbers
from mla_fusion.compile.inplace import make_ready_to_run, runs_fx_graph
from mla_fusion.config import Config
from mla_fusion.fx.build import Builder, GraphBuilder, Recipe
from mla_fusion.fx.kinds import is_random, is_reshape, shape_of, value_of, word
from mla_fusion.fx.module_path import label
from mla_fusion.fx.sizes import (
    bytes_of,
    has_symbols,
    is_size,
    is_symbolic,
    same,
    same_shape,
    sizes_of,
)
from mla_fusion.fx.vector_numbers import Exact
from mla_fusion.fx.walk import is_copy_into, nodes_between
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.pools import part_of
from mla_fusion.machine import for_ge
from mla_fusion.pipeline import run
from mla_fusion.plan.outputs import source_nodes
from mla_fusion.plan.slots import block_size_of, places_in_blocks
from mla_fusion.report import store
from mla_fusion.report.report import Report
from mla_fusion.weights import cache
from mla_fusion.weights.cache import Packed

aten = torch.ops.aten
log = logging.getLogger("mla_fusion")
warn_once = functools.cache(log.warning)

Fused = tuple[Report, list[Any], Callable[[Callable[..., Any]], Callable[..., Any]]]
_UNCOUNTED = (
    "{} weights of kernel calls were made under torch.inference_mode(), where torch counts no "
    "changes. After a change call mla_fusion.refresh(model), or calls may use what was packed "
    "before; or make the weights under torch.no_grad()"
)


class PackedWeight(NamedTuple):
    """A weight that the pass packs.

    name       the name of the kernel's argument
    packed     the packing
    value      the packed weight's fake tensor
    parameter  the fake tensor of its parameter; None if it is made of several
    is_view    True if the packed weight is a view of a parameter's memory
    """

    name: str
    packed: Packed
    value: Tensor
    parameter: Tensor | None
    is_view: bool


class BoundaryBuilder(GraphBuilder):
    """Makes inputs of the graph of packed weights and of viewed caches.

    adaptors     for each input of the new graph, how the wrapper obtains it; empty if the new graph
                 takes the caller's arguments
    examples     example inputs of the new graph
    slot_checks  what the wrapper checks before each call
    """

    def __init__(self, gm: GraphModule, source: Graph, config: Config, as_on_npu: bool) -> None:
        super().__init__(gm, source)
        self._config, self._as_on_npu = config, as_on_npu
        inputs = source.find_nodes(op="placeholder")
        self._originals = [node for node in inputs if part_of(node) is None]
        self._parts = [node for node in inputs if part_of(node) is not None]
        self._position = {node: place for place, node in enumerate(self._originals)}
        self._last_input: Node | None = None
        self._adaptor_by_input: dict[Node, Packed | Viewed] = {}
        self._input_by_key: dict[object, Node] = {}
        self._weight_names: dict[Node, str] = {}
        self._viewed_caches: dict[Node, Node] = {}
        self.slot_checks: dict[object, SlotCheck] = {}
        self.adaptors: list[Adaptor] = []
        self.examples: list[Any] = []

    def packed(
        self, name: str, recipe: Recipe, leaves: Sequence[Node], exact: Exact | None = None
    ) -> Any:
        """Returns an input for a packed weight, or packs it in the graph if only that is possible.

        Raises if a weight that must be ``exact`` can only be packed in the graph: nothing would
        look at its numbers there.
        """
        try:
            program, positions, result = self._program(recipe, leaves)
        # it depends on more than inputs, or its sizes are not known before the graph runs
        except LookupError:
            if exact is not None:
                raise
            return recipe(self)
        sources = [self._originals[position] for position in positions]
        if exact is None and differs_by_call(sources):
            return recipe(self)
        if program is None:
            return self.value(result)
        packing = Packed(
            program, self._config.updates, exact, positions, tuple(map(label, sources))
        )
        # equal programs have equal signatures: layers that share parameters share the weight
        key = packing.signature, positions
        weight = self._input(f"packed_{name}", key, packing, result.meta["val"])
        self._weight_names.setdefault(weight, name)
        return weight

    def check_slots(self, plan: Any) -> None:
        """Notes the slots of a call for the wrapper, under ``Config(slots="checked")``.

        plan  a plan in place
        """
        if self._config.slots != "checked":
            return
        graph, slots = plan.graph, plan.caches.slots

        def row_numbers(builder: Builder) -> Any:
            return builder.cast(Lowering(builder, graph).of(slots), torch.int64)

        caches = tuple(
            (f"{name} ({label(node)})", self._viewed(node, shape), int(shape[-1]))
            for name, node, shape in plan.written_caches
        )
        try:
            block, counted = block_size_of(slots), places_in_blocks(plan.caches.trusted_inputs)
            places = tuple(
                (
                    label(node),
                    self._position[node],
                    first,
                    self._size(plan, block),
                    self._size(plan, count),
                )
                for leaf, (first, count) in counted.items()
                for node in graph.nodes[leaf][:1]
            )
            program, positions, _ = self._program(row_numbers, source_nodes(graph, [slots]))
        except LookupError as error:
            log.warning(
                "the slots of %s are not checked: they are not made of inputs (%s)",
                caches[0][0],
                error,
            )
            return
        # an operator that writes unlike its schema leaves out negative slots, as the kernel does
        skips = any(node in graph.hidden for _, node, _ in plan.written_caches)
        key = cache.describe(program) if program is not None else "", positions, caches
        self.slot_checks.setdefault(key, SlotCheck(program, positions, caches, skips, places))

    def _size(self, plan: Any, number: int) -> SizeOrigin:
        """Returns the size that is bound to a number; if it is symbolic, an argument that tells it,
        and the axis. Raises LookupError.
        """
        size = plan.graph.unbound(number)
        if not is_symbolic(size):
            return int(size)
        for node, position in self._position.items():
            for axis, own_size in enumerate(sizes_of(node)):
                if same(own_size, size):
                    return position, axis
        raise LookupError(f"no argument has an axis of {size}")

    def cache(self, node: Node, shape: Sequence[Any]) -> Node:
        """Returns the cache, or an input that views it in this shape."""
        if same_shape(shape_of(node), shape):
            return self.value(node)
        if node not in self._viewed_caches:
            viewed = self._viewed(node, shape)
            with self._fake_mode:
                value = node.meta["val"].view(viewed.shape or ())
            self._viewed_caches[node] = self._input(f"viewed_{node.name}", viewed, viewed, value)
        return self._viewed_caches[node]

    def _viewed(self, node: Node, shape: Sequence[Any]) -> Viewed:
        """Returns the view of a cache in a shape, of which one size may be symbolic."""
        position, part = part_of(node) or (self._position[node], None)
        if same_shape(shape_of(node), shape):
            return Viewed(position, None, part)
        return Viewed(position, tuple(-1 if is_symbolic(size) else size for size in shape), part)

    def _input(self, name: str, key: object, adaptor: Packed | Viewed, value: Any) -> Node:
        """Returns the input of this key. The first call makes it.

        value  the input's fake tensor
        """
        if key in self._input_by_key:
            return self._input_by_key[key]
        name = f"{name}_{len(self._adaptor_by_input)}"
        with self.gm.graph.inserting_after(self._last_input or self.copies[self._originals[-1]]):
            node = self.gm.graph.create_node("placeholder", name, name=self.free_name(name))
        node.meta["val"] = value
        self._adaptor_by_input[node] = adaptor
        self._input_by_key[key] = self._last_input = node
        return node

    def finish(self) -> None:
        """Lets the graph's last copies write the viewed caches, so that calls are in place."""
        for original, viewed in self._viewed_caches.items():
            cache = self.copies[original]
            for user in list(cache.users):
                if is_copy_into(user, cache):
                    result: Any = user.args[1]
                    if is_reshape(result) and same_shape(
                        shape_of(result.args[0]), shape_of(viewed)
                    ):
                        user.args = (viewed, result.args[0])

    def _program(
        self, recipe: Recipe, leaves: Sequence[Node]
    ) -> tuple[GraphModule | None, tuple[int, ...], Node]:
        """Returns what the recipe computes as a program over the caller's arguments.

        Returns the program, the places of its arguments, and the node of its result. If the result
        is an argument as it is, the program is None.

        Raises LookupError for what :meth:`_copied` refuses, and for a size that inputs do not tell.
        """
        graph, copies = self._copied(leaves)
        end = graph.output(None)
        builder = _PackingBuilder(
            GraphModule(self.gm, graph), copies, self._fake_mode, self._as_on_npu
        )
        builder.at(end, {})
        result = recipe(builder)
        originals = {copy: node for node, copy in copies.items() if node.op == "placeholder"}
        if result in originals:
            return None, (self._position[originals[result]],), originals[result]
        end.args = (result,)
        graph.eliminate_dead_code()
        positions = list[int]()
        for copy in graph.find_nodes(op="placeholder"):
            if copy.users:
                positions.append(self._position[originals[copy]])
            else:
                graph.erase_node(copy)
        return GraphModule(builder.gm, graph, "PackWeight"), tuple(positions), result

    def _copied(self, leaves: Sequence[Node]) -> tuple[Graph, dict[Node, Node]]:
        """Copies the nodes that compute the leaves into a new graph. Returns it, and copies by
        node.

        The sizes among the caller's arguments come first, read or not: other sizes may depend on
        them.

        Raises LookupError for the size of a tensor, which may be the number of tokens, and
        for a step that draws numbers.
        """
        graph = Graph()
        numbers = [node for node in self._originals if is_size(node)]
        copies = {node: graph.node_copy(node) for node in numbers}
        by_value = {expression_of(node.meta["val"]): copies[node] for node in numbers}
        for node in sorted(nodes_between(numbers, leaves)):
            value = value_of(node)
            if is_symbolic(value) and expression_of(value) in by_value:
                copies[node] = by_value[expression_of(value)]
            elif word(node) in ("sym_size", "sym_numel") or is_random(node):
                raise LookupError
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return graph, copies

    def close(self) -> None:
        """Collects the adaptors and the example inputs of the finished graph."""
        for node in self._parts:
            if node in self.copies and self.copies[node].users:
                self._adaptor_by_input[self.copies[node]] = self._viewed(node, shape_of(node))
        if not self._adaptor_by_input and not self.slot_checks:
            return
        positions = {self.copies[node]: place for place, node in enumerate(self._originals)}
        adaptors: dict[Node, Adaptor] = positions | self._adaptor_by_input
        for node in self.gm.graph.find_nodes(op="placeholder"):
            if node in self._adaptor_by_input or node.users:
                self.adaptors.append(adaptors[node])
                self.examples.append(node.meta["val"])
            else:
                self.gm.graph.erase_node(node)

    def packed_weights(self) -> Iterator[PackedWeight]:
        """Yields the weights that are packed outside of the graph."""
        for node, name in self._weight_names.items():
            packing, value = self._adaptor_by_input[node], node.meta["val"]
            assert isinstance(packing, Packed)
            sources = [self._originals[place].meta["val"] for place in packing.positions]
            tensors = [source for source in sources if isinstance(source, Tensor)]
            yield PackedWeight(
                name,
                packing,
                value,
                tensors[0] if len(sources) == len(tensors) == 1 else None,
                storage_id(value) in map(storage_id, tensors),
            )


class _PackingBuilder(GraphBuilder):
    """Builds a packing program. Nodes of the main graph stand for their copies in the program."""

    def __init__(
        self, gm: GraphModule, copies: dict[Node, Node], fake_mode: Any, as_on_npu: bool
    ) -> None:
        super().__init__(gm)
        self._as_on_npu, self.copies, self._fake_mode = as_on_npu, copies, fake_mode

    def device_type(self, value: Node) -> str:
        """Returns the device's type: "npu" for a CPU if weights are laid out as on an NPU.

        So ``mf.prepack`` can be tried without an NPU.
        """
        device_type = super().device_type(value)
        return "npu" if device_type == "cpu" and self._as_on_npu else device_type


def fuse_for_torchair(
    gm: GraphModule,
    inputs: Sequence[Any],
    config: Config,
    arguments: Sequence[Any],
    compiler_config: Any,
) -> Fused:
    """Fuses ``gm`` as :func:`fuse_with_boundary` does, and prepares it for torchair's compiler.

    Results of a GE graph have no strides, so none are kept for it. npugraph_ex runs the FX graph:
    its calls must write caches that are made in the graph in place
    (:mod:`mla_fusion.compile.inplace`).
    """
    runs_fx = runs_fx_graph(compiler_config)
    if config.strides == "auto" and not runs_fx:
        config = replace(config, strides="kernel")
    with for_ge(not runs_fx):
        fused = fuse_with_boundary(gm, inputs, config, arguments)
    if runs_fx:
        make_ready_to_run(gm)
    return fused


def fuse_with_boundary(
    gm: GraphModule, inputs: Sequence[Any], config: Config, arguments: Sequence[Any] = ()
) -> Fused:
    """Fuses ``gm`` in place. Returns the report, the new example inputs, and a function that wraps
    the compiled graph so that it keeps the caller's signature.

    arguments  what the caller passes for the inputs, if that is known; the numbers of parameters
               can be read then
    """
    report, builder = _fuse(gm, config, arguments)
    if builder is None or not builder.adaptors:
        return report, list(inputs), lambda compiled: compiled
    weights = list(builder.packed_weights())
    places = {place for weight in weights for place in weight.packed.positions if arguments}
    sources = (arguments[place] for place in places)
    uncounted = sum(isinstance(source, Tensor) and source.is_inference() for source in sources)
    if uncounted and config.updates != "every call":
        report.notes += (_UNCOUNTED.format(uncounted),)
        warn_once(report.notes[-1])
    # views of parameters add no bytes
    report.bytes_added = sum(
        bytes_of(weight.value)
        for weight in weights
        if not weight.is_view and not has_symbols(weight.value.shape)
    )
    store.save_report(report)
    adaptors, checks = builder.adaptors, tuple(builder.slot_checks.values())
    return report, builder.examples, lambda compiled: Adapted(compiled, adaptors, report, checks)


def _fuse(
    gm: GraphModule, config: Config, arguments: Sequence[Any], is_trial: bool = False
) -> tuple[Report, BoundaryBuilder | None]:
    """Fuses ``gm`` in place. Returns the report, and the builder if something was fused.

    is_trial  True: the report is not kept, and weights are laid out as on an NPU
    """
    mark_numbers(gm, arguments)
    builders = list[BoundaryBuilder]()

    def build(work: GraphModule, source: Graph) -> BoundaryBuilder:
        """Returns the builder of the new graph."""
        builders.append(BoundaryBuilder(work, source, config, as_on_npu=is_trial))
        return builders[-1]

    report = run(gm, config, build, boundary=True, is_trial=is_trial)
    return report, builders[-1] if report.fused else None


def packed_weights(
    gm: GraphModule, config: Config, arguments: Sequence[Any]
) -> tuple[Report, list[PackedWeight]]:
    """Returns the report and the weights that :func:`fuse_with_boundary` would pack on an NPU.

    Changes ``gm``.
    """
    report, builder = _fuse(gm, config, arguments, is_trial=True)
    return report, list(builder.packed_weights()) if builder is not None else []
