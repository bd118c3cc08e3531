"""Compares what a rewritten graph gives with what the original graph gives.

``commit/verify.py`` asks this for each plan. ``draws.py`` draws the values, ``side.py`` runs the
graphs.
"""

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

# Two bfloat16 evaluations of a prologue differ by 3e-3 to 6e-3 in relative L2 norm (one rounding
# more or less per step); a swapped pair, a wrong column or a wrong row differs by more than 1e-1.
TOLERANCE = 2e-2
# If c_q is rounded to bfloat16 before it is quantised, a few hundredths of the int8 values differ
# by one step.
TOLERANCE_QUANTISED = 4e-2
TOLERANCE_HIFLOAT8 = 8e-2  # the format has at most three bits after the point
# Two evaluations in float64; float literals of a graph may be rounded to float32.
TOLERANCE_WIDE = 1e-6
# One row has as few as 64 elements, and a rounding of a large one weighs more in it.
ROW_FACTOR = 2.5
# a row may differ by this times what rounding can do: small numbers may be made of large ones
_ROUNDING_FACTOR = 6.0
_HCKV = 512  # width of the latents in rows of tiles
# least elements of a row: the rounding of one large element weighs more among fewer
_SHORTEST_ROW = 64
_FEW_ROWS = 10  # one row in so many may differ by twice what rounding can do
_STEP = 2.0**-8
_MOVED_SCALES = 0.25  # scales of blocks that a rounding may move to the next power of two
_CHANGES = 8, 64  # changes of x: after the first number, a row far from a rounding is refused
_FAR_FACTOR = 4.0
_SMALL_CACHE = 1 << 20  # most elements of a cache that is not cut
_LARGEST_CACHE = 1 << 28
_COSTLY = 256  # tokens from which one draw holds ordinary rows beside rows with outliers


class Mismatch(Exception):
    """Raised if a new value differs from the original one by more than roundings can make."""


