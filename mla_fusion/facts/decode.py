"""Read off, from values, which elements of a matrix product each node of its cone is made of.

Element ``e`` of the product carries the code ``token * width + column``. The cone is run once per
bit of the code, on a probe from which the elements whose bit is 0 are removed. For a node that is
linear in the product, each of its elements is then 0, whole, or one of two parts; the pattern over
the bits spells the codes of the one or two product elements it reads, and their coefficients. For a
node that does not change when the product is scaled (a norm), the zero pattern alone spells its
code.

Nothing here depends on how the nodes are written; the answer is exact or there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.fx import Node

from mla_fusion.fx.cone import Cone

LARGE = 1.0e6  # scale of a probe at which no epsilon of a norm, up to 1, changes the result
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


def _spell(
    total: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """``first``, ``second`` and ``share`` of a linear node, from its value under each bit's mask
    ([bits, ..]).

    None where one of them is not zero, whole, or one of two parts.
    """
    tolerance = _CLOSE * total.abs() + 1e-30
    whole = (values - total).abs_() <= tolerance
    part = (values.abs() > tolerance).logical_and_(~whole)
    if not bool(part.any()):
        code = _codes(whole)
        return code, code, total
    share = torch.where(part, values, math.inf).amin(0)
    share = torch.where(share.isinf(), total, share)
    scale = tolerance + _CLOSE * share.abs()
    is_first = ((values - share).abs_() <= scale).logical_and_(part)
    is_second = (
        ((values - (total - share)).abs_() <= scale).logical_and_(part).logical_and_(~is_first)
    )
    if not torch.equal(part, is_first | is_second):
        return None
    return _codes(whole | is_first), _codes(whole | is_second), share


def _codes(bits: torch.Tensor) -> torch.Tensor:
    """The numbers whose binary digits, lowest first, lie along the first axis."""
    digit = torch.arange(bits.shape[0]).reshape(-1, *[1] * (bits.dim() - 1))
    return (bits.long() << digit).sum(0)


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
        flips = torch.rand(shape, generator=self.generator, dtype=torch.float32) < 0.5
        return torch.where(flips, -size, size)

    def degrees(self) -> dict[Node, int]:
        """Degree of homogeneity in the product, of every real node that has one of 0 or 1.

        Nodes that mix tokens have none: of those a cone has pairs of tokens alone.
        """
        doubled = self.cone.run(self.probe * (2 * LARGE), self.bases)
        found = {}
        for node in self.cone.nodes:
            if self.cone.token_proof.broken(node) is not None:
                continue
            slot = self.cone.slot(node)
            once, twice = self.values[slot], doubled[slot]
            if not _is_real(once) or not _is_real(twice):
                continue
            size = _largest(once)
            if not math.isfinite(size) or size == 0:
                continue
            change = twice - once
            if _largest(change - once) <= size * 1e-11:
                found[node] = 1
            elif _largest(change) <= size * 1e-10:
                found[node] = 0
        return found

    def read(self, degrees: dict[Node, int], wanted: Callable[[Node], bool]) -> dict[Node, Reading]:
        """Readings of the wanted nodes. A node whose elements read three or more elements has
        none.
        """
        nodes = [node for node in degrees if wanted(node)]
        if not nodes:
            return {}
        under = self._under_masks(nodes)
        steady = self._steady(nodes)
        readings = {}
        for node in nodes:
            total, values = self._value(node), under[node]
            if degrees[node] == 0:
                code = _codes(values.ne(0))
                readings[node] = Reading(0, code, code, total, total, node in steady)
                continue
            spelt = _spell(total, values)
            if spelt is not None:
                readings[node] = Reading(1, *spelt, total, node in steady)
        return readings

    def _under_masks(self, nodes: list[Node]) -> dict[Node, torch.Tensor]:
        """[bits, ..]: the nodes' values where the elements whose bit is 0 are taken out of the
        product.
        """
        values: dict[Node, list[torch.Tensor]] = {node: [] for node in nodes}
        large, codes = self.probe * LARGE, self.cone.codes.int()
        for bit in range(max(1, int(codes.max()).bit_length())):
            run = self.cone.run(large * codes.bitwise_and(1 << bit).bool(), self.bases, nodes)
            for node in nodes:
                value, total = run[self.cone.slot(node)], self._value(node)
                if not _is_real(value) or value.shape != total.shape:
                    value = torch.full_like(total, math.nan)
                values[node].append(value)
        return {node: torch.stack(each) for node, each in values.items()}

    def _steady(self, nodes: list[Node]) -> set[Node]:
        """The nodes whose value does not change with any base, bases that hold a single number
        included.
        """
        again = self.cone.run(
            self.probe * LARGE, small_scalars(self.cone.draw(self.generator)), nodes
        )
        values = {node: again[self.cone.slot(node)] for node in nodes}
        return {
            node
            for node, value in values.items()
            if _is_real(value) and torch.equal(value, self._value(node))
        }

    def _value(self, node: Node) -> torch.Tensor:
        value = self.values[self.cone.slot(node)]
        assert isinstance(value, torch.Tensor)
        return value


def small_scalars(bases: list[torch.Tensor]) -> list[torch.Tensor]:
    """Draw 0-d floats (an epsilon handed in at run time) near 1e-6, so that they act as an epsilon
    would.
    """
    return [1e-6 * (1 + b.abs()) if b.is_floating_point() and b.numel() == 1 else b for b in bases]


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _is_real(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
