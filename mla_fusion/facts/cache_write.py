"""Cache writes: rows of a value stored into a graph input at given slots.

Recognised are the writers that place whole rows by index: index_put with one index or with (block,
offset), index_copy, scatter with one index a row, npu_scatter_nd_update. Every other writer keeps
its place in the graph (staging), so it needs no recognising.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.facts import dense_write
from mla_fusion.facts.dense_write import Span
from mla_fusion.facts.obstacle import Obstacle, Obstacles
from mla_fusion.facts.slots import Trust, Unproven, judge
from mla_fusion.fx import pools
from mla_fusion.fx.kinds import (
    argument,
    is_getitem,
    is_mutating,
    is_reshape,
    is_view,
    named_sizes,
    op_name,
    word,
)
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.sizes import broadcast, divides, same, same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import INPUTS, expands, origin, reached, unit_selections
from mla_fusion.operators.known import dtype_of, rule_of, rules, shape_of, value_of


@dataclass(frozen=True)
class Slots:
    """Row numbers: ``index``, ``block * block_size + offset`` where the graph holds no such tensor,
    or a ``span``. Blocks are those of the view that the model writes to, whatever the cache's are.
    Where the model names no block, ``every`` one of so many sequences has so many offsets.
    """

    index: Node | None
    block: Node | None = None
    offset: Node | None = None
    block_size: Any = None
    span: Span | None = None
    every: tuple[Any, Any] | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in (self.index, self.block, self.offset) if node is not None)

    @property
    def shape(self) -> tuple[Any, ...]:
        if self.span is not None:
            return self.span.sequences, self.span.length
        return self.every or broadcast(*map(shape_of, self.nodes))

    @property
    def in_sequences(self) -> bool:
        """Are they numbers of sequences, and places in them, which are spread over each other?"""
        shapes = [shape_of(node) for node in self.nodes]
        return self.every is not None or not all(same_shape(shapes[0], one) for one in shapes)

    def __str__(self) -> str:
        return self.nodes[0].name if self.nodes else "the slices assigned"


@dataclass(frozen=True, kw_only=True)
class WriteFact:
    """``cache`` (a graph input), with rows of ``value`` at ``slots``, is ``result``.

    trusted   inputs of the graph whose slots are assumed, not shown, to be non-negative
    inside    nodes that the write consists of, where it is more than one
    """

    node: Node
    cache: Node
    value: Node
    slots: Slots
    result: Node
    trusted: tuple[Node, ...] = ()
    inside: tuple[Node, ...] = ()


def paged_shape(cache: Node) -> tuple[object, object, int, object] | None:
    """[BlockNum, BlockSize, 1, width] that the cache has, or that its memory can be viewed as; None
    if neither, or if it has no rows.

    A cache of another rank is rows of its last axis: [.., BlockSize, width] keeps its blocks where
    the kernel takes that BlockSize (16 to 1024, in steps of 16), other rows are cut into blocks of
    128, 64, 32 or 16. Of symbolic sizes, one must be known to be a multiple of that.
    """
    value = cache.meta["val"]
    shape = value.shape
    if _has_no_rows(shape):
        return None
    if len(shape) == 4 and same(shape[2], 1):
        return shape[0], shape[1], 1, shape[3]
    if not isinstance(shape[-1], int) or not value.is_contiguous():
        return None
    if all(isinstance(size, int) for size in shape[1:]):
        count, rows = 1, math.prod(shape[:-1])
        if not isinstance(shape[0], int):
            count, rows = shape[0], math.prod(shape[1:-1])
        is_block = len(shape) == 3 and shape[-2] % 16 == 0 and 16 <= shape[-2] <= 1024
        own = shape[-2] if is_block else None
        size = own or next((size for size in _BLOCK_SIZES if rows % size == 0), None)
        if size:
            return count * (rows // size), size, 1, shape[-1]
    cut = (size for size in _BLOCK_SIZES if any(divides(size, rows) for rows in shape[:-1]))
    size = next(cut, None)
    return (math.prod(shape[:-1]) // size, size, 1, shape[-1]) if size else None


_BLOCK_SIZES = (128, 64, 32, 16)


def find(view: View, writer: Node, value: Node) -> WriteFact | Obstacles:
    """The write of ``value`` by ``writer``, or everything for which it is not one the kernel can
    do.
    """
    name = word(writer)
    if name == _SCATTER_PA:
        return _paged_pair(view, writer, value)
    whole = _overwritten(writer)
    if whole is not None:
        message = (
            f"{writer.name} puts the new rows in place of all that {whole.name} holds, not in rows "
            "that have a number"
        )
        return (Obstacle("cache.writer", message),)
    if name in ("copy", "slice_scatter"):
        return _assigned(writer, value)
    base = writer.args[0]
    if name in _ADDING:
        return (Obstacle("cache.accumulates", f"{writer.name} adds to what the rows hold"),)
    index_of = rule_of(writer, "slots", RULES)
    cache = input_behind(base) if isinstance(base, Node) else None
    if index_of is None or not isinstance(base, Node):
        named = f"{writer.name} ({op_name(writer) or writer.op})"
        if cache is not None and is_mutating(writer):
            message = f"{named} writes {cache.name} in place: this graph is not functional"
            return (Obstacle("cache.not_functional", message),)
        return (Obstacle("cache.writer", f"{named} is not a write of rows by index"),)
    found: list[Obstacle] = []
    paged = paged_shape(cache) if cache is not None else None
    if cache is None:
        found.append(Obstacle("cache.no_input", *pools.no_input(base)))
    elif paged is None:
        found.append(Obstacle("cache.shape", _no_blocks(cache)))
    indices, axis = index_of(writer), 0
    if indices is None:
        behind = rule_of(writer, "slots", _OF_SEQUENCES)
        of_sequences = behind(writer) if behind is not None else None
        if of_sequences is None:
            found.append(_by_no_row_number(writer, name, base))
            indices = _tensors_of_integers(writer)
        else:
            indices, axis = [of_sequences[0]], of_sequences[1]
    wrong = [index for index in indices if dtype_of(index) not in _INDICES]
    for index in wrong:
        message = f"index {index.name} is {index.meta['val'].dtype}, not an integer tensor"
        found.append(Obstacle("slots.dtype", message))
    slots, judged = Slots(None), indices
    if paged is not None and not found:
        made = _slots(view, base, indices, paged[3], axis)
        found += [made] if isinstance(made, Obstacle) else []
        if isinstance(made, Slots):
            slots, judged = made, [*made.nodes]
    # three indices are no row, and no place in a block
    trust = judge(view, judged) if len(judged) in (1, 2) and not wrong else Trust(())
    if isinstance(trust, Unproven):
        found.append(_unproven(trust))
    if found or cache is None or isinstance(trust, Unproven):
        return tuple(found)
    return WriteFact(
        node=writer,
        cache=cache,
        value=value,
        slots=slots,
        result=_whole(writer, cache),
        trusted=trust.inputs,
    )


def _overwritten(writer: Node) -> Node | None:
    """The input that is overwritten, all of it, by what the writer copies."""
    step = writer
    while word(step) != "copy_":
        is_all = is_reshape(step) or (step is writer and word(step) == "copy")
        if not is_all or len(step.users) != 1:
            return None
        step = next(iter(step.users))
    cache = step.args[0]
    return cache if isinstance(cache, Node) and cache.op in INPUTS else None


_ADDING = ("index_add", "scatter_add", "index_reduce", "scatter_reduce")


def _unproven(why: Unproven) -> Obstacle:
    message = f"{why}; the kernel skips negative slots and may keep either row of a repeated one"
    return Obstacle("slots.unproven", message)


def _has_no_rows(shape: Sequence[object]) -> bool:
    return len(shape) < 2 or any(isinstance(size, int) and size == 0 for size in shape)


def _no_blocks(cache: Node) -> str:
    """Why the memory of a cache cannot be viewed as [BlockNum, BlockSize, 1, width]."""
    value = cache.meta["val"]
    shape = f"{cache.name} of shape [{', '.join(map(str, value.shape))}]"
    if not all(isinstance(size, int) for size in value.shape):
        why = "nothing says that its rows, whose number is symbolic, divide into blocks of 16"
    elif _has_no_rows(value.shape):
        why = "it has no rows"
    elif not value.is_contiguous():
        why = f"its strides are {list(value.stride())}, so that it cannot be viewed so"
    else:
        why = f"its {math.prod(value.shape[:-1])} rows do not divide into blocks of 16"
    return f"{shape} is not [BlockNum, BlockSize, 1, width]: {why}"


def _by_no_row_number(writer: Node, name: str, base: Node) -> Obstacle:
    """How a writer by index says where rows go, if not by one number a row."""
    axis, shape = argument(writer, "dim", 0), list(shape_of(base))
    if argument(writer, "accumulate", False):
        return Obstacle("cache.accumulates", f"{writer.name} adds to what the rows hold")
    if isinstance(indices := argument(writer, "indices"), (list, tuple)):
        axis = next((place for place, index in enumerate(indices) if index is not None), 0)
    if isinstance(axis, int) and shape and (axis := axis % len(shape)):
        message = (
            f"{writer.name} runs along axis {axis} of {shape}; the kernel needs one row number "
            "for each token: "
            f"view the cache as [-1, {shape[-1]}]"
        )
        return Obstacle("cache.index_axis", message)
    return Obstacle(
        "cache.index_elements", f"{writer.name} does not place whole rows by one number each"
    )


def _tensors_of_integers(writer: Node) -> list[Node]:
    given = (_unspread(node) for node in writer.all_input_nodes[1:])
    values = ((node, value_of(node)) for node in given)
    return [
        node
        for node, value in values
        if isinstance(value, torch.Tensor) and value.dtype in _INDICES
    ]


def _unspread(index: Node) -> Node:
    """A scatter's index before it is repeated for the columns of a row."""
    source = index.args[0] if word(index) == "expand" else None
    return source if isinstance(source, Node) else index


