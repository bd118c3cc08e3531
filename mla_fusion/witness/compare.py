"""Does a rewritten graph give what the original graph gives?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.fx.kinds import MODEL_FLOATS, dtype_of, shape_of, value_of
from mla_fusion.fx.sizes import Binding, sizes_of
from mla_fusion.meta.spec import TILE_SIZE
from mla_fusion.paging.tiles import numbers_of_rows
from mla_fusion.reference import hifloat8
from mla_fusion.report.report import Figure
from mla_fusion.witness import sizes
from mla_fusion.witness.draws import CACHES, KINDS, WIDE, Draws
from mla_fusion.witness.side import Nodes, Side, Unrunnable, Values, cone_of, dependents

# Two bfloat16 evaluations of one prologue differ by 3e-3 to 6e-3 in relative L2 norm (one rounding
# more or less per step); a swapped pair, a wrong column or a wrong row differs by more than 1e-1.
TOLERANCE = 2e-2
# c_q rounded to bfloat16 or not before it is quantised: a few hundredths of the int8 values differ
# by one step.
TOLERANCE_QUANTISED = 4e-2
TOLERANCE_HIFLOAT8 = 8e-2  # three bits at most behind the point
# Two evaluations in float64; float literals of a graph may be rounded to float32.
TOLERANCE_WIDE = 1e-6
# One row has as few as 64 elements, and a rounding of a large one weighs more in it.
OF_A_ROW = 2.5
# times what rounding can do to it, where a row of small numbers is made of large ones
_OF_ROUNDING = 6.0
_HCKV = 512  # of rows of tiles
_ROW = 64  # elements that a row has at least: a rounding of a large one weighs much among fewer
_FEW_ROWS = 10  # one row of so many may differ by twice what rounding can do
_STEP = 2.0**-8
_TURNS = 8, 64  # of changes: what is far from a rounding after a few is none
_FAR = 4.0
_SMALL_CACHE = 1 << 20  # elements up to which a cache is taken as it is
_LARGEST_CACHE = 1 << 28
_COSTLY = 256  # tokens from which one draw holds ordinary rows and rows with outliers side by side


class Mismatch(Exception):
    """A new value differs from the original one by more than roundings can make."""


@dataclass(frozen=True)
class Pair:
    """A value of the original graph and what stands for it in the rewritten one.

    part    for messages: "query", "kv_cache"
    form    "": numbers as they are. "hifloat8": bytes of that format. "powers": e8m0 scales, which
            may differ by one step where another pair has them for ``scales``. "tiles": rows of
            tiles. "halves": the new value has the rotated halves side by side that the original one
            interleaves
    scales  of both graphs, by which their numbers are multiplied: one for each run of elements
    """

    part: str
    before: Node
    after: Node
    form: str = ""
    scales: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """What is read, of the original and of the rewritten graph."""
        return (self.before, *self.scales[:1]), (self.after, *self.scales[1:])

    def numbers(self, values: Values, of_original: Values | None = None) -> Tensor:
        """What the original value stands for; with ``of_original``, what the new one does, to be
        compared with the original one of these values.
        """
        is_new = of_original is not None
        value, *scales = (values[node] for node in self.nodes[is_new])
        if self.form == "hifloat8":
            value = hifloat8.decode(value)
        elif self.form == "powers":
            value = _powers(value)
        elif self.form == "tiles":
            dr = (value.shape[-1] - _HCKV - 4 * _HCKV // TILE_SIZE) // 2
            value = numbers_of_rows(value, hckv=_HCKV, dr=dr, tile=TILE_SIZE)
        value = (torch.view_as_real(value) if value.is_complex() else value).double()
        for scale in scales:
            scale = (_powers(scale) if scale.element_size() == 1 else scale).flatten()
            value = value * scale.repeat_interleave(value.numel() // scale.numel()).view(
                value.shape
            )
        if of_original is None:
            return value
        want = self.numbers(of_original)
        if self.form == "halves":
            value = value.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        if self.form == "powers":
            value = torch.where((value / want - 1.25).abs() <= 0.75, want, value)
        return value.reshape(want.shape) if value.numel() == want.numel() else value


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
    rows: Any = 1,
    block_size: Any = 1,
    binding: Binding | None = None,
    seed: int = 0,
) -> Outcome:
    """Run both graphs on drawn values, and compare each pair.

    cut         nodes of ``original`` whose values are drawn, with their copies in ``rewritten``.
                Placeholders stand for each other by position, attributes by name
    roles       of cut nodes ("x" where nothing is said), placeholders and attributes: ``draws``
                lists them
    rows        how many rows of caches slots count
    block_size  how many of them make a block, or a sequence
    binding     numbers for symbolic sizes

    Raises ``Mismatch`` where a new value differs by more than roundings can make.
    """
    inputs = original.find_nodes(op="placeholder")
    roles = dict.fromkeys(inputs, "") | dict.fromkeys(cut, "x") | dict(roles)
    new = dict(zip(rewritten.graph.find_nodes(op="placeholder"), inputs, strict=False))
    new |= {copy: node for node, copy in cut.items()}
    witness = _Witness(pairs, new, roles, (rows, block_size, seed))
    return witness.run(binding or sizes.bind_sizes(original))


class _Witness:
    """Both graphs, from leaves to the pairs."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        new: Mapping[Node, Node],
        roles: Mapping[Node, str],
        given: tuple[Any, Any, int],
    ) -> None:
        """``given``: rows, block_size and seed."""
        self._pairs, self._given = pairs, given
        self._before, self._after = sides = [
            Side([node for pair in pairs for node in pair.nodes[side]], stands_for)
            for side, stands_for in enumerate(({node: node for node in roles}, new))
        ]
        found = dict.fromkeys(leaf for side in sides for leaf in side.leaves.values())
        self._roles = roles = {leaf: roles[leaf] for leaf in found}
        self._generator = torch.Generator().manual_seed(given[-1])
        x = [leaf for leaf, role in roles.items() if role == "x"]
        self._x = shape_of(x[0])
        self._nodes = self._before.nodes
        self._of_x = dependents(self._nodes, x)
        self._inputs = list(map(sizes_of, roles))
        self._most = sizes.largest_literal(self._nodes, self._of_x)
        nodes = [node for side in sides for node in (*side.nodes, *side.leaves)]
        self._rounds = any(map(_has_bytes, nodes))
        quantised = any(roles[leaf] == "weight" and _has_bytes(leaf) for leaf in roles)
        self._limit = TOLERANCE_QUANTISED if quantised else TOLERANCE
        if any(roles[leaf] == "weight" and dtype_of(leaf) == torch.uint8 for leaf in roles):
            self._limit = TOLERANCE_HIFLOAT8
        self._tokens, self._count = list[int](), 0
        self._figures: dict[Pair, Figure] = {}

    def run(self, binding: Binding) -> Outcome:
        """Compare at a few tokens, and where their number is symbolic at many."""
        try:
            self._run_at(binding)
        except Unrunnable as error:
            raise Mismatch(str(error)) from error
        for larger in sizes.larger_bindings(binding, self._x, self._nodes, self._most):
            try:
                self._run_at(larger)
                break
            except Unrunnable:  # the model itself does not take so many tokens
                continue
        parts = dict.fromkeys(pair.part for pair in self._pairs if pair not in self._figures)
        return Outcome(
            "verified" + (f" except {', '.join(parts)}" if parts else ""),
            tuple(self._figures.values()),
            f"compared at T = {' and '.join(map(str, self._tokens))}, "
            f"draws: {self._count}, outputs: {len(self._figures)}",
            tuple(self._tokens),
            tuple(parts),
        )

    def _run_at(self, binding: Binding) -> None:
        """Compare at these sizes, or where tables and caches have more rows. Raises
        ``Unrunnable``.
        """
        self._binding = binding = sizes.with_room(binding, self._x, self._inputs, self._most)
        self._lead = binding.shape(self._x[:-1])
        pairs = self._pairs
        caches = [leaf for leaf, role in self._roles.items() if role in CACHES]
        if any(binding.count_of(leaf) > _SMALL_CACHE for leaf in caches):
            try:
                return self._compare(pairs, math.prod(self._lead))
            except Unrunnable:
                huge = {leaf for leaf in caches if binding.count_of(leaf) > _LARGEST_CACHE}
                pairs = [p for p in pairs if huge.isdisjoint(cone_of(p.nodes[0], self._roles)[1])]
        return self._compare(pairs)

    def _compare(self, pairs: Sequence[Pair], least: int = 0) -> None:
        """``least``: of large caches so many rows are enough; 0: all."""
        tokens, count = math.prod(self._lead), self._count
        kinds = KINDS[1:] if self._tokens or tokens > _COSTLY else KINDS
        kinds += () if self._rounds or kinds is not KINDS else WIDE
        draws = Draws(self._roles, self._nodes, self._binding, *self._given, least)
        old, new = ([node for pair in pairs for node in pair.nodes[side]] for side in (0, 1))
        failed = list[Unrunnable]()
        for kind in kinds:
            before = None
            while before is None:
                drawn = draws.values(kind)
                try:
                    before = self._before.run(self._binding, drawn, kind in WIDE, old)
                except Unrunnable as error:
                    if not draws.lower_integers(error.node):
                        failed.append(error)
                        break
            if before is None:  # no model takes all numbers: it may divide by one
                continue
            try:
                after = self._after.run(self._binding, drawn, kind in WIDE, new)
            except Unrunnable as error:
                if kind in WIDE:
                    continue
                raise Mismatch(str(error)) from error
            is_first = kind not in WIDE and not self._rounds and not self._figures
            exact = self._in_float64(drawn, old) if is_first else None
            for pair in pairs:
                self._judge(pair, kind, drawn, before, after, exact)
            self._count += 1
        if count == self._count:
            raise failed[0]
        self._tokens.append(tokens)

    def _in_float64(self, drawn: Values, wanted: Nodes, others: Any = None) -> Any:
        """Values of the original graph, others being so; None where it does not run."""
        try:
            return self._before.run(self._binding, drawn, True, wanted, others)
        except Unrunnable:
            return None

    def _judge(
        self,
        pair: Pair,
        kind: str,
        drawn: Values,
        before: Values,
        after: Values,
        exact: Values | None,
    ) -> None:
        """Take the figure of one draw. Raises ``Mismatch`` where a value, or one row of it, is
        out of tolerance.

        exact  the values of ``before`` in float64, where they are known
        """
        want, got = pair.numbers(before), pair.numbers(after, before)
        of_all, of_row = self._limit, OF_A_ROW * self._limit
        if kind in WIDE:
            of_all = of_row = TOLERANCE_WIDE
        wrong = f"shape {list(got.shape)} in place of {list(want.shape)}"
        if want.shape == got.shape:
            off, size = _squares(want, got, self._lead)
            # a row of zeros must be one; NaN stays NaN
            of_rows = torch.where(off == 0, 0.0, (off / size).sqrt())
            whole, row = _relative(off, size), float(of_rows.max()) if len(of_rows) else 0.0
            # rows over the limit of one row are among those over that of all
            limit = of_row if whole <= of_all else of_all
            over = ~(of_rows <= limit)
            said = f"relative error {row:.3g} in a row, {whole:.3g} of all; limit {limit:g}"
            wrong = said if bool(over.any()) else ""
            is_few = whole <= of_all or _FEW_ROWS * int(over.sum()) <= len(over)
            times = _OF_ROUNDING * (2 if is_few else 1)
            if wrong and kind not in WIDE and self._is_rounding(pair, drawn, off, over, times):
                wrong = ""
        if wrong:
            detail = f"{pair.part} at {pair.before.name}, {kind}: {wrong}"
            raise Mismatch(detail)
        if kind in WIDE:
            return
        largest = float((want - got).abs().max()) if len(of_rows) else 0.0
        figure = Figure(pair.part, whole, largest, want.numel(), row)
        known = self._figures.get(pair)
        # of the first draw, where nothing is quantised
        found = None
        if known is None and not self._rounds:
            found = exact or self._in_float64(drawn, pair.nodes[0])
        if found is not None:
            of_new, of_old = (_squares(pair.numbers(found), v, self._lead) for v in (got, want))
            figure = replace(figure, float64=(_relative(*of_new), _relative(*of_old)))
        if known is not None:
            figure = replace(figure if whole > known.relative else known, float64=known.float64)
        self._figures[pair] = figure

    def _is_rounding(
        self, pair: Pair, drawn: Values, wrong: Tensor, over: Tensor, times: float
    ) -> bool:
        """Do these rows differ by no more than so many times what rounding can do to them, which is
        much where terms cancel?

        The original graph runs in float64 on the same values, and again with x, and with what its
        first products make of it, changed by about one step of bfloat16: how far a row moves is
        what rounding can do to it. (A quantised x takes no notice of small changes, and then nor
        does anything behind it: hence the second place.) What the model itself has lost in the row
        is no measure: it may be all of it, where the model makes much of its own rounding.
        """
        nodes, leaves = cone_of(pair.nodes[0], self._roles)
        weights = (leaf for leaf in leaves if self._roles.get(leaf) == "weight")
        both = self._of_x & dependents(nodes, weights)
        floats = {n for n in both if getattr(value_of(n), "dtype", None) in MODEL_FLOATS}
        products = [n for n in nodes if n in floats and floats.isdisjoint(n.all_input_nodes)]
        x = [n for n in leaves if n in self._of_x and dtype_of(n) in MODEL_FLOATS]
        found = self._in_float64(drawn, [*pair.nodes[0], *products])
        if found is None:
            return False
        exact, moved = pair.numbers(found), torch.zeros_like(wrong)
        for turn, changed in zip(range(_TURNS[1]), cycle((x, products)), strict=False):
            others = {}
            for node in changed:
                noise = torch.randn(
                    found[node].shape, generator=self._generator, dtype=torch.float32
                )
                if turn % 4 > 1:
                    noise = _alike(found[node], turn)
                others[node] = found[node] * (1 + _STEP * noise)
            other = self._in_float64(drawn, pair.nodes[0], others) or found
            moved = torch.maximum(moved, _squares(exact, pair.numbers(other), self._lead)[0])
            limit = times**2 * moved[over]
            if bool((wrong[over] <= limit).all()):
                return True
            if turn + 1 >= _TURNS[0] and not bool((wrong[over] <= _FAR**2 * limit).all()):
                return False
        return False


