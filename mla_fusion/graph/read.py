"""An FX graph read into Values: each node once, in order.

Arguments are bound to the schema, and the operator's rule is called with them. An operator without
a rule is decomposed by torch into those that have one; what is left is opaque: a function of all
that it reads. A symbol is bound to a large prime, so that a size that is made of it is told from
every other; what the graph computes with a size as a number is a leaf.
"""

from __future__ import annotations

import operator as python
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from mla_fusion.compat import OpOverload, guarded_equal, schema_of
from mla_fusion.fx import registered
from mla_fusion.fx.sizes import Binding
from mla_fusion.fx.sizes import expression as expression_of
from mla_fusion.graph import arithmetic, decompose, fused, moves, quantise
from mla_fusion.graph.call import RULES, EqualSizes, Call, Departs, Pair, Size, name_of
from mla_fusion.graph.form import Form, Value, filled_with
from mla_fusion.graph.numbers import LEAST_BOUND, Number, is_open, is_rough
from mla_fusion.graph.parameters import parameters

__all__ = ["Graph", "Reading", "arithmetic", "fused", "moves", "quantise"]

Reading = Any  # a Value, a Pair, a list of these, a number, or None
# their halves, their quarters and the differences between them have large factors, too
_FIRST_PRIMES = (10007, 11083, 12517, 15629, 19427, 21881, 26513, 34261, 38119, 43987)
_FOLDED = 1 << 16  # elements of a tensor of literals that is computed when it is read
_PLACES = ("shifts", "index", "offset", "diagonal")
# arguments written though no schema says so, and the results that hold the same
_HIDDEN = {"npu::npu_kv_rmsnorm_rope_cache": {5: 0, 6: 1}}
_SCATTERS = {"slice": "slice_scatter", "select": "select_scatter"}
_FAILS = (ValueError, RuntimeError, TypeError, LookupError, AssertionError, AttributeError)


