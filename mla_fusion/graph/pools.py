"""Takes pools apart: inputs that hold the caches of several layers.

A model that writes ``pool[layer]`` takes slices of one input. ``pipeline.py`` calls ``take_apart``
before it reads the graph, if a wrapper stands around the graph. Each part that the graph reads or
writes becomes an input of its own, and is copied back alone. The wrapper passes it as a view.

What the graph takes of an input is seen in Values. A run of the input's elements (``Run``) is a
slice of the leaf, or such a slice in which rows were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from mla_fusion.fx import strides, subgraphs
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import dtype_of, shape_of, signature, value_of
from mla_fusion.fx.module_path import NAME, label
from mla_fusion.fx.sizes import is_size, same
from mla_fusion.fx.walk import is_copy_into, is_in_last_copies, origin, views_and_writes
from mla_fusion.fx.workplace import workplace
from mla_fusion.graph.form import Shape, Value, filled_with, order, strip
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.numbers import is_open
from mla_fusion.graph.read import Graph

aten = torch.ops.aten
_PART_OF = "mla_fusion_part_of"


@dataclass(frozen=True)
class Part:
    """A part of a tensor.

    start    its first entry along the first axis; with a shape, its first element
    entries  how many entries; None: all that follow
    shape    the shape of a part that is a run of elements; None for a run of entries
    """

    start: int
    entries: int | None = 1
    shape: Shape | None = None

    def of(self, pool: torch.Tensor) -> torch.Tensor:
        """Returns the part of a tensor as a view. Raises RuntimeError if it cannot be a view."""
        if self.shape is not None:
            return pool.view(-1).narrow(0, self.start, prod(self.shape)).view(self.shape)
        if self.entries == 1:
            return pool.select(0, self.start)
        entries = pool.shape[0] - self.start if self.entries is None else self.entries
        return pool.narrow(0, self.start, entries)


def part_of(node: Node) -> tuple[int, Part] | None:
    """Returns the place of the pool among the inputs, and the part, of an input that is a part of a
    pool. Returns None for other nodes.
    """
    place_and_part: tuple[int, Part] | None = node.meta.get(_PART_OF)
    return place_and_part


class Run(NamedTuple):
    """The elements from ``start`` to ``stop`` of an input."""

    start: int
    stop: int

    def holds(self, other: Run) -> bool:
        """Returns True if the other run lies in this one."""
        return self.start <= other.start and other.stop <= self.stop


Piece = tuple[Run, Value, int]


@dataclass(eq=False)
class Pool:
    """An input that can be taken apart.

    node    the input
    leaf    its Value
    back    the node that copies the new numbers into the input; None if it is written in place
    runs    by Value made from the leaf by moves and writes, the elements that the Value stands for
    plain   those of these Values into which nothing was written
    taken   the runs that something reads, or writes to
    parts   by run, in order, the part that becomes an input
    pieces  the new numbers, in order: the elements that are written, a Value that has the numbers,
            and the place of the first one in it
    """

    node: Node
    leaf: Value
    back: Node | None
    runs: dict[Value, Run]
    plain: set[Value]
    taken: set[Run] = field(default_factory=set)
    parts: dict[Run, Part] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    def part_around(self, run: Run) -> Run | None:
        """Returns the part that holds a run, or None."""
        return next((part for part in self.parts if part.holds(run)), None)

    def is_changed(self, piece: Piece) -> bool:
        """Returns True if a piece is not what the input holds there already."""
        run, value, place = piece
        return value not in self.plain or self.runs[value].start + place != run.start


def take_apart(gm: GraphModule) -> GraphModule:
    """Returns a module in which each part of a pool is an input; ``gm`` itself if it has none."""
    if not any(map(_is_sliced, gm.graph.find_nodes(op="placeholder"))):
        return gm
    opened = workplace(gm)
    subgraphs.copied(gm, opened.graph)
    graph = Graph(opened, keeps_parts=True)
    pools = find_pools(graph)
    if not pools:
        return gm
    try:
        _Rewrite(graph, pools).run()
    except (LookupError, ValueError):  # a step reads more than a part
        return gm
    return opened


def _is_sliced(node: Node) -> bool:
    """Returns True if a view of an input, or of its memory in another shape, is a part of it."""
    views = [node]
    for view in views:
        for user in view.users:
            if signature(user.target).is_view and user.args[0] is view:
                tensor, size = value_of(user), prod(shape_of(view))
                if not isinstance(tensor, torch.Tensor) or not same(prod(tensor.shape), size):
                    return True
                views.append(user)
    return False


# -- which inputs are pools


def find_pools(graph: Graph) -> list[Pool]:
    """Returns the inputs that can be taken apart."""
    inputs = filter(_is_sliced, graph.gm.graph.find_nodes(op="placeholder"))
    candidates = [pool for node in inputs if (pool := _candidate(graph, node)) is not None]
    _follow(graph, candidates)
    return [pool for pool in candidates if _has_parts(graph, pool)]


def _candidate(graph: Graph, node: Node) -> Pool | None:
    """Returns an input as a pool without parts, if it is written as a pool may be, else None."""
    leaf, writers = graph.changed.get(node, graph.readings[node]), graph.writers.get(node, [])
    if not isinstance(leaf, Value) or not (writers or node in graph.hidden):
        return None
    back = writers[-1] if writers and is_copy_into(writers[-1], node) else None
    if back is not None:
        if len(writers) > 1 or node in graph.hidden or not is_in_last_copies(back):
            return None
    elif not value_of(node).is_contiguous():
        return None  # a reshape would not be the memory that is written
    return Pool(node, leaf, back, {leaf: Run(0, leaf.numel)}, {leaf})


def _has_parts(graph: Graph, pool: Pool) -> bool:
    """Finds the parts and the pieces of a pool. Returns False if it cannot be taken apart."""
    whole = pool.runs[pool.leaf]
    while True:
        parts = _merged(pool.taken)
        if whole in parts or not parts:
            return False

        def is_inside(value: Value, run: Run, start: int, parts: list[Run] = parts) -> bool:
            """Returns True for elements inside a part."""
            return any(part.holds(run) for part in parts)

        if pool.back is not None:
            pool.pieces = [*_pieces(pool, graph.written[pool.node], whole, 0, is_inside)]
        changed = filter(pool.is_changed, pool.pieces)
        missing = {run for run, value, place in changed if not is_inside(value, run, place)}
        if not missing:
            break
        pool.taken |= missing
    if any(run not in parts and not _is_written(value) for run, value, _ in pool.pieces):
        return False  # rows are assigned to a part of what is read: the input is one cache
    for run in parts:
        part = _as_part(pool, run)
        if part is None:
            return False
        pool.parts[run] = part
    return True


def _follow(graph: Graph, pools: list[Pool]) -> None:
    """Finds the runs of the pools' Values, and which of them something reads or writes to."""
    pool_of = {pool.leaf: pool for pool in pools}
    for value in order(graph.nodes):
        owners = dict.fromkeys(pool_of[source] for source in value.sources if source in pool_of)
        for pool in owners:
            run = _run_of(value, pool) if len(owners) == 1 else None
            if run is None:
                pool.taken |= {pool.runs[part] for part in value.sources if part in pool.runs}
                continue
            pool.runs[value], pool_of[value] = run, pool
            if value.op in ("reshape", "slice") and value.sources[0] in pool.plain:
                pool.plain.add(value)
            elif value.op == "write":
                pool.taken.add(run)
            elif value.op == "join" and (run != pool.runs[pool.leaf] or pool.back is None):
                places = _placed(value, run.start)
                if not all(pool.runs.get(part) == place for place, part in places):
                    pool.taken.add(run)
    for node in graph.gm.graph.output_node().all_input_nodes:
        reading = graph.readings[node]
        if isinstance(reading, Value) and reading in pool_of:
            pool_of[reading].taken.add(pool_of[reading].runs[reading])


