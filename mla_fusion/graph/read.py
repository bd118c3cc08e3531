"""Reads an FX graph into Values: each node once, in order.

This is the first stage of the pass. ``propose/`` analyses the Values that it makes.

The arguments of a node are bound to the operator's schema, and the operator's rule is called with
them. If there is no rule, and an operand is active, torch decomposes the call into operators that
have one. Otherwise an element-wise call is a function of its operator's name, and any other is
opaque: a computation of all that it reads, of which nothing else is known.

Each symbolic size is bound to a large prime, so that it differs from every other size. A size that
the graph uses as a number is a leaf.
"""

from __future__ import annotations

import operator as python
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from math import gcd, prod
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from mla_fusion.compat import Mod, OpOverload, guard, guarded_equal, hint_of, storage_id, tree_map
from mla_fusion.fx import registered
from mla_fusion.fx.aliases import keeps_memory, may_share, viewed_by, written_arguments
from mla_fusion.fx.kinds import (
    Signature,
    argument,
    attribute,
    dtype_of,
    is_literal,
    is_reshape,
    signature,
    value_of,
)
from mla_fusion.fx.sizes import Binding, has_symbols
from mla_fusion.fx.sizes import expression as expression_of
from mla_fusion.graph import arithmetic, decompose, fused, moves, quantise
from mla_fusion.graph.call import (
    RULES,
    Call,
    Departs,
    EqualSizes,
    Pair,
    Size,
    name_of,
    rule_names_of,
)
from mla_fusion.graph.form import Form, Value, filled_with, strip_reshapes
from mla_fusion.graph.numbers import LEAST_BOUND, Number, is_open, is_rough
from mla_fusion.graph.parameters import parameters

__all__ = ["Graph", "Reading", "arithmetic", "fused", "moves", "quantise"]

