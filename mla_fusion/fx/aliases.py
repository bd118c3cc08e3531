"""Says in whose memory a node lies, and which memory it writes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import schema_of, storage_id
from mla_fusion.fx.kinds import Signature, is_random, signature, value_of


def memory_of(node: Node) -> int | None:
    """Returns the identity of the memory of a node's tensor; None for other values."""
    value = value_of(node)
    return storage_id(value) if isinstance(value, torch.Tensor) else None


def viewed_by(node: Node, has_memory: bool) -> Node | None:
    """Returns the operand in whose memory a node lies; None if it has memory of its own.

    An operator that torch makes of others may copy its operand, or return it, whatever its schema
    says. There the memory of the examples says it.

    has_memory  of the node's graph (:func:`keeps_memory`)
    """
    if node.op != "call_function":
        return None
    source, caller = node.args[0] if node.args else None, node
    if node.target is operator.getitem and isinstance(source, Node):
        caller = source
    schema = signature(caller.target)
    is_view = schema.is_view or schema.is_in_place or "unsafe" in schema.word
    if may_share(schema) and has_memory and (memory := memory_of(node)) is not None:
        operands = caller.all_input_nodes
        if schema.word.endswith("dropout") and not is_random(node):
            return operands[0]
        holder = next((operand for operand in operands if memory_of(operand) == memory), None)
        return caller if is_view and holder is not None and caller is not node else holder
    return source if is_view and isinstance(source, Node) else None


def may_share(schema: Signature) -> bool:
    """Returns True if results may lie in an operand's memory, or not, whatever the schema says."""
    return schema.is_composite or "unsafe" in schema.word


def keeps_memory(graph: Graph) -> bool:
    """Returns True if the example of the first view lies in the memory of what it views."""
    for node in graph.nodes:
        schema = signature(node.target)
        if schema.is_view and not schema.is_composite and memory_of(node) is not None:
            return memory_of(node) == memory_of(node.all_input_nodes[0])
    return True


def written_arguments(node: Node) -> Iterator[Node]:
    """Yields the nodes that a node writes, by its schema."""
    if not signature(node.target).is_mutable:
        return
    target: Any = node.target
    for place, argument in enumerate(schema_of(target).arguments):
        operand = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            operands = operand if isinstance(operand, (tuple, list)) else (operand,)
            yield from (operand for operand in operands if isinstance(operand, Node))
