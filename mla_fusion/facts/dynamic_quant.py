"""Quantisation of rows as the kernel does it: by an npu operator, or to int8 by whatever nodes
compute the same.

``values = round(rows * 127 / max|rows|)``, ``scale = max|rows| / 127``; of float formats, and of
blocks of a row, an operator says it by its arguments. Of nodes exact arithmetic says it: another
number of steps, a truncation, or a maximum over less or more than a row is another function. A
floor under the maximum that no normed row comes near is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.fx import Node

from mla_fusion.fx.contraction import Scales
from mla_fusion.fx.kinds import argument, is_getitem, operator_of, word
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.shrink import WORTHWHILE, Shrink
from mla_fusion.fx.sizes import is_size, same, same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, peel, reached, reshapes, upward, views_and_casts
from mla_fusion.meta import number_formats
from mla_fusion.meta.number_formats import ELEMENTS, INT8, NumberFormat
from mla_fusion.operators.known import dtype_of, shape_of, value_of
from mla_fusion.prove import evaluate, field, quantising
from mla_fusion.prove.evaluate import Evaluation
from mla_fusion.prove.field import Num
from mla_fusion.prove.operators import real

# what the largest of a row becomes; the first is the kernel's
_MOSTS = (quantising.STEPS, 128, 126, 127.5, 255, 254, 256, 7, 8, 448, 240, 1)
_FARTHEST = 24  # nodes from int8 values up to the rows
# What arguments of the operators must be for the kernel's own quantisation, where a release has
# them.
_ROWS, _BLOCKS = "npu_dynamic_quant", "npu_dynamic_mx_quant"
_PLAIN: dict[str, dict[str, object]] = {
    _ROWS: {"quant_mode": "pertoken", "dst_type_max": 0.0},
    _BLOCKS: {
        "round_mode": "rint",
        "block_size": number_formats.BLOCK,
        "scale_alg": 0,
        "dst_type_max": 0.0,
        "max_low_bound": 0.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class DynamicQuant:
    """``node`` quantises every row of ``source`` to ``format``, ``smooth`` (per column) multiplied
    onto it before.

    node      the operator, or the int8 values where other nodes compute them
    by_nodes  they do
    scale     what holds a scale for each row where nodes compute it; None where none does (they use
              its inverse, say)
    """

    node: Node
    source: Node
    smooth: Node | None
    by_nodes: bool = False
    scale: Node | None = None
    format: NumberFormat = INT8


def by_operator(operator: Node) -> DynamicQuant | None:
    """What ``operator`` does, where it is a quantisation that the kernel does itself."""
    plain = _PLAIN.get(word(operator))
    source = operator.args[0] if plain is not None else None
    if (
        plain is None
        or not isinstance(source, Node)
        or argument(operator, "group_index") is not None
    ):
        return None
    if any(argument(operator, name) not in (None, wanted) for name, wanted in plain.items()):
        return None
    in_blocks, rank = word(operator) == _BLOCKS, source.meta["val"].dim()
    form = number_formats.of_dst_type(argument(operator, "dst_type"), in_blocks)
    if form is None or int(argument(operator, "axis", -1)) % rank != rank - 1:
        return None
    return DynamicQuant(
        node=operator, source=source, smooth=argument(operator, "smooth_scales"), format=form
    )


def of_values(values: Node) -> DynamicQuant | None:
    """The operator's quantisation of which ``values`` are views of the first result."""
    base = peel(values)
    maker = base.args[0] if is_getitem(base) and base.args[1] == 0 else None
    return by_operator(maker) if isinstance(maker, Node) else None


def quantised_behind(activation: Node) -> Node | None:
    """The numbers of one byte that an operand re-indexes or casts, or None."""
    above = upward(activation, views_and_casts)
    return next((node for node in above if dtype_of(node) in ELEMENTS), None)


def unsmoothed(view: View, dynamic: DynamicQuant) -> DynamicQuant | None:
    """The same, read as rows times a vector that no product reaches; a norm's weight is one as much
    as smooth scales.

    Of an operator's, which is given its smooth scales, there is no second form.
    """
    base = peel(dynamic.source)
    sides = [arg for arg in base.args if isinstance(arg, Node)]
    if not dynamic.by_nodes or word(base) != "mul" or len(sides) != 2 or base.kwargs:
        return None
    for rows, smooth in (sides, sides[::-1]):
        shape = shape_of(smooth)
        columns = same_shape(shape[-1:], shape_of(base)[-1:]) and all(
            same(size, 1) for size in shape[:-1]
        )
        if columns and not view.sources(smooth) and same_shape(shape_of(rows), shape_of(base)):
            return replace(dynamic, source=rows, smooth=smooth)
    return None


def results(view: View, dynamic: DynamicQuant, rows: Node) -> Iterator[tuple[Node, bool]]:
    """What holds quantised values (True) or scales (False) of ``rows``, quantised as ``dynamic``
    does.
    """
    if not dynamic.by_nodes:
        for user in rows.users:
            if view.same(user, dynamic.node):
                yield from ((result, bool(result.args[1] == 0)) for result in user.users)
    elif view.same(rows, dynamic.source):
        _, *below = reached([rows], _runnable, _FARTHEST)
        for node in below:
            if view.same(node, dynamic.node):
                yield node, True
            elif dynamic.scale is not None and view.same(node, dynamic.scale):
                yield node, False


def _runnable(rows: Node) -> Iterator[Node]:
    return (user for user in rows.users if operator_of(user).runs)


