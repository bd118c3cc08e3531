"""The names by which a user knows the inputs of a compiled graph, which AOT autograd numbers; and
which of them are no model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch.fx import GraphModule, Node

from mla_fusion.compat import is_argument, source_name, static_inputs
from mla_fusion.compile import notes
from mla_fusion.fx.module_path import ARGUMENT, NAME, NOTES, plain
from mla_fusion.fx.sizes import has_symbols, is_size
from mla_fusion.operators.known import shape_of, value_of

_SMALL = 1 << 16  # elements: to pack so many costs a call nothing to speak of


def of(gm: GraphModule) -> Callable[[Any], None]:
    """Of dynamo's graph; what is returned writes them to the placeholders of the graph that AOT
    autograd makes, and to that graph what dynamo's alone tells.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    names = [plain(source_name(node)) for node in inputs]
    by_call, said = list(map(is_argument, inputs)), notes.of(gm)

    def give(made: GraphModule) -> None:
        made.meta[NOTES] = said
        placeholders = made.graph.find_nodes(op="placeholder")
        if len(placeholders) == len(names):  # a tensor subclass, say, is several inputs
            for node, name, brings in zip(placeholders, names, by_call, strict=True):
                node.meta[ARGUMENT] = brings
                if name:
                    node.meta[NAME] = name

    return give


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
    if any(has_symbols(value_of(node).stride()) for node in sources):
        return True
    arguments = [node for node in sources if node.meta.get(ARGUMENT)]
    return 0 < len(arguments) < len(sources) or any(map(_is_small, arguments))


def _is_small(node: Node) -> bool:
    return has_symbols(shape_of(node)) or prod(shape_of(node)) <= _SMALL
