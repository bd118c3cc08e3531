"""Does a rewritten graph give what the original graph gives?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.fx.kinds import MODEL_FLOATS
from mla_fusion.fx.sizes import Binding, has_symbols
from mla_fusion.meta.number_formats import ELEMENTS
from mla_fusion.operators.known import dtype_of, shape_of, value_of
from mla_fusion.report.rejection import Refuse
from mla_fusion.report.report import Figure
from mla_fusion.witness import sizes
from mla_fusion.witness.draws import CACHES, KINDS, WIDE, Draws, changes
from mla_fusion.witness.pair import Pair, relative, squares
from mla_fusion.witness.side import Side, Unrunnable, cone_of, dependent

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
_ONE_BYTE = frozenset((torch.int8, torch.uint8, *ELEMENTS, torch.float8_e8m0fnu))


@dataclass(frozen=True)
class Outcome:
    """What was compared, and how far values are from each other.

    verified  "verified", and what was not
    figures   of each part: the largest distance of the new value from the original one, and that of
              both from float64 in the first draw
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
    inputs = original.find_nodes(op="placeholder")
    roles = dict.fromkeys(inputs, "") | dict.fromkeys(cut, "x") | dict(roles)
    new = dict(zip(rewritten.graph.find_nodes(op="placeholder"), inputs, strict=False))
    new |= {copy: node for node, copy in cut.items()}
    witness = _Witness(pairs, new, roles, rows, block_size, seed)
    binding, failed = binding or sizes.bound(original), list[Unrunnable]()
    for step in sizes.STEPS:
        try:
            first = witness.at(binding, step)
            break
        except Unrunnable as error:
            failed.append(error)
    else:
        raise Refuse("verify.mismatch", str(failed[0]), (failed[0].node,)) from failed[0]
    for larger in sizes.larger(first, witness.x, witness.inputs, witness.most):
        try:
            witness.at(larger, step)
            break
        except Unrunnable:  # the model itself does not take so many tokens
            continue
    return witness.outcome()