class Graph:
    """
    readings  what each node is
    nodes     of each Value, the nodes that hold it, in order
    written   by placeholder, what the graph leaves in it
    stale     readers, with nodes that hold other numbers later
    changed   nodes that are written later, or look at memory that is, with what they are before
    within    of each Value that is made on the way to a node and that no node holds, that node
    assumed   what was taken for granted of numbers where a node was read
    registered  calls of the user's own operators, with the functions that they were read as: that
              of the call first
    unused    by the name of an operator, why the function registered for it was not used
    hidden    inputs that an operator writes unseen, with it
    parameters  inputs that are the model's own
    symbols   what each symbol is bound to
    sizes     the symbolic sizes, by the numbers that they are bound to
    """

    def __init__(self, gm: GraphModule, own: Collection[Node] | None = None) -> None:
        """``own``: the inputs that are the model's; None: as they are used."""
        self.gm = gm
        self.parameters = parameters(gm.graph) if own is None else own
        self.symbols: dict[str, int] = {}
        self._numbers: dict[Any, Any] | None = None  # sizes that guards make so many
        self._functions: tuple[OpOverload, ...] = ()  # of the user's, in which the graph stands
        self.form, self.sizes = Form(), dict[int, Any]()
        while not self._is_read():
            self.form, self.sizes = Form(), {}

    def _begin(self) -> None:
        self.readings: dict[Node, Reading] = {}
        self.nodes: dict[Value, list[Node]] = {}
        self.within: dict[Value, Node] = {}
        self.registered: dict[Node, tuple[OpOverload, ...]] = {}
        self.unused: dict[str, str] = {}
        self.written: dict[Node, Value] = {}
        self.hidden: dict[Node, Node] = {}
        self.stale: set[tuple[Node, Node]] = set()
        self.changed: dict[Node, Reading] = {}
        self.assumed: dict[Node, tuple[str, ...]] = {}
        self._views: dict[Node, list[Node]] = {}

    def _is_read(self) -> bool:
        """False: two symbols are one, and the graph is to be read again."""
        self._begin()
        try:
            for node in self.gm.graph.nodes:
                self._read(node)
        except EqualSizes as pair:
            old, new = pair.args
            self.symbols = {
                name: new if bound == old else bound for name, bound in self.symbols.items()
            }
            return False
        return True

    @cached_property
    def early(self) -> set[Node]:
        """Whose memory a step changes, and another may read after it: copies into inputs that end
        the graph are none.
        """
        found, read = set[Node](), set[Node]()
        for node in reversed(self.gm.graph.nodes):
            written = set(map(self.base, _changed(node)))
            is_copy = node.target is torch.ops.aten.copy_.default
            found |= written & read if is_copy else written
            if node.op != "output" and not is_copy:
                read.update(map(self.base, node.all_input_nodes))
        return found

    def holding(self, value: Value) -> Iterator[Node]:
        """The nodes that hold a Value, in its shape or another, from where they stand to the end
        of the graph, or up to a copy that ends it.
        """
        origin = self._origin(value)
        for node in self.in_any_shape(value):
            reading = self.readings[node]
            if isinstance(reading, Pair):
                is_held = value in (reading.real, reading.imag)
            elif node.op == "placeholder":
                is_held = origin[1].op == "leaf" and node not in self.early
            else:
                base = self.base(node)
                if node in self.changed and base.op == "placeholder" and base not in self.early:
                    reading = self.changed[node]
                is_same = isinstance(reading, Value) and self._origin(reading) == origin
                is_held = is_same and reading is self.changed.get(node, reading)
            if is_held:
                yield node

    def in_any_shape(self, value: Value) -> list[Node]:
        """The nodes that hold a Value; where none does, those that hold it in another shape, as
        they do a product of sequences; else the one that it is made on the way to.
        """
        near = [self.within[value]] if value in self.within else []
        return self.nodes.get(value) or self._by_origin.get(self._origin(value), near)

    def _origin(self, value: Value) -> tuple[Number, Value]:
        """Equal for Values that are reshapes of each other."""
        times, inner = self.form.split(value)
        while inner.op == "reshape":
            inner = inner.sources[0]
        return times, inner

    @cached_property
    def _by_origin(self) -> dict[tuple[Number, Value], list[Node]]:
        found: dict[tuple[Number, Value], list[Node]] = {}
        for value, nodes in self.nodes.items():
            found.setdefault(self._origin(value), []).extend(nodes)
        return {origin: sorted({*nodes}) for origin, nodes in found.items()}

    @property
    def live(self) -> list[Value]:
        """What the graph gives out or writes, and what nobody reads."""
        found = dict[Value, None]()
        for node in self.gm.graph.nodes:
            if node.op == "output":
                read = [self.readings.get(one) for one in node.all_input_nodes]
            else:
                read = [] if node.users else [self.readings.get(node)]
            found |= dict.fromkeys(values_of(read))
        return [*found, *self.written.values()]

    # -- sizes

    def size(self, given: Any) -> int:
        if isinstance(given, int):
            return given
        if self._numbers is None:
            guarded = Binding()
            for pair in guarded_equal(given):
                guarded.equate(*pair)
            self._numbers = guarded.numbers
        expression = _in_atoms(expression_of(given).xreplace(self._numbers))
        for symbol in expression.free_symbols:
            name = str(symbol)
            if name not in self.symbols:
                used = len(self.symbols)
                self.symbols[name] = _prime(used)
        bound = {symbol: self.symbols[str(symbol)] for symbol in expression.free_symbols}
        found = Size(int(expression.subs(bound)), str(expression))
        if found > 1 and any(map(is_open, bound.values())):
            self.sizes.setdefault(int(found), given)
        return found

    def unbound(self, number: int) -> Any:
        """The size of the graph that was bound to a number, or a product of such sizes; else the
        number. Raises LookupError where a literal may be as large.
        """
        if number in self.sizes:
            if number < LEAST_BOUND:
                raise LookupError(f"{number} is a literal, or {self.sizes[number]}")
            return self.sizes[number]
        for bound, size in self.sizes.items():
            if number and number % bound == 0 and is_rough(bound):
                return size * self.unbound(number // bound)
        return number

    def shape(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        found = tuple(sizes)
        if all(type(size) is int for size in found):
            return found
        return tuple(int(self.size(size)) for size in found)

    # -- nodes

    def _read(self, node: Node) -> None:
        self.form.assumed.clear()
        found = self._reading(node)
        if self.form.assumed:
            self.assumed[node] = (*dict.fromkeys(self.form.assumed),)
        self._note(node, found)

    def _note(self, node: Node, found: Reading) -> None:
        self.readings[node] = found
        for value in (found,) if isinstance(found, Value) else values_of(found):
            self.nodes.setdefault(value, []).append(node)

    def _reading(self, node: Node) -> Reading:
        held = node.meta.get("val")
        if node.op == "output":
            return None
        if node.op == "placeholder":
            if isinstance(held, torch.Tensor):
                return self._leaf(node.name, held, node in self.parameters)
            return self.size(held) if isinstance(held, (int, torch.SymInt)) else None
        if node.op == "get_attr":
            return self._attribute(node)
        if isinstance(held, (torch.SymInt, int)) and not isinstance(held, bool):
            return self.size(held)
        if node.target is python.getitem:
            source, place = self.argument(list(node.args))
            return source[place] if isinstance(source, (list, tuple)) else None
        if not isinstance(node.target, OpOverload):
            return self._unknown(node)
        found = self._called(node)
        for place, result in _HIDDEN.get(name_of(node.target), {}).items():
            cache = node.args[place]
            assert isinstance(cache, Node)
            self.hidden[self.base(cache)] = node
            self._wrote(cache, found[result])
        if is_in_place(node.target) and isinstance(node.args[0], Node):
            self._wrote(node.args[0], found)
        elif node.target.is_view and isinstance(node.args[0], Node):
            self._views.setdefault(self.base(node), []).append(node)
        return found

    # -- what is written in place, through views too

    def base(self, node: Node) -> Node:
        """The node whose memory a view looks at."""
        while (
            node.op == "call_function"
            and isinstance(node.target, OpOverload)
            and (node.target.is_view or is_in_place(node.target))
            and isinstance(node.args[0], Node)
        ):
            node = node.args[0]
        return node

    def _wrote(self, node: Node, new: Reading) -> None:
        """``node`` holds new numbers, and so does all that looks at its memory."""
        base, at = self.base(node), node
        while at is not base and isinstance(new, Value):
            above = at.args[0]
            assert isinstance(above, Node)
            if not is_in_place(at.target):
                new = self._put_back(above, at, new)
            at = above
        self._hold(base, new)
        if base.op == "placeholder" and isinstance(new, Value):
            self.written[base] = new
        for view in self._views.get(base, ()):
            self._hold(view, self._called(view))

    def _hold(self, node: Node, reading: Reading) -> None:
        before = self.readings.get(node)
        if node in self.readings and before is not reading:
            self.changed.setdefault(node, before)
        if before is not reading:
            self.stale |= {(user, node) for user in node.users if user in self.readings}
        self.readings[node] = reading
        for value in values_of(reading):
            self.nodes.setdefault(value, []).append(node)

    def _put_back(self, above: Node, view: Node, new: Value) -> Reading:
        """What a view was taken of, with new numbers in the view."""
        whole, name = self.readings[above], name_of(view.target)
        scatter = _SCATTERS.get(name)
        if not isinstance(whole, Value):
            return None
        given = bound(view.target, self.argument(list(view.args)), {})
        call = Call(self.form, name, whole.shape, whole.dtype)
        if scatter is not None:
            return RULES[scatter](call, **{**given, "src": new})
        if name in ("permute", "transpose", "t"):
            rank = len(whole.shape)
            named = self.form.leaf("order", tuple(range(2, rank + 2)), whole.dtype, False)
            order = [size - 2 for size in RULES[name](call, **{**given, "x": named}).shape]
            return self.form.permute(new, [order.index(axis) for axis in range(rank)])
        is_whole = prod(new.shape) == prod(whole.shape)
        return self.form.reshape(new, whole.shape) if is_whole else None

    def _leaf(self, name: str, held: torch.Tensor, model: bool) -> Reading:
        shape = self.shape(held.shape)
        if held.is_complex():
            parts = (
                self.form.leaf(f"{name}.{part}", shape, torch.float32, model)
                for part in ("real", "imag")
            )
            return Pair(*parts)
        return self.form.leaf(name, shape, held.dtype, model)

    def _attribute(self, node: Node) -> Reading:
        from mla_fusion.fx.kinds import attribute, is_literal

        tensor = attribute(node)
        if not isinstance(tensor, torch.Tensor):
            return str(node.target)  # two calls of other graphs differ
        is_plain = type(tensor) is torch.Tensor and tensor.device.type != "meta"
        if is_plain and is_literal(node) and tensor.numel() <= _FOLDED:
            return self.constant(tensor)
        return self._leaf(f"attribute {node.target}", tensor, True)

    def constant(self, tensor: torch.Tensor) -> Reading:
        if tensor.is_complex():
            return Pair(self.form.constant(tensor.real), self.form.constant(tensor.imag))
        return self.form.constant(tensor)

    def argument(self, given: Any) -> Any:
        if isinstance(given, Node):
            return self.readings.get(given)
        if isinstance(given, (list, tuple)):
            return [self.argument(one) for one in given]
        if isinstance(given, slice):
            return slice(*map(self.argument, (given.start, given.stop, given.step)))
        return self.size(given) if isinstance(given, torch.SymInt) else given

    def _called(self, node: Node) -> Reading:
        target = node.target
        own = self._of_its_function(node)
        if own is not None:
            return own
        args = self.argument(list(node.args))
        options = {name: self.argument(given) for name, given in node.kwargs.items()}
        held, given = node.meta.get("val"), bound(target, args, options)
        if self.symbols and not self._is_for_any_size(given):
            return self._unknown(node)
        call = self.call(target, held)
        if not _has_symbols(held):
            folded = self._folded(target, args, options, held)
            if folded is not None:
                return folded
        found = self.run(call, target, given, node)
        if found is None:
            return self._unknown(node)
        try:
            if not isinstance(found, list) or len(found) == len(call.shape):
                return self._as_held(call, found)
            parts = held if isinstance(held, (list, tuple)) else []
            places = [at for at, one in enumerate(parts) if one is not None]
            for at, part in zip(
                places, self._as_held(call, [found[at] for at in places]), strict=True
            ):
                found[at] = part  # a listing has results that are read alone
            return found
        except ValueError:  # of another size than the node has
            return self._unknown(node)

    def _is_for_any_size(self, given: dict[str, Any]) -> bool:
        """Does a step at the number that a size is bound to speak for all of them? Not where the
        size says at which place of an axis.
        """
        places = (given[name] for name in _PLACES if name in given)
        return not any(isinstance(one, Size) for place in places for one in _flat(place))

    def call(self, target: Any, held: Any) -> Call:
        if isinstance(held, (list, tuple)):
            tensors = [one for one in held if isinstance(one, torch.Tensor)]
            shape: Any = [self.shape(one.shape) for one in tensors]
            dtype: Any = [one.dtype for one in tensors]
        elif isinstance(held, torch.Tensor):
            shape, dtype = self.shape(held.shape), held.dtype
        else:
            shape, dtype = (), torch.int64
        name = name_of(target)
        return Call(
            self.form, name.removesuffix("_") if is_in_place(target) else name, shape, dtype
        )

    def run(self, call: Call, target: Any, given: dict[str, Any], node: Node) -> Reading:
        """What the rule makes of it, or its decomposition; None: it is opaque."""
        pairs = any(map(_has_pair, given.values()))
        if pairs and call.name in arithmetic.OF_PARTS:
            part = _of_parts(call)
            if part is None:
                return None
            real, imag = (
                self.run(
                    part, target, {name: _part(one, side) for name, one in given.items()}, node
                )
                for side in ("real", "imag")
            )
            if real is None or imag is None:
                return None
            if isinstance(real, list):
                return [Pair(one, two) for one, two in zip(real, imag, strict=True)]
            return Pair(real, imag)
        rule = RULES.get(call.name)
        if rule is not None and (not pairs or call.name in arithmetic.OF_COMPLEX):
            try:
                return rule(call, **given)
            except Departs:
                pass
            except EqualSizes as pair:
                self._equate(*pair.args)
                return None
            except _FAILS as error:
                self._find_alike(error)
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        values = values_of(list(given.values()))
        if not is_random and not pairs and any(value.active for value in values):
            opened = decompose.traced(target, given)
            return None if opened is None else self._opened(*opened, node)
        return None

    def _of_its_function(self, node: Node) -> Reading:
        """A call of an operator of the user's own as what its function makes; None of others."""
        target: Any = node.target
        body = registered.body(node)
        if body and target in self._functions:
            body = "it calls the operator itself"
        if not isinstance(body, FxGraph):
            if body:
                first = body.partition("\n")[0]
                why = f"a function is registered for it and cannot be used: {first}"
                self.unused[name_of(target)] = why
            return None
        given = [self.readings[one] for one in node.all_input_nodes]
        found = self._opened(body, given, node, (*self._functions, target))
        return found[0] if isinstance(node.meta["val"], torch.Tensor) else found

    def _opened(
        self,
        graph: FxGraph,
        values: Sequence[Reading],
        at: Node,
        functions: tuple[OpOverload, ...] | None = None,
    ) -> Reading:
        """What a graph makes of Values, with this one's form. ``at``: the node that it is read for;
        ``functions``: where it is that of a function of the user's, in which others it stands.
        """
        inner = Graph.__new__(Graph)
        inner.symbols, inner.sizes, inner.form = self.symbols, self.sizes, self.form
        inner._numbers = self._numbers
        inner._begin()
        inner.unused = self.unused
        inner._functions = self._functions if functions is None else functions
        placeholders = iter(values)
        for node in graph.nodes:
            if node.op == "placeholder":
                inner.readings[node] = next(placeholders)
            elif node.op != "output":
                inner._note(node, inner._reading(node))
        for value in (*inner.nodes, *inner.within):
            self.within.setdefault(value, at)
        called = (one for each in inner.registered.values() for one in each)
        own = () if functions is None else functions[-1:]
        if used := (*dict.fromkeys((*own, *called)),):
            self.registered[at] = used
        return inner.argument(graph.output_node().args[0])

    def _find_alike(self, error: Exception) -> None:
        """Two sizes that an operator takes for equal are one. A symbol that meets a number stays
        open: torch may have to leave it so.
        """
        numbers = {int(word) for word in str(error).split() if word.isdigit()}
        if isinstance(error, ValueError) and len(numbers) == 2 and all(map(is_open, numbers)):
            self._equate(*numbers)

    def _equate(self, one: int, other: int) -> None:
        """Raises EqualSizes (a number of symbols, and what they are bound to in place of it) where that
        makes two sizes equal: one of them is a symbol, the other a symbol, a number, or made of
        other symbols.
        """
        one, other = sorted((one, other))
        known = {*self.symbols.values()}
        if other in known and (one in known or not is_open(one)):
            raise EqualSizes(other, one)
        is_symbol = one in known and all(one % bound or bound == one for bound in known)
        if is_symbol and other in self.sizes and other % one:
            raise EqualSizes(one, other)

    def _folded(self, target: Any, args: Any, options: Any, held: Any) -> Reading:
        """Of literals alone, what torch computes."""
        if any(isinstance(one, Value) and not _is_literal(one) for one in args):
            return None
        given = list(_flat([args, list(options.values())]))
        values = [one for one in given if isinstance(one, (Value, Pair))]
        if any(not _is_literal(one) for one in values if isinstance(one, Value)):
            return None
        if any(is_open(size) for one in values for size in one.shape):
            return None
        if not isinstance(held, torch.Tensor) or held.numel() > _FOLDED:
            return None
        if any(isinstance(one, (Pair, Size)) for one in given):
            return None
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        if is_random or "empty" in str(target) or schema_of(target).is_mutable:
            return None
        left_out = ("device", "pin_memory", "layout")
        kept = {name: _tensor(one) for name, one in options.items() if name not in left_out}
        try:
            found = target(*_tensor(args), **kept)
        except _FAILS:
            return None
        return self.constant(found) if isinstance(found, torch.Tensor) else None

    def _as_held(self, call: Call, found: Reading) -> Reading:
        """In the dtype and shape that the node has."""
        if isinstance(found, list):
            if not isinstance(call.shape, list):
                return found
            parts = zip(found, call.shape, call.dtype, strict=True)
            return [self._one(one, shape, dtype) for one, shape, dtype in parts]
        if isinstance(found, Pair) or isinstance(call.shape, list):
            return found
        return self._one(found, call.shape, call.dtype)

    def _one(self, value: Reading, shape: tuple[int, ...], dtype: torch.dtype) -> Reading:
        if not isinstance(value, Value):
            return value
        if 0 in shape and value.op != "write":
            return self.form.filled(0, shape, dtype)
        if value.shape != shape:
            value = self.form.expand(value, shape)
        if value.dtype != dtype and not value.active and value.op not in ("leaf", "write"):
            value = self.form.cast(value, dtype)
        return value

    def _unknown(self, node: Node) -> Reading:
        """Opaque; a random one, or memory that is not filled, is like itself alone."""
        held = node.meta.get("val")
        given = list(_flat(self.argument([*node.args, *node.kwargs.items()])))
        values = list(values_of(given))
        places = ((at, "Pair" if isinstance(one, Pair) else one) for at, one in enumerate(given))
        rest = [one for one in places if not isinstance(one[1], Value)]
        target = node.target
        if "empty" in str(target):
            values = []  # whose sizes and dtype it takes
        is_own = not values or (
            isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        )
        literals = repr((rest, node.name if is_own else ""))
        if isinstance(held, torch.Tensor) and held.is_complex():
            shape = self.shape(held.shape)
            parts = (
                self.form.opaque(f"{target} {part}", literals, values, shape, torch.float32)
                for part in ("real", "imag")
            )
            return Pair(*parts)
        if not isinstance(held, (torch.Tensor, list, tuple)):
            return None
        call = self.call(target, held)
        if is_pointwise(target) and isinstance(held, torch.Tensor) and values:
            try:
                return self.form.expand(call.function(call.name, literals, *values), call.shape)
            except ValueError as error:
                self._find_alike(error)
        made = call.opaque(literals, values)
        if not isinstance(held, (list, tuple)):
            return made
        each = iter(made)
        return [next(each) if isinstance(one, torch.Tensor) else None for one in held]


def _changed(step: Node) -> Iterator[Node]:
    """The arguments that a step changes, by its schema."""
    if not is_mutable(step.target):
        return
    for place, argument in enumerate(schema_of(step.target).arguments):
        given = step.args[place] if place < len(step.args) else step.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            several = given if isinstance(given, (tuple, list)) else (given,)
            yield from (item for item in several if isinstance(item, Node))


_UNUSED = ("device", "pin_memory", "layout", "memory_format", "out", "generator")


def bound(target: Any, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the schema; ``self`` is ``x``."""
    found: dict[str, Any] = {}
    for place, (name, option, default) in enumerate(_arguments(target)):
        if name in _UNUSED:
            continue
        if place < len(args):
            found[name] = args[place]
        elif option in options:
            found[name] = options[option]
        elif default is not None:
            found[name] = default
    return found


@lru_cache(maxsize=4096)
def _arguments(target: Any) -> list[tuple[str, str, Any]]:
    """Names of arguments, those of the schema, and defaults."""
    return [
        (
            "x" if argument.name == "self" else argument.name,
            argument.name,
            argument.default_value if argument.has_default_value() else None,
        )
        for argument in schema_of(target).arguments
    ]


@lru_cache(maxsize=4096)
def _in_atoms(expression: Any) -> Any:
    """A size as products of symbols that are added up. Anything else (``s // 2``, ``min(s, 64)``,
    ``s - n``) is a symbol of its own, of which no more is known: it is bound to a number that says
    nothing of the others.
    """
    import sympy

    if expression.is_Symbol or expression.is_Integer:
        return expression
    found = expression.replace(
        lambda part: isinstance(part, sympy.core.function.Application),
        lambda part: sympy.Symbol(str(part)),
    )
    return found if _is_plain(found) else sympy.Symbol(str(expression))


def _is_plain(expression: Any) -> bool:
    """Products of symbols, added up; a number that is taken off is small beside what symbols are
    bound to.
    """
    if expression.is_Symbol or expression.is_Integer:
        return True
    terms = expression.expand().as_coefficients_dict()
    return all(
        times > (0 if term.free_symbols else -LEAST_BOUND)
        and all(part.is_Symbol or part.is_Integer for part in term.as_powers_dict())
        for term, times in terms.items()
    )


@lru_cache(maxsize=4096)
def is_mutable(target: Any) -> bool:
    return isinstance(target, OpOverload) and bool(schema_of(target).is_mutable)


@lru_cache(maxsize=4096)
def is_in_place(target: Any) -> bool:
    """Does it write into its first argument, and return it? (``__and__`` does not.)"""
    return is_mutable(target) and str(schema_of(target).name).endswith("_")


def is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def values_of(reading: Reading) -> Iterator[Value]:
    for one in _flat([reading]):
        if isinstance(one, Value):
            yield one
        elif isinstance(one, Pair):
            yield from (one.real, one.imag)


def _flat(given: Any) -> Iterator[Any]:
    if isinstance(given, (list, tuple)):
        for one in given:
            yield from _flat(one)
    else:
        yield given


def _has_pair(given: Any) -> bool:
    if isinstance(given, list):
        return any(map(_has_pair, given))
    return isinstance(given, Pair)


def _part(given: Any, side: str) -> Any:
    if isinstance(given, list):
        return [_part(one, side) for one in given]
    return getattr(given, side) if isinstance(given, Pair) else given


def _of_parts(call: Call) -> Call | None:
    """The same call of the real parts of complex tensors; None: the result is real."""
    is_one = isinstance(call.dtype, torch.dtype)
    dtypes = [call.dtype] if is_one else call.dtype
    if not all(dtype.is_complex for dtype in dtypes):
        return None
    real = torch.float32 if is_one else [torch.float32] * len(dtypes)
    return Call(call.form, call.name, call.shape, real)


def _is_literal(value: Value) -> bool:
    return value.op == "constant" or filled_with(value) is not None


def _tensor(given: Any) -> Any:
    """Values that are literals, as tensors."""
    if isinstance(given, list):
        return [_tensor(one) for one in given]
    if not isinstance(given, Value):
        return given
    if given.op == "constant":
        return given.literal.tensor
    filled = filled_with(given)
    assert filled is not None
    number = filled.literal[1]
    plain = float(number) if given.dtype.is_floating_point else int(number.ratio)
    return torch.full(given.shape, plain, dtype=given.dtype)


def _has_symbols(held: Any) -> bool:
    tensors = held if isinstance(held, (list, tuple)) else [held]
    return any(
        not isinstance(size, int)
        for one in tensors
        if isinstance(one, torch.Tensor)
        for size in one.shape
    )


def _prime(count: int) -> int:
    if count < len(_FIRST_PRIMES):
        return _FIRST_PRIMES[count]
    from sympy import nextprime

    return int(nextprime(_FIRST_PRIMES[-1], count - len(_FIRST_PRIMES) + 1))
