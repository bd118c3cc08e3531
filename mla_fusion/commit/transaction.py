"""Installs a new graph in the module that owns the old one: the last step of the pass.

Until :func:`install` the caller's module is only read. A failure before it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor
from torch.fx import Graph, GraphModule


def install(gm: GraphModule, graph: Graph, buffers: Mapping[str, Tensor]) -> None:
    """Makes ``graph`` the graph of ``gm``, and registers the buffers that it reads. All or
    nothing.
    """
    old_graph, registered_names = gm.graph, []
    try:
        for name, value in buffers.items():
            gm.register_buffer(name, value)
            registered_names.append(name)
        gm.graph = graph  # generates the code
    except BaseException:
        # restores the old graph: its code was not generated anew and is still there
        with suppress(Exception):
            gm.graph = old_graph
        for name in registered_names:
            delattr(gm, name)
        raise
