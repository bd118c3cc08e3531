"""Join facts by dataflow into prologues, or into near misses that know what is absent.

All projections of one x are one group. A prologue needs, in its group: a normed query latent that
is projected up, rotated and absorbed; and a normed kv latent beside a rotated key of one head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

import torch
from torch.fx import Node

from mla_fusion.facts import kv_operator, projection
from mla_fusion.facts.absorb import AbsorbFact, join_heads, uniform_factor
from mla_fusion.facts.kv_operator import KvOperatorFact
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.reading import ConeFacts, FactReader
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact, Table, TableRun
from mla_fusion.facts.tables import same_values
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, table_columns
from mla_fusion.match import apart, ended, halves
from mla_fusion.match.apart import Part
from mla_fusion.match.candidate import Candidate, KeyHalf, KeySide, QuerySide, plain_key
from mla_fusion.match.near_miss import Diagnosis, Facts, NearMiss, Seen
from mla_fusion.match.plain import Plain
from mla_fusion.operators.known import shape_of, value_of
from mla_fusion.report.rejection import Refuse

Found = KeyHalf | NearMiss  # a Candidate is a KeyHalf with a query
# elements; no prologue has a larger one, and what it makes would be probed
_LARGEST_WEIGHT = 1 << 32
_ALTERNATIVES = 7  # of one prologue that are tried where the first has no plan


class Finder:
    """Finds candidates and near misses in one view, in graph order."""

    def __init__(
        self, view: View, offers: Collection[str] = ("absorbed",), shrinks: bool = True
    ) -> None:
        """``offers``: as Config has them. With "unabsorbed", a query that no W_uk product follows
        is one too; with "key", a key needs no query. ``shrinks``: may many tokens be probed as few?
        """
        self.view, self.offers = view, offers
        self.projections = [
            item for item in projection.find(view) if self._size(item.weight) <= _LARGEST_WEIGHT
        ]
        self.operators = kv_operator.find(view)
        latents = [operator.latent for operator in self.operators]
        self.reader = FactReader(view, self.projections, latents, shrinks)
        self._static = "static" in offers
        self.above: dict[Node, list[Projection]] = defaultdict(list)
        self.on_operand: dict[Node, list[Projection]] = defaultdict(list)
        for item in self.projections:
            by_one_scale = projection.statically_quantised(item) if self._static else None
            for form in (item, projection.unsmoothed(view, item), by_one_scale):
                if form is not None:
                    self.above[form.origin].append(form)
            self.on_operand[item.activation].append(item)
        self.plain = Plain(view, self.reader, self._ups, self.absorbs)
        given = self.projections, self.above, self.on_operand, self.absorbs, offers
        self.why = Diagnosis(view, self.reader, *given)

    def find(self) -> list[Found]:
        groups: dict[int, list[Projection]] = defaultdict(list)
        for item in self.projections:
            if item.is_flat:
                groups[self.view.number(item.origin)].append(item)
        parts = [part for group in groups.values() for part in self._of_same_rows(group)]
        return self._found(parts) or [*(self.why.hidden_queries() or self.why.computed_weights())]

    def _found(self, parts: list[list[Projection]]) -> list[Found]:
        """What is found on each x; halves of one prologue that read two forms of one are told as
        one.
        """
        every = [self._join(part) if self._may_be_down(part) else [] for part in parts]
        alone = [
            found[0] if len(found) == 1 and isinstance(found[0], NearMiss) else None
            for found in every
        ]
        told = zip(parts, alone, every, strict=True)
        known = [Part(part, miss, done=bool(found) and miss is None) for part, miss, found in told]
        for place, miss in apart.joined(self.view, known, self.why.has_query, self._static).items():
            every[place] = [miss] if miss is not None else []
        return [item for found in every for item in found]

    def _may_be_down(self, group: list[Projection]) -> bool:
        """Could these be W_dq and W_dkv_kr? Spares reading what most layers hold besides: an output
        projection.

        A projection alone on its x is one of a prologue if its columns are taken apart (both
        weights in one), or if what is made of it is projected up and then head by head (a query
        whose key is missing).
        """
        if len(group) > 1 or self._comes_apart(group[0]):
            return True
        ups = (
            up for member in self.view.members(group[0].node) for up in self.above.get(member, ())
        )
        readers = (
            item
            for up in ups
            for node in self.view.members(up.node)
            for item in self.on_operand.get(node, ())
        )
        return any(not item.is_flat for item in readers)

    def _comes_apart(self, item: Projection) -> bool:
        """Is there a value with more than one element, and not all, of each row?"""
        size = self._size(item.node)
        columns = item.width
        rows = size // max(self.view.binding.size(columns), 1)  # a weight may have no columns
        return any(rows < self._size(member) < size for member in self.view.members(item.node))

    def _size(self, node: Node) -> int:
        value = value_of(node)
        return prod(self.view.binding.shape(value.shape)) if isinstance(value, torch.Tensor) else 0

    def _of_same_rows(self, group: list[Projection]) -> list[list[Projection]]:
        """The group, split where projections read x sliced or permuted differently."""
        classes: list[list[Projection]] = []
        for item in group:
            alike = next(
                (known for known in classes if projection.same_rows(self.view, known[0], item)),
                None,
            )
            if alike is None:
                classes.append([item])
            else:
                alike.append(item)
        return classes

    def _join(self, group: list[Projection]) -> list[Found]:
        """Query sides and key sides of one x, joined; nothing where the group is not MLA at all."""
        facts = {item: self.reader.read(item) for item in group}
        keys = self._keys(facts)
        joined = self._candidates(facts, keys)
        if "key" in self.offers and joined and not keys:
            # not a query's columns
            keys = [key for key in self.plain.keys(facts) if key.down is key.down_rope]
        if isinstance(joined, NearMiss):
            ups = [
                up for cone in facts.values() for norm in cone.norms for up in self.above[norm.node]
            ]
            named = (item for item in self.projections if item.node in joined.nodes)
            read = self.reader, facts, (*ups, *named)
            joined = ended.because_of_a_step(self.view, *read, joined)
            return [replace(joined, score=self._score(facts, ups), halves=self._halves(keys))]
        return [
            *joined,
            *self._halves(keys, [item.key for item in joined if isinstance(item, Candidate)]),
        ]

    def _halves(self, keys: Sequence[KeySide], used: Sequence[KeySide] = ()) -> tuple[KeyHalf, ...]:
        return (
            halves.of(keys, used, self.reader.shrink, self.reader.tokens)
            if "key" in self.offers
            else ()
        )

    def _score(self, facts: Facts, ups: list[Projection]) -> float:
        """How much of a prologue there is: the norms, the rotations of query and key, an absorbed
        product.
        """
        norms = [norm for cone in facts.values() for norm in cone.norms]
        of_key = [rope for cone in facts.values() for rope in cone.ropes]
        read = [self.reader.read(up) for up in ups if up.is_flat]
        of_query = [rope for cone in read for rope in cone.ropes]
        absorbed = [up for up in ups if up.is_flat and self.absorbs(up)]
        return sum(map(bool, (norms, norms[1:], of_key, of_query, absorbed))) / 5

    def _candidates(
        self, facts: Facts, keys: list[KeySide]
    ) -> list[Candidate | NearMiss] | NearMiss:
        queries, partial = self._queries(facts)
        if not keys and not queries:
            queries, keys = self.plain.unrotated(facts)
        if "unabsorbed" in self.offers and not queries:
            queries, keys = self.plain.unabsorbed(facts, keys)
        if keys and queries:
            queries.sort(key=lambda query: not _equally_scaled(self.view, query, keys[0]))
            return self._paired(queries, keys)
        return self.why.nearest(Seen(facts, queries, keys, partial)) or []

    def _paired(self, queries: list[QuerySide], keys: list[KeySide]) -> list[Candidate | NearMiss]:
        """Each query with a key of its own; what is left of either is a near miss (two attentions
        may read one x).
        """
        found: list[Candidate | NearMiss] = []
        while queries and keys:
            of_query = [query for query in queries if query.absorb.node is queries[0].absorb.node]
            apart = [
                key for key in keys if not any(_is_latent_of(query, key) for query in queries)
            ] or keys
            first, *others = (self._candidate(query, key) for query in of_query for key in apart)
            found.append(replace(first, others=tuple(others[:_ALTERNATIVES])))
            done = first.query.absorb.node, first.query.up_rope.node, first.key.latent
            queries = [
                query
                for query in queries
                if not self._same(done[:2], (query.absorb.node, query.up_rope.node))
            ]
            # what reads the same latent apart is no prologue of its own: an indexer, say
            queries = [query for query in queries if query.down.node is not first.query.down.node]
            keys = [key for key in apart if not self._same(done[2:], (key.latent,))]
        for query in {query.absorb.node: query for query in queries}.values():
            reason = Refuse(
                "kv_latent.absent",
                f"the kv latent on {query.down.origin.name} goes with another query",
            )
            found.append(NearMiss(reason, (query.norm.node, query.absorb.node), 0.6))
        return found

    def _candidate(self, query: QuerySide, key: KeySide) -> Candidate:
        products = (query.down, query.up_nope, query.up_rope, key.down, key.down_rope)
        tokens = self.reader.tokens.among(item.node for item in products)
        return Candidate(query=query, key=key, shrink=self.reader.shrink, tokens=tokens)

    def _same(self, some: Sequence[Node], others: Sequence[Node]) -> bool:
        """Is any of these the value of its counterpart? (A layer may compute its query twice.)"""
        return any(map(self.view.same, some, others))

    def _queries(self, facts: Facts) -> tuple[list[QuerySide], NearMiss | None]:
        found, partial = [], None
        for down, cone in facts.items():
            for norm in cone.norms:
                ups = self._ups(norm)
                rotations = [(up, rope) for up in ups for rope in self.reader.read(up).ropes]
                heads = {rope.heads for _, rope in rotations}
                absorbs = [(up, absorb) for up in ups for absorb in self.absorbs(up, heads)]
                for up_rope, rope in rotations:
                    for up_nope, absorb in absorbs:
                        if rope.heads == absorb.heads:
                            found.append(
                                QuerySide(
                                    down=down,
                                    norm=norm,
                                    up_nope=up_nope,
                                    up_rope=up_rope,
                                    absorb=absorb,
                                    rope=rope,
                                )
                            )
                partial = self.why.of_latent(norm, rotations, absorbs, ups) or partial
        return found, partial

    def _ups(self, norm: NormFact) -> list[Projection]:
        return [
            up
            for up in self.above[norm.node]
            if up.is_flat and projection.reads_whole(self.view, up)
        ]

    def absorbs(self, up: Projection, heads: Collection[int] = ()) -> list[AbsorbFact]:
        """Absorbed products of the projection; those of fewer ``heads`` than are rotated are pieces
        of one.
        """
        cone = self.reader.read(up)
        every = [
            cone.absorb(item) for operand in cone.readings for item in self.on_operand[operand]
        ]
        found = [fact for fact in every if fact is not None]
        whole = [
            fact for fact in found if (fact.heads in heads if heads else fact.projection.batch)
        ]
        if whole or not found:
            return whole
        joined = join_heads(self.view, found, self.reader.shrink)
        return [joined] if joined is not None else []

    def _keys(self, facts: Facts) -> list[KeySide]:
        found = []
        for down, cone in facts.items():
            for operator in self.operators:
                side = self._operator_side(down, cone, operator)
                if side is not None:
                    found.append(side)
        for down, cone in facts.items():
            for norm in reversed(cone.norms):
                if any(up.is_flat and self.reader.read(up).ropes for up in self.above[norm.node]):
                    continue  # that is the query's latent
                for down_rope, other in facts.items():
                    for rope in (rope.of_one_head for rope in other.ropes):
                        if rope is not None and not (down is down_rope and _overlap(norm, rope)):
                            found.append(plain_key(down, down_rope, norm, rope))
        return found

    def _operator_side(
        self, down: Projection, cone: ConeFacts, operator: KvOperatorFact
    ) -> KeySide | None:
        reading = cone.readings.get(operator.latent)
        if (
            reading is None
            or not reading.single
            or reading.degree != 1
            or reading.first.numel() % cone.cone.tokens
        ):
            return None
        codes = reading.first.reshape(cone.cone.tokens, -1)
        expected = (
            torch.arange(cone.cone.tokens).unsqueeze(1) * cone.cone.width
            + codes[0] % cone.cone.width
        )
        if not torch.equal(codes, expected):
            return None
        if uniform_factor(cone.cone, cone.probe, reading) != 1.0:
            return None
        columns = (codes[0] % cone.cone.width).tolist()
        width = self.view.binding.size(shape_of(operator.gamma)[-1])
        rotated = columns[width:]
        return KeySide(
            down=down,
            down_rope=down,
            columns=tuple(columns[:width]),
            gamma=operator.gamma,
            eps=operator.eps,
            scale=1.0,
            norm=None,
            first=tuple(rotated[0::2]),
            second=tuple(rotated[1::2]),
            layout="half",
            cos=self._whole_table(operator.cos, len(rotated), cone),
            sin=self._whole_table(operator.sin, len(rotated), cone),
            rope=None,
            operator=operator,
        )

    def _whole_table(self, node: Node, width: int, cone: ConeFacts) -> Table:
        base = origin(node, table_columns)
        shape = cone.cone.shape(base)
        count = 1
        for size in shape[:-1]:
            count *= size
        rows = "token" if count == cone.cone.tokens else "one" if count == 1 else "position"
        start, step = _columns(cone.cone, base, node)
        run = TableRun(
            base=base, field="", start=start, step=step, count=width, factor=1.0, rows=rows
        )
        return (run,)


def _columns(cone: Cone, base: Node, node: Node) -> tuple[int, int]:
    """The first column of a table that ``node`` takes, and by how many it steps."""
    steps, shape = nodes_between((base,), node), cone.shape(base)
    program = Program([base], steps, cone.view.binding, shrink=cone.shrink)
    taken = program.run([torch.arange(shape[-1]).expand(shape)])[program.slot(node)]
    columns = taken.flatten()[:2].tolist() if isinstance(taken, torch.Tensor) else []
    return (int(columns[0]), int(columns[1] - columns[0])) if len(columns) == 2 else (0, 1)


_LARGEST = 1 << 24  # elements of a product that is probed with all of its tokens


def search(view: View, offers: Collection[str] = ("absorbed",)) -> tuple[Finder, list[Found]]:
    """What a view holds. Where many tokens were probed as few and something is missing, with all of
    them: a step may not treat all alike, or has a literal for each.
    """
    finder = Finder(view, offers)
    found = finder.find()
    reader = finder.reader
    missed = any(isinstance(item, NearMiss) for item in found)
    if reader.shrink is not None and (reader.is_lost or missed):
        sizes = [view.binding.count_of(item.node) for item in finder.projections]
        if max(sizes) <= _LARGEST:
            whole = Finder(view, offers, shrinks=False)
            return whole, whole.find()
    return finder, found


def _is_latent_of(query: QuerySide, key: KeySide) -> bool:
    """Is what looks like a kv latent the query's own latent?"""
    return query.down.node is key.down.node and bool(set(query.norm.columns) & set(key.columns))


