"""A read-only view of an FX graph: who depends on which matrix product, and what equals what.

Built once, in one pass over the nodes. Nothing here knows about MLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.immutable_collections import immutable_list

from mla_fusion.compat import guarded_equal
from mla_fusion.fx import contraction, scaled_product
from mla_fusion.fx.analytic import Barrier, Steps
from mla_fusion.fx.contraction import Contraction
from mla_fusion.fx.kinds import (
    MODEL_FLOATS,
    diagonal_axes,
    filled_with,
    has_reader_by_strides,
    holds_at_any_length,
    is_cast,
    is_float,
    is_getitem,
    is_literal,
    is_mutating,
    is_reshape,
    is_view,
    operator_of,
    size_among_numbers,
    tensor_held,
    word,
)
from mla_fusion.fx.lost_terms import LostTerms
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.ranges import Ranges
from mla_fusion.fx.sizes import Binding, exceeds_one, has_symbols, is_size, is_symbolic, same
from mla_fusion.fx.steps import rows_in_step
from mla_fusion.fx.terms import Terms
from mla_fusion.fx.token_axis import is_uniform
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.walk import INPUTS, peel, reached, upward, views_and_model_casts
from mla_fusion.operators.known import JOINERS, Kind, Operator, shape_of, value_of

_NOTHING: frozenset[Node] = frozenset()
_SEQUENCES = (tuple, list, immutable_list)
# a value that mixes more products than this (a residual stream) counts as a source of its own
_MANY = 4

T = TypeVar("T")


class View:
    """``gm.graph``, indexed.

    contractions   every matrix product over more than one element, in graph order
    sources(n)     the products and barriers whose result reaches ``n`` through movement and
                   analytic steps alone
    members(p)     the nodes that such steps alone make of product ``p``, in graph order: what
                   probes can prove
    barriers       why nothing is known behind a node: it picks by values, draws random numbers, or
                   is unknown
    effects        nodes whose schema says that they change an argument
    same(a, b)     do two nodes compute the same value (equal operators on equal inputs)?
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.contractions: dict[Node, Contraction] = {}
        self._sources: dict[Node, frozenset[Node]] = {}
        self._members: dict[Node, list[Node]] = {}
        self._constant: set[Node] = set()
        self._sizes: set[Node] = set()
        self._plain: dict[Node, bool] = {}
        self.barriers: dict[Node, Barrier] = {}
        self.ranges = Ranges(self)
        self.steps = Steps(self, self.ranges)
        self._known: dict[object, tuple[object, object]] = {}
        self._calls: dict[Node, tuple[int, list[Node]]] = {}
        self._number: dict[Node, int] = {}
        # int8 products that plain nodes scale, by their last node
        self._in_steps: dict[Node, Contraction] = {}
        self._inside_products: set[Node] = set()
        self.effects: list[Node] = []
        self._read()

    def _read(self) -> None:
        calls: dict[Any, int] = {}
        numbers: dict[Any, int] = {}
        number_of = self._number.__getitem__
        for node in self.nodes:
            inputs: list[Node] = []
            done = _what_is_done(node, inputs)
            if done is node and node.op == "call_function" and is_mutating(node):
                self.effects.append(node)
            call = calls.setdefault(done, len(calls))
            self._calls[node] = call, inputs
            self._number[node] = numbers.setdefault((call, *map(number_of, inputs)), len(numbers))
            self._sources[node] = sources = self._sources_of(node)
            if node not in sources:
                for source in sources:
                    self._members.setdefault(source, []).append(node)

    def _sources_of(self, node: Node) -> frozenset[Node]:
        a_size = is_size(node)
        if a_size:
            self._sizes.add(node)
        if node.op != "call_function":
            if node.op == "get_attr" and any(is_one(node) for is_one in _LITERALS):
                self._constant.add(node)
            return frozenset((node,)) if node.op in ("call_module", "call_method") else _NOTHING
        if a_size or node in self._inside_products:
            return _NOTHING
        operator = operator_of(node)
        # as half of all nodes do; nothing begins or ends at these
        moves = operator.view and operator.runs and operator.kind is Kind.MOVEMENT
        begun = self._begun_at(node, operator) if not moves or node in self._in_steps else None
        if begun is not None:
            return begun
        sources, of_literals, of_sizes = _NOTHING, True, False
        for arg in node.all_input_nodes:
            theirs = self._sources[arg]
            sources = theirs if not sources else sources | theirs if theirs else sources
            if arg not in self._constant:
                a_size = arg in self._sizes
                of_sizes = of_sizes or a_size
                of_literals = of_literals and a_size
        size = size_among_numbers(node) if of_sizes else None
        if of_literals and not sources and not holds_at_any_length(node):
            return _NOTHING
        if of_literals or (not moves and filled_with(node) is not None):
            self._constant.add(node)
            return _NOTHING
        if moves:
            return sources
        barrier = self.steps.barrier(node) if sources else None
        barrier = self.steps.of_sizes(node, size) if sources and barrier is None else barrier
        if barrier is not None:
            self.barriers[node] = barrier
            return frozenset((node,))
        few = (
            len(sources) <= _MANY or is_view(node) or operator.cast or operator.row.word in JOINERS
        )
        return sources if few else frozenset((node,))

    def _begun_at(self, node: Node, operator: Operator) -> frozenset[Node] | None:
        """The node itself, where it is a product or something that probes cannot run; nothing at a
        product that later nodes scale; None of any other node.
        """
        product = self._in_steps.get(node) or contraction.read(node)
        if product is not None and not self._is_arithmetic(product):
            held_in_int8 = torch.int8 in self.held_dtypes
            in_steps = scaled_product.read(product) if held_in_int8 and not product.inside else None
            if in_steps is not None:
                self._inside_products.update(in_steps.inside)
                self._in_steps[in_steps.node] = in_steps
                return _NOTHING
            self.contractions[node] = product
            return frozenset((node,))
        joined = contraction.join(node, self.contractions)
        if joined is not None and self._one_activation(joined):
            self.contractions[node] = joined
            return frozenset((node,))
        if not operator.runs or (operator.writer and not self._writes_into_own(node)):
            why = (
                "writes to memory that is not its own"
                if operator.writer
                else "has no kernel that probes could run"
            )
            unknown = Barrier("step.unknown", f"{node.name} ({node.target}) {why}")
            self.barriers[node] = self.steps.barrier(node) or unknown
            return frozenset((node,))
        return None

    def _is_arithmetic(self, product: Contraction) -> bool:
        """A product that no weight takes part in: of very few terms (frequencies times positions,
        2x2 rotations), by a matrix of literals (signs, a mean), or of a value with itself (the
        squares of a norm).
        """
        left, right = product.left, product.right
        if _sums_few(product):
            return True
        if product.scales is not None:
            return False
        if left in self._constant or right in self._constant:
            return True
        return bool(self._sources[left]) and self._number[peel(left)] == self._number[peel(right)]

    def _one_activation(self, joined: Contraction) -> bool:
        """Do all parts multiply one value, none of them a slice of it, by weights?"""
        first, *others = (self._number[_unreshaped(part.left)] for part in joined.pieces)
        return all(other == first for other in others) and not any(
            self._sources[part.right] for part in joined.pieces
        )

    def _writes_into_own(self, node: Node) -> bool:
        """``q[..., D:] = rope(q)`` writes into a value of its own making, or of literals; a cache
        write does not.
        """
        base = node.args[0]
        others = [arg for arg in node.all_input_nodes if arg is not base]
        if not isinstance(base, Node):
            return False
        if word(node) == "copy":  # only the shape of what it overwrites matters
            return True
        return base in self._constant or any(
            self._sources[base] & self._sources[arg] for arg in others
        )

    def call(self, node: Node) -> tuple[int, list[Node]]:
        """A number, equal for nodes that do the same to their inputs, and these in order."""
        return self._calls[node]

    def same(self, a: Node, b: Node) -> bool:
        return self._number[a] == self._number[b]

    def number(self, node: Node) -> int:
        """Equal for nodes that compute the same value."""
        return self._number[node]

    def sources(self, node: Node) -> frozenset[Node]:
        return self._sources[node]

    def depends_on_products(self, node: Node) -> bool:
        return bool(self._sources[node])

    def ends_walk(self, node: Node) -> bool:
        """Is the node a product, or a step that cannot be run?"""
        barrier = self.barriers.get(node)
        return node in self._sources[node] and (barrier is None or barrier.is_opaque)

    def reaches(self, source: Node, node: Node) -> bool:
        """Is the node made of ``source`` by operators that can be run on probes, choices among
        them?
        """

        def behind(step: Node) -> Iterator[Node]:
            ends = (end for end in self._sources[step] if end in self.barriers)
            return (read for end in ends if operator_of(end).runs for read in end.all_input_nodes)

        return any(source in self._sources[step] for step in reached([node], behind))

    def squares_of(self, node: Node) -> Node | None:
        """The value of whose products with itself the node is the sums: ``einsum("tc,tc->t", u,
        u)``, rows by their own columns, or the diagonal of ``u @ u.T``. None for any other node.
        """
        on_diagonal = diagonal_axes(node) is not None
        product = contraction.read(
            node.args[0] if on_diagonal and isinstance(node.args[0], Node) else node
        )
        if product is None or product.bias is not None or product.scales is not None:
            return None
        left, right = (_long_axes(labels, side) for labels, side in _sides(product))
        if on_diagonal:
            if len(product.out_labels) != 2:
                return None
            right = tuple(
                product.out_labels[0] if label == product.out_labels[1] else label
                for label in right
            )
        if (
            sorted(left) != sorted(right)
            or self._number[peel(product.left)] != self._number[peel(product.right)]
        ):
            return None
        codes = [self.codes_of(peel(side), side) for _, side in _sides(product)]
        if codes[0] is None or codes[1] is None:
            return None
        turned = codes[1].squeeze().permute([right.index(label) for label in left])
        return product.left if torch.equal(codes[0].squeeze(), turned) else None

    def in_order(self, base: Node, node: Node) -> bool:
        """Does a view of ``base`` hold its elements, each once and in their order?"""
        between = nodes_between((base,), node)
        if all(is_reshape(step) or is_cast(step) or is_getitem(step) for step in between):
            return node is base or not any(is_getitem(step) for step in between)
        codes = self.codes_of(base, node)
        in_order = codes is not None and torch.equal(codes.reshape(-1), torch.arange(codes.numel()))
        whole = same(math.prod(shape_of(base)), math.prod(shape_of(node)))
        return (
            in_order
            and whole
            and Tokens.of((base,), between, self.binding.meaning).broken(node) is None
        )

    def codes_of(self, base: Node, node: Node) -> torch.Tensor | None:
        """Which element of ``base`` each element of a view of it is."""
        shape = self.binding.shape_of(base)
        program = Program([base], nodes_between((base,), node), self.binding)
        value = program.run([torch.arange(math.prod(shape)).reshape(shape)])[program.slot(node)]
        return value if isinstance(value, torch.Tensor) else None

    def members(self, source: Node) -> list[Node]:
        return self._members.get(source, [])

    def is_constant(self, node: Node) -> bool:
        """Is the node computed from literals alone?"""
        return node in self._constant

    def is_plain_constant(self, node: Node) -> bool:
        """Of a node computed from literals alone: is every element -1, 0 or 1, or all the same
        number?
        """
        known = self._plain.get(node)
        if has_symbols(shape_of(node)):
            return is_uniform(node)
        if known is None:
            program = Program([], nodes_between((), node), self.binding)
            value = program.run([])[program.slot(node)]
            known = self._plain[node] = not isinstance(value, torch.Tensor) or _says_little(value)
        return known

    @cached_property
    def reads_by_strides(self) -> bool:
        return has_reader_by_strides(self.gm.graph)

    @cached_property
    def held_dtypes(self) -> frozenset[torch.dtype]:
        """Of what comes in from outside: arguments, parameters and caches."""
        held = (value_of(node) for node in self.nodes if node.op in INPUTS)
        return frozenset(value.dtype for value in held if isinstance(value, torch.Tensor))

    @cached_property
    def terms(self) -> Terms:
        """Integers by what they are computed from."""
        return Terms(self, self.ranges)

    @cached_property
    def lost_terms(self) -> LostTerms:
        """Float sums of which rounding decides what is left."""
        return LostTerms(self, self.ranges)

    @cached_property
    def binding(self) -> Binding:
        return Binding(self._relate_sizes)

    def _relate_sizes(self, binding: Binding) -> None:
        literals = {
            value
            for node in self.nodes
            for arg in node.args
            for value in (arg if isinstance(arg, (list, tuple)) else (arg,))
            if isinstance(value, int)
        }
        binding.avoid(literals)
        values = (value_of(node) for node in self.nodes)
        shapes = (value.shape for value in values if isinstance(value, torch.Tensor))
        sizes = [size for shape in shapes for size in shape if is_symbolic(size)]
        for a, b in guarded_equal(sizes[0]) if sizes else ():
            binding.equate(a, b)
        for node in self.nodes:
            for a, b in rows_in_step(node):
                if exceeds_one(a) and exceeds_one(b):
                    binding.equate(a, b)
        binding.admit(sizes)

    def bound(self, binding: Binding) -> View:
        """The same view with other numbers for its symbolic sizes."""
        other = copy(self)
        other.__dict__["binding"] = binding
        other._known = {}
        return other

    def once(self, of: torch.Tensor, how: object, make: Callable[[], T]) -> T:
        """What is made of a tensor that the facts of equal layers share: made for the first of
        them. ``how``: all that it depends on beside the tensor.
        """
        given, found = self._known.get(how, (None, None))
        if given is not of:
            found = make()
            self._known[how] = of, found
        return cast(T, found)


