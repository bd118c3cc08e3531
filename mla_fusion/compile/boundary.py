"""The boundary of a compiled graph: what is done to its inputs before each call.

Weights are packed out here, once per parameter, so the graph that the compiler sees holds nothing
but the kernel. The compiled callable keeps the signature that the caller knows.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import expression_of, storage_id
from mla_fusion.compile.adapted import Adapted, Adaptor, Same, SlotCheck, Viewed
from mla_fusion.compile.dynamo import differs_by_call, mark_numbers
from mla_fusion.compile.inplace import ready_to_run, runs_fx_graph
from mla_fusion.config import Config
from mla_fusion.fx.build import GraphBuilder, Recipe
from mla_fusion.fx.kinds import filled_with, is_reshape, shape_of, value_of, word
from mla_fusion.fx.module_path import label
from mla_fusion.fx.sizes import has_symbols, is_size, is_symbolic, same_shape
from mla_fusion.fx.vector_numbers import Exact
from mla_fusion.fx.walk import nodes_between
from mla_fusion.graph.pools import part_of
from mla_fusion.machine import for_ge
from mla_fusion.pipeline import run
from mla_fusion.report import store
from mla_fusion.report.report import Report
from mla_fusion.weights import cache
from mla_fusion.weights.cache import Packed

aten = torch.ops.aten
log = logging.getLogger("mla_fusion")


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Fused = tuple[Report, list[Any], Wrap]


class _Unpackable(Exception):
    """A weight that depends on more than inputs of the graph."""


class BoundaryBuilder(GraphBuilder):
    """Moves packing and viewing out of the graph: what they make becomes an input of its own."""

    def __init__(
        self, gm: GraphModule, source: Graph, config: Config, as_on_npu: bool = False
    ) -> None:
        super().__init__(gm, source)
        self._as_on_npu = as_on_npu
        self._updates = config.updates
        inputs = source.find_nodes(op="placeholder")
        self._originals = [node for node in inputs if part_of(node) is None]
        self._parts = [node for node in inputs if part_of(node) is not None]
        self._position = {node: place for place, node in enumerate(self._originals)}
        self._last_input: Node | None = None
        self.made_outside: dict[Node, Packed | Viewed] = {}
        self._caches: dict[Node, Node] = {}
        self._made: dict[object, Node] = {}
        self._checks_slots = config.slots == "checked"
        self.slot_checks: dict[object, SlotCheck] = {}
        self.adaptors: list[Adaptor] = []
        self.examples: list[Any] = []

    def packed(
        self, name: str, recipe: Recipe, leaves: Sequence[Node], exact: Exact | None = None
    ) -> Any:
        try:
            program, positions, result = self._program(recipe, leaves)
        # the sizes of the weight are not known before the graph runs
        except (_Unpackable, LookupError):
            if exact is not None:
                raise  # in the graph nothing would be looked at
            return recipe(self)
        if exact is None and differs_by_call([self._originals[place] for place in positions]):
            return recipe(self)
        if program is None:
            return self.value(result)
        names = tuple(label(self._originals[position]) for position in positions)
        made = Packed(program, self._updates, exact, positions, names)
        return self._input(f"packed_{name}", made, result.meta["val"])

    def check_slots(
        self,
        recipe: Recipe,
        leaves: Sequence[Node],
        caches: Sequence[tuple[str, Node, Sequence[Any]]],
        skips: bool,
    ) -> None:
        if not self._checks_slots:
            return
        places = tuple(
            (f"{name} ({label(node)})", self._seen(node, shape), int(shape[-1]))
            for name, node, shape in caches
        )
        try:
            program, positions, _ = self._program(recipe, leaves)
        except (_Unpackable, LookupError) as error:
            log.warning(
                "the slots of %s are not checked: they are not made of inputs (%s)",
                places[0][0],
                error,
            )
            return
        check = SlotCheck(program, positions, places, skips)
        key = cache.describe(program) if program is not None else "", positions, places
        self.slot_checks.setdefault(key, check)

    def cache(self, node: Node, shape: Sequence[Any]) -> Node:
        if same_shape(shape_of(node), shape):
            return self.value(node)
        if node not in self._caches:
            viewed = self._seen(node, shape)
            with self._fake_mode:
                value = node.meta["val"].view(viewed.shape or ())
            self._caches[node] = self._input(f"viewed_{node.name}", viewed, value)
        return self._caches[node]

    def _seen(self, node: Node, shape: Sequence[Any]) -> Viewed:
        """A cache in this shape. Of another than its own one size may be symbolic; the caller's
        tensor tells it.
        """
        position, part = part_of(node) or (self._position[node], None)
        if same_shape(shape_of(node), shape):
            return Viewed(position, None, part)
        return Viewed(position, tuple(-1 if is_symbolic(size) else size for size in shape), part)

    def _input(self, name: str, adaptor: Packed | Viewed, value: Any) -> Node:
        """A new input of the graph; layers that share parameters share the packed weight."""
        # programs are equal when their signatures are
        key = (adaptor.signature, adaptor.positions) if isinstance(adaptor, Packed) else adaptor
        if key in self._made:
            return self._made[key]
        name = f"{name}_{len(self.made_outside)}"
        with self.gm.graph.inserting_after(self._last_input or self.copies[self._originals[-1]]):
            node = self.gm.graph.create_node("placeholder", name, name=self.free_name(name))
        node.meta["val"] = value
        self.made_outside[node] = adaptor
        self._made[key] = node
        self._last_input = node
        return node

    def finish(self) -> None:
        """Let the epilogue write the viewed cache, so that the call is in place on an input."""
        for original, viewed in self._caches.items():
            cache = self.copies[original]
            for user in list(cache.users):
                if word(user) == "copy_" and user.args[0] is cache:
                    result: Any = user.args[1]
                    if not is_reshape(result):
                        continue
                    if same_shape(shape_of(result.args[0]), shape_of(viewed)):
                        user.args = (viewed, result.args[0])

    def _program(
        self, recipe: Recipe, leaves: Sequence[Node]
    ) -> tuple[GraphModule | None, tuple[int, ...], Node]:
        """The recipe as a graph over the caller's inputs at these places; no graph where it is one
        of them as it is.
        """
        graph, copies = self._copied(leaves)
        end = graph.output(None)
        inner = _PackingBuilder(
            GraphModule(self.gm, graph), copies, self._fake_mode, self._as_on_npu
        )
        inner.at(end, {})
        result = recipe(inner)
        given = {copied: node for node, copied in copies.items() if node.op == "placeholder"}
        if result in given:
            return None, (self._position[given[result]],), given[result]
        end.args = (result,)
        inner.gm.graph.eliminate_dead_code()
        read = {copied: node for copied, node in given.items() if copied.users}
        for copied in given.keys() - read.keys():
            inner.gm.graph.erase_node(copied)
        positions = tuple(
            self._position[read[node]] for node in inner.gm.graph.nodes if node in read
        )
        return GraphModule(inner.gm, inner.gm.graph, "PackWeight"), positions, result

    def _copied(self, leaves: Sequence[Node]) -> tuple[Graph, dict[Node, Node]]:
        """What the leaves are made of, copied into a graph of its own, and which node became which.

        The numbers among the caller's inputs come first, whether they are read or not: sizes may
        depend on them. A value that is one number everywhere is made anew, without the tensor that
        lent it a dtype.

        Raises ``_Unpackable`` for a size that is read off a tensor: it may be that of the tokens.
        """
        graph = Graph()
        numbers = [node for node in self._originals if is_size(node)]
        copies = {node: graph.node_copy(node) for node in numbers}
        by_value = {expression_of(node.meta["val"]): copies[node] for node in numbers}
        fills = {
            node
            for leaf in leaves
            for node in nodes_between(numbers, leaf)
            if _fill(node) is not None
        }
        steps = dict.fromkeys(
            node for leaf in leaves for node in nodes_between((*numbers, *fills), leaf)
        )
        inputs = [node for node in self._originals if node in steps]
        for node in inputs:
            copies[node] = graph.node_copy(node)
        for node in sorted({*fills, *steps} - {*inputs}):
            value: Any = value_of(node)
            if is_symbolic(value) and expression_of(value) in by_value:
                copies[node] = by_value[expression_of(value)]
            elif word(node) in ("sym_size", "sym_numel"):
                raise _Unpackable
            elif node in fills:
                filled = {"dtype": value.dtype, "device": value.device}
                copies[node] = graph.call_function(
                    aten.full.default, (list(value.shape), _fill(node)), filled
                )
                copies[node].meta["val"] = value
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return graph, copies

    def close(self) -> None:
        """Settle what the callable around the graph needs."""
        for node in self._parts:
            if node in self.copies and self.copies[node].users:
                self.made_outside[self.copies[node]] = self._seen(node, shape_of(node))
        if not self.made_outside and not self.slot_checks:
            return
        position = {self.copies[node]: place for place, node in enumerate(self._originals)}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            if node in self.made_outside or node.users:
                made = self.made_outside.get(node)
                self.adaptors.append(Same(position[node]) if made is None else made)
                self.examples.append(node.meta["val"])
            else:  # nobody reads it any more
                self.gm.graph.erase_node(node)

    def packed_weights(self) -> Iterator[PackedWeight]:
        for node, made in self.made_outside.items():
            if not isinstance(made, Packed):
                continue
            value, places = node.meta["val"], made.positions
            name = re.sub(r"^packed_|_\d+$", "", str(node.target))
            sources = [self._originals[place].meta["val"] for place in places]
            is_view = storage_id(value) in [
                storage_id(source) for source in sources if isinstance(source, Tensor)
            ]
            only = sources[0] if len(sources) == 1 and isinstance(sources[0], Tensor) else None
            yield PackedWeight(name, made, value, only, is_view)

    def uncounted(self, given: Sequence[Any]) -> int:
        """Of how many tensors that weights are packed of torch does not count changes."""
        weights = self.packed_weights() if given else ()
        places = {place for weight in weights for place in weight.packed.positions}
        held = (given[place] for place in places)
        return sum(isinstance(one, Tensor) and one.is_inference() for one in held)


def _fill(node: Node) -> float | None:
    """The number that fills a value of static shape, where the operator says so."""
    value = value_of(node)
    if node.op != "call_function" or not isinstance(value, Tensor) or has_symbols(value.shape):
        return None
    number = filled_with(node)
    return None if number is None or isnan(number) else number


class _PackingBuilder(GraphBuilder):
    """Builds a packing program: nodes of the main graph stand for their copies in it."""

    def __init__(
        self, gm: GraphModule, copies: dict[Node, Node], fake_mode: Any, as_on_npu: bool
    ) -> None:
        super().__init__(gm)
        self._as_on_npu, self.copies, self._fake_mode = as_on_npu, copies, fake_mode

    def device_type(self, value: Node) -> str:
        """``mf.prepack`` lays weights out on a CPU as on an NPU: what that does to a model can be
        tried without one.
        """
        kind = super().device_type(value)
        return "npu" if kind == "cpu" and self._as_on_npu else kind


def fuse_for_torchair(
    gm: GraphModule,
    inputs: Sequence[Any],
    config: Config,
    given: Sequence[Any],
    compiler_config: Any,
) -> Fused:
    """:func:`fuse_with_boundary`, and what torchair's compiler asks for beside it.

    What leaves a GE graph has no strides, so none are kept for it. npugraph_ex runs the FX graph,
    in which calls whose caches are made in it have to be those that write in place
    (:mod:`mla_fusion.compile.inplace`).
    """
    runs_fx = runs_fx_graph(compiler_config)
    if config.strides == "auto" and not runs_fx:
        config = replace(config, strides="kernel")
    with for_ge(not runs_fx):
        found = fuse_with_boundary(gm, inputs, config, given)
    if runs_fx and ready_to_run(gm.graph):
        gm.recompile()
    return found


def fuse_with_boundary(
    gm: GraphModule, inputs: Sequence[Any], config: Config, given: Sequence[Any] = ()
) -> Fused:
    """Fuse ``gm`` in place; the new example inputs, and the wrapper that keeps the caller's
    signature.

    ``given``: what the inputs stand for, where that is known: parameters whose numbers can be
    looked at.
    """
    report, builder = _fused(gm, config, given)
    if builder is None or not (builder.made_outside or builder.slot_checks):
        return report, list(inputs), lambda compiled: compiled
    if config.updates != "every call" and (count := builder.uncounted(given)):
        report.notes += (_UNCOUNTED.format(count),)
        warn_once(report.notes[-1])
    # views of their parameters add none
    report.bytes_added = sum(
        one.value.nbytes
        for one in builder.packed_weights()
        if not one.is_view and not has_symbols(one.value.shape)
    )
    store.save_report(report)
    adaptors, checks = builder.adaptors, tuple(builder.slot_checks.values())
    return report, builder.examples, lambda run: Adapted(run, adaptors, report, checks)


_UNCOUNTED = (
    "{} weights of kernel calls were made under torch.inference_mode(), where torch counts no "
    "changes. After a change call mla_fusion.refresh(model), or calls may use what was packed "
    "before; or make the weights under torch.no_grad()"
)


warn_once = functools.cache(log.warning)


def _fused(
    gm: GraphModule, config: Config, given: Sequence[Any], is_trial: bool = False
) -> tuple[Report, BoundaryBuilder | None]:
    """``is_trial``: nobody is told of a compiled graph, and weights are laid out as on an NPU."""
    mark_numbers(gm, given)
    made: list[BoundaryBuilder] = []

    def build(work: GraphModule, source: Graph) -> BoundaryBuilder:
        made.append(BoundaryBuilder(work, source, config, as_on_npu=is_trial))
        return made[-1]

    report = run(gm, config, build, boundary=True, is_trial=is_trial)
    return report, made[-1] if report.fused else None


class PackedWeight(NamedTuple):
    """A weight that the pass would pack.

    name        as the kernel's argument is called
    parameter   the one that it is made of, None where it is made of several
    is_view     of the parameter's memory, as that lies
    """

    name: str
    packed: Packed
    value: Tensor
    parameter: Tensor | None
    is_view: bool


def packings(
    gm: GraphModule, config: Config, given: Sequence[Any]
) -> tuple[Report, list[PackedWeight]]:
    """What :func:`fuse_with_boundary` would pack on an NPU; ``gm`` is used up, and nobody is told
    of a compiled graph.
    """
    report, builder = _fused(gm, config, given, is_trial=True)
    return report, list(builder.packed_weights()) if builder is not None else []
