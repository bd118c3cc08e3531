"""What an operator does to indices and dtypes, as far as the pass needs to know.

This is the only place where operators are listed by name. Everything that decides what a group of
nodes *means* works on values (see :mod:`mla_fusion.graph.program`), not on these lists; the lists only
say where a walk may pass through (views, casts) and where it must stop (contractions, effects).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

# Each of these re-indexes its first argument and changes no element.
_VIEWS = frozenset(
    """
    aten::view aten::_unsafe_view aten::reshape aten::permute aten::transpose aten::t aten::unsqueeze
    aten::squeeze aten::expand aten::slice aten::select aten::clone aten::contiguous aten::alias
    aten::detach aten::flatten aten::unflatten aten::narrow aten::movedim aten::swapaxes aten::swapdims
    aten::numpy_T aten::mT aten::matrix_H aten::view_as aten::expand_as aten::lift_fresh aten::lift_fresh_copy
    aten::_reshape_alias aten::unsafe_split aten::split aten::split_with_sizes aten::chunk aten::unbind
    aten::tensor_split aten::unsafe_chunk aten::_reshape_copy aten::view_copy aten::permute_copy
    aten::transpose_copy aten::t_copy aten::unsqueeze_copy aten::squeeze_copy aten::expand_copy
    aten::slice_copy aten::select_copy aten::alias_copy aten::split_copy aten::split_with_sizes_copy
    aten::unbind_copy aten::detach_copy npu::npu_format_cast npu::npu_format_cast_
    """.split()
)

# Views that keep every row and every column where it is, so that a producer may stand in for them.
_RESHAPES = frozenset(
    """
    aten::view aten::_unsafe_view aten::reshape aten::unsqueeze aten::squeeze aten::clone aten::contiguous
    aten::alias aten::detach aten::flatten aten::unflatten aten::lift_fresh aten::lift_fresh_copy
    aten::_reshape_alias aten::view_as aten::_reshape_copy aten::view_copy aten::unsqueeze_copy
    aten::squeeze_copy aten::alias_copy aten::detach_copy npu::npu_format_cast
    """.split()
)

_CASTS = frozenset(
    """
    aten::_to_copy aten::to prims::convert_element_type npu::npu_dtype_cast npu::_npu_dtype_cast
    aten::type_as aten::float aten::bfloat16 aten::half
    """.split()
)

_COPYING_CASTS = frozenset(["aten::_to_copy", "prims::convert_element_type"])  # the others may give their input back

_EFFECTS = frozenset(["aten::copy_", "npu::npu_kv_rmsnorm_rope_cache", "npu::npu_mla_prolog", "npu::npu_mla_prolog_v2"])

# Writers of a tensor given as their first argument; a cache write where that tensor comes from outside.
_WRITERS = frozenset(
    """
    aten::index_put aten::_unsafe_index_put aten::index_copy aten::scatter aten::slice_scatter
    aten::select_scatter aten::copy aten::masked_scatter aten::index_fill aten::scatter_add aten::index_add
    npu::npu_scatter_nd_update
    """.split()
)

# Casts among these are looked through when a group of nodes is asked what it means. float16 is among them so
# that a float16 model is recognised, and then refused by name; float8 and integers are quantisation.
MODEL_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


# Tensors of a given shape whose elements do not depend on the argument that lends it.
_FILLED = {
    "aten::new_zeros": 0.0,
    "aten::zeros_like": 0.0,
    "aten::new_ones": 1.0,
    "aten::ones_like": 1.0,
    "aten::new_empty": math.nan,  # whatever reads an element that nothing was written to is no fact
    "aten::empty_like": math.nan,
}


_FILLED_WITH = frozenset(("aten::new_full", "aten::full_like"))
_LENT = _FILLED_WITH | {"aten::new_empty_strided"} | _FILLED.keys()

# npu operators that are element-wise, norms or rotations, so that a walk may go through them.
_NPU_TRANSPARENT = frozenset(
    """
    npu::npu_rms_norm npu::npu_add_rms_norm npu::npu_interleave_rope npu::npu_rotary_mul npu::npu_dtype_cast
    npu::_npu_dtype_cast npu::npu_format_cast
    """.split()
)


# Layers by themselves, whose weights are packed, scaled or convolved with: no walk takes them for element-wise.
_LAYERS = frozenset(
    """
    aten::_scaled_mm aten::_grouped_mm aten::_scaled_grouped_mm aten::_weight_int8pack_mm aten::_weight_int4pack_mm
    aten::_weight_int4pack_mm_for_cpu aten::convolution aten::conv1d aten::conv2d
    """.split()
)


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """What is known of a call target. Made once for each: the pass asks for it a dozen times for every node.

    name      ``namespace::name`` without the overload; "" for nodes that call nothing
    mutates   does the schema say that it changes an argument?
    effect    must a call stay where it is even if nobody reads it?
    plain     may a walk go through it: pure, and runnable on probes?
    twin      of ``add_`` and the like, the operator that makes a new tensor instead
    """

    target: Any
    name: str = ""
    mutates: bool = False
    effect: bool = False
    random: bool = False
    plain: bool = False
    view: bool = False
    reshape: bool = False
    cast: bool = False
    writer: bool = False
    twin: Operator | None = None

    @classmethod
    def describe(cls, target: Any) -> Operator:
        name = _name_of(target)
        mutates = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        effect, random = mutates or name in _EFFECTS, "rand" in name
        pure = name.partition("::")[0] in ("aten", "prims", "_operator", "python") and not (effect or random)
        bits = getattr(target, "_overloadname", "") == "dtype"  # view.dtype reads memory as another type
        return cls(
            target,
            name,
            mutates,
            effect,
            random,
            plain=(pure and "attention" not in name and name not in _LAYERS) or name in _NPU_TRANSPARENT,
            view=name in _VIEWS and not bits,
            reshape=name in _RESHAPES and not bits,
            cast=name in _CASTS,
            writer=name in _WRITERS,
            twin=_functional_twin(target, name) if mutates else None,
        )


_NO_OPERATOR = Operator(None)
_OPERATORS: dict[int, Operator] = {}  # by id of the target, which its Operator keeps alive


def _functional_twin(target: Any, name: str) -> Operator | None:
    """``aten::add`` of ``aten::add_``: decompositions update values of their own making in place."""
    namespace, _, base = name.partition("::")
    arguments = target._schema.arguments
    changed = [arg.alias_info is not None and arg.alias_info.is_write for arg in arguments]
    if namespace != "aten" or not base.endswith("_") or changed != [True] + [False] * (len(arguments) - 1):
        return None
    twin = getattr(getattr(torch.ops.aten, base[:-1], None), target._overloadname, None)
    return Operator.describe(twin) if twin is not None else None


def operator_of(node: Node) -> Operator:
    """What the node calls; where nobody but the node sees what it changes in place, the operator's functional twin."""
    known = _OPERATORS.get(id(node.target))
    if known is None:
        if node.op != "call_function":
            return _NO_OPERATOR
        known = _OPERATORS.setdefault(id(node.target), Operator.describe(node.target))
    return known.twin if known.twin is not None and _owns_its_target(node) else known


