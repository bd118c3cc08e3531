"""Pads that give a call's results the heads back that were cut off behind it, left out."""

from __future__ import annotations

from collections.abc import Collection
from operator import getitem

import torch
from torch.fx import Node

from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import argument, is_view, op_name, word
from mla_fusion.meta.prolog import V3
from mla_fusion.operators.known import shape_of
from mla_fusion.plan.padded import OF_HEADS, keeps_heads, zero_heads

_PLACES = {V3.results.index(name) for name in OF_HEADS}


def carry(builder: GraphBuilder) -> None:
    """Let readers that pad heads with zeros read the result that has them. Heads of zeros are zeros
    in a result.
    """
    graph, made_here = builder.gm.graph, {*builder.made}
    for pad in [node for node in graph.nodes if node.op == "call_function" and zero_heads(node)]:
        whole = _with_zeros(pad, made_here)
        if whole is None:
            continue
        shape = list(shape_of(pad))
        with builder.propagating():
            builder.at(pad, {})
            made = whole if list(shape_of(whole)) == shape else builder.reshape(whole, shape)
        pad.replace_all_uses_with(made)
        step = pad
        while step is not whole and not step.users:
            step, unread = step.all_input_nodes[0], step
            graph.erase_node(unread)


def _with_zeros(pad: Node, made: Collection[Node]) -> Node | None:
    """The result whose heads the call's own cut leaves out, and that are padded again; None for any
    other pad.

    made  the nodes that the rewriting has made; a cut by the model leaves out heads that are no
          zeros
    """
    step = pad.args[0]
    while isinstance(step, Node) and step.op == "call_function" and word(step) != "slice":
        before = step.all_input_nodes[0] if step.all_input_nodes else None
        if before is None or not keeps_heads(step, before):
            return None
        step = before
    if not isinstance(step, Node) or step not in made or argument(step, "dim") != -2:
        return None
    whole = result = step.all_input_nodes[0]
    while is_view(result) and result in made:  # the columns of each head in another order
        result = result.all_input_nodes[0]
    call, place = result.args if result.target is getitem else (None, None)
    if (
        not isinstance(call, Node)
        or not op_name(call).startswith(f"npu::{V3.name}")
        or place not in _PLACES
    ):
        return None
    value = whole.meta["val"]
    has_all = value.shape[-2] == shape_of(pad)[-2] and value.dtype in (
        torch.bfloat16,
        torch.float16,
    )
    return whole if has_all else None
