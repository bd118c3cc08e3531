"""Where the plan's operations go: into a graph, or straight onto tensors.

The replacement is written once (:mod:`mla_fusion.plan`) against :class:`Builder`;
committing it and verifying it run the very same code.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, reduce
from itertools import count
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import (
    FakeTensor,
    FloorDiv,
    OpOverload,
    schema_of,
    storage_id,
    without_fake_mode,
)
from mla_fusion.fx.kinds import attribute, dtype_of, shape_of, value_of
from mla_fusion.fx.sizes import SizeNodes, expression, is_symbolic, same, same_shape, sizes_of
from mla_fusion.fx.vector_numbers import Exact
from mla_fusion.fx.workplace import created

aten = torch.ops.aten
Recipe = Callable[["Builder"], Any]
_OPERATIONS = {sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv}


class Builder(ABC):
    """Applies operators to values: graph nodes, or tensors."""

    @abstractmethod
    def value(self, node: Node) -> Any:
        """The value of a node of the original graph."""

    @abstractmethod
    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def shape(self, value: Any) -> Sequence[Any]: ...

    @abstractmethod
    def dtype(self, value: Any) -> torch.dtype: ...

    @abstractmethod
    def sizes(self, shape: Sequence[Any], of: Any = None) -> list[Any]:
        """A shape of the original graph (ints and SymInts) as arguments. ``of``: a value that has a
        size which the graph has no node for.
        """

    def size(self, size: Any, of: Any = None) -> Any:
        """A size to compute with. Raises LookupError where the graph cannot compute it."""
        (found,) = self.sizes([size], of)
        return found

    @abstractmethod
    def constant(self, numbers: Sequence[int], like: Any) -> Any:
        """The numbers as a tensor on the device of ``like``."""

    def cache(self, node: Node, shape: Sequence[Any]) -> Any:
        """A cache in the kernel's shape."""
        return self.reshape(self.value(node), shape)

    def target(self, value: Any) -> Any:
        """A value that the next call writes."""
        return value

    def finish(self) -> None:  # noqa: B027  # nothing to do is a good default
        """All calls are in: last changes before dead code is dropped."""

    def close(self) -> None:  # noqa: B027  # nothing to do is a good default
        """Nobody changes the graph any more: last chance to fail before it is put in place."""

    def packed(
        self, name: str, recipe: Recipe, leaves: Sequence[Node], exact: Exact | None = None
    ) -> Any:
        """A weight made by ``recipe`` from ``leaves``: here, where it is used. ``exact``: what must
        be seen of it.
        """
        return recipe(self)

    def check_slots(  # noqa: B027  # trusted, unless somebody stands before the graph
        self,
        recipe: Recipe,
        leaves: Sequence[Node],
        caches: Sequence[tuple[str, Node, Sequence[Any]]],
        skips: bool,
    ) -> None:
        """The kernel will write rows at ``recipe``'s slots, made of ``leaves``, into caches (name,
        input, shape).

        ``skips``: the model, like the kernel, leaves out a token whose slot is negative.
        """

    def once(self, key: object, recipe: Recipe) -> Any:
        """A value that several layers share (tables, slots)."""
        return recipe(self)

    def new_rows(self, cache: Any, shape: Sequence[Any], recipe: Recipe) -> Any:
        """The rows that a call has written into a cache: read back by ``recipe``."""
        return recipe(self)

    def device_type(self, value: Any) -> str:
        return "cpu"

    def reshape(self, value: Any, shape: Sequence[Any]) -> Any:
        if same_shape(self.shape(value), shape):
            return value
        sizes = self.sizes(shape)
        unknown = [place for place, size in enumerate(sizes) if type(size) is not int]
        # what the others leave of it: no node has to be packed with them
        if len(unknown) == 1 and -1 not in sizes:
            sizes[unknown[0]] = -1
        return self.call(aten.reshape.default, value, sizes)

    def contiguous(self, value: Any) -> Any:
        """A copy that is contiguous, in memory of its own."""
        return self.call(aten.clone.default, value, memory_format=torch.contiguous_format)

    def joined(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """The parts side by side; a single one as it is."""
        return parts[0] if len(parts) == 1 else self.call(aten.cat.default, parts, axis)

    def permuted(self, value: Any, order: Sequence[int]) -> Any:
        """The axes in this order; the value itself where they lie so."""
        stays = list(order) == list(range(len(order)))
        return value if stays else self.call(aten.permute.default, value, list(order))

    def transposed(self, value: Any) -> Any:
        """The last two axes change places."""
        count = len(self.shape(value)) - 2
        return self.permuted(value, [*range(count), count + 1, count])

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        return (
            value
            if self.dtype(value) == dtype
            else self.call(aten._to_copy.default, value, dtype=dtype)
        )


class OfTensors(Builder):
    """Values are tensors, real or fake."""

    def shape(self, value: torch.Tensor) -> Sequence[Any]:
        return tuple(value.shape)

    def dtype(self, value: torch.Tensor) -> torch.dtype:
        return value.dtype


class GraphBuilder(Builder):
    """Adds nodes, with meta values, to ``gm.graph``.

    Either that graph is changed where it stands, and nodes are inserted before the one given to
    :meth:`at`. Or it is being written from beginning to end after the model of another one,
    ``source``, and nodes are added at its end.

    copies      nodes of the source, by those of ``gm.graph`` that stand for them so far
    copy        makes the copy of a node of the source that has none yet
    constants   tensors that nodes made here read as attributes of ``gm``
    """

    def __init__(self, gm: GraphModule, source: Graph | None = None) -> None:
        self.gm = gm
        self.source = gm.graph if source is None else source
        self.copies: dict[Node, Node] = {}
        self.copy: Callable[[Node], Node] = _same
        self.constants: dict[str, torch.Tensor] = {}
        self.made: list[Node] = []
        self._is_written = source is not None
        self._taken = {node.name for node in source.nodes} if source is not None else set()
        self._numbers: dict[str, int] = {}
        self._size_nodes = SizeNodes(self.source)
        self._shared: dict[object, Node] = {}
        self._meta: dict[str, Any] = {}
        self._fake_mode = fake_mode_of(self.source)
        self._point: Node | None = None
        self._inside = False
        self._results: dict[object, tuple[Any, bool]] = {}

    def at(self, point: Node | None, meta: dict[str, Any]) -> None:
        """Insert before ``point`` (None: at the end) from now on; new nodes take ``meta``, where
        they come from.
        """
        self._point, self._meta = point, meta

    def value(self, node: Node) -> Node:
        return self.copies.get(node) or self.copy(node)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        return self.insert(op, args, kwargs, self.propagate(op, args, kwargs))

    def insert(self, op: Any, args: Any, kwargs: Any, value: Any) -> Node:
        """A call whose meta value is known."""
        with self._place():
            name = self.free_name(_title(op))
            node = created(self.gm.graph, "call_function", op, args, kwargs, name)
        return self.take(node, value)

    def take(self, node: Node, value: Any) -> Node:
        """Give a new node its meta value."""
        node.meta.update(self._meta)
        node.meta["val"] = value
        self.made.append(node)
        return node

    def _place(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._point is None else self.gm.graph.inserting_before(self._point)

    def free_name(self, wanted: str) -> str | None:
        """A name that no node of the source has, copied already or not; None where the graph itself
        sees to that.
        """
        if not self._is_written:
            return None
        name, number = wanted, self._numbers.get(wanted, 0)
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._numbers[wanted] = number
        self._taken.add(name)
        return name

    @contextmanager
    def propagating(self) -> Iterator[None]:
        """Stand in the graph's fake mode for many calls; entering it for each would cost as much as
        the calls.
        """
        with torch.no_grad(), self._fake_mode or nullcontext():
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def propagate(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The meta value of a call, nodes among its arguments standing for theirs."""
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), self._fake)
        with nullcontext() if self._inside else self.propagating():
            signature = None
            if self._fake_mode and _is_functional(op):
                signature = op, _described(fake_args), _described(list(fake_kwargs.items()))
            try:
                known = self._results.get(signature)
            except TypeError:  # a size is symbolic, and those have no hash
                known = signature = None
            # equal layers: tensors like the first one's, at a tenth of the cost
            if known is not None:
                results, is_view = known
                memory = fake_args[0] if is_view else None
                with without_fake_mode():
                    several = not isinstance(results, torch.Tensor)
                    return (
                        tuple(map(self._another, results))
                        if several
                        else self._another(results, memory)
                    )
            results = op(*fake_args, **fake_kwargs)
            if signature is not None:
                is_view = _is_view(results, fake_args)
                self._results[signature] = results, is_view
            return results

    def _another(self, value: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """A fake tensor like ``value``: with memory of its own, or a view of ``memory``."""
        if memory is None and not value.numel():
            return value  # no memory to share: an output that is not asked for
        if memory is None:
            meta = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        else:
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            meta.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        return FakeTensor(self._fake_mode, meta, value.device)

    def _fake(self, node: Node) -> Any:
        """The node's meta value in this graph's fake mode (make_fx of real tensors uses one mode a
        node).
        """
        return faked(node.meta["val"], self._fake_mode)

    def shape(self, value: Node) -> Sequence[Any]:
        return tuple(shape_of(value))

    def dtype(self, value: Node) -> torch.dtype:
        return dtype_of(value)

    def device_type(self, value: Node) -> str:
        return value.meta["val"].device.type

    def sizes(self, shape: Sequence[Any], of: Node | None = None) -> list[Any]:
        """Each symbolic size as the node that holds it, or asks ``of`` for it; a single unknown one
        as -1.
        """
        out: list[Any] = []
        for size in shape:
            number = expression(size)
            if not is_symbolic(size) or number.is_Integer:  # a symbol that a guard made a number
                out.append(int(number))
                continue
            node = self._size_nodes.find(size)
            if node is not None and self._is_written:
                node = self.copies.get(node)
            held = node if node is not None and self._defined(node) else self._asked(of, size)
            out.append(-1 if held is None else held)
        if out.count(-1) > 1:  # in a graph of torch.export no step may have asked for them
            sizes = zip(out, shape, strict=True)
            out = [self._computed(expression(size)) if held == -1 else held for held, size in sizes]
        return out

    def size(self, size: Any, of: Node | None = None) -> Any:
        (found,) = self.sizes([size], of)
        return self._computed(expression(size)) if found == -1 and is_symbolic(size) else found

    def _computed(self, number: Any) -> Any:
        """A size, computed from those of inputs. Raises LookupError where no operator does that."""
        if number.is_Integer:
            return int(number)
        for given in self.source.find_nodes(op="placeholder"):
            for size in sizes_of(given):
                if is_symbolic(size) and expression(size) == number:
                    held = self._asked(self.value(given), size)
                    assert held is not None
                    return held
        node = self._size_nodes.find(number) if number.is_Symbol else None
        if node is not None:
            return self.value(node)
        operation, parts = _OPERATIONS.get(number.func), number.args
        if number.is_Pow and number.args[1].is_Integer and number.args[1] > 0:
            operation, parts = operator.mul, number.args[:1] * int(number.args[1])
        if operation is None:
            raise LookupError(f"no node of the graph, and no input, has the size {number}")
        return reduce(partial(self._calculated, operation), map(self._computed, parts))

    def _calculated(self, operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Node:
        values = (part.meta["val"] if isinstance(part, Node) else part for part in (one, other))
        return self.insert(operation, (one, other), {}, operation(*values))

    def _asked(self, of: Node | None, size: torch.SymInt) -> Node | None:
        held = () if of is None else shape_of(of)
        axis = next((axis for axis, one in enumerate(held) if same(one, size)), None)
        if axis is None:
            return None
        with self._place():
            node = self.gm.graph.call_function(torch.ops.aten.sym_size.int, (of, axis))
        return self.take(node, size)

    def _defined(self, node: Node) -> bool:
        return self._point is None or node < self._point

    def constant(self, numbers: Sequence[int], like: Node) -> Node:
        with without_fake_mode():  # the graph will hold it, so it must be real
            tensor = torch.tensor(numbers, dtype=torch.int64)
        name = next(
            name
            for number in count()
            if not hasattr(self.gm, name := f"_mla_fusion_constant{number}")
        )
        self.gm.register_buffer(name, tensor)
        self.constants[name] = tensor
        with self._place():
            node = self.gm.graph.create_node("get_attr", name, name=self.free_name(name))
        in_mode = self._fake_mode is not None
        self.take(
            node, self._fake_mode.from_tensor(tensor, static_shapes=True) if in_mode else tensor
        )
        device = like.meta["val"].device
        return (
            node if device.type == "cpu" else self.call(aten._to_copy.default, node, device=device)
        )

    def once(self, key: object, recipe: Recipe) -> Node:
        shared = self._shared.get(key)
        if shared is None or not self._defined(shared):
            shared = self._shared[key] = recipe(self)
        return shared


def _same(node: Node) -> Node:
    return node


def _title(op: Any) -> str:
    """What torch.fx would name a call of it."""
    return str(getattr(op, "__name__", op)).replace(".", "_")


@cache
def _is_functional(op: Any) -> bool:
    """Does the schema say that the results are tensors of their own, or one view of the first
    argument?
    """
    if not isinstance(op, OpOverload):
        return False
    schema = schema_of(op)
    if any(str(result.type) != "Tensor" for result in schema.returns):
        return False
    if all(result.alias_info is None for result in schema.returns):
        return True
    first, *others = (argument.alias_info for argument in schema.arguments)
    return len(schema.returns) == 1 and first is not None and not first.is_write and not any(others)


def _is_view(result: Any, args: Any) -> bool:
    first = args[0] if args else None
    if not isinstance(result, torch.Tensor) or not isinstance(first, torch.Tensor):
        return False
    return storage_id(result) == storage_id(first)


def _described(value: Any) -> object:
    """Of a tensor what results depend on, of a list what its items are, of a literal itself with
    its type: equal for arguments of which a call makes equal shapes, strides and dtypes.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value


def describe_attributes(gm: GraphModule) -> list[Node]:
    """Give get_attr nodes a meta value where the tracer left none (make_fx of real tensors does),
    and copies into inputs (of torch.export's module()); these nodes.
    """
    nodes = [node for node in gm.graph.find_nodes(op="get_attr") if "val" not in node.meta]
    mode = fake_mode_of(gm.graph) if nodes else None
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
    """The mode that the graph's values are fake in; None where none of them is."""
    for node in graph.nodes:
        mode = getattr(value_of(node), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def faked(value: Any, mode: Any) -> Any:
    """A tensor of the graph in this mode: itself, or one like it."""
    if getattr(value, "fake_mode", mode) is mode:
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
