"""Decomposes operators that have no rule, by torch's own decompositions.

``graph/read.py`` calls it for one node at a time and reads the graph that it returns. Graphs are
cached by operator, sizes, dtypes and literals.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from mla_fusion.compat import OpOverload, decompositions, make_fx, tree_leaves, tree_map
from mla_fusion.fx.kinds import signature
from mla_fusion.graph.call import RULES, Size, rule_names_of
from mla_fusion.graph.form import Value

_COMPOSED = frozenset(  # decomposed of integers, too; some are second names of others
    "einsum repeat_interleave tile numpy_T mT matrix_H adjoint subtract negative multiply divide "
    "true_divide __and__ __or__ absolute clip concat concatenate pad take take_along_dim".split()
)
_DECOMPOSITIONS: dict[object, GraphModule | None] = {}


@cache
def _table() -> dict[Any, Any]:
    """Torch's decompositions, by operator."""
    return decompositions()


def is_composed(target: OpOverload) -> bool:
    """True for an operator that torch makes of others, and that is always decomposed."""
    return signature(target).rule in _COMPOSED


def is_known(target: OpOverload) -> bool:
    """True if the pass may analyse the operator.

    It has a rule, or torch decomposes it, or it is a view, or it is element-wise.
    """
    return (
        signature(target).rule in RULES
        or is_composed(target)
        or target in _table()
        or target.is_view
        or signature(target).is_pointwise
    )


def decomposition(target: Any, arguments: dict[str, Any]) -> tuple[Graph, list[Value]] | None:
    """The graph of a decomposition and the Values of its inputs.

    None if torch has no decomposition, or an operator of it has neither rule nor decomposition.
    """
    function = _table().get(target, target if is_composed(target) else None)
    if function is None:
        return None
    leaves = tree_leaves(arguments)
    operands = [leaf for leaf in leaves if isinstance(leaf, Value)]
    floats = [operand.dtype for operand in operands if operand.is_float and not operand.active]
    # Casts of activations are erased: they take another's dtype. A Size is printed as its
    # expression, and the graph has the number that it is bound to.
    kinds = [
        (leaf.shape, floats[0] if floats and leaf.active else leaf.dtype)
        if isinstance(leaf, Value)
        else repr(int(leaf) if isinstance(leaf, Size) else leaf)
        for leaf in leaves
    ]
    key = target, tuple(arguments), tuple(kinds)
    if key not in _DECOMPOSITIONS:
        _DECOMPOSITIONS[key] = _trace(
            target, function, arguments, [kind for kind in kinds if isinstance(kind, tuple)]
        )
    module = _DECOMPOSITIONS[key]
    return None if module is None else (module.graph, operands)


def _trace(
    target: Any,
    function: Any,
    arguments: dict[str, Any],
    kinds: list[tuple[tuple[int, ...], torch.dtype]],
) -> GraphModule | None:
    """Traces torch's decomposition on meta tensors of these shapes and dtypes. None if it cannot be
    traced or read.
    """

    names = {new: name for name, new in rule_names_of(signature(target)).items()}

    def call(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        filled = tree_map(lambda leaf: next(given) if isinstance(leaf, Value) else leaf, arguments)
        results = function(**{names[name]: filled[name] for name in filled})
        return tuple(results) if isinstance(results, tuple) else results

    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
    try:
        with torch.no_grad():
            module = make_fx(call)(*tensors)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, LookupError):
        return None
    targets = [node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    return module if target not in targets and all(map(is_known, targets)) else None
