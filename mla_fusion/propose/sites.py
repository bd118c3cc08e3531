"""Collects the products of each activation, and reads what each Value has of their columns.

This is the first step of ``propose/``. ``prologue.py`` joins the readings of two sites to a
proposal.

A *site* is an activation and all its products with weights. Columns are counted through all of
them, so fused, split and chunked projections are one case. The *cone* of a site is what is computed
from its products up to the next products.

A cone is run at few tokens, with codes in place of the products, once for each structure. Column k
of a product is 1, k, k ** 2 .., or a sign of bit b of k. The statistic of a norm is the same for
all sign codes. So an element that follows a column's signs is that column, moved or normed. An
element ``A d[a] + B d[b]`` of two columns shows a, b, A and B in its moments (Prony's formula for
two nodes).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mla_fusion.exact import field
from mla_fusion.exact.evaluate import Evaluation, Undecided, layouts_of
from mla_fusion.graph.form import Form, Value, numbered, order, serial
from mla_fusion.graph.layout import (
    Binding,
    Layout,
    Mixed,
    cuts_of,
    layout_of,
    token_count,
    token_layout,
    token_order,
)
from mla_fusion.graph.read import Graph
from mla_fusion.propose.quantised import Projection, operand_bytes, read_projection

POINT = field.POINTS[1]  # where graphs are probed
_MOMENTS = 5
_LARGE = 1 << 21  # a Value with more elements a token is no part of a prologue


class ColumnReading(NamedTuple):
    """Says what a Value is of a site's columns, for each element behind its tokens.

    kind            "moved", "normed", or "turned": a rotation of two columns
    columns         the column of each element
    second_columns  for "turned", the second column of each element
    factors         for "turned", the factors of both columns [tokens, elements]; else those of the
                    column
    """

    kind: str
    columns: Tensor
    second_columns: Tensor | None
    factors: tuple[Tensor, ...]

    @property
    def column_set(self) -> set[int]:
        """Returns the columns without their order; of a rotation, the first column of each."""
        return set(self.columns.tolist())


class Projections:
    """Holds the products of a graph with weights, by the activation that they read.

    values  the activations, in order
    users   by activation, the activations that read it
    sites   by activation, the site of its products
    cones   facts of cones, by structure
    cuts    of the tokens of sites, by their number and by the facts of the cone
    key_gammas  the weights of the norms of keys in proposals
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.form = graph, graph.form
        self.values = [value for value in order(graph.nodes) if value.active]
        self.users = users_of(self.values)
        readers = users_of(order(graph.live))  # without moves that were composed with others
        products: dict[Value, list[Projection]] = {}
        for value in filter(is_projection, self.values):
            product = read_projection(self.form, value, readers, graph.multiples_of)
            products.setdefault(value.sources[0], []).append(product)
        self.sites = {
            rows: Site(self, rows, site_products) for rows, site_products in products.items()
        }
        self.cuts: dict[int, dict[ConeFacts, Collection[int]]] = {}
        self.cones: dict[object, ConeFacts] = {}
        self.key_gammas = set[Value]()

    def binding(self, site: Site, copies: int) -> Binding:
        """Returns the binding of a site's tokens.

        Sites whose cuts divide each other share it, so that what is beside them is drawn alike.
        """
        tokens = site.tokens
        if tokens not in self.cuts:
            self.cuts[tokens] = {
                cone: cuts_of(cone.layouts.values())
                for cone in dict.fromkeys(
                    other.facts[0] for other in self.sites.values() if other.tokens == tokens
                )
            }
        binding = Binding(self.cuts[tokens][site.facts[0]], tokens, copies)
        for cuts in self.cuts[tokens].values():
            binding = binding.refined(cuts) or binding
        return binding


@dataclass(eq=False)
class ConeFacts:
    """Holds what is read once for all cones of one structure, by the place of each Value.

    layouts   layouts of Values whose tokens are not mixed
    readings  what probing says; None before it was probed
    site      the site that was probed: factors are numbers of its tables
    """

    layouts: dict[int, Layout]
    readings: dict[int, ColumnReading] | None = None
    site: Site | None = None


def users_of(values: Iterable[Value]) -> dict[Value, list[Value]]:
    """Returns the Values that read each Value."""
    users: dict[Value, list[Value]] = {}
    for value in values:
        for source in value.sources:
            users.setdefault(source, []).append(value)
    return users


