"""A drawing of the report as inline SVG: parts in columns from left to right, arrows between
them.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise

from mla_fusion.report.picture import Drawing, Part

_WIDTH, _HEIGHT, _ACROSS, _DOWN, _MARGIN = 176, 46, 40, 14, 8
_SMALLEST = 0.7  # of its size, to which a drawing shrinks on a narrow screen; there it scrolls
_CHARACTERS = (23, 28)  # of either line in a box
_SWEEPS = 8


class _Spot:
    """A part, or where an arrow passes a column between its ends; ``y`` is its middle."""

    def __init__(self, column: int, height: int) -> None:
        self.column, self.height, self.y = column, height, 0.0
        self.beside: list[_Spot] = []

    @property
    def x(self) -> float:
        return _MARGIN + self.column * (_WIDTH + _ACROSS)


def svg(drawing: Drawing, label: str) -> str:
    """The drawing as text of SVG. ``label`` says what it shows."""
    spots, paths = _placed(drawing)
    every = [spot for path in paths for spot in path] + spots
    top = min(spot.y - spot.height / 2 for spot in every) - _MARGIN
    height = max(spot.y + spot.height / 2 for spot in every) + _MARGIN - top
    width = max(spot.x for spot in every) + _WIDTH + _MARGIN
    red = [part.is_red for part in drawing.parts]
    arrows = [
        _arrow(path, (red[start] and red[end]) or drawing.parts[end].role == "missing")
        for (start, end), path in zip(drawing.arrows, paths, strict=True)
    ]
    boxes = map(_box, drawing.parts, spots)
    return (
        f'<svg viewBox="0 {top:.0f} {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" style="min-width:{_SMALLEST * width:.0f}px" role="img" '
        f'aria-label="{escape(label)}">'
        f"{''.join([*arrows, *boxes])}</svg>"
    )


def _placed(drawing: Drawing) -> tuple[list[_Spot], list[list[_Spot]]]:
    """A spot for each part, and for each arrow those that it passes, its ends among them."""
    from_end = [0] * len(drawing.parts)
    for start, end in sorted(drawing.arrows, reverse=True):
        from_end[start] = max(from_end[start], from_end[end] + 1)
    columns: list[list[_Spot]] = [[] for _ in range(max(from_end, default=0) + 1)]

    def added(column: int, height: int) -> _Spot:
        spot = _Spot(column, height)
        columns[column].append(spot)
        return spot

    spots = [added(len(columns) - 1 - steps, _HEIGHT) for steps in from_end]
    paths = []
    for start, end in drawing.arrows:
        first, last = spots[start], spots[end]
        between = [added(column, 0) for column in range(first.column + 1, last.column)]
        paths.append([first, *between, last])
        for one, other in pairwise(paths[-1]):
            one.beside.append(other)
            other.beside.append(one)
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 else reversed(columns):
            _settle(column)
    return spots, paths


def _settle(column: list[_Spot]) -> None:
    """Move each spot to the mean of those beside it, as far as the others of its column allow."""
    wanted = {
        spot: sum(other.y for other in spot.beside) / max(len(spot.beside), 1) for spot in column
    }
    column.sort(key=wanted.__getitem__)
    free = float("-inf")
    for spot in column:
        spot.y = max(wanted[spot], free + spot.height / 2)
        free = spot.y + spot.height / 2 + _DOWN
    shift = sum(wanted[spot] - spot.y for spot in column) / max(len(column), 1)
    for spot in column:
        spot.y += shift


def _arrow(path: list[_Spot], is_red: bool) -> str:
    text = f"M{path[0].x + _WIDTH:.1f} {path[0].y:.1f}"
    for before, spot in pairwise(path):
        middle = spot.x - _ACROSS / 2
        text += f"C{middle:.1f} {before.y:.1f} {middle:.1f} {spot.y:.1f} {spot.x:.1f} {spot.y:.1f}"
        text += "" if spot.height else f"H{spot.x + _WIDTH:.1f}"
    return f"<path{' class=red' * is_red} d='{text}'/>"


def _box(part: Part, spot: _Spot) -> str:
    inputs = ", ".join(read.partition(" ")[0] for read in part.reads)
    computed = part.role in ("product", "norm", "rope", "write")
    below = inputs if computed and inputs else part.text
    if part.role == "kernel":
        below = f"{len(part.reads)} inputs"
    lines = [part.title, below] if below else [part.title]
    texts = "".join(
        f'<text x="{spot.x + _WIDTH / 2:.0f}" y="{spot.y + 5 + 17 * at - 8.5 * len(lines[1:]):.1f}"'
        f"{' class=soft' * at}>{escape(_fit(line, _CHARACTERS[at]))}</text>"
        for at, line in enumerate(lines)
    )
    hint = "\n".join(filter(None, (part.title, part.text, *part.reads)))
    return (
        f'<g class="{part.role}{" red" * part.is_red}"><title>{escape(hint)}</title>'
        f'<rect x="{spot.x}" y="{spot.y - _HEIGHT / 2:.1f}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" rx="6"/>{texts}</g>'
    )


def _fit(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
