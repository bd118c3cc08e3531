"""Products of one activation, what is computed from them, and what each Value has of their columns.

A site is all products of one activation with weights: fused, split and chunked projections are one
case, since columns are counted through all of them. The cone of a site is what is computed from its
products up to the next products. It is run once, at few tokens, with codes in place of the
products: column k of a product is 1, k, k ** 2 .. or a sign of bit b of k. A norm's statistic is
the same for all sign codes, so an element that follows a column's signs is that column, moved or
normed. An element ``A d[a] + B d[b]`` of two columns shows a, b, A and B in its moments (Prony's
formula for two nodes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mla_fusion.exact import field
from mla_fusion.exact.evaluate import Evaluation, Undecided
from mla_fusion.graph.form import Form, Value, numbered, order
from mla_fusion.graph.layout import Binding, Layout, Mixed, cuts_of, layout_of, token_layout
from mla_fusion.graph.numbers import ONE, Number
from mla_fusion.graph.read import Graph
from mla_fusion.propose.quantised import Projection, of_blocks, projection, unmoved

AT = field.POINTS[1]  # where a graph is probed
_MOMENTS = 5
_LARGE = 1 << 21  # elements a token of a Value that is no part of a prologue


class Reading(NamedTuple):
    """What a Value is of a site's columns, element by element behind its tokens.

    kind     "moved", "normed", or "turned": a rotation of two columns
    columns  of each element
    others   of what is turned, the second column
    factors  of what is turned, those of both [tokens, elements]; else of the column
    """

    kind: str
    columns: Tensor
    others: Tensor | None
    factors: tuple[Tensor, ...]


class Projections:
    """The products of a graph, by the activation that they read."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.form = graph, graph.form
        self.values = [value for value in order(graph.nodes) if value.active]
        self.users = _users(self.values)
        read = _users(order(graph.live))  # moves that compose are read no more
        numbers: dict[Value, set[Number]] = {}
        for value in graph.nodes:
            times, rest = self.form.split(value)
            numbers.setdefault(rest, set()).add(times)
        products: dict[Value, list[Projection]] = {}
        for value in filter(is_projection, self.values):
            found = projection(self.form, value, read, numbers)
            products.setdefault(value.sources[0], []).append(found)
        self.sites = {rows: Site(self, rows, of_rows) for rows, of_rows in products.items()}
        self._cuts: dict[int, set[int]] = {}
        self.cones: dict[object, Cone] = {}

    def binding(self, tokens: int, copies: int) -> Binding:
        """The same for all sites of as many tokens, so that what is beside them is the same."""
        cuts = self._cuts.get(tokens)
        if cuts is None:
            alike = (site for site in self.sites.values() if site.tokens == tokens)
            cuts = cuts_of(layout for site in alike for layout in site.layouts.values())
            self._cuts[tokens] = cuts
        return Binding(cuts, tokens, copies)

    def cut(self, tokens: int, more: set[int]) -> bool:
        """Let digits begin and end at more places, where these fit the others."""
        cuts = self._cuts[tokens] | more
        try:
            Binding(cuts, tokens)
        except Mixed:
            return False
        is_new = cuts != self._cuts[tokens]
        self._cuts[tokens] = cuts
        return is_new


@dataclass
class Cone:
    """What is found once for all cones of one structure, by the place of each Value.

    layouts   of those whose tokens are not mixed
    readings  what probes say
    """

    layouts: dict[int, Layout]
    readings: dict[int, Reading] | None = None


def _users(values: Iterable[Value]) -> dict[Value, list[Value]]:
    found: dict[Value, list[Value]] = {}
    for value in values:
        for source in value.sources:
            found.setdefault(source, []).append(value)
    return found


def is_projection(value: Value) -> bool:
    return value.op == "dot" and len(value.sources[1].shape) == 2 and value.sources[1].weight


