"""What nodes of a graph hold at a random point of the field.

Leaves are drawn, each node between them and what is asked for is run once. Facts are decided so,
and whole plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Node

from mla_fusion.compat import OpOverload
from mla_fusion.fx.kinds import (
    Kind,
    argument,
    attribute,
    is_cast,
    is_float,
    is_getitem,
    is_literal,
    operator_of,
    word,
)
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.sizes import is_size, is_symbolic
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, views_and_casts
from mla_fusion.operators.known import rule_named, shape_of, value_of
from mla_fusion.prove import field, operators
from mla_fusion.prove.cells import Cells
from mla_fusion.prove.counted import Counted, past_rounding
from mla_fusion.prove.field import Complex, Num, Point, Undecided, Value
from mla_fusion.prove.operators import NARROW, Abstract

POINTS = 3  # at which a plan is proved
_MOST_COLUMNS = 1 << 16
_SMALL = 256  # integers up to which bfloat16 has all
_FEW = 8  # elements of an input for each of which both signs are tried
_UNDRAWN = ("weight", "cache")  # large, and mostly only moved about
OF_MODEL = frozenset(("weight", "gamma", "scale", "cache", "constant"))  # leaves without tokens

# Whatever a rule does not expect (a shape, an argument, an operator) is no proof.
UNKNOWN = (
    Undecided,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    AttributeError,
)


Candidate = TypeVar("Candidate")


class Unproved(Exception):
    """A node that has no value here: ``args`` are why, and the node."""


def same_attribute(node: Node) -> object:
    """Equal for nodes that read one attribute of the module (tracers make a node of each reading);
    else the node.
    """
    return str(node.target) if node.op == "get_attr" else node


def _name(node: Node) -> str:
    """By which it is drawn. An attribute may be called as an input is."""
    return f"attribute {node.target}" if node.op == "get_attr" else node.name


def which(
    view: View,
    leaves: Mapping[Node, str],
    candidates: Iterable[Candidate],
    holds: Callable[[Evaluation, Candidate], bool],
    shrink: Shrink | None = None,
    twins: Mapping[Node, Node] | None = None,
) -> Candidate | None:
    """The first candidate that holds at a random point; None where none does.

    One point decides a fact. The plan that it becomes part of is proved as a whole.
    """
    run = Evaluation(view, leaves, shrink, twins)

    def at_a_point(candidate: Candidate) -> bool:
        run.clear()
        try:
            with field.at(Point(float16=False)):
                return holds(run, candidate)
        except (Unproved, *UNKNOWN):
            return False

    return next(filter(at_a_point, candidates), None)


def holds(
    view: View,
    leaves: Mapping[Node, str],
    check: Callable[[Evaluation], bool],
    shrink: Shrink | None = None,
    twins: Mapping[Node, Node] | None = None,
) -> bool:
    """Does a check hold at a random point, where every step has a value?"""
    found = which(view, leaves, (True,), lambda run, _: check(run), shrink, twins)
    return found is not None


class Evaluation:
    """Values of nodes at the point that is set, each run once.

    A value is what its node computes, and what its dtype holds of it. What an activation (anything
    made of x) is rounded to is left out: so fusions are meant. Anything else, a table or a scale,
    is rounded in a function of its own as soon as something is computed with it, but for products
    with activations.

    leaves         what is drawn, with the part that it plays (:class:`~mla_fusion.commit.region`)
    twins          integers that are, by proof, the very integers of another node
    draws_weights  a weight is drawn, element by element, and not only moved about
    anew           a leaf that holds other numbers than the point says
    """

    def __init__(
        self,
        view: View,
        leaves: Mapping[Node, str],
        shrink: Shrink | None = None,
        twins: Mapping[Node, Node] | None = None,
    ) -> None:
        self.view, self.binding, self.shrink = view, view.binding, shrink
        self.draws_weights = False
        self.anew: Node | None = None
        self._leaves, self._twins = leaves, twins or {}
        self._values: dict[Node, Any] = {}
        self._active: set[Node] = set()  # made of x
        self._rounded: set[Node] = set()  # activations that hold rounded numbers
        # what else holds them: the dtype that is still to round its value
        self._pending: dict[Node, torch.dtype] = {}
        self._largest: dict[int, Node] = {}  # by which a maximum of the point was met
        self._counted = Counted(leaves, OF_MODEL)
        self._cells: dict[object, Cells] = {}
        self._taken = 0
        self._few: dict[str, int] = {}
        self._of_model: dict[Node, bool] = {}

    def clear(self) -> None:
        """Begins at another point."""
        self._values.clear()
        self._rounded.clear()
        self._pending.clear()
        self._largest.clear()

    def is_function_of_x(self, node: Node) -> bool:
        """Is it made of x by a step of which no more is known than that it is a function?"""
        operator = operator_of(node)
        is_known = operator.view or rule_named(node, "field") or self._same_as(node)
        return isinstance(operator.target, OpOverload) and node in self._active and not is_known

    def value(self, node: Node) -> Any:
        """Depth first, without recursion: regions are deep."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._values:
                stack.pop()
                continue
            needed = [read for read in self._reads(top) if read not in self._values]
            if needed:
                stack.extend(needed)
                continue
            stack.pop()
            self._values[top] = self._evaluate(top)
        return self._values[node]

    def _reads(self, node: Node) -> Sequence[Node]:
        twin = self._twins.get(node)
        if twin is not None:
            return (twin,)
        if node in self._leaves or node.op != "call_function":
            return ()
        return [read for read in node.all_input_nodes if not is_size(read)]

    def _evaluate(self, node: Node) -> Any:
        twin = self._twins.get(node)
        if twin is not None:
            value, shape = self._values[twin], self._shape(node.meta["val"])
            return value.reshape(shape)
        role = self._leaves.get(node)
        if role == "x" or not self._active.isdisjoint(self._reads(node)):
            self._active.add(node)
        if role is not None or node.op != "call_function":
            return self._leaf(node, role or "")
        try:
            return self._call(node)
        except UNKNOWN as error:
            raise Unproved(f"{node.name} ({node.target}): {error}", node) from error

    def _leaf(self, node: Node, role: str) -> Any:
        held, name = value_of(node), f"{_name(node)}{' anew' if node is self.anew else ''}"
        if isinstance(held, (tuple, list)):
            return [self._drawn(f"{name}[{place}]", part) for place, part in enumerate(held)]
        if isinstance(held, (int, float, bool)):
            return held
        if not isinstance(held, torch.Tensor):
            raise Unproved(f"{node.name} is no tensor", node)
        literal = attribute(node) if node.op == "get_attr" and is_literal(node) else None
        if literal is not None and self._is_small(literal, held):
            values = literal.detach().cpu()
            return field.exact(values) if not values.is_complex() else _complex(values)
        if role in _UNDRAWN and not held.is_complex() and not self.draws_weights:
            known = self._cells.get(same_attribute(node))
            if known is None:
                shape = self.binding.shape(held.shape)
                known = self._cells[same_attribute(node)] = Cells.of_input(self._taken, shape)
                self._taken += math.prod(shape)
            return field.leaf(name, Num(None, cells=known), "weight")
        if role.startswith("one_"):  # each element is the same number
            shape = self.binding.shape(held.shape)
            return self._drawn(name, held.new_empty(1), False).expand(shape)
        return self._drawn(name, held, role not in OF_MODEL)

    def _is_small(self, literal: Any, held: torch.Tensor) -> bool:
        """Can its numbers be taken as they are?"""
        if not isinstance(literal, torch.Tensor) or literal.is_meta or literal.numel() > 1 << 16:
            return False
        return self._shape(held) == tuple(literal.shape)

    def _drawn(self, name: str, held: torch.Tensor, has_tokens: bool = True) -> Value:
        shape = self._shape(held) if has_tokens else self.binding.shape(held.shape)
        if held.is_complex():
            return Complex(field.random(f"{name} real", shape), field.random(f"{name} imag", shape))
        if math.prod(shape) <= _FEW:
            first = self._few.setdefault(name, sum(map(len, self._few)))
            return field.of_both_signs(name, shape, first, POINTS)
        return field.random(name, shape)

    def _shape(self, held: torch.Tensor) -> tuple[int, ...]:
        return self.short(self.binding.shape(held.shape))

    def _call(self, node: Node) -> Any:
        same = self._same_as(node)
        if same is not None:
            if same in self._rounded:
                self._rounded.add(node)
            if same in self._pending:
                self._pending[node] = self._pending[same]
            value = self._values[same]
            return value[node.args[1]] if is_getitem(node) else value
        target = operator_of(node).target
        if not isinstance(target, OpOverload):
            raise Undecided(f"{node.target} has no field run")
        state, is_rounded_here = self._state(node)
        args = [self._argument(arg, is_rounded_here) for arg in node.args]
        kwargs = {name: self._argument(arg, is_rounded_here) for name, arg in node.kwargs.items()}
        held, source = node.meta["val"], _first_tensor(node)
        after = self._after(node, held, args) if isinstance(held, torch.Tensor) else None
        call = operators.called(
            target,
            args,
            kwargs,
            shape=after,
            parts=self._parts(node, args),
            dtype=held.dtype if isinstance(held, torch.Tensor) else None,
            varies=lambda name, axis: self._varies(node, name, axis, after),
            keeps=lambda axis: self._keeps(node, axis),
            source=dtype_held(source) if source is not None else None,
            rounded=any(read in self._rounded for read in node.all_input_nodes),
            masks=any(operators.is_mask(read.meta["val"]) for read in node.all_input_nodes),
            holds=lambda name: dtype_held(argument(node, name)),
            is_wide=lambda place: self._is_wide(node, self._largest.get(place)),
        )
        point = field.here()
        means, point.draws_roots = len(point.means), False
        maxima = len(point.maxima)
        is_function = (
            self._counted.leaves_the_field(node)
            or self.view.lost_terms.loses(node)
            or self._is_rounded_beside_x(node)
        )
        if is_function and not _is_literal(call):
            found: Any = operators.pointwise(call)
        else:
            found = operators.run(call)
        if isinstance(held, torch.Tensor) and held.is_complex() and isinstance(found, Num):
            found = Complex(
                *(field.function(part, found) for part in ("real part", "imaginary part"))
            )
        if self._enters_float16(node, found):
            found = _in_float16(found)
        if call.rounded and operator_of(node).kind is Kind.ANALYTIC:
            found = past_rounding(call, found)
        self._largest |= dict.fromkeys(range(maxima, len(point.maxima)), node)
        point.draws_roots = True
        del point.means[means:]  # what is left is the kernel's
        if node in self._active:
            if self._rounds(node, call):
                self._rounded.add(node)
        else:
            pending = self._still_to_round(node, found, state)
            if pending is not None:
                self._pending[node] = pending
        return found

    def _same_as(self, node: Node) -> Node | None:
        """The node whose value it has: of a part, that of all parts; of a choice that never picks
        otherwise, its operand.
        """
        if is_getitem(node):
            return node.args[0]  # type: ignore[return-value]
        kept = self.view.steps.kept(node)
        if kept is not None:
            return kept
        floored = self.view.steps.floored(node)
        return floored if floored is not None and _is_of_a_norm(self._values[floored]) else None

    # -- what dtypes hold

    def _is_rounded_beside_x(self, node: Node) -> bool:
        """Is it float arithmetic, element by element, on what is neither made of x nor of the model
        alone: a table, a position, a slot? Such values are equal where the same steps made them.
        """
        rule = rule_named(node, "size")
        if node in self._active or rule not in _ARITHMETIC or not _is_float(node):
            return False
        is_exact = rule in ("multiplied", "quotient") and any(map(_rounds_nothing, node.args))
        return not is_exact and not self._is_of_model(node)

    def _is_of_model(self, node: Node) -> bool:
        """Is it made of the model's own tensors and of literals?"""
        if node not in self._of_model:
            if node in self._leaves or node.op != "call_function":
                found = node.op == "get_attr" or self._leaves.get(node, "") not in _BESIDE_X
            else:
                found = word(node) != "arange" and all(map(self._is_of_model, self._reads(node)))
            self._of_model[node] = found
        return self._of_model[node]

    def _state(self, node: Node) -> tuple[torch.dtype | None, bool]:
        """The dtype that is still to round what the node moves; and whether it has to before the
        node is run.
        """
        states = {self._pending.get(read) for read in node.all_input_nodes if _is_float(read)}
        if states <= {None}:
            return None, False
        if node in self._active:
            return None, not rule_named(node, "field")
        state, *others = states
        moves = _moves(node) and _is_float(node) and not others
        if moves and (dtype_held(node) not in NARROW or dtype_held(node) == state):
            return state, False
        return None, True

    def _still_to_round(
        self, node: Node, found: Any, state: torch.dtype | None
    ) -> torch.dtype | None:
        """The dtype whose rounding the value does not have."""
        dtype = dtype_held(node)
        if dtype not in NARROW:
            return state
        reads = [read for read in node.all_input_nodes if _is_float(read)]
        if _moves(node) and reads and all(dtype_held(read) == dtype for read in reads):
            return state
        return None if _is_exact(found, dtype) else dtype

    def _rounds(self, node: Node, call: operators.Call) -> bool:
        """Does an activation hold numbers that were rounded to a narrow dtype, and that no function
        has read since?
        """
        dtype, kind = dtype_held(node), operator_of(node).kind
        if dtype is None or not is_float(dtype):
            return False
        if is_cast(node) and dtype in NARROW and not self._is_narrow(node.args[0]):  # type: ignore[arg-type]
            return True
        if dtype in NARROW and kind is Kind.ANALYTIC:
            return True
        return call.rounded and (_moves(node) or kind is Kind.ANALYTIC)

    def _enters_float16(self, node: Node, found: Any) -> bool:
        """Are numbers of another dtype put into float16, which ends at 65504, where no cast says
        so: by an operator's own dtype (of a mean, of a product), or by a copy?
        """
        if dtype_held(node) not in _OF_FLOAT16 or field.here().float16 or is_cast(node):
            return False
        if _is_exact(found, torch.float16) or _are_small(found):
            return False
        reads = [dtype for dtype in map(dtype_held, node.all_input_nodes) if dtype is not None]
        floats = [dtype for dtype in reads if is_float(dtype)]
        if word(node) == "copy":  # what it replaces is no source
            floats = [dtype_held(argument(node, "src"))]  # type: ignore[list-item]
        return not floats or any(dtype not in _OF_FLOAT16 for dtype in floats)

    def _is_narrow(self, node: Node) -> bool:
        """Does it hold the numbers of a narrow dtype, widened?"""
        return dtype_held(origin(node, views_and_casts)) in NARROW

    def _is_wide(self, node: Node, largest: Node | None) -> bool:
        """Is what a node reads computed in float32 at least, from the rows on whose largest is
        known? The rows are the nearest node of which alone, beside weights, both are made.
        """
        position, was_met = self.view.position, False
        frontier = {read for read in self._reads(node) if read in self._active}
        while frontier and largest is not None:
            last = max(frontier, key=position.__getitem__)
            if was_met and len(frontier) == 1:
                return True
            picks = not is_cast(last) and (_moves(last) or operator_of(last).kind is Kind.CHOICE)
            if last in self._leaves or (dtype_held(last) in NARROW and not picks):
                return False
            was_met = was_met or last is largest
            frontier.remove(last)
            frontier.update(read for read in self._reads(last) if read in self._active)
        return False

    def _argument(self, arg: Any, is_rounded: bool) -> Any:
        """``is_rounded``: as its dtype holds it."""
        if isinstance(arg, Node):
            held = value_of(arg)
            if is_symbolic(held):
                number, name = self.binding.number(held), str(self.binding.meaning(held))
                return Abstract(number, name) if self.binding.varies(held) else number
            value, dtype = self._values[arg], self._pending.get(arg)
            if not is_rounded or dtype is None:
                return value
            return field.function(f"as {dtype} holds it", operators.real(value))
        if isinstance(arg, (list, tuple)):
            return [self._argument(item, is_rounded) for item in arg]
        return arg

    def _parts(self, node: Node, args: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """The sizes of each of several results, where all of them are tensors."""
        held = node.meta["val"]
        if not isinstance(held, (tuple, list)) or not all(
            isinstance(part, torch.Tensor) for part in held
        ):
            return ()
        return tuple(self._after(node, part, args) for part in held)

    def _after(self, node: Node, held: torch.Tensor, args: Sequence[Any]) -> tuple[int, ...]:
        """A result's sizes in this run."""
        source = node.args[0] if node.args else None
        full = self.binding.shape(held.shape)
        if self.shrink is None or (node.all_input_nodes and not self._has_fewer(node)):
            return full
        if isinstance(source, Node) and isinstance(args[0], (Num, Complex)):
            before = self.binding.shape_of(source)
            if "expand" in str(node.target):
                return self.shrink.expanded(args[0].shape, before, full)
            if operator_of(node).reshape and len(args[0].shape) == len(before):
                return self.shrink.viewed(args[0].shape, before, full)
        return self.short(full)

    def _has_fewer(self, node: Node) -> bool:
        """Does it read fewer tokens than the graph has?"""
        pairs = ((self._values.get(read), read.meta["val"]) for read in node.all_input_nodes)
        return any(
            isinstance(value, (Num, Complex)) and value.shape != self.binding.shape(held.shape)
            for value, held in pairs
        )

    def short(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes with fewer tokens, which no last axis of several holds."""
        if self.shrink is None:
            return full
        return self.shrink.rows(full) if len(full) > 1 else self.shrink.lead(full)

    def _varies(self, node: Node, name: str, axis: int, after: tuple[int, ...] | None) -> bool:
        """Is this axis of an argument (of the result) shorter in this run than it may be?"""
        given = argument(node, name) if name else node
        source = given if given is node or dtype_held(given) is not None else _first_tensor(node)
        sizes = shape_of(source) if source is not None else ()
        if not -len(sizes) <= axis < len(sizes):
            return False
        if self.binding.varies(sizes[axis]):
            return True
        now = after if source is node or source is None else self._values[source].shape
        return now is not None and len(now) == len(sizes) and now[axis] != sizes[axis]

    def _keeps(self, node: Node, axis: int) -> bool:
        source = node.args[0].meta["val"]  # type: ignore[union-attr]
        return self.binding.same(source.shape[axis], shape_of(node)[axis])


_OF_FLOAT16 = (torch.float16, torch.complex32)


def _in_float16(found: Any) -> Any:
    if isinstance(found, (list, tuple)):
        return [_in_float16(part) for part in found]
    if isinstance(found, Complex):
        return Complex(_in_float16(found.real), _in_float16(found.imag))
    return field.function("in float16", found) if isinstance(found, Num) else found


_BESIDE_X = ("", "slots")  # roles of leaves
_ARITHMETIC = frozenset(("added", "multiplied", "quotient", "power", "root"))


def _rounds_nothing(given: Any) -> bool:
    """Is it a factor that is 0, or a power of two?"""
    return isinstance(given, (int, float)) and abs(math.frexp(given)[0]) in (0, 0.5)


def _moves(node: Node) -> bool:
    """Are its elements those of what it reads, perhaps with another sign?"""
    operator = operator_of(node)
    kinds = (Kind.MOVEMENT, Kind.GATHER, Kind.WRITER)
    return operator.kind in kinds or operator.row.word == "neg"


def _is_float(node: Node) -> bool:
    dtype = dtype_held(node)
    return dtype is not None and dtype.is_floating_point


def _is_exact(found: Any, dtype: torch.dtype) -> bool:
    """Is it made of a number that the dtype has, or of small integers, which every dtype has?"""
    if not isinstance(found, Num) or found.cells is not None:
        return False
    value = found.past
    if isinstance(value, float) and torch.tensor(value, dtype=dtype).item() == value:
        return True
    is_small = (found.re <= _SMALL) | (found.re >= field.P - _SMALL)
    return bool(is_small.all()) and not bool(field.imaginary(found).any())


def _is_literal(call: operators.Call) -> bool:
    """Is it made of literal integers alone?"""
    values = [item for item in call.given.values() if isinstance(item, (Num, Complex, Abstract))]
    return all(isinstance(item, Num) and item.ints is not None for item in values)


def _is_of_a_norm(value: Any) -> bool:
    """Is it the mean square of the rows of a norm of the kernel's, a whole number times that, or
    the root of either?
    """
    if not isinstance(value, Num):
        return False
    with field.untraced():
        powers = value, value * value
        alike = (mean for mean in field.here().means if mean.re.numel() == value.re.numel())
        return any(
            field.is_whole_times(power, mean, _MOST_COLUMNS) for mean in alike for power in powers
        )


def _are_small(found: Any) -> bool:
    """Are they literal integers which every float has?"""
    ints = found.ints if isinstance(found, Num) else None
    return ints is not None and bool((ints.abs() <= 256).all())


def dtype_held(given: Any) -> torch.dtype | None:
    """That of a node's tensor, or of the first of its tensors."""
    held = value_of(given) if isinstance(given, Node) else None
    held = held[0] if isinstance(held, (list, tuple)) and held else held
    return held.dtype if isinstance(held, torch.Tensor) else None


def _first_tensor(node: Node) -> Node | None:
    """The first argument, where it is a tensor; of a list the first in it."""
    arg = node.args[0] if node.args else None
    arg = arg[0] if isinstance(arg, (list, tuple)) and arg else arg
    return arg if isinstance(arg, Node) and isinstance(value_of(arg), torch.Tensor) else None


def _complex(values: torch.Tensor) -> Complex:
    return Complex(field.exact(values.real), field.exact(values.imag))


def is_same(a: Value, b: Value) -> bool:
    """Are they of one shape, and equal in each element?"""
    if isinstance(a, Complex) and isinstance(b, Complex):
        return is_same(a.real, b.real) and is_same(a.imag, b.imag)
    return isinstance(a, Num) and isinstance(b, Num) and a.shape == b.shape and field.equal(a, b)
