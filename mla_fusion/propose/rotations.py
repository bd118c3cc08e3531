"""Reads pairs of columns, and the tables of cos and sin, of a rotated Value.

``prologue.py`` asks this for query and key. ``tables.py`` finds the model's own tables.

Each pair of elements holds the two columns of a pair. Either column may be the even one. For the
query, the even column is the one with equal factors on the diagonal. The key follows the query's
factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fusion.exact.evaluate import Evaluation
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.propose.norms import fill_products
from mla_fusion.propose.sites import POINT, Reading, Site, to_rows
from mla_fusion.propose.tables import assemble_table, table_candidates


@dataclass(frozen=True)
class Pairs:
    """Describes the pairs of a rotated Value, head after head.

    first, second  elements of the Value
    even, odd      columns of the site
    diagonal       the factor of the even column in the first element, for one head at the first
                   token [1, size / 2]
    size           elements of a head
    """

    first: Tensor
    second: Tensor
    even: Tensor
    odd: Tensor
    diagonal: Tensor
    size: int

    @property
    def heads(self) -> int:
        """Returns the number of heads."""
        return 2 * len(self.first) // self.size

    @property
    def columns(self) -> Tensor:
        """Returns the columns of the site as the kernel takes them [heads, size]: even beside
        odd.
        """
        both = torch.stack((self.even, self.odd), -1)
        return both.reshape(self.heads, self.size)

    @property
    def layouts(self) -> tuple[str, str]:
        """Returns the order of elements before and after the rotation: "interleaved" or "half"."""
        steps = int(self.odd[0] - self.even[0]), int(self.second[0] - self.first[0])
        before, after = ("interleaved" if abs(step) == 1 else "half" for step in steps)
        return before, after

    @property
    def places(self) -> Tensor:
        """Returns, for each element of the Value, its place in the kernel's rows: halves, head
        after head.
        """
        half = self.size // 2
        number = torch.arange(len(self.first))
        first_places = number // half * self.size + number % half
        places = torch.empty(2 * len(self.first), dtype=torch.int64)
        places[self.first], places[self.second] = first_places, first_places + half
        return places


def read_pairs(reading: Reading, size: int, like: Pairs | None = None) -> Pairs | None:
    """Returns the pairs of a rotated Value, or None if it has none, or pairs across heads of
    ``size``.

    like  the query's pairs, whose factors the key follows
    """
    first_columns, second_columns = reading.columns, reading.second_columns
    assert second_columns is not None
    if len(first_columns) % size:
        return None
    elements: dict[tuple[int, int], list[int]] = {}
    for element, columns in enumerate(
        zip(first_columns.tolist(), second_columns.tolist(), strict=True)
    ):
        elements.setdefault(columns, []).append(element)
    if any(len(pair) != 2 for pair in elements.values()):
        return None
    rows = sorted((*pair, *columns) for columns, pair in elements.items())
    first, second, low, high = (
        torch.tensor(row, dtype=torch.int64) for row in zip(*rows, strict=True)
    )
    half = size // 2
    heads = torch.arange(len(first)) // half
    if not (torch.equal(first // size, heads) and torch.equal(second // size, heads)):
        return None
    # the factors of the first token are enough
    low_factors, high_factors = (factors[:1] for factors in reading.factors)
    straight = low_factors[:, first], high_factors[:, second]
    crossed = high_factors[:, first], low_factors[:, second]
    if like is None:
        is_even = (straight[0] == straight[1]).all(0) | ~(crossed[0] == crossed[1]).all(0)
        diagonal = torch.where(is_even, straight[0], crossed[0])[:1, :half]
    else:
        diagonal = like.diagonal
    repeated = diagonal.repeat(1, len(first) // half)
    is_even = (straight[0] == repeated).all(0) | ~(crossed[0] == repeated).all(0)
    return Pairs(
        first,
        second,
        torch.where(is_even, low, high),
        torch.where(is_even, high, low),
        torch.where(is_even, straight[0], crossed[0])[:1, :half],
        size,
    )


def rotated_pairs(site: Site, size: int) -> list[tuple[Value, Pairs]]:
    """Returns the rotated Values of a site that are pairs of heads of ``size``, with their
    pairs.
    """
    pairs_of = {
        value: read_pairs(reading, size)
        for value, reading in site.readings.items()
        if reading.kind == "turned"
    }
    return [(value, pairs) for value, pairs in pairs_of.items() if pairs is not None]


def identity_pairs(reading: Reading, size: int) -> Pairs:
    """Returns the pairs of a Value that is only moved: a rotation by cos 1 and sin 0."""
    half, count = size // 2, len(reading.columns) // 2
    number = torch.arange(count)
    first = number // half * size + number % half
    second = first + half
    ones = torch.ones(1, half, dtype=torch.int64)
    even, odd = reading.columns[first], reading.columns[second]
    return Pairs(first, second, even, odd, ones, size)


def read_tables(site: Site, value: Value, pairs: Pairs) -> tuple[Value, Value]:
    """Returns cos and sin [tokens, size] of the first head.

    They are what the graph makes of ones in the even columns, and of ones in the odd. The model's
    own tables replace them if the numbers are the same.
    """
    form, half = site.projections.form, pairs.size // 2
    rows = to_rows(form, value, site.layouts[value], site.tokens)

    def made_of(columns: Tensor, elements: Tensor) -> Value:
        """Returns what the graph makes of ones in these columns, as columns of a table."""
        ones = torch.zeros(1, site.columns, dtype=torch.float32)
        ones[0, columns[:half]] = 1
        row = form.take(rows, 1, elements[:half].tolist())
        return fill_products(site, row, form.constant(ones))

    first, second = pairs.first, pairs.second
    cos = made_of(pairs.even, first), made_of(pairs.odd, second)
    sin = form.negated(made_of(pairs.odd, first)), made_of(pairs.even, second)
    evaluation = Evaluation(site.projections.binding(site.tokens, 1), site.layouts, {}, POINT)
    candidates = table_candidates(site, evaluation)
    tables_read = []
    for parts in (cos, sin):
        table = form.join(parts, 1)
        numbers = _table_numbers(site, value, pairs, is_sine=parts is sin)
        model_table = assemble_table(site, numbers, candidates)
        if model_table is None and table.active:
            raise Departure("rope.absent", "the tables are made of activations", [value])
        tables_read.append(table if model_table is None else model_table)
    return tables_read[0], tables_read[1]


def _table_numbers(site: Site, value: Value, pairs: Pairs, is_sine: bool) -> Tensor:
    """Returns what probing saw of a table [tokens, size]."""
    reading, half = site.readings[value], pairs.size // 2
    columns, (low, high) = reading.columns, reading.factors

    def factor(elements: Tensor, of_columns: Tensor) -> Tensor:
        """Returns the factors of these columns in these elements, for the first head."""
        is_low = columns[elements] == of_columns
        return torch.where(is_low, low[:, elements], high[:, elements])[:, :half]

    first, second, even, odd = pairs.first, pairs.second, pairs.even, pairs.odd
    if is_sine:
        halves = (POINT.p - factor(first, odd)) % POINT.p, factor(second, even)
    else:
        halves = factor(first, even), factor(second, odd)
    return torch.cat(halves, 1)
