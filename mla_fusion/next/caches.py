"""Where the new rows go: into the model's own caches by the kernel, or by the model's writes from
rows that the kernel gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from mla_fusion.graph.form import Form, Value
from mla_fusion.graph.read import Graph
from mla_fusion.next.outputs import Given
from mla_fusion.next.slots import trusted
from mla_fusion.propose.prologue import Proposal


@dataclass(frozen=True)
class Obstacle:
    """Why the kernel cannot write a cache: a code, and a sentence."""

    code: str
    message: str


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
    kr: Write
    slots: Value
    mode: str
    trusted: tuple[Value, ...]


@dataclass(frozen=True)
class Staged:
    obstacles: tuple[Obstacle, ...]


def writes_of(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if value.op == "write"]


def placed(
    graph: Graph, proposal: Proposal, given: Given, values: Iterable[Value]
) -> InPlace | Staged:
    """In place where the kernel's writes are those of the graph; else every reason against it."""
    results, form, obstacles = proposal.results, graph.form, list[Obstacle]()
    found: dict[str, Write] = {}
    writes = writes_of(values)
    for name, rows in (("kv_cache", results.kv_rows), ("kr_cache", results.kr_rows)):
        own = [value for value in writes if _is_of(form, given.of(value.sources[2]), rows)]
        if len(own) != 1:
            detail = f"{len(own)} writes take the rows of {name} as they are"
            obstacles.append(Obstacle("cache.no_write", detail))
            continue
        write = _write(graph, own[0])
        if isinstance(write, Obstacle):
            obstacles.append(write)
        else:
            found[name] = write
    if len(found) < 2:
        return Staged(tuple(obstacles))
    kv, kr = found["kv_cache"], found["kr_cache"]
    if kv.slots is not kr.slots:
        obstacles.append(
            Obstacle(
                "cache.slots_differ",
                f"{kv.cache.name} and {kr.cache.name} are written at different slots",
            )
        )
    if kv.shape[:3] != kr.shape[:3]:
        sizes = f"{list(kv.shape)} and {list(kr.shape)}"
        obstacles.append(Obstacle("cache.blocks_differ", f"the caches are {sizes} to the kernel"))
    if kv.cache is kr.cache:
        obstacles.append(Obstacle("cache.joined_row", f"both writes go to {kv.cache.name}"))
    if kv.value.literal != kr.value.literal:
        obstacles.append(Obstacle("cache.modes_differ", "the caches hold rows in different orders"))
    if kv.slots.shape[0] != proposal.x.shape[0]:
        detail = f"{kv.slots.shape[0]} slots for {proposal.x.shape[0]} tokens"
        obstacles.append(Obstacle("cache.slots_count", detail))
    leaves = trusted(kv.slots)
    if leaves is None:
        detail = "the slots are neither an input nor a block table's"
        obstacles.append(Obstacle("slots.unproven", detail))
    if obstacles or leaves is None:
        return Staged(tuple(obstacles))
    return InPlace(kv, kr, kv.slots, kv.value.literal or "PA_BSND", tuple(leaves))


def _is_of(form: Form, given: Value | None, rows: Value) -> bool:
    while given is not None and given.op == "reshape":
        given = given.sources[0]
    return given is rows


def _write(graph: Graph, value: Value) -> Write | Obstacle:
    base = value.sources[0]
    while base.op == "reshape":
        base = base.sources[0]
    nodes = [node for node in graph.nodes.get(base, ()) if node.op == "placeholder"]
    if base.op != "leaf" or not nodes:
        return Obstacle("cache.not_an_input", "rows are written into what is no input of the graph")
    cache, shape, width = nodes[0], base.shape, value.shape[1]
    if len(shape) == 4 and shape[2:] == (1, width):
        return Write(value, cache, shape)
    if len(shape) == 4 and shape[1] == 1 and shape[3] == width:
        return Write(value, cache, (shape[0], shape[2], 1, width))
    if len(shape) == 3 and shape[2] == width:
        return Write(value, cache, (*shape[:2], 1, width))
    return Obstacle("cache.shape", f"{cache.name} has shape {list(shape)}")
