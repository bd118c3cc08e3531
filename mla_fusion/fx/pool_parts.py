"""Which parts of one input a graph takes: runs of its elements that literals name, and what
overlaps as one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import Tensor
from torch.fx import Node

from mla_fusion.fx.kinds import (
    argument,
    has_effect,
    is_getitem,
    is_mutating,
    is_reshape,
    shape_of,
    value_of,
    word,
)
from mla_fusion.fx.module_path import label
from mla_fusion.fx.sizes import (
    count_of,
    divided,
    expression,
    has_symbols,
    is_empty,
    is_one,
    is_size,
    same,
    sizes_of,
)
from mla_fusion.fx.walk import INPUTS, input_of, origin, reached, shared_memory

# writers that put a run back: what would take it from there
SCATTERS = {"slice_scatter": "slice", "select_scatter": "select"}


@dataclass(frozen=True)
class Run:
    """A run of places along one axis of a value: what a slice, or a result of a split, takes of it,
    or what a scatter puts there.

    by     the operator that takes the like
    whole  the value
    part   what stands in the run
    start  its first place, as it is given: below zero from the end, or a node
    count  how many places
    end    where a slice is told to end; None: it takes all that follow
    """

    by: str
    whole: Node
    part: Node
    axis: int
    start: Any
    count: Any
    step: Any = 1
    end: Any = None

    @property
    def size(self) -> Any:
        """Of the whole."""
        return shape_of(self.whole)[self.axis]


def drops(by: str) -> bool:
    """Does an operator of the form take one place of an axis, and leave the axis out?"""
    return by.startswith(("select", "unbind"))


def run_of(node: Node) -> Run | None:
    """The run that a node takes, or puts back; None of any other node, or of a whole split."""
    taker = node.args[0] if is_getitem(node) else node
    if not isinstance(taker, Node):
        return None
    by, whole, part = SCATTERS.get(word(taker), word(taker)), taker.args[0], node
    if by not in _SELECTIONS:
        return None
    axis, held = argument(taker, "dim", 0), value_of(node)
    if not isinstance(whole, Node) or not isinstance(axis, int) or isinstance(held, (list, tuple)):
        return None
    axis %= len(shape_of(whole))
    if by != word(taker):
        part = node.args[1]  # type: ignore[assignment]
    if is_getitem(node):
        place: Any = node.args[1]
        counts = [1 if drops(by) else result.shape[axis] for result in taker.meta["val"]]
        return Run(by, whole, part, axis, sum(counts[:place]), counts[place])
    start = argument(taker, "index" if drops(by) else "start") or 0
    count = 1 if drops(by) else shape_of(part)[axis]
    step, end = argument(taker, "step", 1), argument(taker, "end")
    return Run(by, whole, part, axis, start, count, step, end)


@dataclass(frozen=True)
class Part:
    """Of a tensor entry ``start`` of its first axis (with ``axes``, of so many as one), or several
    from there on; with a ``shape``, so many of its elements from ``start`` on. A start below zero
    counts from the end; no number of entries: all that follow.
    """

    start: int
    shape: tuple[int, ...] | None = None
    entries: int | None = 1
    axes: int = 1

    def of(self, pool: Tensor) -> Tensor:
        """As a view. Raises where the tensor is not contiguous and would have to be."""
        if self.shape is None:
            if self.axes > 1:
                pool = pool.view(-1, *pool.shape[self.axes :])
            elif self.entries == 1:
                return pool.select(0, self.start)
            rest = pool.shape[0] - self.start
            return pool.narrow(0, self.start, rest if self.entries is None else self.entries)
        return pool.view(-1).narrow(0, self.start, math.prod(self.shape)).view(self.shape)


@dataclass(frozen=True, order=True)
class Span:
    """A run of a pool's elements, counted in its grains; of a pool of symbolic size from its
    beginning, or below zero from its end.
    """

    start: Any
    stop: float

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    def within(self, other: Span) -> bool:
        return other.start <= self.start and self.stop <= other.stop

    def inside(self, other: Span) -> tuple[int, int]:
        """Where it begins and ends in another one."""
        stop = _LAST if math.isinf(self.stop) else int(self.stop) - other.start
        return self.start - other.start, stop

    def cuts(self, other: Span) -> bool:
        apart = self.stop <= other.start or other.stop <= self.start
        return not (apart or self.within(other) or other.within(self))


@dataclass(frozen=True)
class Pool:
    """What is made of a pool.

    grain   how many elements a place counts: one, or the entries of the first ``axes`` as one
            where entries of the first are of symbolic size
    spans   of the pool, of its parts, and of those with a part of them exchanged
    parts   by their spans, in order
    back    the step that copies what has become of the pool into it
    """

    whole: Node
    grain: Any
    axes: int
    spans: dict[Node, Span]
    parts: dict[Span, Part]
    back: Node | None

    def put(self, scatter: Node) -> Span:
        """The span that a scatter exchanges."""
        span = _taken(scatter, self.spans[scatter], self.grain)
        assert span is not None
        return span


def may_be_one(node: Node) -> bool:
    value = value_of(node)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    return any(keeps_all(user) or word(user) in _SELECTIONS for user in node.users)


def keeps_all(node: Node) -> bool:
    """Is it its input's memory in another shape?"""
    return word(node) in _RESHAPES and is_reshape(node)  # view.dtype counts other elements


