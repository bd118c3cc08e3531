"""Cache writes: rows of a value stored into a graph input at given slots.

Recognised are the writers that place whole rows by index: index_put with one index or with (block, offset),
index_copy, scatter with one index a row, npu_scatter_nd_update. Every other writer keeps its place in the
graph (staging), so it needs no recognising.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.facts import dense_write
from mla_fusion.facts.dense_write import Span
from mla_fusion.facts.slots import Unproven, judge
from mla_fusion.fx import pools
from mla_fusion.fx.kinds import argument, is_getitem, is_view, op_name
from mla_fusion.fx.measured import measured
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.sizes import same, same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import INPUTS, origin, unit_selections


@dataclass(frozen=True)
class Slots:
    """Row numbers: ``index``, ``block * block_size + offset`` where the graph holds no such tensor, or a ``span``."""

    index: Node | None
    block: Node | None = None
    offset: Node | None = None
    span: Span | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in (self.index, self.block, self.offset) if node is not None)

    @property
    def shape(self) -> tuple[Any, ...]:
        if self.span is not None:
            return self.span.sequences, self.span.length
        return tuple(self.nodes[0].meta["val"].shape)

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
    """[BlockNum, BlockSize, 1, width] that the cache has, or that its memory can be viewed as; None if neither.

    A cache of another rank is rows of its last axis: [.., BlockSize, width] keeps its blocks where the kernel
    takes that BlockSize (16 to 1024, in steps of 16), other rows are cut into blocks of 128, 64, 32 or 16.
    """
    value = cache.meta["val"]
    shape = value.shape
    if len(shape) == 4 and same(shape[2], 1):
        return shape[0], shape[1], 1, shape[3]
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape) or not value.is_contiguous():
        return None
    rows = math.prod(shape[:-1])
    own = shape[-2] if len(shape) == 3 and shape[-2] % 16 == 0 and 16 <= shape[-2] <= 1024 else None
    size = own or next((size for size in (128, 64, 32, 16) if rows % size == 0), None)
    return (rows // size, size, 1, shape[-1]) if size else None


@measured
def find(view: View, writer: Node, value: Node) -> WriteFact | str:
    """The write of ``value`` by ``writer``, or why it is not one the kernel can do."""
    name = op_name(writer)
    if name == _SCATTER_PA:
        return _paged_pair(view, writer, value)
    if name in ("aten::copy", "aten::slice_scatter"):
        return _assigned(writer, value)
    base = writer.args[0]
    if name not in _INDEX_OF or not isinstance(base, Node):
        return f"{writer.name} ({name or writer.op}) is not a write of rows by index"
    cache = input_behind(base)
    if cache is None:
        return pools.no_input(base)
    paged = paged_shape(cache)
    if paged is None:
        return f"{cache.name} of shape {list(cache.meta['val'].shape)} is not [BlockNum, BlockSize, 1, width]"
    indices = _INDEX_OF[name](writer)
    if indices is None:
        return f"{writer.name} does not place one row per index"
    for index in indices:
        if index.meta["val"].dtype not in (torch.int64, torch.int32):
            return f"index {index.name} is {index.meta['val'].dtype}, not an integer tensor"
    slots = _slots(view, paged, base, indices)
    if isinstance(slots, str):
        return slots
    trust = judge(view, slots.nodes)
    if isinstance(trust, Unproven):
        return Unproven(f"{trust}; the kernel skips negative slots and may keep either row of a repeated one")
    return WriteFact(
        node=writer, cache=cache, value=value, slots=slots, result=_whole(writer, cache), trusted=trust.inputs
    )


def _assigned(writer: Node, value: Node) -> WriteFact | str:
    found = dense_write.find(writer, value)
    if isinstance(found, str):
        return found
    if paged_shape(found.cache) is None:
        return f"{found.cache.name} of shape {list(found.cache.meta['val'].shape)} is not rows in blocks"
    slots, inside = Slots(None, span=found.span), found.inside
    return WriteFact(node=writer, cache=found.cache, value=value, slots=slots, result=found.result, inside=inside)


_SCATTER_PA = "npu::npu_scatter_pa_kv_cache_functional"


def _paged_pair(view: View, writer: Node, value: Node) -> WriteFact | str:
    """npu_scatter_pa_kv_cache writes two caches at once, key rows to the first and value rows to the second."""
    mode = argument(writer, "cache_mode")
    if mode != "Norm":
        return f"{writer.name} has cache_mode {mode}, whose blocks are laid out otherwise"
    extra = ("compress_lens", "compress_seq_offsets", "seq_lens")
    given = next((name for name in extra if argument(writer, name) is not None), None)
    if given is not None:
        return f"{writer.name} has {given}"
    rows, caches, slots = writer.args[:2], writer.args[2:4], writer.args[4]
    if rows.count(value) != 1 or not isinstance(slots, Node):
        return f"{writer.name} does not write {value.name} to one cache"
    place = rows.index(value)
    cache = caches[place]
    if not isinstance(cache, Node) or cache.op not in ("placeholder", "get_attr") or paged_shape(cache) is None:
        return f"{cache} is not a graph input of shape [BlockNum, BlockSize, 1, width]"
    result = next((user for user in writer.users if is_getitem(user) and user.args[1] == place), None)
    if result is None:
        return f"{writer.name} writes {cache.name}, and nobody reads what it wrote"
    trust = judge(view, [slots])
    return trust if isinstance(trust, Unproven) else WriteFact(
        node=writer, cache=cache, value=value, slots=Slots(slots), result=result, trusted=trust.inputs
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
    index = node.args[2]
    if node.args[1] != 0 or not isinstance(index, Node) or not isinstance(node.args[3], Node):
        return None
    if op_name(index) not in ("aten::expand", "aten::repeat") or len(node.args) > 4 or "reduce" in node.kwargs:
        return None
    column = index.args[0]
    if not isinstance(column, Node) or not same_shape(index.meta["val"].shape, node.args[3].meta["val"].shape):
        return None
    shape = column.meta["val"].shape
    return [column] if len(shape) == 2 and same(shape[1], 1) else None


def _scatter_nd(node: Node) -> list[Node] | None:
    index = node.args[1]
    if not isinstance(index, Node) or not same(index.meta["val"].shape[-1], 1):
        return None
    return [index]


_INDEX_OF = {
    "aten::index_put": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::index_copy": _index_copy,
    "aten::scatter": _scatter,
    "npu::npu_scatter_nd_update": _scatter_nd,
}


def input_behind(node: Node) -> Node | None:
    """The graph input of which the node is a reshape (an axis of size 1 may be selected away)."""
    cache = origin(node, unit_selections)
    return cache if cache.op in INPUTS else None


def _slots(view: View, paged: tuple[Any, Any, int, object], base: Node, indices: list[Node]) -> Slots | str:
    block_num, block_size = paged[:2]
    rows = base.meta["val"].shape
    if len(indices) == 1:
        if not same(rows[0], block_num * block_size):
            return f"{base.name} is not seen as BlockNum * BlockSize rows"
        return Slots(indices[0])
    if len(indices) == 3 and len(rows) > 2 and same(rows[2], 1):
        indices = indices[:2]  # the third indexes an axis of size 1
    if len(indices) != 2 or not (same(rows[0], block_num) and same(rows[1], block_size)):
        return f"{base.name} is indexed by {len(indices)} tensors, which do not spell (block, offset)"
    block, offset = indices
    slot = _common_slot(view, block, offset, block_size)
    return Slots(slot) if slot is not None else Slots(None, block, offset)


def _common_slot(view: View, block: Node, offset: Node, block_size: object) -> Node | None:
    """The node of which ``block`` is the quotient and ``offset`` the remainder by the block size."""
    if not isinstance(block_size, int):
        return None
    number = view.terms.quotient_and_remainder(block, offset, block_size)
    if number is None:
        return None
    shape = block.meta["val"].shape
    for candidate in nodes_between((), block):
        value = candidate.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in _INDICES:
            continue
        if same(math.prod(value.shape), math.prod(shape)) and view.terms.number(candidate) == number:
            return candidate
    return None


_INDICES = (torch.int64, torch.int32)


def _whole(writer: Node, cache: Node) -> Node:
    """The updated cache: past a select_scatter that puts a selected unit axis back."""
    for user in writer.users:
        if op_name(user) == "aten::select_scatter" and user.args[1] is writer:
            base = user.args[0]
            if isinstance(base, Node) and input_behind(base) is cache and len(writer.users) == 1:
                return user
    return writer


def readers(cache: Node, *writers: Node) -> list[Node]:
    """Nodes that read the cache as it was before the writers wrote (shape readers and the epilogue apart)."""
    found, stack, seen = [], [cache], set()
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in seen or user in writers or not _is_tensor(user):
                continue
            seen.add(user)
            if op_name(user) == "aten::copy_" and user.args[0] is cache:
                continue
            if is_view(user):
                stack.append(user)
            else:
                found.append(user)
    return found


def _is_tensor(node: Node) -> bool:
    return node.op == "output" or isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
