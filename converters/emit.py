"""Writes a node into the GE graph that torchair is building."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mla_fusion.meta.prolog import Operator

from mla_fusion.compat import ge_node, is_ge_tensor


def emit(operator: Operator, values: dict[str, Any]) -> dict[str, Any]:
    """Adds the GE node of an operator with these arguments, and returns its outputs by name."""
    attr = import_module("torchair.ge").attr
    kinds = operator.ge_attributes
    outputs = ge_node(
        op_type=operator.ge_type,
        inputs={name: _tensor(values.get(name)) for name in operator.ge_inputs},
        outputs=list(operator.ge_results),
        attrs={name: getattr(attr, kind)(values[name]) for name, kind in kinds.items()},
    )
    return dict(zip(operator.ge_results, outputs, strict=True))


def copied(tensor: Any) -> Any:
    """Returns a copy of a tensor in the graph. torchair drops it if the original may be written."""
    return import_module("torchair.ge").Clone(_tensor(tensor))


def _tensor(value: Any) -> Any:
    """Returns a GE tensor: torchair folds a tensor without elements to a torch constant."""
    if value is None or is_ge_tensor(value):
        return value
    return import_module("torchair.ge").Const(value)
