"""A picture of the report as inline SVG: a prologue step by step, node by node, or as the kernel's
call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from mla_fusion.report.picture import INPUTS, Arrow, Drawing
from mla_fusion.tools.page.layout import Point, place

# a character of either line; sans-serif faces differ, so a little more than most need
_TITLE, _TEXT = 7.5, 6.3
_HEIGHT, _MARGIN, _TIP = 40, 10, 5
_NARROWEST, _WIDEST = 60, 224
_ENDS = (*INPUTS, "output", "missing")


@dataclass(frozen=True)
class Box:
    """One or more dots drawn as one. ``dots`` are their places in the drawing."""

    dots: tuple[int, ...]
    role: str
    title: str
    text: str
    hint: str

    @property
    def width(self) -> float:
        return min(max(_TITLE * len(self.title), _TEXT * len(self.text), _NARROWEST) + 18, _WIDEST)


Line = tuple[int, int, bool, str]  # from and to which box, whether it fails, label
Drawn = tuple[list[Box], list[Line]]


def steps(drawing: Drawing) -> Drawn:
    """One box for each step, and for each tensor at the boundary with its views. Of a step in which
    an edge fails the nodes are shown; of a product that node alone, beside its views.
    """
    dots, at_fault = drawing.dots, _at_fault(drawing)
    hung = {  # what is missing leads there, or hangs on it
        dots[arrow.start].step
        for arrow in drawing.arrows
        if arrow.failing and "missing" in (dots[arrow.start].role, dots[arrow.end].role)
    }
    apart = {dots[place].step for place in at_fault if dots[place].role not in _ENDS} - hung
    root = _roots(drawing)
    keys: dict[object, list[int]] = {}
    for index, dot in enumerate(dots):
        if dot.role in _ENDS:
            key: object = root.get(index, index)
        elif dot.step not in apart:
            key = dot.step
        # views of what is multiplied go with the product
        elif dot.role == "product" and index not in at_fault:
            later = (at for at in sorted(at_fault) if at > index and dots[at].step == dot.step)
            key = next(later, dot.step)
        else:
            key = index
        keys.setdefault(key, []).append(index)
    boxes = [_box(drawing, places, apart) for places in keys.values()]
    return boxes, _lines(boxes, drawing.arrows)


def _at_fault(drawing: Drawing) -> set[int]:
    """Where an edge that fails starts, or ends."""
    failing = (arrow for arrow in drawing.arrows if arrow.failing)
    return {place for arrow in failing for place in (arrow.start, arrow.end)}


def _roots(drawing: Drawing) -> dict[int, int]:
    """Views of an input, by place, each with the input's."""
    found: dict[int, int] = {}
    for arrow in sorted(drawing.arrows, key=lambda arrow: arrow.end):
        start, end = drawing.dots[arrow.start], drawing.dots[arrow.end]
        is_same = (start.role, start.step) == (end.role, end.step)
        if is_same and start.role in INPUTS and not arrow.failing:
            found[arrow.end] = found.get(arrow.start, arrow.start)
    return found


def nodes(drawing: Drawing) -> Drawn:
    """One box for each node."""
    views = _roots(drawing)
    boxes = [_box(drawing, [index], view=index in views) for index in range(len(drawing.dots))]
    return boxes, _lines(boxes, drawing.arrows)


_SMALLEST = 0.7  # of its size, to which a drawing shrinks on a narrow screen; there it scrolls


def svg(
    boxes: Sequence[Box], lines: Sequence[Line], picture: str, label: str, across: bool = True
) -> str:
    """The drawing. ``picture`` says where its dots stand in the report's JSON, for the page's
    script.
    """
    gap = (14, 28) if across else (16, 26)
    laid = place([(box.width, _HEIGHT) for box in boxes], [line[:2] for line in lines], across, gap)
    width, height = laid.width + 2 * _MARGIN, laid.height + 2 * _MARGIN
    parts = [
        f'<svg class="drawing" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" '
        f'style="min-width:{_SMALLEST * width:.0f}px" '
        f'role="group" aria-label="{escape(label)}" data-picture="{escape(picture)}">'
    ]

    def along(points: Iterable[Point]) -> list[Point]:
        """Points with the direction of the arrows first, and back."""
        return [(x, y) if across else (y, x) for x, y in points]

    halves = [(box.width if across else _HEIGHT) / 2 for box in boxes]
    columns: dict[int, float] = {}  # half the size of the largest box of each, by its middle
    for half, (x, _) in zip(halves, along(laid.middles), strict=True):
        columns[round(x)] = max(columns.get(round(x), 0.0), half)
    # What fails is drawn last, above the rest.
    for line, points in sorted(zip(lines, laid.edges, strict=True), key=lambda pair: pair[0][2]):
        placed = [
            (x + _MARGIN, y + _MARGIN)
            for x, y in _corners(along(points), (halves[line[0]], halves[line[1]]), columns)
        ]
        parts.append(_wire(line, placed, along))
    at_fault = {end for _, end, is_failing, _ in lines if is_failing}
    for index, (box, (x, y)) in enumerate(zip(boxes, laid.middles, strict=True)):
        kind = f"role-{box.role}{' failing' if index in at_fault else ''}"
        parts.append(_rectangle(box, kind, x + _MARGIN, y + _MARGIN, first=index == 0))
    return "".join([*parts, "</svg>"])