@dataclass(eq=False)
class Site:
    """
    rows      the activation [tokens, k]
    products  with weights, in the order of the graph
    """

    projections: Projections
    rows: Value
    products: list[Projection]

    @cached_property
    def dots(self) -> list[Value]:
        """The products, brought back to floats."""
        return [one.root for one in self.products]

    @property
    def tokens(self) -> int:
        return self.rows.shape[0]

    @property
    def columns(self) -> int:
        return sum(one.columns for one in self.products)

    @cached_property
    def weight(self) -> Value:
        """Of all products, side by side [k, columns]."""
        return self.projections.form.join([one.weight for one in self.products], 1)

    @cached_property
    def stand_in(self) -> Value:
        """A leaf of all columns, for what is computed of some of them."""
        shape = self.tokens, self.columns
        return self.projections.form.activation(f"site {self.rows.serial}", shape)

    def split(self, rows: Tensor, binding: Binding) -> dict[Value, Tensor]:
        """Rows of all columns, as the roots of the products."""
        found, at = dict[Value, Tensor](), 0
        for one in self.products:
            part = rows[:, at : at + one.columns]
            at += one.columns
            if one.times != ONE:
                part = part * pow(field.number(one.times, AT), -1, AT.p) % AT.p
            found[one.root] = part.reshape(binding.shape(self.layouts[one.root]))
        return found

    @cached_property
    def _others(self) -> dict[Value, Reading | None]:
        """Of Values that are not in the cone."""
        return {}

    @cached_property
    def below(self) -> list[Value]:
        """The cone: the products, and what they reach before the next ones, in order."""
        return [*self.dots, *self._reached()]

    @cached_property
    def base(self) -> Value:
        """The bytes that the activation is a reading of; else the activation."""
        rows = self.rows
        if self.products[0].blocks:
            parts = of_blocks(self.projections.form, rows)
            return rows if parts is None else parts[0]
        inner = unmoved(rows)
        is_named = inner.op == "function" and inner.literal[0] == "of format"
        return inner.sources[0] if is_named else rows

    def numbered(self, more: Iterable[Value] = ()) -> tuple[object, list[Value]]:
        """The structure of the cone and of more, and all their Values; what the base is made of,
        and other activations that were there before it, stand for themselves.
        """
        values = self.rows, *self.below, *more
        return numbered(values, [self.base], self.base.serial)

    @cached_property
    def _of_structure(self) -> tuple[Cone, list[Value]]:
        key, values = self.numbered()
        known = self.projections.cones.get(key)
        if known is None:
            known = self.projections.cones[key] = self._followed(values)
        return known, values

    @cached_property
    def layouts(self) -> dict[Value, Layout]:
        """Of the cone's Values, the products among them; those whose tokens are mixed are not in
        it.
        """
        cone, values = self._of_structure
        return {values[place]: layout for place, layout in cone.layouts.items()}

    def _followed(self, values: list[Value]) -> Cone:
        places = {value: place for place, value in enumerate(values)}
        found = {one.root: _layout_of_root(one) for one in self.products}
        for value in self.below[len(found) :]:
            if any(source in found for source in value.sources):
                with suppress(Mixed):
                    found[value] = layout_of(value, found)
        return Cone({places[value]: layout for value, layout in found.items()})

    def _reached(self) -> list[Value]:
        """What the products reach before the next ones, in order."""
        users, seen = self.projections.users, set[Value](self.dots)
        stack = list(self.dots)
        while stack:
            for user in users.get(stack.pop(), ()):
                if user not in seen and self._goes_on(user, seen):
                    seen.add(user)
                    stack.append(user)
        return sorted(seen.difference(self.dots), key=lambda value: value.serial)

    def _goes_on(self, value: Value, seen: set[Value]) -> bool:
        if is_projection(value) or value.op in ("write", "opaque"):
            return False
        if prod(value.shape) > _LARGE * max(1, self.tokens):
            return False
        if value.op == "dot":  # with what is cached: attention
            return all(one in seen or not one.active for one in value.sources)
        return value.op != "sum" or not self._is_residual(value)

    def _is_residual(self, value: Value) -> bool:
        """Is it a sum with an activation that these products have no part in?"""
        return any(source.active and not _is_made_of(source, self.dots) for source in value.sources)

    @cached_property
    def writes(self) -> list[Value]:
        """Of rows that are made of these products."""
        users = self.projections.users
        found = {user for value in self.below for user in users.get(value, ())}
        writes = (one for one in found if one.op == "write")
        return sorted(writes, key=lambda value: value.serial)

    @cached_property
    def ahead(self) -> list[Site]:
        """The sites whose activation is made of these products, with what lies between."""
        sites = self.projections.sites
        found = [
            sites[value] for value in self.layouts if value in sites and value not in self.dots
        ]
        return [site for site in found if site is not self]

    @cached_property
    def readings(self) -> dict[Value, Reading]:
        """What probes say of each Value."""
        cone, values = self._of_structure
        if cone.readings is None:
            wanted = [place for place in cone.layouts if self._is_wanted(values[place])]
            found = self._probed([values[place] for place in wanted])
            pairs = zip(wanted, found, strict=True)
            cone.readings = {place: reading for place, reading in pairs if reading is not None}
        return {values[place]: reading for place, reading in cone.readings.items()}

    def reading_of(self, value: Value) -> Reading | None:
        """Of a Value that need not be in the cone."""
        if value in self.readings:
            return self.readings[value]
        if value not in self._others:
            self._others[value] = self._read_beside(value)
        return self._others[value]

    def _read_beside(self, value: Value) -> Reading | None:
        try:
            for one in order([value], self.layouts):
                if any(source in self.layouts for source in one.sources):
                    self.layouts[one] = layout_of(one, self.layouts)
        except Mixed:
            return None
        return next(self._probed([value]), None) if value in self.layouts else None

    def _is_wanted(self, value: Value) -> bool:
        size = prod(value.shape) // max(1, self.tokens)
        return 1 < size <= self.columns

    def _probed(self, values: list[Value]) -> Iterator[Reading | None]:
        codes = _codes(self.columns)
        try:
            seen = self._run(values, torch.stack(list(codes.values())))
        except (Mixed, Undecided):
            yield from (None for _ in values)
            return
        for value in values:
            rows = seen.get(value)
            if rows is None:
                yield None
            else:
                of_code = dict(zip(codes, rows, strict=True))
                yield _classified(of_code, self.columns)

    def _run(self, values: list[Value], codes: Tensor) -> dict[Value, Tensor]:
        """Of each Value [code, token, element]."""
        layouts = {
            value: self.layouts[value]
            for value in order(values, self.dots)
            if value in self.layouts
        }
        layouts |= {dot: self.layouts[dot] for dot in self.dots}
        if self.tokens == 1:
            each = [self._run_once(values, layouts, code.unsqueeze(0), 1) for code in codes]
            return {
                value: torch.stack([one[value] for one in each])
                for value in values
                if value in each[0]
            }
        return self._run_once(values, layouts, codes, len(codes))

    def _run_once(
        self, values: list[Value], layouts: dict[Value, Layout], codes: Tensor, copies: int
    ) -> dict[Value, Tensor]:
        binding = self.projections.binding(self.tokens, copies)
        found = self._seen(values, layouts, codes, binding)
        if binding.missing and self.projections.cut(self.tokens, binding.missing):
            binding = self.projections.binding(self.tokens, copies)
            found = self._seen(values, layouts, codes, binding)
        return found

    def _seen(
        self,
        values: list[Value],
        layouts: dict[Value, Layout],
        codes: Tensor,
        binding: Binding,
    ) -> dict[Value, Tensor]:
        rows = codes.repeat_interleave(binding.period, 0)
        run = Evaluation(binding, layouts, self.split(rows, binding), AT)
        found = dict[Value, Tensor]()
        for value in values:
            try:
                run.run([value])
                flat = run.flat(value)
            except (Mixed, Undecided):
                continue
            flat = flat.reshape(binding.copies, binding.period, -1)
            found[value] = flat[0] if self.tokens == 1 else flat
        return found


