"""Chooses numbers for symbolic sizes, at which ``compare.py`` runs both graphs.

The first run has a few tokens. The second has more tokens than any literal that is compared with
their count. If the axes of known size have many tokens already, there is one run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sympy import Integer, Symbol
from torch import Tensor
from torch.fx import Graph, Node

from mla_fusion.compat import FloorDiv, guarded_equal, tree_leaves
from mla_fusion.fx.kinds import holds_integers, value_of
from mla_fusion.fx.sizes import Binding, expression, is_size, is_symbolic
from mla_fusion.witness.side import Nodes

Shape = Sequence[Any]
_STEP = 640  # a size of a cache may have to be a multiple of 16, or of 128
MANY = 131  # tokens of the second run: more than any block, and a prime
_FEWEST = 17  # least size of one axis in that run
# larger literals are compared with no count; the second limit is for literals beside an arange
_LITERAL_LIMITS = 600, 8192


def bind_sizes(graph: Graph, symbols: Mapping[str, int]) -> Binding:
    """Returns a binding with a small prime for each symbol, unlike every literal of the graph.

    symbols  numbers of symbols and quotients: the graph runs only if sizes of one number are equal
    """
    binding = Binding(_literals(graph.nodes))
    sizes = [size for node in graph.nodes for size in _sizes(node).values()]
    for first_size, second_size in guarded_equal(sizes[0]) if sizes else ():
        binding.equate(first_size, second_size)
    sizes_by_number: dict[Any, Any] = {}
    for size in sizes:
        parts = expression(size).atoms(Symbol, FloorDiv)
        numbers = {part: Integer(symbols[str(part)]) for part in parts if str(part) in symbols}
        number = expression(size).xreplace(numbers)
        if number.is_Integer:
            binding.equate(sizes_by_number.setdefault(number, size), size)
    binding.admit(sizes)
    return binding


def with_room(binding: Binding, x: Shape, inputs: Iterable[Shape], most: int) -> Binding:
    """Returns the binding, raised so that tables and caches have rows for all tokens.

    inputs  shapes of tables and caches; their innermost free axis is raised
    most    how many more rows than tokens are needed
    """
    tokens, meaning = math.prod(binding.shape(x[:-1])), binding.meaning
    x_symbols = set().union(*(meaning(size).free_symbols for size in x if binding.varies(size)))
    for shape in inputs:
        free_sizes = [
            size
            for size in filter(binding.varies, shape)
            if x_symbols.isdisjoint(meaning(size).free_symbols)
        ]
        for size in free_sizes[-1:]:
            binding = binding.roomier(size, tokens + most, _STEP)
    return binding


def bindings(binding: Binding, x: Shape, nodes: Nodes, most: int) -> Iterator[Binding]:
    """Yields bindings with a few tokens, then with more along the last symbolic axis of x.

    The first with more should run, but a model may take only fewer tokens. Caches may have rows for
    three or two sequences alone; with these it begins if sequences are long.

    most  the largest literal that is compared with a count; other literals are no multiple of the
          new size, except 1
    """
    token_size = next((size for size in reversed(x[:-1]) if binding.varies(size)), 1)
    other_tokens = math.prod(binding.shape(x[:-1])) // binding.size(token_size)
    fewer = [
        binding.resized(token_size, number)
        for number in ((3, 2) if binding.varies(token_size) else ())
    ]
    if other_tokens >= MANY:
        yield from fewer
    yield binding
    count, literals = max(-(-MANY // other_tokens), _FEWEST, most + 2), _literals(nodes)
    while any(number > 1 and (number + 1) % count < 3 for number in literals):
        count += 1
    for eighths in range(8, 0, -1):
        larger_binding = binding.raised(token_size, count * eighths // 8)
        if larger_binding is not binding:
            yield larger_binding
    yield from fewer


def largest_literal(nodes: Nodes, of_x: Collection[Node]) -> int:
    """Returns the largest literal that may be compared with a count of tokens.

    Such a literal stands beside integers, cuts a symbolic axis, or is compared with token numbers.

    of_x  the nodes that are computed from x
    """
    counts, most = set[Node](), 0
    for node in nodes:
        tensors_read = [
            operand for operand in node.all_input_nodes if isinstance(value_of(operand), Tensor)
        ]
        is_new_count = not tensors_read and bool(_sizes(node))
        if node not in of_x and (is_new_count or not counts.isdisjoint(tensors_read)):
            counts.add(node)
        is_cut = bool(tensors_read) and _sizes(tensors_read[0]).keys() != _sizes(node).keys()
        literals = [abs(arg) for arg in node.args if isinstance(arg, (int, float))]
        if not (node in counts or is_cut or any(map(holds_integers, (node, *tensors_read)))):
            literals = []
        for size in filter(is_size, node.all_input_nodes):
            if size in node.args:  # literals in an expression of the count of tokens
                literals += map(int, expression(value_of(size)).atoms(Integer))
        limit = _LITERAL_LIMITS[node in counts]
        most = max([most, *(math.ceil(number) for number in literals if number < limit)])
    return most


def _sizes(node: Node) -> dict[Any, Any]:
    """Returns the symbolic sizes of what a node holds, by their expressions."""
    return {
        expression(size): size
        for part in tree_leaves(value_of(node))
        if isinstance(part, Tensor)
        for size in part.shape
        if is_symbolic(size)
    }


def _literals(nodes: Nodes) -> set[int]:
    """Returns the integers among the arguments of nodes."""
    return {leaf for node in nodes for leaf in tree_leaves(node.args) if isinstance(leaf, int)}
