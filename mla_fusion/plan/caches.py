"""Where the new rows go: into the model's own caches by the kernel, or by the model's writes from
rows that the kernel gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from mla_fusion.fx import pools
from mla_fusion.fx.kinds import called
from mla_fusion.fx.sizes import divides, known, same
from mla_fusion.graph.form import Value, order
from mla_fusion.graph.numbers import ONE
from mla_fusion.graph.read import Graph
from mla_fusion.machine import Machine
from mla_fusion.meta import layout, limits
from mla_fusion.plan.outputs import strip_reshapes
from mla_fusion.plan.slots import Roles, trusted_inputs
from mla_fusion.propose.given import Given
from mla_fusion.propose.prologue import Proposal
from mla_fusion.targets.prolog import format_of, row_format


@dataclass(frozen=True)
class Obstacle:
    """Why the kernel cannot write a cache: a code, a sentence, and what to write instead where the
    code alone does not say it.
    """

    code: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Setting:
    """
    boundary  a wrapper will stand around the graph, and can view caches before the call
    machine   whose operator writes them
    """

    boundary: bool
    machine: Machine

    def writable(self, cache: torch.Tensor) -> bool:
        allowed = limits("npu_mla_prolog_v3", self.machine.soc, self.machine.cann, "graph")
        free, compares = allowed.strided_caches, allowed.compares_strides
        return layout.writable(cache, first_axis_free=free, ones_free=not compares)


@dataclass(frozen=True)
class Write:
    """
    value  the write, [n, width]
    cache  the graph's input that is written
    shape  [BlockNum, BlockSize, 1, width], as the kernel takes it
    """

    value: Value
    cache: Node
    shape: tuple[int, ...]

    @property
    def slots(self) -> Value:
        return self.value.sources[1]


@dataclass(frozen=True)
class InPlace:
    kv: Write
    kr: Write | None  # rows are packed into one cache
    slots: Value
    mode: str
    trusted_inputs: Roles

    @property
    def writes(self) -> dict[str, Write]:
        kr = {} if self.kr is None else {"kr_cache": self.kr}
        return {"kv_cache": self.kv, **kr}


@dataclass(frozen=True)
class Staged:
    obstacles: tuple[Obstacle, ...]


def placed(
    graph: Graph, proposal: Proposal, given: Given, writes: Sequence[Value], setting: Setting
) -> InPlace | Staged:
    """In place where the kernel's writes are those of the graph; else every reason against it."""
    results, obstacles = proposal.results, list[Obstacle]()
    rows_of = {"kv_cache": results.kv_rows, "kr_cache": results.kr_rows}
    mode = proposal.arguments.get("kv_cache_quant_mode", 0)
    if mode == _PACKED:
        del rows_of["kr_cache"]
    found: dict[str, Write] = {}
    for name, rows in rows_of.items():
        write = _write_of(graph, proposal, given, writes, name, rows)
        if isinstance(write, Obstacle):
            obstacles.append(write)
        else:
            found[name] = write
            is_quantised = mode == _CHANNELS or (mode and name == "kv_cache")
            obstacles += _of_memory(
                graph, write, setting, _element(proposal) if is_quantised else None
            )
    if len(found) < len(rows_of):
        return Staged(tuple(obstacles))
    kv, kr = found["kv_cache"], found.get("kr_cache")
    if kr is not None:
        obstacles += _of_both(graph, kv, kr)
    slots, tokens = kv.slots.shape[0], proposal.x.shape[0]
    if slots != tokens:
        detail = f"{graph.unbound(slots)} slots for tokens {[graph.unbound(tokens)]}"
        obstacles.append(Obstacle("cache.slots_count", detail))
    leaves = trusted_inputs(kv.slots)
    if leaves is None:
        inputs = [one for one in order([kv.slots]) if one.op == "leaf" and one in graph.nodes]
        names = ", ".join(graph.nodes[one][0].name for one in inputs) or "no input"
        detail = f"the slots, made of {names}, are neither an input nor a block table's"
        obstacles.append(Obstacle("slots.unproven", detail))
    if obstacles or leaves is None:
        return Staged(tuple(obstacles))
    return InPlace(kv, kr, kv.slots, kv.value.literal or "PA_BSND", leaves)


_CHANNELS, _PACKED = 2, 3  # kv_cache_quant_mode


def _element(proposal: Proposal) -> torch.dtype:
    """Of rows in bytes."""
    return row_format(format_of(proposal.arguments["weight_quant_mode"])).element