def read_pool(whole: Node) -> Pool | str:
    """The parts of a pool, or why it has none: of a pool of symbolic size as places are counted
    first, from its beginning in entries.
    """
    shape, found = sizes_of(whole), []
    is_static = isinstance(count_of(shape[1:]), int)
    for axes in (len(shape),) if is_static else range(1, len(shape)):
        grain = count_of(shape[axes:])
        every = _number(count_of(shape), grain)
        for span in _COUNTED if every is None else (Span(0, every),):
            found.append(_read(Pool(whole, grain, axes, {whole: span}, {}, None)))
            if isinstance(found[-1], Pool):
                return found[-1]
    return found[0]


_COUNTED = Span(0, math.inf), Span(-math.inf, 0)


def _read(pool: Pool) -> Pool | str:
    whole = pool.whole
    read, others, back = _follow(pool)
    scatters = [node for node in pool.spans if word(node) in SCATTERS]
    if not (scatters or back or any(map(has_effect, _through(others)))):
        return "nothing writes to it"
    read = {span: user for span, user in read.items() if not span.is_empty}
    read = _around_rows(pool, read, others, scatters)
    if not read:
        return "no element of it is read"
    selected = [node for node in pool.spans if node is not whole and not keeps_all(node)]
    of_one = bool(selected) and is_one(sizes_of(whole)[0])  # all that there is, and an entry
    if pool.spans[whole] in read and not of_one:
        return f"{read[pool.spans[whole]].name} takes all of it, or a part that no literals name"
    spans = _parts(pool, read)
    if pool.spans[whole] in spans and not of_one:
        return "the runs of it that are read overlap"
    # functional: then nothing else may change the pool, and no part be another one's rows
    if scatters or back:
        reason = _not_functional(pool, spans, scatters, others, back)
        if reason:
            return reason
    elif not _is_contiguous(whole):  # a reshape would not be the memory that is written
        return "it is not contiguous"
    parts: dict[Span, Part] = {}
    for span in spans:
        part = _handed_in(pool, span)
        if part is None:
            return (
                "a part of it is no entry of its first axis, and the whole is of symbolic sizes "
                "or not contiguous"
            )
        parts[span] = part
    return replace(pool, parts=parts, back=back[0] if back else None)