def readers_in_order(users: Mapping[Value, Iterable[Value]], passed: set[Value]) -> Iterator[Value]:
    """Yields what reads Values, in the order in which it was made.

    passed  the Values that are read; the caller adds those whose readers it wants, too
    """
    starts, pushed = set(passed), set(passed)
    heap = [(value.serial, value) for value in passed]
    heapify(heap)
    while heap:
        _, value = heappop(heap)
        if value not in starts:
            yield value
        for user in users.get(value, ()) if value in passed else ():
            if user not in pushed:
                pushed.add(user)
                heappush(heap, (user.serial, user))


def is_projection(value: Value) -> bool:
    """Returns True if the Value is a product with a matrix that is a weight."""
    return value.op == "dot" and len(value.sources[1].shape) == 2 and value.sources[1].weight


@dataclass(eq=False)
class Site:
    """All products of one activation with weights.

    rows      the activation [tokens, k]
    products  the products, in the order of the graph
    """

    projections: Projections
    rows: Value
    products: list[Projection]

    @cached_property
    def roots(self) -> list[Value]:
        """Returns the products, with bytes brought back to floats."""
        return [product.root for product in self.products]

    @cached_property
    def layers(self) -> list[Value]:
        """Returns the products, in floats and as they are."""
        return [*self.roots, *(product.dot for product in self.products)]

    @property
    def tokens(self) -> int:
        """Returns the number of tokens."""
        return self.rows.shape[0]

    @property
    def columns(self) -> int:
        """Returns the number of columns of all products together."""
        return sum(product.columns for product in self.products)

    @cached_property
    def parts(self) -> list[tuple[Projection, int, int]]:
        """Returns each product with its first column and the one behind its last."""
        ends = accumulate(product.columns for product in self.products)
        pairs = zip(self.products, ends, strict=True)
        return [(product, end - product.columns, end) for product, end in pairs]

    @cached_property
    def weight(self) -> Value:
        """Returns the weights of all products, side by side [k, columns]."""
        return self.projections.form.join([product.weight for product in self.products], 1)

    @cached_property
    def cone(self) -> list[Value]:
        """Returns the cone: the products, and what they reach before the next ones, in order."""
        cone, seen = [*self.roots], set(self.roots)
        for value in readers_in_order(self.projections.users, seen):
            if self._is_followed(value, seen):
                seen.add(value)
                cone.append(value)
        return cone

    @cached_property
    def base(self) -> Value:
        """Returns the bytes that the activation is a reading of, else the activation."""
        return operand_bytes(self.projections.form, self.rows)

    def numbered(self, extra_values: Iterable[Value] = ()) -> tuple[object, list[Value]]:
        """Returns the structure of the cone and of ``extra_values``, and all their Values.

        The base, and activations that were there before it, stand for themselves.
        """
        values = self.rows, *self.cone, *extra_values
        return numbered(values, [self.base], self.base.serial)

    @cached_property
    def facts(self) -> tuple[ConeFacts, list[Value]]:
        """Returns the facts of the cone's structure, and the cone's Values by place."""
        key, values = self.numbered()
        facts = self.projections.cones.get(key)
        if facts is None:
            facts = self.projections.cones[key] = self._facts_of(values)
        return facts, values

    @cached_property
    def layouts(self) -> dict[Value, Layout]:
        """Returns the layouts of the cone's Values. Values whose tokens are mixed are left out."""
        cone, values = self.facts
        return {values[place]: layout for place, layout in cone.layouts.items()}

    def _facts_of(self, values: list[Value]) -> ConeFacts:
        """Returns the facts of a cone: the layouts that can be followed from its products."""
        places = {value: place for place, value in enumerate(values)}
        tokens = {product.dot: token_layout(product.dot.shape) for product in self.products}
        layouts_to_roots = layouts_of(self.roots, tokens)
        layouts = {root: layouts_to_roots[root] for root in self.roots}
        for value in self.cone[len(layouts) :]:
            if any(source in layouts for source in value.sources):
                with suppress(Mixed):
                    layouts[value] = layout_of(value, layouts)
        return ConeFacts({places[value]: layout for value, layout in layouts.items()})

    def _is_followed(self, value: Value, seen: set[Value]) -> bool:
        """Returns True if the Value belongs to the cone.

        seen  the Values of the cone that were made before it
        """
        if is_projection(value) or value.op in ("write", "opaque"):
            return False
        if value.numel > _LARGE * max(1, self.tokens):
            return False
        others = [source for source in value.sources if source not in seen and not source.model]
        if value.op == "sum":  # with another activation, or an input as large: the residual
            size = value.numel
            return not any(source.active or source.numel == size for source in others)
        # a product with cached rows is attention
        return value.op != "dot" or not any(source.active for source in others)

    def to_rows(self, value: Value, layout: Layout) -> Value:
        """Returns a Value as rows [tokens, other elements]. Raises Mixed if it does not have all
        tokens.
        """
        form, digits = self.projections.form, [digit for axis in layout for digit in axis]
        if token_count(digits) != self.tokens:
            raise Mixed(value)
        by_digits = form.reshape(value, [size for _, size in digits])
        rows = form.permute(by_digits, token_order(digits))
        return form.reshape(rows, (self.tokens, value.numel // max(self.tokens, 1)))

    @cached_property
    def writes(self) -> list[Value]:
        """Returns the writes of Values in the cone, in order."""
        users = self.projections.users
        readers = {user for value in self.cone for user in users.get(value, ())}
        return sorted((reader for reader in readers if reader.op == "write"), key=serial)

    @cached_property
    def next_sites(self) -> list[Site]:
        """Returns the sites whose activation is computed from these products."""
        sites, own = self.projections.sites, (self.rows, *self.roots)
        return [sites[value] for value in self.layouts if value in sites and value not in own]

    @cached_property
    def readings(self) -> dict[Value, ColumnReading]:
        """Returns what probing says of each Value."""
        cone, values = self.facts
        if cone.readings is None:
            tokens = max(1, self.tokens)
            sizes = {place: values[place].numel // tokens for place in cone.layouts}
            # no part of a prologue is larger
            places = [place for place, size in sizes.items() if 1 < size <= self.columns]
            probed = self._probe([values[place] for place in places])
            pairs = zip(places, probed, strict=True)
            cone.site = self
            cone.readings = {place: reading for place, reading in pairs if reading is not None}
        return {values[place]: reading for place, reading in cone.readings.items()}

    def readings_of(self, kind: str) -> list[tuple[Value, ColumnReading]]:
        """Returns the Values of one kind with their readings, in order."""
        return [entry for entry in self.readings.items() if entry[1].kind == kind]

    def probe(self) -> None:
        """Reads the cone itself, if another of its structure was probed: that has other tables."""
        facts, _ = self.facts
        if facts.site is not self:
            facts.readings = None
            self.__dict__.pop("readings", None)

    def reading_of(self, value: Value) -> ColumnReading | None:
        """Returns the reading of a Value that is in the cone or computed from it, or None."""
        if value in self.readings:
            return self.readings[value]
        with suppress(Mixed):
            self.layouts.update(layouts_of([value], self.layouts))
        return next(self._probe([value]), None) if value in self.layouts else None

    def _probe(self, values: list[Value]) -> Iterator[ColumnReading | None]:
        """Yields the reading of each Value, or None if it has none."""
        try:
            tensors = self._run(values, _codes(self.columns))
        except (Mixed, Undecided):
            yield from (None for _ in values)
            return
        for value in values:
            rows = tensors.get(value)
            yield None if rows is None else _classify(rows, self.columns)

    def _run(self, values: list[Value], codes: Tensor) -> dict[Value, Tensor]:
        """Returns tensors [code, token, element] of the Values that can be run."""
        if self.tokens > 1:
            return self._run_codes(values, codes)
        # one token has no axis along which codes could stand
        runs = [self._run_codes(values, code.unsqueeze(0)) for code in codes]
        return {value: torch.cat([run[value] for run in runs]) for value in runs[0]}

    def _run_codes(self, values: list[Value], codes: Tensor) -> dict[Value, Tensor]:
        """Runs the Values once, and again if they divide the tokens at more places."""
        binding = self.projections.binding(self, len(codes))
        tensors = self._run_values(values, codes, binding)
        finer_binding = binding.refined()
        if finer_binding is not None:
            self.projections.cuts[self.tokens][self.facts[0]] = finer_binding.cuts
            tensors = self._run_values(values, codes, finer_binding)
        return tensors

    def _run_values(
        self, values: list[Value], codes: Tensor, binding: Binding
    ) -> dict[Value, Tensor]:
        """Returns the tensors of the Values that can be run."""
        rows, roots = codes.repeat_interleave(binding.period, 0), dict[Value, Tensor]()
        for product, first, last in self.parts:
            inverse = pow(field.number(product.number, POINT), -1, POINT.p)
            part = rows[:, first:last] * inverse % POINT.p
            roots[product.root] = part.reshape(binding.shape(self.layouts[product.root]))
        evaluation = Evaluation(binding, self.layouts, roots, POINT)
        tensors = dict[Value, Tensor]()
        for value in values:
            with suppress(Mixed, Undecided):
                evaluation.run([value])
                elements = evaluation.flat(value)
                tensors[value] = elements.reshape(binding.copies, binding.period, -1)
        return tensors


def _codes(columns: int) -> Tensor:
    """Returns the codes of the columns, row by row: powers of their numbers, twos, and signs of
    their bits.
    """
    numbers = torch.arange(1, columns + 1)
    powers = [field.power(numbers, power, POINT.p) for power in range(_MOMENTS)]
    twos = torch.full((columns,), 2, dtype=torch.int64)
    bits = [
        torch.where((numbers - 1) >> bit & 1 == 1, POINT.p - 1, 1)
        for bit in range(max(1, (columns - 1).bit_length()))
    ]
    return torch.stack([*powers, twos, *bits])


def _classify(elements: Tensor, columns: int) -> ColumnReading | None:
    """Returns the reading of an element-wise Value, or None.

    elements  what the Value is [code, token, element]
    """
    moments, twos, bits = elements[:_MOMENTS], elements[_MOMENTS], elements[_MOMENTS + 1 :]
    ones = moments[0]
    if not ones.numel() or not bool(ones.any()):
        return None
    is_linear = torch.equal(twos, ones * 2 % POINT.p)
    is_minus = bits == (POINT.p - ones) % POINT.p
    if not bool((is_minus | (bits == ones)).all()):
        return _read_pairs_of_columns(moments, columns) if is_linear else None
    indices = torch.zeros_like(ones[0])
    for bit, is_set in enumerate(is_minus[:, 0]):
        indices += is_set.long() << bit
    is_same = torch.equal(is_minus, is_minus[:, :1].expand_as(is_minus))
    if not is_same or int(indices.max()) >= columns:
        return None
    return ColumnReading("moved" if is_linear else "normed", indices, None, (ones,))


def _read_pairs_of_columns(moments: Tensor, columns: int) -> ColumnReading | None:
    """Returns the reading of elements that are made of two columns, or None.

    The numbers of the columns are a and b, from 1 on.
    """
    (moment0, moment1, moment2, moment3, moment4), p = moments, POINT.p
    inverse = field.power((moment0 * moment2 - moment1 * moment1) % p, -1, p)
    total = (moment0 * moment3 - moment1 * moment2) % p * inverse % p  # a + b
    product = (moment1 * moment3 - moment2 * moment2) % p * inverse % p  # a b
    square = total * total - 4 * product
    root = square.clamp_min(0).double().sqrt().round().long()
    is_root = (root * root == square) & (square > 0) & (total <= 2 * columns)
    fits = moment4 == (total * moment3 - product * moment2) % p
    if not bool((is_root & fits).all()):
        return None
    low, high = (total - root) // 2, (total + root) // 2
    high_factor = (moment1 - low * moment0) % p * field.power(root, -1, p) % p
    low_factor = (moment0 - high_factor) % p
    is_same = bool(((low == low[:1]) & (high == high[:1])).all())
    if not is_same or int(low.min()) < 1 or int(high.max()) > columns:
        return None
    return ColumnReading("turned", low[0] - 1, high[0] - 1, (low_factor, high_factor))


def from_rows(form: Form, rows: Value, value: Value, layout: Layout) -> Value:
    """Returns a Value with the shape of ``value`` from rows, as ``Site.to_rows`` makes them."""
    digits = [digit for axis in layout for digit in axis]
    order_of_rows = token_order(digits)
    by_digits = form.reshape(rows, [digits[k][1] for k in order_of_rows])
    return form.reshape(form.permuted_back(by_digits, order_of_rows), value.shape)