def _assigned(writer: Node, value: Node) -> WriteFact | Obstacles:
    found = dense_write.find(writer, value)
    if isinstance(found, Obstacle):
        return (found,)
    if paged_shape(found.cache) is None:
        return (Obstacle("cache.shape", _no_blocks(found.cache)),)
    return WriteFact(
        node=writer,
        cache=found.cache,
        value=value,
        slots=Slots(None, span=found.span),
        result=_whole(found.result, found.cache),
        inside=found.inside,
    )


_SCATTER_PA = "npu_scatter_pa_kv_cache_functional"


def _paged_pair(view: View, writer: Node, value: Node) -> WriteFact | Obstacles:
    """npu_scatter_pa_kv_cache writes two caches at once, key rows to the first and value rows to
    the second.
    """
    found: list[str] = []
    mode = argument(writer, "cache_mode")
    if mode != "Norm":
        found.append(f"{writer.name} has cache_mode {mode}, whose blocks are laid out otherwise")
    extra = ("compress_lens", "compress_seq_offsets", "seq_lens")
    found += [f"{writer.name} has {name}" for name in extra if argument(writer, name) is not None]
    rows, caches, slots = writer.args[:2], writer.args[2:4], writer.args[4]
    if rows.count(value) != 1 or not isinstance(slots, Node):
        return (
            Obstacle("cache.writer", f"{writer.name} does not write {value.name} to one cache"),
        )
    place = rows.index(value)
    cache = caches[place]
    if not isinstance(cache, Node) or cache.op not in INPUTS or paged_shape(cache) is None:
        found.append(f"{cache} is not a graph input of shape [BlockNum, BlockSize, 1, width]")
    result = next(
        (user for user in writer.users if is_getitem(user) and user.args[1] == place), None
    )
    if result is None:
        found.append(f"{writer.name} writes {cache}, and nobody reads what it wrote")
    trust = judge(view, [slots])
    unproven = [_unproven(trust)] if isinstance(trust, Unproven) else []
    if found or isinstance(trust, Unproven) or result is None or not isinstance(cache, Node):
        return (*(Obstacle("cache.writer", message) for message in found), *unproven)
    return WriteFact(
        node=writer,
        cache=cache,
        value=value,
        slots=Slots(slots),
        result=result,
        trusted=trust.inputs,
    )


