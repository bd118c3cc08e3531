"""The second witness: the region and its replacement run on the same values, on CPU, and are
compared row by row.

It shares no notion of equality with recognition. The nodes of the graph are run as they are, dtypes
and casts included, from leaves whose values are drawn (``region`` says which, ``draws`` how); the
call is given what the graph's own nodes have computed for it, tables and slots among it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.commit.draws import CEILINGS, WIDE, Draws, has_large_channels
from mla_fusion.commit.interpreter import Interpreter, Unrunnable, wide, widened
from mla_fusion.commit.region import Region, cut_out, same_elements
from mla_fusion.commit.token_counts import counts, kinds_at, tokens_at
from mla_fusion.emit import results as of_call
from mla_fusion.emit import rows, targets
from mla_fusion.fx.build import Recipe, TensorBuilder
from mla_fusion.fx.held import Exact
from mla_fusion.fx.kinds import MODEL_FLOATS
from mla_fusion.fx.view import View
from mla_fusion.meta.number_formats import BLOCK
from mla_fusion.meta.spec import TILE_SIZE
from mla_fusion.operators.known import dtype_of, shape_of
from mla_fusion.paging.tiles import numbers_of_rows
from mla_fusion.plan.outputs import Replacement
from mla_fusion.plan.plan import InPlace, Plan
from mla_fusion.reference import hifloat8
from mla_fusion.report.rejection import Refuse
from mla_fusion.report.report import Figure, Shown

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
_CACHES = ("kv_cache", "kr_cache")
_ROTATED = ("query_rope", "k_pe", "kr_cache")
_IN_BLOCKS = ("query_norm", "dequant_scale_q_norm")  # numbers, and their powers of two
_QUANTISED = ("query", "query_norm", "dequant_scale_q_norm", "kv_cache")
_SMALL_CACHE = 1 << 20  # elements up to which a cache is taken as it is
_LARGEST_CACHE = 1 << 28


@dataclass(frozen=True)
class Outcome:
    """verified: "verified" and what was not, or why nothing was. figures: of each replaced value.
    compared: what was run, as text. left_out: outputs that were not compared. proved: what was
    shown in exact arithmetic.
    """

    verified: str
    figures: tuple[Figure, ...] = ()
    compared: str = ""
    left_out: tuple[str, ...] = ()
    proved: Shown = field(default_factory=Shown)


def compare(
    view: View, plan: Plan, half_rows: bool = False, seed: int = 0, region: Region | None = None
) -> Outcome:
    """Compare every replaced value. Raises ``Refuse("verify.mismatch")`` where one is out of
    tolerance.

    ``half_rows``: the caller chose ``kr_layout="half"``, so rotated values are brought to the
    model's order first.
    """
    region = region or cut_out(view, plan)
    worst: dict[Replacement, Figure] = {}
    errors: dict[Replacement, tuple[float, float]] | None = None
    left_out: dict[str, None] = {}
    tokens, draws = list[str](), 0
    for sized in counts(view, plan, region):
        witness = _Witness(sized, plan, region, half_rows, seed)
        made, failed = 0, list[Unrunnable]()
        for kind in kinds_at(sized, plan, region):
            if kind in WIDE:
                draws += witness.agrees(kind)
                continue
            try:
                compared = list(witness.figures(kind))
            except Unrunnable as error:  # no model takes all numbers: it may divide by one
                failed.append(error)
                continue
            made += 1
            for item, figure in compared:
                known = worst.setdefault(item, figure)
                worst[item] = figure if figure.relative > known.relative else known
            # of the first draw: a region that does not run in float64 never will
            errors = witness.errors() if errors is None else errors
        draws += made
        if not made:
            if not tokens:
                raise Refuse("verify.mismatch", str(failed[0]), (failed[0].node,)) from failed[0]
            continue  # the model itself does not take so many tokens
        left_out |= dict.fromkeys(item.output for item in witness.left_out)
        tokens.append(str(tokens_at(sized, plan)))
        if len(tokens) == 2:
            break
    said = (
        f"compared at T = {' and '.join(tokens)}, {_plural(draws, 'draw')}, "
        f"{_plural(len(worst), 'output')}"
    )
    except_for = f" except {', '.join(left_out)}" if left_out else ""
    exact = errors or {}
    figures = (replace(figure, float64=exact.get(item)) for item, figure in worst.items())
    return Outcome("verified" + except_for, tuple(figures), said, tuple(left_out))


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


@dataclass(frozen=True)
class _Drawn:
    """What one draw has made: the unfused values, and the results of the call."""

    kind: str
    unfused: dict[Node, Any]
    results: dict[str, Any]
    builder: TensorBuilder


class _Witness:
    """One region at one binding of its sizes."""

    def __init__(self, view: View, plan: Plan, region: Region, half_rows: bool, seed: int) -> None:
        self.view, self.plan, self.region, self.half_rows = view, plan, region, half_rows
        self.left_out: list[Replacement] = []
        self._seed = seed
        self._ceiling = 0
        self._given: dict[Node, Any] = {}
        # of the last ordinary draw: the unfused values, the fused ones, whose rows these are
        self._compared: dict[Replacement, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._cut(_fewer_blocks(view, plan))
        tolerance = TOLERANCE_QUANTISED if plan.candidate.weight_quant_mode else TOLERANCE
        self._limits = tolerance, OF_A_ROW * tolerance

    def _cut(self, blocks: int | None) -> None:
        """Take caches of so many blocks, None: as they are."""
        plan, region = self.plan, self.region
        self.blocks = blocks
        self.draws = Draws(self.view, plan, region, blocks, self.half_rows, self._seed)
        self._as_written = Interpreter(region.nodes, self.view.binding)
        self._in_float64 = Interpreter(region.nodes, self.view.binding, wide=True)
        self._packed: dict[str, dict[str, Any]] = {}

    def agrees(self, kind: str) -> bool:
        """Whether a draw has been compared that not every region can be run on. Raises ``Refuse``
        for a difference.
        """
        try:
            drawn = self._called(kind, *self._run_at_some_ceiling(kind))
        except (Unrunnable, RuntimeError, ValueError):
            return False
        for item in self.plan.replacements:
            if item not in self.left_out:
                self._figure(item, drawn)
        return True

    def _called(self, kind: str, values: dict[Node, Any], unfused: dict[Node, Any]) -> _Drawn:
        of = "wide" if kind in WIDE else "outliers" if has_large_channels(kind) else ""
        changing = _changing(self.region, self.draws, kind in WIDE)
        made = _WideBuilder if kind in WIDE else _Builder
        builder = made(values, self.view.binding, self._packed.setdefault(of, {}), changing)
        return _Drawn(kind, unfused, targets.call_kernel(builder, self.plan), builder)

    def figures(self, kind: str) -> Iterator[tuple[Replacement, Figure]]:
        values = self._run(kind)
        try:
            drawn = self._called(kind, *values)
        except (RuntimeError, ValueError) as error:
            nodes = self.plan.candidate.nodes
            raise Refuse(
                "verify.mismatch", f"the call does not run on CPU: {error}", nodes
            ) from error
        for item in self.plan.replacements:
            if item not in self.left_out:
                yield item, self._figure(item, drawn)

    # -- the region

    def _run(self, kind: str) -> tuple[dict[Node, Any], dict[Node, Any]]:
        """What the call reads, and what it replaces, for one draw of the leaves. Raises
        Unrunnable.
        """
        try:
            return self._run_at_some_ceiling(kind)
        except Unrunnable:
            if self.blocks is None:
                raise
        if any(
            self.view.binding.count_of(cache) > _LARGEST_CACHE for cache in self.plan.caches.inputs
        ):
            self.left_out = [item for item in self.plan.replacements if item.output in _CACHES]
        else:
            self._cut(None)
        return self._run_at_some_ceiling(kind)

    def _run_at_some_ceiling(self, kind: str) -> tuple[dict[Node, Any], dict[Node, Any]]:
        first: Unrunnable | None = None
        for place in range(self._ceiling, len(CEILINGS)):
            try:
                found = self._run_once(kind, CEILINGS[place])
                self._ceiling = place
                return found
            except Unrunnable as error:
                first = first or error
        assert first is not None
        raise first

    def _run_once(self, kind: str, ceiling: int) -> tuple[dict[Node, Any], dict[Node, Any]]:
        region, binding = self.region, self.view.binding
        drawn = self.draws.values(kind, ceiling)
        given = {leaf: drawn[leaf] for leaf in region.leaves}
        for node, slots in region.twins.items():
            value = node.meta["val"]
            given[node] = (
                drawn[same_elements(slots)].reshape(binding.shape(value.shape)).to(value.dtype)
            )
        self._given = given
        targets = [item.node for item in self.plan.replacements if item not in self.left_out]
        runs = self._in_float64 if kind in WIDE else self._as_written
        found = runs.run(given, [*targets, *region.reads])
        return {node: drawn.get(node, found[node]) for node in region.reads}, {
            node: found[node] for node in targets
        }

    # -- the comparison

    def _figure(self, item: Replacement, drawn: _Drawn) -> Figure:
        name, want, builder = item.output, drawn.unfused[item.node], drawn.builder
        result = drawn.results[name]
        if self.half_rows and name in _ROTATED:
            result = rows.interleave(builder, result)
        if name in _CACHES:
            got = result.reshape(want.shape) if result.numel() == want.numel() else result
            if name == "kv_cache" and self.plan.kv_cache_quant_mode == 3:
                want, got = (_unpacked(self.plan, value) for value in (want, got))
            width = want.shape[-1] if want.numel() != result.numel() else result.shape[-1]
            owner = torch.arange(want.numel()) // width
        else:
            got = of_call.arrange(builder, item, result)
            owner = of_call.arrange(
                builder, item, _owners(result, 1 if "scale" in name else len(self.plan.lead))
            )
            form = self.plan.candidate.format
            if form is not None and form.in_blocks and name in _IN_BLOCKS:
                want, got = self._in_scales(item, want, got, drawn)
        return self._judged(item, want, got.to(want.dtype), owner, drawn.kind)

    def _in_scales(
        self, item: Replacement, want: Any, got: Any, drawn: _Drawn
    ) -> tuple[torch.Tensor, Any]:
        """Numbers of mxfp8 as they are in the model's scales, and scales without the steps that
        numbers make up for: the largest of a block, rounded, is another power of two.
        """
        of_both = {
            other.output: other
            for other in self.plan.replacements
            if other.output in _IN_BLOCKS and other.node.args[:1] == item.node.args[:1]
        }
        if len(of_both) < 2:
            return want, got
        scales = of_both[_IN_BLOCKS[1]]
        own = drawn.unfused[scales.node]
        mine = self._numbers(scales, own).float()
        theirs = of_call.arrange(drawn.builder, scales, drawn.results[scales.output])
        steps = self._numbers(scales, theirs.to(own.dtype)).float() / mine
        if item is scales:
            return mine, torch.where((steps >= 0.5) & (steps <= 2), mine, mine * steps)
        steps = steps.reshape(*steps.shape[:-2], -1).repeat_interleave(BLOCK, -1)
        return self._numbers(item, want), self._numbers(item, got.to(want.dtype)) * steps

    def _judged(
        self, item: Replacement, want: Any, got: Any, owner: torch.Tensor, kind: str
    ) -> Figure:
        """The figure of an output. Raises ``Refuse`` where it, or one row of it, is out of
        tolerance.
        """
        where = f"{item.output} at {item.node.name}, {kind}"
        of_all, of_row = (TOLERANCE_WIDE, TOLERANCE_WIDE) if kind in WIDE else self._limits
        if want.shape != got.shape:
            detail = f"{where}: shape {list(got.shape)} in place of {list(want.shape)}"
            raise Refuse("verify.mismatch", detail, (item.node,))
        want, got = (self._numbers(item, value) for value in (want, got))
        self._compared[item] = want, got, owner
        wrong, size = _squares(want, got, owner)
        relative = math.sqrt(float(wrong.sum()) / (float(size.sum()) or 1.0))
        # a row of zeros must be one; NaN stays NaN
        of_rows = torch.where(wrong == 0, 0.0, (wrong / size).sqrt())
        row = float(of_rows.max()) if len(of_rows) else 0.0
        if kind in WIDE and not max(relative, row) <= of_row:  # nothing was rounded
            raise Refuse(
                "verify.mismatch", f"{where}: relative error {max(relative, row):.3g}", (item.node,)
            )
        # rows over the limit of one row are among those over that of all
        is_over = not relative <= of_all
        limit = of_all if is_over else of_row
        over = ~(of_rows <= limit)
        if (is_over or bool(over.any())) and not self._is_rounding(item, want, wrong, over, owner):
            far = (
                f"{relative:.3g} > {of_all:g}" if is_over else f"{row:.3g} > {of_row:g} in one row"
            )
            raise Refuse("verify.mismatch", f"{where}: relative error {far}", (item.node,))
        largest = float((want.double() - got.double()).abs().max()) if want.numel() else 0.0
        return Figure(item.output, relative, largest, want.numel(), row)

    def errors(self) -> dict[Replacement, tuple[float, float]]:
        """Of each output compared last: how far the fused and the unfused values are from the
        region's own in float64, relative to them.
        """
        given = {leaf: widened(value) for leaf, value in self._given.items()}
        try:
            found = self._in_float64.run(given, [item.node for item in self._compared])
        except Unrunnable:
            return {}
        errors = {}
        for item, (unfused, fused, owner) in self._compared.items():
            exact = found[item.node]
            if isinstance(exact, torch.Tensor) and exact.shape == unfused.shape:
                exact = self._numbers(item, exact)
                (wrong, size), (lost, _) = (_squares(exact, v, owner) for v in (fused, unfused))
                whole = float(size.sum()) or 1.0
                errors[item] = tuple(math.sqrt(float(v.sum()) / whole) for v in (wrong, lost))
        return errors  # type: ignore[return-value]

    def _numbers(self, item: Replacement, value: torch.Tensor) -> torch.Tensor:
        """What bytes of a float format stand for."""
        form = self.plan.candidate.format
        if (
            form is None
            or item.output not in _QUANTISED
            or value.dtype not in (form.element, torch.uint8)
        ):
            return value
        if item.output == "dequant_scale_q_norm":
            return value.view(torch.float8_e8m0fnu).float()
        return hifloat8.decode(value) if form.element == torch.uint8 else value.float()

    def _is_rounding(
        self,
        item: Replacement,
        want: torch.Tensor,
        wrong: torch.Tensor,
        rows_over: torch.Tensor,
        owner: torch.Tensor,
    ) -> bool:
        """Do these rows differ by no more than rounding can do to them, which is much where terms
        cancel?

        The region is run in float64 on the same values, and again with x, and with what the
        down-projections make of it, changed by about one step of bfloat16: how far a row moves is
        what rounding can do to it. (A quantised x takes no notice of small changes, and then nor
        does anything behind it: hence the second place.) What the model itself has lost in the row
        is no measure: it may be all of it, where the model makes much of its own rounding.
        """
        region = self.region
        x = [
            leaf
            for leaf, role in region.leaves.items()
            if role == "x" and dtype_of(leaf) in MODEL_FLOATS
        ]
        made = [node for node in region.nodes if node in self.plan.candidate.made_of_x]
        given = {leaf: widened(value) for leaf, value in self._given.items()}
        try:
            found = self._in_float64.run(given, [*made, item.node])
        except Unrunnable:
            return False
        exact = found[item.node]
        if not isinstance(exact, torch.Tensor) or exact.shape != want.shape:
            return False
        exact = self._numbers(item, exact)
        moved = torch.zeros_like(wrong)
        generator = torch.Generator().manual_seed(self._seed)
        for changed in (x, made):
            for _ in range(_JITTERS if changed else 0):
                other = {node: _jittered(found[node], generator) for node in changed}
                result = self._in_float64.run(given | other, [item.node])[item.node]
                moved = torch.maximum(moved, _squares(exact, self._numbers(item, result), owner)[0])
        return bool((wrong[rows_over] <= _OF_ROUNDING**2 * moved[rows_over]).all())


def _jittered(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return value * (1 + _STEP * torch.randn(value.shape, generator=generator, dtype=torch.float64))


class _Builder(TensorBuilder):
    """Packs a weight once for all draws, where it is made of what does not change."""

    def __init__(
        self, values: Any, binding: Any, packed: dict[str, Any], changing: set[Node]
    ) -> None:
        super().__init__(values, binding)
        self._packed, self._changing = packed, changing

    def packed(
        self, name: str, recipe: Recipe, leaves: Sequence[Node], exact: Exact | None = None
    ) -> Any:
        if not self._changing.isdisjoint(leaves):
            return recipe(self)
        if name not in self._packed:
            self._packed[name] = recipe(self)
        return self._packed[name]


class _WideBuilder(_Builder):
    """Rounds no float."""

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        return super().cast(value, wide(dtype))

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = wide(kwargs["dtype"])
        return super().call(op, *args, **kwargs)


def _changing(region: Region, draws: Draws, wide: bool) -> set[Node]:
    """What differs from draw to draw."""
    found = {leaf for leaf in region.leaves if draws.changes(leaf, wide)} | set(region.twins)
    for node in region.nodes:
        if any(read in found for read in node.all_input_nodes):
            found.add(node)
    return found


def _owners(result: torch.Tensor, lead: int) -> torch.Tensor:
    """For each element of an output, the number of the token that it belongs to."""
    tokens = torch.arange(math.prod(result.shape[:lead])).reshape(result.shape[:lead])
    return tokens.reshape(*tokens.shape, *(1,) * (result.dim() - lead)).expand(result.shape)


def _squares(
    want: torch.Tensor, got: torch.Tensor, owner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row: the squared length of the difference, and of what it should be."""
    rows_of = owner.reshape(-1)
    found = torch.zeros(2, int(rows_of.max()) + 1 if len(rows_of) else 0, dtype=torch.float64)
    wide = torch.float64 if want.numel() < 1 << 24 else torch.float32
    flat = want.to(wide).reshape(-1)
    for place, values in enumerate((flat - got.to(wide).reshape(-1), flat)):
        found[place].index_add_(0, rows_of, values.square().double())
    return found[0], found[1]


