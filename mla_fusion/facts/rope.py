"""RoPE by meaning: each pair of product columns is mixed by a 2x2 matrix whose entries are table
columns.

    out[first]  = x[first] * cos_first  - x[second] * sin_first
    out[second] = x[second] * cos_second + x[first] * sin_second

The kernel treats the two halves of cos and sin independently, so every such map can be handed to
it; which columns form a pair (interleaved or half), where the pair lands (half or interleaved
output) and which table column, real or imaginary part, sign and factor each entry is, are all read
off the values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.fx import Node

from mla_fusion.facts.decode import Decoder, Reading, small_scalars
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.kinds import is_faithful_cast, is_getitem, is_view
from mla_fusion.fx.program import Program

_SAME_DIRECTION = 1e-10
_SAMPLES = 8  # rows by which a coefficient is compared with the columns of a base
_FEWEST_ROWS = 4  # of one table: where one row serves all tokens, a draw is one sample


@dataclass(frozen=True, kw_only=True)
class TableRun:
    """Columns ``start, start+step, ...`` (``count`` of them) of ``field(base)``, times ``factor``.

    rows says how the base's rows relate to tokens: "token", "position" (shared by all sequences),
    "sequence" or "one".
    """

    base: Node
    field: str  # "", "real" or "imag"
    start: int
    step: int
    count: int
    factor: float
    rows: str


Table = tuple[TableRun, ...]


@dataclass(frozen=True, kw_only=True)
class RopeFact:
    """``node`` holds the rotated columns of the product.

    heads, rope_dim    N (1 for k) and Dr
    first, second      [heads][Dr/2] product columns of each pair
    layout             of the output: "half" or "interleaved"
    cos, sin           full-width tables in the kernel's order, as runs of base columns; empty where
                       nothing rotates
    codes              of the node's shape: (token * heads + head) * Dr + place
    duplicates         nodes that hold the same values by way of a write into the product's own view
    factor             what columns that nothing rotates are multiplied by; of a rotation, the
                       tables have it
    """

    node: Node
    heads: int
    rope_dim: int
    first: tuple[tuple[int, ...], ...]
    second: tuple[tuple[int, ...], ...]
    layout: str
    cos: Table
    sin: Table
    codes: torch.Tensor
    duplicates: tuple[tuple[Node, torch.Tensor], ...] = ()
    factor: float = 1.0

    @property
    def rotates(self) -> bool:
        return bool(self.cos)

    @property
    def of_one_head(self) -> RopeFact | None:
        """The rotation of one head where all heads rotate the same columns: what was repeated for
        them before.
        """
        if self.heads == 1 or len({*zip(self.first, self.second, strict=True)}) != 1:
            return self if self.heads == 1 else None

        def of_first(codes: torch.Tensor) -> torch.Tensor:
            return codes // (self.heads * self.rope_dim) * self.rope_dim + codes % self.rope_dim

        duplicates = tuple((node, of_first(codes)) for node, codes in self.duplicates)
        one = replace(self, heads=1, first=self.first[:1], second=self.second[:1])
        return replace(one, codes=of_first(self.codes), duplicates=duplicates)

    @property
    def input_layout(self) -> str:
        """ "interleaved" or "half" where all pairs of a head are so laid out, else "other"."""
        gaps = {
            s - f
            for fs, ss in zip(self.first, self.second, strict=True)
            for f, s in zip(fs, ss, strict=True)
        }
        if gaps == {1}:
            return "interleaved"
        return "half" if gaps == {self.rope_dim // 2} else "other"


def find(cone: Cone, decoder: Decoder, readings: dict[Node, Reading]) -> list[RopeFact]:
    """Complete rotations in the cone, of each set of columns the earliest node in half layout, or
    else the earliest.

    Half layout is what the kernel gives: a complex product whose real and imaginary parts are
    joined as halves is a rotation twice, and only the second can be had as it is.
    """
    found: dict[frozenset[int], RopeFact] = {}
    onward = (form for item in readings.items() for form in (item, *_onward(cone, *item)))
    for node, reading in onward:
        shape = _rotation_shape(cone, reading)
        if shape is None:
            continue
        columns = _columns(cone, reading.first)
        known = found.get(columns)
        if (
            known is not None
            and known.layout == "half"
            and not (is_view(node) and node in readings)
        ):
            continue
        fact = _check(cone, decoder, node, reading, shape)
        if fact is None:
            continue
        if known is None or (known.layout, fact.layout) == ("interleaved", "half"):
            found[columns] = fact
        elif is_view(node) and node in readings and _values(fact) == _values(known):
            found[columns] = replace(known, duplicates=(*known.duplicates, (fact.node, fact.codes)))
    return list(found.values())


def _onward(cone: Cone, node: Node, reading: Reading) -> list[tuple[Node, Reading]]:
    """A rotation in the forms that it takes before anybody reads it: products of 2x2 matrices leave
    pairs apart.
    """
    if is_view(node) or not _mixes_pairs(reading):
        return []
    chain = list(_only_views_of(cone, node))
    program = Program([node], chain, cone.view.binding, shrink=cone.shrink)
    first, second = (program.run([codes.double()]) for codes in (reading.first, reading.second))
    found = []
    for form in chain:
        ends = first[program.slot(form)], second[program.slot(form)]
        if isinstance(ends[0], torch.Tensor) and isinstance(ends[1], torch.Tensor):
            found.append((form, replace(reading, first=ends[0].long(), second=ends[1].long())))
    return found


def _only_views_of(cone: Cone, node: Node) -> Iterator[Node]:
    inside = set(cone.nodes)
    while len(node.users) == 1:
        (node,) = node.users
        if node not in inside or is_getitem(node) or not (is_view(node) or is_faithful_cast(node)):
            return
        yield node


def _mixes_pairs(reading: Reading) -> bool:
    return (
        reading.degree == 1
        and reading.first.dim() > 0
        and not bool((reading.first == reading.second).any())
    )


def _values(fact: RopeFact) -> tuple[object, ...]:
    return fact.heads, fact.first, fact.second, fact.layout, fact.cos, fact.sin


def _columns(cone: Cone, codes: torch.Tensor) -> frozenset[int]:
    met = torch.zeros(cone.width, dtype=torch.bool)
    met[codes % cone.width] = True
    return frozenset(met.nonzero().flatten().tolist())


@dataclass(frozen=True)
class _Shape:
    """Rows of ``width`` elements, ``heads`` of them a token; with ``axes`` in this order a row is
    contiguous.
    """

    heads: int
    width: int
    axes: list[int]


def _rotation_shape(cone: Cone, reading: Reading) -> _Shape | None:
    """Where every element mixes exactly two columns and the columns are as many as the elements.

    A row is the last axis, or the last few: [.., Dr/2, 2] of view_as_real, [.., 2, Dr/2] of two
    halves stacked.
    """
    if (
        not _mixes_pairs(reading)
        or not reading.first.numel()
        or reading.first.numel() % cone.tokens
    ):
        return None
    axes = _tokens_first(cone, reading.first)
    first, second = reading.first.permute(axes), reading.second.permute(axes)
    for width in accumulate(reversed(first.shape), operator.mul):
        if width < 4 or width % 2 or first.numel() % (cone.tokens * width):
            continue
        if _is_closed(first.reshape(-1, width), second.reshape(-1, width)):
            return _Shape(reading.first.numel() // (cone.tokens * width), width, axes)
    return None


def _tokens_first(cone: Cone, codes: torch.Tensor) -> list[int]:
    """The axes, those along which the token changes before the others, which hold a row."""
    token = codes // cone.width
    along = [bool((token != token.narrow(axis, 0, 1)).any()) for axis in range(codes.dim())]
    return sorted(range(codes.dim()), key=lambda axis: not along[axis])


def _is_closed(first: torch.Tensor, second: torch.Tensor) -> bool:
    """In each row as many outputs as inputs, and each input met twice."""
    both = torch.cat([first, second], -1).sort(-1).values
    return bool((both[:, 0::2] == both[:, 1::2]).all()) and bool(
        (both[:, :-2:2] != both[:, 2::2]).all()
    )


def _check(
    cone: Cone, decoder: Decoder, node: Node, reading: Reading, found: _Shape
) -> RopeFact | None:
    heads, width, axes = found.heads, found.width, found.axes
    shape = reading.first.permute(axes).shape
    low = torch.minimum(reading.first, reading.second).permute(axes).reshape(-1, width)
    high = torch.maximum(reading.first, reading.second).permute(axes).reshape(-1, width)
    token = low // cone.width
    if not bool((token == token[:, :1]).all()) or not bool((high // cone.width == token).all()):
        return None
    rows = _row_order(token[:, 0], cone.tokens, heads)
    if rows is None:
        return None
    codes = torch.empty(low.shape, dtype=torch.int64)
    codes[rows.reshape(-1)] = torch.arange(low.numel()).reshape(-1, width)
    low, high = (low % cone.width)[rows], (high % cone.width)[rows]  # [tokens, heads, width]
    if not bool((low == low[0]).all()) or not bool((high == high[0]).all()):
        return None
    half = width // 2
    layout, order = _output_layout(low[0], high[0], width)
    if layout is None:
        return None
    first, second = low[0][:, order[:half]], high[0][:, order[:half]]
    samples = _coefficients(cone, decoder, node, first, second, rows, order, axes)
    tables = None if samples is None else _match(cone, samples)
    if tables is None:
        return None
    cos, sin = tables
    return RopeFact(
        node=node,
        heads=heads,
        rope_dim=width,
        first=tuple(map(tuple, first.tolist())),
        second=tuple(map(tuple, second.tolist())),
        layout=layout,
        cos=cos,
        sin=sin,
        codes=codes.reshape(shape).permute([axes.index(axis) for axis in range(len(axes))]),
    )


def _row_order(token: torch.Tensor, tokens: int, heads: int) -> torch.Tensor | None:
    """[tokens, heads] row numbers: the heads of a token in the order in which the node holds
    them.
    """
    order = torch.argsort(token, stable=True)
    if not torch.equal(token[order], torch.arange(tokens).repeat_interleave(heads)):
        return None
    return order.reshape(tokens, heads)


def _output_layout(
    low: torch.Tensor, high: torch.Tensor, width: int
) -> tuple[str | None, torch.Tensor]:
    """Where the two outputs of a pair stand; the order that brings a row to the kernel's half
    layout.
    """
    place = torch.arange(width)
    for layout, order in (
        ("half", place),
        ("interleaved", torch.cat([place[0::2], place[1::2]])),
    ):
        halves = low[:, order], high[:, order]
        if all(torch.equal(part[:, : width // 2], part[:, width // 2 :]) for part in halves):
            return layout, order
    return None, place


@dataclass
class _Samples:
    """Coefficients of every pair, and the bases they may come from, over draws and tokens."""

    cos: torch.Tensor  # [samples, Dr]
    sin: torch.Tensor
    bases: dict[Node, list[torch.Tensor]]  # their values in each draw


def _coefficients(
    cone: Cone,
    decoder: Decoder,
    node: Node,
    first: torch.Tensor,
    second: torch.Tensor,
    rows: torch.Tensor,
    order: torch.Tensor,
    axes: list[int],
) -> _Samples | None:
    """Run the cone on the first column of every pair alone, then on the second, under several draws
    of the bases.

    Few tokens need more draws: in two dimensions, one of a thousand random columns may well point
    where a table does.
    """
    is_first = torch.zeros(cone.width, dtype=torch.bool)
    is_first[first.reshape(-1)] = True
    mask = is_first[cone.codes % cone.width]
    probes = decoder.probe * mask, decoder.probe * ~mask
    bases = cone.bases_of(node)
    draws, parts = [], []
    for draw in range(_draws_needed(cone, bases)):
        draws.append(decoder.bases if draw == 0 else small_scalars(cone.draw(decoder.generator)))
        for probe in probes:
            value = cone.run(probe, draws[-1], [node])[cone.slot(node)]
            if not isinstance(value, torch.Tensor):
                return None
            parts.append(value.permute(axes).reshape(-1, len(order))[rows])
    out = torch.stack(parts)[..., order].unflatten(0, (-1, 2)).unflatten(-1, (2, -1))
    # [draws, tokens, heads, 2, Dr/2], halves of the row as the kernel has them
    of_first, of_second = out.unbind(1)
    x = cone.rows(decoder.probe)
    x_first, x_second = x[:, first], x[:, second]
    cos = torch.cat([of_first[..., 0, :] / x_first, of_second[..., 1, :] / x_second], -1)
    sin = torch.cat([-of_second[..., 0, :] / x_second, of_first[..., 1, :] / x_first], -1)
    for table in (cos, sin):
        if not torch.allclose(table, table[:, :, :1].expand_as(table), rtol=1e-9, atol=1e-12):
            return None  # all heads must share one table
    drawn = {
        base: [draw[index] for draw in draws]
        for index, base in enumerate(cone.bases)
        if base in bases
    }
    return _Samples(cos[:, :, 0].flatten(0, 1), sin[:, :, 0].flatten(0, 1), drawn)


def _draws_needed(cone: Cone, bases: list[Node]) -> int:
    """So many that there are samples enough, of each table too whose rows serve several tokens."""
    shapes = [cone.shape(base) for base in bases]
    rows = [max(1, math.prod(shape[:-1])) for shape in shapes if shape and shape[-1] > 1]
    return max(-(-_SAMPLES // cone.tokens), *(-(-_FEWEST_ROWS // count) for count in rows), 1)


def _match(cone: Cone, samples: _Samples) -> tuple[Table, Table] | None:
    """Name each coefficient column as a base column times a factor; columns in a row become
    runs.
    """
    wanted = torch.cat([samples.cos, samples.sin], -1)
    unit = wanted / wanted.norm(dim=0, keepdim=True)
    best: list[tuple[Node, str, int, float, str] | None] = [None] * wanted.shape[1]
    for base, draws in samples.bases.items():
        for field, rows, stacked in _candidates(draws, cone.tokens):
            cosine = unit.T @ (stacked / stacked.norm(dim=0, keepdim=True))
            hit, column = cosine.abs().max(dim=1)
            nearest = stacked[:, column]
            factor = (wanted * nearest).sum(0) / nearest.square().sum(0)
            fits = zip(
                (1 - hit < _SAME_DIRECTION).tolist(), column.tolist(), factor.tolist(), strict=True
            )
            for place, (same, at, times) in enumerate(fits):
                if same and best[place] is None:
                    best[place] = (base, field, at, _round_factor(times), rows)
    entries = [entry for entry in best if entry is not None]
    half = samples.cos.shape[1]
    return (_runs(entries[:half]), _runs(entries[half:])) if len(entries) == len(best) else None


def _candidates(draws: list[torch.Tensor], tokens: int) -> list[tuple[str, str, torch.Tensor]]:
    """(field, rows, [draws * tokens, columns]) for each way in which the base's rows can meet the
    tokens.
    """
    found = []
    for field in ("real", "imag") if draws[0].is_complex() else ("",):
        values = [getattr(value, field) if field else value for value in draws]
        if not values[0].is_floating_point() or values[0].dim() == 0 or values[0].shape[-1] < 2:
            continue
        tables = [value.reshape(-1, value.shape[-1]) for value in values]
        count = tables[0].shape[0]
        if count == 0 or tokens % count:
            continue
        rows = "token" if count == tokens else "one" if count == 1 else "position"
        found.append(
            (field, rows, torch.cat([table.repeat(tokens // count, 1) for table in tables]))
        )
        if rows == "position":
            spread = [table.repeat_interleave(tokens // count, 0) for table in tables]
            found.append((field, "sequence", torch.cat(spread)))
    return found


def _round_factor(factor: float) -> float:
    nearest = round(factor)
    return float(nearest) if abs(factor - nearest) < 1e-9 and nearest else float(f"{factor:.10g}")


def _runs(entries: list[tuple[Node, str, int, float, str]]) -> Table:
    runs: list[TableRun] = []
    for base, field, column, factor, rows in entries:
        last = runs[-1] if runs else None
        if last is not None and (last.base, last.field, last.factor, last.rows) == (
            base,
            field,
            factor,
            rows,
        ):
            step = column - last.start if last.count == 1 else last.step
            if step > 0 and column == last.start + step * last.count:
                runs[-1] = TableRun(
                    base=base,
                    field=field,
                    start=last.start,
                    step=step,
                    count=last.count + 1,
                    factor=factor,
                    rows=rows,
                )
                continue
        runs.append(
            TableRun(
                base=base, field=field, start=column, step=1, count=1, factor=factor, rows=rows
            )
        )
    return tuple(runs)