def _of_both(graph: Graph, kv: Write, kr: Write) -> Iterator[Obstacle]:
    """Why two writes are not the pair that the kernel does."""
    names = f"{kv.cache.name} and {kr.cache.name}"
    if kv.slots is not kr.slots:
        yield Obstacle("cache.slots_differ", f"{names} are written at different slots")
    if kv.shape[:3] != kr.shape[:3]:
        sizes = " and ".join(str(list(map(graph.unbound, one.shape))) for one in (kv, kr))
        yield Obstacle("cache.blocks_differ", f"{names} are {sizes} to the kernel")
    if kv.cache is kr.cache:
        yield Obstacle("cache.joined_row", f"both writes go to {kv.cache.name}")
    if kv.value.literal != kr.value.literal:
        yield Obstacle("cache.rows", f"{names} hold rows in different orders")


def _write_of(
    graph: Graph, proposal: Proposal, given: Given, writes: Iterable[Value], name: str, rows: Value
) -> Write | Obstacle:
    """The one write that takes the new rows as they are, in the order of the tokens."""
    own, moved = list[Value](), list[tuple[Value, Value]]()
    for value in writes:
        taken = given.of(value.sources[2])
        if _is_of(taken, rows):
            own.append(value)
        elif taken is not None and rows in order([taken]):
            moved.append((value, taken))
    if len(own) == 1:
        return _write(graph, own[0])
    if own:
        return Obstacle("cache.rows_read", f"{len(own)} writes take the rows of {name}")
    if not moved:
        return _not_taken(graph, given, name, rows)
    return _moved(graph, proposal, *moved[0], name, rows)


def _moved(
    graph: Graph, proposal: Proposal, write: Value, taken: Value, name: str, rows: Value
) -> Obstacle:
    """``taken``, which is made of the rows, is written."""
    base = _base(graph, write)
    to = "what is no input" if base is None else base.name
    if any(value.op == "leaf" and value is not rows for value in order([taken])):
        message = f"one row of {to} holds latent and rotated key; the kernel writes two caches"
        return Obstacle("cache.joined_row", message)
    if prod(taken.shape) != prod(rows.shape):
        return Obstacle("cache.slots_count", f"some of the rows of {name} are written to {to}")
    if graph.form.split(taken)[0] != ONE:
        message = f"the rows of {name} are multiplied before they are written"
        return Obstacle("cache.rows_changed", message)
    kernels = (one.kernel for one in proposal.claims if one.part == "kr_rows")
    if name == "kr_cache" and strip_reshapes(taken) in map(strip_reshapes, kernels):
        return PAIRS
    return Obstacle("cache.row_order", f"the rows of {name} are written to {to} in another order")


def _not_taken(graph: Graph, given: Given, name: str, rows: Value) -> Obstacle:
    """No write takes the rows: a step may change them first, or be a write of another kind."""

    def is_taken(value: Value) -> bool:
        return _is_of(given.of(value), rows)

    writes = [value.sources[2] for value in graph.nodes if value.op == "write"]
    behind = (one for value in writes for one in order([value]) if any(map(is_taken, one.sources)))
    of_width = (one for one in writes if one.active and one.shape[1:] == rows.shape[1:])
    for step in (*behind, *of_width):
        if step in graph.nodes and not is_taken(step):
            node = graph.nodes[step][0]
            is_far = "c10d" in str(called(node))
            what = "exchanges the new rows with other devices" if is_far else "changes the new rows"
            message = f"{node.name} ({called(node)}) {what} before they are written"
            return Obstacle("cache.rows_changed", message)
    for value, (node, *_) in graph.nodes.items():
        caches = [one for one in value.sources if _may_be_cache(one, rows)]
        if value.op != "dot" and caches and any(map(is_taken, value.sources)):
            named = f"{node.name} ({called(node)})"
            width = value.shape[-1]
            if not isinstance(graph.unbound(width), int):
                message = f"{named} writes to a cache that is {graph.unbound(width)} wide"
                return Obstacle("cache.width", message)
            message = f"{named} is no write of whole rows of {name} by one number for each token"
            return Obstacle("cache.writer", message)
    for value in graph.written.values():
        if any(map(is_taken, order([value]))):
            node = graph.nodes[value][0]
            message = (
                f"{node.name} puts the rows of {name} elsewhere than at a number for each token"
            )
            return Obstacle("cache.writer", message)
    return Obstacle("cache.not_written", f"the rows of {name} are written to no cache")


def _may_be_cache(value: Value, rows: Value) -> bool:
    while value.op in ("reshape", "slice", "permute"):
        value = value.sources[0]
    is_input = value.op in ("leaf", "write") and not value.model and value is not rows
    return is_input and value.dtype.itemsize < 8 and prod(value.shape) >= prod(rows.shape)


