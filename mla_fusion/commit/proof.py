"""The proof of a plan: its region and its call, run at random points of the field, give the same
values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.commit.counted import NARROW, Counted, past_rounding
from mla_fusion.commit.region import Region, same_attribute
from mla_fusion.commit.token_counts import with_room
from mla_fusion.compat import OpOverload
from mla_fusion.emit import results as of_call
from mla_fusion.emit import rows, targets
from mla_fusion.fx.build import Recipe, TensorBuilder
from mla_fusion.fx.kinds import (
    Kind,
    argument,
    attribute,
    is_cast,
    is_getitem,
    is_literal,
    is_reshape,
    op_name,
    operator_of,
)
from mla_fusion.fx.sizes import is_symbolic
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, views_and_casts
from mla_fusion.plan.plan import InPlace, Plan
from mla_fusion.prove import field, kernels, operators
from mla_fusion.prove.cells import Cells
from mla_fusion.prove.field import Complex, Num, Point, Undecided, Value
from mla_fusion.prove.kernels import Written
from mla_fusion.prove.operators import Abstract, real
from mla_fusion.prove.trace import VERSION, Trace
from mla_fusion.report.rejection import Refuse
from mla_fusion.report.report import Shown

POINTS, MOST_POINTS = 3, 60
BITS = 53  # signs of roots that are seen, where more than one is possible
# more than the degree of any identity that is tested, roots and quotients multiplied out
DEGREE = 10_000
_REPEATS = ("aten::repeat", "aten::tile", "aten::repeat_interleave")
_CODES = torch.uint8  # in which a plan holds scales that it reads as powers of two, or gives out
# caches, by the key operator's names
_OF_OPERATOR = {"kv_cache": "ckv_cache", "kr_cache": "k_cache"}
# elements of a result up to which all tokens are drawn where fewer do not fit
_ALL_TOKENS = 1 << 22
_MOST_COLUMNS = 1 << 16
_SMALL = 1 / 16  # a factor of rows from which on they are as far from a floor as normed rows are
_FEW = 8  # elements of an input for each of which both signs are tried
_UNDRAWN = ("weight", "cache")  # large, and mostly only moved about
_OF_MODEL = frozenset(("weight", "gamma", "scale", "cache", "constant"))  # leaves without tokens


# Whatever a rule does not expect (a shape, an argument, an operator) is no proof.
_UNKNOWN = (
    Undecided,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    AttributeError,
)


def _unproved(detail: str, *nodes: Node) -> Refuse:
    return Refuse("proof.differs", detail.partition("\n")[0], nodes)


def prove(view: View, plan: Plan, region: Region, half_rows: bool = False) -> Shown:
    """What was shown, for the report. Raises ``Refuse("proof.differs")`` where the call gives other
    values.

    half_rows  the caller chose ``kr_layout="half"``: rotated values are compared in the kernel's
               order
    """
    _keep_tokens_apart(view, plan, region)
    run = _Run(with_room(view, plan, region), plan, region, half_rows)
    try:
        count = run.compare_at_all()
    except Refuse:
        run.floors = any(view.steps.floored(node) for node in region.nodes)
        # the call joins what the region multiplies apart
        run.read_off, run.draws_weights = True, run.has_mixed
        if run.is_small:
            # sizes of fewer tokens may not fit: a weight spread over the sequences
            run.shrink = None
        count = run.compare_at_all()
    wrong = (DEGREE / field.P) ** run.points + (
        0.5 ** (run.points * run.signs) if run.signs < BITS else 0
    )
    text = (
        f"proved in exact arithmetic: {count:,} values at {run.points} points, wrong by a chance "
        f"below {wrong:.0e}"
    )
    return Shown(text, run.certificate)


def _keep_tokens_apart(view: View, plan: Plan, region: Region) -> None:
    """Raises ``Refuse("tokens.mixed")`` where a step between x and what the call replaces takes a
    symbolic axis of tokens for another: what holds at one size of it may not hold at others.
    """
    tokens, leaves = Tokens(None, view.binding.meaning), region.leaves
    for leaf in leaves:
        if leaves[leaf] == "x" and isinstance(leaf.meta.get("val"), torch.Tensor):
            tokens.start(leaf, plan.lead, range(leaf.meta["val"].dim() - 1))
    if not tokens:
        return
    tokens.start_outside(leaf for leaf in leaves if isinstance(leaf.meta["val"], torch.Tensor))
    tokens.follow([node for node in region.nodes if node not in leaves])
    rows = plan.caches.rows if isinstance(plan.caches, InPlace) else ()
    new = [item.node for item in plan.replacements if item.output not in _OF_OPERATOR]
    for node in (*new, *rows):
        broken = tokens.broken(node)
        if broken is not None and _regroups(broken.node):
            raise Refuse("tokens.mixed", broken.reason, (broken.node, node))


def _regroups(node: Node) -> bool:
    return is_reshape(node) or op_name(node) in _REPEATS


@dataclass(frozen=True)
class _Claim:
    """A node, its value, and what of the kernel's output it is; ``place`` among the plan's
    replacements.
    """

    node: Node
    output: str
    place: int | None
    value: Any
    result: Any


class _Run:
    """One region at its sizes.

    signs   at a point, how many signs of a root are seen that the kernel does not draw itself
    points  at which values have been compared
    """

    def __init__(self, view: View, plan: Plan, region: Region, half_rows: bool) -> None:
        self.view, self.plan, self.region, self.half_rows = view, plan, region, half_rows
        self.binding, self.shrink = view.binding, plan.candidate.shrink
        self._values: dict[Node, Any] = {}
        self._rounded: set[Node] = set()
        self._counted = Counted(region.leaves, _OF_MODEL)
        self.draws_weights = False
        self._cells: dict[object, Cells] = {}
        self._taken = 0
        self._few: dict[str, int] = {}
        self._roots: list[Num] = []
        self.certificate: dict[str, Any] | None = None
        self.read_off = self.floors = self.has_mixed = False
        self.points, self.signs = 0, BITS

    @property
    def is_small(self) -> bool:
        """May all its tokens be drawn?"""
        shapes = (
            self.binding.shape(item.node.meta["val"].shape) for item in self.plan.replacements
        )
        return all(math.prod(shape) <= _ALL_TOKENS for shape in shapes)

    def compare_at_all(self) -> int:
        """How many values are equal at each point. Raises ``Refuse`` where one is not."""
        count, self.points, self.signs = 0, 0, BITS
        while self.points < min(MOST_POINTS, max(POINTS, -(-BITS // self.signs))):
            # at the first, what is evaluated is written down
            trace = None if self.points else Trace()
            half = self.plan.candidate.dtype == torch.float16
            point = Point(
                self.points, read_off=self.read_off, floors=self.floors, float16=half, trace=trace
            )
            try:
                with field.at(point):
                    count = self._compare()
            finally:
                self.has_mixed |= point.has_mixed
            unknown = [
                a for a in self._roots if not any(field.is_square_times(a, b) for b in point.roots)
            ]
            self.signs = min([self.signs, *(root.re.numel() for root in unknown)])
            self.points += 1
        return count

    def _compare(self) -> int:
        self._values.clear()
        self._rounded.clear()
        self._roots.clear()
        reads = {node: self.value(node) for node in self.region.reads}
        builder = _FieldBuilder(self, reads)
        try:
            results = targets.call_kernel(builder, self.plan)
        except _UNKNOWN as error:
            raise _unproved(f"the call: {error}", *self.plan.candidate.nodes) from error
        count, claims = 0, []
        for claim in self._claims(builder, results):
            if not _is_same(claim.value, claim.result):
                raise _unproved(f"{claim.node.name} is not what the kernel gives", claim.node)
            count += math.prod(claim.value.shape)
            claims.append(claim)
        trace = field.here().trace
        if trace is not None:
            self.certificate = self._certificate(trace, builder, claims)
        return count

    def _certificate(
        self, trace: Trace, builder: _FieldBuilder, claims: Sequence[_Claim]
    ) -> dict[str, Any] | None:
        """What was evaluated, so that it can be checked elsewhere; None where something was done
        that it cannot say.
        """
        call = builder.kernel
        assert call is not None
        values = {
            name: item
            for name, item in call.given.items()
            if isinstance(item, Num) and 0 not in item.shape
        }
        sides = [side for claim in claims for side in (claim.value, claim.result)]
        found = [trace.number(item) for item in (*values.values(), *sides)]
        known = [number for number in found if number is not None]
        if len(known) < len(found):
            return None
        entries, numbers = trace.certificate(known)
        places = iter([numbers[number] for number in known])
        arguments = {name: next(places) for name in values}
        others = {
            name: item for name, item in call.given.items() if not isinstance(item, (Num, NoneType))
        }
        return {
            "version": VERSION,
            "call": {
                "operator": targets.target_of(self.plan).operator.name.removesuffix("_functional"),
                "arguments": arguments,
                "attributes": {name: kernels.written(name, item) for name, item in others.items()},
            },
            "replaced": [item.output for item in self.plan.replacements],
            "claims": [
                {
                    "output": claim.output,
                    "place": claim.place,
                    "value": next(places),
                    "is": next(places),
                }
                for claim in claims
            ],
            "assumptions": list(self.plan.assumptions),
            "values": entries,
        }

    def _claims(self, builder: _FieldBuilder, results: dict[str, Any]) -> Iterator[_Claim]:
        caches = self.plan.caches
        for place, item in enumerate(self.plan.replacements):
            result = results[item.output]
            if self.half_rows and item.output in ("query_rope", "k_pe"):
                result = rows.interleave(builder, result)
            if item.output in ("kv_cache", "kr_cache"):
                if isinstance(caches, InPlace) and not caches.rows:  # the model's own operator
                    yield _Claim(
                        item.node, item.output, place, _rows(self.value(item.node)), _rows(result)
                    )
                continue
            try:
                arranged = of_call.arrange(builder, item, result)
            except _UNKNOWN as error:
                raise _unproved(f"{item.output}: {error}", item.node) from error
            yield _Claim(item.node, item.output, place, self.value(item.node), arranged)
        if isinstance(caches, InPlace):
            for node, (name, _, _) in zip(caches.rows, caches.held, strict=False):
                got = _rows(results[name])
                if self.half_rows and name == "kr_cache":
                    got = rows.interleave(builder, got)
                want = real(self.value(node))
                yield _Claim(
                    node, name, None, want.moved(lambda part: part.reshape(-1, part.shape[-1])), got
                )

    # -- nodes

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
        twin = self.region.twins.get(node)
        if twin is not None:
            return (twin,)
        if node in self.region.leaves or node.op != "call_function":
            return ()
        return [read for read in node.all_input_nodes if not is_symbolic(read.meta.get("val"))]

    def _evaluate(self, node: Node) -> Any:
        twin = self.region.twins.get(node)
        if twin is not None:
            value, shape = self._values[twin], self._shape(node.meta["val"])
            return value.moved(lambda part: part.reshape(shape))
        role = self.region.leaves.get(node)
        if role is not None or node.op != "call_function":
            return self._leaf(node, role or "")
        try:
            return self._call(node)
        except _UNKNOWN as error:
            raise _unproved(f"{node.name} ({node.target}): {error}", node) from error

    def _leaf(self, node: Node, role: str) -> Any:
        held = node.meta.get("val")
        if isinstance(held, (tuple, list)):
            return [
                self._drawn(f"{same_attribute(node)}[{place}]", part)
                for place, part in enumerate(held)
            ]
        if isinstance(held, (int, float, bool)):
            return held
        if not isinstance(held, torch.Tensor):
            raise _unproved(f"{node.name} is no tensor", node)
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
            return field.leaf(str(same_attribute(node)), Num(None, cells=known), "weight")
        if role.startswith("one_"):  # each element is the same number
            shape, name = self.binding.shape(held.shape), str(same_attribute(node))
            return self._drawn(name, held.new_empty(1), False).moved(
                lambda part: part.expand(shape)
            )
        return self._drawn(str(same_attribute(node)), held, role not in _OF_MODEL)

    def _is_small(self, literal: Any, held: torch.Tensor) -> bool:
        """Can its numbers be taken as they are?"""
        if not isinstance(literal, torch.Tensor) or literal.is_meta or literal.numel() > 1 << 16:
            return False
        return self._shape(held) == tuple(literal.shape)

    def _drawn(self, name: str, held: torch.Tensor, has_tokens: bool = True) -> Value:
        shape = self._shape(held) if has_tokens else self.binding.shape(held.shape)
        if not held.is_complex() and math.prod(shape) <= _FEW:
            first = self._few.setdefault(name, sum(map(len, self._few)))
            return field.of_both_signs(name, shape, first, POINTS)
        if held.is_complex():
            return Complex(field.random(f"{name} real", shape), field.random(f"{name} imag", shape))
        return field.random(name, shape)

    def _shape(self, held: torch.Tensor) -> tuple[int, ...]:
        return self.short(self.binding.shape(held.shape))

    def _call(self, node: Node) -> Any:
        if is_getitem(node):
            source, place = node.args
            return self._values[source][place]  # type: ignore[index]
        kept = self.view.steps.kept(node)
        if kept is not None:
            return self._values[kept]
        floored = self.view.steps.floored(node)
        if floored is not None and _is_of_a_norm(self._values[floored]):
            return self._values[floored]
        target = operator_of(node).target
        if not isinstance(target, OpOverload):
            raise Undecided(f"{node.target} has no field run")
        args, kwargs = ([self._argument(arg) for arg in node.args], dict(node.kwargs))
        kwargs = {name: self._argument(arg) for name, arg in kwargs.items()}
        held, source = node.meta["val"], _first_tensor(node)
        after = self._after(node, args) if isinstance(held, torch.Tensor) else None
        call = operators.called(
            target,
            args,
            kwargs,
            shape=after,
            dtype=held.dtype if isinstance(held, torch.Tensor) else None,
            varies=lambda name, axis: self._varies(node, name, axis, after),
            keeps=lambda axis: self._keeps(node, axis),
            source=source.meta["val"].dtype if source is not None else None,
            rounded=any(read in self._rounded for read in node.all_input_nodes),
            masks=any(operators.is_mask(read.meta["val"]) for read in node.all_input_nodes),
            holds=lambda name: _dtype(argument(node, name)),
        )
        roots, means = field.here().roots, field.here().means
        before, of_norms = len(roots), len(means)
        if self._counted.leaves_the_field(node):
            found: Any = operators.pointwise(call)
        else:
            found = self._counted.as_held(node, call, operators.run(call))
        if call.rounded or node in self._counted:
            found = past_rounding(call, found)
        self._roots += roots[before:]
        del roots[before:], means[of_norms:]  # what is left is the kernel's
        if self._rounds(node, call):
            self._rounded.add(node)
        return found

    def _rounds(self, node: Node, call: operators.Call) -> bool:
        """Does it hold numbers that were rounded to a narrow dtype, and that no function has read
        since?
        """
        held = node.meta["val"]
        if not isinstance(held, torch.Tensor) or not (
            held.is_floating_point() or held.is_complex()
        ):
            return False
        if is_cast(node) and held.dtype in NARROW and not self._is_narrow(node.args[0]):  # type: ignore[arg-type]
            return True
        return call.rounded and operator_of(node).kind in (Kind.MOVEMENT, Kind.ANALYTIC)

    def _is_narrow(self, node: Node) -> bool:
        """Does it hold the numbers of a narrow dtype, widened?"""
        return origin(node, views_and_casts).meta["val"].dtype in NARROW

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            held = arg.meta.get("val")
            if is_symbolic(held):
                number, name = self.binding.number(held), str(self.binding.meaning(held))
                return Abstract(number, name) if self.binding.varies(held) else number
            return self._values[arg]
        if isinstance(arg, (list, tuple)):
            return [self._argument(item) for item in arg]
        return arg

    def _after(self, node: Node, args: Sequence[Any]) -> tuple[int, ...]:
        """The result's sizes in this run."""
        held, source = node.meta["val"], node.args[0] if node.args else None
        full = self.binding.shape(held.shape)
        if self.shrink is None or (node.all_input_nodes and not self._has_fewer(node)):
            return full
        if isinstance(source, Node) and isinstance(args[0], (Num, Complex)):
            before = self.binding.shape(source.meta["val"].shape)
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
        source = given if given is node or _dtype(given) is not None else _first_tensor(node)
        sizes = source.meta["val"].shape if source is not None else ()
        if not -len(sizes) <= axis < len(sizes):
            return False
        if self.binding.varies(sizes[axis]):
            return True
        now = after if source is node or source is None else self._values[source].shape
        return now is not None and len(now) == len(sizes) and now[axis] != sizes[axis]

    def _keeps(self, node: Node, axis: int) -> bool:
        source = node.args[0].meta["val"]  # type: ignore[union-attr]
        return self.binding.same(source.shape[axis], node.meta["val"].shape[axis])


