"""Values that a model assembles in place, or joins and cuts again, read as their parts.

``q[..., D:] = rope(q[..., D:])`` becomes, once functional, a slice, a scatter over the whole of q,
and views of both. What the result holds is q's first columns beside the rotated ones; whoever reads
a part of it reads one of the two. Read so, a latent row whose halves have both been overwritten has
nothing left of the product it was written over. The same holds of ``torch.cat([c_kv, k_pe],
-1)[..., :512]``, which reads nothing of k_pe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import OpOverload
from mla_fusion.fx import strides
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import (
    is_mutating,
    is_reshape,
    is_view,
    operator_of,
    word,
)
from mla_fusion.fx.sizes import is_symbolic, same, same_shape
from mla_fusion.fx.walk import origin, reached, views, written
from mla_fusion.operators.forms import SCATTERS, join_of, run_of
from mla_fusion.operators.known import SELECTIONS, shape_of

aten = torch.ops.aten
_KEPT_AXES = frozenset("transpose permute t slice narrow select".split())


def found(graph: Graph) -> list[Node]:
    """Scatters and copies into values that the graph itself has made (not into its inputs: those
    are cache writes), and joins of which parts are taken, where what was joined stays as it was to
    the end of the graph.
    """
    nodes = list(graph.nodes)
    first = next((place for place, node in enumerate(nodes) if is_mutating(node)), len(nodes))
    is_functional = all(is_mutating(node) or node.op == "output" for node in nodes[first:])
    return [node for node in nodes if _is_assembly(node) or (is_functional and _is_cut_again(node))]


def _is_cut_again(node: Node) -> bool:
    """Is the node a join of what the graph has made, a part of which some view of it takes?"""
    _, joined = join_of(node) or (0, ())
    if not joined or not all(map(_made_here, joined)):
        return False
    return any(word(view) in SELECTIONS for view in reached([node], _parts_of))


def _parts_of(node: Node) -> list[Node]:
    return [
        user for user in node.users if views(user) is node or word(user) in (*SELECTIONS, "mul")
    ]


def _is_assembly(node: Node) -> bool:
    name = word(node) if node.op == "call_function" else ""
    return (name in SCATTERS or name == "copy") and _made_here(node.args[0])


def _made_here(value: Any) -> bool:
    if not isinstance(value, Node):
        return False
    maker = origin(value, written)
    return isinstance(maker.target, OpOverload) and not operator_of(maker).effect


def take_apart(gm: GraphModule) -> None:
    """Rewrite the module's graph so that assembled values are joined from their parts, or not made
    at all.
    """
    _Parts(GraphBuilder(gm)).rewrite(gm.graph)


@dataclass(frozen=True)
class _Piece:
    """Elements ``start`` to ``stop`` of ``node`` along an axis."""

    node: Node
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Row:
    """Pieces side by side along ``axis``."""

    axis: int
    pieces: tuple[_Piece, ...]

    def cut(self, start: int, stop: int) -> tuple[_Piece, ...]:
        found, at = [], 0
        for piece in self.pieces:
            low, high = max(start - at, 0), min(stop - at, piece.size)
            if low < high:
                found.append(_Piece(piece.node, piece.start + low, piece.start + high))
            at += piece.size
        return tuple(found)


class _Parts:
    def __init__(self, builder: GraphBuilder) -> None:
        self.b = builder
        self.rows: dict[Node, _Row] = {}
        self.selected: set[Node] = set()  # views of a part of the row
        self.origin: dict[Node, Node] = {}  # of a reshape that no axis survives, what it reshapes
        self.replaced: list[tuple[Node, Node]] = []  # (new, old)
        self.written: set[Node] = set()  # what the values that are written into were made by

    def rewrite(self, graph: Graph) -> None:
        touched = []
        self.written = {origin(node, written) for node in found(graph)}
        with self.b.propagating():
            for node in list(graph.nodes):
                self.b.at(node, _origin(node))
                if self._read(node):
                    touched.append(node)
            for node in reversed(touched):
                self._settle(node)
        strides.follow(self.b, self.replaced)
        made = {*self.b.made, *touched}
        for node in reversed(list(graph.nodes)):
            if not node.users and (node in made or (node.op == "call_function" and is_view(node))):
                graph.erase_node(node)

    def _read(self, node: Node) -> bool:
        """Follow one node; True where it is part of an assembly."""
        try:
            return self._follow(node)
        # sizes that are not known in full: the value stays as it is made
        except (RuntimeError, ValueError):
            return False

    def _follow(self, node: Node) -> bool:
        if _is_assembly(node):
            return self._write(node)
        joined = join_of(node) if node in self.written else None
        if joined is not None:
            return self._join(node, *joined)
        source = views(node)
        if source in self.rows:
            self._view(node, source, self.rows[source])
            return True
        if source in self.origin and is_reshape(node):
            origin = self.origin[source]
            self._reshape(node, origin, self.rows[origin])
            return True
        row = self.rows.get(node.args[0]) if word(node) == "mul" else None  # type: ignore[arg-type]
        if row is not None and _is_spread_along(node.args[1], row.axis - len(shape_of(node))):
            self._apply(node, row)
            return True
        return False

    def _settle(self, node: Node) -> None:
        """Join the pieces for whoever still reads the value; what sees it whole, in another shape,
        sees them joined.
        """
        row = self.rows.get(node)
        if node.users and row is not None and (node in self.selected or _is_assembly(node)):
            self.b.at(node, _origin(node))
            parts = [self._part(piece, row.axis) for piece in row.pieces]
            if len(parts) > 1:
                self._replace(node, self.b.call(aten.cat.default, parts, row.axis))
            else:
                self._replace(node, parts[0], lambda user: not _gives_out(user))

    def _replace(
        self, node: Node, new: Node, wanted: Callable[[Node], bool] = lambda user: True
    ) -> None:
        node.replace_all_uses_with(new, wanted)
        self.replaced.append((new, node))

    # -- writes

    def _write(self, node: Node) -> bool:
        base, src = node.args[:2]
        if not isinstance(base, Node) or not isinstance(src, Node) or not _alike(src, node):
            return False
        if word(node) == "copy" or same_shape(shape_of(src), shape_of(node)):
            return self._overwrite(node, src)
        run = run_of(node)
        if run is None or run.places is None:
            return False
        axis, whole, (start, stop) = run.axis, run.size, run.places
        if run.drops:
            src = self.b.call(aten.unsqueeze.default, src, axis)
        known = self.rows.get(base)
        row = (
            known
            if known is not None and known.axis == axis
            else _Row(axis, (_Piece(base, 0, whole),))
        )
        pieces = (
            *row.cut(0, start),
            *self._pieces(src, axis, 0, stop - start),
            *row.cut(stop, whole),
        )
        self.rows[node] = _Row(axis, pieces)
        return True

    def _join(self, node: Node, axis: int, joined: Sequence[Any]) -> bool:
        """A join that is written into later: what it joins are its pieces until then."""
        parts = [
            part
            for part in joined
            if isinstance(part, Node) and len(shape_of(part)) == len(shape_of(node))
        ]
        sizes = [shape_of(part)[axis] for part in parts]
        if (
            len(parts) != len(joined)
            or not _known(*sizes)
            or not all(_alike(part, node) for part in parts)
        ):
            return False
        pieces = (
            piece
            for part, size in zip(parts, sizes, strict=True)
            for piece in self._pieces(part, axis, 0, size)
        )
        self.rows[node] = _Row(axis, tuple(pieces))
        return True

    def _overwrite(self, node: Node, src: Node) -> bool:
        if not same_shape(shape_of(src), shape_of(node)):
            return False
        self._replace(node, src, lambda user: not _gives_out(user))
        return True

    def _pieces(self, node: Node, axis: int, start: int, stop: int) -> tuple[_Piece, ...]:
        row = self.rows.get(node)
        return (
            row.cut(start, stop)
            if row is not None and row.axis == axis
            else (_Piece(node, start, stop),)
        )

    # -- views

    def _view(self, node: Node, source: Node, row: _Row) -> None:
        run = run_of(node)
        if run is not None and run.axis == row.axis:
            self._select(node, row, None if run.drops else run.places)
        elif is_reshape(node):
            self._reshape(node, source, row)
        elif word(node) in _KEPT_AXES:
            self._apply(node, row)

    def _select(self, node: Node, row: _Row, span: tuple[int, int] | None) -> None:
        if span is not None and span[0] < span[1]:
            self.rows[node] = _Row(row.axis, row.cut(*span))
            self.selected.add(node)

    def _reshape(self, node: Node, source: Node, row: _Row) -> None:
        """The pieces reshaped, where the axis along which they stand is one of the new axes."""
        axis = _surviving(shape_of(source), row.axis, shape_of(node))
        parts = (
            []
            if axis is None
            else [self._reshaped(node, axis, piece, row.axis) for piece in row.pieces]
        )
        if axis is None or not all(parts):
            self.origin[node] = source
            return
        self.rows[node] = _Row(
            axis, tuple(_Piece(part, 0, shape_of(part)[axis]) for part in parts if part is not None)
        )

    def _reshaped(self, node: Node, axis: int, piece: _Piece, of_piece: int) -> Node | None:
        sizes = [piece.size if at == axis else size for at, size in enumerate(shape_of(node))]
        unknown = [at for at, size in enumerate(sizes) if is_symbolic(size)]
        if len(unknown) > 1:
            return None
        shape = [-1 if at in unknown else int(size) for at, size in enumerate(sizes)]
        return self.b.call(aten.reshape.default, self._part(piece, of_piece), shape)

    def _apply(self, node: Node, row: _Row) -> None:
        """The view of every piece: it names axes and places along others, so it does the same to
        each.
        """
        parts = [
            self.b.call(node.target, self._part(piece, row.axis), *node.args[1:])
            for piece in row.pieces
        ]
        pairs = [zip(shape_of(part), shape_of(node), strict=True) for part in parts]
        axes = {
            tuple(at for at, (one, whole) in enumerate(pair) if not same(one, whole))
            for pair in pairs
        }
        if len(axes) == 1 and len(axis := axes.pop()) == 1:
            self.rows[node] = _Row(
                axis[0], tuple(_Piece(part, 0, shape_of(part)[axis[0]]) for part in parts)
            )

    def _part(self, piece: _Piece, axis: int) -> Node:
        if piece.size == shape_of(piece.node)[axis]:
            return piece.node
        return self.b.call(aten.slice.Tensor, piece.node, axis, piece.start, piece.stop)


def _origin(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}


def _alike(a: Node, b: Node) -> bool:
    one, other = a.meta["val"], b.meta["val"]
    return bool(one.dtype == other.dtype and one.device == other.device)


def _is_spread_along(factor: Any, axis: int) -> bool:
    """Does a factor multiply all places along an axis, counted from the last, by one number?"""
    if not isinstance(factor, Node):
        return True
    value = factor.meta["val"]
    return is_symbolic(value) or len(value.shape) < -axis or same(value.shape[axis], 1)


def _gives_out(user: Node) -> bool:
    """Does the graph's caller get the value itself, and take it for memory of its own?"""
    return user.op == "output" or (is_view(user) and any(map(_gives_out, user.users)))


def _known(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _surviving(before: Any, axis: int, after: Any) -> int | None:
    """The axis of the new shape that holds the same elements as ``axis`` of the old one."""
    inner = _count(before[axis + 1 :])
    for at, size in enumerate(after):
        if inner is not None and size == before[axis] and _count(after[at + 1 :]) == inner:
            return at
    return None


def _count(sizes: Iterable[Any]) -> int | None:
    sizes = list(sizes)
    return math.prod(sizes) if _known(*sizes) else None