def _unpacked(plan: Plan, value: torch.Tensor) -> torch.Tensor:
    """Rows of int8 tiles as the numbers that they stand for."""
    key = plan.candidate.key
    return numbers_of_rows(value, hckv=len(key.columns), dr=key.rope_dim, tile=TILE_SIZE)


# -- large caches


def _fewer_blocks(view: View, plan: Plan) -> int | None:
    """How many blocks of a large cache are enough for the test; None where it is taken as it is."""
    slots = plan.caches.slots
    # in sequences, each is written
    if not isinstance(plan.caches, InPlace) or slots.span is not None or slots.in_sequences:
        return None
    blocks, size = view.binding.shape(plan.caches.kv_shape[:2])
    if all(view.binding.count_of(cache) <= _SMALL_CACHE for cache in plan.caches.inputs):
        return None
    unit = _unit(view, plan)
    tokens = tokens_at(view, plan)
    step = blocks // unit if unit else 0
    if not step:
        return None
    wanted = -(-tokens // size) + 2
    fewer = -(-wanted // step) * step
    return fewer if fewer < blocks else None


def _unit(view: View, plan: Plan) -> int:
    """The number of equal parts, each of whole blocks, in which every cache can be cut along its
    first axis; or 0.
    """
    assert isinstance(plan.caches, InPlace)
    blocks = view.binding.size(plan.caches.kv_shape[0])
    firsts = [view.binding.size(shape_of(cache)[0]) for cache in plan.caches.inputs]
    if all(first % blocks == 0 for first in firsts):
        return blocks
    return firsts[0] if len(set(firsts)) == 1 and blocks % firsts[0] == 0 else 0
