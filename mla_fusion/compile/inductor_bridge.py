"""The one place where this project touches Inductor's internals. Making a hook does not import
Inductor.

Inductor asks its custom passes to be instances of a class of its own, lest their graphs be kept out
of its caches; and it decomposes operators ahead of the custom passes alone, so that they may add
none that it would have decomposed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from mla_fusion.compat import OpOverload, make_fx, schema_of

SLOTS = (  # the fields of torch._inductor.config that take passes over graphs
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
_PASSES = "torch._inductor.custom_graph_pass"


def pass_class() -> type:
    """The class that Inductor asks its custom passes to be of."""
    base: type = import_module(_PASSES).CustomGraphPass
    return base


def accept(kind: type) -> None:
    """Let instances of a class pass for that class's, once Inductor is there to ask."""
    base = getattr(sys.modules.get(_PASSES), "CustomGraphPass", None)
    if base is not None:
        base.register(kind)


def runs(custom: object) -> bool:
    """Whether Inductor is given this pass itself, rather than by somebody's pass manager."""
    config = sys.modules.get("torch._inductor.config")
    found = [getattr(config, name, None) for name in SLOTS] if config is not None else []
    each = [
        item for slot in found for item in (slot if isinstance(slot, (list, tuple)) else [slot])
    ]
    return any(item is custom for item in each)


def noops() -> frozenset[Any]:
    """The operators that Inductor's pass over such that change nothing takes out; torchair has that
    pass too.
    """
    return frozenset(import_module("torch._inductor.fx_passes.post_grad").noop_registry)


def finish(graph: Graph) -> None:
    """Spell, in place, the operators that Inductor, where it compiles, has no lowering for as it
    would have decomposed them, and give calls of operators that are not torch's the defaults that
    they leave out.

    AOTInductor writes down the arguments that such a call has, and then hands all of the schema's
    to the operator.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    table = import_module("torch._inductor.decomposition").select_decomp_table()
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload):
            continue
        if node.target in table and node.target not in lowering.lowerings:
            _decompose(graph, node, table)
        elif node.target.namespace not in ("aten", "prims"):
            arguments = schema_of(node.target).arguments[len(node.args) :]
            left_out = {one.name: one.default_value for one in arguments if one.has_default_value()}
            node.kwargs = {**left_out, **node.kwargs}


def _decompose(graph: Graph, node: Node, table: dict[Any, Callable[..., Any]]) -> None:
    read = node.all_input_nodes

    def call(*values: Any) -> Any:
        given = dict(zip(read, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    mode = getattr(node.meta["val"], "fake_mode", None)
    with torch.no_grad(), mode or nullcontext():
        traced = make_fx(call, decomposition_table=table)(*(one.meta["val"] for one in read))
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), read, strict=True))
    with graph.inserting_before(node):
        for step in traced.graph.nodes:
            if step.op == "call_function":
                made = copies[step] = graph.node_copy(step, copies.__getitem__)
                made.meta = {**node.meta, "val": step.meta["val"]}
    # of operators with one result, as all are that the pass emits
    (result,) = traced.graph.output_node().all_input_nodes
    node.replace_all_uses_with(copies[result])
    graph.erase_node(node)
