"""Why what looks like a prologue is none: which part is missing, and what stands in its place.

The way between two products is walked in the order of the graph. The first step on it that the
kernel does not have is the reason. Where no proposal was made, the way begins at a product head by
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import prod

import torch
from torch.fx import Node

from mla_fusion.exact.field import P, power
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import BYTES, MOVES, Value, order
from mla_fusion.graph.layout import Layout, Mixed, followed, of_tokens
from mla_fusion.operators.known import argument, is_collective
from mla_fusion.operators.table import Kind
from mla_fusion.propose.norms import solved
from mla_fusion.propose.quantised import kind_of, unquantised
from mla_fusion.propose.rotations import pairs
from mla_fusion.propose.sites import Projections, Site

_FAR = 300  # steps between two products
_ROPE = 64
_OF_QUANTISATION = BYTES | {"size", "largest", "mxfp8", "power of two", "byte", "as"}
_ROUNDS = _OF_QUANTISATION | {"whole", "to whole", "to"}
_SMOOTH = frozenset("sigmoid exp tanh erf sin cos log softplus number".split())
Odd = tuple[str, str, Value]  # a code, or "" for that of the part; a sentence; the step


def reported(
    projections: Projections, found: Sequence[Departure], fused: Iterable[Value]
) -> list[Departure]:
    """One departure for each prologue, in the order of the graph.

    found  what was raised, each with its site
    fused  the products of plans, of which nothing is said
    """
    return Departures(projections).reported(found, set(fused))


def is_layer(value: Value) -> bool:
    """Is it a product with a weight, or an operator that stands where one would?"""
    if value.op == "dot":
        return value.sources[1].weight
    if value.op != "opaque" or value.model:
        return False
    has_matrix = any(one.weight and len(one.shape) > 1 for one in value.sources)
    return has_matrix and _rows(value).shape[-1:] != value.shape[-1:]


def _rows(layer: Value) -> Value:
    return next(one for one in layer.sources if not one.model)


def _is_flat(layer: Value) -> bool:
    return layer.op == "opaque" or len(layer.sources[1].shape) == 2


class Departures:
    """Of one graph."""

    def __init__(self, projections: Projections) -> None:
        self.projections, self.graph = projections, projections.graph
        self.form = projections.form

    def reported(self, found: Sequence[Departure], used: set[Value]) -> list[Departure]:
        every = list(self._near(found, used))
        taken, kept = set(used), list[Departure]()
        for one in sorted(every, key=lambda one: -one.score):
            if taken.isdisjoint(one.site):
                taken |= {*one.site}
                kept.append(one)
        return [one for one in every if any(one is other for other in kept)]

    def _near(self, found: Sequence[Departure], used: set[Value]) -> Iterator[Departure]:
        seen = set(used)
        for departure in found:
            seen |= {*departure.site}
            if used.isdisjoint(departure.site):
                yield from self._refined(departure)
        for head in self.values:
            if is_layer(head) and not _is_flat(head):
                one = self._unproposed(head, seen)
                if one is not None:
                    yield one

    # -- the graph

    @cached_property
    def values(self) -> list[Value]:
        """All that is made of inputs, in order."""
        return sorted(
            (one for one in order(self.graph.nodes) if not one.model), key=lambda one: one.serial
        )

    @cached_property
    def users(self) -> dict[Value, list[Value]]:
        found: dict[Value, list[Value]] = {}
        for value in self.values:
            for source in value.sources:
                found.setdefault(source, []).append(value)
        return found

    def _node(self, value: Value) -> Node | None:
        """The node that holds a Value; of one between nodes, the next that does."""
        stack = [value]
        for one in stack:
            if one in self.graph.nodes:
                return self.graph.nodes[one][0]
            if len(stack) < _FAR:
                stack += self.users.get(one, ())
        return None

    def _named(self, *values: Value) -> list[str]:
        """Values by node and dims, each unlike those before it."""
        found = list[str]()
        for value in values:
            node = self._node(value)
            dims = ", ".join(str(self.graph.unbound(size)) for size in value.shape)
            name = f"{node.name if node is not None else value.op} [{dims}]"
            found.append(name)
        return found

    def above(self, value: Value) -> tuple[list[Value], list[Value]]:
        """The nearest layers that a Value is made of, and the steps between, in order."""
        stack, seen, layers = [value], set[Value](), set[Value]()
        while stack and len(seen) < _FAR:
            one = stack.pop()
            if one in seen or one.model or one.op in ("write", "leaf"):
                continue
            if is_layer(one):
                layers.add(one)
            else:
                seen.add(one)
                stack += one.sources
        return _ordered(layers), _ordered(seen)

    def below(self, starts: Iterable[Value]) -> list[Value]:
        """The steps behind layers, up to the next layers, writes and attention."""
        seen, steps = set(starts), list[Value]()
        heap = [(one.serial, one) for one in seen]
        heapify(heap)
        pushed = set(seen)
        while heap and len(steps) < _FAR:
            _, one = heappop(heap)
            if one not in seen:
                others = [s for s in one.sources if s.active and s not in seen]
                if one.op == "write" or is_layer(one) or (others and one.op in ("dot", "opaque")):
                    continue
                if "attention" in str(one.literal):
                    continue
                steps.append(one)
                if others:
                    continue
                seen.add(one)
            for user in self.users.get(one, ()):
                if user not in pushed:
                    pushed.add(user)
                    heappush(heap, (user.serial, user))
        return steps

    # -- steps that the kernel does not have

    def odd(self, layers: Sequence[Value], steps: Sequence[Value]) -> Odd | None:
        """The first of the steps behind layers that is none of a prologue's."""
        tokens = layers[0].shape[0] if layers and layers[0].shape else 1
        cut = self._cut(layers, steps)
        for value in steps:
            found = cut if cut is not None and cut[2] is value else None
            found = found or self._odd(value, layers, tokens)
            if found is not None:
                return found
        return None

    def _odd(self, value: Value, layers: Sequence[Value], tokens: int) -> Odd | None:
        (name,) = self._named(value)
        node, op = self._node(value), value.op
        random = next((one for one in (value, *value.sources) if self._is_random(one)), None)
        if random is not None:
            (name,) = self._named(random)
            return "step.random", f"{name} {Kind.RANDOM.value}", random
        if op == "opaque":
            operator = node.target if node is not None else value.literal[0]
            if node is not None and is_collective(node):
                return "step.unknown", f"{name} ({operator}) exchanges values with others", value
            return "step.unknown", f"{name} ({operator}) {Kind.OPAQUE.value}", value
        if op == "function" and value.literal[0] not in _OF_QUANTISATION:
            is_smooth = value.literal[0] in _SMOOTH
            what = f"{name} is no step of a prologue" if is_smooth else f"{name} {_PICKS}"
            return "" if is_smooth else "step.choice", what, value
        if op == "cast" and (value.dtype.itemsize == 1 or not value.is_float):
            dtype = str(value.dtype).removeprefix("torch.")
            return "step.choice", f"{name} rounds to {dtype}", value
        read = [one for one in value.sources if not one.model]
        is_vector = op == "sum" and len(read) == 1 and prod(value.shape) > tokens
        if is_vector and self._is_of_layer(read[0]):
            (product,) = self._named(read[0])
            return "linear.bias", f"{name} adds what is not made of x to {product}", value
        if op in ("sum", "join") and len(read) > 1:
            every = dict.fromkeys(one for term in read for one in self.above(term)[0])
            if len(every) > 1 and self._apart(read):
                names = " and ".join(self._named(*[*every][:2]))
                how = "adds up" if op == "sum" else "joins"
                return "linear.hidden", f"{name} {how} what {names} make", value
        return None

    def _apart(self, terms: Sequence[Value]) -> bool:
        """Are terms made of layers of which the others are not?"""
        made = [set(self.above(term)[0]) for term in terms]
        return any(one and other and one.isdisjoint(other) for one in made for other in made)

    def _is_random(self, value: Value) -> bool:
        node = self._node(value) if value.op == "opaque" else None
        return torch.Tag.nondeterministic_seeded in getattr(
            getattr(node, "target", None), "tags", ()
        )

    def _is_of_layer(self, value: Value) -> bool:
        while value.op in MOVES or (value.op == "product" and value.sources):
            read = [one for one in value.sources if not one.model]
            if len(read) != 1:
                return False
            (value,) = read
        return is_layer(value)

    def _cut(self, layers: Sequence[Value], steps: Iterable[Value]) -> Odd | None:
        """The first step that keeps some of the tokens alone."""
        flat = (one for one in layers if len(one.shape) == 2)
        known: dict[Value, Layout] = {one: of_tokens(one.shape[:1], one.shape[1:]) for one in flat}
        for value in steps:
            if not any(source in known for source in value.sources):
                continue
            try:
                known[value] = followed(value, known)
            except Mixed:
                is_less = value.op in ("slice", "gather")
                if is_less and prod(value.shape) < prod(value.sources[0].shape):
                    name, whole = self._named(value, value.sources[0])
                    return "tokens.cut", f"{name} has some of the tokens of {whole}", value
        return None

    # -- what was raised

    def _refined(self, departure: Departure) -> Iterator[Departure]:
        sites = [one for one in self.projections.sites.values() if departure.site]
        own = {*departure.site}
        down, up = self._sites(sites, own)
        if down is None or up is None:
            yield departure
            return
        score = self._likeness(down, up)
        if score < 0.5 and departure.score < 1:
            return
        departure.score = min(departure.score, score)
        refined = _REFINED.get(departure.code)
        other = refined(self, departure, down, up) if refined is not None else None
        if other is not None:
            code, detail, value = other
            made = Departure(code or departure.code, detail, [value])
            made.site, made.score = departure.site, departure.score
            departure = made
        yield departure

    def _sites(self, sites: list[Site], own: set[Value]) -> tuple[Site | None, Site | None]:
        both = [site for site in sites if not own.isdisjoint(site.dots)]
        for down in both:
            for up in both:
                if up in down.ahead:
                    return down, up
        return None, None

    def _likeness(self, down: Site, up: Site) -> float:
        """How much of a prologue the products of two sites are part of; below 0.5, of none."""
        users = self.projections.users
        heads = any(
            is_layer(user) and not _is_flat(user)
            for value in up.layouts
            for user in users.get(value, ())
        )
        latents = self._norm(down, up) is not None
        kinds = [{one.kind for one in site.readings.values()} for site in (up, down)]
        turned = ["turned" in each for each in kinds]
        written = self._is_kept(down.dots)
        parts = (heads, latents, *turned, written)
        if not (heads or latents or turned[0]) or sum(parts) < 2:
            return 0.0
        return 0.5 + 0.1 * sum(parts) - 0.01

    def _norm(self, down: Site, up: Site) -> Value | None:
        """The norm of a whole row that is the latent, or that it is made of."""
        _, steps = self.above(up.rows)
        for value in reversed(steps):
            reading = down.readings.get(value)
            if reading is not None and reading.kind == "normed":
                columns = reading.columns.tolist()
                if len({*columns}) == len(columns) == value.shape[-1]:
                    return value
        return None

    def _is_kept(self, starts: Iterable[Value]) -> bool:
        """Is something that the products make written into what comes in, or joined to it?"""
        seen = {*starts, *self.below(starts)}
        readers = (user for one in seen for user in self.users.get(one, ()))
        return any(
            user.op == "write"
            or (user.op == "join" and any(one.op == "leaf" for one in user.sources))
            for user in readers
        )

    def _latent(self, departure: Departure, down: Site, up: Site) -> Odd | None:
        """In place of a norm of the query's latents, or of the key's."""
        layers, steps = self.above(up.rows)
        at = departure.values[0] if departure.values else up.rows
        if at is not up.rows and at not in steps and not _is_made(up.rows, at):
            return self._key(departure, down, up)
        return self._between(layers, steps, up.products[0].dot, down, up)

    def _between(
        self,
        layers: Sequence[Value],
        steps: Sequence[Value],
        layer: Value,
        down: Site | None = None,
        up: Site | None = None,
    ) -> Odd | None:
        """What is wrong with latents, between layers and the next."""
        product, rows = self._named(layer, _rows(layer))
        for one in (layer, *layers):
            found = self._of_bytes(one, steps if one is layer else None)
            if found is not None:
                return found
        norm = None
        if down is not None and up is not None:
            norm = self._norm(down, up)
            if norm is not None and not _holds(down, norm):
                norm = None
        if norm is not None and norm is not up.rows:  # type: ignore[union-attr]
            behind = [one for one in steps if one.serial > norm.serial] or [_rows(layer)]
            (normed,) = self._named(norm)
            odd = self.odd([], behind)
            what = odd[1] if odd is not None else f"{rows} is not {normed}"
            code = odd[0] if odd is not None and odd[0] == "step.random" else "q_lora.interrupted"
            step = odd[2] if odd is not None else behind[0]
            return code, f"{product} projects {rows}, not the norm {normed}; {what}", step
        odd = self.odd(layers, steps)
        if odd is not None and odd[0] in _TOLD:
            return odd
        if not layers:
            return None
        (first,) = self._named(layers[0])
        detail = f"{product} projects {rows}, which is no RMSNorm of {first}"
        if odd is not None:
            detail += f"; {odd[1]}"
        return "norm.absent", detail, odd[2] if odd is not None else _rows(layer)

    def _of_bytes(self, layer: Value, steps: Sequence[Value] | None) -> Odd | None:
        """What is wrong with a product of numbers of one byte."""
        weights = [one for one in layer.sources if one.weight]
        held = [leaf for one in weights for leaf in order([one]) if leaf.op == "leaf"]
        (product,) = self._named(layer)
        rows = _rows(layer)
        if layer.op == "opaque":
            node = self._node(layer)
            assert node is not None
            bias = argument(node, "bias")
            if bias is not None:
                return "linear.bias", f"{product} ({node.target}) adds {bias.name}", layer
        if not any(leaf.dtype.itemsize == 1 for leaf in held):
            if layer.op == "opaque":
                node = self._node(layer)
                return "linear.hidden", f"{product} ({node.target}) {Kind.OPAQUE.value}", layer
            return None
        _, above = self.above(rows)
        is_rounded = kind_of(rows) is not None or any(
            one.dtype.itemsize == 1
            or (one.op == "function" and one.literal[0] in _ROUNDS)
            or (one.op == "opaque" and "quant" in str(one.literal))
            for one in (rows, *above)
        )
        (name,) = self._named(rows)
        if not is_rounded:
            detail = f"{product} multiplies {name} by a weight of {held[0].dtype}"
            return "quant.weights_only", detail, layer
        if steps is not None and (layer.op == "opaque" or unquantised(self.form, rows) is None):
            return "quant.dynamic", f"{product} multiplies {name}", layer
        return None

    def _key(self, departure: Departure, down: Site, up: Site) -> Odd | None:
        query, _ = self.above(up.rows)
        x = self._origin(down.rows)
        beside = [
            one
            for one in self.values
            if is_layer(one)
            and _is_flat(one)
            and one not in query
            and self._origin(_rows(one)) is x
        ]
        own = next((one for one in query), down.products[0].dot)
        for layer in beside:
            if kind_of(_rows(layer)) is not kind_of(_rows(own)):
                one, other = self._named(layer, own)
                detail = f"{one} and {other} read forms of x in different formats"
                return "quant.mixed", detail, layer
            if _rows(layer) is not down.rows:
                one, other = self._named(layer, own)
                detail = f"{one} and {other} read different quantised forms of x"
                return "quant.tokens_differ", detail, layer
            found = self._of_bytes(layer, None)
            if found is not None:
                return found
        odd = self.odd(beside, self.below(beside)) if beside else None
        if odd is not None and odd[0]:
            return odd
        first, rows = self._named(own, down.rows)
        detail = f"{first} projects {rows}, and {departure.detail}"
        return "kv_latent.absent", detail, departure.values[0]

    def _origin(self, rows: Value) -> Value:
        """Rows as they are before they are quantised."""
        while True:
            inner = unquantised(self.form, rows) if rows.op != "opaque" else None
            if inner is None and rows.op in ("cast", "reshape"):
                inner = rows.sources[0]
            if inner is None and rows.op == "opaque" and "quant" in str(rows.literal):
                inner = next((one for one in rows.sources if not one.model), None)
            if inner is None:
                return rows
            rows = inner

    def _absorb(self, departure: Departure, down: Site, up: Site) -> Odd | None:
        odd = self.odd(up.dots, self.below(up.dots))
        return odd if odd is not None and odd[0] else None

    def _rope(self, departure: Departure, down: Site, up: Site) -> Odd | None:
        turned = [
            [(value, one) for value, one in site.readings.items() if one.kind == "turned"]
            for site in (up, down)
        ]
        queries = [(value, found) for value, one in turned[0] if (found := pairs(one, _ROPE))]
        keys = [
            (value, found)
            for value, one in turned[1]
            if len(one.columns) == _ROPE and (found := pairs(one, _ROPE))
        ]
        if queries and keys:
            (query, of_query), (key, of_key) = queries[-1], keys[-1]
            names = " and ".join(self._named(query, key))
            ratio = of_query.diagonal * power(of_key.diagonal, -1) % P
            if bool((ratio == ratio[:, :1]).all()):
                return "scale.unequal", f"{names} are rotated alike, and scaled differently", key
            return "rope.tables_differ", f"{names} are rotated by different tables", key
        for site, parts in ((up, queries), (down, keys)):
            if not parts:
                odd = self.odd(site.dots, self.below(site.dots))
                if odd is not None and odd[0]:
                    return odd
        return None

    # -- what was not proposed

    def _unproposed(self, head: Value, seen: set[Value]) -> Departure | None:
        """Of a product head by head of some columns of a layer."""
        ups, steps = self.above(_rows(head))
        ups = [one for one in ups if _is_flat(one)]
        if not ups or len(head.shape) != 3 or not seen.isdisjoint(ups):
            return None
        up = ups[0]
        heads, _, nope = _rows(head).shape
        if heads * nope > up.shape[-1] * len(ups):
            return None
        downs, between = self.above(_rows(up))
        beside = self._beside(_rows(up), ups)
        product, rows = self._named(up, _rows(up))
        (absorbed,) = self._named(head)
        if self._is_kept(beside):
            detail = f"{product}, which {absorbed} multiplies head by head, projects {rows}"
            odd: Odd | None = ("q_lora.absent", detail, up)
            site = [*ups, *beside]
        else:
            downs = [one for one in downs if _is_flat(one)]
            if not downs:
                return None
            beside = self._beside(_rows(downs[0]), downs)
            if not self._is_kept(beside):
                return None
            site = [*ups, *downs, *beside]
            odd = self._between(downs, between, up) or self.odd(ups, steps)
        if odd is None or not seen.isdisjoint(site):
            return None
        made = Departure(odd[0] or "absorb.absent", odd[1], [odd[2]])
        made.site, made.score = tuple(site), 0.5
        return made

    def _beside(self, rows: Value, layers: Sequence[Value]) -> list[Value]:
        """Other layers of the same rows."""
        x = self._origin(rows)
        return [
            one
            for one in self.values
            if is_layer(one) and _is_flat(one) and one not in layers
            if self._origin(_rows(one)) is x
        ]


_TOLD = ("step.random", "linear.bias", "linear.hidden", "tokens.cut")
_PICKS = "picks by the values it reads"
_REFINED: dict[str, Callable[[Departures, Departure, Site, Site], Odd | None]] = {
    "norm.absent": Departures._latent,
    "absorb.absent": Departures._absorb,
    "rope.absent": Departures._rope,
}


def _ordered(values: Iterable[Value]) -> list[Value]:
    return sorted(values, key=lambda one: one.serial)


def _is_made(value: Value, of: Value) -> bool:
    return of in order([value])


def _holds(site: Site, value: Value) -> bool:
    try:
        solved(site, value, "latents")
    except Departure:
        return False
    return True
