"""A small group of graph nodes as a program on float64 tensors: what the nodes mean, casts erased.

The pass never asks how RMSNorm or RoPE is spelled. It runs the nodes between two matrix products on
small float64 probes and looks at what comes out. Casts among bfloat16, float32 and float64 are
identity here, so a spelling that rounds elsewhere means the same; where rounding is the question,
the facts look at dtypes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import overload_name
from mla_fusion.fx.kinds import (
    MODEL_FLOATS,
    argument,
    attribute,
    filled_with,
    is_cast,
    is_mutating,
    op_name,
    operator_of,
    word,
)
from mla_fusion.fx.probe_calls import (
    RULES,
    cast,
    full,
    full_like,
    has_argument,
    identity,
    of_floats,
    takes_default_dtype,
    widen,
    widened,
)
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.sizes import Binding, is_size, is_symbolic
from mla_fusion.operators.known import (
    ELEMENTWISE_SCALING,
    SELECTIONS,
    SIZED,
    dtype_of,
    rule_of,
    shape_of,
    value_of,
)


@dataclass(frozen=True)
class Slot:
    """A place in the program's memory, where an argument will be found."""

    index: int


Template = Any  # nested tuples/lists/dicts of literals and Slots


class Unprobeable(Exception):
    """A node cannot be run on probes (no CPU kernel, a size that does not fit, a quantising
    cast).
    """


@dataclass(frozen=True)
class Failed:
    """Stands for the value of a step that could not run; whatever reads it fails too."""

    reason: str


class Step:
    """One call; ``args`` and ``kwargs`` are templates, ``reads`` the slots in them."""

    def __init__(
        self, call: Callable[..., Any], args: Template, kwargs: Template, name: str
    ) -> None:
        self.call, self.args, self.kwargs, self.name = call, args, kwargs, name
        of_args = [_slots_in(arg) for arg in args]
        of_kwargs = _slots_in(kwargs)
        self.reads = [slot for slots in (*of_args, of_kwargs) for slot in slots]
        self._open = [place for place, slots in enumerate(of_args) if slots]
        self._is_keyed = bool(of_kwargs)

    def run(self, memory: list[Any]) -> Any:
        args = list(self.args)
        try:
            for place in self._open:
                args[place] = _fill(args[place], memory)
            kwargs = _fill(self.kwargs, memory) if self._is_keyed else self.kwargs
            return self.call(*args, **kwargs)
        except Exception as error:  # any operator may refuse a probe; the value is then a Failed
            return Failed(f"{self.name}: {error}")


