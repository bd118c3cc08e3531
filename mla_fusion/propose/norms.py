"""The weight and the epsilon of a norm, by substitution.

A row of equal elements ``(1 - eps) / 2`` makes the radicand a square: the normed row is then
``gamma * (1 - eps) / (1 + eps)``. So gamma is what the graph makes of that row, whatever it casts,
adds or multiplies on the way. Epsilons are tried: the numbers under the roots of the cone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch

from mla_fusion.exact import field
from mla_fusion.exact.evaluate import Evaluation, Undecided, layouts_of, order
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.fused import rms_norm
from mla_fusion.graph.layout import Binding, Mixed, cuts_of, token_layout
from mla_fusion.graph.numbers import Number
from mla_fusion.propose.sites import POINT, Site, to_rows


@dataclass(frozen=True)
class Norm:
    """
    value    the normed rows
    gamma    [n], made of the model's parameters
    epsilon  the number that was written
    columns  of the site, in the order of the normed row
    """

    value: Value
    gamma: Value
    epsilon: Fraction
    columns: torch.Tensor


def filled(site: Site, value: Value, fill: Value) -> Value:
    """``value`` with a row ``fill`` [1, columns] (or a number) in place of the site's products."""
    form, at, others = site.projections.form, 0, dict[Value, Value]()
    for product in site.products:
        width = product.columns
        row = form.slice(fill, 1, at, at + width) if fill.shape else fill
        by = product.times.power(-1)
        assert by is not None
        others[product.root] = form.expand(form.scaled(row, by), product.root.shape)
        at += width
    return form.substituted(value, others)


def solved(site: Site, value: Value, what: str) -> Norm:
    """Of a normed Value. Raises Departure where it is no RMSNorm of its columns.

    what  is normed, for messages
    """
    form, reading = site.projections.form, site.reading_of(value)
    if reading is None or reading.kind != "normed":
        raise Departure("norm.absent", f"{what} are not normed", [value])
    rows = to_rows(form, value, site.layouts[value], site.tokens)
    columns, size = reading.columns, len(reading.columns)
    tried = list(dict.fromkeys(_epsilons(site, value, size)))
    found = []
    for epsilon in tried:
        row = filled(site, rows, form.number((1 - epsilon) / 2))
        one = form.reshape(form.slice(row, 0, 0, 1), (size,))
        scale = (1 + epsilon) / (1 - epsilon)
        gamma = form.scaled(one, Number(scale))
        if not gamma.active:
            found.append(Norm(value, gamma, epsilon, columns))
    if not found:
        raise Departure(
            "norm.of_input", "what it is multiplied by is made of other activations", [value]
        )
    matching = _first_that_holds(site, value, rows, found)
    if matching is None:
        if any(_added_inputs(site, value)):
            detail = f"{what} have an epsilon that is no number of the graph"
            raise Departure("norm.runtime_eps", detail, [value])
        raise Departure(
            "norm.absent", f"{size} columns are not divided by their root mean square", [value]
        )
    return matching


def _added_inputs(site: Site, value: Value) -> Iterator[Value]:
    """Single numbers that are added under a root on the way to a Value, and are not known."""
    for one in order([value], site.roots):
        exponents = one.literal[0] if one.op == "product" else ()
        for source, exponent in zip(one.sources, exponents, strict=False):
            if exponent.denominator > 1 and source.op == "sum":
                single = (term for term in source.sources if prod(term.shape) == 1)
                yield from (term for term in single if not term.active)


def _epsilons(site: Site, value: Value, size: int) -> Iterator[Fraction]:
    """Numbers that are added under a root on the way to a Value."""
    squares = {product.times.ratio**2 for product in site.products}
    for one in order([value], site.roots):
        if one.op != "product":
            continue
        for source, exponent in zip(one.sources, one.literal[0], strict=True):
            if exponent.denominator > 1 and source.op == "sum":
                constant = source.literal[1]
                for square in squares:
                    for epsilon in (constant * square / size, constant * square):
                        if 0 < epsilon < 1:
                            yield epsilon
    yield Fraction(0)


def _first_that_holds(site: Site, value: Value, rows: Value, norms: Sequence[Norm]) -> Norm | None:
    form = site.projections.form
    columns = form.take(site.columns_leaf, 1, norms[0].columns.tolist())
    made = [rms_norm(form, columns, norm.gamma, norm.epsilon)[0] for norm in norms]
    given = {dot: site.layouts[dot] for dot in site.roots}
    given[site.columns_leaf] = token_layout((site.tokens,), site.columns_leaf.shape[1:])
    try:
        layouts = layouts_of([rows, *made], given)
        binding = Binding(cuts_of(layouts.values()), site.tokens)
        drawn = field.random(site.rows.serial, binding.shape(given[site.columns_leaf]))
        tensors = {**site.split_rows(drawn, binding), site.columns_leaf: drawn}
        run = Evaluation(binding, layouts, tensors, POINT)
        run.run([rows, *made])
    except (Mixed, Undecided):
        return None
    wanted = run.tensors[rows]
    return next(
        (
            norm
            for norm, one in zip(norms, made, strict=True)
            if torch.equal(run.tensors[one], wanted)
        ),
        None,
    )
