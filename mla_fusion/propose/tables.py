"""Finds the tables of a rotation as the model holds them.

``rotations.py`` says what each column of a table is, as some expression. The same numbers may stand
in what the cone reads beside its products, or in what that was made of by moves. The table is put
together from columns of the candidate that gives the fewest runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from mla_fusion.exact.evaluate import Evaluation, Undecided
from mla_fusion.graph.form import MOVES, Value, filled_with
from mla_fusion.graph.layout import (
    Layout,
    Mixed,
    broadcast_to,
    has_tokens,
    is_token_free,
    source_layout,
)
from mla_fusion.propose.sites import Site

_MOST_MOVES = 12  # most moves on the way up from an operand


def table_candidates(site: Site, evaluation: Evaluation) -> list[tuple[Value, Tensor]]:
    """Returns rows [T, n] of the Values beside the products, and their numbers [tokens, n]."""
    candidates = dict[Value, Tensor]()
    for value, layout in dict.fromkeys(_operands_beside(site)):
        if value.numel > site.tokens * site.columns:  # of one token: rows of all tokens
            continue
        with suppress(Mixed, Undecided, RuntimeError):
            numbers = evaluation.dense(evaluation.beside(value, layout))
            rows = site.to_rows(value, layout)
            candidates.setdefault(rows, evaluation.binding.rows(numbers, layout))
    return list(candidates.items())


def _operands_beside(site: Site) -> Iterator[tuple[Value, Layout]]:
    """Yields what the cone reads that is not of it, and what that was moved from, with layouts.

    That may be an activation, such as angles that a product makes of another input.
    """
    form = site.projections.form
    for value, layout in site.layouts.items():
        if value.op not in ("product", "sum", "dot"):
            continue
        for place, source in enumerate(value.sources):
            if source in site.layouts or filled_with(source) is not None:
                continue
            axes = source_layout(value, place, layout) or ()
            if value.op != "dot" and axes:  # one row for all tokens becomes a row for each
                missing_axes = len(layout) - len(source.shape)
                source = form.reshape(source, (1,) * missing_axes + source.shape)
                sizes = zip(layout, value.shape, source.shape, strict=True)
                source = form.expand(
                    source, [own if is_token_free(axis) else size for axis, size, own in sizes]
                )
                axes = broadcast_to(layout, source)
            for moved_source in _moved_sources(source, axes):
                if site.tokens == 1 or has_tokens(moved_source[1]):
                    yield moved_source


def _moved_sources(value: Value, layout: Layout) -> Iterator[tuple[Value, Layout]]:
    """Yields a Value and the Values that it was moved from, with layouts."""
    stack, count = [(value, layout)], 0
    while stack and count < _MOST_MOVES:
        value, layout = stack.pop()
        count += 1
        yield value, layout
        is_multiple = value.op in ("product", "cast") and len(value.sources) == 1
        if is_multiple or value.op in MOVES:
            for place in reversed(range(len(value.sources))):
                layout_of_source = source_layout(value, place, layout)
                if layout_of_source is not None:
                    stack.append((value.sources[place], layout_of_source))


def assemble_table(
    site: Site, numbers: Tensor, candidates: list[tuple[Value, Tensor]]
) -> Value | None:
    """Returns the table [T, n] with these numbers, made of columns of one candidate, or None.

    candidates  Values [T, m] with their numbers [tokens, m]
    """
    tables = list[tuple[int, int, Value]]()
    columns_of_numbers = list(map(tuple, numbers.T.tolist()))
    for value, candidate_numbers in candidates:
        places = {tuple(column): place for place, column in enumerate(candidate_numbers.T.tolist())}
        columns = [places.get(column) for column in columns_of_numbers]
        if None not in columns:
            steps = torch.tensor(columns, dtype=torch.int64).diff()
            runs = 1 + int((steps.diff() != 0).sum()) if len(steps) > 1 else 1
            table = site.projections.form.take(value, 1, columns)  # type: ignore[arg-type]
            tables.append((runs, value.serial, table))
    return min(tables, key=lambda entry: entry[:2])[2] if tables else None
