"""Finds operators by name, and binds the arguments of a call to the schema of its operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType
from typing import Any

import torch
from mla_fusion.meta import key_operator
from mla_fusion.meta.attention import ATTENTION, Attention
from mla_fusion.meta.errors import ContractError, known_name
from mla_fusion.meta.preprocess import ATB, Preprocess
from mla_fusion.meta.prolog import PROLOGS, Operator

# Operators beside the prologue. A function makes a `Binder` of every argument by name; its methods
# `check` and `results` are `mla_fusion.meta.check` and `infer` of that operator.
OTHERS: dict[str, Callable[[Mapping[str, Any]], Attention | Preprocess | key_operator.KeyCall]] = {
    ATTENTION.name: Attention,
    ATB.name: Preprocess,
    **{
        operator.name: partial(key_operator.KeyCall, operator)
        for operator in key_operator.OPERATORS
    },
}
_BESIDE = (ATTENTION, ATB, *key_operator.OPERATORS)
OPERATORS = PROLOGS | {operator.name: operator for operator in _BESIDE}
_BY_NAME = OPERATORS | {"mla_preprocess": ATB}  # ATB's name for it


def operator_named(op: object) -> Operator:
    """Returns the operator of that name. Raises ContractError ``op``."""
    return _BY_NAME[known_name("op", op, _BY_NAME)]


def bind(op: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the positional and keyword arguments of a call by name, without defaults.

    Raises ContractError ``op`` for an unknown operator, and ``argument.unknown`` for too many
    positional arguments or an argument with two values.
    """
    order = operator_named(op).required
    if len(args) > len(order):
        expected = f"at most {len(order)} positional"
        raise ContractError("argument.unknown", "*args", expected, str(len(args)), op=op)
    arguments = dict(zip(order, args, strict=False))
    for name in arguments:
        if name in options:
            found = "one by position and one by name"
            raise ContractError("argument.unknown", name, "one value", found, op=op)
    return arguments | dict(options)


# type of a default -> the types that an attribute may have, and their names in messages
_KINDS: dict[type, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: ((int, torch.SymInt), "an int"),
    float: ((int, float, torch.SymFloat), "a number"),
    str: (str, "a str"),
}
_DTYPE_NUMBER = (int, NoneType), "a torch_npu dtype number or None"


def complete(op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every argument of the operator by name, with the defaults of the schema.

    Raises ContractError ``argument.unknown``, ``required.<argument>`` and ``type.<argument>``.
    """
    required, defaults = signature(op)
    full = {**defaults, **arguments}
    for name in arguments:
        if name not in defaults and name not in required:
            raise ContractError("argument.unknown", name, f"an argument of {op}", name, op=op)
    for name in required:
        if full.get(name) is None:
            raise ContractError(f"required.{name}", name, "a tensor", "nothing", op=op)
    for name, default in defaults.items():
        if default is None and not name.endswith("_dtype"):
            continue
        types, text = _DTYPE_NUMBER if default is None else _KINDS[type(default)]
        value = full[name]
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise ContractError(f"type.{name}", name, text, repr(value), op=op)
    return full


def signature(op: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the required arguments in order, and the keyword arguments with defaults. Raises
    ContractError ``op``.
    """
    operator = operator_named(op)
    return operator.required, operator.defaults
