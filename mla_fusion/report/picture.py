"""What a report draws of one prologue: its nodes, what each is for, and the edges between them.
Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a dot is for, which decides its colour.
INPUTS = ("input", "weight", "table", "cache")
ROLES = (*INPUTS, "product", "norm", "rope", "write", "other", "kernel", "output", "missing")


@dataclass(frozen=True)
class Dot:
    """One node of the graph, or one result of the kernel, or what is missing.

    role     one of ``ROLES``
    step     the part of the prologue that it belongs to; dots of one step may be drawn as one
    tensor   dtype and shape of its value, "" where it has none
    """

    name: str
    op: str
    role: str
    step: str
    tensor: str = ""
    source: str = ""


@dataclass(frozen=True)
class Arrow:
    """From one dot to another, by their places. ``failing``: here is why the prologue was left."""

    start: int
    end: int
    failing: bool = False
    label: str = ""


@dataclass(frozen=True)
class Drawing:
    """Dots in graph order, arrows between them, and what each step computes."""

    dots: tuple[Dot, ...]
    arrows: tuple[Arrow, ...]
    formulas: dict[str, str]


@dataclass(frozen=True)
class Picture:
    """A prologue as it was and, where it is fused, as it becomes. Layers of equal structure share
    one.

    layer   the one that is drawn; node names are its
    """

    layer: str
    before: Drawing
    after: Drawing | None = None