def _run_of(value: Value, pool: Pool) -> Run | None:
    """Returns the elements of the pool that a Value stands for.

    Returns None if the Value is none of them in order, with some exchanged.
    """
    first, runs = value.sources[0], pool.runs
    if value.op == "reshape":
        return runs[first]
    if value.op == "write":
        is_base = first in runs and not any(source in runs for source in value.sources[1:])
        return runs[first] if is_base else None
    if value.op == "slice":
        axis, start, step = value.literal
        if step != 1 or prod(first.shape[:axis]) != 1:
            return None
        start = runs[first].start + start * prod(first.shape[axis + 1 :])
        run = Run(start, start + value.numel)
        return run if _is_comparable(pool, runs[first], run) else None
    if value.op == "join" and _is_in_order(value):
        size = value.numel
        if size == pool.leaf.numel:
            return runs[pool.leaf]
        starts = {runs[part].start - place.start for place, part in _placed(value) if part in runs}
        run = Run(min(starts), min(starts) + size)
        return run if len(starts) == 1 and runs[pool.leaf].holds(run) else None
    return None


def _is_comparable(pool: Pool, around: Run, run: Run) -> bool:
    """Returns True if it is known for all sizes where a run lies among the others.

    around  the run of which it is a part
    """
    shape = pool.leaf.shape
    entry = prod(shape[1:])
    if not any(map(is_open, shape)) or around.stop - around.start <= entry:
        return True
    return run.start % entry == 0 and run.stop % entry == 0