PAIRS = Obstacle(
    "rope.pairs",
    "the key cache holds pairs (a0 b0 a1 b1 ..) as RoPE leaves them, the kernel writes halves (a0 "
    "a1 .. b0 b1 ..)",
)


def _of_memory(
    graph: Graph, write: Write, setting: Setting, element: torch.dtype | None
) -> Iterator[Obstacle]:
    """Why the kernel cannot write rows of bytes, or in bfloat16, into the memory of a cache."""
    dtype = element or torch.bfloat16
    name, held = write.cache.name, write.cache.meta["val"]
    if not setting.boundary and graph.shape(held.shape) != write.shape:
        sizes = f"{list(held.shape)}, and no wrapper can view it as {list(write.shape)}"
        yield Obstacle("cache.boundary", f"{name} has shape {sizes}")
    if not setting.writable(held):
        strides = list(held.stride())
        yield Obstacle(
            "cache.strides",
            f"{name} has strides {strides}, and rows that the kernel writes to it do not arrive",
        )
    if held.dtype != dtype:
        detail = f"{name} is {held.dtype}, the rows written to it {dtype}"
        yield Obstacle("cache.dtype", detail)


def _is_of(given: Value | None, rows: Value) -> bool:
    while given is not None and given.op == "reshape":
        given = given.sources[0]
    return given is rows


def _base(graph: Graph, value: Value) -> Node | None:
    """The input that is written."""
    base = value.sources[0]
    while base.op == "reshape":
        base = base.sources[0]
    nodes = [node for node in graph.nodes.get(base, ()) if node.op == "placeholder"]
    return nodes[0] if base.op == "leaf" and nodes else None


def _write(graph: Graph, value: Value) -> Write | Obstacle:
    cache = _base(graph, value)
    if cache is None:
        return _no_input(graph, strip_reshapes(value.sources[0]))
    held, width = cache.meta["val"], value.shape[1]
    shape = graph.shape(held.shape)
    if value.literal is not None and len(shape) == 4 and shape[2:] == (1, width):
        return Write(value, cache, shape)
    if shape[-1] != width:
        detail = f"{cache.name} is {held.shape[-1]} wide, the rows written to it {width}"
        return Obstacle("cache.width", detail)
    paged = _paged_shape(cache)
    if paged is None:
        return Obstacle("cache.shape", f"{cache.name} has shape {list(held.shape)}")
    return Write(value, cache, graph.shape(paged))


def _no_input(graph: Graph, base: Value) -> Obstacle:
    """``base`` is what rows are written into."""
    for value, nodes in graph.nodes.items():
        for node in nodes:
            if strip_reshapes(value) is base and isinstance(node.meta.get("val"), torch.Tensor):
                return Obstacle("cache.no_input", *pools.no_input(node))
    return Obstacle("cache.no_input", "rows are written into what is no input of the graph")


_BLOCK_SIZES = (128, 64, 32, 16)


def _paged_shape(cache: Node) -> tuple[object, object, int, object] | None:
    """[BlockNum, BlockSize, 1, width] that the cache has, or that its memory can be viewed as; None
    if neither, or if it has no rows.

    A cache of another rank is rows of its last axis: [.., BlockSize, width] keeps its blocks where
    the kernel takes that BlockSize (16 to 1024, in steps of 16), other rows are cut into blocks of
    128, 64, 32 or 16. Of symbolic sizes, one must be known to be a multiple of that.
    """
    value = cache.meta["val"]
    shape = [known(size) for size in value.shape]
    if len(shape) < 2 or any(isinstance(size, int) and size == 0 for size in shape):
        return None
    if len(shape) == 4 and same(shape[2], 1):
        return shape[0], shape[1], 1, shape[3]
    if not isinstance(shape[-1], int) or not value.is_contiguous():
        return None
    if all(isinstance(size, int) for size in shape[1:]):
        count, rows = 1, prod(shape[:-1])
        if not isinstance(shape[0], int):
            count, rows = shape[0], prod(shape[1:-1])
        is_block = len(shape) == 3 and shape[-2] % 16 == 0 and 16 <= shape[-2] <= 1024
        own = shape[-2] if is_block else None
        size = own or next((size for size in _BLOCK_SIZES if rows % size == 0), None)
        if size:
            return count * (rows // size), size, 1, shape[-1]
    cut = (size for size in _BLOCK_SIZES if any(divides(size, rows) for rows in shape[:-1]))
    size = next(cut, None)
    return (prod(shape[:-1]) // size, size, 1, shape[-1]) if size else None
