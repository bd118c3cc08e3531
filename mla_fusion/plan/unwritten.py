"""What the readers of new rows do with them, if none is a write that the kernel could do: in the
user's terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from mla_fusion.facts import cache_write
from mla_fusion.facts.cache_write import WriteFact
from mla_fusion.facts.obstacle import Obstacle, Obstacles
from mla_fusion.fx.kinds import (
    Kind,
    has_effect,
    is_cast,
    is_mutating,
    is_view,
    is_writer,
    kind_of,
    op_name,
    word,
)
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import INPUTS, origin, reached, views_and_casts
from mla_fusion.operators.known import JOINERS, is_collective, value_of
from mla_fusion.plan.outputs import ValueTree, live_users

_FARTHEST = 16  # nodes looked at behind a reader
_PAIR = ("c_kv", "k_pe")


def read_elsewhere(
    view: View, trees: dict[str, ValueTree], name: str, readers: Sequence[Node]
) -> Obstacles:
    """The new rows are read beside their write, or by nobody; and what is wrong with that write
    itself.
    """
    if not _are_written(view, readers):
        return (_not_written(name, readers),)
    names = ", ".join(reader.name for reader in readers)
    message = f"{len(readers)} nodes read the new {name} rows: {names}"
    joined = (one for reader in readers for one in joined_row(view, trees, reader))
    return (Obstacle("cache.rows_read", message), *dict.fromkeys(joined))


def _not_written(name: str, readers: Sequence[Node]) -> Obstacle:
    def behind(node: Node) -> Sequence[Node]:
        passes = word(node) in JOINERS or is_view(node) or is_cast(node)
        return live_users(node) if passes else ()

    names = [
        end.name
        for end in reached(readers, behind)
        if end.op != "output" and not (word(end) in JOINERS or is_view(end))
    ]
    instead = (
        f"{names[0]} reads them"
        if names
        else "they are returned"
        if readers
        else "nobody reads them"
    )
    return Obstacle(
        "cache.not_written", f"nothing here writes the new {name} rows to a cache: {instead}"
    )


def _are_written(view: View, readers: Sequence[Node]) -> bool:
    """Does what the readers make, but for products, come to a step that writes?"""
    made = reached(readers, lambda node: () if node in view.contractions else live_users(node))
    return any(is_writer(node) or is_mutating(node) or has_effect(node) for node in made)


def no_write(view: View, trees: dict[str, ValueTree], value: str, reader: Node) -> Obstacles:
    """Why the one reader of the new rows ``value`` is no write; nothing of a reader that may be
    one.
    """
    name = word(reader)
    if name in JOINERS and any(
        origin(part, views_and_casts).op in INPUTS for part in reader.all_input_nodes
    ):
        message = f"{reader.name} makes a new cache of the old one's rows and the new rows"
        return (Obstacle("cache.grown", message),)
    if not _are_written(view, [reader]):
        return (_not_written(value, [reader]),)
    if joined := joined_row(view, trees, reader):
        return joined
    if is_writer(reader) or name == "copy":
        return ()
    if name == "where" and any(
        cache_write.input_behind(side) is not None for side in reader.all_input_nodes[1:]
    ):
        message = f"{reader.name} ({op_name(reader)}) puts the new rows where a mask says"
        return (Obstacle("cache.writer", message),)
    if _quantised_behind(reader):
        message = (
            f"{reader.name} begins a quantisation of the new rows that the kernel does not have"
        )
        return (Obstacle("cache.quantised", message),)
    if kind_of(reader) in (Kind.OPAQUE, Kind.EFFECT) and not is_collective(reader):
        return ()
    changes = (
        "exchanges the new rows with other devices"
        if is_collective(reader)
        else "changes the new rows"
    )
    message = f"{reader.name} ({op_name(reader)}) {changes} before they are written"
    return (Obstacle("cache.rows_changed", message),)


def joined_row(view: View, trees: dict[str, ValueTree], reader: Node) -> Obstacles:
    """If the reader joins latent and rotated key into one row: that, and what is wrong with its
    write.
    """
    parts = reader.all_input_nodes
    if word(reader) not in JOINERS or not all(
        any(part in trees[name].codes for part in parts) for name in _PAIR
    ):
        return ()
    row = reader
    while len(row.users) == 1 and (is_view(user := next(iter(row.users))) or is_cast(user)):
        row = user
    writers = [user for user in live_users(row) if is_writer(user)]
    if len(writers) < len(live_users(row)):
        return (
            Obstacle(
                "cache.rows_joined",
                f"{reader.name} joins latent and rotated key before they are written",
            ),
        )
    found = [_JOINED]
    for writer in writers:
        write = cache_write.find(view, writer, row)
        found += write if not isinstance(write, WriteFact) else ()
    return tuple(found)


_JOINED = Obstacle(
    "cache.joined_row",
    "one cache row holds latent and rotated key together; the kernel writes two separate caches",
)


def _quantised_behind(reader: Node) -> bool:
    """Are numbers of one byte made of what the reader makes?"""
    for node in reached([reader], lambda node: () if is_writer(node) else node.users, _FARTHEST):
        values = value_of(node)
        several = values if isinstance(values, (tuple, list)) else (values,)
        dtypes = {value.dtype for value in several if isinstance(value, torch.Tensor)}
        if any(dtype.itemsize == 1 for dtype in dtypes - {torch.bool}):
            return True
    return False
