"""All facts of one cone, computed once per structure: 61 equal layers cost one set of probes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.facts import absorb, rmsnorm, rope
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.decode import Decoder, Reading
from mla_fusion.facts.moved import moved
from mla_fusion.facts.projection import Projection, token_sizes
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.kinds import is_cast, is_getitem, is_view, is_writer, word
from mla_fusion.fx.likeness import likeness, outline
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.shrink import SMALL, WORTHWHILE, Shrink
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.operators.known import ELEMENTWISE_SCALING, shape_of, value_of


@dataclass
class ConeFacts:
    """What was found in the cone of one projection. ``absorbs`` is shared by cones of one
    structure.
    """

    cone: Cone
    probe: torch.Tensor
    norms: list[NormFact]
    ropes: list[RopeFact]
    readings: dict[Node, Reading]
    absorbs: dict[object, AbsorbFact] = field(default_factory=dict)

    def absorb(self, projection: Projection) -> AbsorbFact | None:
        """``projection`` as the absorbed product of columns of this cone's product, or None."""
        tokens = self.cone.token_proof
        if tokens:
            tokens.follow(nodes_between((), projection.weight))
            tokens.follow([projection.node])
            if tokens.broken(projection.node) is not None:
                return None
        labels = (
            projection.activation_labels,
            projection.weight_labels,
            projection.product.out_labels,
        )
        shape = str(shape_of(projection.weight))
        key = self.cone.slot(projection.activation), *labels, shape
        known = self.absorbs.get(key)
        if known is not None:
            width = known.heads * known.nope_dim
            times = known.times and absorb.factor_of_tokens(self.cone.view, projection, width)
            return replace(known, projection=projection, weight=projection.weight, times=times)
        found = absorb.find(self.cone, self.probe, self.readings, projection)
        if found is not None and found.weight is projection.weight:
            self.absorbs[key] = found
        return found


# cones of one outline; a graph of which no two are alike would else compare every pair
_MOST_COMPARED = 8


class FactReader:
    """Reads cones of one view; what is like a cone read before is not probed again."""

    def __init__(
        self,
        view: View,
        projections: Iterable[Projection],
        operands: Iterable[Node] = (),
        shrinks: bool = True,
    ) -> None:
        """``operands``: nodes, beside the activations, whose reading somebody will ask for;
        ``shrinks``: may many tokens be probed as few?
        """
        self.view = view
        self.probes = 0
        projections = list(projections)
        leads = [(token_sizes(item), item.is_flat) for item in projections]
        lead = _lead(view, leads) if shrinks else ()
        longest = max(lead, default=0)
        self.shrink = Shrink(longest) if math.prod(lead) >= WORTHWHILE and longest > SMALL else None
        self.tokens = Tokens(self.shrink, view.binding.meaning)
        # Are there tokens that cannot be probed as few? (Cone.) A batch as long as its sequences
        # has two such axes.
        self.is_lost = lead.count(longest) > 1
        self._leads: list[list[Any]] = [sizes for sizes, _ in leads if sizes and len(sizes) > 1]
        self._operands = {projection.activation for projection in projections} | set(operands)
        self._alike: dict[object, list[ConeFacts]] = defaultdict(list)
        self._facts: dict[Node, ConeFacts] = {}

    def read(self, projection: Projection) -> ConeFacts:
        facts = self._facts.get(projection.node)
        if facts is None:
            facts = self._facts[projection.node] = self._like_another(projection) or self._anew(
                projection
            )
        return facts

    def _like_another(self, projection: Projection) -> ConeFacts | None:
        """The facts of a cone that was read before and is this one with other nodes."""
        key = outline(self.view, projection.product, projection.weight_is_left)
        for known in self._alike[key][-_MOST_COMPARED:]:
            move = likeness(known.cone, projection.product)
            if move is not None and self._read_alike(known.cone.nodes, move):
                return ConeFacts(
                    known.cone.moved(projection.product, move),
                    known.probe,
                    [moved(fact, move) for fact in known.norms],
                    [moved(fact, move) for fact in known.ropes],
                    {move[node]: reading for node, reading in known.readings.items()},
                    known.absorbs,
                )
        return None

    def _read_alike(self, nodes: list[Node], move: Mapping[Node, Node]) -> bool:
        """Are the same ones operands of another product? Only those have readings."""
        return all((node in self._operands) == (move[node] in self._operands) for node in nodes)

    def _anew(self, projection: Projection) -> ConeFacts:
        lead = self._lead_of(projection)
        cone = Cone(
            self.view, projection.product, projection.weight_is_left, self.shrink, self.tokens, lead
        )
        self.is_lost |= cone.is_lost
        facts = self._probe(cone)
        self._alike[outline(self.view, projection.product, projection.weight_is_left)].append(facts)
        return facts

    def _lead_of(self, projection: Projection) -> list[object] | None:
        """The token axes before any were merged. Of rows that were merged above another product
        those of that one: however rows are counted, by two numbers or by one, they are the same.
        """
        lead, same = token_sizes(projection), self.view.binding.same
        if lead is None or len(lead) != 1:
            return lead
        alike = (other for other in self._leads if same(math.prod(other), lead[0]))
        return next(alike, lead)

    def _probe(self, cone: Cone) -> ConeFacts:
        self.probes += 1
        decoder = Decoder(cone)
        degrees = decoder.degrees()
        rotated = _mixes_by_a_table(cone)
        views = _after_own_write(cone) | _parts_of_mixtures(cone, degrees)

        def wanted(node: Node) -> bool:
            if degrees[node] == 0:
                return not is_view(node) and not is_cast(node)
            computed = not is_view(node) and not is_cast(node)
            return node in self._operands or node in views or (node in rotated and computed)

        readings = decoder.read(degrees, wanted)
        return ConeFacts(
            cone,
            decoder.probe,
            rmsnorm.find(cone, decoder, readings),
            rope.find(cone, decoder, {n: r for n, r in readings.items() if n in rotated}),
            {n: r for n, r in readings.items() if n in self._operands},
        )