def _box(
    drawing: Drawing,
    places: Sequence[int],
    apart: Collection[str] | None = None,
    view: bool = False,
) -> Box:
    """``apart``: the steps that are shown node by node; None where all are. ``view``: of an input,
    drawn by itself.
    """
    first = drawing.dots[places[0]]
    hint = drawing.formulas.get(first.step, "") or first.tensor or first.op
    alone = apart is None or first.step in apart
    title, text = first.step, f"{len(places)} nodes" if len(places) > 1 else first.op
    if first.role in _ENDS and not view:
        text = _brief(first.tensor)
    elif first.role == "kernel":
        title, text = first.name, ""
    elif alone and len(places) > 1:
        title = first.step if _at_fault(drawing) & {*places} else f"views of {first.step}"
    elif alone and not (first.role == "product" and apart is not None):
        title, text = first.op.rpartition(".")[2] or first.name, first.name
    return Box(tuple(places), first.role, title, text, hint)


def _brief(tensor: str) -> str:
    """With dtypes as listings of graphs write them."""
    for name, short in (("bfloat", "bf"), ("float", "f"), ("int", "i")):
        tensor = re.sub(rf"\b(u?){name}(?=\d)", rf"\1{short}", tensor)
    return tensor


def _lines(boxes: Sequence[Box], arrows: Iterable[Arrow]) -> list[Line]:
    at = {place: index for index, box in enumerate(boxes) for place in box.dots}
    found: dict[tuple[int, int], tuple[bool, str]] = {}
    for arrow in arrows:
        pair = at[arrow.start], at[arrow.end]
        if pair[0] != pair[1]:
            failing, label = found.get(pair, (False, ""))
            found[pair] = (failing or arrow.failing, label or arrow.label)
    return [(start, end, failing, label) for (start, end), (failing, label) in found.items()]


def _corners(
    points: Sequence[Point], ends: tuple[float, float], columns: Mapping[int, float]
) -> list[Point]:
    """Where a wire turns: it runs straight through columns, where boxes stand, and curves between
    them. ``ends``: half the width of its own two boxes.
    """
    found: list[Point] = []
    for number, (x, y) in enumerate(points):
        half = columns.get(round(x), 0.0)
        before = -half if number else ends[0]
        after = half if number < len(points) - 1 else -ends[1] - _TIP
        found += [(x + before, y), (x + after, y)]
    return found


def _wire(
    line: Line, points: Sequence[Point], along: Callable[[Iterable[Point]], list[Point]]
) -> str:
    start, end, failing, label = line

    def text(*found: Point) -> str:
        return " ".join(f"{x:.1f} {y:.1f}" for x, y in along(found))

    path = f"M{text(points[0])}"
    for number, ((x, y), (to_x, to_y)) in enumerate(pairwise(points)):
        half = (to_x - x) / 2
        bend = text((x + half, y), (to_x - half, to_y), (to_x, to_y))
        path += f"C{bend}" if number % 2 else f"L{text((to_x, to_y))}"
    x, y = points[-1]
    tip = text((x + _TIP, y), (x - 2, y - 3.5), (x - 2, y + 3.5))
    (x, y), (to_x, to_y) = along(points[len(points) // 2 - 1 : len(points) // 2 + 1])
    at = f'x="{(x + to_x) / 2:.1f}" y="{(y + to_y) / 2 - 5:.1f}"'
    name = f'<text class="label" {at}>{escape(label)}</text>' if label else ""
    return (
        f'<g class="edge{" failing" if failing else ""}" data-ends="{start},{end}">'
        f'<path class="wire" d="{path}"/><path class="tip" d="M{tip}z"/>{name}</g>'
    )


def _rectangle(box: Box, kind: str, x: float, y: float, first: bool) -> str:
    width, left, top = box.width, x - box.width / 2, y - _HEIGHT / 2
    below = (
        f'<text class="soft" x="{x:.1f}" y="{y + 13:.1f}">{_fit(box.text, width, _TEXT)}</text>'
        if box.text
        else ""
    )
    name = ". ".join(filter(None, (f"{box.role} {box.title}", box.text, box.hint)))
    return (
        f'<g class="dot {kind}" tabindex="{0 if first else -1}" role="button" '
        f'aria-label="{escape(name)}" '
        f'data-dots="{",".join(map(str, box.dots))}"><title>{escape(box.hint or box.title)}</title>'
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_HEIGHT}" rx="6"/>'
        f'<text x="{x:.1f}" y="{y - 3 if box.text else y + 4:.1f}">'
        f"{_fit(box.title, width, _TITLE)}</text>{below}</g>"
    )


def _fit(text: str, width: float, character: float) -> str:
    most = int((width - 14) / character)
    return escape(text if len(text) <= most else text[: most - 1] + "…")
