"""Values as operations of a Builder: nodes of a graph, or tensors.

This is the way back from Values, used after a plan is decided. ``plan/call.py`` makes the arguments
of the kernel's call with it, and ``commit/rewrite.py`` makes the new graph.

A Value that a usable node holds is that node. Any other Value is computed from its sources. A
handle is what the Builder returns: a node or a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import without_fake_mode
from mla_fusion.fx.build import Builder
from mla_fusion.fx.kinds import is_literal, value_of
from mla_fusion.graph.columns import Groups, groups_of
from mla_fusion.graph.form import Value
from mla_fusion.graph.numbers import MINUS_ONE, ONE, Number, number
from mla_fusion.graph.read import Graph

aten = torch.ops.aten
_POWERS = {
    Fraction(1, 2): aten.sqrt.default,
    Fraction(-1, 2): aten.rsqrt.default,
    Fraction(-1): aten.reciprocal.default,
}
_BYTES = {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}


class Lowering:
    """Makes handles of Values.

    known   handles of Values that are not computed: results of the call, packed weights
    usable  returns True for a node of the graph that may be read at the place of the new operations
            and holds the same numbers there as when it was computed
    """

    def __init__(
        self, builder: Builder, graph: Graph, usable: Callable[[Node], bool] = lambda node: True
    ) -> None:
        self.b, self.graph, self.form = builder, graph, graph.form
        self.usable = usable
        self.known: dict[Value, Any] = {}
        self._handles: dict[object, Any] = {}

    def of(
        self, value: Value, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
    ) -> Any:
        """The handle of a Value. Raises LookupError with a Value that no operator computes.

        dtype  of the handle; None: the Value's own, and for an active Value that of the first node
               that holds it
        shape  of the handle; None: the Value's own
        """
        if shape is not None:
            value = self.form.reshape(value, shape)
        if dtype is not None and not value.active and value not in self.known:
            cast = self.form.cast(value, dtype)
            if any(self._nodes_holding(cast)) or not any(self._nodes_holding(value)):
                value, dtype = cast, None
        key = value, dtype
        if key not in self._handles:
            self._handles[key] = self._make_handle(value, dtype)
        return self._handles[key]

    def _make_handle(self, value: Value, dtype: torch.dtype | None) -> Any:
        """Makes the handle of a Value: of a node that holds it, of a cast, or of its
        computation.
        """
        if value not in self.known and (value.active or dtype is None):
            node_dtype = dtype if value.active else value.dtype
            for node, tensor in self._nodes_holding(value):
                if node_dtype in (None, tensor.dtype) and not tensor.is_complex():
                    return self.b.reshape(self.b.value(node), self._shape(value.shape))
        if dtype is not None:
            return self.b.cast(self.of(value), dtype)
        if value in self.known:
            return self.b.reshape(self.known[value], self._shape(value.shape))
        return self._compute(value)

    def _nodes_holding(self, value: Value) -> Iterator[tuple[Node, torch.Tensor]]:
        """Yields the usable nodes that hold a Value in a single tensor, with that tensor.

        A literal of the trace is a real tensor: only ``lift_fresh_copy`` may read it.
        """
        for node in self.graph.nodes_holding(value):
            tensor, is_bare = value_of(node), node.op == "get_attr" and is_literal(node)
            if isinstance(tensor, torch.Tensor) and self.usable(node) and not is_bare:
                yield node, tensor

    # -- sizes

    def _shape(self, shape: Iterable[int]) -> list[Any]:
        """Bound numbers as sizes of the graph."""
        return [self.graph.unbound(size) for size in shape]

    @cached_property
    def _weight_node(self) -> Node:
        """A node that holds a weight. New tensors are made on its device."""
        weights = (value for value in self.graph.nodes if value.weight)
        return next(node for value in weights for node, _ in self._nodes_holding(value))

    # -- numbers

    def _scalar(self, scalar: Number) -> Any:
        """A number as an argument of an operator. Raises LookupError if a symbolic size is part
        of it, but is not the number.
        """
        parts = scalar.ratio.as_integer_ratio()
        if scalar.roots or parts[1] != 1 or abs(parts[0]) > sys.maxsize:
            if any(part % size == 0 for part in parts for size in self.graph.sizes):
                raise LookupError("a quotient of sizes")
            return float(scalar)
        size = self.graph.unbound(abs(parts[0]))
        return self.b.size(-size if parts[0] < 0 else size)

    def _full(self, filled: Value, shape: Sequence[int]) -> Any:
        """A tensor filled with one number."""
        sizes = self.b.sizes(self._shape(shape))
        return self._create(aten.full.default, filled, sizes, self._scalar(filled.number))

    def _create(self, operator: Any, like: Value, *args: Any) -> Any:
        """Calls an operator that makes a tensor, with the dtype of ``like``."""
        device = value_of(self._weight_node).device
        return self.b.call(operator, *args, dtype=like.dtype, device=device)

    def _scale(self, handle: Any, times: Number) -> Any:
        """A handle times a number."""
        if times == ONE:
            return handle
        if times == MINUS_ONE:
            return self.b.call(aten.neg.default, handle)
        return self.b.call(aten.mul.Tensor, handle, self._scalar(times))

    # -- operations

    def _compute(self, value: Value) -> Any:
        """Computes a Value from its sources, or takes a part of a complex node."""
        for node, tensor in self._nodes_holding(value):
            if tensor.is_complex() and not tensor.is_conj():
                parts = self.b.call(aten.view_as_real.default, self.b.value(node))
                is_imag = self.graph.readings[node].imag is value
                return self.b.call(aten.select.int, parts, -1, int(is_imag))
        operation = getattr(self, f"_{value.op}", None)
        if operation is None:
            raise LookupError(value)
        handle = operation(value, *value.sources)
        return handle if value.active else self.b.cast(handle, value.dtype)

    def _operands(self, value: Value) -> list[Any]:
        """The handles of a Value's sources, in its dtype unless it is active.

        Raises LookupError if bytes that stand for floats would be computed with: they are only
        moved.
        """
        dtype = None if value.active else value.dtype
        handles = [self.of(source, dtype) for source in value.sources]
        dtypes = *map(self.b.dtype, handles), *(source.dtype for source in value.sources)
        if value.op != "join" and not _BYTES.isdisjoint(dtypes):
            raise LookupError(value)
        return handles

    def _sum(self, value: Value, *sources: Value) -> Any:
        """Coefficients times sources, added up."""
        coefficients, constant = value.literal
        terms = zip(coefficients, self._operands(value), strict=True)
        (first_times, first), *others = sorted(terms, key=lambda term: term[0] != 1)
        total = self._scale(first, number(first_times))
        for times, handle in others:
            if times == -1:
                total = self.b.call(aten.sub.Tensor, total, handle)
            else:
                alpha = {} if times == 1 else {"alpha": self._scalar(number(times))}
                total = self.b.call(aten.add.Tensor, total, handle, **alpha)
        if not constant:
            return total
        return self.b.call(aten.add.Tensor, total, self._scalar(number(constant)))

    def _product(self, value: Value, *sources: Value) -> Any:
        """Sources to exponents, multiplied."""
        exponents, times = value.literal
        if not sources:
            return self._full(value, ())
        product = None
        for handle, exponent in zip(self._operands(value), exponents, strict=True):
            if exponent in _POWERS:
                handle = self.b.call(_POWERS[exponent], handle)
            elif exponent != 1:
                handle = self.b.call(aten.pow.Tensor_Scalar, handle, self._scalar(number(exponent)))
            product = handle if product is None else self.b.call(aten.mul.Tensor, product, handle)
        return self._scale(product, times)

    def _reshape(self, value: Value, source: Value) -> Any:
        """The source in another shape."""
        handle = self.known[source] if source in self.known else self.of(source)
        return self.b.reshape(handle, self._shape(value.shape))

    def _permute(self, value: Value, source: Value) -> Any:
        """The axes in another order."""
        return self.b.permuted(self.of(source), value.literal)

    def _expand(self, value: Value, source: Value) -> Any:
        """The source broadcast to the Value's shape."""
        if source.is_number:
            return self._full(source, value.shape)
        handle = self.of(source)
        sizes = self.b.sizes(self._shape(value.shape), handle)
        return self.b.call(aten.expand.default, handle, sizes)

    def _slice(self, value: Value, source: Value) -> Any:
        """A slice of one axis; the end is left out if it is the axis's."""
        axis, first, step = value.literal
        start, size = self._shape((first, value.shape[axis]))
        handle, end = self.of(source), sys.maxsize
        if first + value.shape[axis] * step < source.shape[axis]:
            end = self.b.size(start + (size - 1) * step + 1)
        step_argument = () if step == 1 else (step,)
        return self.b.call(aten.slice.Tensor, handle, axis, self.b.size(start), end, *step_argument)

    def _join(self, value: Value, *sources: Value) -> Any:
        """The sources side by side along an axis."""
        return self.b.joined(self._operands(value), value.literal)

    def _gather(self, value: Value, base: Value, index: Value) -> Any:
        """Rows of an axis by their numbers. Literal columns are views if they can be."""
        axis = value.literal
        if index.op == "constant" and axis == len(base.shape) - 1:
            with without_fake_mode():
                columns = tuple(index.literal.tensor.tolist())
            groups = groups_of(columns, base.shape[axis])
            if groups is not None:
                return self._select_columns(self.of(base), groups)
        handle, rows = self.of(base), self.of(index, shape=[index.numel])
        if index.op == "constant":  # a model's list of numbers is on CPU
            result = self.b.call(aten.index.Tensor, handle, [*[None] * axis, rows])
        else:
            result = self.b.call(aten.index_select.default, handle, axis, rows)
        return self.b.reshape(result, self._shape(value.shape))

    def _select_columns(self, matrix: Any, groups: Groups) -> Any:
        """Selects columns by views: a device's graph cannot hold a list of column numbers."""
        b, lead = self.b, list(self.b.shape(matrix))[:-1]

        def part(value: Any, first: int, size: int) -> Any:
            is_whole = (first, size) == (0, b.shape(value)[-1])
            arguments = value, len(b.shape(value)) - 1, first, first + size
            return value if is_whole else b.call(aten.slice.Tensor, *arguments)

        matrix = part(matrix, groups.start, groups.number * groups.stride)
        if groups.number > 1:
            matrix = b.reshape(matrix, (*lead, groups.number, groups.stride))
        parts = []
        for run in groups.runs:
            columns = part(matrix, run.first, run.size)
            if run.rows > 1:
                shape = tuple(b.shape(columns))
                rows = b.reshape(columns, (*shape[:-1], run.rows, run.size // run.rows))
                columns = b.reshape(b.transposed(rows), shape)
            parts.append(columns)
        size = groups.number * sum(run.size for run in groups.runs)
        return b.reshape(b.joined(parts, len(b.shape(parts[0])) - 1), (*lead, size))

    def _opaque(self, value: Value, *sources: Value) -> Any:
        """Memory that is not initialised. Raises LookupError for any other opaque Value."""
        if sources or "empty" not in value.literal[0]:
            raise LookupError(value)
        sizes = self.b.sizes(self._shape(value.shape))
        return self._create(aten.empty.memory_format, value, sizes)

    def _cast(self, value: Value, source: Value) -> Any:
        """The source; ``_compute`` casts it."""
        return self.of(source)

    def _count(self, value: Value) -> Any:
        """The positions 0, 1, .. of an axis."""
        (size,) = self._shape(value.shape)
        return self._create(aten.arange.default, value, self.b.size(size))

    def _leaf(self, value: Value) -> Any:
        """A symbolic size as a scalar. Raises LookupError for any other leaf."""
        size = self.graph.size_of(value)
        if size is None:
            raise LookupError(value)
        return self._create(aten.scalar_tensor.default, value, self.b.size(size))

    def _constant(self, value: Value) -> Any:
        """A tensor of literals."""
        return self.b.constant(value.literal.tensor, self.b.value(self._weight_node))
