"""Reads what dynamo's graph says and AOT autograd's graph, which numbers its inputs, does not.

That is: the user's names of inputs, which inputs are arguments of a call, numbers that modules have
as attributes, and why a prologue may be incomplete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
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
from mla_fusion.fx.vector_numbers import HOLDS_BFLOAT16, survives
from mla_fusion.modes import outside_modes

log = logging.getLogger("mla_fusion")
_SMALL = 1 << 16  # most elements that each call may pack, at hardly any cost
_READ_DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.int32)
_UNDECLARED_WRITER = "npu_kv_rmsnorm_rope_cache"
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
    """Replaces float inputs that modules or globals hold by their values.

    Under ``torch.compile(dynamic=True)`` dynamo makes every float a tensor input of one element, a
    module's ``variance_epsilon`` included. The kernel needs a number. A float of a module, of its
    class, or a global hardly ever changes. So its value is taken, with a guard: the graph is
    compiled again if the float changes. Floats that are arguments (a temperature) stay inputs.
    """
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymFloat) and is_held(node.args[0]):
            node.replace_all_uses_with(float(value))  # the conversion is the guard
            gm.graph.erase_node(node)
    gm.recompile()


def naming(gm: GraphModule) -> Callable[[GraphModule], None]:
    """Returns a function that copies names and notes of dynamo's graph to AOT autograd's graph."""
    inputs = gm.graph.find_nodes(op="placeholder")
    names = [plain(source_name(node)) for node in inputs]
    are_arguments, notes = list(map(is_argument, inputs)), _notes(gm)

    def name_inputs(graph: GraphModule) -> None:
        """Writes the names to the placeholders, and the notes to the graph."""
        graph.meta[NOTES] = notes
        placeholders = graph.graph.find_nodes(op="placeholder")
        if len(placeholders) == len(names):  # a tensor subclass, for example, is several inputs
            for node, name, is_of_call in zip(placeholders, names, are_arguments, strict=True):
                node.meta[ARGUMENT] = is_of_call
                if name:
                    node.meta[NAME] = name

    return name_inputs


def _notes(gm: GraphModule) -> tuple[str, ...]:
    """Returns a note for each reason why a prologue may be incomplete.

    Logs a note if the model computes something else because of it.
    """
    notes = list[str]()
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        if name == _UNDECLARED_WRITER and not node.users:
            notes.append(_DROPPED.format(name, node.name))
            log.warning(notes[-1])
    if place := broken_at(gm):
        notes.append(_BROKEN.format(place))
    return tuple(notes)


def mark_arguments(inputs: Sequence[Node]) -> None:
    """Marks the inputs of a graph, while AOT autograd compiles it, that each call provides."""
    static = static_inputs()
    for place, node in enumerate(inputs):
        node.meta[ARGUMENT] = static is not None and place not in static


def differs_by_call(inputs: Sequence[Node]) -> bool:
    """Returns True if what is computed from these inputs may differ from call to call.

    That is so of small arguments (a gate, a scale, an adapter's number), and of arguments combined
    with parameters: these are often buffers that are written for each call, and inference mode
    does not count the writes. Of inputs whose strides a call decides, two may begin at one address.
    """
    sources = [node for node in inputs if not is_size(node)]
    arguments = [node for node in sources if node.meta.get(ARGUMENT)]
    return (
        any(has_symbols(value_of(node).stride()) for node in sources)
        or 0 < len(arguments) < len(sources)
        or any(has_symbols(shape_of(node)) or prod(shape_of(node)) <= _SMALL for node in arguments)
    )


# The numbers of a model's vectors may be bfloat16's in another dtype, such as the float32 norm
# weights of DeepSeek-V3.2's code. They are read when a graph is compiled, while its parameters are
# known, and whenever they are packed (`mla_fusion.weights.cache`).


def mark_numbers(gm: GraphModule, arguments: Sequence[Any]) -> None:
    """Notes on the inputs of an AOT graph whether the numbers of vectors are bfloat16's.

    arguments  what the caller passes for each input
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    if len(inputs) != len(arguments):  # AOT autograd has merged or split some of them
        return
    for node, value in zip(inputs, arguments, strict=True):
        if isinstance(value, FakeTensor) or is_of_model(value):
            note, tensor = _holds_bfloat16(value), value_of(node)
            is_same = isinstance(tensor, Tensor) and tensor.shape == value.shape
            if note is not None and is_same and tensor.dtype == value.dtype:
                node.meta[HOLDS_BFLOAT16] = note


def _holds_bfloat16(value: Tensor) -> bool | None:
    """Returns whether the numbers of a vector are bfloat16's; None for any other tensor."""
    if isinstance(value, FakeTensor):
        return getattr(value, HELD, None)
    is_plain = isinstance(value, torch.nn.Parameter) or type(value) is Tensor
    if not is_plain or value.dim() != 1 or value.is_meta or value.dtype not in _READ_DTYPES:
        return None
    with outside_modes():
        return survives(value, torch.bfloat16)


def remember_numbers(source: Tensor, fake: Tensor) -> None:
    """Notes on a fake tensor whether the numbers of the parameter or buffer are bfloat16's."""
    note = _holds_bfloat16(source)
    if note is not None:
        setattr(fake, HELD, note)