def _index_put(node: Node) -> list[Node] | None:
    indices = argument(node, "indices")
    if argument(node, "accumulate", False) or not isinstance(indices, (list, tuple)):
        return None
    given = [index for index in indices if index is not None]
    return given if given == list(indices[: len(given)]) else None


def _index_copy(node: Node) -> list[Node] | None:
    return [node.args[2]] if node.args[1] == 0 and isinstance(node.args[2], Node) else None


def _scatter(node: Node) -> list[Node] | None:
    """``scatter(rows, 0, index, value)`` where every column of a row has the same index."""
    column = _column(node)
    is_row = node.args[1] == 0 and column is not None and len(shape_of(column)) == 2
    return [column] if column is not None and is_row else None


def _column(node: Node) -> Node | None:
    """The indices of a scatter, [.., 1], which are repeated for the columns of a row."""
    index = node.args[2]
    if not isinstance(index, Node) or not isinstance(node.args[3], Node):
        return None
    if word(index) not in ("expand", "repeat") or len(node.args) > 4 or "reduce" in node.kwargs:
        return None
    column = index.args[0]
    if not isinstance(column, Node) or not same_shape(shape_of(index), shape_of(node.args[3])):
        return None
    shape, wide = shape_of(column), shape_of(index)
    is_column = len(shape) > 1 and same(shape[-1], 1) and same_shape(shape[:-1], wide[:-1])
    return column if is_column else None