def _layout_of_root(product: Projection) -> Layout:
    found = {product.dot: token_layout(product.dot.shape[:1], product.dot.shape[1:])}
    for value in order([product.root], [product.dot]):
        if any(source in found for source in value.sources):
            found[value] = layout_of(value, found)
    return found[product.root]


def _is_made_of(value: Value, dots: Iterable[Value]) -> bool:
    """Is it made of one of the products, no further up than they are, and not by a next one?"""
    first, wanted = min(dot.serial for dot in dots), set(dots)
    stack, seen = [value], set[Value]()
    while stack:
        one = stack.pop()
        if one in wanted:
            return True
        if one not in seen and one.serial > first and not is_projection(one):
            seen.add(one)
            stack.extend(one.sources)
    return False


def _codes(columns: int) -> dict[object, Tensor]:
    places = torch.arange(1, columns + 1)
    found: dict[object, Tensor] = {
        ("moment", power): field.power(places, power, AT.p) for power in range(_MOMENTS)
    }
    found["two"] = torch.full((columns,), 2, dtype=torch.int64)
    for bit in range(max(1, (columns - 1).bit_length())):
        found["bit", bit] = torch.where((places - 1) >> bit & 1 == 1, AT.p - 1, 1)
    return found


def _classified(seen: dict[object, Tensor], columns: int) -> Reading | None:
    """``seen``: of each code [token, element]."""
    ones = seen["moment", 0]
    if not ones.numel() or not bool(ones.any()):
        return None
    is_linear = torch.equal(seen["two"], ones * 2 % AT.p)
    bits = [
        (key[1], tensor)
        for key, tensor in seen.items()
        if isinstance(key, tuple) and key[0] == "bit"
    ]
    minus = (AT.p - ones) % AT.p
    signed = [tensor == minus for _, tensor in bits]
    if all(
        bool((is_minus | (tensor == ones)).all())
        for is_minus, (_, tensor) in zip(signed, bits, strict=True)
    ):
        places = torch.zeros_like(ones)
        for is_minus, (bit, _) in zip(signed, bits, strict=True):
            places += is_minus.long() << bit
        first = places[0]
        if not torch.equal(places, first.expand_as(places)) or int(first.max()) >= columns:
            return None
        return Reading("moved" if is_linear else "normed", first, None, (ones,))
    return _turned(seen, columns) if is_linear else None