def _overlap(norm: NormFact, rope: RopeFact) -> bool:
    return bool(
        set(norm.columns) & {column for pair in (rope.first[0], rope.second[0]) for column in pair}
    )


def same_table(view: View, a: Table, b: Table) -> float | None:
    """The factor by which table ``a`` is table ``b``, or None where they are not provably
    proportional.
    """
    if len(a) != len(b):
        return None
    ratios = set()
    for run, other in zip(a, b, strict=True):
        shape = (run.field, run.start, run.step, run.count, run.rows)
        if shape != (other.field, other.start, other.step, other.count, other.rows):
            return None
        if not same_values(view, run.base, other.base):
            return None
        ratios.add(round(run.factor / other.factor, 9))
    return ratios.pop() if len(ratios) == 1 else None


def rotation_ratio(view: View, query: QuerySide, key: KeySide) -> float | None:
    """What q_pe is multiplied by, relative to k_pe, or None where they are not provably rotated by
    the same angles.
    """
    if not query.rope.cos and not key.cos:
        return query.rope.factor / (key.rope.factor if key.rope else 1.0)
    ratios = {same_table(view, query.rope.cos, key.cos), same_table(view, query.rope.sin, key.sin)}
    return ratios.pop() if len(ratios) == 1 else None


def _equally_scaled(view: View, query: QuerySide, key: KeySide) -> bool:
    """Is q_nope multiplied by what q_pe is, relative to k_pe? (A model may read it unscaled
    too.)
    """
    ratio = rotation_ratio(view, query, key)
    return ratio is not None and abs(ratio - query.absorb.factor) <= 1e-6 * abs(ratio)
