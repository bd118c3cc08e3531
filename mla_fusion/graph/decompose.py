"""Operators without a rule, as torch decomposes them: one node at a time, remembered by operator,
sizes and literals.
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

_KNOWN: dict[object, GraphModule | None] = {}


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    return decompositions()


def is_known(target: OpOverload) -> bool:
    """Has it a rule, or is it one of operators that have, or of each element alone?"""
    return (
        name_of(target).removesuffix("_") in RULES
        or target in _table()
        or target.is_view
        or signature(target).is_pointwise
    )


def traced(target: Any, given: dict[str, Any]) -> tuple[Graph, list[Value]] | None:
    """The graph of operators that have rules, and what its inputs are; None: torch has none."""
    if target not in _table():
        return None
    places = {name: one for name, one in given.items() if isinstance(one, Value)}
    if any(isinstance(one, list) and _has_value(one) for one in given.values()):
        return None
    rest = {name: one for name, one in given.items() if name not in places}
    key = (
        target,
        tuple((name, one.shape, one.dtype) for name, one in places.items()),
        repr(rest),
    )
    if key not in _KNOWN:
        _KNOWN[key] = _traced(target, places, rest)
    made = _KNOWN[key]
    return None if made is None else (made.graph, list(places.values()))


def _has_value(given: list[Any]) -> bool:
    return any(isinstance(one, Value) for one in given)


def _traced(target: Any, places: dict[str, Value], rest: dict[str, Any]) -> GraphModule | None:
    def schema_name(name: str) -> str:
        return "self" if name == "x" else name

    def function(*tensors: torch.Tensor) -> Any:
        named = {schema_name(name): one for name, one in rest.items()}
        named |= dict(zip(map(schema_name, places), tensors, strict=True))
        return _table()[target](**named)

    tensors = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in places.values()]
    try:
        with torch.no_grad():
            made = make_fx(function)(*tensors)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, LookupError):
        return None
    for node in made.graph.nodes:
        if node.op == "call_function" and node.target is target:
            return None
        is_known = not isinstance(node.target, OpOverload) or node.target in _table()
        if not is_known and name_of(node.target) not in RULES:
            return None
    return made