Reading = Any  # a Value, a Pair, a list of these, a number, or None
# halves, quarters and differences of these have large prime factors, too
_FIRST_PRIMES = (10007, 11083, 12517, 15629, 19427, 21881, 26513, 34261, 38119, 43987)
_SPACING = 7919  # between the primes that follow: literals are multiples of small differences
_NEAR = 64  # ``t[-1]`` of a symbolic axis is the entry of the number before its size
_MOST_BOUND = 1 << 18  # sizes with symbols of greater numbers may look like literals
_MOST_FOLDED = 1 << 16  # most elements of a tensor of literals that is computed while reading
_PLACE_ARGUMENTS = ("shifts", "index", "offset", "diagonal")
# places of arguments that an operator writes against its schema: the result that holds the same
_HIDDEN_WRITES = {"npu::npu_kv_rmsnorm_rope_cache": {5: 0, 6: 1}}
_SCATTERS = {"slice": "slice_scatter", "select": "select_scatter"}
_RULE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Graph:
    """An FX graph as Values.

    readings    by node, what it is: a Value, a Pair, a list of these, a number, or None
    nodes       by Value, the nodes that hold it, in order
    written     by placeholder, the Value that the graph leaves in it
    stale       pairs (reader, node): the reader read the node before it was written
    changed     by node that is written later, or views memory that is: its reading before
    enclosing   by Value that no node holds: the node whose decomposition or function makes it
    assumed     by node, the assumptions about numbers under which it was read
    registered  by node, the user's own operators whose functions were read for it, its own first
    unused      by operator name, why the function registered for it was not used
    writers     the nodes that write in place, by the base of what they write
    effects     the nodes that change memory of an input or attribute
    hidden      by input that an operator writes without saying so in its schema: the operator's
                node
    parameters  the inputs that belong to the model
    symbols     by symbol's name, the number that it is bound to
    sizes       by number, the symbolic size that is bound to it
    """

    def __init__(
        self,
        gm: GraphModule,
        model_inputs: Collection[Node] | None = None,
        keeps_parts: bool = False,
    ) -> None:
        """Reads the graph of ``gm``.

        model_inputs  the inputs that belong to the model; None: they are found by their use
        keeps_parts   of the form
        """
        self.gm = gm
        self.parameters = parameters(gm.graph) if model_inputs is None else model_inputs
        self.symbols: dict[str, int] = {}
        self._guarded_numbers: dict[Any, Any] | None = None  # sizes that guards fix to a number
        self._open_functions: tuple[OpOverload, ...] = ()  # user's operators being read
        # one reading for each symbol that is equated, and for each time that all are doubled
        for _ in range(100):
            if self._has_read(Form(keeps_parts)):
                return
        raise RuntimeError("no number of a symbolic size differs from all literals")

    def _clear(self) -> None:
        """Empties all that reading fills."""
        self.readings: dict[Node, Reading] = {}
        self.nodes: dict[Value, list[Node]] = {}
        self.enclosing: dict[Value, Node] = {}
        self.registered: dict[Node, tuple[OpOverload, ...]] = {}
        self.unused: dict[str, str] = {}
        self.written: dict[Node, Value] = {}
        self.hidden: dict[Node, Node] = {}
        self.writers: dict[Node, list[Node]] = {}
        self.effects: set[Node] = set()
        self.stale: set[tuple[Node, Node]] = set()
        self.changed: dict[Node, Reading] = {}
        self.assumed: dict[Node, tuple[str, ...]] = {}
        self._has_memory: bool | None = None  # what ``keeps_memory`` says
        self._attributes: dict[int, Node] = {}  # by memory, the first that reads it
        self._bases: dict[Node, Node] = {}
        self._aliases: dict[Node, list[Node]] = {}
        self._literals = set[float]()  # the numbers among the arguments and sizes of the graph

    def _has_read(self, form: Form) -> bool:
        """Reads every node. Returns False if a symbol needs another number: read again.

        form  makes the Values

        Two sizes turned out to be equal, or the number of a symbolic size is that of a literal, or
        looks like one.
        """
        self._clear()
        self.form, self.sizes = form, dict[int, Any]()
        try:
            for node in self.gm.graph.nodes:
                form.assumed.clear()
                reading = self._read_node(node)
                if form.assumed:
                    self.assumed[node] = (*dict.fromkeys(form.assumed),)
                self._record(node, reading)
            if self._has_equal_literal() or any(map(self._looks_like_literal, self.sizes)):
                # all of them: tokens stay fewer than the rows of a table. Neighbours (``s + 1`` of
                # a symbol that is equated with it) must not get one prime
                numbers = sorted({*self.symbols.values()})
                self.symbols = {
                    name: _prime_after(2 * bound + _SPACING * numbers.index(bound))
                    if is_open(bound)
                    else bound
                    for name, bound in self.symbols.items()
                }
                return False
        except EqualSizes as equal:
            old, new = equal.args
            self.symbols = {
                name: new if number == old else number for name, number in self.symbols.items()
            }
            return False
        return True

    def _has_equal_literal(self) -> bool:
        """True if a literal of the graph is near the number of a symbolic size, or a multiple of it
        or of the difference of two symbols' numbers.
        """
        symbols = [*filter(is_open, self.symbols.values())]
        numbers = {*filter(is_open, self.sizes), *symbols}
        # the difference of a symbol and one that is equated with it, plus 1, is small and no chance
        factors = numbers | {a - b for a in symbols for b in symbols if is_open(a - b)}
        return any(
            any(literal % factor == 0 for factor in factors)
            or any(abs(literal - number) <= _NEAR for number in numbers)
            for literal in self._literals
            if literal >= LEAST_BOUND
        )

    def _looks_like_literal(self, number: int) -> bool:
        """True if a symbolic size is bound to a number that a model may write."""
        expression = expression_of(self.sizes[number])
        numbers = [self.symbols.get(str(symbol), 0) for symbol in expression.free_symbols]
        return not is_open(number) and not expression.has(Mod) and max(numbers) < _MOST_BOUND

    @cached_property
    def early_writes(self) -> set[Node]:
        """The nodes whose memory is written before the end of the graph.

        Copies into inputs do not count if nothing reads the memory after them.
        """
        nodes, read_later = set[Node](), set[Node]()
        steps = {step for steps in self.writers.values() for step in steps}
        for node in reversed(self.gm.graph.nodes):
            if not steps:
                break
            steps.discard(node)
            written = set(map(self.base, written_arguments(node)))
            is_copy = node.target is torch.ops.aten.copy_.default
            nodes |= written & read_later if is_copy else written
            if node.op != "output" and not is_copy:
                read_later.update(map(self.base, node.all_input_nodes))
        return nodes

    def nodes_holding(self, value: Value) -> Iterator[Node]:
        """Yields the nodes that hold a Value, or a reshape of it.

        Each holds it from its place in the graph to the end, or until a copy that ends the graph.
        """
        for node in self.nodes_in_any_shape(value):
            reading = self.readings[node]
            if isinstance(reading, Pair):
                is_held = value in (reading.real, reading.imag)
            elif node.op == "placeholder":
                is_held = self._origin(value)[1].op == "leaf" and node not in self.early_writes
            elif node in self.changed:
                base = self.base(node)
                is_unwritten = base.op == "placeholder" and base not in self.early_writes
                is_held = is_unwritten and self._is_same(self.changed[node], value)
            else:
                is_held = self._is_same(reading, value)
            if is_held:
                yield node

    def nodes_in_any_shape(self, value: Value) -> list[Node]:
        """The nodes that hold a Value; if none does, the nodes that hold a reshape of it.

        If none does either, the one node that makes it on the way, if there is one.
        """
        nodes = self.nodes.get(value) or sorted(
            {
                node
                for other in self.multiples_of(value)
                if self._is_same(other, value)
                for node in self.nodes[other]
            }
        )
        return nodes or ([self.enclosing[value]] if value in self.enclosing else [])

    def _is_same(self, reading: Reading, value: Value) -> bool:
        """True if a reading is a Value or a reshape of it."""
        return isinstance(reading, Value) and self._origin(reading) == self._origin(value)

    def _origin(self, value: Value) -> tuple[Number, Value]:
        """A key that is equal for Values that are reshapes of each other."""
        times, unscaled = self.form.split(value)
        return times, strip_reshapes(unscaled)

    def multiples_of(self, value: Value) -> list[Value]:
        """The Values that nodes hold and that are a number times the Value, in any shape."""
        return self._multiples.get(self._origin(value)[1], [])

    @cached_property
    def _multiples(self) -> dict[Value, list[Value]]:
        """The Values that nodes hold, by the Value without reshapes and the number in front."""
        multiples: dict[Value, list[Value]] = {}
        for value in self.nodes:
            multiples.setdefault(self._origin(value)[1], []).append(value)
        return multiples

    @cached_property
    def live(self) -> list[Value]:
        """The Values that the graph returns or writes, and the Values that nothing reads."""
        values = dict[Value, None]()
        for node in self.gm.graph.nodes:
            if not node.users:
                nodes = node.all_input_nodes if node.op == "output" else [node]
                values |= dict.fromkeys(values_of(list(map(self.readings.get, nodes))))
        return [*values, *self.written.values()]

    # -- sizes

    def size(self, size: Any) -> int:
        """The number that a size is bound to: an int, or a Size for a symbolic one."""
        if isinstance(size, int):
            self._literals.add(size)
            return size
        if self._guarded_numbers is None:
            guards = Binding()
            for pair in guarded_equal(size):
                guards.equate(*pair)
            self._guarded_numbers = guards.numbers
        expression = expression_of(size).xreplace(self._guarded_numbers)
        polynomial, expression, integers = _in_symbols(expression)
        self._literals |= integers
        numbers = {
            symbol: self.symbols.setdefault(str(symbol), _prime(len(self.symbols)))
            for symbol in expression.free_symbols
        }
        bound_size = Size(int(expression.subs(numbers)), str(expression), polynomial, size)
        if bound_size > 1 and any(map(is_open, numbers.values())):
            both = self.sizes.setdefault(int(bound_size), size), size
            if len({*map(hint_of, both)} - {None}) > 1:  # they have one number by chance
                self._literals.add(bound_size)
        return bound_size

    def size_of(self, leaf: Value) -> Any:
        """The symbolic size that a leaf stands for; None for other leaves."""
        for size in self.sizes.values():
            bound = self.size(size)
            if leaf.literal in (f"size {bound!r}", f"size {int(bound)}"):
                return size
        return None

    def unbound(self, number: int) -> Any:
        """The graph's size that was bound to ``number``, or the product of such sizes.

        Returns ``number`` itself if it stands for no size. Raises LookupError if it is both a
        symbolic size's number and small enough to be a literal, or if the graph has no such size
        and no such literal: then it is a sum with a symbolic size in it.
        """
        if number in self.sizes:
            if number < LEAST_BOUND:
                raise LookupError(f"{number} is a literal, or {self.sizes[number]}")
            return self.sizes[number]
        for bound_number, size in self.sizes.items():
            if number and number % bound_number == 0 and is_rough(bound_number):
                return size * self.unbound(number // bound_number)
        if number < LEAST_BOUND or not self.sizes or number in self._literals:
            return number
        raise LookupError("a sum with a symbolic size")

    def size_text(self, number: int) -> str:
        """The size that was bound to ``number`` as text."""
        try:
            return str(self.unbound(number))
        except LookupError:
            return "?"

    def shape(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        """The sizes as bound numbers."""
        return tuple(int(self.size(size)) for size in sizes)

    # -- nodes

    def _record(self, node: Node, reading: Reading) -> None:
        """Records what a node is."""
        self.readings[node] = reading
        for value in values_of(reading):
            self.nodes.setdefault(value, []).append(node)

    def _read_node(self, node: Node) -> Reading:
        """Returns what a node is, and records what it writes."""
        meta_value = value_of(node)
        if node.op == "output":
            return None
        if isinstance(meta_value, (torch.SymFloat, torch.SymBool)):
            return self.form.leaf(f"number {meta_value}", (), torch.float64, False)
        if node.op == "placeholder":
            if isinstance(meta_value, torch.Tensor):
                return self._leaf(node.name, meta_value, node in self.parameters)
            return self.size(meta_value) if isinstance(meta_value, (int, torch.SymInt)) else None
        if node.op == "get_attr":
            if not node.users:  # another node reads this tied weight
                return None
            self._note_alias(node)
            return self._read_attribute(node)
        if isinstance(meta_value, (torch.SymInt, int)) and not isinstance(meta_value, bool):
            return self.size(meta_value)
        if node.target is python.getitem:
            self._note_alias(node)
            return self._part(node)
        if not isinstance(node.target, OpOverload):
            return self._make_opaque(node)
        reading, schema = self._read_call(node), signature(node.target)
        for place, result in _HIDDEN_WRITES.get(schema.name, {}).items():
            cache = node.args[place]
            assert isinstance(cache, Node)
            self.hidden[self.base(cache)] = node
            self.effects.add(node)
            self._record_write(cache, reading[result])
        for operand in written_arguments(node) if schema.is_mutable else ():
            base = self.base(operand)
            self.writers.setdefault(base, []).append(node)
            if base.op != "call_function":
                self.effects.add(node)
            if schema.is_in_place:
                self._record_write(operand, reading)
            else:  # by ``out``, or one of several
                self._record_write(operand, self._opaque_memory(operand, node.name))
        if schema.is_view or schema.is_in_place or may_share(schema):
            self._note_alias(node)
        return reading

    def _part(self, node: Node) -> Reading:
        """The reading of one of several results."""
        items, place = self.argument(list(node.args))
        return items[place] if isinstance(items, list) else None

    # -- writes in place, through views too

    def base(self, node: Node) -> Node:
        """The node whose memory a node views."""
        base = self._bases.get(node)
        if base is None:
            viewed = self.viewed(node)
            base = self._bases[node] = node if viewed is None else self.base(viewed)
        return base

    def viewed(self, node: Node) -> Node | None:
        """The node in whose memory a node lies: an operand, or the first that reads the same
        attribute. None if it has memory of its own.
        """
        if node.op == "get_attr":
            first = self._first_of_memory(node)
            return None if first is node else first
        if self._has_memory is None:  # asked once for a graph
            self._has_memory = keeps_memory(node.graph)
        return viewed_by(node, self._has_memory)

    def _note_alias(self, node: Node) -> None:
        base = self.base(node)
        if base is not node:
            self._aliases.setdefault(base, []).append(node)

    def _record_write(self, node: Node, value: Reading) -> None:
        """Records that a node's memory holds new numbers: for its base, and for every view of
        it.
        """
        base, current = self.base(node), node
        while current is not base and isinstance(value, Value):
            viewed = self.viewed(current)
            assert viewed is not None
            if current.op == "get_attr":
                value = value if attribute(current) is attribute(viewed) else None
            elif current.target is python.getitem and viewed is not current.args[0]:
                value = None
            elif current.target is python.getitem:
                value, viewed = self._undo_part(viewed, current, value), viewed.all_input_nodes[0]
            elif not signature(current.target).is_in_place:
                value = self._undo_view(viewed, current, value)
            current = viewed
        if current is not base or value is None:  # a view that cannot be undone
            value = self._opaque_memory(base, node.name)
        self._replace_reading(base, value)
        if base.op == "placeholder" and isinstance(value, Value):
            self.written[base] = value
        for alias in self._aliases.get(base, ()):
            if alias.op == "get_attr":
                reading = self._read_attribute(alias)
            elif signature(alias.target).is_in_place:
                reading = self.argument(alias.args[0])
            elif alias.target is python.getitem:
                reading = self._part(alias)
            else:
                reading = self._read_call(alias)
            self._replace_reading(alias, reading)

    def _opaque_memory(self, node: Node, step: str) -> Reading:
        """Returns what the memory of a node holds after a step whose numbers are not known."""

        def opaque(value: Value) -> Value:
            literals = step, node.name
            return self.form.opaque("memory", literals, [value], value.shape, value.dtype)

        reading = self.readings.get(node)
        if isinstance(reading, Pair):
            return reading.each(opaque)
        return opaque(reading) if isinstance(reading, Value) else None

    def _replace_reading(self, node: Node, reading: Reading) -> None:
        """Replaces the reading of a node after a write."""
        previous = self.readings[node]
        if previous != reading:
            self.changed.setdefault(node, previous)
            self.stale |= {(user, node) for user in node.users if user in self.readings}
        self._record(node, reading)

    def _undo_part(self, split: Node, part: Node, value: Value) -> Reading:
        """Returns the reading of what was split after a part of it was overwritten by ``value``."""
        source, place = self.argument(split.args[0]), part.args[1]
        parts = self.readings[split]
        if not isinstance(source, Value) or not isinstance(parts, list):
            return None
        axis = bind_arguments(split.target, self.argument(list(split.args)), {}).get("dim", 0)
        assert isinstance(place, int)
        if len(value.shape) < len(source.shape):
            return self._scatter("select_scatter", source, src=value, dim=axis, index=place)
        start = sum(item.shape[axis] for item in parts[:place])
        end = start + value.shape[axis]
        return self._scatter("slice_scatter", source, src=value, dim=axis, start=start, end=end)

    def _scatter(self, name: str, whole: Value, **arguments: Any) -> Reading:
        """Returns the reading of a whole after a part of it was overwritten, or None."""
        if not self._is_size_independent(arguments):
            return None
        try:
            return RULES[name](Call(self.form, name, whole.shape, whole.dtype), whole, **arguments)
        except (Departs, *_RULE_ERRORS):
            return None

    def _undo_view(self, viewed: Node, view: Node, value: Value) -> Reading:
        """Returns the reading of ``viewed`` after ``view`` of it was overwritten by ``value``.

        None if the view cannot be undone.
        """
        viewed_value, name = self.readings[viewed], name_of(view.target)
        scatter = _SCATTERS.get(name)
        if not isinstance(viewed_value, Value):
            return None
        arguments = bind_arguments(view.target, self.argument(list(view.args)), {})
        arguments.pop("x", None)
        if scatter is not None:
            return self._scatter(scatter, viewed_value, src=value, **arguments)
        if name in ("transpose", "swapaxes", "swapdims", "t"):  # each undoes itself
            call = Call(self.form, name, viewed_value.shape, viewed_value.dtype)
            return RULES[name](call, value, **arguments)
        if name == "permute":
            order = [axis % len(value.shape) for axis in arguments["dims"]]
            return self.form.permuted_back(value, order)
        is_whole = is_reshape(view) and value.numel == viewed_value.numel
        return self.form.reshape(value, viewed_value.shape) if is_whole else None

    def _leaf(self, name: str, tensor: torch.Tensor, model: bool) -> Reading:
        """The leaf of an input or an attribute: a Pair for a complex tensor."""
        shape = self.shape(tensor.shape)
        if tensor.is_complex():
            parts = (
                self.form.leaf(f"{name}.{part}", shape, torch.float32, model)
                for part in ("real", "imag")
            )
            return Pair(*parts)
        # one number, such as an adapter's, may be part of a weight
        is_scalar = not shape and tensor.is_floating_point()
        return self.form.leaf(name, shape, tensor.dtype, model or is_scalar)

    def _read_attribute(self, node: Node) -> Reading:
        """The reading of an attribute. A step may have changed its memory by another node."""
        first = self._first_of_memory(node)
        if first is not node:
            if attribute(first) is attribute(node):
                return self.readings[first]
            if first in self.changed:
                return self._opaque_memory(first, node.name)
        return self._attribute(node)

    def _first_of_memory(self, node: Node) -> Node:
        """The first node that reads an attribute in the memory of this one's."""
        tensor = attribute(node)
        has_memory = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        return self._attributes.setdefault(storage_id(tensor), node) if has_memory else node

    def _attribute(self, node: Node) -> Reading:
        """The reading of an attribute: a constant for a small tensor of literals, else a leaf."""
        tensor = attribute(node)
        if not isinstance(tensor, torch.Tensor):
            return str(node.target)  # graphs of higher-order operators differ by name
        has_elements = type(tensor) is torch.Tensor and tensor.device.type != "meta"
        if has_elements and is_literal(node) and tensor.numel() <= _MOST_FOLDED:
            return self.constant(tensor)
        return self._leaf(f"attribute {node.target}", tensor, True)

    def constant(self, tensor: torch.Tensor) -> Reading:
        """The constant of a tensor of literals: a Pair for a complex tensor."""
        if tensor.is_complex():
            return Pair(self.form.constant(tensor.real), self.form.constant(tensor.imag))
        if tensor.numel() < LEAST_BOUND:
            self._literals.update(map(abs, tensor.flatten().tolist()))
        return self.form.constant(tensor)

    def argument(self, argument: Any) -> Any:
        """An argument of a node with readings in place of nodes and numbers in place of sizes."""
        if isinstance(argument, Node):
            return self.readings.get(argument)
        if isinstance(argument, (int, float)):
            self._literals.add(abs(argument))
            return argument
        if isinstance(argument, (list, tuple)):
            return [self.argument(item) for item in argument]
        return self.size(argument) if isinstance(argument, torch.SymInt) else argument

    def _read_call(self, node: Node) -> Reading:
        """Returns what a call is: by its function, folding, its rule or decomposition; else
        opaque.
        """
        target = node.target
        function_reading = self._read_user_operator(node)
        if function_reading is not None:
            return function_reading
        positional = self.argument(list(node.args))
        options = {name: self.argument(argument) for name, argument in node.kwargs.items()}
        meta_value, arguments = value_of(node), bind_arguments(target, positional, options)
        if self.symbols and not self._is_size_independent(arguments):
            return self._make_opaque(node)
        call = self.call(target, meta_value)
        source = arguments.get("src")  # what is copied into memory, in the dtype of that
        if isinstance(source, Value) and dtype_of(argument(node, "src")) != call.dtype:
            arguments["src"] = quantise.cast(call, source, call.dtype)
        operands = [*positional, *options.values()]
        operands = _leaves(operands) if list in map(type, operands) else operands
        if all(map(_is_known, operands)):
            folded = self._fold(target, positional, options, meta_value)
            if folded is not None:
                return folded
        reading = self.run(call, target, arguments, node, Pair in map(type, operands))
        if reading is None:
            return self._make_opaque(node)
        try:
            return self._in_node_format(call, reading)
        except ValueError:  # of another size than the node has
            return self._make_opaque(node)

    def _is_size_independent(self, arguments: dict[str, Any]) -> bool:
        """True if the call means the same at every value of the sizes.

        It does not if a symbolic size is a place along an axis. The start and the end of a slice
        may be symbolic, unless they count from the end of the axis: torch guards their sign.
        """
        places = _leaves([arguments[name] for name in _PLACE_ARGUMENTS if name in arguments])
        ends = (arguments.get(name) for name in ("start", "end"))
        sizes = (end for end in ends if isinstance(end, Size))
        from_end = any((hint_of(size.symbolic) or 0) < 0 for size in sizes)
        return not (from_end or any(isinstance(item, Size) for item in places))

    def call(self, target: Any, meta_value: Any) -> Call:
        """The ``Call`` of an operator whose result is described by ``meta_value``."""
        if isinstance(meta_value, (list, tuple)):
            shape: Any = [
                self.shape(part.shape) if isinstance(part, torch.Tensor) else None
                for part in meta_value
            ]
            dtype: Any = [getattr(part, "dtype", None) for part in meta_value]
        elif isinstance(meta_value, torch.Tensor):
            shape, dtype = self.shape(meta_value.shape), meta_value.dtype
        else:
            shape, dtype = (), torch.int64
        return Call(self.form, signature(target).rule or str(target), shape, dtype)

    def run(
        self, call: Call, target: Any, arguments: dict[str, Any], node: Node, has_pairs: bool
    ) -> Reading:
        """What the rule or the decomposition makes of a call; None: it is opaque.

        has_pairs  True if an argument is a Pair, or a list that has one
        """
        if has_pairs and call.name in arithmetic.OF_PARTS:
            if not isinstance(call.dtype, torch.dtype) or not call.dtype.is_complex:
                return None
            part = Call(self.form, call.name, call.shape, call.dtype.to_real())

            def on_side(side: str) -> dict[str, Any]:
                """The arguments with this part of each Pair."""
                return tree_map(
                    lambda item: getattr(item, side) if isinstance(item, Pair) else item, arguments
                )

            real, imag = (
                self.run(part, target, on_side(side), node, False) for side in ("real", "imag")
            )
            return None if real is None or imag is None else Pair(real, imag)
        rule = RULES.get(call.name)
        if rule is not None and (not has_pairs or call.name in arithmetic.OF_COMPLEX):
            try:
                return rule(call, **arguments)
            except Departs:
                pass
            except EqualSizes as equal:
                self._equate(*equal.args)
                return None
            except _RULE_ERRORS as error:
                self._equate_sizes_of_error(error)
        is_random = signature(target).is_random
        values = values_of(list(arguments.values()))
        is_decomposed = decompose.is_composed(target) or any(value.active for value in values)
        if is_decomposed and not is_random and not has_pairs:
            traced = decompose.decomposition(target, arguments)
            return None if traced is None else self._read_subgraph(*traced, node)
        return None

    def _read_user_operator(self, node: Node) -> Reading:
        """A call of the user's own operator as its registered function makes it; None for
        others.
        """
        target: Any = node.target
        body = registered.body(node)
        if body and target in self._open_functions:
            body = "it calls the operator itself"
        if not isinstance(body, FxGraph):
            if body:
                first_line = body.partition("\n")[0]
                reason = f"a function is registered for it and cannot be used: {first_line}"
                self.unused[name_of(target)] = reason
            return None
        readings = [self.readings[input_node] for input_node in node.all_input_nodes]
        reading = self._read_subgraph(body, readings, node, (*self._open_functions, target))
        return reading[0] if isinstance(value_of(node), torch.Tensor) else reading

    def _read_subgraph(
        self,
        graph: FxGraph,
        values: Sequence[Reading],
        caller: Node,
        functions: tuple[OpOverload, ...] | None = None,
    ) -> Reading:
        """Reads another graph for a node of this one, with this graph's form. Returns its output.

        values     the readings of its inputs
        caller     the node that it is read for
        functions  if it is the function of a user's operator: that operator last, after the
                   operators whose functions are being read
        """
        subgraph = Graph.__new__(Graph)
        subgraph.symbols, subgraph.sizes, subgraph.form = self.symbols, self.sizes, self.form
        subgraph._guarded_numbers = self._guarded_numbers
        subgraph._clear()
        subgraph.unused = self.unused
        subgraph._open_functions = self._open_functions
        if functions is not None:  # a decomposition has the bound numbers of sizes as literals
            subgraph._open_functions, subgraph._literals = functions, self._literals
        placeholders = iter(values)
        for node in graph.nodes:
            if node.op == "placeholder":
                subgraph.readings[node] = next(placeholders)
            elif node.op != "output":
                subgraph._record(node, subgraph._read_node(node))
        for value in (*subgraph.nodes, *subgraph.enclosing):
            self.enclosing.setdefault(value, caller)
        called = (operator for operators in subgraph.registered.values() for operator in operators)
        own_operators = () if functions is None else functions[-1:]
        if registered := (*dict.fromkeys((*own_operators, *called)),):
            self.registered[caller] = registered
        return subgraph.argument(graph.output_node().args[0])

    def _equate_sizes_of_error(self, error: Exception) -> None:
        """Equates two symbolic sizes that an operator's error says must be equal.

        A symbol and a number are not equated: torch may leave such a symbol open.
        """
        if isinstance(error, ValueError) and len(error.args) == 2 and all(map(is_open, error.args)):
            self._equate(*error.args)

    def _symbols_of(self, number: int) -> set[int]:
        """The numbers of the symbols in a size that are sizes of the graph themselves."""
        if number not in self.sizes:
            return set()
        _, expression, _ = _in_symbols(expression_of(self.sizes[number]))
        return self.sizes.keys() & {self.symbols.get(str(part)) for part in expression.free_symbols}

    def _equate(self, size: int, other_size: int) -> None:
        """Raises EqualSizes(number, replacement) if equal sizes need another bound number.

        It returns without effect unless one size is a symbol, or both are made of symbols that
        guards can make equal in pairs. The other may be a symbol, a number, or made of other
        symbols.
        """
        from sympy import isprime

        symbols, others = map(self._symbols_of, (size, other_size))
        sides = [
            sorted((str(hint_of(self.sizes[number])), number) for number in side)
            for side in (symbols - others, others - symbols)
        ]
        hints, other_hints = ([hint for hint, _ in side] for side in sides)
        if hints == other_hints:  # or some are equal by chance, and the next call breaks a guard
            for (_, own), (_, other) in zip(*sides, strict=True):
                if guard(self.sizes[own] == self.sizes[other]):
                    raise EqualSizes(other, own)
        parts = [number // gcd(size, other_size) for number in (other_size, size)]
        for symbol, part in (parts, parts[::-1]):
            # a symbol that was equated with a sum or product has no prime
            is_symbol = symbol in self.symbols.values() and isprime(symbol)
            if is_symbol and (
                not is_open(part) or (part in self.sizes and symbol not in self._symbols_of(part))
            ):
                raise EqualSizes(symbol, part)

    def _fold(self, target: Any, positional: Any, options: Any, meta_value: Any) -> Reading:
        """Computes a call of literals alone with torch. None if it makes no tensor of literals."""
        if not isinstance(meta_value, torch.Tensor) or has_symbols(meta_value.shape):
            return None
        schema, is_large = signature(target), prod(meta_value.shape) > _MOST_FOLDED
        # memory without numbers; repetitions, whose numbers would hide that they are equal
        is_kept = "empty" in schema.word or schema.word in ("expand", "repeat")
        if is_large or schema.is_random or schema.is_mutable or is_kept:
            return None
        ignored = ("device", "pin_memory", "layout")
        kept_options = {name: item for name, item in options.items() if name not in ignored}
        try:
            tensor = target(*tree_map(_as_tensor, positional), **tree_map(_as_tensor, kept_options))
        except _RULE_ERRORS:
            return None
        return self.constant(tensor) if isinstance(tensor, torch.Tensor) else None

    def _in_node_format(self, call: Call, reading: Reading) -> Reading:
        """A result in the dtype and shape that the node has."""
        if isinstance(reading, list) and isinstance(call.shape, list):
            # a listing leaves out results behind the last one that is read
            parts = zip(reading[: len(call.shape)], call.shape, call.dtype, strict=True)
            return [self._in_format(part, shape, dtype) for part, shape, dtype in parts]
        return self._in_format(reading, call.shape, call.dtype)

    def _in_format(self, value: Reading, shape: Any, dtype: Any) -> Reading:
        """A Value in a shape and dtype; other readings, and results that nothing reads, as they
        are.
        """
        if not isinstance(value, Value) or not isinstance(shape, tuple):
            return value
        if 0 in shape and value.op != "write":
            return self.form.filled(0, shape, dtype)
        if value.shape != shape:
            value = self.form.expand(value, shape)
        if value.dtype != dtype and not value.active and value.op not in ("leaf", "write"):
            value = self.form.cast(value, dtype)
        return value

    def _make_opaque(self, node: Node) -> Reading:
        """An opaque reading of a node.

        It is equal to no other node's if it is random or not initialised.
        """
        meta_value = value_of(node)
        arguments = _leaves(self.argument([*node.args, *node.kwargs.items()]))
        values = values_of(arguments)
        other_arguments = [
            (place, "Pair" if isinstance(argument, Pair) else argument)
            for place, argument in enumerate(arguments)
            if not isinstance(argument, Value)
        ]
        target = node.target
        if "empty" in str(target):
            values = []  # it takes only their sizes and dtype
        is_unique = not values or signature(target).is_random
        literals = repr((other_arguments, node.name if is_unique else ""))
        if isinstance(meta_value, torch.Tensor) and meta_value.is_complex():
            shape = self.shape(meta_value.shape)
            parts = (
                self.form.opaque(f"{target} {part}", literals, values, shape, torch.float32)
                for part in ("real", "imag")
            )
            return Pair(*parts)
        if not isinstance(meta_value, (torch.Tensor, list, tuple)):
            return None
        call = self.call(target, meta_value)
        if signature(target).is_pointwise and isinstance(meta_value, torch.Tensor) and values:
            try:
                return self.form.expand(
                    call.function(call.name, *values, literals=literals), call.shape
                )
            except ValueError as error:
                self._equate_sizes_of_error(error)
        return call.opaque(literals, values)


_UNUSED = ("device", "pin_memory", "layout", "memory_format", "out", "generator")


def bind_arguments(
    target: Any, positional: Sequence[Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Arguments by the names that rules give them, defaults included."""
    arguments: dict[str, Any] = {}
    for place, name, rule_name, default in _parameters_of(signature(target)):
        if place < len(positional):
            arguments[rule_name] = positional[place]
        elif default is not None or name in options:
            arguments[rule_name] = options.get(name, default)
    return arguments


@cache
def _parameters_of(schema: Signature) -> list[tuple[int, str, str, Any]]:
    """The parameters that matter to the result: place, name, name in rules, default."""
    rule_names = rule_names_of(schema)
    return [
        (place, name, rule_names[name], default)
        for place, (name, default) in enumerate(schema.arguments)
        if name not in _UNUSED
    ]


@lru_cache(maxsize=4096)
def _in_symbols(expression: Any) -> tuple[Any, Any, set[int]]:
    """A size as a polynomial, the same as a sum of products of symbols, and the integers in it.

    A quotient, remainder or minimum in it (``s // 2``, ``min(s, 64)``) becomes a symbol of its own,
    in the second result also a difference of symbols. Its number is unrelated to the others'.
    """
    import sympy

    integers = {abs(int(part)) for part in expression.atoms(sympy.Integer)}
    polynomial = expression.replace(
        lambda part: isinstance(part, sympy.core.function.Application),
        lambda part: sympy.Symbol(str(part)),
    )
    is_sum = _is_sum_of_products(polynomial)
    return polynomial, polynomial if is_sum else sympy.Symbol(str(expression)), integers


def _is_sum_of_products(expression: Any) -> bool:
    """True for a sum of products of symbols.

    A subtracted number must be small beside the numbers that symbols are bound to.
    """
    if expression.is_Symbol or expression.is_Integer:
        return True
    terms = expression.expand().as_coefficients_dict()
    return all(
        times > (0 if term.free_symbols else -LEAST_BOUND)
        and all(part.is_Symbol or part.is_Integer for part in term.as_powers_dict())
        for term, times in terms.items()
    )


def values_of(reading: Reading) -> list[Value]:
    """The Values of a reading; both parts of a Pair."""
    if isinstance(reading, Value):
        return [reading]
    if isinstance(reading, Pair):
        return [reading.real, reading.imag]
    if isinstance(reading, (list, tuple)):
        return [value for part in reading for value in values_of(part)]
    return []


def _leaves(arguments: Iterable[Any]) -> list[Any]:
    """The items of nested lists. ``tree_leaves`` is several times as slow, for each node."""
    leaves = list[Any]()
    for item in arguments:
        if isinstance(item, (list, tuple)):
            leaves += _leaves(item)
        else:
            leaves.append(item)
    return leaves


def _is_known(argument: Any) -> bool:
    """True for a number, and for a Value all of whose elements are known."""
    if isinstance(argument, Value):
        is_literal = argument.op == "constant" or filled_with(argument) is not None
        return is_literal and not any(map(is_open, argument.shape))
    return not isinstance(argument, (Pair, Size))


def _as_tensor(argument: Any) -> Any:
    """The tensor of a Value that is a literal; any other argument as it is."""
    if not isinstance(argument, Value):
        return argument
    if argument.op == "constant":
        return argument.literal.tensor
    filled = filled_with(argument)
    assert filled is not None
    number = filled.number
    element = float(number) if argument.is_float else int(number.ratio)
    return torch.full(argument.shape, element, dtype=argument.dtype)


@cache
def _prime(count: int) -> int:
    """The prime for the symbol that follows ``count`` others."""
    if count < len(_FIRST_PRIMES):
        return _FIRST_PRIMES[count]
    return _prime_after(_FIRST_PRIMES[-1] + _SPACING * (count - len(_FIRST_PRIMES) + 1))


def _prime_after(number: int) -> int:
    """The prime after a number."""
    from sympy import nextprime

    return int(nextprime(number))