def _follow(pool: Pool) -> tuple[dict[Span, Node], list[Node], list[Node]]:
    """Fills in the spans. What is read or exchanged as it is, and by whom; these readers; the steps
    that copy back.
    """
    read: dict[Span, Node] = {}
    others: list[Node] = []
    back: list[Node] = []
    nodes = [pool.whole]
    for node in nodes:  # grows as it is walked
        of_node = pool.spans[node]
        for user in (piece for reader in node.users for piece in _pieces(reader)):
            if user in pool.spans or is_size(user):  # a size
                continue
            if word(user) == "copy_" and user.args[0] is pool.whole:
                back += [user] if user not in back else []
                continue
            span = _span_of(user, node, pool)
            if span is not None:
                pool.spans[user] = span
                nodes.append(user)
            elif word(user) not in SCATTERS or user.args[0] is node:
                others.append(user)
                read.setdefault(of_node, user)
    for node in nodes:
        if word(node) in SCATTERS and pool.spans.get(node.all_input_nodes[-1]) != pool.put(node):
            read.setdefault(pool.put(node), node)
    return read, others, back


def _around_rows(
    pool: Pool, read: dict[Span, Node], others: list[Node], scatters: list[Node]
) -> dict[Span, Node]:
    """The runs that are read; of rows that a slice assigns, and nobody reads, what they are
    assigned to: the rows of a cache are no cache.
    """
    seen = {
        pool.spans[value] for node in others for value in _values_read(node) if value in pool.spans
    }
    outer = {
        pool.put(node): pool.spans[node.args[0]]  # type: ignore[index]
        for node in scatters
        if word(node) == "slice_scatter"
    }
    found: dict[Span, Node] = {}
    for span, user in read.items():
        around = span
        while around in outer and around not in seen and outer[around] != around:
            around = outer[around]
        found.setdefault(around, user)
    is_lost = pool.spans[pool.whole] in found and len(found) > 1
    return read if is_lost else found


def _values_read(node: Node) -> list[Node]:
    """The operands whose numbers matter: of what a copy overwrites, all of it, only the shape
    does.
    """
    of_copy = word(node) == "copy"
    return [given for given in node.all_input_nodes if not of_copy or given is node.args[1]]


def _pieces(user: Node) -> list[Node]:
    """The user, or the results of a split."""
    return (
        [*user.users]
        if isinstance(value_of(user), (tuple, list)) and word(user) in _SELECTIONS
        else [user]
    )


def _span_of(user: Node, node: Node, pool: Pool) -> Span | None:
    """The span of a view of the node, or of the node with a part of it exchanged; None: it is
    neither.
    """
    of_node = pool.spans[node]
    if input_of(user) is not node:
        return None
    if word(user) in SCATTERS:
        return (
            of_node
            if user.args[1] is not node and _taken(user, of_node, pool.grain) is not None
            else None
        )
    return of_node if keeps_all(user) else _taken(user, of_node, pool.grain)


def _taken(node: Node, whole: Span, grain: Any) -> Span | None:
    """What a selection takes of a span, or a scatter puts there; None where it is no run of its
    elements.
    """
    run = run_of(node)
    if run is None:
        return None
    if is_empty(run.part):
        return Span(whole.start, whole.start)  # wherever it may be
    shape = sizes_of(run.whole)
    if run.step != 1 or not all(map(is_one, shape[: run.axis])):
        return None
    size, step = run.size, _number(count_of(shape[run.axis + 1 :]), grain)
    start, length = _counted(run.start, size), run.count
    if is_one(size) and length == 1:
        return whole
    stop: Any = start + length if isinstance(start, int) and isinstance(length, int) else None
    if run.by == "slice" and not isinstance(size, int):
        end = run.end
        has_end = end is not None and not (isinstance(end, int) and end >= _LAST)
        if isinstance(start, int) and start >= 0 and not has_end:
            stop = math.inf
        elif stop is not None and start < 0 and stop != (_counted(end, size) if has_end else 0):
            return None  # it begins in front of the first entry
    if step is None or stop is None:
        return None
    origin = whole.start
    if start < 0 and isinstance(size, int):
        start = max(start + size, 0)  # a slice may begin in front of its first entry
        stop = start + length
    elif start < 0:
        origin = whole.stop
    if math.isinf(origin):
        return None
    found = Span(origin + start * step, whole.stop if stop == math.inf else origin + stop * step)
    return found if found.within(whole) else None