def _alike(value: Tensor, seed: int) -> Tensor:
    """Noise that numbers share which bfloat16 does not tell apart: a weight of few bits makes many
    of those where one element of x is large, and they round alike.
    """
    return torch.sin(value.to(torch.bfloat16).view(torch.int16) * (12.9898 + seed)) * 2**0.5


def _has_bytes(node: Node) -> bool:
    """Does it hold numbers of one byte, which float64 rounds too, or pieces of 32 bytes?"""
    dtype = getattr(value_of(node), "dtype", torch.bool)
    return (dtype != torch.bool and dtype.itemsize == 1) or "PA_NZ" in node.kwargs.values()


def _powers(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu).float()


def _squares(want: Tensor, got: Tensor, tokens: Collection[int]) -> tuple[Tensor, Tensor]:
    """Of each row: the squared length of the difference, and of what it should be.

    A row runs along the last axes that are not as long as an axis of ``tokens``.
    """
    along, count = list[int](), 1
    for axis in reversed(range(want.dim())):
        if want.shape[axis] not in tokens and 0 < count < _ROW:
            along.insert(0, axis)
            count *= want.shape[axis]
    order = [*(axis for axis in range(want.dim()) if axis not in along), *along]
    a, b = (
        value.permute(order).reshape(count and want.numel() // count, count)
        for value in (want, got)
    )
    difference = torch.where(a == b, 0, a - b)  # infinities too
    size = torch.where(a.isinf(), 0, a)
    return difference.square().sum(1), size.square().sum(1)


def _relative(wrong: Tensor, size: Tensor) -> float:
    """Of squared lengths of all rows."""
    return math.sqrt(float(wrong.sum()) / (float(size.sum()) or 1.0))
