"""Sides of a prologue with a part less: a query that nothing rotates, or that no W_uk product
follows, or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from mla_fusion.facts import unabsorbed, unrotated
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.multiples import multiples
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.reading import FactReader
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact
from mla_fusion.fx.view import View
from mla_fusion.match.candidate import KeySide, QuerySide, plain_key
from mla_fusion.match.near_miss import Facts

Sides = tuple[list[QuerySide], list[KeySide]]


@dataclass(frozen=True)
class Plain:
    """``ups``: the projections of a normed latent; ``absorbs``: the absorbed products of one."""

    view: View
    reader: FactReader
    ups: Callable[[NormFact], list[Projection]]
    absorbs: Callable[[Projection], list[AbsorbFact]]

    def unrotated(self, facts: Facts) -> Sides:
        """Both sides of a prologue without RoPE; nothing where one of them is rotated."""
        queries = [
            QuerySide(down=down, norm=norm, up_nope=up, up_rope=up_rope, absorb=absorb, rope=rope)
            for down, norm in _norms(facts)
            for up in self.ups(norm)
            for absorb in self.absorbs(up)
            for up_rope in self.ups(norm)
            for rope in self._handed_on(
                up_rope, _flat(absorb.columns) if up_rope is up else (), absorb.heads
            )
        ]
        latents = {query.norm.node for query in queries}
        found = self.keys(facts, queries[0].rope.rope_dim) if queries else ()
        keys = [key for key in found if key.norm is not None and key.norm.node not in latents]
        return (queries, keys) if keys else ([], [])

    def unabsorbed(self, facts: Facts, keys: list[KeySide]) -> Sides:
        """Normed latents whose projection is rotated in part, beside these keys; the rest, of it or
        of another projection, is q_nope. Without a key that is rotated, what has neither RoPE nor a
        W_uk product.
        """
        if not keys:
            return self._neither(facts)
        latent_dim = len(keys[0].columns)
        rotations = (
            (*found, up, rope) for found in _norms(facts) for up, rope in self._rotations(found[1])
        )
        return [query for found in rotations for query in self._beside(*found, latent_dim)], keys

    def _rotations(self, norm: NormFact) -> Iterator[tuple[Projection, RopeFact]]:
        return ((up, rope) for up in self.ups(norm) for rope in self.reader.read(up).ropes)

    def _neither(self, facts: Facts) -> Sides:
        """Of each head as many columns as the key has are handed on beside the others."""
        for key in self.keys(facts):
            others = [
                found
                for found in _norms(facts)
                if key.norm is not None and found[1].node is not key.norm.node
            ]
            pieces = (
                (*found, up, rope)
                for found in others
                for up, rope in self._pieces(found[1], key.rope_dim)
            )
            queries = [
                query for found in pieces for query in self._beside(*found, len(key.columns))
            ]
            if queries:
                return queries, [key]
        return [], []

    def _pieces(self, norm: NormFact, width: int) -> Iterator[tuple[Projection, RopeFact]]:
        """Columns, so many of each head, of how many heads the values say that hold them."""
        for up in self.ups(norm):
            cone = self.reader.read(up).cone
            shapes = [self.view.binding.shape_of(form.node) for form in multiples(self.view, cone)]
            heads = {shape[-2] for shape in shapes if len(shape) > 2 and shape[-1] == width}
            yield from (
                (up, rope)
                for count in sorted(heads)
                for rope in self._handed_on(up, (), count, width)
            )

    def _beside(
        self, down: Projection, norm: NormFact, up_rope: Projection, rope: RopeFact, latent_dim: int
    ) -> Iterator[QuerySide]:
        taken = _flat((*rope.first, *rope.second))
        for up in self.ups(norm):
            own = taken if up is up_rope else ()
            for nope in unabsorbed.find(
                self.view, self.reader.read(up).cone, up, own, rope.heads, latent_dim
            ):
                yield QuerySide(
                    down=down, norm=norm, up_nope=up, up_rope=up_rope, absorb=nope, rope=rope
                )

    def keys(self, facts: Facts, width: int | None = None) -> Iterator[KeySide]:
        """Latents beside columns of one head that nothing norms and nothing rotates."""
        for down, cone in facts.items():
            for norm in reversed(cone.norms):
                for other, of_other in facts.items():
                    taken = _flat(held.columns for held in of_other.norms)
                    for rope in unrotated.find(self.view, of_other.cone, taken, 1, width):
                        if rope.factor == 1.0:
                            yield plain_key(down, other, norm, rope)

    def _handed_on(
        self, up: Projection, absorbed: Collection[int], heads: int, width: int | None = None
    ) -> list[RopeFact]:
        read = self.reader.read(up)
        return [] if read.ropes else unrotated.find(self.view, read.cone, absorbed, heads, width)


def _norms(facts: Facts) -> Iterator[tuple[Projection, NormFact]]:
    return ((down, norm) for down, cone in facts.items() for norm in cone.norms)


def _flat(heads: Iterable[Collection[int]]) -> set[int]:
    return {column for head in heads for column in head}
