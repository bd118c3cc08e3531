"""A graph is rewritten beside the module that owns it, and given to that module when nothing is
left that could fail.

Until :func:`install` the caller's module is only read: a failure before it, wherever it happens,
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch.fx import Graph, GraphModule


def install(gm: GraphModule, graph: Graph, buffers: Mapping[str, torch.Tensor]) -> None:
    """Make ``graph`` the graph of ``gm``, with the buffers that it reads beside those of ``gm``;
    all or nothing.
    """
    before, registered = gm.graph, []
    try:
        for name, value in buffers.items():
            gm.register_buffer(name, value)
            registered.append(name)
        gm.graph = graph  # generates the code
    except BaseException:
        # the graph is back before its code is generated, and that is still the old code
        with suppress(Exception):
            gm.graph = before
        for name in registered:
            delattr(gm, name)
        raise