@dataclass(frozen=True)
class Pair:
    """A value of the original graph, and what stands for it in the rewritten one.

    part    the name of the part, for messages: "query", "kv_cache"
    before  the node of the original graph
    after   the node of the rewritten graph
    form    "": numbers as they are. "hifloat8": bytes of that format. "powers": e8m0 scales, a few
            of which may differ by one step. "tiles": rows of tiles. "halves": the new value has the
            rotated halves side by side that the original one interleaves
    width   how many numbers a row of halves has
    """

    part: str
    before: Node
    after: Node
    form: str = ""
    width: int = 0

    def numbers(self, values: Values, of_original: Values | None = None) -> Tensor:
        """Returns the numbers of the original value, or those of the new value, comparable with it.

        of_original  values of the original graph; given to read the new value
        """
        value = values[self.before if of_original is None else self.after]
        if self.form == "hifloat8":
            value = hifloat8.decode(value)
        elif self.form == "powers":
            value = value.view(torch.float8_e8m0fnu).float()
        elif self.form == "tiles":
            rope = (value.shape[-1] - _HCKV - 4 * _HCKV // TILE_SIZE) // 2
            value = numbers_of_rows(value, hckv=_HCKV, dr=rope, tile=TILE_SIZE)
        value = (torch.view_as_real(value) if value.is_complex() else value).double()
        if of_original is None:
            return value
        expected = self.numbers(of_original)
        if self.form == "halves":
            value = value.reshape(-1, 2, self.width // 2).transpose(-1, -2)
        if self.form == "powers" and (value != expected).double().mean() < _MOVED_SCALES:
            value = torch.where((value / expected - 1.25).abs() <= 0.75, expected, value)
        return value.reshape(expected.shape) if value.numel() == expected.numel() else value


@dataclass(frozen=True)
class Outcome:
    """What was compared, and how far the values differ.

    verified  "verified", and which parts were not; or why nothing was compared
    figures   for each part, the largest distance of the new value from the original one, and the
              distance of both from float64 in the first draw
    compared  what was run, as text; "" if nothing was
    """

    verified: str
    figures: tuple[Figure, ...] = ()
    compared: str = ""


def compare(
    original: Graph,
    rewritten: GraphModule,
    pairs: Sequence[Pair],
    cut: Mapping[Node, Node],
    roles: Mapping[Node, str],
    *,
    rows: Any,
    block_size: Any,
    symbols: Mapping[str, int] | None = None,
) -> Outcome:
    """Runs both graphs on drawn values, and compares each pair.

    cut         nodes of ``original`` whose values are drawn, with their copies in ``rewritten``.
                Placeholders stand for each other by position, attributes by name
    roles       roles of cut nodes ("x" by default), placeholders and attributes: ``draws`` lists
                them
    rows        how many rows of caches the slots count
    block_size  how many rows make a block, or a sequence
    symbols     numbers of symbols: the graph runs only if symbols of one number are equal

    Raises ``Mismatch`` if a new value differs by more than roundings can make.
    """
    inputs = original.find_nodes(op="placeholder")
    roles = dict.fromkeys(inputs, "") | dict.fromkeys(cut, "x") | dict(roles)
    originals = dict(zip(rewritten.graph.find_nodes(op="placeholder"), inputs, strict=False))
    originals |= {copy: node for node, copy in cut.items()}
    witness = _Witness(pairs, originals, roles, rows, block_size)
    return witness.run(sizes.bind_sizes(original, symbols or {}))


class _Witness:
    """Runs both graphs, from leaves to the pairs, and compares them."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        originals: Mapping[Node, Node],
        roles: Mapping[Node, str],
        rows: Any,
        block_size: Any,
    ) -> None:
        """Prepares the comparison.

        originals  by leaf of the rewritten graph, the leaf of the original graph
        """
        self._pairs, self._cache_sizes = pairs, (rows, block_size)
        self._before = Side([pair.before for pair in pairs], {node: node for node in roles})
        self._after = Side([pair.after for pair in pairs], originals)
        sides = self._before, self._after
        leaves = dict.fromkeys(leaf for side in sides for leaf in side.leaves.values())
        self._roles = roles = {leaf: roles[leaf] for leaf in leaves}
        self._generator = torch.Generator().manual_seed(0)
        x = [leaf for leaf, role in roles.items() if role == "x"]
        self._x = shape_of(x[0])
        self._nodes = self._before.nodes
        self._of_x = dependents(self._nodes, x)
        self._inputs = list(map(sizes_of, roles))
        self._largest_literal = sizes.largest_literal(self._nodes, self._of_x)
        nodes = [node for side in sides for node in (*side.nodes, *side.leaves)]
        self._has_bytes = any(map(_has_bytes, nodes))
        weights = [leaf for leaf, role in roles.items() if role == "weight"]
        self._limit = TOLERANCE_QUANTISED if any(map(_has_bytes, weights)) else TOLERANCE
        if any(dtype_of(weight) == torch.uint8 for weight in weights):
            self._limit = TOLERANCE_HIFLOAT8
        self._tokens, self._count = list[int](), 0
        self._figures: dict[Pair, Figure] = {}

    def run(self, binding: Binding) -> Outcome:
        """Compares at a few tokens. If their number is symbolic, compares at many tokens too."""
        failures = list[Unrunnable]()
        for candidate in sizes.bindings(binding, self._x, self._nodes, self._largest_literal):
            try:
                self._run_at(candidate)
                if candidate is not binding or self._tokens[-1] >= sizes.MANY:
                    break
            except Unrunnable as error:  # the model does not take so few tokens, or so many
                failures.append(error)
        if not self._figures:
            raise Mismatch(str(next(iter(failures), "no draw is within the ranges of all steps")))
        left_out = dict.fromkeys(pair.part for pair in self._pairs if pair not in self._figures)
        return Outcome(
            "verified" + (f" except {', '.join(left_out)}" if left_out else ""),
            tuple(self._figures.values()),
            f"compared at T = {' and '.join(map(str, self._tokens))}, "
            f"draws: {self._count}, outputs: {len(self._figures)}",
        )

    def _run_at(self, binding: Binding) -> None:
        """Compares at these sizes, raised so that tables and caches have enough rows.

        Raises ``Unrunnable``.
        """
        self._binding = binding = sizes.with_room(
            binding, self._x, self._inputs, self._largest_literal
        )
        self._lead = binding.shape(self._x[:-1])
        if 0 in self._lead:
            raise Mismatch("its number of tokens is no size of the trace: none is left to compare")
        pairs = self._pairs
        caches = [leaf for leaf, role in self._roles.items() if role in CACHES]
        if any(binding.count_of(leaf) > _SMALL_CACHE for leaf in caches):
            try:
                return self._compare(pairs, math.prod(self._lead))
            except Unrunnable:
                largest_caches = {
                    leaf for leaf in caches if binding.count_of(leaf) > _LARGEST_CACHE
                }
                pairs = [
                    pair
                    for pair in pairs
                    if largest_caches.isdisjoint(cone_of([pair.before], self._roles)[1])
                ]
        return self._compare(pairs)

    def _compare(self, pairs: Sequence[Pair], least: int = 0) -> None:
        """Compares the pairs on each kind of draw.

        least  so many rows of large caches are enough; 0: all rows are drawn
        """
        tokens, old_count = math.prod(self._lead), self._count
        kinds = KINDS[1:] if self._tokens or tokens > _COSTLY else KINDS
        kinds += () if self._has_bytes or kinds is not KINDS else WIDE
        draws = Draws(self._roles, self._nodes, self._binding, *self._cache_sizes, least)
        old_nodes, new_nodes = [pair.before for pair in pairs], [pair.after for pair in pairs]
        failures = list[Unrunnable]()
        for kind in kinds:
            before = None
            while before is None:
                drawn = draws.values(kind)
                try:
                    before = self._before.run(self._binding, drawn, kind in WIDE, old_nodes)
                except Unrunnable as error:
                    if not draws.lower_integers(error.node):
                        failures.append(error)
                        break
            if before is None:  # a model may fail at some numbers: it may divide by them
                continue
            try:
                after = self._after.run(self._binding, drawn, kind in WIDE, new_nodes)
            except Unrunnable as error:
                if kind in WIDE:
                    continue
                raise Mismatch(str(error)) from error
            is_first = kind not in WIDE and not self._has_bytes and not self._figures
            exact_values = self._in_float64(drawn, old_nodes) if is_first else None
            for pair in pairs:
                self._judge(pair, kind, drawn, before, after, exact_values)
            self._count += 1
        if old_count == self._count:
            raise failures[0]
        self._tokens.append(tokens)

    def _in_float64(self, drawn: Values, targets: Nodes, others: Any = None) -> Any:
        """Returns values of the original graph in float64, or None if it does not run.

        others  values that replace those drawn or computed
        """
        try:
            return self._before.run(self._binding, drawn, True, targets, others)
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
        """Records the figure of one pair in one draw.

        exact  the values of ``before`` in float64, if they are known

        Raises ``Mismatch`` if the value, or one row of it, is out of tolerance.
        """
        expected, actual = pair.numbers(before), pair.numbers(after, before)
        whole_limit, row_limit = self._limit, ROW_FACTOR * self._limit
        if kind in WIDE:
            whole_limit = row_limit = TOLERANCE_WIDE
        failure = f"shape {list(actual.shape)} in place of {list(expected.shape)}"
        if expected.shape == actual.shape:
            errors, lengths = _squares(expected, actual, self._lead)
            # a row of zeros must be one; NaN stays NaN
            by_row = torch.where(errors == 0, 0.0, (errors / lengths).sqrt())
            error, worst = _distance(errors, lengths), float(by_row.max()) if len(by_row) else 0.0
            # rows over the limit of a row are among those over the limit of all rows
            limit = row_limit if error <= whole_limit else whole_limit
            mask = ~(by_row <= limit)
            text = f"relative error {worst:.3g} in a row, {error:.3g} of all; limit {limit:g}"
            failure = text if bool(mask.any()) else ""
            may_be_rounding = error <= whole_limit or _FEW_ROWS * int(mask.sum()) <= len(mask)
            times = _ROUNDING_FACTOR * (2 if may_be_rounding else 1)
            if failure and kind not in WIDE and self._is_rounding(pair, drawn, errors, mask, times):
                failure = ""
        if failure:
            raise Mismatch(f"{pair.part} at {pair.before.name}, {kind}: {failure}")
        if kind in WIDE:
            return
        largest = float((expected - actual).abs().max()) if len(by_row) else 0.0
        figure = Figure(pair.part, error, largest, expected.numel(), worst)
        prior = self._figures.get(pair)
        # float64 figures are those of the first draw, if nothing is quantised
        wide_values = None
        if prior is None and not self._has_bytes:
            wide_values = exact or self._in_float64(drawn, [pair.before])
        if wide_values is not None:
            new_lengths, old_lengths = (
                _squares(pair.numbers(wide_values), value, self._lead)
                for value in (actual, expected)
            )
            figure = replace(figure, float64=(_distance(*new_lengths), _distance(*old_lengths)))
        if prior is not None:
            figure = replace(figure if error > prior.relative else prior, float64=prior.float64)
        self._figures[pair] = figure

    def _is_rounding(
        self, pair: Pair, drawn: Values, errors: Tensor, mask: Tensor, times: float
    ) -> bool:
        """Returns True if these rows differ by at most ``times`` what rounding can do to them.

        Rounding can do much where terms cancel. It is measured on the original graph in float64: on
        the same values, and again with x and with the first products of x changed by about one step
        of bfloat16. How far a row moves is what rounding can do to it.

        A quantised x takes no notice of small changes, and neither does anything after it. So the
        products are changed, too. What the model itself has lost in a row is no measure: a model
        that makes much of its own rounding may have lost all of it.
        """
        nodes, leaves = cone_of([pair.before], self._roles)
        weights = (leaf for leaf in leaves if self._roles.get(leaf) == "weight")
        x_products_and_later = self._of_x & dependents(nodes, weights)
        floats = {
            node
            for node in x_products_and_later
            if getattr(value_of(node), "dtype", None) in MODEL_FLOATS
        }
        products = [
            node for node in nodes if node in floats and floats.isdisjoint(node.all_input_nodes)
        ]
        x = [node for node in leaves if node in self._of_x and dtype_of(node) in MODEL_FLOATS]
        wide_values = self._in_float64(drawn, [pair.before, *products])
        if wide_values is None:
            return False
        exact, moves = pair.numbers(wide_values), torch.zeros_like(errors)
        for change, changed_nodes in zip(range(_CHANGES[1]), cycle((x, products)), strict=False):
            others = {}
            for node in changed_nodes:
                noise = torch.randn(
                    wide_values[node].shape, generator=self._generator, dtype=torch.float32
                )
                if change % 4 > 1:
                    noise = _shared_noise(wide_values[node], change)
                others[node] = wide_values[node] * (1 + _STEP * noise)
            changed = self._in_float64(drawn, [pair.before], others) or wide_values
            moves = torch.maximum(moves, _squares(exact, pair.numbers(changed), self._lead)[0])
            limit = times**2 * moves[mask]
            if bool((errors[mask] <= limit).all()):
                return True
            if change + 1 >= _CHANGES[0] and not bool(
                (errors[mask] <= _FAR_FACTOR**2 * limit).all()
            ):
                return False
        return False


def _shared_noise(value: Tensor, seed: int) -> Tensor:
    """Returns noise that is equal for numbers which bfloat16 does not distinguish.

    If one element of x is large, a weight of few bits makes many such numbers, and they round
    alike.
    """
    return torch.sin(value.to(torch.bfloat16).view(torch.int16) * (12.9898 + seed)) * 2**0.5


def _has_bytes(node: Node) -> bool:
    """Returns True if the node holds numbers of one byte, or rows in pieces of 32 bytes.

    float64 rounds such numbers, too.
    """
    dtype = getattr(value_of(node), "dtype", torch.bool)
    return (dtype != torch.bool and dtype.itemsize == 1) or "PA_NZ" in node.kwargs.values()


def _squares(expected: Tensor, actual: Tensor, tokens: Collection[int]) -> tuple[Tensor, Tensor]:
    """Returns, for each row, the squared length of the difference and of the expected row.

    A row runs along the last axes that are none of ``tokens``. Of two axes of one length, the outer
    one counts tokens.
    """
    along, count, token_counts, token_axes = list[int](), 1, list(tokens), set[int]()
    for axis, size in enumerate(expected.shape):
        if size in token_counts:
            token_counts.remove(size)
            token_axes.add(axis)
    for axis in reversed(range(expected.dim())):
        if axis not in token_axes and 0 < count < _SHORTEST_ROW:
            along.insert(0, axis)
            count *= expected.shape[axis]
    order = [*(axis for axis in range(expected.dim()) if axis not in along), *along]
    a, b = (
        value.permute(order).reshape(count and expected.numel() // count, count)
        for value in (expected, actual)
    )
    lengths = a.square().sum(1)
    errors, rows = torch.zeros_like(lengths), (a != b).any(1) | lengths.isinf()
    a, b = a[rows], b[rows]  # most rows of a cache are neither written nor infinite
    errors[rows] = torch.where(a == b, 0, a - b).square().sum(1)  # equal infinities, too
    lengths[rows] = torch.where(a.isinf(), 0, a).square().sum(1)
    return errors, lengths


def _distance(errors: Tensor, lengths: Tensor) -> float:
    """Returns the relative L2 error of all rows, from squared lengths."""
    return math.sqrt(float(errors.sum()) / (float(lengths.sum()) or 1.0))
