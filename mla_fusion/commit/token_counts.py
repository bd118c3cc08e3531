"""At how many tokens a region is verified, and with which draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.commit.draws import KINDS, WIDE, rounds_nothing
from mla_fusion.commit.region import Region
from mla_fusion.fx.kinds import Kind, argument, holds_integers, kind_of, named_sizes, word
from mla_fusion.fx.sizes import has_symbols, is_symbolic
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, reshapes
from mla_fusion.operators.known import SELECTIONS, SIZED, shape_of
from mla_fusion.plan.plan import InPlace, Plan

# tokens of the second run where the number is symbolic: more than any block, and a prime
MANY = 131
_FEWEST = 17  # of one axis in that run
_MOST = 600
_FAR = 8192  # of what is made of the numbers of tokens: the draw at so many is a costly one
_COSTLY = 256  # tokens from which one draw holds ordinary rows and rows with outliers side by side

_CUTS = {
    "slice": ("start", "end"),
    "narrow": ("start", "length"),
    "select": ("index",),
}
_COUNTS = frozenset(
    """
    arange lt le gt ge eq ne clamp clamp_min
    clamp_max remainder fmod floor_divide div sub tril
    triu roll
    """.split()
)


def counts(view: View, plan: Plan, region: Region) -> Iterator[View]:
    """The view at the sizes that it is bound to; where the number of tokens is symbolic, then at
    larger ones, of which the first that the model takes will do.
    """
    yield with_room(view, plan, region)
    symbolic = [size for size in plan.lead if is_symbolic(size)]
    if symbolic:
        most = max(_literals(region), default=0)
        for start in (_other_sequences(view, symbolic[:-1]), view)[len(symbolic) == 1 :]:
            others = tokens_at(start, plan) // start.binding.size(symbolic[-1])
            wanted = max(-(-MANY // others), _FEWEST, most + 2)
            # where a table or a cache has few rows
            fewer = (wanted * part // 8 for part in range(7, 0, -1))
            rows = min(_rows(view, plan), wanted)
            for least in (wanted, rows, *_gathered_from(region, wanted), *fewer):
                binding = start.binding.raised(symbolic[-1], least)
                larger = with_room(view.bound(binding), plan, region)
                if binding is not start.binding and _fits(larger, plan, region):
                    yield larger


def _other_sequences(view: View, sizes: list[Any]) -> View:
    """The view with another number of sequences, where that is symbolic."""
    binding = view.binding
    for size in sizes:
        binding = binding.raised(size, binding.size(size) + 2)
    return view.bound(binding)


def tokens_at(view: View, plan: Plan) -> int:
    """How many tokens there are."""
    return math.prod(view.binding.shape(plan.lead))


def _rows(view: View, plan: Plan) -> int:
    """How many slots there are; any number where the call writes no cache."""
    if not isinstance(plan.caches, InPlace):
        return 1 << 31
    return math.prod(view.binding.shape(plan.caches.kv_shape[:2]))


def _gathered_from(region: Region, most: int) -> list[int]:
    """How many rows tables have, of which the model takes some by number: it can have no more
    tokens. The largest first.
    """
    gathers = (node for node in region.nodes if kind_of(node) is Kind.GATHER)
    sizes = (size for node in gathers for size in shape_of(node.all_input_nodes[0]))
    return sorted({size for size in sizes if type(size) is int and size < most}, reverse=True)


def kinds_at(view: View, plan: Plan, region: Region) -> tuple[str, ...]:
    """The draws to be made at these sizes."""
    tokens = tokens_at(view, plan)
    is_second = has_symbols(plan.lead) and tokens >= MANY
    if tokens <= _COSTLY and not is_second:
        in_pieces = isinstance(plan.caches, InPlace) and plan.caches.mode == "PA_NZ"
        # A piece of an NZ cache is 32 bytes: numbers of float64 lie elsewhere than those of the
        # model.
        return (*KINDS, *WIDE) if rounds_nothing(region) and not in_pieces else KINDS
    return ("outliers", "edges") if any(map(holds_integers, region.leaves)) else ("outliers",)


def with_room(view: View, plan: Plan, region: Region) -> View:
    """The view with sizes at which every token finds a slot in a cache of symbolic size, and every
    slice its rows.
    """
    binding = view.binding
    if isinstance(plan.caches, InPlace):
        blocks, block_size = plan.caches.kv_shape[:2]
        least = -(-tokens_at(view, plan) // binding.size(block_size))
        binding = binding.roomier(blocks, least, _blocks_in_step(view, plan, region))
        if plan.caches.slots.in_sequences:
            sequences = binding.size(plan.caches.slots.shape[0])
            for cache in plan.caches.inputs:
                binding = binding.roomier(shape_of(cache)[0], sequences)
    for node, rows, end in _slices(region):
        start, kept = argument(node, "start"), shape_of(node)[argument(node, "dim")]
        if isinstance(end, Node):
            binding = binding.roomier(rows, binding.number(end.meta["val"]))
        elif isinstance(start, Node):  # so many rows from the end
            binding = binding.roomier(rows, binding.size(kept))
    for rows, parts in _cuts(region):
        short = 2 - min(map(binding.size, parts))
        binding = binding.roomier(rows, binding.size(rows) + max(short, 0))
    return view.bound(binding)


def _blocks_in_step(view: View, plan: Plan, region: Region) -> int:
    """Of how many blocks a multiple can be viewed as the sizes that views of caches name."""
    assert isinstance(plan.caches, InPlace)
    blocks, found = view.binding.size(plan.caches.kv_shape[0]), 1
    for node in region.nodes:
        cache = origin(node, reshapes)
        if word(node) in SIZED and cache in plan.caches.inputs:
            of_block = view.binding.count_of(cache) // blocks
            named = [size for size in named_sizes(node) if isinstance(size, int)]
            found = math.lcm(found, math.prod(named) // math.gcd(math.prod(named), of_block))
    return found


def _fits(view: View, plan: Plan, region: Region) -> bool:
    """Is there a slot for each token, and are there the rows that each slice takes?"""
    for node in region.nodes:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and min(view.binding.shape(value.shape), default=0) < 0:
            return False
    for _, rows, end in _slices(region):
        if isinstance(end, Node) and view.binding.number(end.meta["val"]) > view.binding.size(rows):
            return False
    slots = plan.caches.slots
    size = view.binding.size
    if slots.in_sequences and size(slots.shape[-1]) > size(slots.block_size):
        return False
    return tokens_at(view, plan) <= _rows(view, plan)


def _cuts(region: Region) -> Iterator[tuple[Any, list[Any]]]:
    """Of each split how many rows there are, and how many each part has."""
    for node in region.nodes:
        parts, source = node.meta["val"], node.args[0] if node.args else None
        if word(node) in SELECTIONS and isinstance(parts, (list, tuple)):
            assert isinstance(source, Node)
            sizes = [shape_of(source), *(part.shape for part in parts)]
            if len({len(shape) for shape in sizes}) == 1:  # unbind takes the axis away
                rows, *each = (shape[argument(node, "dim", 0)] for shape in sizes)
                yield rows, each


def _slices(region: Region) -> Iterator[tuple[Node, Any, Any]]:
    """Each slice, with how many rows there are of which it takes some, and where it ends."""
    for node in region.nodes:
        source = node.args[0] if node.args else None
        if word(node) == "slice" and isinstance(source, Node):
            yield node, shape_of(source)[argument(node, "dim")], argument(node, "end")


def _literals(region: Region) -> Iterator[int]:
    """Numbers with which tokens may be counted: where a symbolic axis is cut, what integers are
    compared with, and what a token's own number meets.
    """
    numbers: set[Node] = set()  # made of the tokens' numbers
    for node in region.nodes:
        name = word(node)
        is_first = name == "arange" and has_symbols(shape_of(node))
        if is_first or not numbers.isdisjoint(node.all_input_nodes):
            numbers.add(node)
        if name in _CUTS:
            source = node.args[0]
            axis = argument(node, "dim", 0)
            if isinstance(source, Node) and is_symbolic(shape_of(source)[axis]):
                yield from _counting((argument(node, part) for part in _CUTS[name]), _MOST)
        elif name in _COUNTS:
            most = _FAR if node in numbers else _MOST
            yield from _counting((*node.args[1:], *node.args[:1]), most)


def _counting(values: Iterable[object], most: int) -> Iterator[int]:
    for value in values:
        if type(value) in (int, float) and abs(value) < most:  # type: ignore[arg-type]
            yield math.ceil(abs(value))  # type: ignore[arg-type]
