"""Pairs of columns, and the tables of cos and sin, of what is turned.

Each pair of elements holds the two columns of a pair. There are two ways to say which column is the
even one: that with equal factors on the diagonal is taken for the query; the key follows the
query's factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fusion.exact.evaluate import Evaluation
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.propose.norms import filled
from mla_fusion.propose.sites import POINT, Reading, Site, to_rows
from mla_fusion.propose.tables import assembled, known


@dataclass(frozen=True)
class Pairs:
    """Of each pair, head after head.

    first, second  elements of the Value
    even, odd      columns of the site
    diagonal       factor of the even column in the first element, of one head [1, size / 2] at the
                   first token
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
        return 2 * len(self.first) // self.size

    @property
    def columns(self) -> Tensor:
        """Of the site, as the kernel takes them: [heads, size], even and odd beside each other."""
        both = torch.stack((self.even, self.odd), -1)
        return both.reshape(self.heads, self.size)

    @property
    def layouts(self) -> tuple[str, str]:
        """The order of elements before and behind the rotation."""
        steps = int(self.odd[0] - self.even[0]), int(self.second[0] - self.first[0])
        before, behind = ("interleaved" if abs(step) == 1 else "half" for step in steps)
        return before, behind

    @property
    def places(self) -> Tensor:
        """Of each element of the Value, its place in the kernel's rows: halves, head after head."""
        half = self.size // 2
        number = torch.arange(len(self.first))
        at = number // half * self.size + number % half
        found = torch.empty(2 * len(self.first), dtype=torch.int64)
        found[self.first], found[self.second] = at, at + half
        return found


def pairs(reading: Reading, size: int, like: Pairs | None = None) -> Pairs | None:
    """None where the elements are no pairs, or pairs of several heads of ``size``."""
    one, other = reading.columns, reading.second_columns
    assert other is not None
    if len(one) % size:
        return None
    elements: dict[tuple[int, int], list[int]] = {}
    for element, columns in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
        elements.setdefault(columns, []).append(element)
    if any(len(two) != 2 for two in elements.values()):
        return None
    found = sorted((*two, *columns) for columns, two in elements.items())
    first, second, low, high = (
        torch.tensor(row, dtype=torch.int64) for row in zip(*found, strict=True)
    )
    half = size // 2
    heads = torch.arange(len(first)) // half
    if not (torch.equal(first // size, heads) and torch.equal(second // size, heads)):
        return None
    of_low, of_high = (factors[:1] for factors in reading.factors)  # the first token says it
    straight = of_low[:, first], of_high[:, second]
    crossed = of_high[:, first], of_low[:, second]
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


def unrotated(reading: Reading, size: int) -> Pairs:
    """What is only moved, as turned by cos 1 and sin 0."""
    half, count = size // 2, len(reading.columns) // 2
    number = torch.arange(count)
    first = number // half * size + number % half
    second = first + half
    one = torch.ones(1, half, dtype=torch.int64)
    even, odd = reading.columns[first], reading.columns[second]
    return Pairs(first, second, even, odd, one, size)


def tables(site: Site, value: Value, found: Pairs) -> tuple[Value, Value]:
    """cos and sin [tokens, size] of the first head: what the graph makes of ones in the even
    columns, and of ones in the odd; as the model's own tables, where their numbers are the same.
    """
    form, half = site.projections.form, found.size // 2
    rows = to_rows(form, value, site.layouts[value], site.tokens)

    def made_of(columns: Tensor, elements: Tensor) -> Value:
        ones = torch.zeros(1, site.columns, dtype=torch.float32)
        ones[0, columns[:half]] = 1
        row = form.take(rows, 1, elements[:half].tolist())
        return filled(site, row, form.constant(ones))

    first, second = found.first, found.second
    cos = made_of(found.even, first), made_of(found.odd, second)
    sin = form.negated(made_of(found.odd, first)), made_of(found.even, second)
    run = Evaluation(site.projections.binding(site.tokens, 1), site.layouts, {}, POINT)
    candidates = known(site, run)
    made = []
    for parts in (cos, sin):
        table = form.join(parts, 1)
        numbers = _numbers(site, run, value, found, is_sine=parts is sin)
        own = assembled(site, numbers, candidates)
        if own is None and table.active:
            raise Departure("rope.absent", "the tables are made of activations", [value])
        made.append(table if own is None else own)
    return made[0], made[1]


def _numbers(site: Site, run: Evaluation, value: Value, found: Pairs, is_sine: bool) -> Tensor:
    """What the probes saw of a table [tokens, size]."""
    reading, half = site.readings[value], found.size // 2
    columns, (low, high) = reading.columns, reading.factors

    def factor(elements: Tensor, of_columns: Tensor) -> Tensor:
        is_low = columns[elements] == of_columns
        return torch.where(is_low, low[:, elements], high[:, elements])[:, :half]

    first, second, even, odd = found.first, found.second, found.even, found.odd
    if is_sine:
        halves = (POINT.p - factor(first, odd)) % POINT.p, factor(second, even)
    else:
        halves = factor(first, even), factor(second, odd)
    return torch.cat(halves, 1)