def _what_is_done(node: Node, inputs: list[Node]) -> Any:
    """Equal for nodes that do the same to their inputs, which go to ``inputs``; a literal is (type,
    literal).

    What has an effect, or is random, is like nothing else.
    """
    operator = operator_of(node)
    if operator.effect or operator.random:
        return node
    if not operator.name:
        is_told = node.op == "get_attr" and (is_number(node) or is_index(node))
        numbers = tensor_held(node) if is_told else None
        if numbers is not None:
            return numbers.dtype, str(numbers.tolist())  # -0.0 is another one than 0.0
        return node.op, node.target if node.op == "get_attr" else node
    try:
        key: list[Any] = [operator]
        # most are nodes, and a call for each would be a tenth of the view's time
        for arg in node.args:
            if type(arg) is Node:
                inputs.append(arg)
                key.append(Node)
            else:
                key.append(_literal(arg, inputs))
        kwargs = node.kwargs
        if kwargs:
            key += [(name, _literal(kwargs[name], inputs)) for name in sorted(kwargs)]
        return tuple(key)
    except TypeError:
        inputs.clear()
        return node


def _literal(value: Any, inputs: list[Node]) -> Any:
    """What an argument holds beside nodes; hashable, or TypeError."""
    kind = type(value)
    if kind is Node:
        inputs.append(value)
        return Node
    if kind in _SEQUENCES:
        return tuple([_literal(item, inputs) for item in value])
    hash(value)
    return kind, value


