"""Places for the boxes of a drawing: layers from left to right, or from the top down, by Sugiyama's
method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        from grandalf.layouts import SugiyamaLayout
    except ImportError as error:
        raise ImportError(
            "the drawings of a report need grandalf: pip install 'mla-fusion[report]'"
        ) from error
    vertices = [Vertex(index) for index in range(len(sizes))]
    for vertex, (width, height) in zip(vertices, sizes, strict=True):
        vertex.view = _Spot(height, width) if across else _Spot(width, height)
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
        spots = [vertex.view for vertex in part.V()]
        spots += [bend for edge in part.E() for bend in edge.view.bends]
        _part_overlaps(spots, gap[0])
        offset, extent = _beside(spots, offset, extent, gap[0])
    middles = [_turn(vertex.view.xy, extent, across) for vertex in vertices]
    paths = [
        [
            middles[start],
            *(_turn(bend.xy, extent, across) for bend in reversed(edge.view.bends)),
            middles[end],
        ]
        for (start, end), edge in zip(edges, turned, strict=True)
    ]
    return Layout(middles, paths, *((extent, offset) if across else (offset, extent)))


@dataclass
class _Spot:
    """What grandalf asks of a box. Where an edge passes a layer is a box without a size."""

    w: float = 0.0
    h: float = 0.0
    xy: Point = (0.0, 0.0)


class _Path:
    """What grandalf asks of an edge."""

    def __init__(self) -> None:
        self.bends: list[_Spot] = []

    def setpath(self, points: list[Point]) -> None:
        self.bends = [_Spot(xy=point) for point in points[1:-1]]


def _part_overlaps(spots: Sequence[_Spot], gap: float) -> None:
    """Neighbours of a layer that grandalf has let overlap are moved apart, with the edges that pass
    between them.
    """
    layers: dict[int, list[_Spot]] = {}
    for spot in spots:
        layers.setdefault(round(spot.xy[1]), []).append(spot)
    for layer in layers.values():
        free = float("-inf")
        for spot in sorted(layer, key=lambda spot: spot.xy[0]):
            x = max(spot.xy[0], free + spot.w / 2)
            free = x + spot.w / 2 + gap
            spot.xy = (x, spot.xy[1])


def _beside(
    spots: Sequence[_Spot], offset: float, extent: float, gap: float
) -> tuple[float, float]:
    """Move a connected part beside the last one; the width and the depth reached."""
    left = min(spot.xy[0] - spot.w / 2 for spot in spots)
    right = max(spot.xy[0] + spot.w / 2 for spot in spots)
    top = min(spot.xy[1] - spot.h / 2 for spot in spots)
    bottom = max(spot.xy[1] + spot.h / 2 for spot in spots)
    shift = offset - left + (gap if offset else 0)
    for spot in spots:
        spot.xy = (spot.xy[0] + shift, spot.xy[1] - top)
    return right + shift, max(extent, bottom - top)


def _turn(point: Point, extent: float, across: bool) -> Point:
    """grandalf's x runs along a layer and its y across; ends come first there and last here."""
    along, depth = point[0], extent - point[1]
    return (depth, along) if across else (along, depth)