def _is_in_order(join: Value) -> bool:
    """Returns True if the elements of a join are those of its sources, one source after another."""
    return prod(join.shape[: join.literal]) == 1


def _placed(join: Value, start: int = 0) -> Iterator[tuple[Run, Value]]:
    """Yields the sources of a join with the elements that they take, from ``start`` on."""
    for source in join.sources:
        run = Run(start, start + source.numel)
        yield run, source
        start = run.stop


def _pieces(
    pool: Pool, value: Value, run: Run, start: int, is_piece: Callable[[Value, Run, int], bool]
) -> Iterator[Piece]:
    """Yields the elements of a Value from ``start`` on as pieces.

    run       the elements of the pool that they are written to
    is_piece  returns True for elements that are not cut further
    """
    if value in pool.plain or is_piece(value, run, start):
        yield run, value, start
    elif value.op == "reshape":
        yield from _pieces(pool, value.sources[0], run, start, is_piece)
    elif value.op == "slice" and value in pool.runs and value.sources[0] in pool.runs:
        source = value.sources[0]
        start += pool.runs[value].start - pool.runs[source].start
        yield from _pieces(pool, source, run, start, is_piece)
    elif value.op == "join" and _is_in_order(value):
        for place, source in _placed(value, run.start - start):
            inner = Run(max(run.start, place.start), min(run.stop, place.stop))
            if inner.start < inner.stop:
                yield from _pieces(pool, source, inner, inner.start - place.start, is_piece)
    else:
        yield run, value, start


