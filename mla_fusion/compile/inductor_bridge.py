"""Calls Inductor's internals. No other file does. Making a hook does not import Inductor.

Inductor keeps graphs out of its caches unless its custom passes are instances of a class of its
own. It decomposes operators before the custom passes, so these must add no operator that it would
have decomposed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch.fx import Graph, Node

from mla_fusion.compat import OpOverload, schema_of, tree_leaves
from mla_fusion.fx.registered import traced_call

SLOTS = (  # the fields of torch._inductor.config that take passes over graphs
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
_PASSES = "torch._inductor.custom_graph_pass"


def pass_class() -> type:
    """Returns Inductor's base class of custom passes."""
    return import_module(_PASSES).CustomGraphPass


def accept(kind: type) -> None:
    """Registers a class as a subclass of that base class, if Inductor is loaded."""
    base = getattr(sys.modules.get(_PASSES), "CustomGraphPass", None)
    if base is not None:
        base.register(kind)


def runs(custom: object) -> bool:
    """Returns True if Inductor runs this pass itself, rather than a pass manager."""
    config = sys.modules.get("torch._inductor.config")
    slots = [getattr(config, slot, None) for slot in SLOTS]  # a pass, or a list of passes
    return any(item is custom for item in tree_leaves(slots))


def noops() -> frozenset[Any]:
    """Returns the operators that Inductor and torchair remove if they change nothing."""
    return frozenset(import_module("torch._inductor.fx_passes.post_grad").noop_registry)


def finish(graph: Graph) -> None:
    """Prepares a graph for Inductor's lowerings, in place, if Inductor is loaded.

    Operators without a lowering are decomposed, as Inductor would have done before. Calls of
    operators that are not torch's get their default arguments: AOTInductor writes down the
    arguments that such a call has, and then passes all of the schema's to the operator.
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
            node.kwargs = {
                argument.name: node.kwargs.get(argument.name, argument.default_value)
                for argument in schema_of(node.target).arguments[len(node.args) :]
                if argument.name in node.kwargs or argument.has_default_value()
            }


def _decompose(graph: Graph, node: Node, table: dict[Any, Callable[..., Any]]) -> None:
    """Replaces a call by its decomposition. The operator must have one result."""
    function: Any = node.target
    traced = traced_call(node, function, getattr(node.meta["val"], "fake_mode", None), table)
    copies = dict(zip(traced.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(traced, copies)
    for step, copied in copies.items():
        if step.op == "call_function":
            copied.meta = {**node.meta, "val": step.meta["val"]}
    node.replace_all_uses_with(result)
    graph.erase_node(node)
