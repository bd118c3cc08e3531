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
from mla_fusion.fx.module_path import label
from mla_fusion.graph import quantise
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import BYTES, MOVES, Value, filled_with, order
from mla_fusion.graph.layout import Layout, Mixed, followed, of_tokens
from mla_fusion.meta.number_formats import NumberFormat
from mla_fusion.operators.known import argument, is_collective
from mla_fusion.operators.table import Kind
from mla_fusion.propose.norms import solved
from mla_fusion.propose.quantised import kind_of, of_blocks, unmoved, unquantised
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
            departure.site = self._with_products(departure.site)
            if used.isdisjoint(departure.site):
                for one in self._refined(departure):
                    seen |= {*one.site}
                    yield one
        for head, ups, steps in self.heads:
            one = self._unproposed(head, ups, steps, seen)
            if one is not None:
                yield one

    def _with_products(self, site: Sequence[Value]) -> tuple[Value, ...]:
        """With the products of matrices of which these are what is brought back to floats."""
        roots = set(site)
        every = (one for each in self.projections.sites.values() for one in each.products)
        return (*site, *(one.dot for one in every if one.root in roots))

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

    @cached_property
    def heads(self) -> list[tuple[Value, list[Value], list[Value]]]:
        """Products head by head, with the flat layers above them, and the steps between."""
        found = []
        for value in self.values:
            if is_layer(value) and not _is_flat(value) and len(value.shape) == 3:
                layers, steps = self.above(_rows(value))
                found.append((value, list(filter(_is_flat, layers)), steps))
        return found

    def _node(self, value: Value) -> Node | None:
        """The node that holds a Value; of one between nodes, one near it that does."""
        stack = [value]
        for one in stack:
            if one in self.graph.nodes:
                return self.graph.nodes[one][0]
            is_moved = one.op in MOVES or one.op == "product"
            near = [each for each in one.sources if not each.model] if is_moved else []
            if len(stack) < _FAR:
                stack += near or self.users.get(one, ())
        return None

    def named(self, *values: Value) -> list[str]:
        """Values by node and dims, each unlike those before it."""
        found, seen = list[str](), set[tuple[str, str]]()
        for value in values:
            node = self._node(value)
            dims = ", ".join(str(self.graph.unbound(size)) for size in value.shape)
            name = node.name if node is not None else value.op
            key = label(node) if node is not None else value.op, dims
            found.append(f"{'another ' * (key in seen)}{name} [{dims}]")
            seen.add(key)
        return found

    def above(self, value: Value) -> tuple[list[Value], list[Value]]:
        """The nearest layers that a Value is made of, and the steps between, in order. A layer that
        another one is made of is none of them.
        """
        layers, steps = self._reached(value)
        further = {above for one in layers for above in self._reached(_rows(one))[0]}
        return _ordered(layers - further or layers), _ordered(steps)

    def _reached(self, value: Value) -> tuple[set[Value], set[Value]]:
        stack, steps, layers = [value], set[Value](), set[Value]()
        while stack and len(steps) < _FAR:
            one = stack.pop()
            if one in steps or one.model or one.op in ("write", "leaf"):
                continue
            if is_layer(one):
                layers.add(one)
            else:
                steps.add(one)
                stack += one.sources
        return layers, steps

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
        (name,) = self.named(value)
        node, op = self._node(value), value.op
        random = next((one for one in (value, *value.sources) if self._is_random(one)), None)
        if random is not None:
            (name,) = self.named(random)
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
            added = next((one for one in value.sources if one.model), None)
            what = f"{float(value.literal[1]):g}" if added is None else self.named(added)[0]
            return "linear.bias", f"{name} adds {what}", value
        if op in ("sum", "join") and len(read) > 1:
            every = dict.fromkeys(one for term in read for one in self.above(term)[0])
            if len(every) > 1 and self._apart(read):
                names = " and ".join(self.named(*[*every][:2]))
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
        """Is it what a layer makes, moved or scaled?"""
        while value.op in MOVES or value.op == "product":
            powers = value.literal[0] if value.op == "product" else [1] * len(value.sources)
            pairs_of = zip(value.sources, powers, strict=True)
            read = [(one, by) for one, by in pairs_of if is_layer(one) or not one.model]
            wide = [(one, by) for one, by in read if prod(one.shape) == prod(value.shape)]
            read = wide if value.op == "product" else read
            if len(read) != 1 or read[0][1] != 1:
                return False
            value = read[0][0]
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
                whole_of = value.sources[0]
                is_moved = any(
                    user.op == "join" and prod(user.shape) >= prod(whole_of.shape)
                    for user in self.users.get(value, ())
                )
                is_less = value.op in ("slice", "gather") and not is_moved
                if is_less and prod(value.shape) < prod(whole_of.shape):
                    name, whole = self.named(value, whole_of)
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
        if not score and departure.score < 1:
            return
        departure.score *= score or 0.5
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
        dots = {*down.dots, *(one.dot for one in down.products)}
        ups = [one for one in self.projections.sites.values() if self._is_above(dots, one.rows)]
        own = {one.dot for one in up.products}
        heads = any(not own.isdisjoint(layers) for _, layers, _ in self.heads)
        normed = [one for one in ups if _has_root(self.above(one.rows)[1])]
        turned = any(_is_turned(one) for one in ups)
        others = _is_turned(down), self._is_kept(down.dots), len(normed) > 1
        count = sum((heads, up in normed, turned, *others))
        if not (heads or up in normed or turned) or count < 2:
            return 0.0
        return 0.5 + 0.08 * count

    def _is_above(self, layers: set[Value], rows: Value) -> bool:
        return not layers.isdisjoint(self.above(rows)[0])

    def _norm(self, down: Site, up: Site) -> Value | None:
        """The norm of a whole row that is the latent, or that it is made of."""
        _, steps = self.above(up.rows)
        for value in reversed(steps):
            reading = down.readings.get(value)
            if reading is not None and reading.kind == "normed":
                columns = reading.columns.tolist()
                is_whole = len({*columns}) == len(columns) == value.shape[-1]
                if is_whole and _holds(down, value):
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
        is_query = at in steps or (at not in down.dots and at.shape[-1:] == up.rows.shape[-1:])
        if at is not up.rows and not is_query:
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
        for one in (*layers, layer):
            found = self._of_bytes(one, one is layer)
            if found is not None:
                return found
        norm = self._norm(down, up) if down is not None and up is not None else None
        if norm is up.rows if up is not None else _has_root(steps) and not self.odd(layers, steps):
            return None
        names = self.named(layer, _rows(layer), *[norm or layers[0]] * bool(norm or layers))
        product, rows = names[:2]
        if norm is not None:
            behind = [one for one in steps if one.serial > norm.serial] or [_rows(layer)]
            odd = self.odd([], behind)
            what = f"; {odd[1]}" if odd is not None and odd[2] is not _rows(layer) else ""
            detail = f"{product} projects {rows}, not the norm {names[2]}{what}"
            code = odd[0] if odd is not None and odd[0] == "step.random" else "q_lora.interrupted"
            return code, detail, odd[2] if odd is not None else behind[0]
        odd = self.odd(layers, steps)
        if odd is not None and odd[0] in _TOLD:
            return odd
        if not layers:
            return None
        detail = f"{product} projects {rows}, which is no RMSNorm of {names[2]}"
        if odd is not None and odd[2] is not _rows(layer):
            detail += f"; {odd[1]}"
        return "norm.absent", detail, odd[2] if odd is not None else _rows(layer)

    def _of_bytes(self, layer: Value, is_up: bool) -> Odd | None:
        """What is wrong with a product of numbers of one byte."""
        weights = [one for one in layer.sources if one.weight]
        held = [leaf for one in weights for leaf in order([one]) if leaf.op == "leaf"]
        rows, node = _rows(layer), self._node(layer)
        product, name = self.named(layer, rows)
        if layer.op == "opaque" and node is not None:
            bias = argument(node, "bias")
            if bias is not None:
                return "linear.bias", f"{product} ({node.target}) adds {bias.name}", layer
        of_bytes = next((leaf.dtype for leaf in held if leaf.dtype.itemsize == 1), None)
        _, above = self.above(rows)
        is_rounded = kind_of(rows) is not None or any(map(_rounds, (rows, *above)))
        if of_bytes is not None and not is_rounded:
            detail = f"{product} multiplies {name} by a weight of {of_bytes}"
            return "quant.weights_only", detail, layer
        if layer.op == "opaque" and not (is_up and of_bytes):
            target = node.target if node is not None else layer.literal[0]
            return "linear.hidden", f"{product} ({target}) {Kind.OPAQUE.value}", layer
        if is_up and of_bytes and unquantised(self.form, rows) is None:
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
                one, other = self.named(layer, own)
                detail = f"{one} and {other} read forms of x in different formats"
                return "quant.mixed", detail, layer
            if _rows(layer) is not _rows(own) and kind_of(_rows(own)) is not None:
                one, other = self.named(layer, own)
                detail = f"{one} and {other} read different quantised forms of x"
                return "quant.tokens_differ", detail, layer
            found = self._of_bytes(layer, is_up=False)
            if found is not None:
                return found
        odd = self.odd(beside, self.below(beside)) if beside else None
        if odd is not None and odd[0]:
            return odd
        further = self.odd(up.dots, self.below(up.dots))
        if further is not None and further[0] == "linear.hidden":
            return further
        first, rows = self.named(own, down.rows)
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
        return self._of_part(up, 0)

    def _of_part(self, site: Site, width: int) -> Odd | None:
        """A step behind products: one that is none of a prologue's, or a norm of ``width``."""
        steps = self.below(site.dots)
        odd = self.odd(site.dots, steps)
        normed = next((one for one in steps if _is_normed(one, site.tokens, width)), None)
        if normed is not None and (odd is None or normed.serial < odd[2].serial):
            return "rope.normed_key", f"{self.named(normed)[0]} is normed", normed
        return odd if odd is not None and odd[0] else None

    def _read(self, departure: Departure, down: Site, up: Site) -> Odd | None:
        """Where something reads what the kernel keeps: a product with W_uk that is added to."""
        own = {one.dot for one in up.products}
        heads = [one for one, layers, _ in self.heads if not own.isdisjoint(layers)]
        odd = self.odd(heads, self.below(heads))
        return odd if odd is not None and odd[0] == "linear.bias" else None

    def _proof(self, departure: Departure, down: Site, up: Site) -> Odd | None:
        kinds = [site.products[0].kind for site in (down, up)]
        names = self.named(down.dots[0], up.dots[0])
        of_x, kind = kinds
        if of_x is not kind and (of_x or (kind and not kind.partial)):
            formats = [one.name if one is not None else "floats" for one in kinds]
            detail = f"{names[0]} multiplies {formats[0]}, {names[1]} {formats[1]}"
            return "quant.mixed", detail, up.dots[0]
        part, at = departure.detail.partition(" ")[0], departure.values[0]
        if part in ("query_rope", "kr_rows") and _is_turned(down):
            return "rope.tables_differ", f"{self.named(at)[0]}: {departure.detail}", at
        if kind is not None and part == "query":
            return self._quantised(down, up, kind)
        made_of = set(order([at], up.dots))
        for value in self.below(up.dots) if part == "query" else ():
            factors = [one for one in value.sources if not one.active and filled_with(one) is None]
            if value.op == "product" and value in made_of and factors:
                by, whole = self.named(factors[0], value)
                return "scale.unequal", f"{by} multiplies {whole}", value
        return None

    def _quantised(self, down: Site, up: Site, kind: NumberFormat) -> Odd | None:
        """Which of the bytes and the scales of latents are not the kernel's."""
        form, norm = self.form, self._norm(down, up)
        if norm is None:
            return None
        product, rows = self.named(up.dots[0], up.rows)
        if kind.in_blocks:
            held, own = of_blocks(form, up.rows), quantise.by_block(form, norm)
            is_same = held is not None and unmoved(held[0]) is unmoved(own[0])
        else:
            is_same = unmoved(up.rows) is unmoved(quantise.by_row(form, norm, kind)[0])
        detail = f"{product} multiplies {rows}"
        if is_same:
            return "quant.scale", f"{detail} by scales that its quantisation did not give", up.rows
        return "quant.dynamic", detail, up.rows

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
            if up.products[0].kind is not None and not up.products[0].factors:
                (product,) = self.named(up.products[0].dot)
                return "quant.scale", f"{product} is multiplied by no scale of columns", query
            names = " and ".join(self.named(query, key))
            ratio = of_query.diagonal * power(of_key.diagonal, -1) % P
            if bool((ratio == ratio[:, :1]).all()):
                return "scale.unequal", f"{names} are rotated alike, and scaled differently", key
            return "rope.tables_differ", f"{names} are rotated, by tables that differ", key
        for value, one in turned[1]:
            if not turned[0] and len(one.columns) > _ROPE and pairs(one, _ROPE):
                query, rows = self.named(value, down.rows)
                return "q_lora.absent", f"{query} is rotated, and made of {rows}", value
        found = [self._of_part(up, 0)] if not queries else []
        found += [self._of_part(down, _ROPE)] if not keys else []
        return next(filter(None, found), None)

    # -- what was not proposed

    def _unproposed(
        self, head: Value, ups: list[Value], steps: list[Value], seen: set[Value]
    ) -> Departure | None:
        """Of a product head by head of some columns of layers."""
        if not ups or not seen.isdisjoint(ups):
            return None
        up, (heads, _, nope) = ups[0], _rows(head).shape
        if heads * nope > sum(one.shape[-1] for one in ups):
            return None
        downs, between = self.above(_rows(up))
        beside = self._beside(_rows(up), ups)
        if self._is_kept(beside):
            product, absorbed, rows = self.named(up, head, _rows(up))
            detail = f"{product}, which {absorbed} multiplies head by head, projects {rows}"
            odd: Odd | None = ("q_lora.absent", detail, up)
            layers = [*ups, *beside]
        else:
            beside = self._beside(_rows(downs[0]), downs) if downs else []
            if not (self._is_kept(beside) or _has_root(between)):
                return None
            layers = [*ups, *downs, *beside]
            odd = self._between(downs, between, up) or self.odd(ups, steps)
        if odd is None or not seen.isdisjoint(layers):
            return None
        made = Departure(odd[0] or "absorb.absent", odd[1], [odd[2]])
        made.site, made.score = tuple(layers), 0.5
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
    "proof.differs": Departures._proof,
    "reader.latent": Departures._read,
}


def _ordered(values: Iterable[Value]) -> list[Value]:
    return sorted(values, key=lambda one: one.serial)


def _holds(site: Site, value: Value) -> bool:
    try:
        solved(site, value, "latents")
    except Departure:
        return False
    return True


def _rounds(value: Value) -> bool:
    is_named = value.op == "function" and value.literal[0] in _ROUNDS
    is_quantised = value.op == "opaque" and "quant" in str(value.literal)
    return value.dtype.itemsize == 1 or is_named or is_quantised


def _is_turned(site: Site) -> bool:
    return any(one.kind == "turned" for one in site.readings.values())


def _has_root(steps: Iterable[Value]) -> bool:
    return any(
        one.op == "product" and any(power.denominator == 2 for power in one.literal[0])
        for one in steps
    )


def _is_normed(value: Value, tokens: int, width: int) -> bool:
    """Is it, or are its heads, divided by a root: ``width`` elements a token, or any number?"""
    size = prod(value.shape) // max(tokens, 1)
    return _has_root([value]) and size > 1 and value.shape[-1] > 1 and size == (width or size)
