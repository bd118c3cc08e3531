"""Numbers for symbolic sizes: a few tokens, then more than any literal that meets their count."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from sympy import Integer
from torch.fx import Graph, Node

from mla_fusion.compat import guarded_equal
from mla_fusion.fx.kinds import holds_integers, value_of
from mla_fusion.fx.sizes import Binding, expression, is_size, is_symbolic
from mla_fusion.witness.side import Nodes

Shape = Sequence[Any]
_STEP = 640  # a size of a cache may have to be a multiple of 16, or of 128
_MANY = 131  # tokens of the second run: more than any block, and a prime
_FEWEST = 17  # of one axis in that run
_LIMITS = 600, 8192  # literals beyond meet no count; the second is of literals that meet an arange


def bound(graph: Graph, alike: Mapping[str, int] | None = None) -> Binding:
    """A small prime for each symbol, which no literal of the graph equals.

    alike  numbers of symbols: the graph runs only where those of one number are equal
    """
    binding = Binding()
    binding.avoid(_literals(graph.nodes))
    sizes = [size for node in graph.nodes for size in _sizes(node).values()]
    for a, b in guarded_equal(sizes[0]) if sizes else ():
        binding.equate(a, b)
    first: dict[int, Any] = {}
    for size in sizes:
        found = expression(size)
        numbers = {symbol: (alike or {}).get(str(symbol)) for symbol in found.free_symbols}
        if None not in numbers.values():
            binding.equate(first.setdefault(int(found.subs(numbers)), size), size)
    binding.admit(sizes)
    return binding


def with_room(binding: Binding, x: Shape, inputs: Iterable[Shape], most: int) -> Binding:
    """The binding with sizes at which tables and caches (shapes ``inputs``) have rows for all
    tokens along their innermost free axis, and ``most`` more.
    """
    tokens, meaning = math.prod(binding.shape(x[:-1])), binding.meaning
    own = set().union(*(meaning(size).free_symbols for size in x if binding.varies(size)))
    for shape in inputs:
        varying = filter(binding.varies, shape)
        free = [size for size in varying if own.isdisjoint(meaning(size).free_symbols)]
        for size in free[-1:]:
            binding = binding.roomier(size, tokens + most, _STEP)
    return binding


def larger(binding: Binding, x: Shape, nodes: Nodes, most: int) -> Iterator[Binding]:
    """Bindings with more tokens along the last symbolic axis of x: the first should run, but the
    model may take fewer alone.

    most  literals that meet a count are no larger. Others are no multiple of it, but for 1
    """
    last = next((size for size in reversed(x[:-1]) if binding.varies(size)), 1)
    others = math.prod(binding.shape(x[:-1])) // binding.size(last)
    wanted, literals = max(-(-_MANY // others), _FEWEST, most + 2), _literals(nodes)
    while any(number > 1 and (number + 1) % wanted < 3 for number in literals):
        wanted += 1
    for part in range(8, 0, -1):
        found = binding.raised(last, wanted * part // 8)
        if found is not binding:
            yield found


def largest_literal(nodes: Nodes, of_x: Collection[Node]) -> int:
    """The largest literal that may be compared with a count of tokens: it stands beside integers,
    cuts a symbolic axis, or meets what is made of the numbers of the tokens.
    """
    counts, most = set[Node](), 0
    for node in nodes:
        read = [one for one in node.all_input_nodes if isinstance(value_of(one), torch.Tensor)]
        is_first = not read and bool(_sizes(node))
        if node not in of_x and (is_first or not counts.isdisjoint(read)):
            counts.add(node)
        is_cut = bool(read) and _sizes(read[0]).keys() != _sizes(node).keys()
        given = [abs(arg) for arg in node.args if isinstance(arg, (int, float))]
        if not (node in counts or is_cut or any(map(holds_integers, (node, *read)))):
            given = []
        for size in filter(is_size, node.all_input_nodes):
            if size in node.args:  # what is made of the count of tokens
                given += map(int, expression(value_of(size)).atoms(Integer))
        limit = _LIMITS[node in counts]
        most = max([most, *(math.ceil(number) for number in given if number < limit)])
    return most


def _sizes(node: Node) -> dict[Any, Any]:
    """The symbolic sizes of what a node holds, by their expressions."""
    value = value_of(node)
    parts = value if isinstance(value, (list, tuple)) else [value]
    shapes = (part.shape for part in parts if isinstance(part, torch.Tensor))
    sizes = (size for shape in shapes for size in shape)
    return {expression(size): size for size in sizes if is_symbolic(size)}


def _literals(nodes: Nodes) -> set[int]:
    given = (arg for node in nodes for arg in node.args)
    items = (item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else [arg]))
    return {item for item in items if isinstance(item, int)}
