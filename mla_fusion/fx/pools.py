"""Caches that are stacked in one input, each read as an input of its own.

Functional, a write to ``pool[i]`` is a ``select_scatter`` over the whole pool, and the next layer
selects from that. What literal selections, slices and splits along the outermost axis take, and
reshapes of it, is a run of the pool's elements in their order (a span). Spans that overlap are one
part; parts have nothing to do with each other. Each is an input of its own, written and copied back
alone: a wrapper around the graph makes these inputs, views of the pool.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fusion.fx import strides
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import is_getitem, is_writer, op_name, shape_of, word
from mla_fusion.fx.module_path import NAME, label
from mla_fusion.fx.pool_parts import SCATTERS, Part, Pool, Span, keeps_all, may_be_one, read_pool
from mla_fusion.fx.sizes import same
from mla_fusion.fx.walk import INPUTS, input_of, origin, reshapes, upward, views, written

aten = torch.ops.aten
_COPIES = frozenset(("clone", "contiguous", "_reshape_copy"))
_PART_OF = "mla_fusion_part_of"


def part_of(node: Node) -> tuple[int, Part] | None:
    """Of an input that is a part of a pool: which input the pool is, and the part."""
    found: tuple[int, Part] | None = node.meta.get(_PART_OF)
    return found


def found(graph: Graph) -> list[Pool]:
    """The pools that can be taken apart."""
    pools = (read_pool(node) for node in graph.find_nodes(op="placeholder") if may_be_one(node))
    return [pool for pool in pools if isinstance(pool, Pool)]


def take_apart(gm: GraphModule) -> None:
    """Rewrite the module's graph so that each part of its pools is an input."""
    builder = GraphBuilder(gm)
    positions = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    with builder.propagating():
        for pool in found(gm.graph):
            _Rewrite(builder, pool, positions[pool.whole]).run()


def no_input(node: Node) -> tuple[str, str]:
    """Why a node is no input of the graph seen otherwise, nor a part of one that could be one; and
    what to write instead, "" where the code's remedy says it.
    """
    whole = origin(node, written)
    if op_name(whole).startswith("aten::as_strided"):
        return (
            f"{node.name} is the view that AOT autograd makes of arguments that overlap in memory, "
            "as far as it can tell",
            "Give each cache memory of its own, or contiguous parts of one tensor (layer-major: "
            "pool[layer]), not columns or every other block of it.",
        )
    if whole.op not in INPUTS:
        return f"{node.name} is not a graph input seen as rows", ""
    maker = origin(node, views)
    is_whole = same(math.prod(shape_of(node)), math.prod(shape_of(whole)))
    if is_writer(maker) and (is_whole or word(maker) not in SCATTERS):
        return (
            f"{node.name} is {whole.name} as {maker.name} has written it, and the kernel would "
            "write it once more",
            "Write a cache once in a graph: compile what writes it again (a draft's step, say) as "
            "a graph of its own. Two layers are given two caches.",
        )
    if not same(shape_of(node)[-1], shape_of(whole)[-1]):
        return (
            f"{node.name} is some columns of {whole.name}",
            "Give latent and key a contiguous cache each, as wide as their rows.",
        )
    copy = next((step.name for step in upward(node, written) if word(step) in _COPIES), "")
    if copy:
        return (
            f"{node.name} is a copy of {whole.name} ({copy}), and what is written to it does not "
            "get there",
            "",
        )
    if part_of(whole) is not None:
        return (
            f"{node.name} is a part of {whole.name}, of which the graph takes other runs that "
            "overlap it",
            "",
        )
    pool = read_pool(whole)
    why = (
        pool
        if isinstance(pool, str)
        else "only a wrapper around the graph, as that of mf.backend(), can hand it in"
    )
    return f"{node.name} is a part of {whole.name}, and no input of its own: {why}", ""