class _FieldBuilder(TensorBuilder):
    """Makes the plan's call on elements of the field."""

    def __init__(self, run: _Run, values: dict[Node, Any]) -> None:
        super().__init__(values, run.binding)
        self._run = run
        self.kernel: operators.Call | None = None
        caches = run.plan.caches.held if isinstance(run.plan.caches, InPlace) else ()
        self._held = {_OF_OPERATOR[name]: cache.meta["val"].dtype for name, cache, _ in caches}

    def value(self, node: Node) -> Any:
        return self._run.value(node)

    def cache(self, node: Node, shape: Sequence[Any]) -> Any:
        return field.random(f"cache {node.name}", (1,))

    def target(self, value: Any) -> Any:
        return value

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(op, OpOverload):
            return op(*args, **kwargs)
        source = _CODES if op is torch.ops.aten.view.dtype else None
        call = operators.called(op, args, kwargs, source=source, holds=self._held.get)
        if call.name not in kernels.RESULTS:
            return operators.run(call)
        self.kernel = call
        point = field.here()
        met = len(point.maxima)
        with field.untraced():
            results = operators.run(call)
        if all(call[name] is None or call[name] >= _SMALL for name in ("qc_qr_scale", "kc_scale")):
            point.of_kernel += point.maxima[met:]
        for name, value in zip(kernels.RESULTS[call.name], results, strict=True):
            field.leaf(name, value.rows if isinstance(value, Written) else value, "result")
        return results

    def sizes(self, shape: Sequence[Any]) -> list[int]:
        sizes = [self._binding.size(size) for size in shape]
        return list(self._run.short(tuple(sizes))) if len(sizes) > 1 else sizes

    def reshape(self, value: Any, shape: Sequence[Any]) -> Any:
        sizes = [self._binding.size(size) for size in shape]
        if -1 not in sizes and math.prod(sizes) != math.prod(value.shape):
            sizes = list(self._run.short(tuple(sizes)))
        return (
            value if list(value.shape) == sizes else value.moved(lambda part: part.reshape(sizes))
        )

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        return value

    def dtype(self, value: Any) -> torch.dtype:
        return torch.bfloat16

    def new_rows(self, cache: Any, shape: Sequence[Any], recipe: Recipe) -> Any:
        return self.reshape(_rows(cache), shape)

    def constant(self, numbers: Sequence[int], like: Any) -> Any:
        return field.integers(torch.tensor(list(numbers), dtype=torch.int64))


