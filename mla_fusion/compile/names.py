"""The names by which a user knows the inputs of a compiled graph, which AOT autograd numbers; and
which of them are no model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from mla_fusion.compat import is_argument, source_name
from mla_fusion.fx.module_path import ARGUMENT, NAME, plain


def of(gm: GraphModule) -> Callable[[Any], None]:
    """Of dynamo's graph; what is returned writes them to the placeholders of the graph that AOT
    autograd makes.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    names = [plain(source_name(node)) for node in inputs]
    arguments = list(map(is_argument, inputs))

    def give(made: GraphModule) -> None:
        placeholders = made.graph.find_nodes(op="placeholder")
        if len(placeholders) == len(names):  # a tensor subclass, say, is several inputs
            for node, name, is_argument in zip(placeholders, names, arguments, strict=True):
                node.meta[ARGUMENT] = is_argument
                if name:
                    node.meta[NAME] = name

    return give