class _Witness:
    """
    x       the shape of activations
    inputs  shapes of tables and caches
    most    no literal that meets a count of tokens is larger
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        new: Mapping[Node, Node],
        roles: Mapping[Node, str],
        rows: Any,
        block_size: Any,
        seed: int,
    ) -> None:
        self._pairs, self._rows, self._block, self._seed = pairs, rows, block_size, seed
        self._generator = torch.Generator().manual_seed(seed)
        x = [leaf for leaf, role in roles.items() if role == "x"]
        moving = [leaf for leaf, role in roles.items() if changes(leaf, role)]
        self._sides = [
            Side([node for pair in pairs for node in pair.nodes[side]], stands_for, x, moving)
            for side, stands_for in enumerate(({node: node for node in roles}, new))
        ]
        self._before, self._after = self._sides
        found = dict.fromkeys(leaf for side in self._sides for leaf in side.leaves.values())
        self._leaves = leaves = {leaf: roles[leaf] for leaf in found}
        self._caches = [leaf for leaf, role in leaves.items() if role in CACHES]
        self.x = next(shape_of(leaf) for leaf in leaves if roles[leaf] == "x")
        tensors = [leaf for leaf in leaves if isinstance(value_of(leaf), Tensor)]
        self.inputs = [shape_of(leaf) for leaf in tensors if roles[leaf] not in ("x", "weight")]
        self.most = max(sizes.largest_literal(side.nodes, side.of_x) for side in self._sides)
        nodes = [node for side in self._sides for node in (*side.nodes, *side.leaves)]
        held = {getattr(value_of(node), "dtype", None) for node in nodes}
        # float64 rounds numbers of one byte too, and pieces of 32 bytes hold fewer of it
        self._rounds = not held.isdisjoint(_ONE_BYTE) or any(
            "PA_NZ" in node.kwargs.values() for node in nodes
        )
        weights = [dtype_of(leaf) for leaf in tensors if roles[leaf] == "weight"]
        self._limit = TOLERANCE if _ONE_BYTE.isdisjoint(weights) else TOLERANCE_QUANTISED
        self._tokens = list[int]()
        self._count = 0
        self._figures: dict[Pair, Figure] = {}

    def outcome(self) -> Outcome:
        parts = dict.fromkeys(pair.part for pair in self._pairs if pair not in self._figures)
        return Outcome(
            "verified" + (f" except {', '.join(parts)}" if parts else ""),
            tuple(self._figures.values()),
            f"compared at T = {' and '.join(map(str, self._tokens))}, "
            f"{_plural(self._count, 'draw')}, {_plural(len(self._figures), 'output')}",
            tuple(self._tokens),
            tuple(parts),
        )

    def at(self, binding: Binding, step: int) -> Binding:
        """Compare at these sizes, or where tables and caches have more rows: the sizes. Raises
        ``Unrunnable``.
        """
        binding = sizes.with_room(binding, self.x, self.inputs, self.most, step)
        self._lead = binding.shape(self.x[:-1])
        for side in self._sides:
            side.bind(binding)
        count = {leaf: binding.count_of(leaf) for leaf in self._caches}
        pairs = self._pairs
        if max(count.values(), default=0) > _SMALL_CACHE:
            try:
                self._compare(pairs, binding, math.prod(self._lead))
                return binding
            except Unrunnable:
                huge = {leaf for leaf in self._caches if count[leaf] > _LARGEST_CACHE}
                leaves = self._before.leaves
                pairs = [p for p in pairs if huge.isdisjoint(cone_of(p.nodes[0], leaves)[1])]
        self._compare(pairs, binding, None)
        return binding

    def _compare(self, pairs: Sequence[Pair], binding: Binding, least: int | None) -> None:
        """``least``: of large caches so many rows are enough."""
        tokens = math.prod(self._lead)
        is_second = has_symbols(self.x) and tokens >= sizes.MANY
        kinds = KINDS[1:] if tokens > _COSTLY or is_second else KINDS
        kinds += () if self._rounds or kinds is not KINDS else WIDE
        draws = Draws(
            self._leaves, self._before.nodes, binding, self._rows, self._block, least, self._seed
        )
        old, new = ([node for pair in pairs for node in pair.nodes[side]] for side in (0, 1))
        failed, count = list[Unrunnable](), self._count
        for kind in kinds:
            wide = kind in WIDE
            drawn = draws.values(kind)
            try:
                while True:
                    try:
                        before = self._before.run(drawn, _weights(kind), wide, old)
                        break
                    except Unrunnable as error:
                        if not draws.lower(error.node):
                            raise
                        drawn = draws.values(kind)
            except Unrunnable as error:  # no model takes all numbers: it may divide by one
                failed.append(error)
                continue
            try:
                after = self._after.run(drawn, _weights(kind), wide, new)
            except Unrunnable as error:
                if wide:
                    continue
                raise Refuse("verify.mismatch", str(error), (error.node,)) from error
            self._judge(pairs, kind, drawn, before, after)
            self._count += 1
        if count == self._count:
            raise failed[0]
        self._tokens.append(tokens)

    def _judge(
        self,
        pairs: Sequence[Pair],
        kind: str,
        drawn: Mapping[Node, Any],
        before: Mapping[Node, Any],
        after: Mapping[Node, Any],
    ) -> None:
        """Take the figures of one draw. Raises ``Refuse`` where a value, or one row of it, is out
        of tolerance.
        """
        of_all, of_row = (
            (TOLERANCE_WIDE,) * 2 if kind in WIDE else (self._limit, OF_A_ROW * self._limit)
        )
        for pair in pairs:
            want, got = pair.numbers(before), pair.numbers(after, before)
            node = pair.nodes[0][0]
            where = f"{pair.part} at {node.name}, {kind}"
            if want.shape != got.shape:
                detail = f"{where}: shape {list(got.shape)} in place of {list(want.shape)}"
                raise Refuse("verify.mismatch", detail, (node,))
            wrong, size = squares(want, got, self._lead)
            # a row of zeros must be one; NaN stays NaN
            of_rows = torch.where(wrong == 0, 0.0, (wrong / size).sqrt())
            whole, row = relative(wrong, size), float(of_rows.max()) if len(of_rows) else 0.0
            # rows over the limit of one row are among those over that of all
            over = ~(of_rows <= (of_row if whole <= of_all else of_all))
            rounding = kind not in WIDE and over.any()
            if over.any() and not (rounding and self._is_rounding(pair, kind, drawn, wrong, over)):
                far = (
                    f"{row:.3g} > {of_row:g} in one row"
                    if whole <= of_all
                    else f"{whole:.3g} > {of_all:g}"
                )
                raise Refuse("verify.mismatch", f"{where}: relative error {far}", (node,))
            if kind in WIDE:
                continue
            largest = float((want.double() - got.double()).abs().max()) if len(of_rows) else 0.0
            known = self._figures.get(pair)
            errors = known.float64 if known else self._errors(pair, kind, drawn, want, got)
            if known is None or whole > known.relative:
                known = Figure(pair.part, whole, largest, want.numel(), row)
            self._figures[pair] = replace(known, float64=errors)

    def _errors(
        self, pair: Pair, kind: str, drawn: Mapping[Node, Any], want: Tensor, got: Tensor
    ) -> tuple[float, float] | None:
        """Of the new and of the original value, against float64 where nothing is quantised."""
        try:
            if self._rounds:
                return None
            exact = pair.numbers(self._before.run(drawn, _weights(kind), True, pair.nodes[0]))
        except Unrunnable:
            return None
        of_new, of_old = (relative(*squares(exact, one, self._lead)) for one in (got, want))
        return of_new, of_old

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
        nodes, leaves = cone_of(pair.nodes[0], self._before.leaves)
        # floats that x and a weight make, and that are made of no such
        both = self._before.of_x & dependent(
            nodes, [n for n in leaves if self._leaves.get(n) == "weight"]
        )
        floats = {n for n in both if getattr(value_of(n), "dtype", None) in MODEL_FLOATS}
        products = [n for n in nodes if n in floats and floats.isdisjoint(n.all_input_nodes)]
        x = [n for n in leaves if self._leaves.get(n) == "x" and dtype_of(n) in MODEL_FLOATS]

        def run(wanted: Sequence[Node], others: Mapping[Node, Any]) -> dict[Node, Any]:
            return self._before.run(drawn, _weights(kind), True, wanted, others)

        moved = torch.zeros_like(wrong)
        try:
            found = run([*pair.nodes[0], *products], {})
            for changed in (x, products):
                for _ in range(_JITTERS if changed else 0):
                    others = {node: self._jittered(found[node]) for node in changed}
                    other = pair.numbers(run(pair.nodes[0], others))
                    distance, _ = squares(pair.numbers(found), other, self._lead)
                    moved = torch.maximum(moved, distance)
        except Unrunnable:
            return False
        return bool((wrong[over] <= _OF_ROUNDING**2 * moved[over]).all())

    def _jittered(self, value: Tensor) -> Tensor:
        noise = torch.randn(value.shape, generator=self._generator, dtype=torch.float64)
        return value * (1 + _STEP * noise)


def _weights(kind: str) -> str:
    """Which weights a draw has."""
    return kind if kind in ("outliers", *WIDE) else ""


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
