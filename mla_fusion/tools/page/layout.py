"""Places for the boxes of a drawing: layers from left to right, or from the top down, by Sugiyama's
method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """Middles of the boxes, the points of each edge (its ends included), and the size of it all."""

    middles: list[Point]
    edges: list[list[Point]]
    width: float
    height: float


def place(
    sizes: Sequence[Point], edges: Sequence[tuple[int, int]], across: bool, gap: Point = (26, 44)
) -> Layout:
    """Lay out boxes of ``sizes`` joined by ``edges``. ``across``: from left to right.

    ``gap`` is what stays free between neighbours of a layer, and between layers. Whatever feeds a
    box stands in the layer before it, so an input is found beside its reader. Raises ImportError
    where grandalf is not installed.
    """
    try:
        from grandalf.graphs import Edge, Graph, Vertex
        from grandalf.layouts import SugiyamaLayout, VertexViewer
    except ImportError as error:
        raise ImportError(
            "the drawings of a report need grandalf: pip install 'mla-fusion[report]'"
        ) from error
    vertices = [Vertex(index) for index in range(len(sizes))]
    for vertex, (width, height) in zip(vertices, sizes, strict=True):
        vertex.view = VertexViewer(*((height, width) if across else (width, height)))
    # Layers are counted from the ends, against the arrows.
    turned = [Edge(vertices[end], vertices[start]) for start, end in edges]
    for edge in turned:
        edge.view = _Path()
    graph = Graph(vertices, turned)
    offset, extent = 0.0, 0.0
    for part in graph.C:
        layout = SugiyamaLayout(part)
        layout.xspace, layout.yspace = gap
        layout.init_all()
        layout.draw(6)
        _part_overlaps(part, gap[0])
        offset, extent = _beside(part, offset, extent, gap[0])
    middles = [_turn(vertex.view.xy, extent, across) for vertex in vertices]
    paths = [
        [_turn(point, extent, across) for point in reversed(edge.view.points)] for edge in turned
    ]
    return Layout(middles, paths, *((extent, offset) if across else (offset, extent)))


class _Path:
    """What grandalf asks of an edge."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def setpath(self, points: list[Point]) -> None:
        self.points = list(points)


def _part_overlaps(part: Any, gap: float) -> None:
    """Neighbours of a layer that grandalf has let overlap are moved apart, with the edges that pass
    between them.
    """
    layers: dict[int, list[tuple[float, float, Any, int]]] = {}
    for vertex in part.V():
        x, y = vertex.view.xy
        layers.setdefault(round(y), []).append((x, vertex.view.w, vertex.view, -1))
    for edge in part.E():
        for index in range(1, len(edge.view.points) - 1):
            x, y = edge.view.points[index]
            layers.setdefault(round(y), []).append((x, 0.0, edge.view, index))
    for layer in layers.values():
        layer.sort(key=lambda item: item[0])
        free = float("-inf")
        for x, width, view, index in layer:
            x = max(x, free + width / 2)
            free = x + width / 2 + gap
            if index < 0:
                view.xy = (x, view.xy[1])
            else:
                view.points[index] = (x, view.points[index][1])
    for edge in part.E():
        edge.view.points[0], edge.view.points[-1] = (vertex.view.xy for vertex in edge.v)


def _beside(part: Any, offset: float, extent: float, gap: float) -> tuple[float, float]:
    """Move a connected part beside the last one; the width and the depth reached."""
    views = [vertex.view for vertex in part.V()]
    # edges may pass outside all boxes of a layer
    passed = [x for edge in part.E() for x, _ in edge.view.points]
    left = min([*passed, *(view.xy[0] - view.w / 2 for view in views)])
    right = max([*passed, *(view.xy[0] + view.w / 2 for view in views)])
    top = min(view.xy[1] - view.h / 2 for view in views)
    bottom = max(view.xy[1] + view.h / 2 for view in views)
    shift = offset - left + (gap if offset else 0)
    for view in views:
        view.xy = (view.xy[0] + shift, view.xy[1] - top)
    for edge in part.E():
        edge.view.points = [(x + shift, y - top) for x, y in edge.view.points]
    return right + shift, max(extent, bottom - top)


def _turn(point: Point, extent: float, across: bool) -> Point:
    """grandalf's x runs along a layer and its y across; ends come first there and last here."""
    along, depth = point[0], extent - point[1]
    return (depth, along) if across else (along, depth)
