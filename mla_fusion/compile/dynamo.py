"""What dynamo's graph tells and AOT autograd's, which numbers its inputs, does not: the names by
which a user knows the inputs, which of them are no model's, numbers that modules hold, and why a
prologue may not be whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from mla_fusion.compat import (
    HELD,
    FakeTensor,
    broken_at,
    is_argument,
    is_held,
    is_of_model,
    source_name,
    static_inputs,
)
from mla_fusion.fx.kinds import shape_of, value_of
from mla_fusion.fx.module_path import ARGUMENT, NAME, NOTES, plain
from mla_fusion.fx.sizes import has_symbols, is_size
from mla_fusion.fx.vector_numbers import NUMBERS, Numbers
from mla_fusion.modes import outside_modes

log = logging.getLogger("mla_fusion")
_SMALL = 1 << 16  # elements: to pack so many costs a call nothing to speak of
_LOOKED_AT = (torch.bfloat16, torch.float32, torch.int8, torch.int32)
_WRITES_UNSAID = "npu_kv_rmsnorm_rope_cache"
_BROKEN = (
    "Dynamo broke the graph in pieces, of which this one ends at {}: parts of a prologue may stand "
    "in others. TORCH_LOGS=graph_breaks lists the breaks and their reasons, "
    "torch.compile(.., fullgraph=True) raises at the first"
)
_DROPPED = (
    "nothing reads the results of {0} ({1}), whose schema does not say that it writes the caches: "
    "AOT autograd drops the call, and they are not written. Read the caches that it returns, or "
    "call {0}_v2"
)


def specialise(gm: GraphModule) -> None:
    """Replace dynamo's float inputs that modules hold, or globals, by their values.

    Under ``torch.compile(dynamic=True)`` dynamo hands every float to the graph as a tensor of one
    element, a module's ``variance_epsilon`` included; the kernel wants a number. A float that a
    module or its class holds, or a global, hardly ever changes: it is taken at its value, with a
    guard, so that the graph is compiled again if it does. Floats that are arguments (a temperature)
    stay what they are.
    """
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        value, given = node.meta.get("example_value"), node.args[0]
        if isinstance(value, torch.SymFloat) and is_held(given):
            node.replace_all_uses_with(float(value))  # the conversion is the guard
            gm.graph.erase_node(node)
    gm.recompile()


def naming(gm: GraphModule) -> Callable[[GraphModule], None]:
    """Of dynamo's graph; what is returned writes the names of its inputs to the placeholders of the
    graph that AOT autograd makes, and to that graph why a prologue may not be whole in it.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    names = [plain(source_name(node)) for node in inputs]
    by_call, notes = list(map(is_argument, inputs)), _notes(gm)

    def give(made: GraphModule) -> None:
        made.meta[NOTES] = notes
        placeholders = made.graph.find_nodes(op="placeholder")
        if len(placeholders) == len(names):  # a tensor subclass, say, is several inputs
            for node, name, brings in zip(placeholders, names, by_call, strict=True):
                node.meta[ARGUMENT] = brings
                if name:
                    node.meta[NAME] = name

    return give


def _notes(gm: GraphModule) -> tuple[str, ...]:
    """A sentence or two for each; logged too, where the model computes something else for it."""
    found = []
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        if name == _WRITES_UNSAID and not node.users:
            found.append(_DROPPED.format(name, node.name))
            log.warning(found[-1])
    if place := broken_at(gm):
        found.append(_BROKEN.format(place))
    return tuple(found)


def mark_arguments(inputs: Sequence[Node]) -> None:
    """Note which inputs of a graph that AOT autograd compiles are no model's."""
    static = static_inputs()
    for place, node in enumerate(inputs):
        node.meta[ARGUMENT] = static is not None and place not in static


def differs_by_call(inputs: Sequence[Node]) -> bool:
    """Is what is made of these inputs made of arguments: of a small one (a gate, a scale, an
    adapter's number), or beside the model's own? They are often buffers that are written for each
    call, under inference mode without a count. Or of one whose strides a call decides: two may
    begin at one address.
    """
    sources = [node for node in inputs if not is_size(node)]
    arguments = [node for node in sources if node.meta.get(ARGUMENT)]
    return (
        any(has_symbols(value_of(node).stride()) for node in sources)
        or 0 < len(arguments) < len(sources)
        or any(has_symbols(shape_of(node)) or prod(shape_of(node)) <= _SMALL for node in arguments)
    )


# What the vectors of a model hold: float32 norm weights whose numbers are bfloat16's, as in
# DeepSeek-V3.2's code, and static scales that were repeated for every channel when a checkpoint was
# loaded, as vllm-ascend does. They are looked at when a graph is compiled, where parameters are at
# hand, and again whenever they are packed (`mla_fusion.weights.cache`).


def mark_numbers(gm: GraphModule, given: Sequence[Any]) -> None:
    """Note on the inputs of an AOT graph what the vectors hold that its caller gives, one for each
    input.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    if len(inputs) != len(given):  # AOT autograd has taken some for one another, or apart
        return
    for node, value in zip(inputs, given, strict=True):
        held = _held(value) if isinstance(value, FakeTensor) or is_of_model(value) else None
        form = getattr(value_of(node), "dtype", None), getattr(value_of(node), "shape", None)
        if held is not None and form == (value.dtype, value.shape):
            node.meta[NUMBERS] = held


def _held(value: torch.Tensor) -> Numbers | None:
    """What a vector holds; None for anything else."""
    if isinstance(value, FakeTensor):
        return getattr(value, HELD, None)
    is_plain = isinstance(value, torch.nn.Parameter) or type(value) is torch.Tensor
    if not is_plain or value.dim() != 1 or value.is_meta or value.dtype not in _LOOKED_AT:
        return None
    with outside_modes():
        return Numbers.of(value)


def remember_numbers(source: torch.Tensor, fake: torch.Tensor) -> None:
    """A fake tensor that stands for a parameter or a buffer knows what it holds."""
    held = _held(source)
    if held is not None:
        setattr(fake, HELD, held)
