"""Why what looks like a prologue is none: which part is missing, and what stands in its place.

The way between two products is walked in the order of the graph. The first step on it that the
kernel does not have is the reason. Where nothing was proposed, the way begins at a product head by
head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from torch.fx import Node

from mla_fusion.exact.field import power
from mla_fusion.fx import kinds
from mla_fusion.fx.kinds import argument
from mla_fusion.fx.module_path import label
from mla_fusion.graph import quantise
from mla_fusion.graph.call import RULES, name_of
from mla_fusion.graph.departure import UNKNOWN, Departure
from mla_fusion.graph.form import BYTES, MOVES, Value, filled_with, order
from mla_fusion.graph.layout import Layout, Mixed, layout_of, token_layout
from mla_fusion.meta.number_formats import NumberFormat
from mla_fusion.propose.norms import read_norm
from mla_fusion.propose.quantised import operand_format, split_blocks, strip_views, unquantised_rows
from mla_fusion.propose.rotations import Pairs, read_pairs
from mla_fusion.propose.sites import POINT, Projections, Site

_FAR = 300  # steps between two products
_ROPE = 64
_OF_QUANTISATION = BYTES | {"size", "largest", "mxfp8", "power of two", "byte", "as"}
_ROUNDS = _OF_QUANTISATION | {"whole", "to whole", "to"}
_IN_ANY_PART = ("step.random", "linear.bias", "linear.hidden", "tokens.cut")
# every other function of one value has a corner somewhere
_SMOOTH = frozenset(
    """
    asinh atan cos cosh erf erfc exp exp2 expm1 gelu log log10 log1p log2 logaddexp logit mish
    sigmoid sin sinc sinh tan tanh
    """.split()
)
_EXCHANGES = "exchanges values with other devices"


class Reason(NamedTuple):
    """
    code    "" for that of the part
    text    with %s for each Value that it names
    at      the Value to look at, where that is not the first
    """

    code: str
    text: str
    values: tuple[Value, ...]
    at: Value | None = None

    @property
    def step(self) -> Value:
        return self.values[0] if self.at is None else self.at


def reported(
    projections: Projections, found: Sequence[Departure], fused: Iterable[Value]
) -> list[Departure]:
    """One departure for each prologue, in the order of the graph.

    found  what was raised, each with its site
    fused  the products of plans, of which nothing is said
    """
    taken, kept = set(fused), list[Departure]()
    every = list(_Departures(projections).every(found, taken))
    for one in sorted(every, key=lambda one: -one.score):
        is_told = any((one.code, one.values) == (other.code, other.values) for other in kept)
        if taken.isdisjoint(one.site) and not is_told:
            taken |= {*one.site}
            kept.append(one)
    return sorted(kept, key=lambda one: min(map(_serial, one.site), default=0))


def _is_layer(value: Value) -> bool:
    """Is it a product with a weight, or an operator that stands where one would?"""
    if value.op == "dot":
        return value.sources[1].weight
    has_matrix = any(one.weight and len(one.shape) > 1 for one in value.sources)
    is_opaque = value.op == "opaque" and has_matrix and not value.model
    return is_opaque and _rows(value).shape[-1:] != value.shape[-1:]


def _rows(layer: Value) -> Value:
    return next(one for one in layer.sources if not one.model)


def _is_flat(layer: Value) -> bool:
    return layer.op == "opaque" or len(layer.sources[1].shape) == 2


class _Departures:
    """Of one graph."""

    def __init__(self, projections: Projections) -> None:
        self.projections, self.graph = projections, projections.graph
        self.form = projections.form

    def every(self, found: Sequence[Departure], used: set[Value]) -> Iterator[Departure]:
        seen = set(used)
        for departure in found:
            departure.site = self._with_products(departure.site)
            refined = self._refined(departure) if used.isdisjoint(departure.site) else None
            if refined is not None:
                seen |= {*refined.site}
                yield refined
        for head, ups, steps in self.heads:
            if ups and seen.isdisjoint(ups):
                yield from self._unproposed(head, ups, steps, seen)

    def _with_products(self, roots: Sequence[Value]) -> tuple[Value, ...]:
        """With the products of matrices of which these are what is brought back to floats."""
        every = (one for site in self.projections.sites.values() for one in site.products)
        return (*roots, *(one.dot for one in every if one.root in {*roots}))

    def _made(self, reason: Reason, code: str, site: Sequence[Value], score: float) -> Departure:
        made = Departure(reason.code or code, self.said(reason), [reason.step])
        made.site, made.score = tuple(site), score
        return made

    # -- names

    def _node(self, value: Value) -> Node | None:
        """The node that holds a Value; of one between nodes, one near it that does."""
        stack = [value]
        for one in stack:
            if one in self.graph.nodes:
                return self.graph.nodes[one][0]
            if one in self.graph.enclosing:
                return self.graph.enclosing[one]
            size = prod(one.shape) if one.op in ("product", "reshape") else -1
            near = [each for each in one.sources if not each.model and prod(each.shape) == size]
            if len(stack) < _FAR:
                stack += near or self.users.get(one, one.sources)
        return None

    def said(self, reason: Reason) -> str:
        """With Values by node and dims, each unlike those before it."""
        names, seen = list[str](), dict[object, Node | None]()
        for value in reason.values:
            node = self._node(value)
            name = value.op if node is None else node.name
            held = None if node is None or value not in self.graph.nodes else node.meta.get("val")
            shape = getattr(held, "shape", value.shape)
            dims = ", ".join(map(self._dim, shape))
            key = name if node is None else label(node), dims
            another = "another " if seen.setdefault(key, node) is not node else ""
            names.append(f"{another}{name} [{dims}]")
        return reason.text % tuple(names)

    def _dim(self, size: object) -> str:
        try:
            return str(self.graph.unbound(size) if isinstance(size, int) else size)
        except LookupError:
            return "?"

    # -- the way between products

    @cached_property
    def values(self) -> list[Value]:
        """All that is made of inputs, in order."""
        return _ordered(one for one in order(self.graph.nodes) if not one.model)

    @cached_property
    def users(self) -> dict[Value, list[Value]]:
        found: dict[Value, list[Value]] = {}
        for value in self.values:
            for source in value.sources:
                found.setdefault(source, []).append(value)
        return found

    @cached_property
    def layers(self) -> dict[Value, list[Value]]:
        """Flat ones, by the value that they read, as it is before it is quantised."""
        found: dict[Value, list[Value]] = {}
        for value in self.values:
            if _is_layer(value) and _is_flat(value):
                found.setdefault(self._origin(_rows(value)), []).append(value)
        return found

    @cached_property
    def heads(self) -> list[tuple[Value, list[Value], list[Value]]]:
        """Products head by head, with the flat layers above them, and the steps between."""
        found = []
        for value in self.projections.values:
            if _is_layer(value) and not _is_flat(value) and len(value.shape) == 3:
                layers, steps = self.above(_rows(value))
                found.append((value, list(filter(_is_flat, layers)), steps))
        return found

    @cached_property
    def latents(self) -> dict[Site, tuple[list[Value], list[Value]]]:
        """What stands above the rows of each site."""
        return {site: self.above(site.rows) for site in self.projections.sites.values()}

    def above(self, value: Value) -> tuple[list[Value], list[Value]]:
        """The nearest layers that a Value is made of, and the steps between, in order. A layer that
        another one is made of is none of them.
        """
        layers, steps = self._reached(value)
        further = {above for one in layers for above in self._reached(_rows(one))[0]}
        made = set(layers)
        for one in _ordered(steps):
            if not made.isdisjoint(one.sources):
                made.add(one)
        return _ordered(layers - further or layers), _ordered(made & steps)

    def _reached(self, value: Value) -> tuple[set[Value], set[Value]]:
        stack, steps, layers = [value], set[Value](), set[Value]()
        while stack and len(steps) < _FAR:
            one = stack.pop()
            if _is_layer(one):
                layers.add(one)
            elif one not in steps and not one.model and one.op not in ("write", "leaf"):
                steps.add(one)
                stack += one.sources
        return layers, steps

    def below(self, starts: Iterable[Value]) -> list[Value]:
        """The steps behind layers, up to the next layers, writes and attention."""
        layers, steps = set(starts), list[Value]()
        seen, pushed = set(layers), set(layers)
        heap = [(one.serial, one) for one in _ordered(layers)]
        while heap and len(steps) < _FAR:
            _, one = heappop(heap)
            if one not in seen:
                is_apart = self._is_apart(one, seen, layers)
                if one.op == "write" or _is_layer(one) or "attention" in str(one.literal):
                    continue
                if is_apart and one.op in ("dot", "opaque"):
                    continue
                steps.append(one)
                if is_apart:
                    continue
                seen.add(one)
            for user in self.users.get(one, ()):
                if user not in pushed:
                    pushed.add(user)
                    heappush(heap, (user.serial, user))
        return steps

    def _is_apart(self, value: Value, seen: set[Value], layers: set[Value]) -> bool:
        """Is it made of other layers' activations too? Those among the scales of a product are
        older; an adapter reads what the layers read, or make.
        """
        others = (source for source in value.sources if source.active and source not in seen)
        if value.op == "product":
            return any(one.serial > min(map(_serial, layers)) for one in others)
        if value.op != "sum":
            return any(others)
        above = (layer for one in others for layer in self._reached(one)[0])
        return not all(one in layers or self._reached(_rows(one))[0] <= layers for one in above)

    def _is_kept(self, layers: Sequence[Value]) -> bool:
        """Is something that they make written into what comes in, or joined to it?"""
        made = (*layers, *self.below(layers))
        return any(
            user.op == "write" or (user.op == "join" and any(s.op == "leaf" for s in user.sources))
            for one in made
            for user in self.users.get(one, ())
        )

    def _origin(self, rows: Value) -> Value:
        """Rows as they are before they are quantised."""
        inner: Value | None = rows
        while inner is not None:
            rows, parts = inner, split_blocks(self.form, inner)
            inner = unquantised_rows(self.form, rows) if rows.active else None
            is_moved = rows.op in ("cast", "reshape", "slice") or _is_quantised(rows)
            if inner is None and (parts is not None or is_moved):
                inner = parts[0] if parts is not None else _rows(rows)
        return rows

    # -- steps that the kernel does not have

    def odd(self, layers: Sequence[Value], steps: Sequence[Value]) -> Reason | None:
        """The first of the steps behind layers that is none of a prologue's."""
        cut = self._cut(layers, steps)
        every = [self._odd(one, layers) or (cut and cut.step is one and cut) for one in steps]
        found = [one for one in every if one]
        return next((one for one in found if one.code), found[0] if found else None)

    def _odd(self, value: Value, layers: Sequence[Value]) -> Reason | None:
        op, node = value.op, self._node(value)
        random = next(filter(self._is_random, (value, *value.sources)), None)
        if random is not None:
            return Reason("step.random", "%s is random", (random,))
        if op == "opaque":
            target = value.literal[0] if node is None else kinds.called(node)
            if self.graph.symbols and name_of(target) in RULES:
                text = f"%s ({target}) is not the same step for every number of tokens"
                return Reason("tokens.mixed", text, (value,))
            is_far = "c10d" in str(target)
            what = _EXCHANGES if is_far else UNKNOWN
            unused = self.graph.unused.get(value.literal[0], "").replace("%", "%%")
            said = "; ".join(filter(None, (f"%s ({target}) {what}", unused)))
            return Reason("step.unknown", said, (value,))
        name = value.literal[0] if op == "function" else ""
        narrows = op == "cast" and (value.dtype.itemsize == 1 or not value.is_float)
        if narrows or name == "to":
            dtype = value.dtype if narrows else value.literal[1]
            return Reason("step.choice", f"%s rounds to {dtype}", (value,))
        if op == "function" and name not in _OF_QUANTISATION:
            is_choice = name not in _SMOOTH
            what = "picks by the values it reads" if is_choice else "is no step of a prologue"
            return Reason("step.choice" if is_choice else "", f"%s {what}", (value,))
        return self._added(value, layers) if op in ("sum", "join") else None

    def _is_random(self, value: Value) -> bool:
        node = self._node(value) if value.op == "opaque" else None
        return node is not None and kinds.is_random(node)

    def _added(self, value: Value, layers: Sequence[Value]) -> Reason | None:
        """A bias, or what another layer makes."""
        beside = [one for one in value.sources if one.model or _is_vector(one)]
        terms = [one for one in value.sources if one not in beside]
        made = [set(filter(_is_flat, self.above(term)[0])) for term in terms]
        for one in made:
            for other in made:
                if one and other and one.isdisjoint(other):
                    text = f"%s {'adds' if value.op == 'sum' else 'joins'} what %s and %s make"
                    both = min(one, key=_serial), min(other, key=_serial)
                    return Reason("linear.hidden", text, (value, *sorted(both, key=_serial)))
        is_wide = bool(layers) and prod(value.shape) > layers[0].shape[0]
        if value.op == "sum" and len(terms) == 1 and is_wide and _is_of_layer(terms[0]):
            bias = tuple(beside[:1])
            what = "%s" if bias else f"{float(value.literal[1]):g}"
            return Reason("linear.bias", f"%s adds {what}", (value, *bias))
        return None

    def _cut(self, layers: Sequence[Value], steps: Iterable[Value]) -> Reason | None:
        """The first step that keeps some of the tokens alone, or moves them."""
        flat = (one for one in layers if len(one.shape) == 2)
        known: dict[Value, Layout] = {
            one: token_layout(one.shape[:1], one.shape[1:]) for one in flat
        }
        for value in steps:
            if not any(source in known for source in value.sources):
                continue
            try:
                known[value] = layout_of(value, known)
            except Mixed:
                size = prod(value.sources[0].shape)
                joined = any(
                    user.op == "join" and prod(user.shape) >= size
                    for user in self.users.get(value, ())
                )
                if value.op in ("slice", "gather") and prod(value.shape) < size and not joined:
                    text = "%s has some of the tokens of %s"
                    return Reason("tokens.cut", text, (value, value.sources[0]))
                return Reason("", "%s does not treat all tokens alike", (value,))
        return None

    # -- what was raised

    def _refined(self, departure: Departure) -> Departure | None:
        """With what stands in the way; None where the products look like no prologue."""
        own = {*departure.site}
        both = [one for one in self.projections.sites.values() if not own.isdisjoint(one.roots)]
        pair = next(((down, up) for down in both for up in down.next_sites if up in both), None)
        if pair is None:
            return self._with_names(departure)
        likeness = self._likeness(*pair)
        if not likeness and departure.score < 1:
            return None
        departure.score *= likeness or 0.5
        ask = _ASKED.get(departure.code)
        found = ask(self, departure, *pair) if ask is not None else None
        if found is None:
            return self._with_names(departure)
        return self._made(found, departure.code, departure.site, departure.score)

    def _with_names(self, departure: Departure) -> Departure:
        """With the Values that it is at, where it names none."""
        detail, names = departure.detail, {node.name for node in self.graph.gm.graph.nodes}
        values = tuple(one for one in departure.values if self._node(one) is not None)[:2]
        is_named = not names.isdisjoint(re.findall(r"\w*[a-z_]\w*", detail))
        if not values or is_named or departure.code.startswith("contract"):
            return departure
        text = f"{detail.replace('%', '%%')}: {' and '.join(['%s'] * len(values))}"
        found = Reason(departure.code, text, values)
        made = self._made(found, departure.code, departure.site, departure.score)
        made.values = departure.values
        return made

    def _likeness(self, down: Site, up: Site) -> float:
        """How much of a prologue the products of two sites are part of."""
        dots, own = {*self._with_products(down.roots)}, {one.dot for one in up.products}
        if any(map(self._is_residual, self.latents[up][1])):
            return 0
        ups = [one for one, (layers, _) in self.latents.items() if not dots.isdisjoint(layers)]
        normed = [one for one in ups if _is_latent(self.latents[one][1])]
        has_heads = any(not own.isdisjoint(layers) for _, layers, _ in self.heads)
        is_turned, has_latents = any(map(_is_turned, ups)), up in normed
        count = has_heads + is_turned + _is_turned(down) + (len(normed) > 1)
        if not count or not (has_heads or has_latents or is_turned):
            return 0
        count += has_latents + self._is_kept(down.roots)
        return 0.5 + 0.08 * count if count > 1 else 0

    def _latent(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        """In place of a norm of the query's latents, or of the key's."""
        layers, steps = self.latents[up]
        at, layer = departure.values[0], up.products[0].dot
        is_wide = at in steps or at.shape[-1:] == up.rows.shape[-1:]
        if at is not up.rows and (at in down.roots or not is_wide):
            return self._key(departure, down, up, layers)
        found = self._of_bytes((*layers, layer), layer)
        return found or self._between(layers, steps, layer, _norm(down, steps))

    def _between(
        self, layers: Sequence[Value], steps: Sequence[Value], layer: Value, norm: Value | None
    ) -> Reason | None:
        """What is wrong with the query's latents, between the layers that make them and ``layer``.

        norm  of the latents, where the steps have one
        """
        rows = _rows(layer)
        behind = [one for one in steps if norm is None or one.serial > norm.serial]
        odd = self.odd(layers if norm is None else [], behind)
        if odd is not None and (odd.code in _IN_ANY_PART or _EXCHANGES in odd.text):
            return odd
        if norm is not None:
            found = Reason("q_lora.interrupted", "%s projects %s, not the norm %s", (norm,))
        elif layers:
            text = "%s projects %s, which is no RMSNorm of %s"
            found = Reason("norm.absent", text, (layers[0],))
        else:
            return None
        values = layer, rows, *found.values
        if odd is None:
            return Reason(found.code, found.text, values, rows)
        return Reason(found.code, f"{found.text}; {odd.text}", (*values, *odd.values), odd.step)

    def _of_bytes(self, layers: Sequence[Value], up: Value | None = None) -> Reason | None:
        """What is wrong with products of numbers of one byte; ``up`` is that of the latents."""
        for layer in layers:
            rows, node = _rows(layer), self._node(layer)
            held = order(one for one in layer.sources if one.weight)
            dtype = next((one.dtype for one in held if one.dtype.itemsize == 1), None)
            is_opaque = layer.op == "opaque" and node is not None
            bias = argument(node, "bias") if is_opaque and node is not None else None
            if bias is not None:
                text = f"%s ({kinds.called(node)}) adds {bias.name}"  # type: ignore[arg-type]
                return Reason("linear.bias", text, (layer,))
            is_rounded = any(map(_rounds, (rows, *self.above(rows)[1])))
            if dtype is not None and operand_format(rows) is None and not is_rounded:
                text = f"%s multiplies %s by a weight of {dtype}"
                return Reason("quant.weights_only", text, (layer, rows))
            if dtype is not None and layer is up and unquantised_rows(self.form, rows) is None:
                return Reason("quant.dynamic", "%s multiplies %s", (layer, rows))
            if is_opaque and node is not None:
                text = f"%s ({kinds.called(node)}) {UNKNOWN}"
                return Reason("linear.hidden", text, (layer,))
        return None

    def _key(self, departure: Departure, down: Site, up: Site, query: Sequence[Value]) -> Reason:
        """In place of the key's latents."""
        own = query[0] if query else down.products[0].dot
        beside = [one for one in self.layers.get(self._origin(down.rows), ()) if one not in query]
        for layer in beside:
            if operand_format(_rows(layer)) is not operand_format(_rows(own)):
                text = "%s and %s multiply x in different formats"
                return Reason("quant.mixed", text, (layer, own))
            if _rows(layer) is not _rows(own) and operand_format(_rows(own)) is not None:
                text = "%s and %s multiply different quantised forms of x"
                return Reason("quant.tokens_differ", text, (layer, own))
            if layer.op == "opaque" and (found := self._of_bytes((layer,))) is not None:
                return found
        odd = self.odd(beside, self.below(beside))
        if odd is not None and odd.code:
            return odd
        odd = self.odd(up.roots, self.below(up.roots))
        if odd is not None and odd.code == "linear.hidden":
            return odd
        at = departure.values[0]
        text, values = "%s projects %s; no latent beside it is normed", (own, down.rows)
        if at not in down.roots:
            text, values = "%s projects %s; %s beside it is no RMSNorm", (*values, at)  # type: ignore[assignment]
        return Reason("kv_latent.absent", text, values, at)

    def _part(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        found = None if _pairs(up) else self._without_latents(down)
        return found or self._of_part(up)

    def _without_latents(self, down: Site) -> Reason | None:
        """Is a query made of x at once?"""
        for value, found in _pairs(down):
            if found.heads > 1:
                text = "%s, with more heads than a key, is made of %s"
                return Reason("q_lora.absent", text, (value, down.rows))
        return None

    def _of_part(self, site: Site, width: int | None = None) -> Reason | None:
        """A step behind products: one that is none of a prologue's, or a norm of ``width``."""
        layers = self._with_products(site.roots)
        steps = self.below(layers)
        odd = self.odd(layers, steps)
        for one in steps:
            size = prod(one.shape) // max(site.tokens, 1)
            is_wide = one.shape[-1:] != (1,) and size > 1 and width in (None, size)
            is_first = odd is None or one.serial < odd.step.serial
            read = (site.readings.get(source) for source in one.sources)
            is_behind = any(each is not None and each.kind == "turned" for each in read)
            if is_wide and _has_root([one]) and is_first and not is_behind:
                return Reason("rope.normed_key", "%s is normed", (one,))
        return odd if odd is not None and odd.code else None

    def _rotation(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        queries = _pairs(up)
        keys = [one for one in _pairs(down) if one[1].heads == 1]
        if queries and keys:
            (query, of_query), (key, of_key) = queries[0], keys[0]
            product = up.products[0]
            if product.kind is not None and not product.factors:
                text = "%s is multiplied by no scale of columns"
                return Reason("quant.scale", text, (product.dot,))
            ratio = of_query.diagonal * power(of_key.diagonal, -1, POINT.p) % POINT.p
            if bool((ratio == ratio[:, :1]).all()):
                text = "%s and %s are rotated alike, and scaled differently"
                return Reason("scale.unequal", text, (query, key))
            text = "the tables of %s and %s are not proved equal"
            return Reason("rope.tables_differ", text, (query, key))
        if not queries and (found := self._without_latents(down)) is not None:
            return found
        odd = None if queries else self._of_part(up)
        odd = odd or (None if keys else self._of_part(down, _ROPE))
        if odd is not None and odd.values[0].op != "join":  # the keys of all heads
            return odd
        layers, _ = self.latents[up]
        rest = next((one.root for one in down.products if one.dot not in layers), down.roots[0])
        if queries or keys:
            text = f"%s is rotated, no {_ROPE} columns of %s are"
            return Reason("", text, ((queries or keys)[0][0], rest if queries else up.roots[0]))
        text = f"no {_ROPE} columns of %s or %s are rotated, or left as they are"
        both = self._with_products((*up.roots, *down.roots))
        odd = self.odd(both, self.below(both))  # a step may read what both make
        if odd is not None and odd.code == "step.unknown":
            return Reason("", f"{text}; {odd.text}", (up.roots[0], rest, *odd.values), odd.step)
        return Reason("", text, (up.roots[0], rest))

    def _proof(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        of_x, kind = (site.products[0].kind for site in (down, up))
        if of_x is not kind and (of_x or (kind and not kind.partial)):
            formats = [f"in {one.name}" if one else "in no such format" for one in (of_x, kind)]
            text = f"%s multiplies numbers {formats[0]}, %s multiplies numbers {formats[1]}"
            return Reason("quant.mixed", text, (down.roots[0], up.roots[0]))
        part, at = departure.detail.partition(" ")[0], departure.values[0]
        if part in ("query_rope", "kr_rows") and _is_turned(down):
            return Reason("rope.tables_differ", f"%s: {departure.detail}", (at,))
        if part != "query" or kind is not None:
            return self._quantised(up, kind)
        rows = _unmoved(at)
        rows = _unmoved(_rows(rows)) if _is_layer(rows) else rows
        factors = [one for one in rows.sources if not one.active and filled_with(one) is None]
        if rows.op == "product" and factors:
            return Reason("scale.unequal", "%s is multiplied by %s", (rows, factors[0]))
        return None

    def _quantised(self, up: Site, kind: NumberFormat | None) -> Reason | None:
        """Are the bytes of latents the kernel's? And of blocks, are the scales?"""
        rows = up.rows
        before = unquantised_rows(self.form, rows) if kind is not None else None
        if before is None or kind is None:
            return None
        inner = (split_blocks(self.form, rows) or (rows,))[0]
        inner = strip_views(inner)
        if inner.literal[0] == "of format":
            inner = strip_views(inner.sources[0])
        by = quantise.by_block(self.form, before) if kind.in_blocks else None
        own = by or quantise.by_row(self.form, before, kind)
        values = up.roots[0], rows
        if inner is not strip_views(own[0]):
            return Reason("quant.dynamic", "%s multiplies %s", values, rows)
        text = "%s multiplies %s by scales of something else"
        return Reason("quant.scale", text, values, rows) if by is not None else None

    def _tokens(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        if self.graph.symbols:
            return None
        text = "%s does not treat all tokens alike"
        found = Reason("proof.differs", text, departure.values[:1])
        return self._quantised(up, up.products[0].kind) or found

    def _reader(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        """Of what the kernel keeps: a product with W_uk that is added to."""
        own = {one.dot for one in up.products}
        heads = [one for one, layers, _ in self.heads if not own.isdisjoint(layers)]
        odd = self.odd(heads, self.below(heads))
        return odd if odd is not None and odd.code == "linear.bias" else None

    # -- what was not proposed

    def _unproposed(
        self, head: Value, ups: list[Value], steps: list[Value], seen: set[Value]
    ) -> Iterator[Departure]:
        """Of a product head by head of some columns of layers."""
        up, (heads, _, nope) = ups[0], _rows(head).shape
        if heads * nope > sum(one.shape[-1] for one in ups):
            return
        layers = self.layers.get(self._origin(_rows(up)), [])
        if self._is_kept(layers) and _has_root(self.below(layers)):
            text = "%s, which %s multiplies head by head, projects %s"
            odd: Reason | None = Reason("q_lora.absent", text, (up, head, _rows(up)))
        else:
            downs, between = self.above(_rows(up))
            layers = self.layers.get(self._origin(_rows(downs[0])), []) if downs else []
            if not self._is_kept(layers) or any(map(self._is_residual, between)):
                return
            odd = self._of_bytes((*downs, up), up)
            if odd is None and (self.odd(downs, between) or not _has_root(between)):
                odd = self._between(downs, between, up, None)
            odd = odd or self.odd(ups, steps)
            own = next((one for one in downs if not _is_flat(one)), None)
            if odd is None and own is not None:
                text = "%s multiplies by %s, which is not one weight for all tokens"
                odd = Reason("linear.hidden", text, (own, own.sources[1]))
            layers = [*downs, *layers]
        site = [*ups, *layers]
        if odd is not None and seen.isdisjoint(site):
            yield self._made(odd, "absorb.absent", site, 0.5)

    def _is_residual(self, value: Value) -> bool:
        """Is it a sum with what no layer makes?"""
        wide = (one for one in value.sources if prod(one.shape) == prod(value.shape))
        return (
            value.op == "sum"
            and value.shape[-1] > 1
            and any(not one.model and not self._reached(one)[0] for one in wide)
        )


_ASKED: dict[str, Callable[[_Departures, Departure, Site, Site], Reason | None]] = {
    "norm.absent": _Departures._latent,
    "absorb.absent": _Departures._part,
    "rope.absent": _Departures._rotation,
    "proof.differs": _Departures._proof,
    "tokens.mixed": _Departures._tokens,
    "reader.latent": _Departures._reader,
}


def _unmoved(value: Value) -> Value:
    while value.op in MOVES and len(value.sources) == 1:
        value = value.sources[0]
    return value


def _serial(value: Value) -> int:
    return value.serial


def _ordered(values: Iterable[Value]) -> list[Value]:
    return sorted(values, key=_serial)


def _norm(down: Site, steps: Sequence[Value]) -> Value | None:
    """The last of the steps that is the norm of a whole row."""
    for value in reversed(steps):
        reading = down.readings.get(value)
        if reading is not None and reading.kind == "normed":
            columns = reading.columns.tolist()
            if len({*columns}) == len(columns) == value.shape[-1] and _holds(down, value):
                return value
    return None


def _holds(site: Site, value: Value) -> bool:
    try:
        read_norm(site, value, "latents")
    except Departure:
        return False
    return True


def _is_vector(value: Value) -> bool:
    return value.op == "leaf" and len(value.shape) == 1


def _is_of_layer(value: Value) -> bool:
    """Is it what a layer makes, moved or scaled?"""
    while value.op in MOVES or value.op == "product":
        powers = value.literal[0] if value.op == "product" else [1] * len(value.sources)
        wide = [
            (one, by)
            for one, by in zip(value.sources, powers, strict=True)
            if not one.model and (value.op != "product" or prod(one.shape) == prod(value.shape))
        ]
        if len(wide) != 1 or wide[0][1] != 1:
            return False
        value = wide[0][0]
    return _is_layer(value)


def _is_quantised(value: Value) -> bool:
    is_bytes = value.op == "function" and value.literal[0] in BYTES
    return is_bytes or (value.op == "opaque" and "quant" in str(value.literal))


def _rounds(value: Value) -> bool:
    is_rounding = value.op == "function" and value.literal[0] in _ROUNDS
    return value.dtype.itemsize == 1 or is_rounding or _is_quantised(value)


def _pairs(site: Site) -> list[tuple[Value, Pairs]]:
    turned = ((value, one) for value, one in site.readings.items() if one.kind == "turned")
    return [
        (value, found) for value, one in turned if (found := read_pairs(one, _ROPE)) is not None
    ]


def _is_turned(site: Site) -> bool:
    return any(one.kind == "turned" for one in site.readings.values())


def _is_latent(steps: Sequence[Value]) -> bool:
    """Is there a norm, and no attention?"""
    return _has_root(steps) and all(one.op != "dot" for one in steps)


def _has_root(steps: Iterable[Value]) -> bool:
    powers = (power for one in steps if one.op == "product" for power in one.literal[0])
    return any(power.denominator == 2 for power in powers)
