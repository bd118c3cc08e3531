"""Where a graph has parts of a prologue and no candidate: what is missing or different."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from math import inf, prod

import torch
from torch.fx import Node

from mla_fusion.facts.absorb import AbsorbFact, uniform_factor
from mla_fusion.facts.cache_write import input_behind
from mla_fusion.facts.dynamic_quant import quantised_behind
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.reading import ConeFacts, FactReader
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact
from mla_fusion.fx.kinds import Kind, called, is_cast, is_writer, kind_of, op_name, word
from mla_fusion.fx.sizes import same
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import peel, reached
from mla_fusion.match import epsilon
from mla_fusion.match.candidate import KeyHalf, KeySide, QuerySide
from mla_fusion.match.quantising import (
    before_quantisation,
    between_norm_and,
    first_rows,
    is_rows,
    is_scaled,
    why_otherwise,
)
from mla_fusion.operators.known import JOINERS, is_collective, shape_of, value_of
from mla_fusion.report.rejection import Refuse

_FARTHEST = 64  # nodes from a product up to the one that it is made of
Facts = Mapping[Projection, ConeFacts]  # of the projections of one x


@dataclass(frozen=True)
class NearMiss:
    """Parts of a prologue, and why they are not one.

    score     how much of a prologue was found, from 0 to 1
    certain   is the reason one that no step beside it can be to blame for?
    halves    the key's side of it, one for each latent
    lacks     "query" or "key", where the other side is there, and that one may be beside it
    """

    reason: Refuse
    nodes: tuple[Node, ...]
    score: float = 0.0
    certain: bool = False
    halves: tuple[KeyHalf, ...] = ()
    lacks: str = ""


@dataclass(frozen=True)
class Seen:
    """What was found on one x, where it is no candidate.

    queries, keys   sides of a prologue, of which one kind at the most is there
    partial         why a normed latent and what follows it are no query
    """

    facts: Facts
    queries: list[QuerySide]
    keys: list[KeySide]
    partial: NearMiss | None

    @property
    def x(self) -> Node:
        return next(iter(self.facts)).origin


class Diagnosis:
    """Looks for the reason. ``_ASKED`` has the questions: each is a method that answers with a near
    miss or with None.
    """

    def __init__(
        self,
        view: View,
        reader: FactReader,
        projections: list[Projection],
        above: Mapping[Node, list[Projection]],
        on_operand: Mapping[Node, list[Projection]],
        absorbs: Callable[[Projection], list[AbsorbFact]],
        offers: Collection[str],
    ) -> None:
        """``above``: projections by origin, ``on_operand``: by activation; ``absorbs``: absorbed
        products of one; ``offers``: as Config has them.
        """
        self.view, self.reader, self.projections, self.absorbs = view, reader, projections, absorbs
        self.above, self.on_operand, self._offers = above, on_operand, offers

    def nearest(self, seen: Seen) -> NearMiss | None:
        """The first answer to the questions that are asked of what was seen."""
        partial = seen.partial
        if seen.queries:
            asked = _ASKED["query"]
        elif seen.keys:
            of_both = _ASKED.get(f"key, {partial.reason.code}" if partial else "", ())
            asked = (*of_both, Diagnosis.as_seen) if partial else _ASKED["key"]
        else:
            has_latents = sum(len(cone.norms) for cone in seen.facts.values()) > 1
            asked = _ASKED["part of a query" if partial and has_latents else ""]
        return next(filter(None, (question(self, seen) for question in asked)), None)

    def of_latent(
        self,
        norm: NormFact,
        rotated: list[tuple[Projection, RopeFact]],
        absorbed: list[tuple[Projection, AbsorbFact]],
        ups: list[Projection],
    ) -> NearMiss | None:
        """Why the projections ``ups`` of a normed latent are no query, though some of their columns
        are rotated or absorbed.
        """
        if bool(rotated) == bool(absorbed):
            return None
        if rotated:
            up, rope = rotated[0]
            heads = {rope.heads for _, rope in rotated}
            detail = f"{rope.heads} heads rotated at {rope.node.name}, none absorbed"
            detail += self._in_front_of_absorbed(ups)
            # its line is where W_uk is missing
            absent = Refuse("absorb.absent", detail, (up.node, rope.node))
            unequal = self.scaled_before(ups, heads) or self._shared(ups, rope)
            return unequal or NearMiss(absent, (norm.node, rope.node))
        up, absorb = absorbed[0]
        if absorb.times is not None:
            detail = (
                f"{absorb.times.name} multiplies each token of the query, q_pe before its rotation"
            )
            return NearMiss(Refuse("scale.unequal", detail), (absorb.times, absorb.node))
        detail = f"{absorb.heads} heads absorbed at {absorb.node.name}, none rotated"
        # its line is where the rotation is missing
        reason = Refuse("rope.absent", detail, (up.node, absorb.node))
        return NearMiss(reason, (norm.node, absorb.node))

    def _in_front_of_absorbed(self, ups: list[Projection]) -> str:
        """The product head by head of what steps make of the projections' results."""
        for up, item, node in self._by_heads(ups):
            if peel(node) is not peel(up.node):
                return f"; {item.node.name} multiplies {peel(node).name}, not q_nope"
        return ""

    def _by_heads(self, ups: Iterable[Projection]) -> Iterator[tuple[Projection, Projection, Node]]:
        """Products head by head of what steps make of the projections' results: these, the
        products, and what they multiply.
        """
        for up in ups:
            for node in reached([up.node], self._behind):
                for item in self.on_operand.get(node, ()):
                    if item.batch and not item.is_flat:
                        yield up, item, node

    # -- the questions

    def as_seen(self, seen: Seen) -> NearMiss | None:
        return seen.partial

    def no_key(self, seen: Seen) -> NearMiss:
        query = seen.queries[0]
        detail = f"the query is projected from {seen.x.name}"
        why, steps = self._of_unnormed_key(seen)
        detail += f"; {why}" if why else ""
        reason = Refuse("kv_latent.absent", detail, steps)
        return NearMiss(reason, (query.norm.node, query.absorb.node), lacks="key")

    def _of_unnormed_key(self, seen: Seen) -> tuple[str, tuple[Node, ...]]:
        """What stands beside a rotated key where its latent's norm should, and the step."""
        unnormed = (down for down, cone in seen.facts.items() if cone.ropes and not cone.norms)
        every = map(self._of_another_norm, unnormed)
        return next((found for found in every if found[0]), ("", ()))

    def _of_another_norm(self, down: Projection) -> tuple[str, tuple[Node, ...]]:
        made = dict.fromkeys(self.view.members(down.node))
        statistic = next(filter(_is_normalising, made), None)
        if statistic is None:
            return "", ()
        *_, latent = reached([statistic], lambda node: filter(made.__contains__, node.users))
        of_it = f"made with {statistic.name} of {down.node.name}"
        why, steps = epsilon.misplaced(down.node, latent)
        return (why, steps) if why else (f"{latent.name}, {of_it}, is no RMSNorm", (latent,))

    def computed_weight(self, seen: Seen) -> NearMiss | None:
        """A product of x, or of what its projections make, with what other products make: a weight
        with its adapter added, say.
        """
        ups = (up.node for norm in _norms(seen) for up in self.above[norm.node])
        made = {*(down.node for down in seen.facts), *ups}
        for product, value, weight in self._of_products:
            is_of_x = value is seen.x or not made.isdisjoint(self.view.sources(value))
            if not is_of_x or not made.isdisjoint(self.view.sources(weight)):
                continue
            if self._is_apart(weight, seen.x):
                return self._multiplied_by(product, value, weight)
        return None

    def computed_weights(self) -> list[NearMiss]:
        """The same, where no layer of x is a plain product: of each product head by head of some
        columns, the nearest such product that it is made of.
        """
        computed = {
            product: (product, value, weight)
            for product, value, weight in self._of_products
            if value is peel(self.view.contractions[product].left) and self._is_apart(weight, value)
        }
        parts = (item for item in self.projections if item.batch and self._is_part(item.activation))
        nearest = (
            next(filter(computed.__contains__, _up(item.activation, _FARTHEST)), None)
            for item in (parts if computed else ())
        )
        found = dict.fromkeys(product for product in nearest if product is not None)
        return [self._multiplied_by(*computed[product]) for product in found]

    def _is_apart(self, weight: Node, x: Node) -> bool:
        """Is it computed, by few steps, of nothing that x is made of?"""
        above = {*_up(weight, _FARTHEST)}
        return len(above) < _FARTHEST and above.isdisjoint(_up(x))

    def _multiplied_by(self, product: Node, value: Node, weight: Node) -> NearMiss:
        layers = self.view.sources(weight)
        of_products = layers <= self.view.contractions.keys()
        how = "a product of this graph makes" if of_products else "this graph computes"
        detail = f"{product.name} multiplies {value.name} by {weight.name}, which {how}"
        return NearMiss(Refuse("linear.hidden", detail), (product, min(layers)))

    @cached_property
    def _of_products(self) -> list[tuple[Node, Node, Node]]:
        """Products, with both operands, of which the second is made of other products."""
        return [
            (product.node, peel(value), peel(weight))
            for product in self.view.contractions.values()
            for value, weight in permutations((product.left, product.right))
            if self.view.sources(weight)
        ]

    def no_query(self, seen: Seen) -> NearMiss:
        key = seen.keys[0]
        parts = (key.norm, key.rope, key.operator)
        reason = Refuse("q_lora.absent", f"no normed query latent on {seen.x.name}")
        nodes = tuple(fact.node for fact in parts if fact is not None)
        miss = self.scaled_by_others(next(iter(seen.facts))) or NearMiss(reason, nodes)
        return replace(miss, lacks="query")

    def undecoded(self, seen: Seen) -> NearMiss | None:
        """A norm beside the keys' latents is projected up, and nothing of that is a rotated or an
        absorbed part. Without a key, what steps make of it is multiplied head by head.
        """
        latents = {key.latent for key in seen.keys}
        for norm in (norm for norm in _norms(seen) if norm.node not in latents):
            ups = [up for up in self.above[norm.node] if up.is_flat]
            if ups and (seen.keys or (len(seen.facts) > 1 and any(self._by_heads(ups)))):
                detail = (
                    f"{ups[0].node.name} projects {norm.node.name}; no part of the result is "
                    "rotated or absorbed"
                )
                statistic = next(filter(_is_normalising, self.view.members(ups[0].node)), None)
                if statistic is not None:
                    detail = f"{statistic.name} is of a norm of what {ups[0].node.name} makes"
                code = "rope.absent" if statistic is None else "rope.normed_key"
                return self.scaled_before(ups) or NearMiss(
                    Refuse(code, detail), (ups[0].node, statistic or norm.node)
                )
        return None

    def scaled_before(
        self, ups: Collection[Projection], heads: Collection[int] | None = None
    ) -> NearMiss | None:
        """A product head by head of what would be q_nope, had a value of the graph not been
        multiplied onto it.
        """
        for up in ups:
            cone = self.reader.read(up)
            for operand, reading in cone.readings.items():
                if not reading.single or reading.degree != 1:
                    continue
                for item in self.on_operand[operand]:
                    by_head = (
                        item.batch
                        and not item.is_flat
                        and (heads is None or self._heads(item) in heads)
                    )
                    if by_head and uniform_factor(cone.cone, cone.probe, reading) is None:
                        detail = (
                            f"{item.node.name} multiplies {operand.name}, which is not "
                            f"{up.node.name} times one number"
                        )
                        return NearMiss(Refuse("scale.unequal", detail), (up.node, item.node))
        return None

    def _shared(self, ups: Collection[Projection], rope: RopeFact) -> NearMiss | None:
        """Absorbed heads beside rotated columns that are not as many heads: one query key for all
        of them, say.
        """
        absorb = next((fact for up in ups for fact in self.absorbs(up)), None)
        if absorb is None or absorb.heads == rope.heads:
            return None
        detail = (
            f"{absorb.heads} heads absorbed at {absorb.node.name}, {rope.heads} rotated at "
            f"{rope.node.name}"
        )
        return NearMiss(Refuse("rope.heads_differ", detail), (rope.node, absorb.node))

    def _heads(self, item: Projection) -> int:
        shape = self.view.binding.shape_of(item.weight)
        return prod(shape[item.weight_labels.index(label)] for label in item.batch)

    def quantised_otherwise(self, seen: Seen) -> NearMiss | None:
        """A normed latent that reaches a linear layer quantised, but not by the kernel's
        quantisation.
        """
        for item, values in self._unread.values():
            for down, cone in seen.facts.items():
                norm = next(
                    (
                        norm
                        for norm in cone.norms
                        if self._size_of_rows(values) == len(norm.columns)
                    ),
                    None,
                )
                if norm is not None and self.view.reaches(down.node, values):
                    detail = f"{item.node.name} multiplies {values.name}, made of {norm.node.name}"
                    why = why_otherwise(self.view, item)
                    detail += f"; {why}" if why else ""
                    return NearMiss(Refuse("quant.dynamic", detail), (norm.node, values, item.node))
        return None

    def scaled_by_others(self, item: Projection) -> NearMiss | None:
        """A product of values quantised in this graph, by token scales that are not what quantised
        them gave.
        """
        values = quantised_behind(item.activation)
        read = item.quantised
        if (
            values is None
            or values.op == "placeholder"
            or read is None
            or read.token_scale is None
            or read.dynamic
        ):
            return None
        detail = (
            f"{item.node.name} multiplies by {read.token_scale.name}, which is not the scale of "
            f"{values.name}"
        )
        return NearMiss(Refuse("quant.scale", detail), (values, item.node))

    def _size_of_rows(self, node: Node) -> int:
        return self.view.binding.size(shape_of(node)[-1])

    def unnormed(self, seen: Seen) -> NearMiss | None:
        """A key of one head beside a latent that is projected up and rotated, but is not its
        projection's RMSNorm.
        """
        facts = seen.facts
        keys = [
            rope for cone in facts.values() for rope in cone.ropes if rope.of_one_head is not None
        ]
        if not keys:
            return None
        for down, cone in facts.items():
            for norm in cone.norms:
                up = self._rotated_after(norm.node, facts)
                if up is not None and up.origin is norm.node:
                    rope = keys[0]
                    detail = (
                        f"the key is rotated at {rope.node.name}, and no latent beside it is "
                        "normed in this graph"
                    )
                    return NearMiss(Refuse("kv_latent.absent", detail), (norm.node, rope.node))
                if up is not None:
                    return self._not_the_norm(up, norm)
            up = self._rotated_after(down.node, facts)
            if up is not None:
                return _projected_as_it_is(up, down)
        return None

    def _not_the_norm(self, up: Projection, norm: NormFact) -> NearMiss:
        """A projection of what steps make of a norm."""
        code, why = between_norm_and(self.view, up, "static" in self._offers)
        nodes, barriers = (up.origin, norm.node, up.node), self.view.barriers
        for step in sorted(self.view.sources(up.origin) & barriers.keys()):
            if barriers[step].code == "step.random":
                return NearMiss(Refuse("step.random", barriers[step].detail), (step, *nodes))
        barrier = barriers.get(up.origin)
        detail = f"{up.node.name} projects {up.origin.name}, not the norm {norm.node.name}"
        why = why or (barrier.detail if barrier is not None else "")
        return NearMiss(Refuse(code, f"{detail}; {why}" if why else detail), nodes)

    def unread(self, seen: Seen) -> NearMiss | None:
        """Neither latent is read, and a product head by head is of some columns of what is made of
        one of several products of x: one step stands behind all of them, say.
        """
        facts = seen.facts
        for up, down in self._chains if len(facts) > 1 else ():
            if down not in facts or up in facts:
                continue
            norms = facts[down].norms
            if all(norm.node is not up.origin for norm in norms):
                above = (norm for norm in norms if up in self._ups_after(norm.node, facts))
                norm = next(above, None)
                return self._not_the_norm(up, norm) if norm else _projected_as_it_is(up, down)
        return None

    @cached_property
    def _chains(self) -> list[tuple[Projection, Projection]]:
        """Of each product head by head of some columns, the projection that has them and the one
        that this is made of, by whatever steps.
        """
        flat = (item for item in self.projections if item.is_flat)
        by_node: dict[Node | None, Projection] = {item.node: item for item in flat}
        found = []
        for item in self.projections:
            if item.batch and not item.is_flat and self._is_part(item.activation):
                up = by_node.get(self._above(item.activation))
                down = by_node.get(self._above(up.activation)) if up is not None else None
                found += [(up, down)] if up is not None and down is not None else []
        return found

    def _above(self, node: Node) -> Node | None:
        """The only product that the node is made of, by whatever steps that are known."""

        def is_end(step: Node) -> bool:
            barrier = self.view.barriers.get(step)
            unknown = barrier is not None and barrier.code == "step.unknown"
            return unknown or step in self.view.contractions

        above = reached([node], lambda one: [] if is_end(one) else one.all_input_nodes, _FARTHEST)
        ends = list(filter(is_end, above))
        return ends[0] if len(ends) == 1 else None

    def interrupted(self, seen: Seen) -> NearMiss | None:
        """What is made of a normed latent and is not it, or of it and something else, is projected
        up and absorbed.
        """
        for norm in _norms(seen):
            for up in self._ups_after(norm.node, seen.facts):
                if up.origin is not norm.node and self.absorbs(up):
                    return self._not_the_norm(up, norm)
        return None

    def has_query(self, group: list[Projection]) -> bool:
        """Is there a normed latent on this x that is projected up, through whatever quantises it,
        and rotated?
        """
        norms = (norm for item in group for norm in self.reader.read(item).norms)
        return any(self._rotated_after(norm.node, group) is not None for norm in norms)

    def _rotated_after(self, start: Node, group: Collection[Projection]) -> Projection | None:
        """The projection of what is made of ``start``, by any operators but products, whose result
        is rotated.
        """
        return next(
            (up for up in self._ups_after(start, group) if self.reader.read(up).ropes), None
        )

    def _ups_after(self, start: Node, group: Collection[Projection]) -> Iterator[Projection]:
        for node in reached([start], self._behind):
            yield from (up for up in self.above.get(node, ()) if up.is_flat and up not in group)

    def _behind(self, node: Node) -> Iterator[Node]:
        return behind(self.view, node)

    def normed_key(self, seen: Seen) -> NearMiss | None:
        """Beside the query's latent two norms, of which the narrower stands where the key would be
        rotated as it is.
        """
        if seen.queries:
            query = seen.queries[0].norm.node
        else:
            assert seen.partial is not None
            query = seen.partial.nodes[0]
        others = [norm for norm in _norms(seen) if norm.node is not query]
        if len(others) < 2:
            return None
        latent, key = (
            max(others, key=lambda norm: len(norm.columns)),
            min(others, key=lambda norm: len(norm.columns)),
        )
        if len(latent.columns) == len(key.columns) or set(latent.columns) & set(key.columns):
            return None
        detail = (
            f"{key.node.name} normalises {len(key.columns)} columns beside the latent "
            f"{latent.node.name}"
        )
        return NearMiss(Refuse("rope.normed_key", detail), (key.node, latent.node, query))

    def unrotated_key(self, seen: Seen) -> NearMiss | None:
        """Beside a query that is rotated, a latent of the key's, and nothing of one head that is
        rotated.
        """
        query = seen.queries[0]
        others = (norm.node for norm in _norms(seen) if norm.node is not query.norm.node)
        latent, rotated = next(others, None), query.rope.node
        if latent is None or rotated is None or any(cone.ropes for cone in seen.facts.values()):
            return None
        detail = f"the query is rotated at {rotated.name}, no key beside the latent {latent.name}"
        return NearMiss(Refuse("rope.absent", detail), (rotated, latent))

    def unrotated(self, seen: Seen) -> NearMiss | None:
        """Two weighted norms on one x, one of them projected up and absorbed, and nothing rotated
        (NoPE).
        """
        for cone in seen.facts.values():
            for norm in cone.norms:
                ups = (up for up in self.above[norm.node] if up.is_flat)
                absorbed = [(up, fact) for up in ups for fact in self.absorbs(up)]
                others = any(
                    other.columns != norm.columns or of_other is not cone
                    for of_other in seen.facts.values()
                    for other in of_other.norms
                )
                if absorbed and others:
                    up, fact = absorbed[0]
                    heads, where = len(fact.columns), fact.node.name
                    detail = f"{heads} heads absorbed at {where}, nothing rotated"
                    reason = Refuse("rope.absent", detail, (up.node, fact.node))
                    return NearMiss(reason, (norm.node, fact.node))
        return None

    def unabsorbed(self, seen: Seen) -> NearMiss | None:
        """Two normed latents on one x, each projected up, whose projections meet in attention:
        nothing is rotated.

        Where a target needs no product with W_uk, what is absent is the part that is rotated, or
        handed on as it is.
        """
        norms = [norm for norm in _norms(seen) if norm.gamma is not None]
        ups = [(norm, up) for norm in norms for up in self._ups_after(norm.node, seen.facts)]
        for norm, query in ups:
            for other, key in ups:
                meeting = self._meeting(query, key) if norm.node is not other.node else None
                if meeting is not None:
                    detail = (
                        f"{meeting.name} reads the results of {query.node.name} and "
                        f"{key.node.name}, and nothing is rotated"
                    )
                    code = "rope.absent" if "unabsorbed" in self._offers else "absorb.absent"
                    return NearMiss(Refuse(code, detail), (norm.node, other.node, meeting))
        return None

    def _meeting(self, query: Projection, key: Projection) -> Node | None:
        """The product, or the operator of attention, that reads both."""
        for node in self.view.nodes:
            if node in self.view.contractions or "attention" in op_name(node):
                read = [self.view.sources(operand) for operand in node.all_input_nodes[:2]]
                if len(read) == 2 and query.node in read[0] and key.node in read[1]:
                    return node
        return None

    def direct(self, seen: Seen) -> NearMiss | None:
        """A query that is absorbed, or (beside a key) rotated by heads, as it comes from x, and a
        normed latent.

        Where no latent can be read, one that is absorbed and rotated, beside a product that a cache
        keeps. (Where the key's side alone would do, a step that hides the latent says more.)
        """
        norms, halves = list(_norms(seen)), "key" in self._offers and not seen.keys
        for query, cone in seen.facts.items():
            absorbed = [fact.node for fact in self.absorbs(query)]
            by_heads = [rope.node for rope in cone.ropes if rope.heads > 1]
            rotated = by_heads if seen.keys else []
            kept, has_norm = (
                self._kept(query) if absorbed and by_heads and not norms else (None, False)
            )
            if kept is not None:
                detail = (
                    f"{query.node.name}, absorbed at {absorbed[0].name}, is projected from "
                    f"{query.origin.name}"
                )
                detail += f", and no RMSNorm of {kept.node.name} is found beside it"
                code = "norm.absent" if halves and not has_norm else "q_lora.absent"
                return NearMiss(Refuse(code, detail), (kept.node, absorbed[0]), certain=not halves)
            if norms and (absorbed or rotated):
                how = (
                    f"absorbed at {absorbed[0].name}"
                    if absorbed
                    else f"rotated at {rotated[0].name}"
                )
                detail = f"{query.node.name}, {how}, is projected from {query.origin.name}"
                nodes = (norms[0].node, *(absorbed or rotated)[:1])
                return NearMiss(Refuse("q_lora.absent", detail), nodes, certain=True)
        return None

    def _kept(self, query: Projection) -> tuple[Projection | None, bool]:
        """Another product of the same x, values made of which, by no further product, are written
        to a graph input.

        And whether something like a norm stands between: of a sum, say, or of values that a step
        has picked.
        """
        for item in self.above.get(query.origin, ()):
            if not item.is_flat or item.node is query.node:
                continue
            following: list[Node] = []
            for node in reached([item.node], self._behind):
                following.append(node)
                if (
                    is_writer(node)
                    and isinstance(node.args[0], Node)
                    and input_behind(node.args[0]) is not None
                ):
                    return item, any(map(_is_of_a_norm, following))
        return None, False

    def unknown_steps(self, seen: Seen) -> NearMiss | None:
        """Steps that the pass does not know, on the way of query and key, with a product head by
        head behind them.
        """
        products = {down.node for down in seen.facts}
        found = {
            node: barrier.detail
            for node, barrier in self.view.barriers.items()
            if barrier.code == "step.unknown"
            and any(products & self.view.sources(read) for read in node.all_input_nodes)
        }
        below = reached(found, lambda node: node.users, _FARTHEST)
        heads = (item for node in below for item in self.on_operand.get(node, ()))
        if len(found) < 2 or all(item.is_flat for item in heads):
            return None
        return NearMiss(Refuse("step.unknown", "; ".join(found.values()), tuple(found)), (*found,))

    # -- layers that are no plain product: an unknown operator, or a sum of products (an adapter
    # beside a weight)

    def hidden_query(self, seen: Seen) -> NearMiss | None:
        """The query of this x, where a layer on its way is not one plain product."""
        number = self.view.number(seen.x)
        return next(
            (miss for origin, miss in self._hidden.values() if self.view.number(origin) == number),
            None,
        )

    def hidden_queries(self) -> list[NearMiss]:
        return [miss for _, miss in self._hidden.values()]

    def hidden_latent(self, seen: Seen) -> NearMiss | None:
        """What stands where W_dkv_kr would, beside the query's projection of this x."""
        x, query = seen.x, seen.queries[0].down
        number = self.view.number(x)
        for node in self._unknown:
            if self.view.number(self._unknown[node]) == number:
                return self._hide([node])
        for item in self.above.get(x, ()):
            for member in self.view.members(item.node) if item.node is not query.node else ():
                layers = self._layers(member)
                if len(layers) > 1 and all(self._is_of(layer, number) for layer in layers):
                    return self._hide(layers)
        return None

    @cached_property
    def _hidden(self) -> dict[Node, tuple[Node, NearMiss]]:
        """(x, near miss), by the layer concerned, for every product head by head with a part, or a
        join, of what two layers make of x, where one of the two is hidden.
        """
        found: dict[Node, tuple[Node, NearMiss]] = {}
        for item in self.projections:
            is_some = self._is_part(item.activation) or word(item.origin) in JOINERS
            if item.is_flat or not item.batch or not is_some:
                continue
            ups = self._of_layers(item.activation)
            latent = self._read_by(ups[0]) if ups else None
            downs = self._of_layers(latent) if latent is not None else []
            x = self._read_by(downs[0]) if downs else latent
            layers = next(
                (layers for layers in (ups, downs) if layers and self._is_hidden(layers)), None
            )
            if x is not None and layers is not None and self._readers[self.view.number(x)] > 1:
                found.setdefault(layers[0], (x, self._hide(layers)))
        return found

    def _hide(self, layers: list[Node]) -> NearMiss:
        if len(layers) == 1 and layers[0] in self._unread:
            (item, held), made_of = self._unread[layers[0]], self._origins[layers[0]]
            code, why = between_norm_and(self.view, item, "static" in self._offers)
            if not self._layers(made_of):  # it is a layer of x, not of c_q
                code = "linear.hidden"
            detail = f"{item.node.name} multiplies {held.name}, made of {made_of.name}"
            return NearMiss(Refuse(code, f"{detail}; {why}" if why else detail), (item.node, held))
        names = " and ".join(f"{layer.name} ({called(layer)})" for layer in layers)
        how = "is not known"
        if len(layers) > 1:
            meet = next(node for node in self.view.nodes if self.view.sources(node) >= {*layers})
            is_join = word(meet) in JOINERS
            how = f"make parts that {meet.name} joins" if is_join else "are added up"
        detail = f"{names} {how}"
        return NearMiss(Refuse("linear.hidden", detail), tuple(layers))

    def _is_hidden(self, layers: list[Node]) -> bool:
        """More than one product, or one operator that is none; what keeps the width is no layer but
        a norm, say.
        """
        if len(layers) > 1:  # a step that picks by values, a clamp say, hides a norm or itself
            return all(node in self.view.contractions or node in self._unknown for node in layers)
        if layers[0] in self._unread:
            return True
        width = shape_of(self._unknown[layers[0]])[-1] if layers[0] in self._unknown else None
        return width is not None and not same(shape_of(layers[0])[-1], width)

    @cached_property
    def _unknown(self) -> dict[Node, Node]:
        """What each operator reads, of those that nothing is known of. (To exchange rows with other
        devices is no layer.)
        """
        found = {}
        for node in self.view.nodes:
            barrier = self.view.barriers.get(node)
            if barrier is None or not barrier.is_opaque:
                continue
            if not is_cast(node) and not is_collective(node):
                read = first_rows(node) if is_rows(node) else None
                if read is not None:
                    found[node] = before_quantisation(read)
        return found

    @cached_property
    def _origins(self) -> dict[Node, Node]:
        unread = {layer: before_quantisation(held) for layer, (_, held) in self._unread.items()}
        return {item.node: item.origin for item in self.projections if item.is_flat} | unread

    @cached_property
    def _unread(self) -> dict[Node, tuple[Projection, Node]]:
        """Layers of bytes, and these, whose quantisation is not read: it hides what they are
        layers of.
        """
        return {
            item.node: (item, held)
            for item in self.projections
            if item.is_flat
            and (item.quantised is None or item.quantised.dynamic is None)
            and (held := quantised_behind(item.activation)) is not None
            and is_scaled(held)
        }

    @cached_property
    def _readers(self) -> Counter[int]:
        """How many layers read a value, by its number."""
        return Counter(map(self.view.number, (*self._origins.values(), *self._unknown.values())))

    def _read_by(self, layer: Node) -> Node | None:
        return self._origins.get(layer) or self._unknown.get(layer)

    def _is_of(self, layer: Node, number: int) -> bool:
        """Is the layer one of x, or of what a layer makes of x?"""
        read = self._read_by(layer)
        return read is not None and (self.view.number(read) == number or self._is_of(read, number))

    def _layers(self, node: Node) -> list[Node]:
        """What the node is made of, in graph order, but for random numbers."""
        sources = self.view.sources(node)
        return sorted(source for source in sources if kind_of(source) is not Kind.RANDOM)

    def _of_layers(self, node: Node) -> list[Node]:
        """The same without the scales of what a layer has quantised."""
        layers = self._layers(node)
        return [layer for layer in layers if layer in self._unread] or layers

    def _is_part(self, node: Node) -> bool:
        """Is the node some columns of what was computed?"""
        whole = value_of(peel(node))
        return isinstance(whole, torch.Tensor) and self._numel(node.meta["val"]) < self._numel(
            whole
        )

    def _numel(self, value: torch.Tensor) -> int:
        return prod(self.view.binding.shape(value.shape))


