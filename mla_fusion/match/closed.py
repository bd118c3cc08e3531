"""Prologues in graphs that a node runs under a condition or in a loop (``torch.cond``): seen, and
left alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from mla_fusion.compat import HigherOrderOperator
from mla_fusion.fx.kinds import attribute
from mla_fusion.fx.view import View
from mla_fusion.match.finder import search
from mla_fusion.match.near_miss import NearMiss
from mla_fusion.report.rejection import Refuse

_SCORE = 0.9  # all of it is there


def in_bodies(gm: GraphModule) -> Iterator[NearMiss]:
    """One for each body in which a prologue, or a part of one, is found."""
    for node in gm.graph.find_nodes(op="get_attr"):
        body = attribute(node)
        caller = next(
            (user for user in node.users if isinstance(user.target, HigherOrderOperator)), None
        )
        if (
            caller is not None
            and isinstance(body, GraphModule)
            and all(map(_is_described, body.graph.nodes))
        ):
            _, found = search(View(body))
            if found:
                detail = f"{caller.name} ({caller.target}) runs it in {node.target}"
                yield NearMiss(Refuse("graph.branch", detail, (caller,)), (caller,), _SCORE)


def _is_described(node: Node) -> bool:
    return node.op in ("output", "get_attr") or "val" in node.meta
