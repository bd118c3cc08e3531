"""Columns that are read as they are where other models rotate them (NoPE): the rotation by cos = 1,
sin = 0.

The kernel rotates whatever it is given; by these tables it hands the columns on. Pairs are those of
half layout: the columns of the weights are interleaved beforehand, and the kernel's own re-ordering
undoes that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.fx import Node

from mla_fusion.facts.multiples import Multiple, multiples
from mla_fusion.facts.rope import RopeFact
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.kinds import is_faithful_cast, is_view, is_writer, op_name, word
from mla_fusion.fx.sizes import is_size
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import reached
from mla_fusion.operators.known import JOINERS


def find(
    view: View, cone: Cone, taken: Collection[int], heads: int, width: int | None = None
) -> list[RopeFact]:
    """Columns of the product apart from those ``taken``, read as one piece of ``heads`` rows for
    each token.

    ``width``: of each row, where it is known. One fact for each set of columns and each factor by
    which it is read.
    """
    held: dict[tuple[tuple[int, ...], float], list[Multiple]] = {}
    for form in multiples(view, cone):
        columns = _columns(cone, form)
        if columns and len(columns) % (2 * heads) == 0 and not set(columns) & set(taken):
            held.setdefault((columns, form.factor), []).append(form)
    whole = cone.width - len(set(taken))
    facts = []
    for (columns, factor), forms in held.items():
        if len(columns) == (heads * width if width else whole):
            roots = list(_outermost(forms))
            if _are_read_unrotated(view, [root.node for root in roots]):
                facts.append(_fact(cone, columns, factor, roots, heads))
    return facts


def _columns(cone: Cone, form: Multiple) -> tuple[int, ...]:
    """The columns that a value holds of every token, each once; () where it holds some
    otherwise.
    """
    columns = (form.codes % cone.width).unique()
    whole = form.codes.numel() == cone.tokens * len(columns) == len(form.codes.unique())
    return tuple(columns.tolist()) if whole else ()


def _outermost(forms: list[Multiple]) -> Iterator[Multiple]:
    """Those that are not made of another of them."""
    nodes = {form.node for form in forms}
    return (form for form in forms if form.of not in nodes)


def _are_read_unrotated(view: View, roots: list[Node]) -> bool:
    """Do products, cache writes and operators of attention read them, and no step that might be a
    rotation?
    """
    passed = reached(roots, lambda node: filter(_passes, node.users))
    readers = (user for node in passed for user in node.users if not _passes(user))
    return all(_reads_rows(view, user) or is_size(user) for user in readers)


def _passes(node: Node) -> bool:
    is_moved = is_view(node) or is_faithful_cast(node) or word(node) in JOINERS
    return (is_moved or _is_multiple(node)) and not is_size(node)


def _is_multiple(node: Node) -> bool:
    """Is it one number times a value, as attention scales both of its sides?"""
    return word(node) in ("mul", "div") and isinstance(node.args[1], (int, float))


def _reads_rows(view: View, user: Node) -> bool:
    return (
        user.op == "output"
        or user in view.contractions
        or is_writer(user)
        or "attention" in op_name(user)
    )


def _fact(
    cone: Cone, columns: tuple[int, ...], factor: float, roots: list[Multiple], heads: int
) -> RopeFact:
    width = len(columns) // heads
    rows = [columns[head * width : (head + 1) * width] for head in range(heads)]
    place = torch.full((cone.width,), -1, dtype=torch.int64)
    place[list(columns)] = torch.arange(len(columns))
    codes = [
        root.codes // cone.width * len(columns) + place[root.codes % cone.width] for root in roots
    ]
    return RopeFact(
        node=roots[0].node,
        heads=heads,
        rope_dim=width,
        first=tuple(row[: width // 2] for row in rows),
        second=tuple(row[width // 2 :] for row in rows),
        layout="half",
        cos=(),
        sin=(),
        codes=codes[0],
        duplicates=tuple(
            (root.node, code) for root, code in zip(roots[1:], codes[1:], strict=True)
        ),
        factor=factor,
    )
