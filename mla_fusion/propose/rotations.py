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

from mla_fusion.exact import field
from mla_fusion.exact.evaluate import Evaluation
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.propose.norms import fill_products
from mla_fusion.propose.sites import POINT, ColumnReading, Site
from mla_fusion.propose.tables import assemble_table, table_candidates

ROPE = 64  # the width of a rotated part that the operator has
_HALF = ROPE // 2


@dataclass(frozen=True)
class Pairs:
    """Describes the pairs of a rotated Value, head after head.

    first, second  elements of the Value
    even, odd      columns of the site
    diagonal       the factor of the even column in the first element, for one head at the first
                   token [1, ROPE / 2]
    across         that of the odd column
    """

    first: Tensor
    second: Tensor
    even: Tensor
    odd: Tensor
    diagonal: Tensor
    across: Tensor

    @property
    def heads(self) -> int:
        """Returns the number of heads."""
        return len(self.first) // _HALF

    @property
    def columns(self) -> Tensor:
        """Returns the columns of the site as the kernel takes them [heads, ROPE]: even beside
        odd.
        """
        return torch.stack((self.even, self.odd), -1).reshape(self.heads, ROPE)

    @property
    def column_set(self) -> set[int]:
        """Returns the columns of all heads, without their order."""
        return set(self.columns.flatten().tolist())

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
        first_places = _first_halves(len(self.first))
        places = torch.empty(2 * len(self.first), dtype=torch.int64)
        places[self.first], places[self.second] = first_places, first_places + _HALF
        return places

    def multiple_of(self, other: Pairs) -> int | None:
        """Returns by what one number the factors are those of other pairs, or None."""
        own, others = (torch.cat((pairs.diagonal, pairs.across), 1) for pairs in (self, other))
        ratio = own * field.power(others, -1, POINT.p) % POINT.p
        return int(ratio[0, 0]) if bool((ratio == ratio[:, :1]).all()) else None


def _first_halves(count: int) -> Tensor:
    """Returns the places of the first elements of ``count`` pairs in rows of halves."""
    number = torch.arange(count)
    return number // _HALF * ROPE + number % _HALF


def read_pairs(reading: ColumnReading, like: Pairs | None = None) -> Pairs | None:
    """Returns the pairs of a rotated Value, or None if it has none, or pairs across heads of
    ``ROPE``.

    like  the query's pairs, whose factors the key follows
    """
    first_columns, second_columns = reading.columns, reading.second_columns
    assert second_columns is not None
    if len(first_columns) % ROPE:
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
    heads = torch.arange(len(first)) // _HALF
    if not (torch.equal(first // ROPE, heads) and torch.equal(second // ROPE, heads)):
        return None
    # the factors of the first token are enough
    low_factors, high_factors = (factors[:1] for factors in reading.factors)
    straight = low_factors[:, first], high_factors[:, second]
    crossed = high_factors[:, first], low_factors[:, second]
    if like is None:
        straight_equal, crossed_equal = straight[0] == straight[1], crossed[0] == crossed[1]
    else:
        diagonal = like.diagonal.repeat(1, len(first) // _HALF)
        straight_equal, crossed_equal = straight[0] == diagonal, crossed[0] == diagonal
    is_even = straight_equal.all(0) | ~crossed_equal.all(0)
    return Pairs(
        first,
        second,
        torch.where(is_even, low, high),
        torch.where(is_even, high, low),
        torch.where(is_even, straight[0], crossed[0])[:1, :_HALF],
        torch.where(is_even, crossed[0], straight[0])[:1, :_HALF],
    )


def rotated_pairs(site: Site) -> list[tuple[Value, Pairs]]:
    """Returns the rotated Values of a site that are pairs of heads of ``ROPE``, with their
    pairs.
    """
    entries = [(value, read_pairs(reading)) for value, reading in site.readings_of("turned")]
    return [(value, pairs) for value, pairs in entries if pairs is not None]


def identity_pairs(reading: ColumnReading) -> Pairs:
    """Returns the pairs of a Value that is only moved: a rotation by cos 1 and sin 0."""
    first = _first_halves(len(reading.columns) // 2)
    second = first + _HALF
    ones = torch.ones(1, _HALF, dtype=torch.int64)
    return Pairs(first, second, reading.columns[first], reading.columns[second], ones, ones)


def read_tables(site: Site, value: Value, pairs: Pairs) -> tuple[Value, Value]:
    """Returns cos and sin [tokens, ROPE] of the first head.

    They are what the graph makes of ones in the even columns, and of ones in the odd. The model's
    own tables replace them if the numbers are the same.
    """
    form, reading = site.projections.form, site.readings[value]
    rows = site.to_rows(value, site.layouts[value])

    def made_of(columns: Tensor, elements: Tensor) -> Value:
        """Returns what the graph makes of ones in these columns, as columns of a table."""
        ones = torch.zeros(1, site.columns, dtype=torch.float32)
        ones[0, columns[:_HALF]] = 1
        row = form.take(rows, 1, elements[:_HALF].tolist())
        return fill_products(site, row, form.constant(ones))

    def factors_of(columns: Tensor, elements: Tensor) -> Tensor:
        """Returns the factors of these columns that probing saw, as columns of a table."""
        low, high = reading.factors
        is_low = reading.columns[elements] == columns
        return torch.where(is_low, low[:, elements], high[:, elements])[:, :_HALF]

    cos = (pairs.even, pairs.first), (pairs.odd, pairs.second)
    sin = (pairs.odd, pairs.first), (pairs.even, pairs.second)
    evaluation = Evaluation(site.projections.binding(site, 1), site.layouts, {}, POINT)
    candidates = table_candidates(site, evaluation)
    tables_read = []
    for halves in (cos, sin):
        parts = [made_of(*half) for half in halves]
        numbers = [factors_of(*half) for half in halves]
        if halves is sin:  # the first half of the kernel's row has minus the sine
            parts[0], numbers[0] = form.negated(parts[0]), (POINT.p - numbers[0]) % POINT.p
        table = form.join(parts, 1)
        model_table = assemble_table(site, torch.cat(numbers, 1), candidates)
        if model_table is None and table.active:
            raise Departure("rope.absent", "the tables are made of activations", [value])
        tables_read.append(table if model_table is None else model_table)
    return tables_read[0], tables_read[1]
