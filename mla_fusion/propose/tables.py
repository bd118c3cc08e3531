"""Tables of a rotation as the model holds them.

Substitution says what each column of a table is, as some expression. The same numbers stand in what
the cone reads beside its products, or in what that was made of by moves: the table is put together
from columns of the one that gives the fewest runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mla_fusion.exact.evaluate import Evaluation, Undecided
from mla_fusion.exact.weights import Weight
from mla_fusion.graph.form import MOVES, Value, filled_with
from mla_fusion.graph.layout import (
    Layout,
    Mixed,
    broadcast_to,
    has_tokens,
    regroup,
    token_free_axis,
)
from mla_fusion.propose.sites import Site, to_rows

_ABOVE = 12  # moves that are looked through


def known(site: Site, run: Evaluation) -> list[tuple[Value, Tensor]]:
    """Rows [T, n] of what is beside the products, and its numbers [tokens, n]."""
    form, found = site.projections.form, dict[Value, Tensor]()
    for value, layout in _beside(site):
        try:
            numbers = run.beside(value, layout)
            if isinstance(numbers, Weight):
                continue
            rows = to_rows(form, value, layout, site.tokens)
            if rows in found:
                continue
            digits = run.binding.digits(layout)
            tensor = numbers.expand(run.binding.shape(layout))
            tensor = tensor.reshape([size for _, size in digits])
            at = sorted((k for k, d in enumerate(digits) if d[0]), key=lambda k: -digits[k][0])
            rest = [k for k, d in enumerate(digits) if not d[0]]
            found[rows] = tensor.permute([*at, *rest]).reshape(run.binding.tokens, -1)
        except (Mixed, Undecided, RuntimeError):
            continue
    return list(found.items())


def _beside(site: Site) -> Iterator[tuple[Value, Layout]]:
    """What the cone reads that is no activation, and what that was moved from."""
    form, seen = site.projections.form, set[tuple[Value, Layout]]()
    for value, layout in site.layouts.items():
        if value.op not in ("product", "sum", "dot"):
            continue
        for source in value.sources:
            if source.active or filled_with(source) is not None:
                continue
            own = _of_operand(value, source, layout)
            if value.op != "dot" and own:  # of one row for all sequences, each token's
                own = layout[len(layout) - len(own) :]
                is_whole = map(has_tokens, ((axis,) for axis in own))
                pairs = zip(is_whole, value.shape[-len(own) :], source.shape, strict=True)
                source = form.expand(source, [n if whole else one for whole, n, one in pairs])
                own = broadcast_to(own, source)
            for above in _above(source, own):
                if above not in seen and has_tokens(above[1]):
                    seen.add(above)
                    yield above


def _of_operand(value: Value, source: Value, layout: Layout) -> Layout:
    if value.op != "dot":
        return broadcast_to(layout, source)
    if source is value.sources[0]:
        return (*layout[:-1], token_free_axis(source.shape[-1]))
    size = token_free_axis(source.shape[-2])
    return (*layout[: len(source.shape) - 2], size, layout[-1])


def _above(value: Value, layout: Layout) -> Iterator[tuple[Value, Layout]]:
    stack, count = [(value, layout)], 0
    while stack and count < _ABOVE:
        value, layout = stack.pop()
        count += 1
        yield value, layout
        one = value.sources[0] if value.sources else None
        if one is None:
            continue
        if value.op in ("product", "cast") and len(value.sources) == 1:
            stack.append((one, layout))
        elif value.op == "reshape":
            above = regroup(layout, one.shape)
            if above is not None:
                stack.append((one, above))
        elif value.op == "permute":
            back = [value.literal.index(axis) for axis in range(len(value.literal))]
            stack.append((one, tuple(layout[at] for at in back)))
        elif value.op == "expand":
            stack.append((one, broadcast_to(layout, one)))
        elif value.op in ("join", "slice") and value.op in MOVES:
            axis = value.literal if value.op == "join" else value.literal[0]
            for source in reversed(value.sources):
                own = [
                    token_free_axis(source.shape[axis]) if at == axis else digits
                    for at, digits in enumerate(layout)
                ]
                stack.append((source, tuple(own)))


def assembled(site: Site, wanted: Tensor, candidates: list[tuple[Value, Tensor]]) -> Value | None:
    """A table [T, n] of numbers [tokens, n], from columns of one candidate, or of minus it."""
    form, best = site.projections.form, list[tuple[int, int, Value]]()
    for value, numbers in candidates:
        places = {tuple(column): k for k, column in enumerate(numbers.T.tolist())}
        columns = [places.get(tuple(column)) for column in wanted.T.tolist()]
        if None not in columns:
            steps = torch.tensor(columns, dtype=torch.int64).diff()
            runs = 1 + int((steps.diff() != 0).sum()) if len(steps) > 1 else 1
            table = form.take(value, 1, columns)  # type: ignore[arg-type]
            best.append((runs, value.serial, table))
    return min(best, key=lambda one: one[:2])[2] if best else None