class Program:
    """Nodes compiled against inputs; ``run`` gives the value of every step.

    ``nodes`` must be in topological order; each argument is an input, an earlier node, a literal,
    or a symbolic size that ``binding`` makes a number (nodes that hold one are passed over).
    ``aliases`` names nodes that compute what an input holds. A node that cannot be probed becomes a
    step that fails, and so does whatever reads it. ``exact`` keeps every dtype and cast as the
    graph has it, and inputs have the sizes that ``binding`` gives, so symbolic slices of them can
    be taken; ``shrink`` runs on fewer tokens than the graph has.
    """

    def __init__(
        self,
        inputs: Sequence[Node],
        nodes: Sequence[Node],
        binding: Binding,
        aliases: Mapping[Node, Node] | None = None,
        exact: bool = False,
        shrink: Shrink | None = None,
    ) -> None:
        self._binding = binding
        self._exact = exact
        self._shrink = shrink
        self._inputs = len(inputs)
        self._above: dict[frozenset[int], list[int]] = {}
        self._in_place = any(is_mutating(node) for node in nodes)
        self._slots: dict[Node, Slot] = {node: Slot(i) for i, node in enumerate(inputs)}
        for alias, node in (aliases or {}).items():
            self._slots[alias] = self._slots[node]
        self.steps: list[Step] = []
        for node in nodes:
            # an input is met among the nodes where another's shape is read off it
            if is_size(node) or node in self._slots:
                continue
            try:
                step = self._compile(node)
            except Unprobeable as error:
                step = Step(Failed, (str(error),), {}, f"unprobeable:{error}")
            self._slots[node] = Slot(len(inputs) + len(self.steps))
            self.steps.append(step)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for programs of equal steps."""
        return tuple((step.name, _freeze(step.args), _freeze(step.kwargs)) for step in self.steps)

    def slot(self, node: Node) -> int:
        return self._slots[node].index

    @property
    def literals(self) -> list[float]:
        """The floats that the steps hold."""
        return _floats([(step.args, step.kwargs) for step in self.steps])

    def run(self, inputs: Sequence[torch.Tensor], wanted: Iterable[int] | None = None) -> list[Any]:
        """Values of inputs and steps, by slot; a :class:`Failed` for each step that could not run.

        Where only some slots are ``wanted``, steps that have no part in them are left out (None).
        """
        memory: list[Any] = [*inputs, *[None] * len(self.steps)]
        with torch.no_grad():
            for slot in (
                range(len(memory)) if wanted is None or self._in_place else self.above(wanted)
            ):
                if slot >= self._inputs:
                    memory[slot] = self.steps[slot - self._inputs].run(memory)
        return memory

    def above(self, slots: Iterable[int]) -> list[int]:
        """The slots from which the values in ``slots`` are made, and these, in order."""
        key = frozenset(slots)
        known = self._above.get(key)
        if known is not None:
            return known
        found, stack = set(), list(key)
        while stack:
            slot = stack.pop()
            if slot not in found:
                found.add(slot)
                stack.extend(self.steps[slot - self._inputs].reads if slot >= self._inputs else ())
        return self._above.setdefault(key, sorted(found))

    def _compile(self, node: Node) -> Step:
        name = op_name(node) or node.op
        if node.op == "get_attr":
            value = _attribute(node, self._exact)
            return Step(identity, (value,), {}, f"{name}:{id(value)}")
        filling = filled_with(node)
        lender = node.args[0] if filling is not None and name.endswith("_like") else None
        like = self._slots.get(lender) if isinstance(lender, Node) else None
        if like is not None:
            held = dtype_of(node)
            return Step(full_like, (like, filling, held if self._exact else widen(held)), {}, name)
        if filling is not None:
            value = node.meta["val"]
            dtype = value.dtype if self._exact else widen(value.dtype)
            return Step(full, (self._binding.shape(value.shape), filling, dtype), {}, name)
        call: Callable[..., Any]
        if is_cast(node) and not self._exact:
            _refuse_narrow_cast(node)
            call = cast
        else:
            call = operator_of(node).target
            if call is not torch.ops.aten.view.dtype:
                call = rule_of(node, "probe", RULES) or call
            if word(node) == "npu_quant_matmul" and not self._exact:
                call = widened(call)
        if self._shrink is not None and word(node) in SIZED:
            return self._resized(node, name, self._shrink)
        if not self._exact and word(node) in SELECTIONS:
            _refuse_symbolic_ends(node, name, self._binding)
        args = self._template(node.args)
        kwargs = {key: self._option(key, value) for key, value in node.kwargs.items()}
        if takes_default_dtype(node):
            held = dtype_of(node)
            wanted = held if self._exact else widen(held)
            if torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
                call = of_floats(call, wanted)
            elif kwargs.get("dtype") is None and has_argument(node, "dtype"):
                kwargs["dtype"] = wanted
        return Step(call, args, kwargs, f"{name}.{overload_name(node.target)}")

    def _resized(self, node: Node, name: str, shrink: Shrink) -> Step:
        """A view or expand whose sizes follow the size of its input."""
        source = node.args[0]
        assert isinstance(source, Node)
        full_in = self._binding.shape_of(source)
        full_out = self._binding.shape_of(node)

        def call(value: torch.Tensor) -> torch.Tensor:
            if "expand" in name:
                return value.expand(shrink.expanded(tuple(value.shape), full_in, full_out))
            return value.reshape(shrink.viewed(tuple(value.shape), full_in, full_out))

        return Step(call, (self._template(source),), {}, f"{name}{full_in}{full_out}{shrink}")

    def _option(self, key: str, value: Any) -> Any:
        if key == "device" and value is not None:
            return torch.device("cpu")
        return self._template(value)

    def _template(self, value: Any) -> Template:
        if isinstance(value, Node):
            known = self._slots.get(value)
            if known is not None:
                return known
            meaning = value_of(value)
            if is_symbolic(meaning) or isinstance(meaning, (int, float, bool)):
                return self._binding.number(meaning) if is_symbolic(meaning) else meaning
            raise Unprobeable(f"{value.op} outside the probed nodes")
        if isinstance(value, (tuple, list)):
            return (
                tuple(self._template(item) for item in value)
                if isinstance(value, tuple)
                else [self._template(item) for item in value]
            )
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.dtype) and not self._exact:
            return widen(value)
        return value


def _refuse_symbolic_ends(node: Node, name: str, binding: Binding) -> None:
    """A slice with symbolic ends takes a part of a probe that depends on the probe's size, so it is
    not run.
    """
    given = [arg for arg in (*node.args[1:], *node.kwargs.values()) if isinstance(arg, Node)]
    ends = [end for end in given if binding.varies(value_of(end))]
    value, source = value_of(node), node.args[0]
    if not ends or not isinstance(source, Node):
        return
    axis = int(argument(node, "dim", 0))
    before = shape_of(source)
    is_whole = isinstance(value, torch.Tensor) and value.dim() == len(before)
    if not is_whole or not binding.same(value.shape[axis], before[axis]):
        raise Unprobeable(f"{node.name} ({name}) takes a symbolic part")


def _refuse_narrow_cast(node: Node) -> None:
    """A cast through float8 is quantisation; it is never looked through."""
    produced = value_of(node)
    source = value_of(node.args[0]) if isinstance(node.args[0], Node) else None
    for value in (produced, source):
        dtype = getattr(value, "dtype", None)
        if dtype is not None and dtype.is_floating_point and dtype not in MODEL_FLOATS:
            raise Unprobeable(f"cast to or from {str(dtype).removeprefix('torch.')}")


def _attribute(node: Node, exact: bool) -> Any:
    value = attribute(node)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", value.dtype if exact else widen(value.dtype))
    return value


def _floats(template: Template) -> list[float]:
    if isinstance(template, float):
        return [template]
    if isinstance(template, dict):
        template = list(template.values())
    if isinstance(template, (list, tuple)):
        return [value for item in template for value in _floats(item)]
    return []


def _slots_in(template: Template) -> list[int]:
    if isinstance(template, dict):
        template = list(template.values())
    if isinstance(template, (list, tuple)):
        return [slot for item in template for slot in _slots_in(item)]
    return [template.index] if isinstance(template, Slot) else []


def _fill(template: Template, memory: list[Any]) -> Any:
    if type(template) is Slot:
        value = memory[template.index]
        if type(value) is Failed:
            raise Unprobeable(value.reason)
        return value
    if type(template) is tuple:
        return tuple([_fill(item, memory) for item in template])
    if type(template) is list:
        return [_fill(item, memory) for item in template]
    if type(template) is dict:
        return {key: _fill(item, memory) for key, item in template.items()}
    return template


_PLAIN = frozenset((int, float, str, bool, Slot, type(None)))


def _freeze(template: Template) -> Any:
    """Hashable, and equal for equal templates. (Exact types first: an isinstance of Tensor is
    slow.)
    """
    kind = type(template)
    if kind in _PLAIN:
        return template
    if kind is tuple or kind is list:
        return tuple([_freeze(item) for item in template])
    if kind is dict:
        return tuple([(key, _freeze(item)) for key, item in sorted(template.items())])
    return id(template) if isinstance(template, torch.Tensor) else str(template)


def literals(nodes: Iterable[Node]) -> list[float]:
    """The floats that the nodes hold, the integers by which they multiply or divide, and what fills
    their results.
    """
    held = [
        value
        for node in nodes
        for value in (*_floats(node.args), *_floats(node.kwargs), *_times(node), filled_with(node))
    ]
    return [value for value in held if isinstance(value, float)]


def _times(node: Node) -> list[float]:
    is_scaling = word(node) in ELEMENTWISE_SCALING
    return [float(arg) for arg in node.args if type(arg) is int] if is_scaling else []


def nodes_between(sources: Iterable[Node], sink: Node) -> list[Node]:
    """The nodes from which ``sink`` is computed, walking back until ``sources``, in graph order."""
    stop, seen, order = set(sources), set(), []
    stack: list[tuple[Node, bool]] = [(sink, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen and node not in stop:
            seen.add(node)
            stack.append((node, True))
            if filled_with(node) is None:
                stack.extend((arg, False) for arg in node.all_input_nodes)
    return order