def _scatter_nd(node: Node) -> list[Node] | None:
    index = node.args[1]
    if not isinstance(index, Node) or not same(shape_of(index)[-1], 1):
        return None
    return [index]


RULES = rules(_index_put, _index_copy, _scatter, _scatter_nd)


# -- rows of every sequence, at places along an axis behind the sequences


def _index_put_behind(node: Node) -> tuple[Node, int] | None:
    """``cache[:, positions] = rows``"""
    indices = argument(node, "indices")
    if argument(node, "accumulate", False) or not isinstance(indices, (list, tuple)):
        return None
    *before, index = indices
    alone = index is not None and not any(before) and len(shape_of(index)) < 2
    return (index, len(before)) if alone else None


def _index_copy_behind(node: Node) -> tuple[Node, int] | None:
    axis, index = _axis(node), node.args[2]
    return (index, axis) if isinstance(index, Node) else None


def _scatter_behind(node: Node) -> tuple[Node, int] | None:
    """Each sequence has places of its own."""
    axis, column = _axis(node), _column(node)
    return (column, axis) if column is not None and len(shape_of(column)) == axis + 2 else None


_OF_SEQUENCES = {
    "index_put": _index_put_behind,
    "index_copy": _index_copy_behind,
    "scatter": _scatter_behind,
}


def _axis(node: Node) -> int:
    axis = argument(node, "dim", 0)
    assert isinstance(axis, int)
    return axis % len(shape_of(node))


def input_behind(node: Node) -> Node | None:
    """The graph input of which the node is a reshape (an axis of size 1 may be selected away)."""
    cache = origin(node, unit_selections)
    return cache if cache.op in INPUTS else None


