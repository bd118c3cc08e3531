"""Run the cut-out region and its replacement on the same seeded inputs, on CPU, and compare per output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.fusion import replace
from mla_fusion.fusion.build import TensorBuilder
from mla_fusion.fusion.plan import InPlace, Plan
from mla_fusion.fusion.rejection import Refuse
from mla_fusion.fusion.verdict import projections
from mla_fusion.graph.program import Failed, Program
from mla_fusion.graph.sizes import is_symbolic
from mla_fusion.graph.view import View
from mla_fusion.meta.spec import TILE_SIZE
from mla_fusion.paging.tiles import dequantise_rows

# Two bfloat16 evaluations of one prologue differ by 3e-3 to 6e-3 in relative L2 norm (one rounding more or less
# per step); a swapped pair, a wrong column or a wrong row differs by more than 1e-1.
TOLERANCE = 2e-2
# c_q rounded to bfloat16 or not before it is quantised: a few hundredths of the int8 values differ by one step.
TOLERANCE_QUANTISED = 4e-2
_LARGEST_CACHE = 1 << 25
_INT8 = 40  # standard deviation of drawn int8 values


@dataclass(frozen=True)
class Figure:
    """One output compared: relative L2 error and largest difference, fused against unfused."""

    output: str
    relative: float
    largest: float
    elements: int


def compare(view: View, plan: Plan, half_rows: bool = False, seed: int = 0) -> tuple[Figure, ...]:
    """Figures of every replaced value. Raises ``Refuse("verify.mismatch")`` where one is out of tolerance.

    ``half_rows``: the caller chose ``kr_layout="half"``, so rotated values differ in element order by intent.
    """
    view = _with_room(view, plan)
    values = _draw(view, plan, seed)
    targets = [
        item
        for item in plan.replacements
        if not (half_rows and item.output in ("query_rope", "k_pe", "kr_cache"))
        and math.prod(view.binding.shape(item.node.meta["val"].shape)) <= _LARGEST_CACHE
    ]
    unfused = _run_region(view, values, [item.node for item in targets])
    builder = TensorBuilder(values, view.binding)
    try:
        results = replace.call_kernel(builder, plan)
    except (RuntimeError, ValueError) as error:
        raise Refuse("verify.mismatch", f"the call does not run on CPU: {error}", plan.candidate.nodes) from error
    figures = []
    tolerance = TOLERANCE_QUANTISED if plan.candidate.weight_quant_mode else TOLERANCE
    for item in targets:
        want, got = unfused[item.node], replace.fit(builder, item, results[item.output])
        if item.output == "kv_cache" and plan.kv_cache_quant_mode == 3:
            want, got = (_unpacked(plan, rows) for rows in (want, got))
        figure = _figure(item.output, want, got)
        if not figure.relative <= tolerance:
            detail = f"{item.output} at {item.node.name}: relative error {figure.relative:.3g} > {tolerance:g}"
            raise Refuse("verify.mismatch", detail, (item.node,))
        figures.append(figure)
    return tuple(figures)


def _with_room(view: View, plan: Plan) -> View:
    """The view with sizes at which every token finds a slot of its own in a cache of symbolic size."""
    if not isinstance(plan.caches, InPlace):
        return view
    blocks, block_size = plan.caches.kv_shape[:2]
    tokens = math.prod(view.binding.shape(plan.token_x.meta["val"].shape[:-1]))
    return view.bound(view.binding.roomier(blocks, -(-tokens // view.binding.size(block_size))))


def _unpacked(plan: Plan, rows: torch.Tensor) -> torch.Tensor:
    """Rows of int8 tiles as the numbers that they stand for."""
    key = plan.candidate.key
    latent, rope = dequantise_rows(rows.contiguous(), hckv=len(key.columns), dr=key.rope_dim, tile=TILE_SIZE)
    return torch.cat([latent, rope.float()], -1)


def _figure(output: str, want: torch.Tensor, got: torch.Tensor) -> Figure:
    if want.shape != got.shape:
        return Figure(output, math.inf, math.inf, want.numel())
    difference = (want.double() - got.double()).reshape(-1)
    norm = float(want.double().norm()) or 1.0
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    return Figure(output, float(difference.norm()) / norm, largest, want.numel())


def _draw(view: View, plan: Plan, seed: int) -> dict[Node, torch.Tensor]:
    """Seeded values of the replacement's inputs, of x as the region reads it, and of nothing else."""
    q = plan.candidate.query
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(65537, generator=generator)  # prime length: no period lines up with a row
    values: dict[Node, torch.Tensor] = {}
    made = _made_from_x(plan)
    dynamics = [item.quantised.dynamic for item in projections(plan.candidate) if item.quantised is not None]
    smoothing = [dynamic.smooth for dynamic in dynamics if dynamic is not None and dynamic.smooth is not None]
    nodes = dict.fromkeys([q.down.origin, *smoothing, *replace.inputs(plan)])
    slots = plan.caches.slots.nodes if isinstance(plan.caches, InPlace) else ()
    weights = {item.weight for item in projections(plan.candidate)}
    if isinstance(q.absorb, AbsorbFact):
        weights.update(q.absorb.weights)
    cache_scales = (plan.caches.kv_scale, plan.caches.kr_scale) if isinstance(plan.caches, InPlace) else ()
    packed = plan.caches if isinstance(plan.caches, InPlace) and plan.kv_cache_quant_mode == 3 else None
    of_caches = {scale.node: scale.inverse for scale in cache_scales if scale is not None}
    scales = {item.quantised.weight_scale for item in projections(plan.candidate) if item.quantised is not None}
    gammas = {q.norm.gamma, plan.candidate.key.gamma, *smoothing}
    for node in nodes:
        if node in slots or node in made:
            continue
        value = node.meta["val"]
        shape = view.binding.shape(value.shape)
        drawn = _repeat(pool, shape, offset=len(values) * 4099)
        if value.dtype.is_complex:
            drawn = torch.complex(drawn, _repeat(pool, shape, offset=len(values) * 4099 + 17))
        if packed is not None and node is packed.kv_cache:
            drawn = torch.zeros(shape)  # rows that are not written are compared as numbers too
        elif value.dtype == torch.int8:
            drawn = (_INT8 * drawn).clamp(-127, 127)
        elif node in weights:
            drawn = (drawn / 32).bfloat16()  # what a wider weight holds too
        elif node in scales:
            drawn = (1 + drawn / 8) / (32 * _INT8)
        elif q.down.quantised is not None and node is q.down.quantised.token_scale:
            drawn = (1 + drawn / 8) / _INT8
        elif node in of_caches:
            drawn = (1 + drawn / 8) * (1 / _INT8 if of_caches[node] else _INT8)
        elif node in gammas:
            drawn = 1 + drawn / 8
        values[node] = drawn.to(value.dtype)
    for run, other in zip((*q.rope.cos, *q.rope.sin), (*plan.cos, *plan.sin), strict=True):
        if run.base not in values:  # the same rows, made apart for the query
            table = run.base.meta["val"]
            values[run.base] = values[other.base].reshape(view.binding.shape(table.shape)).to(table.dtype)
    if isinstance(plan.caches, InPlace):
        values |= _draw_slots(view, plan.caches, generator)
    if made:
        values |= _run_region(view, {node: values[node] for node in (q.down.origin, *smoothing)}, made)
    return values


