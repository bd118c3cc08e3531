"""A fact is a value: it is said of an equal layer by exchanging its nodes.

Which fields hold nodes is read off their declared types, so a new field of a fact needs nothing
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from torch.fx import Node

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Fact = TypeVar("Fact", bound="DataclassInstance")


def moved(fact: Fact, to: Mapping[Node, Node]) -> Fact:
    """The dataclass ``fact`` with ``to[node]`` for each node in it, nested facts and tuples
    included.

    Raises KeyError for a node that has no counterpart.
    """
    held = {name: _moved(getattr(fact, name), to) for name in _with_nodes(type(fact))}
    return replace(fact, **held)


def _moved(value: Any, to: Mapping[Node, Node]) -> Any:
    if isinstance(value, Node):
        return to[value]
    if isinstance(value, tuple):
        return tuple([_moved(item, to) for item in value])
    if is_dataclass(value) and not isinstance(value, type):
        return moved(value, to)
    return value


@cache
def _with_nodes(fact: type[DataclassInstance]) -> tuple[str, ...]:
    """The fields that may hold nodes, by their types: tables of a thousand columns are not looked
    through.
    """
    types = get_type_hints(fact)
    return tuple(field.name for field in fields(fact) if _may_hold_nodes(types[field.name]))


def _may_hold_nodes(declared: Any) -> bool:
    return (
        declared is Node or is_dataclass(declared) or any(map(_may_hold_nodes, get_args(declared)))
    )