def _lead(view: View, leads: Iterable[tuple[list[Any] | None, bool]]) -> tuple[int, ...]:
    """The token axes of most of the graph's linear layers, those with several before others;
    ``leads``: of each product, and whether it is such a layer.
    """
    counted = Counter(view.binding.shape(sizes) for sizes, flat in leads if sizes and flat).items()
    return max(counted, key=lambda entry: (len(entry[0]) > 1, entry[1]), default=((), 0))[0]


def _mixes_by_a_table(cone: Cone) -> set[Node]:
    """Members that depend on a base with columns (a rotation needs one) and may hold sums of two
    elements.

    What only multiplies real elements of the product, one by one, is on the way to a rotation and
    none.
    """
    tables = {base for base in cone.bases if len(getattr(value_of(base), "shape", ())) > 0}
    inside = {cone.node, *cone.nodes}
    touched: set[Node] = set()
    mixing: set[Node] = set()
    for node in cone.nodes:
        members = inside.intersection(node.all_input_nodes)
        if touched.intersection(members) or (tables and len(members) < len(node.all_input_nodes)):
            touched.add(node)
        if mixing.intersection(members) or len(members) > 1 or not _is_elementwise(node):
            mixing.add(node)
    return touched & mixing


def _is_elementwise(node: Node) -> bool:
    value = value_of(node)
    if isinstance(value, torch.Tensor) and value.is_complex():
        return False
    return is_view(node) or is_cast(node) or word(node) in ELEMENTWISE_SCALING


def _after_own_write(cone: Cone) -> set[Node]:
    """Views of a value into which part of itself was written (``q[..., D:] = rope(q)``)."""
    touched: set[Node] = set()
    for node in cone.nodes:
        if is_writer(node) or (is_view(node) and touched.intersection(node.all_input_nodes)):
            touched.add(node)
    return {node for node in touched if is_view(node)}


def _parts_of_mixtures(cone: Cone, degrees: Mapping[Node, int]) -> set[Node]:
    """Views that take a part out of values joined before: of several products (``rope(cat([q_pe,
    k_pe]))``), or of what was rotated and what was not (``cat([q_nope, rope(q_pe)])``, whole heads
    by tables padded with ones).
    """
    found = set()
    for node in cone.nodes:
        if node in degrees and is_view(node):
            source = node.args[0]
            if isinstance(source, Node) and is_getitem(node):
                source = source.args[0]
            if not isinstance(source, Node) or source is cone.node:
                continue
            if source not in degrees or word(source) == "cat" or _takes_columns(source, node):
                found.add(node)
    return found


def _takes_columns(source: Node, node: Node) -> bool:
    """Are the node's rows shorter than those of a value that was computed?"""
    rows = [shape_of(n)[-1:] for n in (source, node) if isinstance(value_of(n), torch.Tensor)]
    return not is_view(source) and len(rows) == 2 and rows[0] != rows[1]
