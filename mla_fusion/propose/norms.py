"""Reads the weight and the epsilon of a norm by substitution.

``prologue.py`` asks this for the latents of query and key, ``departures.py`` for near misses.

A row of equal elements ``(s - eps) / 3``, where s is 9 / 4, makes the radicand a square. The
normed row is then ``gamma * (s - eps) / (s + eps)``. So gamma is what the graph makes of that row,
whatever it casts, adds or multiplies on the way. Candidates for epsilon are the numbers under the
roots of the cone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from mla_fusion.exact.evaluate import computed_from
from mla_fusion.exact.prove import Claim, prove
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import MOVES, Value, order, strip, strip_reshapes
from mla_fusion.graph.fused import rms_norm
from mla_fusion.graph.layout import token_layout
from mla_fusion.graph.numbers import Number
from mla_fusion.graph.read import values_of
from mla_fusion.propose.sites import Site

_SQUARE = Fraction(9, 4)  # the one epsilon that cannot be probed: rows would be 0


@dataclass(frozen=True)
class Norm:
    """The norm of some columns of a site.

    value    the normed rows
    gamma    the weight [n], made of the model's parameters
    epsilon  the number that was written
    columns  columns of the site, in the order of the normed row
    """

    value: Value
    gamma: Value
    epsilon: Fraction
    columns: list[int]


def fill_products(site: Site, value: Value, fill: Value) -> Value:
    """Returns ``value`` computed from other numbers in place of the site's products.

    fill  one row [1, columns], or one number
    """
    return site.projections.form.substituted(value, _substitutes(site, fill))


def _substitutes(site: Site, fill: Value) -> dict[Value, Value]:
    """Returns what stands for each of the site's products.

    fill  rows [tokens, columns], one row [1, columns], or one number
    """
    form, substitutes = site.projections.form, dict[Value, Value]()
    for product, first, last in site.parts:
        shape = product.root.shape
        row = form.slice(fill, 1, first, last) if fill.shape else fill
        row = form.scaled(row, product.number.inverse)
        is_all = row.numel == product.root.numel
        substitutes[product.root] = form.reshape(row, shape) if is_all else form.expand(row, shape)
    return substitutes


def read_norm(site: Site, value: Value, what: str) -> Norm:
    """Returns the norm that makes a Value. Raises Departure if it is no RMSNorm of its columns.

    what  names what is normed, for messages
    """
    if value.shape[-1] in site.projections.graph.sizes:
        raise Departure("linear.symbolic", f"{what} are of symbolic size", [value])
    form, reading = site.projections.form, site.reading_of(value)
    if reading is None or reading.kind != "normed":
        raise Departure("norm.absent", f"{what} are not normed", [value])
    rows = site.to_rows(value, site.layouts[value])
    shape, size, has_gamma = (site.tokens, site.columns), len(reading.columns), False
    leaf = form.activation(f"site {site.rows.serial}", shape)  # stands for the products
    # by the numbers by which nodes hold them
    multiples = [
        form.scaled(form.slice(leaf, 1, first, last), product.number)
        for product, first, last in site.parts
    ]
    products = form.join(multiples, 1)
    columns = reading.columns.tolist()
    latents = form.take(products, 1, columns)
    # numbers stay where they are in roots: only there a root is the kernel's
    fixed = {step: step for step in order([rows], site.roots) if not step.active}
    computed_rows = form.renamed(rows, fixed | _substitutes(site, products))
    activations = {leaf: token_layout(shape)}
    for epsilon in dict.fromkeys(_epsilon_candidates(site, value, size)):
        row = fill_products(site, rows, form.number((_SQUARE - epsilon) / 3))
        fill_result = form.reshape(form.slice(row, 0, 0, 1), (size,))
        gamma = form.scaled(fill_result, Number((_SQUARE + epsilon) / (_SQUARE - epsilon)))
        if gamma.active:
            continue
        has_gamma, normed = True, rms_norm(form, latents, gamma, epsilon)[0]
        try:
            prove(activations, site.tokens, [Claim("norm", computed_rows, normed)])
        except Departure:
            continue
        if not epsilon and not _has_floor(site, value):
            raise Departure("norm.absent", f"{what} are normed without an epsilon", [value])
        return Norm(value, gamma, epsilon, columns)
    if not has_gamma:
        raise Departure(
            "norm.of_input", "what it is multiplied by is made of other activations", [value]
        )
    terms = (term for radicand in _sums_under_roots(site, value) for term in radicand.sources)
    if any(term.numel == 1 and not term.active for term in terms):
        detail = f"{what} have an epsilon that is no number of the graph"
        raise Departure("norm.runtime_eps", detail, [value])
    raise Departure(
        "norm.absent", f"{size} columns are not divided by their root mean square", [value]
    )


def _has_floor(site: Site, value: Value) -> bool:
    """Returns True if a least length, which was left out, keeps a row of zeros from 0 / 0."""
    graph = site.projections.graph
    sums = {root for step in computed_from([value], site.roots) for root in radicands(step)}
    lengths = (
        strip(length, *MOVES)
        for node in graph.assumed
        for length in values_of([graph.readings[node]])
    )
    return any(not sums.isdisjoint(radicands(length)) for length in lengths)


def _sums_under_roots(site: Site, value: Value) -> Iterator[Value]:
    """Yields the sums of which a root is taken on the way to a Value."""
    for step in computed_from([value], site.roots):
        sums = map(strip_reshapes, radicands(step))
        yield from (radicand for radicand in sums if radicand.op == "sum")


def radicands(step: Value) -> Iterator[Value]:
    """Yields the Values of which a step takes a root."""
    if step.op == "product":
        yield from (source for source, power in step.operands if power.denominator > 1)


def _epsilon_candidates(site: Site, value: Value, size: int) -> Iterator[Fraction]:
    """Yields numbers that are added under a root on the way to a Value, and then 0."""
    squares = {product.number.ratio**2 for product in site.products}
    for radicand in _sums_under_roots(site, value):
        constant = radicand.number
        for square in squares:
            for epsilon in (constant * square / size, constant * square):
                if 0 < epsilon != _SQUARE:
                    yield epsilon
    yield Fraction(0)
