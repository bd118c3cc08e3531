"""Decides who writes the new rows: the kernel into the model's caches, or the model's own writes.

``planner.py`` asks ``place_rows`` for each proven proposal. The answer is ``InPlace``, or
``Staged`` with every obstacle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch.fx import Node

from mla_fusion.compat import guard
from mla_fusion.fx.kinds import called, value_of
from mla_fusion.fx.sizes import divides, known, same
from mla_fusion.graph.form import MOVES, Value, order, strip, strip_reshapes
from mla_fusion.graph.moves import is_open_part
from mla_fusion.graph.numbers import ONE, is_open
from mla_fusion.graph.read import Graph
from mla_fusion.machine import Machine
from mla_fusion.meta import layout, limits
from mla_fusion.plan.slots import Roles, input_name, trusted_inputs
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.rewrites import Rewrites
from mla_fusion.targets.prolog import format_of, row_format


@dataclass(frozen=True)
class Obstacle:
    """A reason why the kernel cannot write a cache.

    code     a key of ``REMEDIES``
    message  one sentence with names and sizes
    remedy   what to write instead; "" if ``REMEDIES`` says it
    """

    code: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


@dataclass(frozen=True)
class Write:
    """One write of rows into an input of the graph.

    value  the write, [n, width]
    cache  the input that is written
    shape  [BlockNum, BlockSize, 1, width], as the kernel takes it
    """

    value: Value
    cache: Node
    shape: tuple[int, ...]

    @property
    def slots(self) -> Value:
        """Returns the row numbers."""
        return self.value.sources[1]


@dataclass(frozen=True)
class InPlace:
    """The plan in which the kernel writes the caches.

    writes          the writes by the names of the results; one if the rows are packed
    slots           the row numbers of all writes
    mode            the operator's cache_mode
    trusted_inputs  the inputs that are trusted to hold valid row numbers, with their roles
    """

    writes: Mapping[str, Write]
    slots: Value
    mode: str
    trusted_inputs: Roles


@dataclass(frozen=True)
class Staged:
    """The plan in which the kernel returns the new rows, and the model's own writes stay.

    The kernel then writes no cache.
    """

    obstacles: tuple[Obstacle, ...]
    writes: ClassVar[Mapping[str, Write]] = {}
    mode: ClassVar[str] = "TND"
    trusted_inputs: ClassVar[Roles] = {}


def place_rows(
    graph: Graph,
    proposal: Proposal,
    rewrites: Rewrites,
    writes: Sequence[Value],
    machine: Machine,
    boundary: bool,
) -> InPlace | Staged:
    """Returns ``InPlace`` if the kernel's writes are those of the graph, else ``Staged``.

    rewrites  what the claims say of the graph's Values
    writes    the writes of rows that are computed from x
    machine   the chip and CANN release whose operator writes the caches
    boundary  True if a wrapper will stand around the graph; it can view caches before the call
    """
    results, obstacles = proposal.results, list[Obstacle]()
    result_rows = {"kv_cache": results.kv_rows, "kr_cache": results.kr_rows}
    mode = proposal.arguments.get("kv_cache_quant_mode", 0)
    if mode == _PACKED:
        del result_rows["kr_cache"]
    writes_by_name: dict[str, Write] = {}
    for name, rows in result_rows.items():
        write = _find_write(graph, proposal, rewrites, writes, name, rows)
        if isinstance(write, Obstacle):
            obstacles.append(write)
        else:
            writes_by_name[name] = write
            is_quantised = mode == _CHANNELS or (mode and name == "kv_cache")
            element = torch.bfloat16
            if is_quantised:
                element = row_format(format_of(proposal.arguments["weight_quant_mode"])).element
            obstacles += _memory_obstacles(graph, write, element, machine, boundary)
    if proposal.has_pairs and proposal.arguments.get("weight_quant_mode"):
        # scales of columns are in the kernel's order
        others = [obstacle for obstacle in obstacles if obstacle.code != "cache.rows_changed"]
        obstacles = others if len(others) == len(obstacles) else [*others, PAIRS]
    if len(writes_by_name) < len(result_rows):
        return Staged(tuple(obstacles))
    kv, kr = writes_by_name["kv_cache"], writes_by_name.get("kr_cache")
    if kr is not None:
        obstacles += _pair_obstacles(graph, kv, kr)
    slots, tokens = kv.slots.shape[0], proposal.x.shape[0]
    if slots != tokens:
        obstacles.append(_count_obstacle(graph, slots, tokens))
    trusted_leaves = trusted_inputs(graph, kv.slots)
    if trusted_leaves is None:
        inputs = (value for value in order([kv.slots]) if value.op == "leaf")
        names = ", ".join(input_name(graph, leaf) for leaf in inputs) or "no input"
        detail = f"the slots, made of {names}, are not shown to be distinct and not negative"
        obstacles.append(Obstacle("slots.unproven", detail))
    if obstacles or trusted_leaves is None:
        return Staged(tuple(obstacles))
    return InPlace(writes_by_name, kv.slots, kv.value.literal or "PA_BSND", trusted_leaves)


_CHANNELS, _PACKED = 2, 3  # kv_cache_quant_mode


def _count_obstacle(graph: Graph, slots: int, tokens: int) -> Obstacle:
    """Returns the obstacle of a write with another number of slots than tokens."""
    detail = f"{graph.size_text(slots)} slots for tokens [{graph.size_text(tokens)}]"
    return Obstacle("cache.slots_count", detail)


def _pair_obstacles(graph: Graph, kv: Write, kr: Write) -> Iterator[Obstacle]:
    """Yields why the two writes are not the pair that the kernel does."""
    names = f"{kv.cache.name} and {kr.cache.name}"
    if kv.slots is not kr.slots:
        yield Obstacle("cache.slots_differ", f"{names} are written at different slots")
    if kv.shape[:3] != kr.shape[:3]:
        shapes = [list(map(graph.unbound, write.shape)) for write in (kv, kr)]
        *pairs, _ = zip(*shapes, strict=True)
        if not all(guard(size == other) for size, other in pairs):
            yield Obstacle(
                "cache.blocks_differ", f"{names} are {' and '.join(map(str, shapes))} to the kernel"
            )
    if kv.cache is kr.cache:
        yield Obstacle("cache.joined_row", f"both writes go to {kv.cache.name}")
    if kv.value.literal != kr.value.literal:
        yield Obstacle("cache.rows", f"{names} hold rows in different orders")


def _find_write(
    graph: Graph,
    proposal: Proposal,
    rewrites: Rewrites,
    writes: Iterable[Value],
    name: str,
    rows: Value,
) -> Write | Obstacle:
    """Returns the one write that takes the new rows unchanged, in the order of the tokens.

    Returns an obstacle if there is none, or several.

    name  the result's name
    rows  the leaf that stands for the new rows
    """
    row_writes, changed_writes = list[Value](), list[tuple[Value, Value]]()
    for value in writes:
        memory, *written = value.sources
        part = strip_reshapes(memory)
        if (part.op == "slice" or is_open_part(part)) and any(
            [*other.sources[1:]] == written
            and strip_reshapes(other.sources[0]) is strip_reshapes(part.sources[0])
            for other in writes
        ):
            continue  # a step on the way to a write of the whole cache
        written_rows = rewrites.of(value.sources[2])
        if _is_reshape_of(written_rows, rows):
            row_writes.append(value)
        elif written_rows is not None and rows in order([written_rows]):
            changed_writes.append((value, written_rows))
    if len(row_writes) == 1:
        return _read_write(graph, row_writes[0])
    if row_writes:
        return Obstacle("cache.rows_read", f"{len(row_writes)} writes take the rows of {name}")
    if not changed_writes:
        return _missing_write_obstacle(graph, rewrites, name, rows)
    return _changed_rows_obstacle(graph, proposal, *changed_writes[0], name, rows)


def _changed_rows_obstacle(
    graph: Graph, proposal: Proposal, write: Value, written_rows: Value, name: str, rows: Value
) -> Obstacle:
    """Returns the obstacle of a write that takes the rows moved, joined, cut or scaled.

    written_rows  what is written, over the results
    """
    memory = strip(write.sources[0], *MOVES)
    cache = _input_holding(graph, memory)
    target = "what is no input" if cache is None else cache.name
    steps = [value for value in order([written_rows], [rows]) if value.active]
    joined = (source for step in steps if step.op == "join" for source in step.sources)
    if cache is not None and any(strip(source, *MOVES) is memory for source in joined):
        sizes = f"{target} has shape {list(cache.meta['val'].shape)}"
        message = f"{sizes}, and no wrapper passes the part that rows go to"
        return Obstacle("cache.boundary", message)
    if any(value.op == "leaf" for value in steps):
        message = f"one row of {target} holds latent and rotated key; the kernel writes two caches"
        return Obstacle("cache.joined_row", message)
    if written_rows.numel != rows.numel:
        if written_rows.shape[:1] == rows.shape[:1]:
            sizes = f"{prod(written_rows.shape[1:])} numbers, not {prod(rows.shape[1:])}"
            detail = f"a row of {name} is written to {target} as {sizes}"
            return Obstacle("cache.rows_changed", detail)
        return Obstacle("cache.slots_count", f"some of the rows of {name} are written to {target}")
    is_scaled = graph.form.split(written_rows)[0] != ONE
    if is_scaled or any(step.op not in MOVES and step.op != "gather" for step in steps):
        change = "multiplied" if is_scaled else "changed"
        message = f"the rows of {name} are {change} before they are written"
        return Obstacle("cache.rows_changed", message)
    key_kernels = (claim.kernel for claim in proposal.claims if claim.part == "kr_rows")
    if proposal.has_pairs and strip_reshapes(written_rows) in map(strip_reshapes, key_kernels):
        return PAIRS
    detail = f"the rows of {name}, or their columns, are written to {target} in another order"
    return Obstacle("cache.row_order", detail)


def _missing_write_obstacle(graph: Graph, rewrites: Rewrites, name: str, rows: Value) -> Obstacle:
    """Returns the obstacle if no write takes the rows.

    A step may change the rows first, or they may be written in another way than by row numbers.
    """

    def is_new_rows(value: Value) -> bool:
        """Returns True if the Value is the new rows, perhaps reshaped."""
        return _is_reshape_of(rewrites.of(value), rows)

    values = {**graph.enclosing, **{value: nodes[0] for value, nodes in graph.nodes.items()}}
    sources = [value.sources[2] for value in values if value.op == "write"]
    steps_after = (
        step for value in sources for step in order([value]) if any(map(is_new_rows, step.sources))
    )
    same_width = (
        rows_value
        for rows_value in sources
        if rows_value.active and rows_value.shape[1:] == rows.shape[1:]
    )
    for step in (*steps_after, *same_width):
        if step in values and not is_new_rows(step):
            node = values[step]
            is_c10d = "c10d" in str(called(node))
            act = "exchanges the new rows with other devices" if is_c10d else "changes the new rows"
            message = f"{node.name} ({called(node)}) {act} before they are written"
            return Obstacle("cache.rows_changed", message)
    for value, node in values.items():
        caches = [source for source in value.sources if _may_be_cache(source, rows)]
        if value.op != "dot" and caches and any(map(is_new_rows, value.sources)):
            call = f"{node.name} ({called(node)})"
            width = value.shape[-1]
            if is_open(width):
                message = f"{call} writes to a cache that is {graph.size_text(width)} wide"
                return Obstacle("cache.width", message)
            counts = [source.numel for source in value.sources if not source.is_float]
            if len(counts) == 1 and counts[0] not in (1, rows.shape[0], rows.numel):
                return _count_obstacle(graph, counts[0], rows.shape[0])
            message = f"{call} is no write of whole rows of {name} by one number for each token"
            return Obstacle("cache.writer", message)
    for value in graph.written.values():
        if any(map(is_new_rows, order([value]))):
            message = (
                f"{graph.nodes[value][0].name} holds the rows of {name} in another order, or "
                "elsewhere than at a number for each token"
            )
            return Obstacle("cache.writer", message)
    return Obstacle("cache.not_written", f"the rows of {name} are written to no cache as they are")


def _may_be_cache(value: Value, rows: Value) -> bool:
    """Returns True if the Value is a view of an input that is large enough to take the rows."""
    memory = strip(value, "reshape", "slice", "permute")
    is_input = memory.op in ("leaf", "write") and not memory.model and memory is not rows
    return is_input and memory.dtype.itemsize < 8 and memory.numel >= rows.numel


PAIRS = Obstacle(
    "rope.pairs",
    "the key cache holds pairs (a0 b0 a1 b1 ..) as RoPE leaves them, the kernel writes halves (a0 "
    "a1 .. b0 b1 ..)",
)


def _memory_obstacles(
    graph: Graph, write: Write, element: torch.dtype, machine: Machine, boundary: bool
) -> Iterator[Obstacle]:
    """Yields why the kernel cannot write rows into the memory of a cache.

    element  the dtype of the rows
    """
    allowed = limits("npu_mla_prolog_v3", machine.soc, machine.cann, "graph")
    name, cache = write.cache.name, value_of(write.cache)
    if not boundary and graph.shape(cache.shape) != write.shape:
        sizes = f"{list(cache.shape)}, and no wrapper can view it as {list(write.shape)}"
        yield Obstacle("cache.boundary", f"{name} has shape {sizes}")
    if not layout.writable(
        cache, first_axis_free=allowed.strided_caches, ones_free=not allowed.compares_strides
    ):
        strides = list(cache.stride())
        yield Obstacle(
            "cache.strides",
            f"{name} has strides {strides}, and rows that the kernel writes to it do not arrive",
        )
    if cache.dtype != element:
        detail = f"{name} is {cache.dtype}, the rows written to it {element}"
        yield Obstacle("cache.dtype", detail)


def _is_reshape_of(value: Value | None, rows: Value) -> bool:
    """Returns True if the Value is the rows, perhaps reshaped."""
    return value is not None and strip_reshapes(value) is rows


def _input_holding(graph: Graph, memory: Value) -> Node | None:
    """Returns the input that holds a Value, or None."""
    nodes = graph.nodes.get(memory, ())
    return next((node for node in nodes if node.op == "placeholder"), None)


def _read_write(graph: Graph, value: Value) -> Write | Obstacle:
    """Returns a write as the kernel does it, or the obstacle if the cache has no fitting shape."""
    memory = strip_reshapes(value.sources[0])
    cache = _input_holding(graph, memory)
    if memory.op != "leaf" or cache is None:
        return _no_input_obstacle(graph, memory)
    tensor, width = value_of(cache), value.shape[1]
    # a symbol that the reader found to be the width may be another number in the next call
    if graph.shape(tensor.shape)[-1] != width or guard(tensor.shape[-1] == width) is False:
        detail = f"{cache.name} is {tensor.shape[-1]} wide, the rows written to it {width}"
        return Obstacle("cache.width", detail)
    paged_shape = _paged_shape(cache)
    if paged_shape is None:
        return Obstacle("cache.shape", f"{cache.name} has shape {list(tensor.shape)}")
    return Write(value, cache, graph.shape(paged_shape))


def _no_input_obstacle(graph: Graph, base: Value) -> Obstacle:
    """Returns the obstacle of a write into something that is no input of the graph.

    base  what is written into
    """
    nodes, memory = graph.nodes_in_any_shape(base), strip(base, "reshape", "slice", "permute")
    name = nodes[0].name if nodes else "what rows are written into"
    owner = _input_holding(graph, memory)
    message, remedy = f"{name} is not a graph input seen as rows", ""
    if not base.numel:
        message = f"{name} has no elements"
    elif base.op == "opaque" and base.literal[0].startswith("as_strided"):
        message = (
            f"{name} is a view by strides, which AOT autograd also makes of arguments that overlap "
            "in memory, as far as it can tell"
        )
        remedy = (
            "Give each cache memory of its own, or contiguous parts of one tensor (layer-major: "
            "pool[layer]), not columns or every other block of it."
        )
    elif memory.op in ("write", "join"):
        message = (
            f"{name} is a cache as another step has written it, and the kernel would write it once "
            "more"
        )
        remedy = (
            "Write a cache once in a graph: compile what writes it again (a draft's step, say) as "
            "a graph of its own. Two layers are given two caches."
        )
    elif owner is not None and base.shape[-1] != memory.shape[-1]:
        message = f"{name} is some columns of {owner.name}"
        remedy = "Give latent and key a contiguous cache each, as wide as their rows."
    elif owner is not None:
        message = (
            f"{name} is a part of {owner.name}, and no input of its own; only a wrapper around the "
            "graph, as that of mf.backend(), can pass parts, if literals name them, they do not "
            "overlap, and no result of the graph is one of them"
        )
    return Obstacle("cache.no_input", message, remedy)


_BLOCK_SIZES = (128, 64, 32, 16)


def _paged_shape(cache: Node) -> tuple[object, object, int, object] | None:
    """Returns the shape [BlockNum, BlockSize, 1, width] that the cache has, or that it can be
    viewed as.

    Returns None if there is no such shape, or if the cache has no rows.

    A cache of another rank is rows of its last axis. In [.., BlockSize, width] the blocks stay if
    the kernel takes that BlockSize (16 to 1024, in steps of 16). Other rows are cut into blocks of
    128, 64, 32 or 16. If sizes are symbolic, one must be known to be a multiple of that, or the
    product of the others must be.
    """
    value = value_of(cache)
    shape = [known(size) for size in value.shape]
    if len(shape) < 2 or any(isinstance(size, int) and size == 0 for size in shape):
        return None
    if len(shape) == 4 and same(shape[2], 1):
        return shape[0], shape[1], 1, shape[3]
    *lead, width = shape
    if not isinstance(width, int) or not value.is_contiguous():
        return None
    if len(lead) == 2 and isinstance(lead[1], int) and lead[1] in range(16, 1025, 16):
        return lead[0], lead[1], 1, width
    symbolic = [size for size in lead if not isinstance(size, int)]
    factors = [prod(size for size in lead if isinstance(size, int)), *symbolic]
    sizes = (size for size in _BLOCK_SIZES if any(divides(size, factor) for factor in factors))
    size = next(sizes, None)
    return (prod(lead) // size, size, 1, width) if size else None