def _sides(product: Contraction) -> tuple[tuple[contraction.Labels, Node], ...]:
    return (product.left_labels, product.left), (product.right_labels, product.right)


def _long_axes(labels: contraction.Labels, side: Node) -> contraction.Labels:
    """The labels of axes longer than one."""
    return tuple(
        label for label, size in zip(labels, shape_of(side), strict=True) if not same(size, 1)
    )


def is_sign_constant(node: Node) -> bool:
    """A lifted literal such as [-1, 1, -1, 1]: small, a plain tensor, of nothing but -1, 0 and 1,
    not all 1.
    """
    value = _few_numbers(node, (*MODEL_FLOATS, torch.int8, torch.int16, torch.int32, torch.int64))
    if value is None:
        return False
    return bool(torch.isin(value, torch.tensor([-1, 0, 1], dtype=value.dtype)).all()) and bool(
        (value != 1).any()
    )


def is_number(node: Node) -> bool:
    """A lifted ``torch.tensor(1e-6)``."""
    value = value_of(node)
    return is_literal(node) and isinstance(value, torch.Tensor) and value.dim() == 0


def is_index(node: Node) -> bool:
    """A lifted list of places, ``x[..., [0, 2, 1, 3]]``: a plain tensor of few integers."""
    return _few_numbers(node, (torch.int32, torch.int64)) is not None