def _made_from_x(plan: Plan) -> list[Node]:
    """Inputs of the kernel that the graph makes of x: x in another shape, or quantised, with its scale."""
    down = plan.candidate.query.down
    made = [plan.token_x]
    if down.quantised is not None and down.quantised.dynamic is not None and down.quantised.token_scale is not None:
        made.append(down.quantised.token_scale)
    return [node for node in made if node is not down.origin]


def _repeat(pool: torch.Tensor, shape: Iterable[int], offset: int) -> torch.Tensor:
    size = math.prod(shape)
    start = offset % len(pool)
    return pool.repeat((size + start) // len(pool) + 1)[start : start + size].reshape(tuple(shape))


def _draw_slots(view: View, caches: InPlace, generator: torch.Generator) -> dict[Node, torch.Tensor]:
    blocks, size = view.binding.shape(caches.kv_shape[:2])
    slots = caches.slots
    node = slots.index if slots.index is not None else slots.block
    assert node is not None
    shape = view.binding.shape(node.meta["val"].shape)
    count = math.prod(shape)
    rows = torch.randperm(blocks * size, generator=generator)
    rows = rows[torch.arange(count) % len(rows)].reshape(shape) if len(rows) else torch.full(shape, -1)
    if slots.index is not None:
        return {slots.index: rows.to(slots.index.meta["val"].dtype)}
    assert slots.block is not None and slots.offset is not None
    return {slots.block: rows // size, slots.offset: rows % size}


def _run_region(view: View, values: dict[Node, torch.Tensor], targets: list[Node]) -> dict[Node, torch.Tensor]:
    """The original nodes, dtypes and casts as they are, from the drawn values to the targets."""
    by_number = {view.number(node): node for node in values}
    aliases: dict[Node, Node] = {}
    order: list[Node] = []
    seen: set[Node] = set(values)
    stack = [(node, False) for node in targets]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in seen or is_symbolic(node.meta.get("val")):
            continue
        seen.add(node)
        twin = by_number.get(view.number(node))
        if twin is not None:
            aliases[node] = twin
            continue
        stack.append((node, True))
        stack.extend((arg, False) for arg in node.all_input_nodes)
    inputs = list(values)
    outside = [node for node in order if node.op == "placeholder"]
    program = Program(
        [*inputs, *outside], [n for n in order if n.op != "placeholder"], view.binding, aliases, exact=True
    )
    extra = [torch.zeros(view.binding.shape(node.meta["val"].shape), dtype=node.meta["val"].dtype) for node in outside]
    memory = program.run([*[values[node].clone() for node in inputs], *extra])
    found = {}
    for node in targets:
        value = memory[program.slot(node)]
        if isinstance(value, Failed):
            raise Refuse("verify.mismatch", f"{node.name} does not run on CPU: {value.reason}", (node,))
        found[node] = value
    return found
