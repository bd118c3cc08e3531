"""Decomposes operators that have no rule, by torch's own decompositions.

``graph/read.py`` calls it for one node at a time and reads the graph that it returns. Graphs are
cached by operator, sizes, dtypes and literals.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from mla_fusion.compat import OpOverload, decompositions, make_fx
from mla_fusion.fx.kinds import signature
from mla_fusion.graph.call import RULES, name_of
from mla_fusion.graph.form import Value

_DECOMPOSITIONS: dict[object, GraphModule | None] = {}


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    """Torch's decompositions, by operator."""
    return decompositions()


def is_known(target: OpOverload) -> bool:
    """True if the pass may analyse the operator.

    It has a rule, or torch decomposes it, or it is a view, or it is element-wise.
    """
    return (
        name_of(target).removesuffix("_") in RULES
        or target in _table()
        or target.is_view
        or signature(target).is_pointwise
    )


def decomposition(target: Any, arguments: dict[str, Any]) -> tuple[Graph, list[Value]] | None:
    """The graph of a decomposition and the Values of its inputs.

    None if torch has no decomposition, or an operator of it has neither rule nor decomposition.
    """
    if target not in _table():
        return None
    operands = {
        name: argument for name, argument in arguments.items() if isinstance(argument, Value)
    }
    if any(isinstance(argument, list) and _has_value(argument) for argument in arguments.values()):
        return None
    literals = {name: argument for name, argument in arguments.items() if name not in operands}
    key = (
        target,
        tuple((name, operand.shape, operand.dtype) for name, operand in operands.items()),
        repr(literals),
    )
    if key not in _DECOMPOSITIONS:
        _DECOMPOSITIONS[key] = _trace(target, operands, literals)
    module = _DECOMPOSITIONS[key]
    return None if module is None else (module.graph, list(operands.values()))


def _has_value(items: list[Any]) -> bool:
    """True if a list holds a Value."""
    return any(isinstance(item, Value) for item in items)


def _trace(target: Any, operands: dict[str, Value], literals: dict[str, Any]) -> GraphModule | None:
    """Traces torch's decomposition on meta tensors. None if it cannot be traced or read."""

    def schema_name(name: str) -> str:
        return "self" if name == "x" else name

    def function(*tensors: torch.Tensor) -> Any:
        arguments = {schema_name(name): literal for name, literal in literals.items()}
        arguments |= dict(zip(map(schema_name, operands), tensors, strict=True))
        return _table()[target](**arguments)

    tensors = [
        torch.empty(operand.shape, dtype=operand.dtype, device="meta")
        for operand in operands.values()
    ]
    try:
        with torch.no_grad():
            module = make_fx(function)(*tensors)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, LookupError):
        return None
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is target:
            return None
        is_known = not isinstance(node.target, OpOverload) or node.target in _table()
        if not is_known and name_of(node.target) not in RULES:
            return None
    return module