def _few_numbers(node: Node, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor | None:
    """What a lifted literal holds, where these are few numbers of one of the dtypes."""
    value = tensor_held(node)
    is_small = value is not None and value.numel() <= 4096 and value.dtype in dtypes
    return value if is_small and is_literal(node) else None


_LITERALS = is_sign_constant, is_number, is_index


def _says_little(value: torch.Tensor) -> bool:
    if value.numel() == 0 or not is_float(value.dtype) or bool(value.isnan().any()):
        return True
    one = torch.ones((), dtype=value.dtype)
    return bool(
        (value == value.reshape(-1)[0]).all()
        | torch.isin(value, torch.stack([-one, 0 * one, one])).all()
    )


def _unreshaped(node: Node) -> Node:
    """Through what keeps every element, up to the tensor that one name is given to."""
    *_, last = through = list(upward(node, views_and_model_casts))
    return next((above for above in through if not is_reshape(above) and not is_cast(above)), last)


def _sums_few(product: Contraction) -> bool:
    """Are there no more than two terms in each sum? Such a product is element-wise in disguise."""
    summed = set(product.left_labels) & set(product.right_labels) - set(product.out_labels)
    shape = shape_of(product.left)
    sizes = [shape[product.left_labels.index(label)] for label in summed]
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= 2
