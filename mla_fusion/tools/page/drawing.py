"""A picture of the report as inline SVG: a prologue step by step, node by node, or as the kernel's
call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

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


def steps(drawing: Drawing) -> tuple[list[Box], list[Line]]:
    """One box for each step, and for each tensor at the boundary with its views. Of a step in which
    an edge fails the nodes are shown; of a product that node alone, beside its views.
    """
    failing = [arrow for arrow in drawing.arrows if arrow.failing]
    at_fault = {place for arrow in failing for place in (arrow.start, arrow.end)}
    hung = {drawing.dots[arrow.start].step for arrow in failing if _hangs(drawing, arrow)}
    apart = {
        drawing.dots[place].step for place in at_fault if drawing.dots[place].role not in _ENDS
    } - hung
    root = _roots(drawing)
    keys: dict[object, list[int]] = {}
    for index, dot in enumerate(drawing.dots):
        if dot.role in _ENDS:
            key: object = root.get(index, index)
        elif dot.step not in apart:
            key = dot.step
        # views of what is multiplied go with the product
        elif dot.role == "product" and index not in at_fault:
            key = next(
                (at for at in sorted(at_fault) if at > index and drawing.dots[at].step == dot.step),
                dot.step,
            )
        else:
            key = index
        keys.setdefault(key, []).append(index)
    boxes = [_box(drawing, dots, apart) for dots in keys.values()]
    return boxes, _lines(boxes, drawing.arrows)


def _hangs(drawing: Drawing, arrow: Arrow) -> bool:
    """Does the arrow lead to what is missing, or from it?"""
    return "missing" in (drawing.dots[arrow.start].role, drawing.dots[arrow.end].role)


def _roots(drawing: Drawing) -> dict[int, int]:
    """Views of an input, by place, each with the input's."""
    found: dict[int, int] = {}
    for arrow in sorted(drawing.arrows, key=lambda arrow: arrow.end):
        start, end = drawing.dots[arrow.start], drawing.dots[arrow.end]
        if (
            start.role in INPUTS
            and (start.role, start.step) == (end.role, end.step)
            and not arrow.failing
        ):
            found[arrow.end] = found.get(arrow.start, arrow.start)
    return found


def nodes(drawing: Drawing) -> tuple[list[Box], list[Line]]:
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
    columns = _columns(boxes, laid.middles)
    # What fails is drawn last, above the rest.
    for line, points in sorted(zip(lines, laid.edges, strict=True), key=lambda pair: pair[0][2]):
        start, end = boxes[line[0]], boxes[line[1]]
        if across:
            corners = _corners(points, (start.width / 2, end.width / 2), columns)
        else:
            halves = dict.fromkeys((round(y) for _, y in points), _HEIGHT / 2)
            turned = _corners([(y, x) for x, y in points], (_HEIGHT / 2, _HEIGHT / 2), halves)
            corners = [(x, y) for y, x in turned]
        parts.append(_wire(line, [(x + _MARGIN, y + _MARGIN) for x, y in corners], across))
    for index, (box, (x, y)) in enumerate(zip(boxes, laid.middles, strict=True)):
        parts.append(_rectangle(box, x + _MARGIN, y + _MARGIN, first=index == 0))
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
        failing = {
            place for arrow in drawing.arrows if arrow.failing for place in (arrow.start, arrow.end)
        }
        title = first.step if failing & {*places} else f"views of {first.step}"
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


def _columns(boxes: Sequence[Box], middles: Sequence[Point]) -> dict[int, float]:
    """Half the width of the widest box of each column, by the column's middle."""
    found: dict[int, float] = {}
    for box, (x, _) in zip(boxes, middles, strict=True):
        found[round(x)] = max(found.get(round(x), 0.0), box.width / 2)
    return found


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


def _wire(line: Line, points: Sequence[Point], across: bool) -> str:
    start, end, failing, label = line
    x, y = points[0]
    path = [f"M{x:.1f} {y:.1f}"]
    for number, (to_x, to_y) in enumerate(points[1:]):
        if number % 2 == 0:
            path.append(f"L{to_x:.1f} {to_y:.1f}")
        else:
            half = (to_x - x) / 2 if across else (to_y - y) / 2
            first, second = (
                ((x + half, y), (to_x - half, to_y))
                if across
                else ((x, y + half), (to_x, to_y - half))
            )
            path.append(
                f"C{first[0]:.1f} {first[1]:.1f} {second[0]:.1f} {second[1]:.1f} "
                f"{to_x:.1f} {to_y:.1f}"
            )
        x, y = to_x, to_y
    tip = f"M{x + 5:.1f} {y:.1f}l-7 -3.5v7z" if across else f"M{x:.1f} {y + 5:.1f}l-3.5 -7h7z"
    middle = points[len(points) // 2 - 1], points[len(points) // 2]
    at = (sum(point[0] for point in middle) / 2, sum(point[1] for point in middle) / 2 - 5)
    text = (
        f'<text class="label" x="{at[0]:.1f}" y="{at[1]:.1f}">{escape(label)}</text>'
        if label
        else ""
    )
    kind = "edge failing" if failing else "edge"
    return (
        f'<g class="{kind}" data-ends="{start},{end}"><path class="wire" d="{"".join(path)}"/>'
        f'<path class="tip" d="{tip}"/>{text}</g>'
    )


def _rectangle(box: Box, x: float, y: float, first: bool) -> str:
    width, left, top = box.width, x - box.width / 2, y - _HEIGHT / 2
    below = (
        f'<text class="soft" x="{x:.1f}" y="{y + 13:.1f}">{_fit(box.text, width, _TEXT)}</text>'
        if box.text
        else ""
    )
    name = ". ".join(filter(None, (f"{box.role} {box.title}", box.text, box.hint)))
    return (
        f'<g class="dot role-{box.role}" tabindex="{0 if first else -1}" role="button" '
        f'aria-label="{escape(name)}" '
        f'data-dots="{",".join(map(str, box.dots))}"><title>{escape(box.hint or box.title)}</title>'
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_HEIGHT}" rx="6"/>'
        f'<text x="{x:.1f}" y="{y - 3 if box.text else y + 4:.1f}">'
        f"{_fit(box.title, width, _TITLE)}</text>{below}</g>"
    )


def _fit(text: str, width: float, character: float) -> str:
    most = int((width - 14) / character)
    return escape(text if len(text) <= most else text[: most - 1] + "…")