# Which questions are asked, by what was seen: until one has an answer.
_ASKED: dict[str, tuple[Callable[[Diagnosis, Seen], NearMiss | None], ...]] = {
    "query": (
        Diagnosis.hidden_latent,
        Diagnosis.normed_key,
        Diagnosis.unrotated_key,
        Diagnosis.computed_weight,
        Diagnosis.no_key,
    ),
    "key": (
        Diagnosis.quantised_otherwise,
        Diagnosis.hidden_query,
        Diagnosis.unnormed,
        Diagnosis.direct,
        Diagnosis.undecoded,
        Diagnosis.computed_weight,
        Diagnosis.no_query,
    ),
    # a key beside part of a query, by what that part lacks: before that itself is told
    "key, rope.absent": (Diagnosis.direct,),
    "key, absorb.absent": (Diagnosis.interrupted, Diagnosis.computed_weight),
    "part of a query": (Diagnosis.unnormed, Diagnosis.normed_key, Diagnosis.as_seen),
    "": (
        Diagnosis.unnormed,
        Diagnosis.unrotated,
        Diagnosis.direct,
        Diagnosis.unabsorbed,
        Diagnosis.unread,
        Diagnosis.undecoded,
        Diagnosis.unknown_steps,
    ),
}


def behind(view: View, node: Node) -> Iterator[Node]:
    """What reads the node and is no product."""
    return (user for user in node.users if user not in view.contractions)


def _up(node: Node, most: float = inf) -> Iterator[Node]:
    """The node and what it is made of, the nearest first."""
    return reached([node], lambda one: one.all_input_nodes, most)


def _norms(seen: Seen) -> Iterator[NormFact]:
    return (norm for cone in seen.facts.values() for norm in cone.norms)


def _projected_as_it_is(up: Projection, down: Projection) -> NearMiss:
    """No norm stands between the two."""
    detail = f"{up.node.name} projects {up.origin.name}, which is made of {down.node.name}"
    why, steps = epsilon.misplaced(down.node, up.origin)
    detail += f"; {why}" if why else ""
    nodes = tuple(dict.fromkeys((up.origin, down.node, up.node)))
    return NearMiss(Refuse("norm.absent", detail, steps), nodes)


def _is_normalising(node: Node) -> bool:
    return op_name(node).endswith(("norm", "mean", "rsqrt"))


def _is_of_a_norm(node: Node) -> bool:
    """Is the node an operator of a norm, or one number a row?"""
    value = value_of(node)
    one = isinstance(value, torch.Tensor) and value.dim() > 1 and same(value.shape[-1], 1)
    return one or op_name(node).endswith("norm")