def _is_written(value: Value) -> bool:
    """Returns True if a piece is what a cache holds, with or without new rows."""
    return strip(value, "reshape", "permute", "expand", "slice").op in ("write", "leaf")


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Returns the runs in order, those that overlap as one."""
    merged = list[Run]()
    for run in sorted(runs):
        if merged and run.start < merged[-1].stop:
            run = Run(merged[-1].start, max(merged.pop().stop, run.stop))
        merged.append(run)
    return merged


def _as_part(pool: Pool, run: Run) -> Part | None:
    """Returns a run as a part: entries of the first axis, or elements in the shape in which the
    graph takes them. Returns None if its sizes are not literals.
    """
    shape, size = pool.leaf.shape, run.stop - run.start
    entry, is_symbolic = prod(shape[1:]), any(map(is_open, shape))
    if (is_symbolic or size == entry) and not (run.start % entry or size % entry):
        start, entries = run.start // entry, size // entry
        is_rest = is_open(entries) and run.stop == prod(shape)
        if is_open(start) or (is_open(entries) and not is_rest):
            return None
        return Part(start, None if is_rest else entries)
    if is_symbolic or not value_of(pool.node).is_contiguous():
        return None
    shapes = (value.shape for value, other in pool.runs.items() if other == run)
    # an einsum adds axes of its own behind the rows
    shape = max(shapes, key=lambda shape: (shape[-1:] != (1,), len(shape)), default=(size,))
    return Part(run.start, shape=shape)


# -- the graph without pools


class _Rewrite:
    """Makes the parts of pools inputs of a graph."""

    def __init__(self, graph: Graph, pools: list[Pool]) -> None:
        self.graph, self.pools = graph, pools
        self.b = GraphBuilder(graph.gm)
        self._lower = Lowering(self.b, graph, usable=self._is_usable)
        self._inputs: dict[tuple[Node, Run], Value] = {}
        # nodes that hold more than a part, and nodes that another took the place of
        self._left = {pool.node for pool in pools}
        self._replaced: list[tuple[Node, Node]] = []
        self._point: Node | None = None

    def run(self) -> None:
        """Rewrites the graph."""
        graph = self.graph.gm.graph
        steps = [node for node in graph.nodes if node.op == "call_function"]
        backs = {pool.back: pool for pool in self.pools if pool.back is not None}
        with self.b.propagating():
            self._add_inputs()
            for node in steps:
                if node in backs:
                    break
                self._point = node
                self.b.at(node, node.meta)
                if not is_size(node) and self._is_followed(node):
                    self._follow(node)
            self._copy_back(backs)
            strides.follow(self.b, [(new, node) for new, node in self._replaced if new.users])
        for node in filter(self._left.__contains__, steps):
            for user in node.users:
                if user not in self._left and not is_size(user):
                    raise LookupError(node)
            if _is_scatter(node):  # only sizes are still read from it
                node.replace_all_uses_with(node.args[0])
        made = {*self.b.made, *self._left}
        for node in reversed(graph.nodes):
            is_step = node.op == "call_function" and node.target is not aten.copy_.default
            if is_step and node in made and not node.users:
                graph.erase_node(node)

    def _add_inputs(self) -> None:
        """Adds an input for each part."""
        graph, form = self.graph.gm.graph, self.graph.form
        inputs = graph.find_nodes(op="placeholder")
        last = inputs[-1]
        for pool in self.pools:
            for number, (run, part) in enumerate(pool.parts.items()):
                with graph.inserting_after(last):
                    last = graph.create_node("placeholder", f"{pool.node.target}_part{number}")
                last.meta["val"] = tensor = part.of(value_of(pool.node))
                named = f"{run.start}:{run.stop} of its elements" if part.shape else part.start
                last.meta |= {
                    _PART_OF: (inputs.index(pool.node), part),
                    NAME: f"{label(pool.node)}[{named}]",
                }
                shape = self.graph.shape(tensor.shape)
                leaf = form.leaf(f"part {last.name}", shape, pool.leaf.dtype, False)
                self._inputs[pool.node, run], self._lower.known[leaf] = leaf, last

    def _of_part(self, pool: Pool, run: Run) -> Value:
        """Returns elements of a pool as a flat Value of the part that holds them."""
        form, part = self.graph.form, pool.part_around(run)
        if part is None:
            raise LookupError(run)
        leaf = self._inputs[pool.node, part]
        flat = form.reshape(leaf, (leaf.numel,))
        return form.slice(flat, 0, run.start - part.start, run.stop - part.start)

    def _elements(self, pool: Pool, value: Value, start: int, stop: int) -> Iterator[Value]:
        """Yields the elements from ``start`` to ``stop`` of a Value, as flat Values of parts."""
        form = self.graph.form

        def is_held(value: Value, run: Run, start: int) -> bool:
            """Returns True if the elements are all of a Value that a node holds."""
            is_all = (start, run.stop - run.start) == (0, value.numel)
            return is_all and self._is_held(value)

        for run, piece, place in _pieces(pool, value, Run(start, stop), start, is_held):
            end = place + run.stop - run.start
            if piece in pool.plain:
                offset = pool.runs[piece].start
                yield self._of_part(pool, Run(offset + place, offset + end))
            else:
                yield form.slice(form.reshape(piece, (piece.numel,)), 0, place, end)

    def _is_usable(self, node: Node) -> bool:
        """Returns True if lowering may read a node."""
        assert self._point is not None
        return node not in self._left and node < self._point

    def _is_followed(self, node: Node) -> bool:
        """Returns True if a node reads more than a part, or puts back what a node holds already."""
        if not self._left.isdisjoint(node.all_input_nodes):
            return True
        return _is_scatter(node) and self._is_held(self.graph.readings[node])

    def _is_held(self, value: Value) -> bool:
        """Returns True if a node above holds a Value, in any shape."""
        shapes = (value, *value.sources) if value.op == "reshape" else (value,)
        nodes = (node for shape in shapes for node in self.graph.nodes_holding(shape))
        return any(map(self._is_usable, nodes))

    def _follow(self, node: Node) -> None:
        """Replaces a node that reads more than a part by one that reads parts, if it can be."""
        reading = self.graph.changed.get(node, self.graph.readings[node])
        is_filled = isinstance(reading, Value) and filled_with(reading) is not None
        if is_filled and not signature(node.target).is_view:
            return  # it reads no numbers
        self._left.add(node)
        if not isinstance(reading, Value):
            return
        form, value = self.graph.form, reading
        pool = next((pool for pool in self.pools if reading in pool.runs), None)
        if pool is not None:
            run = pool.runs[reading]
            if pool.part_around(run) is None:
                return
            if pool.back is None:  # a view
                value = self._of_part(pool, run)
            else:
                value = form.join([*self._elements(pool, reading, 0, reading.numel)], 0)
        shape = self.graph.shape(shape_of(node))
        try:
            new = self._lower.of(form.reshape(value, shape), dtype_of(node))
        except (LookupError, ValueError, StopIteration):  # or no weight says on which device
            return
        self._replaced.append((new, node))
        node.replace_all_uses_with(new)

    def _copy_back(self, backs: dict[Node, Pool]) -> None:
        """Writes the copies of new numbers into the parts, in place of those into the pools."""
        form, copies = self.graph.form, list[tuple[Node, Node, Node]]()
        for back, pool in backs.items():
            self._point = min(backs)
            self.b.at(self._point, back.meta)
            for part in pool.parts:
                pieces = [
                    piece
                    for piece in pool.pieces
                    if piece[0].start < part.stop and part.start < piece[0].stop
                ]
                if not any(map(pool.is_changed, pieces)):
                    continue
                values = list[Value]()
                for run, value, start in pieces:
                    ends = max(run.start, part.start), min(run.stop, part.stop)
                    places = (start + end - run.start for end in ends)
                    values += self._elements(pool, value, *places)
                leaf = self._inputs[pool.node, part]
                node = self._lower.known[leaf]
                new = self._lower.of(form.reshape(form.join(values, 0), leaf.shape), leaf.dtype)
                if origin(new, views_and_writes).op == "placeholder":  # a copy may change it before
                    new = self.b.contiguous(new)
                copies.append((back, node, new))
        for back, node, new in copies:
            self.b.at(back, back.meta)
            self.b.insert(aten.copy_.default, (node, new), {}, value_of(node))
        for back in backs:
            self.graph.gm.graph.erase_node(back)


def _is_scatter(node: Node) -> bool:
    """Returns True if a node is its first operand with other numbers."""
    return node.target in (aten.select_scatter.default, aten.slice_scatter.default)
