"""Does a call move elements? Told by tags: every result is the element of some place, or the same
for all tags.

The same places must be taken for another order of the tags, and what is no tag must not change with
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .samples import Call

_OFFSETS = (1000.5, 1000.5, 70000.5)  # of the three sets of tags; the second is in another order


def not_movement(call: Call) -> str:
    """How the call does anything else than to move elements, or ""."""
    shapes = [call.leaves[i].shape for i in call.floats()]
    total = sum(shape.numel() for shape in shapes)
    generator = torch.Generator().manual_seed(0)
    orders = [
        torch.arange(total),
        torch.randperm(total, generator=generator),
        torch.randperm(total),
    ]
    found = []
    for offset, order in zip(_OFFSETS, orders, strict=True):
        tags = order.double() + offset
        given = [
            part.reshape(shape)
            for part, shape in zip(tags.split([s.numel() for s in shapes]), shapes, strict=True)
        ]
        found.append([_places(result, tags) for result in call.run(given)])
    for first, *others in zip(*found, strict=True):
        for places, values in others:
            if places.shape != first[0].shape:
                return f"{call}: the shape depends on the values"
            if not torch.equal(places, first[0]):
                return (
                    f"{call}: the places depend on the values, or what is no element of an "
                    "argument does"
                )
            if not torch.equal(values, first[1]):
                return f"{call}: a value that is no element of an argument, nor a literal"
    return ""


def _places(result: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
    """Of each element the place of its tag (-1: none), and its value there: of a tag its sign, for
    conjugates.
    """
    flat = result.double().reshape(-1)
    size = flat.abs()
    sorted_tags, order = tags.sort()
    at = torch.searchsorted(sorted_tags, size).clamp_max(max(len(tags) - 1, 0))
    hit = sorted_tags[at] == size if len(tags) else torch.zeros_like(size, dtype=torch.bool)
    places = torch.where(hit, order[at] if len(tags) else at, -1)
    return places, torch.where(hit, flat.sign(), flat)