def _owns_its_target(node: Node) -> bool:
    base = node.args[0]
    if not isinstance(base, Node) or base.op != "call_function" or len(base.users) > 1:
        return False
    made_by = operator_of(base)
    aliases = made_by.view or made_by.effect or base.target is operator.getitem
    return not aliases and (not made_by.cast or made_by.name in _COPYING_CASTS)


def op_name(node: Node) -> str:
    """``namespace::name`` of the operator without its overload; "" for anything that is not one."""
    return operator_of(node).name


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return f"python::{getattr(target, '__name__', target)}"


def filled_with(node: Node) -> float | None:
    """The number that every element of the node is, where its operator says so; NaN for memory not yet written."""
    name = operator_of(node).name
    if name in _FILLED_WITH:
        value = argument(node, "fill_value")
        return float(value) if isinstance(value, (int, float)) else None
    return _FILLED.get(name)


def borrows_only(node: Node) -> bool:
    """Does the node, contiguous, take no more than a shape, a dtype or a device from the tensor it is given?"""
    return op_name(node) in _LENT and bool(node.meta["val"].is_contiguous())


def is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


def is_view(node: Node) -> bool:
    """Does the node re-index one tensor, changing no element? (A getitem of a split counts.)"""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and operator_of(source).view
    return operator_of(node).view


def is_reshape(node: Node) -> bool:
    """Does the node keep elements, their order and their number?"""
    return operator_of(node).reshape


def is_cast(node: Node) -> bool:
    return operator_of(node).cast


_FAITHFUL = (
    frozenset((torch.bfloat16, torch.float32, torch.float64)),
    frozenset((torch.int32, torch.int64)),
)


def cast_ends(node: Node) -> frozenset[torch.dtype]:
    """The dtypes that a cast joins; empty for any other node."""
    if not is_cast(node) or not node.args or not isinstance(node.args[0], Node):
        return frozenset()
    values = (node.args[0].meta.get("val"), node.meta.get("val"))
    return frozenset(value.dtype for value in values if isinstance(value, torch.Tensor))


def is_faithful_cast(node: Node) -> bool:
    """A cast that keeps every bfloat16 number, or every index: no float8, float16 or small integer in between."""
    ends = cast_ends(node)
    return bool(ends) and any(ends <= kept for kept in _FAITHFUL)


def is_writer(node: Node) -> bool:
    return operator_of(node).writer


def has_effect(node: Node) -> bool:
    """Must the node stay where it is even if nobody reads it?"""
    return operator_of(node).effect


def is_mutating(node: Node) -> bool:
    """Does the operator's schema say that it changes an argument?"""
    return operator_of(node).mutates


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument by its schema name; where the graph omits it, the schema's own default.

    AOT drops arguments that equal the schema default, and the defaults differ from operator to
    operator (epsilon: 1e-6 in npu_rms_norm, 1e-5 in npu_mla_prolog), so they are never guessed.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        for position, arg in enumerate(target._schema.arguments):
            if arg.name == name:
                if name in node.kwargs:
                    return node.kwargs[name]
                if position < len(node.args) and not arg.kwarg_only:
                    return node.args[position]
                return arg.default_value if arg.has_default_value() else default
    return node.kwargs.get(name, default)