def _slots(
    view: View, base: Node, indices: list[Node], width: object, axis: int
) -> Slots | Obstacle:
    """``base``: all rows of a cache, in their order; ``axis``: along which the first index runs."""
    shape = shape_of(base)
    if axis:
        return _in_sequences(base, indices[0], width, axis)
    if len(indices) == 3 and len(shape) > 2 and same(shape[2], 1):
        indices = indices[:2]  # the third indexes an axis of size 1
    are_rows = same(math.prod(shape[len(indices) :]), width)
    if len(indices) == 1:
        if not are_rows:
            return Obstacle("cache.rows", f"{base.name} is not viewed as BlockNum * BlockSize rows")
        return Slots(indices[0])
    if len(indices) != 2 or not are_rows:
        message = (
            f"{base.name} is indexed by {len(indices)} tensors, which do not spell (block, offset)"
        )
        return Obstacle("cache.rows", message)
    (block, offset), size = indices, named_sizes(base)[1]
    slot = _common_slot(view, block, offset, size)
    return Slots(slot) if slot is not None else Slots(None, block, offset, size)


def _in_sequences(base: Node, index: Node, width: object, axis: int) -> Slots | Obstacle:
    """Places in each sequence of ``[B, 1, .., rows, width]``: the same ones, or each its own."""
    shape, places = shape_of(base), shape_of(index)
    are_rows = same(math.prod(shape[axis + 1 :]), width)
    if not are_rows or not all(same(size, 1) for size in shape[1:axis]):
        return Obstacle("cache.rows", f"{base.name} is not [sequences, rows, width]")
    if same(shape[0], 1):
        return Slots(index)
    if len(places) > 1:
        return Slots(None, None, index, shape[axis], every=(places[0], places[axis]))
    return Slots(None, None, index, shape[axis], every=(shape[0], math.prod(places)))


def _common_slot(view: View, block: Node, offset: Node, block_size: object) -> Node | None:
    """The node of which ``block`` is the quotient and ``offset`` the remainder by the block
    size.
    """
    number, shape = view.terms.quotient_and_remainder(block, offset, block_size), shape_of(block)
    if number is None or not same_shape(shape, shape_of(offset)):
        return None
    for candidate in nodes_between((), block):
        value = value_of(candidate)
        if not isinstance(value, torch.Tensor) or value.dtype not in _INDICES:
            continue
        if (
            same(math.prod(value.shape), math.prod(shape))
            and view.terms.number(candidate) == number
        ):
            return candidate
    return None


_INDICES = (torch.int64, torch.int32)


def _whole(writer: Node, cache: Node) -> Node:
    """The updated cache: past a select_scatter that puts a selected unit axis back, and past what
    keeps every element in between.
    """
    value = writer
    while len(value.users) == 1:
        (user,) = value.users
        if word(user) == "select_scatter" and user.args[1] is value:
            base = user.args[0]
            return user if isinstance(base, Node) and input_behind(base) is cache else writer
        if unit_selections(user) is not value and not _spreads_nothing(user):
            break
        value = user
    return writer


def _spreads_nothing(node: Node) -> bool:
    source = expands(node)
    return source is not None and same_shape(shape_of(source), shape_of(node))


def readers(cache: Node, *writers: Node) -> list[Node]:
    """Nodes that read the cache as it was before the writers wrote (shape readers and the epilogue
    apart).
    """

    def behind(node: Node) -> Iterator[Node]:
        for user in node.users if node is cache or is_view(node) else ():
            is_epilogue = word(user) == "copy_" and user.args[0] is cache
            if user not in writers and _is_tensor(user) and not is_epilogue:
                yield user

    _, *below = reached([cache], behind)
    return [node for node in below if not is_view(node)]


def _is_tensor(node: Node) -> bool:
    return node.op == "output" or isinstance(value_of(node), (torch.Tensor, tuple, list))