class DynamicQuantReader:
    """Reads the quantisations of one view; equal ones are run once."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._holds: dict[object, bool] = {}

    def of_product(self, values: Node, scales: Scales) -> DynamicQuant | None:
        """The quantisation of which ``values`` (an operand) and the token scale of its product are
        the results.
        """
        base, token = peel(values), scales.token
        if not is_getitem(base):
            return (
                self._by_nodes(base, token, scales.factor, scales.inverse)
                if token is not None
                else None
            )
        dynamic = of_values(values)
        if dynamic is None or token is None:
            return dynamic  # without a token scale for the verdict to refuse
        if dynamic.format is not scales.format:
            return None  # its numbers are multiplied as other ones
        of_scale = peel(token)
        if not self.view.in_order(of_scale, token):
            return None  # the scales of other tokens than the rows'
        if scales.factor != 1.0 or scales.inverse or not is_getitem(of_scale):
            return None
        maker = of_scale.args[0]
        theirs = (
            of_scale.args[1] == 1
            and isinstance(maker, Node)
            and self.view.same(maker, dynamic.node)
        )
        # else it is scaled by something else than what it was divided by
        return dynamic if theirs else None

    def _by_nodes(
        self, values: Node, token: Node, factor: float, inverse: bool
    ) -> DynamicQuant | None:
        token = origin(token, reshapes)
        for source, inside in self._cuts(values, token):
            if self._is_source(source, inside, values, token, factor, inverse):
                scale = token if factor == 1.0 and not inverse else None
                return DynamicQuant(
                    node=values, source=source, smooth=None, by_nodes=True, scale=scale
                )
        return None

    def why_not(self, values: Node, token: Node, factor: float, inverse: bool) -> str:
        """What keeps int8 values (an operand), and the scale of their product, from being the
        kernel's quantisation; "" of an operator's values.
        """
        if is_getitem(peel(values)):
            return ""
        base, token = peel(values), origin(token, reshapes)
        for source, _ in self._cuts(base, token):
            if not self._may_be_source(source, base, token):
                continue
            most = self._most(source, token, factor, inverse)
            if most == quantising.STEPS:
                return f"{base.name} is not row / scale, rounded (half to even), from -128 to 127"
            if most is not None:
                return f"{token.name} is max|row| / {most:g}, not max|row| / 127"
        return f"{token.name} cannot be shown to be max|row| / 127 of each token"

    def _most(self, source: Node, token: Node, factor: float, inverse: bool) -> float | None:
        """What the scale makes of the largest of each row, where it is one of the usual numbers."""

        def is_made(run: Evaluation, most: float) -> bool:
            largest = quantising.largest_of(real(run.value(source)))
            field.here().of_kernel += field.here().maxima  # under which a floor may stand
            step = _step(run, token, factor, inverse) * field.number(most)
            return evaluate.is_same(step.reshape(largest.shape), largest)

        return evaluate.which(self.view, {source: "x"}, _MOSTS, is_made, self._shrink(source))

    def _cuts(self, values: Node, token: Node) -> Iterator[tuple[Node, list[Node]]]:
        """Nodes from which alone (and from literals) both are computed, nearest first; and the
        nodes in between.
        """
        position = self.view.position
        frontier, passed = {values, token}, 0
        while frontier and passed < _FARTHEST:
            last = max(frontier, key=position.__getitem__)
            if len(frontier) == 1 and passed:
                between = {*nodes_between((last,), values), *nodes_between((last,), token)}
                yield (
                    last,
                    [node for node in sorted(between) if not is_size(node)],
                )
            if not operator_of(last).runs:
                return
            frontier.remove(last)
            passed += 1
            inputs = (node for node in last.all_input_nodes if not is_size(node))
            frontier.update(node for node in inputs if not self.view.is_constant(node))

    def _is_source(
        self,
        source: Node,
        inside: list[Node],
        values: Node,
        token: Node,
        factor: float,
        inverse: bool,
    ) -> bool:
        if not self._may_be_source(source, values, token):
            return False
        shape, shrink = self.view.binding.shape_of(source), self._shrink(source)
        program = Program([source], inside, self.view.binding, shrink=shrink)
        places = program.slot(values), program.slot(token)
        key = shape, places, factor, inverse, program.signature
        if key not in self._holds:
            self._holds[key] = evaluate.holds(
                self.view,
                {source: "x"},
                lambda run: _holds(run, source, values, token, factor, inverse),
                shrink,
            )
        return self._holds[key]

    def _may_be_source(self, source: Node, values: Node, token: Node) -> bool:
        value = value_of(source)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        is_int8 = is_float and token is not source and dtype_of(values) == torch.int8
        return is_int8 and same_shape(value.shape, shape_of(values))

    def _shrink(self, source: Node) -> Shrink | None:
        *lead, _ = self.view.binding.shape_of(source)
        return Shrink(max(lead, default=1)) if prod(lead) >= WORTHWHILE else None


def _holds(
    run: Evaluation, source: Node, values: Node, token: Node, factor: float, inverse: bool
) -> bool:
    rows, point = real(run.value(source)), field.here()
    in_bytes, step = quantising.by_row(rows)
    point.of_kernel += point.maxima  # under which a floor may stand
    scale = _step(run, token, factor, inverse)
    if scale.re.numel() != step.re.numel():
        return False
    scale = scale.reshape(step.shape)
    return evaluate.is_same(run.value(values), in_bytes) and evaluate.is_same(scale, step)


def _step(run: Evaluation, token: Node, factor: float, inverse: bool) -> Num:
    """What the rows of a token are multiplied by behind the product."""
    scale = real(run.value(token))
    return (field.inverse(scale) if inverse else scale) * field.number(factor)
