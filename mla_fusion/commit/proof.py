"""The proof of a plan: its region and its call, run at random points of the field, give the same
values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.commit.region import Region
from mla_fusion.commit.token_counts import with_room
from mla_fusion.compat import OpOverload
from mla_fusion.emit import results as of_call
from mla_fusion.emit import rows, targets
from mla_fusion.fx.build import Recipe, TensorBuilder
from mla_fusion.fx.kinds import Kind, argument, is_getitem, is_reshape, kind_of, word
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import reached
from mla_fusion.operators.known import DIAGONALS, SELECTIONS, dtype_of, shape_of, value_of
from mla_fusion.plan.plan import Plan
from mla_fusion.prove import field, kernels, operators
from mla_fusion.prove.evaluate import OF_MODEL, POINTS, UNKNOWN, Evaluation, Unproved, is_same
from mla_fusion.prove.field import Num, Point, Undecided
from mla_fusion.prove.kernels import Written
from mla_fusion.prove.operators import real
from mla_fusion.prove.trace import VERSION, Trace
from mla_fusion.report.rejection import Refuse
from mla_fusion.report.report import Shown

MOST_POINTS = 60  # until both squares and others are met among what the kernel takes roots of
# more than the degree of any identity that is tested, roots and quotients multiplied out
DEGREE = 10_000
_REGROUP = frozenset(("repeat", "tile", "repeat_interleave")) | DIAGONALS
_CODES = torch.uint8  # in which a plan holds scales that it reads as powers of two, or gives out
# caches, by the key operator's names
_OF_OPERATOR = {"kv_cache": "ckv_cache", "kr_cache": "k_cache"}
# elements of a result up to which all tokens are drawn where fewer do not fit
_ALL_TOKENS = 1 << 22
_SMALL = 1 / 16  # a factor of rows from which on they are as far from a floor as normed rows are


def _unproved(detail: str, *nodes: Node) -> Refuse:
    return Refuse("proof.differs", detail.partition("\n")[0], nodes)


def prove(view: View, plan: Plan, region: Region, half_rows: bool = False) -> Shown:
    """What was shown, for the report. Raises ``Refuse("proof.differs")`` where the call gives other
    values.

    half_rows  the caller chose ``kr_layout="half"``: rotated values are compared in the kernel's
               order
    """
    mixed = _mixed(view, plan, region)
    run = _Run(with_room(view, plan, region), plan, region, half_rows)
    if mixed is not None:
        if plan.candidate.shrink is None or not run.is_small:
            raise mixed
        run.at.shrink = None  # then all of its tokens are drawn
    try:
        count = run.compare_at_all()
    except Refuse:
        run.floors = any(view.steps.floored(node) for node in region.nodes)
        # the call joins what the region multiplies apart
        run.read_off, run.at.draws_weights = True, run.has_mixed
        if run.is_small:
            # sizes of fewer tokens may not fit: a weight spread over the sequences
            run.at.shrink = None
        count = run.compare_at_all()
    run.keep_inputs()
    wrong = (DEGREE / field.P) ** POINTS
    text = (
        f"proved in exact arithmetic: {count:,} values at {POINTS} points, wrong by a chance below "
        f"{wrong:.0e}"
    )
    return Shown(text, run.certificate)


def _mixed(view: View, plan: Plan, region: Region) -> Refuse | None:
    """Why what holds at a few tokens may not hold at others: a step between x and what the call
    replaces takes an axis of tokens that is evaluated shorter than it is for another.
    """
    tokens, leaves = Tokens(plan.candidate.shrink, view.binding.meaning), region.leaves
    made = {leaf for leaf in leaves if leaves[leaf] == "x"}
    xs = [x for x in (plan.candidate.down.origin, *made) if _is_tensor(x)]
    # as they are before any are merged: by sequence and place
    lead = max((plan.lead, *(shape_of(x)[:-1] for x in xs)), key=len)
    for x in xs:
        tokens.start(x, lead, range(len(shape_of(x)) - 1))
    if not tokens:
        return None
    of_model = {leaf for leaf in leaves if leaves[leaf] in OF_MODEL}
    tokens.start_outside(leaf for leaf in leaves if leaf not in of_model and _is_tensor(leaf))
    for node in region.nodes:
        if node in leaves:
            continue
        tokens.follow([node])
        if node.all_input_nodes and of_model.issuperset(node.all_input_nodes):
            of_model.add(node)
            continue
        is_made = not made.isdisjoint(node.all_input_nodes)
        if is_made:
            made.add(node)
            if _regroups(node) and not (tokens.knows(node) or tokens.broken(node)):
                return Refuse("tokens.mixed", f"{node.name} has no axis of tokens", (node,))
        # the shape of what begins here, or of rows of a table, says where its tokens stand
        if _begins(node) or (
            not is_made and tokens.broken(node) and not _is_regrouped(tokens, node)
        ):
            tokens.start_again(node, is_broken=not is_made)
    for claimed in _claimed(plan):
        for node in claimed:
            broken = tokens.broken(node)
            if broken is not None:
                return Refuse("tokens.mixed", broken.reason, (broken.node, node))
            if node in made and not tokens.knows(node):
                return Refuse("tokens.mixed", f"{node.name} has no axis of tokens", (node,))
    return None


def _claimed(plan: Plan) -> Iterator[Sequence[Node]]:
    """What the proof compares: new values, and rows of caches, or what an operator that writes
    caches makes them of.
    """
    for item in plan.replacements:
        if item.output not in _OF_OPERATOR:
            yield (item.node,)
        elif plan.caches.held and not plan.caches.rows:
            operator = item.node.args[0] if is_getitem(item.node) else item.node
            assert isinstance(operator, Node)
            yield [argument(operator, name) for name in ("kv", "cos", "sin")]
    yield plan.caches.rows


def _is_tensor(node: Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _begins(node: Node) -> bool:
    """Is it a part of something, rows of it, or counted?"""
    return word(node) in SELECTIONS or kind_of(node) is Kind.GATHER or word(node) == "arange"


def _is_regrouped(tokens: Tokens, node: Node) -> bool:
    broken = tokens.broken(node)
    return broken is not None and _regroups(broken.node)


def _regroups(node: Node) -> bool:
    return is_reshape(node) or word(node) in _REGROUP


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
    """One region at its sizes."""

    def __init__(self, view: View, plan: Plan, region: Region, half_rows: bool) -> None:
        self.plan, self.region, self.half_rows = plan, region, half_rows
        self.at = Evaluation(view, region.leaves, plan.candidate.shrink, region.twins)
        self.certificate: dict[str, Any] | None = None
        self.read_off = self.floors = self.has_mixed = False

    @property
    def is_small(self) -> bool:
        """May all its tokens be drawn? (Of a cache only the rows that are written are.)"""
        shapes = (
            self.at.binding.shape_of(item.node)
            for item in self.plan.replacements
            if item.output not in _OF_OPERATOR
        )
        return all(math.prod(shape) <= _ALL_TOKENS for shape in shapes)

    def compare_at_all(self) -> int:
        """How many values are equal at each point. Raises ``Refuse`` where one is not."""
        count, times, draw = 0, list[Fraction](), 0
        signs: dict[int, set[bool]] = {}  # of what the kernel takes roots of, by which root
        while draw < POINTS or (draw < MOST_POINTS and any(len(of) < 2 for of in signs.values())):
            # at the first, what is evaluated is written down
            trace = None if draw else Trace()
            half = self.plan.candidate.dtype == torch.float16
            point = Point(
                draw, read_off=self.read_off, floors=self.floors, float16=half, trace=trace
            )
            try:
                with field.at(point):
                    count = self._compare()
            finally:
                self.has_mixed |= point.has_mixed
            if draw and point.times != times:
                raise _unproved("a root is one of the kernel's at one random point alone")
            for place, root in enumerate(point.roots):
                signs.setdefault(place, set()).update(field.are_squares(root))
            times, draw = point.times, draw + 1
        if any(len(of) < 2 for of in signs.values()):
            raise _unproved("what the kernel takes a root of is a square: of either sign")
        return count

    def keep_inputs(self) -> None:
        """Raises ``Refuse`` where a step holds nothing of a float input that what it reads is made
        of: over the real numbers that cancels, and rounding decides what is left in a dtype.
        """
        for leaf, role in self.region.leaves.items():
            value = value_of(leaf)
            if role or leaf in self.region.reads or not isinstance(value, torch.Tensor):
                continue
            if value.is_floating_point():
                self._keep(leaf)

    def _keep(self, leaf: Node) -> None:
        inside = set(self.region.nodes)
        made = {*reached([leaf], lambda node: filter(inside.__contains__, node.users))}
        held = []
        for anew in (None, leaf):
            self.at.clear()
            self.at.anew = anew
            with field.at(Point(float16=self.plan.candidate.dtype == torch.float16)):
                held.append({node: self.value(node) for node in made})
        self.at.anew = None
        changed = {node for node in made if not is_same(held[0][node], held[1][node])}
        for node in sorted(made - changed):
            value = held[0][node]
            if isinstance(value, Num) and field.is_zero(value):  # times 0: it is exactly that
                continue
            if kind_of(node) is Kind.ANALYTIC and changed.intersection(node.all_input_nodes):
                raise _unproved(
                    f"of {leaf.name} rounding decides what is left at {node.name}", node
                )

    def _compare(self) -> int:
        self.at.clear()
        reads = {node: self.value(node) for node in self.region.reads}
        builder = _FieldBuilder(self, reads)
        try:
            results = targets.call_kernel(builder, self.plan)
        except Undecided as error:
            raise _unproved(f"the call: {error}", *self.plan.candidate.nodes) from error
        if field.here().early:  # by what the call is given, a norm that adds the residual say
            self.at.clear()
        count, claims = 0, []
        for claim in self._claims(builder, results):
            if not is_same(claim.value, claim.result):
                raise self._differs(claim.node)
            count += math.prod(claim.value.shape)
            claims.append(claim)
        trace = field.here().trace
        if trace is not None and targets.target_of(self.plan).exact is None:
            self.certificate = self._certificate(trace, builder, claims)
        return count

    def _differs(self, node: Node) -> Refuse:
        """What a step makes of x, where no rule says what that is, comes first."""
        leaves = self.region.leaves
        above = reached([node], lambda step: () if step in leaves else step.all_input_nodes)
        unknown = [step for step in above if step not in leaves and self.at.is_function_of_x(step)]
        names = " and ".join(f"{step.name} ({step.target})" for step in unknown)
        why = f"; of {names} the proof knows no more than that it is a function" if names else ""
        return _unproved(f"{node.name} is not what the kernel gives{why}", *unknown, node)

    def value(self, node: Node) -> Any:
        """Raises Refuse where it, or what it is made of, has none."""
        try:
            return self.at.value(node)
        except Unproved as error:
            raise _unproved(*error.args) from error

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
            if isinstance(item, Num) and 0 not in item.shape and not kernels.PLACES.search(name)
        }
        sides = [side for claim in claims for side in (claim.value, claim.result)]
        found = [trace.number(item) for item in (*values.values(), *sides)]
        known = [number for number in found if number is not None]
        if len(known) < len(found):
            return None
        entries, numbers = trace.certificate(known)
        places = iter([numbers[number] for number in known])
        return {
            "version": VERSION,
            "arguments": {name: next(places) for name in values},
            "exact": {
                name: kernels.constant(name, item).written
                for name, item in call.given.items()
                if isinstance(item, float)
            },
            "tokens": [str(size) for size in self.plan.lead],
            "claims": [
                {
                    "output": claim.output,
                    "place": claim.place,
                    "value": next(places),
                    "is": next(places),
                }
                for claim in claims
            ],
            "values": entries,
        }

    def _claims(self, builder: _FieldBuilder, results: dict[str, Any]) -> Iterator[_Claim]:
        caches = self.plan.caches
        for place, item in enumerate(self.plan.replacements):
            result = results[item.output]
            if self.half_rows and item.output in ("query_rope", "k_pe"):
                result = rows.interleave(builder, result)
            if item.output in ("kv_cache", "kr_cache"):
                if caches.held and not caches.rows:  # the model's own operator
                    yield _Claim(
                        item.node, item.output, place, _rows(self.value(item.node)), _rows(result)
                    )
                continue
            try:
                arranged = of_call.arrange(builder, item, result)
            except Undecided as error:
                raise _unproved(f"{item.output}: {error}", item.node) from error
            yield _Claim(item.node, item.output, place, self.value(item.node), arranged)
        for node, (name, _, _) in zip(caches.rows, caches.held, strict=False):
            got = _rows(results[name])
            if self.half_rows and name == "kr_cache":
                got = rows.interleave(builder, got)
            want = real(self.value(node))
            yield _Claim(node, name, None, want.reshape(-1, want.shape[-1]), got)


@contextmanager
def _of_rules() -> Iterator[None]:
    """What a rule does not expect is no proof. Anything else that is raised is a defect."""
    try:
        yield
    except UNKNOWN as error:
        raise Undecided(str(error)) from error


class _FieldBuilder(TensorBuilder):
    """Makes the plan's call on elements of the field. Raises Undecided."""

    def __init__(self, run: _Run, values: dict[Node, Any]) -> None:
        super().__init__(values, run.at.binding)
        self._run = run
        self.kernel: operators.Call | None = None
        self._held = {
            _OF_OPERATOR[name]: dtype_of(cache) for name, cache, _ in run.plan.caches.held
        }

    def value(self, node: Node) -> Any:
        return self._run.value(node)

    def cache(self, node: Node, shape: Sequence[Any]) -> Any:
        return field.random(f"cache {node.name}", (1,))

    def target(self, value: Any) -> Any:
        return value

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        with _of_rules():
            return self._called(op, *args, **kwargs)

    def _called(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(op, OpOverload):
            return op(*args, **kwargs)
        source = _CODES if op is torch.ops.aten.view.dtype else None
        call = operators.called(op, args, kwargs, source=source, holds=self._held.get)
        target = targets.target_of(self._run.plan)
        if not target.is_called_by(op):
            return operators.run(call)
        self.kernel = call
        point = field.here()
        met = len(point.maxima)
        with field.untraced():
            results = target.compute(call)
        if all(call[name] is None or call[name] >= _SMALL for name in ("qc_qr_scale", "kc_scale")):
            point.of_kernel += point.maxima[met:]
        for name, value in zip(target.operator.results, results, strict=True):
            field.leaf(name, value.rows if isinstance(value, Written) else value, "result")
        return results if len(results) > 1 else results[0]  # as torch gives it

    def sizes(self, shape: Sequence[Any], of: Any = None) -> list[int]:
        sizes = self._binding.shape(shape)
        return list(self._run.at.short(sizes) if len(sizes) > 1 else sizes)

    def reshape(self, value: Any, shape: Sequence[Any]) -> Any:
        sizes = self._binding.shape(shape)
        if -1 not in sizes and math.prod(sizes) != math.prod(value.shape):
            sizes = self._run.at.short(sizes)
        with _of_rules():
            return value if value.shape == sizes else value.reshape(sizes)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        return value

    def dtype(self, value: Any) -> torch.dtype:
        return torch.bfloat16

    def new_rows(self, cache: Any, shape: Sequence[Any], recipe: Recipe) -> Any:
        return self.reshape(_rows(cache), shape)

    def constant(self, numbers: Sequence[int], like: Any) -> Any:
        return field.integers(torch.tensor(list(numbers), dtype=torch.int64))


def _rows(value: Any) -> Num:
    if not isinstance(value, Written):
        raise Undecided("a cache that no known operator has written")
    return value.rows
