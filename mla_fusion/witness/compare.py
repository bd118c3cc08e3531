"""Does a rewritten graph give what the original graph gives?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.fx.kinds import MODEL_FLOATS, holds_integers
from mla_fusion.fx.sizes import Binding, has_symbols
from mla_fusion.operators.known import dtype_of, shape_of, value_of
from mla_fusion.report.rejection import Refuse
from mla_fusion.report.report import Figure
from mla_fusion.witness import sizes
from mla_fusion.witness.draws import CACHES, KINDS, WIDE, Draws
from mla_fusion.witness.interpreter import Unrunnable, cone_of, dependent
from mla_fusion.witness.pair import Pair, relative, squares
from mla_fusion.witness.side import Side

# Two bfloat16 evaluations of one prologue differ by 3e-3 to 6e-3 in relative L2 norm (one rounding
# more or less per step); a swapped pair, a wrong column or a wrong row differs by more than 1e-1.
TOLERANCE = 2e-2
# c_q rounded to bfloat16 or not before it is quantised: a few hundredths of the int8 values differ
# by one step.
TOLERANCE_QUANTISED = 4e-2
# Two evaluations in float64; float literals of a graph may be rounded to float32.
TOLERANCE_WIDE = 1e-6
# One row has as few as 64 elements, and a rounding of a large one weighs more in it.
OF_A_ROW = 2.5
# times what rounding can do to it, where a row of small numbers is made of large ones
_OF_ROUNDING = 6.0
_STEP, _JITTERS = 2.0**-8, 4
_SMALL_CACHE = 1 << 20  # elements up to which a cache is taken as it is
_LARGEST_CACHE = 1 << 28
_COSTLY = 256  # tokens from which one draw holds ordinary rows and rows with outliers side by side


@dataclass(frozen=True)
class Outcome:
    """What was compared, and how far values are from each other.

    verified  "verified", and what was not
    figures   of each pair: the largest distance of the new value from the original one, and that of
              both from float64
    compared  what was run, as text
    tokens    the counts of tokens that were run
    left_out  parts that were not compared
    """

    verified: str
    figures: tuple[Figure, ...]
    compared: str
    tokens: tuple[int, ...]
    left_out: tuple[str, ...] = ()


def compare(
    original: Graph,
    rewritten: GraphModule,
    pairs: Sequence[Pair],
    cut: Mapping[Node, Node],
    roles: Mapping[Node, str],
    *,
    rows: Any = None,
    block_size: Any = 1,
    binding: Binding | None = None,
    seed: int = 0,
) -> Outcome:
    """Run both graphs on drawn values, and compare each pair.

    cut         nodes of ``original`` whose values are drawn, with their copies in ``rewritten``.
                Placeholders stand for each other by position, attributes by name
    roles       of cut nodes ("x" where nothing is said), placeholders and attributes: ``draws``
                lists them
    rows        how many rows slots count, by default those of the smallest cache
    block_size  how many of them make a block, or a sequence
    binding     numbers for symbolic sizes

    Raises ``Refuse("verify.mismatch")`` where a new value differs by more than roundings can make.
    """
    given = original.find_nodes(op="placeholder")
    parts = dict.fromkeys(given, "") | dict.fromkeys(cut, "x") | dict(roles)
    new = dict(zip(rewritten.graph.find_nodes(op="placeholder"), given, strict=False))
    new |= {copy: node for node, copy in cut.items()}
    task = _Task(pairs, {node: node for node in (*given, *cut)}, new, parts, rows, block_size, seed)
    binding = sizes.bound(original) if binding is None else binding
    failed: Unrunnable | None = None
    made = list[_Run]()
    for step in sizes.STEPS:
        try:
            made.append(task.at(binding, step))
            break
        except Unrunnable as error:
            failed = failed or error
    if not made:
        assert failed is not None
        raise Refuse("verify.mismatch", str(failed), (failed.node,)) from failed
    for larger in task.larger(made[0].binding):
        try:
            made.append(task.at(larger, step))
            break
        except Unrunnable:  # the model itself does not take so many tokens
            continue
    return _summed_up(pairs, made)


def _summed_up(pairs: Sequence[Pair], made: Sequence[_Run]) -> Outcome:
    worst: dict[Pair, Figure] = {}
    for run in made:
        for pair, figure in run.figures.items():
            known = worst.setdefault(pair, figure)
            worst[pair] = figure if figure.relative > known.relative else known
    left_out = tuple(dict.fromkeys(pair.part for pair in pairs if pair not in worst))
    tokens = tuple(run.tokens for run in made)
    draws = sum(run.count for run in made)
    return Outcome(
        "verified" + (f" except {', '.join(left_out)}" if left_out else ""),
        tuple(replace(of, float64=made[0].errors.get(pair)) for pair, of in worst.items()),
        f"compared at T = {' and '.join(map(str, tokens))}, {_plural(draws, 'draw')}, "
        + _plural(len(worst), "output"),
        tokens,
        left_out,
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


@dataclass(frozen=True)
class _Task:
    """Two graphs, at any sizes."""

    pairs: Sequence[Pair]
    original: Mapping[Node, Node]
    new: Mapping[Node, Node]
    roles: Mapping[Node, str]
    rows: Any
    block_size: Any
    seed: int

    def sides(self, pairs: Sequence[Pair]) -> tuple[Side, Side]:
        before = Side([n for p in pairs for n in p.of_original], self.original, self.roles)
        return before, Side([n for p in pairs for n in p.of_new], self.new, self.roles)

    def leaves(self, sides: Sequence[Side]) -> dict[Node, str]:
        """Of the original graph, with their roles."""
        found = dict.fromkeys(leaf for side in sides for leaf in side.leaves.values())
        return {leaf: self.roles[leaf] for leaf in found}

    def at(self, binding: Binding, step: int) -> _Run:
        """Compare at these sizes. Raises ``Unrunnable``."""
        sides = self.sides(self.pairs)
        leaves = self.leaves(sides)
        binding = sizes.with_room(binding, _x(leaves), _inputs(leaves), self.most(sides), step)
        count = {leaf: binding.count_of(leaf) for leaf, role in leaves.items() if role in CACHES}
        if any(one > _SMALL_CACHE for one in count.values()):
            try:
                return _Run(self, self.pairs, binding, fewer=True)
            except Unrunnable:
                pass
        huge = {leaf for leaf, one in count.items() if one > _LARGEST_CACHE}
        kept = [p for p in self.pairs if huge.isdisjoint(self.leaves(self.sides([p])))]
        return _Run(self, kept if huge else self.pairs, binding)

    def larger(self, binding: Binding) -> Any:
        """Bindings with more tokens."""
        sides = self.sides(self.pairs)
        leaves = self.leaves(sides)
        return sizes.larger(binding, _x(leaves), _inputs(leaves), self.most(sides))

    def most(self, sides: Sequence[Side]) -> int:
        return max(sizes.largest_literal(side.nodes, side.of_x) for side in sides)


def _x(leaves: Mapping[Node, str]) -> Sequence[Any]:
    return next(shape_of(leaf) for leaf, role in leaves.items() if role == "x")


def _inputs(leaves: Mapping[Node, str]) -> list[Sequence[Any]]:
    """Shapes of tables and caches."""
    tensors = ((leaf, role) for leaf, role in leaves.items() if isinstance(value_of(leaf), Tensor))
    return [shape_of(leaf) for leaf, role in tensors if role not in ("x", "weight")]


class _Run:
    """Compares all draws at one binding of the sizes.

    figures  the largest of each pair
    errors   of each pair in the first draw: of the new and of the original value from float64
    count    how many draws were compared
    """

    def __init__(
        self, task: _Task, pairs: Sequence[Pair], binding: Binding, fewer: bool = False
    ) -> None:
        self._pairs, self.binding = pairs, binding
        self._before, self._after = sides = task.sides(pairs)
        self._leaves = task.leaves(sides)
        x = _x(self._leaves)
        self._lead = set(binding.shape(x[:-1]))
        self.tokens = math.prod(binding.shape(x[:-1]))
        self.figures: dict[Pair, Figure] = {}
        self.errors: dict[Pair, tuple[float, float]] = {}
        self.count = 0
        self._generator = torch.Generator().manual_seed(task.seed)
        self._draws = self._drawn(task, fewer)
        quantised = any(
            role == "weight" and dtype_of(leaf).itemsize == 1 for leaf, role in self._leaves.items()
        )
        self._limit = TOLERANCE_QUANTISED if quantised else TOLERANCE
        self._wide = not (self._before.rounds or self._after.rounds)
        self._run(x)

    def _drawn(self, task: _Task, fewer: bool) -> Draws:
        """Draws, of large caches as many blocks as the tokens need, and two."""
        caches = {
            leaf: self.binding.shape_of(leaf)
            for leaf, role in self._leaves.items()
            if role in CACHES
        }
        rows = [math.prod(shape[:-1]) for shape in caches.values()]
        count = min(rows, default=1) if task.rows is None else self.binding.size(task.rows)
        size = self.binding.size(task.block_size)
        if fewer:
            parts = math.gcd(*(shape[0] for shape in caches.values()))
            kept = min(parts, -(-(self.tokens + 2 * size) * parts // count))
            caches = {
                leaf: (shape[0] // parts * kept, *shape[1:]) for leaf, shape in caches.items()
            }
            count = count // parts * kept
        nodes = self._before.nodes
        return Draws(self._leaves, nodes, self.binding, caches, count, size, task.seed)

    def _run(self, x: Sequence[Any]) -> None:
        is_second = has_symbols(x) and self.tokens >= sizes.MANY
        failed: Unrunnable | None = None
        kinds: tuple[str, ...] = KINDS
        if self.tokens > _COSTLY or is_second:
            kinds = KINDS[1 : 2 + any(map(holds_integers, self._leaves))]
        for kind in kinds:
            try:
                drawn, before = self._original(kind)
            except Unrunnable as error:  # no model takes all numbers: it may divide by one
                failed = failed or error
                continue
            try:
                after = self._after.run(drawn, kind, self.binding)
            except Unrunnable as error:
                raise Refuse("verify.mismatch", str(error), (error.node,)) from error
            self._judge(kind, drawn, before, after)
        if failed is not None and not self.count:
            raise failed
        for kind in WIDE if self._wide and kinds is KINDS else ():
            try:
                drawn, before = self._original(kind, wide=True)
                after = self._after.run(drawn, kind, self.binding, wide=True)
            except Unrunnable:  # not every graph runs in float64
                continue
            self._judge(kind, drawn, before, after)

    def _original(self, kind: str, wide: bool = False) -> tuple[dict[Node, Any], dict[Node, Any]]:
        """What is drawn, and the values of the original graph."""
        while True:
            drawn = self._draws.values(kind)
            try:
                return drawn, self._before.run(drawn, kind, self.binding, wide)
            except Unrunnable as error:
                if not self._draws.lower(error.node):
                    raise

    def _judge(
        self, kind: str, drawn: Mapping[Node, Any], before: dict[Node, Any], after: dict[Node, Any]
    ) -> None:
        """Take the figures of one draw. Raises ``Refuse`` where a value, or one row of it, is out
        of tolerance.
        """
        numbers = {pair: pair.numbers(before, after) for pair in self._pairs}
        for pair, (want, got) in numbers.items():
            where = f"{pair.part} at {pair.before.name}, {kind}"
            if want.shape != got.shape:
                detail = f"{where}: shape {list(got.shape)} in place of {list(want.shape)}"
                raise Refuse("verify.mismatch", detail, (pair.before,))
            wrong, size = squares(want, got, self._lead)
            # a row of zeros must be one; NaN stays NaN
            of_rows = torch.where(wrong == 0, 0.0, (wrong / size).sqrt())
            whole, row = relative(wrong, size), float(of_rows.max()) if len(of_rows) else 0.0
            of_all, of_row = self._limit, OF_A_ROW * self._limit
            if kind in WIDE:
                of_all = of_row = TOLERANCE_WIDE
            over = ~(of_rows <= (of_row if whole <= of_all else of_all))
            if bool(over.any()) and not (
                kind not in WIDE and self._is_rounding(pair, kind, drawn, wrong, over)
            ):
                far = f"{row:.3g} in one row" if whole <= of_all else f"{whole:.3g} > {of_all:g}"
                raise Refuse("verify.mismatch", f"{where}: relative error {far}", (pair.before,))
            if kind not in WIDE:
                largest = float((want.double() - got.double()).abs().max()) if len(of_rows) else 0.0
                figure = Figure(pair.part, whole, largest, want.numel(), row)
                known = self.figures.setdefault(pair, figure)
                self.figures[pair] = figure if whole > known.relative else known
        if self._wide and not self.count:
            self._take_errors(kind, drawn, numbers)
        self.count += 1

    def _take_errors(
        self,
        kind: str,
        drawn: Mapping[Node, Any],
        numbers: Mapping[Pair, tuple[Tensor, Tensor]],
    ) -> None:
        try:
            found = self._before.run(drawn, kind, self.binding, wide=True)
        except Unrunnable:
            return
        for pair, (want, got) in numbers.items():
            exact = pair.original_numbers(found)
            if exact.shape == want.shape:
                of_new, of_old = (relative(*squares(exact, v, self._lead)) for v in (got, want))
                self.errors[pair] = of_new, of_old

    def _is_rounding(
        self, pair: Pair, kind: str, drawn: Mapping[Node, Any], wrong: Tensor, over: Tensor
    ) -> bool:
        """Do these rows differ by no more than rounding can do to them, which is much where terms
        cancel?

        The original graph runs in float64 on the same values, and again with x, and with what its
        first products make of it, changed by about one step of bfloat16: how far a row moves is
        what rounding can do to it. (A quantised x takes no notice of small changes, and then nor
        does anything behind it: hence the second place.) What the model itself has lost in the row
        is no measure: it may be all of it, where the model makes much of its own rounding.
        """
        side = self._before
        x = [n for n, role in self._leaves.items() if role == "x" and dtype_of(n) in MODEL_FLOATS]
        products = self._first_products(pair)
        try:
            found = side.run(drawn, kind, self.binding, True, [*pair.of_original, *products])
            exact = pair.original_numbers(found)
            moved = torch.zeros_like(wrong)
            for changed in (x, products):
                for _ in range(_JITTERS if changed else 0):
                    others = {node: self._jittered(found[node]) for node in changed}
                    result = side.run(drawn, kind, self.binding, True, pair.of_original, others)
                    other = pair.original_numbers(result)
                    moved = torch.maximum(moved, squares(exact, other, self._lead)[0])
        except Unrunnable:
            return False
        return bool((wrong[over] <= _OF_ROUNDING**2 * moved[over]).all())

    def _first_products(self, pair: Pair) -> list[Node]:
        """Floats above the pair that x and a weight make, and that are made of no such."""
        weights = [leaf for leaf, role in self._leaves.items() if role == "weight"]
        nodes = cone_of(pair.of_original, self._before.leaves)[0]
        both = self._before.of_x & dependent(nodes, weights)
        floats = {n for n in both if getattr(value_of(n), "dtype", None) in MODEL_FLOATS}
        return [n for n in nodes if n in floats and floats.isdisjoint(n.all_input_nodes)]

    def _jittered(self, value: Tensor) -> Tensor:
        noise = torch.randn(value.shape, generator=self._generator, dtype=torch.float64)
        return value * (1 + _STEP * noise)
