"""Read off, from values, which elements of a matrix product each node of its cone is made of.

Element ``e`` of the product carries the code ``token * width + column``. The cone is run once per bit of
the code, on a probe from which the elements whose bit is 0 are removed. For a node that is linear in the
product, each of its elements is then 0, whole, or one of two parts; the pattern over the bits spells the
codes of the one or two product elements it reads, and their coefficients. For a node that does not change
when the product is scaled (a norm), the zero pattern alone spells its code.

Nothing here depends on how the nodes are written; the answer is exact or there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.fx import Node

from mla_fusion.graph.cone import Cone

LARGE = 1.0e6  # scale at which the epsilon of a norm is lost in rounding, one of 1 too
_CLOSE = 1.0e-9


@dataclass
class Reading:
    """What one node is made of.

    degree   1: linear in the product; 0: unchanged by its scale
    first    code of the (first) product element each of the node's elements reads
    second   code of the other one; equal to ``first`` where there is only one
    share    the part of the node's value that comes from ``first`` (degree 1)
    total    the node's value
    steady   does the value stay the same whatever the other tensors of the cone hold?
    """

    degree: int
    first: torch.Tensor
    second: torch.Tensor
    share: torch.Tensor
    total: torch.Tensor
    steady: bool

    @property
    def single(self) -> bool:
        return bool((self.first == self.second).all())


class _Part:
    """The reading of one linear node as it grows bit by bit."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total
        self.tolerance = _CLOSE * total.abs() + 1e-30
        self.first = torch.zeros(total.shape, dtype=torch.int64)
        self.second = torch.zeros(total.shape, dtype=torch.int64)
        self.share = total.clone()
        self.split = torch.zeros(total.shape, dtype=torch.bool)

    def read(self, value: torch.Tensor, bit: int) -> bool:
        """Take in the value under one bit's mask; False where it is not zero, whole, or a known part."""
        none = value.abs() <= self.tolerance
        whole = (value - self.total).abs() <= self.tolerance
        part = ~(none | whole)
        fresh = part & ~self.split
        if fresh.any():
            self.share = torch.where(fresh, value, self.share)
            self.split |= fresh
        scale = self.tolerance + _CLOSE * self.share.abs()
        is_first = part & ((value - self.share).abs() <= scale)
        is_second = part & ((value - (self.total - self.share)).abs() <= scale) & ~is_first
        if bool((part & ~is_first & ~is_second).any()):
            return False
        self.first |= (whole | is_first).long() << bit
        self.second |= (whole | is_second).long() << bit
        return True


class Decoder:
    """Runs a cone on probes; remembers nothing beyond the readings of the nodes asked for."""

    def __init__(self, cone: Cone, seed: int = 0) -> None:
        self.cone = cone
        self.generator = torch.Generator().manual_seed(seed)
        self.probe = self.fresh_probe()
        self.bases = small_scalars(cone.draw(self.generator))
        self.values = cone.run(self.probe * LARGE, self.bases)

    def fresh_probe(self) -> torch.Tensor:
        """A value for the product: magnitudes of 1 to 2 with any sign."""
        shape = self.cone.codes.shape
        size = 1 + torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return size * torch.where(torch.rand(shape, generator=self.generator) < 0.5, -1.0, 1.0)

    def degrees(self) -> dict[Node, int]:
        """Degree of homogeneity in the product, of every real node that has one of 0 or 1."""
        doubled = self.cone.run(self.probe * (2 * LARGE), self.bases)
        found = {}
        for node in self.cone.nodes:
            slot = self.cone.slot(node)
            once, twice = self.values[slot], doubled[slot]
            if not _is_real(once) or not _is_real(twice):
                continue
            size = once.abs().max() if once.numel() else torch.tensor(0.0)
            if not torch.isfinite(size) or size == 0:
                continue
            if bool((twice - 2 * once).abs().max() <= size * 1e-11):
                found[node] = 1
            elif bool((twice - once).abs().max() <= size * 1e-10):
                found[node] = 0
        return found

    def read(self, degrees: dict[Node, int], wanted: Callable[[Node], bool]) -> dict[Node, Reading]:
        """Readings of the wanted nodes. A node whose elements read three or more elements has none."""
        linear = {n: _Part(self._value(n)) for n, degree in degrees.items() if degree == 1 and wanted(n)}
        scaled = {
            n: torch.zeros(self._value(n).shape, dtype=torch.int64) for n, d in degrees.items() if d == 0 and wanted(n)
        }
        highest = max(1, int(self.cone.codes.max()).bit_length())
        for bit in range(highest):
            if not linear and not scaled:
                break
            mask = (self.cone.codes >> bit) & 1
            values = self.cone.run(self.probe * LARGE * mask, self.bases)
            for node in list(linear):
                value = values[self.cone.slot(node)]
                if not _is_real(value) or not linear[node].read(value, bit):
                    del linear[node]
            for node in scaled:
                value = values[self.cone.slot(node)]
                if _is_real(value):
                    scaled[node] |= value.ne(0).long() << bit
        steady = self._steady([*linear, *scaled])
        readings = {
            n: Reading(1, part.first, part.second, part.share, part.total, n in steady) for n, part in linear.items()
        }
        for node, code in scaled.items():
            readings[node] = Reading(0, code, code, self._value(node), self._value(node), node in steady)
        return readings

    def _steady(self, nodes: list[Node]) -> set[Node]:
        """The nodes whose value no base has a part in, one that holds a single number included."""
        if not nodes:
            return set()
        again = self.cone.run(self.probe * LARGE, small_scalars(self.cone.draw(self.generator)))
        values = {node: again[self.cone.slot(node)] for node in nodes}
        return {node for node, value in values.items() if _is_real(value) and torch.equal(value, self._value(node))}

    def _value(self, node: Node) -> torch.Tensor:
        value = self.values[self.cone.slot(node)]
        assert isinstance(value, torch.Tensor)
        return value


def small_scalars(bases: list[torch.Tensor]) -> list[torch.Tensor]:
    """Draw 0-d floats (an epsilon handed in at run time) near 1e-6, so that they act as an epsilon would."""
    return [1e-6 * (1 + b.abs()) if b.is_floating_point() and b.numel() == 1 else b for b in bases]


def _is_real(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
