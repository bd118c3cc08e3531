"""Values as operations of a Builder: nodes of a graph, or tensors at once.

A Value that a node holds is that node; any other is computed from its sources.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import isfinite, prod
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import without_fake_mode
from mla_fusion.fx.build import Builder
from mla_fusion.graph.columns import Groups, groups_of
from mla_fusion.graph.form import Value, broadcast, filled_with
from mla_fusion.graph.numbers import MINUS_ONE, ONE, Number, is_open, number
from mla_fusion.graph.read import Graph

aten = torch.ops.aten
_POWERS = {
    Fraction(1, 2): aten.sqrt.default,
    Fraction(-1, 2): aten.rsqrt.default,
    Fraction(-1): aten.reciprocal.default,
}
_NO_OPTIONS = "([], '')"
_BYTES = {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}


class Lowering:
    """
    known   handles of Values that are not computed: results of the call, packed weights
    usable  says whether a node of the graph may be read where the operations stand, and is there
            what it was when it was made
    """

    def __init__(
        self,
        builder: Builder,
        graph: Graph,
        known: Mapping[Value, Any] | None = None,
        usable: Callable[[Node], bool] = lambda node: True,
    ) -> None:
        self.b, self.graph, self.form = builder, graph, graph.form
        self.known, self.usable = dict(known or {}), usable
        self._made: dict[object, Any] = {}

    def of(
        self, value: Value, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
    ) -> Any:
        """The handle of a Value. Raises LookupError with a Value that no operator computes.

        dtype  else the Value's own; of an activation, which has none, that of its first node
        shape  that it is reshaped to
        """
        if shape is not None:
            value = self.form.reshape(value, shape)
        if dtype is not None and not value.active and value not in self.known:
            cast = self.form.cast(value, dtype)
            if any(self._nodes(cast)) or not any(self._nodes(value)):
                value, dtype = cast, None
        key = value, dtype
        if key not in self._made:
            self._made[key] = self._found(value, dtype)
        return self._made[key]

    def _found(self, value: Value, dtype: torch.dtype | None) -> Any:
        if value not in self.known and (value.active or dtype is None):
            wanted = dtype if value.active else value.dtype
            for node, held in self._nodes(value):
                if wanted in (None, held.dtype) and not held.is_complex():
                    return self.b.reshape(self.b.value(node), self._shape(value.shape))
        if dtype is not None:
            return self.b.cast(self.of(value), dtype)
        if value in self.known:
            return self.b.reshape(self.known[value], self._shape(value.shape))
        return self._computed(value)

    def _nodes(self, value: Value) -> Iterator[tuple[Node, torch.Tensor]]:
        return self._usable(self.graph.nodes_holding(value))

    def _usable(self, nodes: Iterable[Node]) -> Iterator[tuple[Node, torch.Tensor]]:
        """Those of the nodes that hold one tensor."""
        for node in nodes:
            held = node.meta.get("val")
            if isinstance(held, torch.Tensor) and self.usable(node):
                yield node, held

    # -- sizes

    def _shape(self, shape: Iterable[int]) -> list[Any]:
        """Sizes as the graph has them."""
        return [self.graph.unbound(size) for size in shape]

    @cached_property
    def _like(self) -> Node:
        """A node on the device of the weights."""
        weights = (value for value in self.graph.nodes if value.weight)
        return next(node for value in weights for node, _ in self._nodes(value))

    # -- numbers

    def _scalar(self, of: Number) -> Any:
        """A number as an argument; raises LookupError where a size is a part of it."""
        if of.roots or of.ratio.denominator != 1 or abs(of.ratio) > sys.maxsize:
            for part in (of.ratio.numerator, of.ratio.denominator):
                if not isinstance(self.graph.unbound(part), int):
                    raise LookupError(f"{part} is a size")
            return float(of)
        found = self.graph.unbound(int(of.ratio))
        if self.graph.sizes and isinstance(found, int) and is_open(abs(found)):
            raise LookupError(f"{found} is made of a size")
        return self.b.size(found)

    def _full(self, of: Value, shape: Sequence[int]) -> Any:
        sizes = [self.b.size(size) for size in self._shape(shape)]
        return self._filled(aten.full.default, of, sizes, self._scalar(of.literal[1]))

    def _filled(self, operator: Any, like: Value, *args: Any) -> Any:
        device = self._like.meta["val"].device
        return self.b.call(operator, *args, dtype=like.dtype, device=device)

    def _times(self, one: Any, times: Number) -> Any:
        if times == ONE:
            return one
        if times == MINUS_ONE:
            return self.b.call(aten.neg.default, one)
        if not times.roots and times.ratio.numerator == 1 and 10**64 % times.ratio.denominator:
            # 1 / 7 was a division, 0.05 was not
            divisor = self._scalar(number(times.ratio.denominator))
            return self.b.call(aten.div.Tensor, one, divisor)
        return self.b.call(aten.mul.Tensor, one, self._scalar(times))

    def _multiplied(self, factors: Iterable[tuple[Any, Fraction]], times: Number) -> Any:
        found = None
        for one, exponent in sorted(factors, key=lambda factor: factor[1] < 0):
            if found is not None and exponent == -1:
                found = self.b.call(aten.div.Tensor, found, one)
                continue
            if exponent in _POWERS:
                one = self.b.call(_POWERS[exponent], one)
            elif exponent != 1:
                one = self.b.call(aten.pow.Tensor_Scalar, one, self._scalar(number(exponent)))
            found = one if found is None else self.b.call(aten.mul.Tensor, found, one)
        return self._times(found, times)

    def _added(self, terms: Iterable[tuple[Fraction, Any]], numbers: Iterable[Number]) -> Any:
        found = None
        for times, one in sorted(terms, key=lambda term: term[0] != 1):
            if found is None:
                found = self._times(one, number(times))
            elif times == -1:
                found = self.b.call(aten.sub.Tensor, found, one)
            else:
                alpha = {} if times == 1 else {"alpha": self._scalar(number(times))}
                found = self.b.call(aten.add.Tensor, found, one, **alpha)
        for one in numbers:
            if one.ratio:
                found = self.b.call(aten.add.Tensor, found, self._scalar(one))
        return found

    # -- operations

    def _computed(self, value: Value) -> Any:
        for node, held in self._nodes(value):
            if held.is_complex() and not held.is_conj():
                parts = self.b.call(aten.view_as_real.default, self.b.value(node))
                is_imag = self.graph.readings[node].imag is value
                return self.b.call(aten.select.int, parts, -1, int(is_imag))
        operation = getattr(self, f"_{value.op}", None)
        if operation is None:
            raise LookupError(value)
        found = operation(value, *value.sources)
        return found if value.active else self.b.cast(found, value.dtype)

    def _operands(self, value: Value) -> list[Any]:
        """Its sources, beside activations in its own dtype. Bytes that stand for floats are only
        moved.
        """
        dtype = None if value.active else value.dtype
        found = [self.of(source, dtype) for source in value.sources]
        dtypes = *map(self.b.dtype, found), *(source.dtype for source in value.sources)
        if value.op != "join" and not _BYTES.isdisjoint(dtypes):
            raise LookupError(value)
        return found

    def _sum(self, value: Value, *sources: Value) -> Any:
        coefficients, constant = value.literal
        terms = zip(coefficients, self._operands(value), strict=True)
        return self._added(terms, [number(constant)])

    def _product(self, value: Value, *sources: Value) -> Any:
        exponents, times = value.literal
        if not sources:
            return self._full(value, ())
        return self._multiplied(zip(self._operands(value), exponents, strict=True), times)

    def _function(self, value: Value, *sources: Value) -> Any:
        """Arithmetic as it was called, each operand in its own dtype."""
        name, literals = value.literal
        tensors = [source for source in sources if filled_with(source) is None]
        if not tensors:
            raise LookupError(value)
        if name == "sum":
            times, constant = literals
            numbers, terms = [number(constant)], []
            for by, source in zip(times, sources, strict=True):
                filled = filled_with(source)
                if filled is None:
                    terms.append((by, self.of(source)))
                else:
                    numbers.append(number(by) * filled.literal[1])
            found = self._added(terms, numbers)
        elif name == "product":
            exponents, times = literals
            found = self._multiplied(zip(map(self.of, sources), exponents, strict=True), times)
        elif name == "quotient":
            one, other = sources
            filled = filled_with(other)
            divisor = self.of(other) if filled is None else self._scalar(filled.literal[1])
            found = self.b.call(aten.div.Tensor_mode, self.of(one), divisor, rounding_mode="floor")
        else:
            found = self._by_name(value, name, literals)
        own = broadcast(source.shape for source in tensors)
        return found if own == value.shape else self._spread(found, value.shape)

    def _by_name(self, value: Value, name: str, literals: Any) -> Any:
        """A call of the operator that has the name of the function, of operands alone."""
        operator = getattr(getattr(aten, name, None), "default", None)
        if operator is None or literals not in ((), _NO_OPTIONS):
            raise LookupError(value)
        return self.b.call(operator, *map(self.of, value.sources))

    def _reduce(self, value: Value, source: Value) -> Any:
        options = {} if value.active else {"dtype": value.dtype}
        return self.b.call(aten.sum.dim_IntList, self.of(source), list(value.literal), **options)

    def _dot(self, value: Value, left: Value, right: Value) -> Any:
        one, other = self._operands(value)
        dtype = torch.promote_types(self.b.dtype(one), self.b.dtype(other))
        if dtype.itemsize == 1:
            raise LookupError(value)
        by_rank = {2: aten.mm.default, 3: aten.bmm.default}
        product = by_rank.get(len(value.shape), aten.matmul.default)
        return self.b.call(product, self.b.cast(one, dtype), self.b.cast(other, dtype))

    def _reshape(self, value: Value, source: Value) -> Any:
        whole = self.known[source] if source in self.known else self.of(source)
        return self.b.reshape(whole, self._shape(value.shape))

    def _permute(self, value: Value, source: Value) -> Any:
        return self.b.permuted(self.of(source), value.literal)

    def _expand(self, value: Value, source: Value) -> Any:
        if source.is_number:
            return self._full(source, value.shape)
        return self._spread(self.of(source), value.shape)

    def _spread(self, one: Any, shape: Sequence[int]) -> Any:
        sizes = [self.b.size(size, one) for size in self._shape(shape)]
        return self.b.call(aten.expand.default, one, sizes)

    def _slice(self, value: Value, source: Value) -> Any:
        axis, first, step = value.literal
        start, size = self._shape((first, value.shape[axis]))
        one, end = self.of(source), sys.maxsize
        if first + value.shape[axis] * step < source.shape[axis]:
            end = self.b.size(start + (size - 1) * step + 1)
        by = () if step == 1 else (step,)
        return self.b.call(aten.slice.Tensor, one, axis, self.b.size(start), end, *by)

    def _join(self, value: Value, *sources: Value) -> Any:
        return self.b.joined(self._operands(value), value.literal)

    def _gather(self, value: Value, base: Value, index: Value) -> Any:
        axis = value.literal
        if index.op == "constant" and axis == len(base.shape) - 1:
            with without_fake_mode():
                columns = tuple(index.literal.tensor.tolist())
            groups = groups_of(columns, base.shape[axis])
            if groups is not None:
                return self._taken(self.of(base), groups)
        rows = self.of(index, shape=[prod(index.shape)])
        found = self.b.call(aten.index_select.default, self.of(base), value.literal, rows)
        return self.b.reshape(found, self._shape(value.shape))

    def _taken(self, matrix: Any, groups: Groups) -> Any:
        """Columns by views: a graph of a device holds no list of them."""
        b, lead = self.b, list(self.b.shape(matrix))[:-1]

        def part(value: Any, first: int, size: int) -> Any:
            is_whole = (first, size) == (0, b.shape(value)[-1])
            given = value, len(b.shape(value)) - 1, first, first + size
            return value if is_whole else b.call(aten.slice.Tensor, *given)

        matrix = part(matrix, groups.start, groups.number * groups.stride)
        if groups.number > 1:
            matrix = b.reshape(matrix, (*lead, groups.number, groups.stride))
        parts = []
        for run in groups.runs:
            taken = part(matrix, run.first, run.size)
            if run.is_paired:
                shape = tuple(b.shape(taken))
                halves = b.reshape(taken, (*shape[:-1], 2, run.size // 2))
                taken = b.reshape(b.transposed(halves), shape)
            parts.append(taken)
        size = groups.number * sum(run.size for run in groups.runs)
        return b.reshape(b.joined(parts, len(b.shape(parts[0])) - 1), (*lead, size))

    def _opaque(self, value: Value, *sources: Value) -> Any:
        """Memory that is not filled yet."""
        if sources or "empty" not in value.literal[0]:
            raise LookupError(value)
        sizes = [self.b.size(size) for size in self._shape(value.shape)]
        return self._filled(aten.empty.memory_format, value, sizes)

    def _cast(self, value: Value, source: Value) -> Any:
        return self.of(source)

    def _count(self, value: Value) -> Any:
        (size,) = self._shape(value.shape)
        return self._filled(aten.arange.default, value, self.b.size(size))

    def _leaf(self, value: Value) -> Any:
        """A size that the graph computes with."""
        for size in self.graph.sizes.values():
            bound = self.graph.size(size)
            if value.literal in (f"size {bound!r}", f"size {int(bound)}"):
                made = self.b.size(size)
                device = self._like.meta["val"].device
                return self.b.call(
                    aten.scalar_tensor.default, made, dtype=torch.int64, device=device
                )
        raise LookupError(value)

    def _constant(self, value: Value) -> Any:
        """Integers; floats are integers times a power of two."""
        with without_fake_mode():
            numbers = value.literal.tensor.reshape(-1).tolist()
        if not all(map(isfinite, numbers)):
            raise LookupError(value)
        for bits in (0, 24, 40, 56):
            whole = [int(one * 2**bits) for one in numbers]
            if all(one == given * 2**bits for one, given in zip(whole, numbers, strict=True)):
                found = self.b.constant(whole, self.b.value(self._like))
                if bits:
                    wide = torch.promote_types(value.dtype, torch.float32)
                    found = self.b.cast(found, wide)
                    found = self.b.call(aten.mul.Tensor, found, 2.0**-bits)
                found = self.b.cast(found, value.dtype)
                return self.b.reshape(found, value.shape)
        raise LookupError(value)