def _is_of_a_norm(value: Any) -> bool:
    """Is it the mean square of the rows of a norm of the kernel's, a whole number times that, or
    the root of either?
    """
    if not isinstance(value, Num):
        return False
    with field.untraced():
        powers = value, field.mul(value, value)
        alike = (mean for mean in field.here().means if mean.re.numel() == value.re.numel())
        return any(
            field.is_whole_times(power, mean, _MOST_COLUMNS) for mean in alike for power in powers
        )


def _dtype(given: Any) -> torch.dtype | None:
    held = given.meta.get("val") if isinstance(given, Node) else None
    return held.dtype if isinstance(held, torch.Tensor) else None


def _first_tensor(node: Node) -> Node | None:
    """The first argument, where it is a tensor; of a list the first in it."""
    arg = node.args[0] if node.args else None
    arg = arg[0] if isinstance(arg, (list, tuple)) and arg else arg
    return arg if isinstance(arg, Node) and isinstance(arg.meta.get("val"), torch.Tensor) else None


def _rows(value: Any) -> Num:
    if not isinstance(value, Written):
        raise Undecided("a cache that no known operator has written")
    return value.rows


def _complex(values: torch.Tensor) -> Complex:
    return Complex(field.exact(values.real), field.exact(values.imag))


def _is_same(a: Value, b: Value) -> bool:
    """Are they of one shape, and equal in each element?"""
    if isinstance(a, Complex) and isinstance(b, Complex):
        return _is_same(a.real, b.real) and _is_same(a.imag, b.imag)
    return isinstance(a, Num) and isinstance(b, Num) and a.shape == b.shape and field.equal(a, b)
