"""Is a call one analytic function of its floats? Extrapolated from one side of a point it must
foretell the other.

Along a line through the point the result is read at nine places on the left, and the polynomial
through these is compared with the result on the right: a step, a corner, and a jump in the second
or third derivative show. Points that are not in the domain (no finite value on one side) say
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .samples import Call

POINTS = (0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 20.0, -20.0)
_REACH = 0.01
_DEGREE = 8
_CLOSE = 1e-9

_LEFT = -_REACH * (1 - torch.cos(torch.linspace(0, torch.pi, _DEGREE + 1, dtype=torch.float64))) / 2
_RIGHT = _REACH * torch.tensor([1 / 16, 1 / 4], dtype=torch.float64)


def _weights() -> Tensor:
    """[right, left]: Lagrange's polynomials of the left places, at the right ones."""
    rows = []
    for t in _RIGHT:
        row = []
        for i, at in enumerate(_LEFT):
            others = torch.cat([_LEFT[:i], _LEFT[i + 1 :]])
            row.append(((t - others) / (at - others)).prod())
        rows.append(torch.stack(row))
    return torch.stack(rows)


_WEIGHTS = _weights()


def kink(call: Call, away_from_zero: bool = False) -> str:
    """Where the call is no analytic function of its float64 leaves, or "".

    ``away_from_zero``: of a norm, which is analytic everywhere else.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [call.leaves[i].shape for i in call.floats()]
    for what, point in _places(shapes, generator, away_from_zero):
        line = [_ordinary(shape, generator) for shape in shapes]
        error = _error(call, point, line)
        if error > _CLOSE:
            return f"{call} {what}: {error:.1e}"
    return ""


def _ordinary(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """0.6 to 0.8, of either sign: far from where sampled operators have their poles."""
    size = 0.6 + 0.2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, -size, size)


def _places(
    shapes: list[torch.Size], generator: torch.Generator, away_from_zero: bool
) -> Iterator[tuple[str, list[Tensor]]]:
    points = torch.tensor(POINTS, dtype=torch.float64)
    yield "anywhere", [_ordinary(shape, generator) for shape in shapes]
    if not away_from_zero:  # a row whose elements are alike has a deviation near zero
        yield "where all are positive", [_ordinary(shape, generator).abs() for shape in shapes]
    else:
        yield "where all are large", [30 * _ordinary(shape, generator) for shape in shapes]
    for number, point in enumerate(() if away_from_zero else POINTS):
        same = [torch.full(shape, point, dtype=torch.float64) for shape in shapes]
        yield f"where all are {point}", same
        # one argument after the other
        for at in (number % len(shapes),) if len(shapes) > 1 else ():
            others = [_ordinary(shape, generator).abs() for shape in shapes]
            yield f"where argument {at} is {point}", [*others[:at], same[at], *others[at + 1 :]]
    for _ in range(0 if away_from_zero else 3):
        picked = [
            points[torch.randint(1, len(points), shape, generator=generator)] for shape in shapes
        ]
        yield "at a mixture", picked


def _error(call: Call, point: list[Tensor], line: list[Tensor]) -> float:
    """Of the extrapolation, relative to the results; 0 where there is nothing to compare."""
    try:
        here = call.run(point)
        if not any(bool(result.isfinite().any()) for result in here):
            return 0.0
        rows = [
            call.run([p + t * d for p, d in zip(point, line, strict=True)])
            for t in [*_LEFT, *_RIGHT]
        ]
    except Exception:
        return 0.0  # not a place that the operator takes
    worst = 0.0
    for results in zip(*rows, strict=True):
        if len({result.shape for result in results}) > 1:
            return float("inf")
        values = torch.stack([result.double().reshape(-1) for result in results])
        values = values[:, values.isfinite().all(0)]
        if values.numel():
            guess, right = _WEIGHTS @ values[: len(_LEFT)], values[len(_LEFT) :]
            worst = max(
                worst, float((guess - right).abs().max() / values.abs().max().clamp_min(1e-3))
            )
    return worst
