"""The operators by name, and calls bound by their tables: arguments by name, defaults filled in,
types of attributes checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from mla_fusion.meta import preprocess
from mla_fusion.meta.attention import ATTENTION, Attention
from mla_fusion.meta.errors import ContractError, known_name
from mla_fusion.meta.key_operator import OPERATORS as KEY_OPERATORS
from mla_fusion.meta.key_operator import KeyCall
from mla_fusion.meta.preprocess import ATB, Preprocess
from mla_fusion.meta.prolog import PROLOGS

# Operators beside the prologue: the `Binder` of a call, made of every argument by name. Its `check`
# and `results` are `mla_fusion.meta.check` and `infer` of that operator.
OTHERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    ATTENTION.name: Attention,
    ATB.name: Preprocess,
    **{one.name: partial(KeyCall, one) for one in KEY_OPERATORS},
}
OPERATORS = PROLOGS | {one.name: one for one in (ATTENTION, ATB, *KEY_OPERATORS)}
ALIASES = {"mla_preprocess": preprocess.OP}  # ATB's operator without torch's prefix


def named(op: str) -> str:
    """The operator's own name, of any name that it goes by; a name nobody knows is handed back.

    ContractError ``op`` for what is no name at all: it may not even be comparable with one.
    """
    if not isinstance(op, str):
        raise ContractError("op", "op", "the name of an operator", type(op).__name__)
    return ALIASES.get(op, op)


def bind(op: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name from a call's positional and keyword arguments, without defaults.

    Raises ContractError ``op`` for an unknown operator and ``argument.unknown`` for too many
    positional ones.
    """
    order, _ = signature(op)
    if len(args) > len(order):
        raise ContractError(
            "argument.unknown", "*args", f"at most {len(order)} positional", str(len(args)), op=op
        )
    twice = next((name for name in order[: len(args)] if name in options), None)
    if twice is not None:
        raise ContractError(
            "argument.unknown", twice, "one value", "one by position and one by name", op=op
        )
    return dict(zip(order, args, strict=False)) | dict(options)


def complete(op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of the operator by name, schema defaults filled in.

    Raises ContractError ``argument.unknown`` and ``required.<argument>``.
    """
    required, defaults = signature(op)
    full = {**defaults, **arguments}
    for name in arguments:
        if name not in defaults and name not in required:
            raise ContractError("argument.unknown", name, f"an argument of {op}", name, op=op)
    for name in required:
        if full.get(name) is None:
            raise ContractError(f"required.{name}", name, "a tensor", "nothing", op=op)
    for name, (kind, text) in attribute_types(op).items():
        value = full[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ContractError(f"type.{name}", name, text, repr(value), op=op)
    return full


@cache
def attribute_types(op: str) -> dict[str, tuple[Any, str]]:
    """The Python type of every argument that is not a tensor."""
    kinds: dict[type, tuple[Any, str]] = {
        bool: (bool, "True or False"),
        int: ((int, torch.SymInt), "an int"),
        float: ((int, float, torch.SymFloat), "a number"),
        str: (str, "a str"),
    }
    _, defaults = signature(op)
    dtype = ((int, type(None)), "a torch_npu dtype number or None")
    attributes = {n: kinds[type(value)] for n, value in defaults.items() if value is not None}
    return attributes | {name: dtype for name in defaults if name.endswith("_dtype")}


def signature(op: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """(required arguments in order, keyword arguments with defaults); ContractError ``op`` when
    unknown.
    """
    operator = OPERATORS[known_name("op", named(op), OPERATORS)]
    return operator.required, operator.defaults