def _turned(seen: dict[object, Tensor], columns: int) -> Reading | None:
    m0, m1, m2, m3, m4 = (seen["moment", power] for power in range(_MOMENTS))

    def minus(one: Tensor, other: Tensor) -> Tensor:
        return (one + AT.p - other) % AT.p

    def times(one: Tensor, other: Tensor) -> Tensor:
        return one * other % AT.p

    inverse = field.power(minus(times(m0, m2), times(m1, m1)), -1, AT.p)
    total = times(minus(times(m0, m3), times(m1, m2)), inverse)  # a + b
    product = times(minus(times(m1, m3), times(m2, m2)), inverse)  # a b
    square = total * total - 4 * product
    root = square.clamp_min(0).double().sqrt().round().long()
    is_root = (root * root == square) & (square > 0) & (total <= 2 * columns)
    fits = m4 == minus(times(total, m3), times(product, m2))
    if not bool((is_root & fits).all()):
        return None
    one, other = (total - root) // 2, (total + root) // 2
    second = times(minus(m1, times(one, m0)), field.power(root, -1, AT.p))
    first = minus(m0, second)
    same = torch.equal(one, one[:1].expand_as(one)) and torch.equal(
        other, other[:1].expand_as(other)
    )
    if not same or int(one.min()) < 1 or int(other.max()) > columns:
        return None
    return Reading("turned", one[0] - 1, other[0] - 1, (first, second))


def rows_of(form: Form, value: Value, layout: Layout, tokens: int) -> Value:
    """[tokens, the rest]. Raises Mixed where it does not have all tokens."""
    digits = [digit for axis in layout for digit in axis]
    at = sorted((k for k, one in enumerate(digits) if one[0]), key=lambda k: -digits[k][0])
    if prod(digits[k][1] for k in at) != tokens:
        raise Mixed(value)
    rest = [k for k, one in enumerate(digits) if not one[0]]
    value = form.permute(form.reshape(value, [size for _, size in digits]), [*at, *rest])
    return form.reshape(value, (tokens, prod(value.shape) // max(tokens, 1)))


def of_rows(form: Form, rows: Value, value: Value, layout: Layout) -> Value:
    """What ``value`` is, of its rows: the other way round."""
    digits = [digit for axis in layout for digit in axis]
    at = sorted((k for k, one in enumerate(digits) if one[0]), key=lambda k: -digits[k][0])
    order_of_rows = [*at, *(k for k, one in enumerate(digits) if not one[0])]
    apart = form.reshape(rows, [digits[k][1] for k in order_of_rows])
    back = [order_of_rows.index(k) for k in range(len(digits))]
    return form.reshape(form.permute(apart, back), value.shape)