_LAST = 2**63 - 1  # where a slice ends that has no end


def _counted(place: Any, size: Any) -> Any:
    """A place along an axis: a literal, or how far it is from the end of a symbolic size."""
    if not isinstance(place, Node) or not is_size(place):
        return place
    distance = sympy.sympify(expression(place.meta["val"]) - expression(size))
    return int(distance) if distance.is_Integer else None


def _number(count: Any, grain: Any) -> int | None:
    """How many grains that is, whatever the symbols are."""
    number = divided(count, grain)
    return int(number) if number is not None and sympy.sympify(number).is_Integer else None


_RESHAPES = frozenset("view _unsafe_view reshape squeeze unsqueeze alias detach".split())
_SELECTIONS = frozenset("select slice narrow unbind split split_with_sizes chunk".split())


def _through(nodes: list[Node]) -> Iterator[Node]:
    """The nodes, and what reads the memory of any."""
    return reached(nodes, lambda node: () if shared_memory(node) is None else node.users)


def _parts(pool: Pool, read: Collection[Span]) -> list[Span]:
    """What is read, what overlaps as one: each value made of the pool holds all of a part, none of
    it, or is inside.
    """
    spans = set(read)
    while True:
        parts = _merged(spans)
        cut = {span for span in set(pool.spans.values()) if any(span.cuts(part) for part in parts)}
        if not cut:
            return parts
        spans |= cut


def _merged(spans: Collection[Span]) -> list[Span]:
    """Those that overlap as one."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start < found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return found


def _not_functional(
    pool: Pool, parts: list[Span], scatters: list[Node], others: list[Node], back: list[Node]
) -> str:
    """Why the parts of a graph that is functional cannot be copied back each alone, or ""."""
    changes = next(
        (node for node in _through(others) if is_mutating(node) or has_effect(node)), None
    )
    if changes is not None:
        return f"{changes.name} writes to it in place"
    if len(back) != 1 or back[0].args[1] not in pool.spans:
        return "it is not copied back from its own parts, once"
    late = next((user for node in pool.spans for user in node.users if back[0] < user), None)
    if late is not None:
        return f"{late.name} reads it after it was copied back"
    for scatter in scatters:
        span, source = pool.put(scatter), scatter.all_input_nodes[-1]
        lies, own = origin(source, shared_memory), pool.spans.get(source)
        if own != span and (
            lies in pool.spans or (lies.op in INPUTS and any(part.within(span) for part in parts))
        ):
            return f"{scatter.name} puts rows of {label(lies)} there as they are"
    return ""


def _handed_in(pool: Pool, span: Span) -> Part | None:
    """The part as a wrapper makes it: an entry of the first axis, or elements in the shape in which
    they are read.
    """
    shape: Any = sizes_of(pool.whole)
    entry = _number(count_of(shape[1:]), pool.grain)
    count = span.stop - span.start
    is_run = has_symbols(shape) or count == entry
    if is_run and entry and not (span.start % entry or count % entry):
        return Part(span.start // entry, entries=int(count) // entry)
    if not _is_contiguous(pool.whole):
        return None
    if pool.axes < len(shape) or math.isinf(count):
        return Part(span.start, entries=None if math.isinf(count) else int(count), axes=pool.axes)
    # of a flat buffer the shape that the model gives it: a cache has blocks, and rows in them
    read = [sizes_of(node) for node, of_node in pool.spans.items() if of_node == span]
    return Part(span.start, max(read, key=len, default=(int(span.stop) - span.start,)))


def _is_contiguous(node: Node) -> bool:
    value, step = node.meta["val"], 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not is_one(size) and not same(stride, step):
            return False
        step *= size
    return True
