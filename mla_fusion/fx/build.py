"""Applies the plan's operators: writes them into a graph, or runs them on tensors.

The plan writes a replacement once (:mod:`mla_fusion.plan`), for a :class:`Builder`. Committing and
verifying run this code.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, reduce
from itertools import count
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from mla_fusion.compat import FakeTensor, FloorDiv, without_modes
from mla_fusion.fx.kinds import attribute, dtype_of, shape_of, value_of
from mla_fusion.fx.sizes import (
    expression,
    has_symbols,
    is_symbolic,
    known,
    same,
    same_shape,
    sizes_of,
)
from mla_fusion.fx.vector_numbers import Exact
from mla_fusion.fx.workplace import created

aten = torch.ops.aten
Recipe = Callable[["Builder"], Any]
_OPERATIONS = {sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv}


class Builder(ABC):
    """Applies operators to values: tensors, or in subclasses graph nodes."""

    @abstractmethod
    def value(self, node: Node) -> Any:
        """Returns the value of a node of the original graph."""

    @abstractmethod
    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of an operator."""

    @abstractmethod
    def call_again(self, key: object, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the results of an operator, which share no memory with its arguments.

        key  results of one key are alike, but for their numbers
        """

    def shape(self, value: Any) -> Sequence[Any]:
        """Returns the shape of a value."""
        return tuple(value.shape)

    def dtype(self, value: Any) -> torch.dtype:
        """Returns the dtype of a value."""
        return value.dtype

    @abstractmethod
    def sizes(self, shape: Sequence[Any], of: Any = None) -> list[Any]:
        """Returns a shape of the original graph (ints and SymInts) as arguments.

        of  a value with sizes for which the graph may have no node
        """

    def size(self, size: Any, of: Any = None) -> Any:
        """Returns a size to compute with. Raises LookupError if the graph cannot compute it."""
        return self.sizes([size], of)[0]

    @abstractmethod
    def constant(self, tensor: torch.Tensor, like: Any) -> Any:
        """Returns a tensor of literals on the device of ``like``."""

    def cache(self, node: Node, shape: Sequence[Any]) -> Any:
        """Returns a cache in the kernel's shape."""
        return self.reshape(self.value(node), shape)

    def finish(self) -> None:  # noqa: B027  # nothing to do is a good default
        """Makes the last changes behind all calls, before dead code is dropped."""

    def close(self) -> None:  # noqa: B027  # nothing to do is a good default
        """Runs on the finished graph: the last chance to fail before it is installed."""

    def packed(
        self, name: str, recipe: Recipe, leaves: Sequence[Node], exact: Exact | None = None
    ) -> Any:
        """Returns a weight that ``recipe`` makes from ``leaves``.

        exact  the condition that must be met whenever it is made
        """
        return recipe(self)

    def check_slots(self, plan: Any) -> None:  # noqa: B027  # trusted, unless a wrapper checks them
        """Prepares a check of the slots at which the kernel writes rows, for a plan in place."""

    def once(self, key: object, recipe: Recipe) -> Any:
        """Returns a value that several layers share (tables, slots)."""
        return recipe(self)

    def device_type(self, value: Any) -> str:
        """Returns the type of the device that a value is on."""
        return "cpu"

    def reshape(self, value: Any, shape: Sequence[Any]) -> Any:
        """Returns a value in another shape."""
        if same_shape(self.shape(value), shape):
            return value
        sizes = list(map(known, shape))
        unknown = [place for place, size in enumerate(sizes) if is_symbolic(size)]
        if len(unknown) == 1:  # -1 needs no node, which would have to be packed with the weight
            sizes[unknown[0]] = -1
        return self.call(aten.reshape.default, value, self.sizes(sizes))

    def contiguous(self, value: Any) -> Any:
        """Returns a contiguous copy, in memory of its own."""
        return self.call(aten.clone.default, value, memory_format=torch.contiguous_format)

    def joined(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """Returns the parts joined along an axis; a single part as it is."""
        return parts[0] if len(parts) == 1 else self.call(aten.cat.default, parts, axis)

    def permuted(self, value: Any, order: Sequence[int]) -> Any:
        """Returns a value with its axes in this order."""
        order = list(order)
        if order == sorted(order):
            return value
        return self.call(aten.permute.default, value, order)

    def transposed(self, value: Any) -> Any:
        """Returns a value with its last two axes exchanged."""
        *lead, rows, columns = range(len(self.shape(value)))
        return self.permuted(value, [*lead, columns, rows])

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Returns a value in this dtype."""
        if self.dtype(value) == dtype:
            return value
        return self.call(aten._to_copy.default, value, dtype=dtype)


class GraphBuilder(Builder):
    """Adds nodes, with meta values, to ``gm.graph``.

    Without ``source`` that graph is changed, and nodes are inserted before the point set by
    :meth:`at`. With ``source``, the graph is written from its beginning after that graph, and nodes
    are added at its end.

    copies     nodes of ``gm.graph``, by the nodes of the source that they stand for
    copy       returns the copy of a node of the source that has none yet
    constants  tensors that new nodes read as attributes of ``gm``
    made       the new nodes
    """

    def __init__(self, gm: GraphModule, source: Graph | None = None) -> None:
        self.gm = gm
        self.source = gm.graph if source is None else source
        self.copies: dict[Node, Node] = {}
        self.copy: Callable[[Node], Node] = lambda node: node
        self.constants: dict[str, torch.Tensor] = {}
        self.made: list[Node] = []
        self._is_written = source is not None
        self._taken = {node.name for node in self.source.nodes}
        self._numbers = Counter[str]()
        self._shared: dict[object, Node] = {}
        self._results: dict[object, Sequence[Any]] = {}
        self._meta: dict[str, Any] = {}
        self._fake_mode = fake_mode_of(self.source)
        self._point: Node | None = None
        self._is_propagating = False

    @cached_property
    def _size_nodes(self) -> dict[Any, Node]:
        """The first node of the source that holds each symbolic size, by its expression."""
        nodes: dict[Any, Node] = {}
        for node in self.source.nodes:
            value = value_of(node)
            if type(value) is torch.SymInt:
                nodes.setdefault(expression(value), node)
        return nodes

    def at(self, point: Node | None, meta: dict[str, Any]) -> None:
        """Inserts new nodes before ``point`` from now on; None means at the end.

        meta  where new nodes come from
        """
        self._point, self._meta = point, meta

    def value(self, node: Node) -> Node:
        return self.copies.get(node) or self.copy(node)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        value = self._reshaped(*args) if op is aten.reshape.default else None
        value = self.propagate(op, args, kwargs) if value is None else value
        return self.insert(op, args, kwargs, value)

    def call_again(self, key: object, op: Any, *args: Any, **kwargs: Any) -> Node:
        results = self._results.get(key)
        if results is not None:
            # several times as fast as the operator in the graph's mode
            with without_modes():
                copies = tuple(_copied(part, part.fake_mode) for part in results)
            return self.insert(op, args, kwargs, copies)
        node = self.call(op, *args, **kwargs)
        results = node.meta["val"]
        if all(isinstance(part, FakeTensor) and not has_symbols(part.shape) for part in results):
            self._results[key] = results
        return node

    def insert(
        self, target: Any, args: Any, kwargs: Any, value: Any, op: str = "call_function"
    ) -> Node:
        """Returns a new node before the point, a call or another ``op``, with its meta value."""
        graph, point = self.gm.graph, self._point
        # what torch.fx would name it
        name = self.free_name(str(getattr(target, "__name__", target)).replace(".", "_"))
        with nullcontext() if point is None else graph.inserting_before(point):
            node = created(graph, op, target, args, kwargs, name)
        node.meta.update(self._meta)
        node.meta["val"] = value
        self.made.append(node)
        return node

    def free_name(self, wanted: str) -> str | None:
        """Returns a name that no node of the source has; None if torch finds one."""
        if not self._is_written:
            return None
        name = wanted
        while name in self._taken:
            self._numbers[wanted] += 1
            name = f"{wanted}_{self._numbers[wanted]}"
        self._taken.add(name)
        return name

    @contextmanager
    def propagating(self) -> Iterator[None]:
        """Enters the graph's fake mode for many calls.

        Entering it for each would cost as much as the calls.
        """
        with torch.no_grad(), self._fake_mode or nullcontext():
            self._is_propagating = True
            try:
                yield
            finally:
                self._is_propagating = False

    def propagate(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Returns the meta value of a call; nodes among its arguments stand for theirs."""
        # make_fx of real tensors uses a mode for each node
        fake_args, fake_kwargs = map_arg(
            (args, kwargs), lambda node: faked(node.meta["val"], self._fake_mode)
        )
        with nullcontext() if self._is_propagating else self.propagating():
            return op(*fake_args, **fake_kwargs)

    def _reshaped(self, node: Node, sizes: Sequence[Any]) -> FakeTensor | None:
        """Returns what a node becomes by a reshape, several times as fast as by the operator.

        None if its value is complex, not contiguous or in another mode, or if a size is symbolic or
        -1.
        """
        tensor = node.meta["val"]
        if type(tensor) is not FakeTensor or tensor.fake_mode is not self._fake_mode:
            return None
        is_known = all(isinstance(size, int) and size >= 0 for size in sizes)
        is_usual = is_known and not (tensor.is_complex() or has_symbols(tensor.shape))
        if not is_usual or not tensor.is_contiguous():
            return None
        with without_modes():
            view = torch.empty(tuple(sizes), dtype=tensor.dtype, device="meta")
            view.set_(tensor.untyped_storage(), tensor.storage_offset(), view.shape, view.stride())
            return FakeTensor(self._fake_mode, view, tensor.device)

    def shape(self, value: Node) -> Sequence[Any]:
        return tuple(shape_of(value))

    def dtype(self, value: Node) -> torch.dtype:
        return dtype_of(value)

    def device_type(self, value: Node) -> str:
        return value.meta["val"].device.type

    def sizes(self, shape: Sequence[Any], of: Node | None = None) -> list[Any]:
        return [self.size(size, of) for size in shape]

    def size(self, size: Any, of: Node | None = None) -> Any:
        """Returns a size as a number, or as a node that holds it, asks ``of`` for it or computes
        it.
        """
        number = expression(size)
        if not is_symbolic(size) or number.is_Integer:  # a guard may make a symbol a number
            return int(number)
        node = self._size_nodes.get(number)
        if node is not None and self._is_written:
            node = self.copies.get(node)
        if node is None or not self._is_defined(node):
            node = self._asked(of, size)
        return self._computed(number) if node is None else node

    def _computed(self, number: Any) -> Any:
        """Returns a size, computed from sizes of inputs.

        Raises LookupError if no operator does that.
        """
        if number.is_Integer:
            return int(number)
        for node in self.source.find_nodes(op="placeholder"):
            for size in sizes_of(node):
                if is_symbolic(size) and expression(size) == number:
                    return self._asked(self.value(node), size)
        if number in self._size_nodes and number.is_Symbol:
            return self.value(self._size_nodes[number])
        operation = _OPERATIONS.get(number.func)
        if operation is None:
            raise LookupError(f"no node of the graph, and no input, has the size {number}")

        def calculated(left: Any, right: Any) -> Node:
            """Returns the node of one operation."""
            values = map_arg((left, right), value_of)
            return self.insert(operation, (left, right), {}, operation(*values))

        return reduce(calculated, map(self._computed, number.args))

    def _asked(self, of: Node | None, size: torch.SymInt) -> Node | None:
        """Returns a new node that asks ``of`` for a size; None if it has no such size."""
        shape = () if of is None else shape_of(of)
        axis = next((axis for axis, other in enumerate(shape) if same(other, size)), None)
        if axis is None:
            return None
        return self.insert(aten.sym_size.int, (of, axis), {}, size)

    def _is_defined(self, node: Node) -> bool:
        """Returns True if the node comes before the point."""
        return self._point is None or node < self._point

    def constant(self, tensor: torch.Tensor, like: Node) -> Node:
        names = (f"_mla_fusion_constant{number}" for number in count())
        name = next(name for name in names if not hasattr(self.gm, name))
        self.gm.register_buffer(name, tensor)
        self.constants[name] = tensor
        mode, device = self._fake_mode, like.meta["val"].device
        value = tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
        node = self.insert(name, (), {}, value, "get_attr")
        if device.type == "cpu":
            return node
        lifted = self.call(aten.lift_fresh_copy.default, node)  # a real tensor is made fake by it
        return self.call(aten._to_copy.default, lifted, device=device)

    def once(self, key: object, recipe: Recipe) -> Node:
        shared = self._shared.get(key)
        if shared is None or not self._is_defined(shared):
            shared = self._shared[key] = recipe(self)
        return shared


def describe_attributes(gm: GraphModule) -> list[Node]:
    """Adds meta values that the tracer left out, and returns the nodes that got one.

    make_fx of real tensors adds none to get_attr nodes, torch.export's module() none to copies into
    inputs.
    """
    nodes = [node for node in gm.graph.find_nodes(op="get_attr") if "val" not in node.meta]
    mode = fake_mode_of(gm.graph)
    for node in nodes:
        value = attribute(node)
        is_tensor = isinstance(value, torch.Tensor)
        node.meta["val"] = mode.from_tensor(value) if is_tensor and mode is not None else value
    for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        if "val" not in node.meta:
            node.meta["val"] = value_of(node.args[0])
            nodes.append(node)
    return nodes


def fake_mode_of(graph: Graph) -> Any:
    """Returns the mode in which the graph's values are fake; None if no value is."""
    modes = (getattr(value_of(node), "fake_mode", None) for node in graph.nodes)
    return next(filter(None, modes), None)


def faked(value: Any, mode: Any) -> Any:
    """Returns a tensor of the graph in this mode: the same, or a new one like it."""
    if getattr(value, "fake_mode", mode) is mode:
        return value
    with without_modes():
        return _copied(value, mode)


def _copied(tensor: torch.Tensor, mode: Any) -> FakeTensor:
    """Returns a fake tensor like this one, in this mode and in memory of its own."""
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, memory, tensor.device)
