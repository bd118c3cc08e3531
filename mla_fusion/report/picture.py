"""What a report draws of one prologue: its parts, the arrows between them, and their nodes. Plain
data.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a part is, which decides its colour.
ROLES = ("input", "product", "norm", "rope", "write", "other", "kernel", "output", "missing")


@dataclass(frozen=True)
class Step:
    """One node of the graph. ``tensor``: dtype and shape of its value, "" where it has none."""

    name: str
    operator: str
    tensor: str
    source: str


@dataclass(frozen=True)
class Part:
    """One box: nodes that compute one thing together.

    role    one of ``ROLES``
    text    what it computes, as a formula
    reads   inputs of the graph that it reads, each with dtype and shape
    is_red  the rejection names a node of it, or it is what is missing
    """

    title: str
    role: str
    text: str = ""
    reads: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    is_red: bool = False


@dataclass(frozen=True)
class Drawing:
    """Parts, and arrows between them by their places. Every arrow leads to a later part."""

    parts: tuple[Part, ...]
    arrows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Picture:
    """A prologue as it was and, where it is fused, as it becomes. Layers of equal structure share
    one.

    layer   the one that is drawn; node names are its
    """

    layer: str
    before: Drawing
    after: Drawing | None = None