class _Rewrite:
    """One pool, taken apart: of each node made of it, what its parts are by now."""

    def __init__(self, builder: GraphBuilder, pool: Pool, position: int) -> None:
        self.b, self.pool = builder, pool
        self.held: dict[Node, dict[Span, Node]] = {pool.whole: self._inputs(position)}
        # as long as nothing is replaced
        self.made_of = {node: (input_of(node), node.args[1:2]) for node in pool.spans}
        self.replaced: list[tuple[Node, Node]] = []

    def run(self) -> None:
        whole, inputs = self.pool.whole, dict(self.held[self.pool.whole])
        nodes = sorted(self.pool.spans)
        last: Any = self.pool.back.args[1] if self.pool.back is not None else None
        if self.pool.spans[whole] in inputs:  # a pool of one
            *_, behind = self.b.gm.graph.find_nodes(op="placeholder")
            self.b.at(behind.next, {})
            own = self._shaped(inputs[self.pool.spans[whole]], whole)
            whole.replace_all_uses_with(own)
            self.held[whole] = {self.pool.spans[whole]: own}
        for node in nodes[1:]:
            self.b.at(node, node.meta)
            self._follow(node)
        graph, back = self.b.gm.graph, self.pool.back
        if back is not None:
            self.b.at(back, back.meta)
            for span, new in self.held[last].items():
                own = inputs[span]
                if origin(new, reshapes) is not own:
                    self.b.insert(
                        aten.copy_.default, (own, self._shaped(new, own)), {}, own.meta["val"]
                    )
            graph.erase_node(back)
        strides.follow(self.b, [(new, node) for new, node in self.replaced if new.users])
        for node in nodes:
            if word(node) in SCATTERS and self.pool.spans[node] not in self.held.get(
                node, {self.pool.spans[node]}
            ):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]  # sizes alone are read of it
        left = {*nodes[1:], *inputs.values(), *(new for new, _ in self.replaced)}
        left |= {node.args[0] for node in left if is_getitem(node)}  # type: ignore[misc]
        for node in sorted(left, reverse=True):
            if not node.users:
                graph.erase_node(node)

    def _follow(self, node: Node) -> None:
        span, base = self.pool.spans[node], self.made_of[node][0]
        if span.is_empty and not self.pool.spans[base].is_empty:  # type: ignore[index]
            self._replace(node, self._nothing(node.meta["val"]))
            return
        of_base = self.held.get(base)  # type: ignore[arg-type]
        if of_base is None:  # the base is inside a part, and so is this
            return
        is_part = self.pool.spans[base] in of_base  # type: ignore[index]
        if word(node) in SCATTERS:
            self._exchange(node, of_base, is_part)
            return
        inside = {part: value for part, value in of_base.items() if part.within(span)}
        if span in inside and not (is_part and keeps_all(node)):
            inside[span] = self._replace(node, self._shaped(inside[span], node))
        elif span in inside:
            inside[span] = node
        elif not inside and not is_part:
            around = next((part for part in of_base if span.within(part)), None)
            if around is None:  # nobody reads it
                return
            flat = self._grains(of_base[around], around)
            part = self.b.call(aten.slice.Tensor, flat, 0, *span.inside(around))
            self._replace(node, self._shaped(part, node))
        if inside:
            self.held[node] = inside

    def _exchange(self, scatter: Node, of_base: dict[Span, Node], is_part: bool) -> None:
        put, (source,) = self.pool.put(scatter), self.made_of[scatter][1]
        assert isinstance(source, Node)
        if source in self.held and self.pool.spans[source] == put:
            new = of_base | self.held[source]
        elif put in of_base:
            new = of_base | {put: source}
        elif is_part:
            new = dict.fromkeys(of_base, scatter)
        elif not (held := [part for part in of_base if put.within(part)]):  # nobody reads it
            new = dict(of_base)
        else:
            around, value = held[0], of_base[held[0]]
            flat, rows = self._grains(value, around), self._grains(source, put)
            new = of_base | {
                around: self.b.call(aten.slice_scatter.default, flat, rows, 0, *put.inside(around))
            }
        span = self.pool.spans[scatter]
        if span in new and new[span] is not scatter:
            new[span] = self._replace(scatter, self._shaped(new[span], scatter))
        self.held[scatter] = new

    def _nothing(self, like: torch.Tensor) -> Node:
        """Of no elements, so it need not be read of anything."""
        return self.b.call(
            aten.full.default, self.b.sizes(like.shape), 0, dtype=like.dtype, device=like.device
        )

    def _grains(self, value: Node, span: Span) -> Node:
        """The value of a span, a row for each grain."""
        pool = self.pool
        if math.isinf(span.stop):
            return self.b.reshape(value, (-1, *shape_of(pool.whole)[pool.axes :]))
        count = int(span.stop) - span.start
        return self.b.reshape(value, (count,) if pool.grain == 1 else (count, -1))

    def _shaped(self, value: Node, like: Node) -> Node:
        return self.b.reshape(value, shape_of(like))

    def _replace(self, node: Node, new: Node) -> Node:
        node.replace_all_uses_with(new)
        self.replaced.append((new, node))
        return new

    def _inputs(self, position: int) -> dict[Span, Node]:
        """A new input for each part of the pool, behind the others."""
        whole, graph = self.pool.whole, self.b.gm.graph
        *_, last = graph.find_nodes(op="placeholder")
        made: dict[Span, Node] = {}
        for number, (span, part) in enumerate(self.pool.parts.items()):
            with graph.inserting_after(last):
                last = made[span] = graph.create_node("placeholder", f"{whole.target}_part{number}")
            last.meta["val"] = part.of(whole.meta["val"])
            place = (
                part.start if part.shape is None else f"{span.start}:{span.stop} of its elements"
            )
            last.meta |= {_PART_OF: (position, part), NAME: f"{label(whole)}[{place}]"}
        return made
