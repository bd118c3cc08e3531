"""What a node calls, and what that does to what it is given: by its schema, and by lists of names
where no schema says it.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from inspect import isfunction
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import HigherOrderOperator, OpOverload, overload_name, schema_of

# Casts among these are looked through when a group of nodes is asked what it means. float16 is
# among them so that a float16 model is recognised, and then refused by name; float8 and integers
# are quantisation.
MODEL_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MODEL_FLOATS = frozenset(MODEL_FLOATS)

# They keep every element, their order and their number. A name with "_copy" behind it does, too.
_RESHAPES = frozenset(
    """
    _reshape _reshape_alias _unsafe_view alias clone contiguous detach flatten lift_fresh
    npu_format_cast reshape squeeze unflatten unsqueeze view view_as
    """.split()
)
# They re-index their first argument.
_VIEWS = _RESHAPES | frozenset(
    """
    chunk expand expand_as mT matrix_H movedim narrow npu_format_cast_ numpy_T permute select slice
    split split_with_sizes swapaxes swapdims t tensor_split transpose unbind unsafe_chunk
    unsafe_split
    """.split()
)
_CASTS = frozenset(
    "_npu_dtype_cast _to_copy convert_element_type npu_dtype_cast to type_as".split()
)
# They give their first argument with other elements at some places.
_WRITERS = frozenset(
    """
    _unsafe_index_put copy diagonal_scatter index_add index_copy index_fill index_put index_reduce
    masked_scatter npu_scatter_nd_update scatter scatter_add scatter_reduce select_scatter
    slice_scatter
    """.split()
)
# They write caches, though their schemas do not say so.
_UNSEEN = frozenset(("npu_kv_rmsnorm_rope_cache", "npu_mla_prolog", "npu_mla_prolog_v2"))
# Of one number, and of the shape of their first argument.
_FILLED = {"zeros_like": 0.0, "new_zeros": 0.0, "ones_like": 1.0, "new_ones": 1.0}
_UNWRITTEN = ("empty_like", "new_empty", "new_empty_strided")
_BUILT_IN = ("aten", "prims", "npu", "_c10d_functional")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_TORCHS_OWN = ("", "prim", "_operator", "quantized", *_BUILT_IN, *_COLLECTIVES)


# -- what the tracer noted of a node


def value_of(node: Node) -> Any:
    """What stands for its value: a fake tensor, several, or a size; None where nothing does."""
    return node.meta.get("val")


def shape_of(node: Node) -> Any:
    """Of a node that holds one tensor."""
    return node.meta["val"].shape


def dtype_of(node: Node) -> torch.dtype:
    """Of a node that holds one tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def is_float(dtype: torch.dtype) -> bool:
    """Real or complex."""
    return dtype.is_floating_point or dtype.is_complex


def holds_integers(node: Node) -> bool:
    """One tensor, of integers or bools."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and not is_float(value.dtype)


# -- what it calls


def called(node: Node) -> Any:
    """What the node calls: of a call in which AOT autograd wraps an operator that writes its
    arguments, that operator.
    """
    target = node.target
    wraps = isinstance(target, HigherOrderOperator) and "functionalized" in target.name()
    return node.args[0] if wraps else target


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """What the schema of a call's target says, and torch's tags; of what is no operator: nothing.

    name          ``namespace::name`` without the overload
    word          the name alone
    arguments     their names, with their defaults
    is_mutable    does it change an argument?
    is_in_place   does it change its first argument, and return it? (``__and__`` does not.)
    is_view       are its results views of its first argument?
    may_alias     may a result be an argument's memory?
    is_random     may it draw numbers?
    is_pointwise  is each element of the result a function of one element of each operand?
    is_check      has it no result?
    """

    target: Any
    name: str = ""
    word: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    is_mutable: bool = False
    is_in_place: bool = False
    is_view: bool = False
    may_alias: bool = False
    is_random: bool = False
    is_pointwise: bool = False
    is_check: bool = False

    @classmethod
    def read(cls, target: OpOverload) -> Signature:
        schema = schema_of(target)
        name, is_mutable = str(schema.name), bool(schema.is_mutable)
        return cls(
            target,
            name,
            name.rpartition("::")[2],
            tuple(
                (one.name, one.default_value if one.has_default_value() else None)
                for one in schema.arguments
            ),
            is_mutable,
            is_mutable and name.endswith("_"),
            bool(target.is_view),
            any(result.alias_info is not None for result in schema.returns),
            torch.Tag.nondeterministic_seeded in target.tags,
            torch.Tag.pointwise in target.tags,
            not schema.returns,
        )


_NONE = Signature(None)
_SIGNATURES: dict[int, Signature] = {}  # by the id of the target, which its signature keeps alive


def signature(target: Any) -> Signature:
    """Read once for each operator: it is asked for many times a node, and to hash an operator is a
    call of Python's.
    """
    known = _SIGNATURES.get(id(target))
    if known is None and isinstance(target, OpOverload):
        known = _SIGNATURES.setdefault(id(target), Signature.read(target))
    return known or _NONE


def op_name(node: Node) -> str:
    """``namespace::name`` of the operator without its overload; "" for anything that is not one."""
    return signature(called(node)).name


def word(node: Node) -> str:
    """The name of the operator that it calls, without namespace and overload; "" for others."""
    return signature(node.target).word


def is_torchs_own(target: Any) -> bool:
    """Is it an operator of torch's or torch_npu's, or none?"""
    return (target.namespace if isinstance(target, OpOverload) else "") in _TORCHS_OWN


def is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument by its schema name; where the graph omits it, the schema's own default.

    AOT drops arguments that equal the schema default, and the defaults differ from operator to
    operator (epsilon: 1e-6 in npu_rms_norm, 1e-5 in npu_mla_prolog), so they are never guessed.
    """
    target = node.target
    if isinstance(target, OpOverload):
        for position, arg in enumerate(schema_of(target).arguments):
            if arg.name == name:
                if name in node.kwargs:
                    return node.kwargs[name]
                if position < len(node.args) and not arg.kwarg_only:
                    return node.args[position]
                return arg.default_value if arg.has_default_value() else default
    return node.kwargs.get(name, default)


# -- what that does


def is_view(node: Node) -> bool:
    """Does the node re-index one tensor, changing no element? (A getitem of a split counts.)"""
    if is_getitem(node):
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return _is_one_of(node, _VIEWS)


def is_reshape(node: Node) -> bool:
    """Does the node keep elements, their order and their number?"""
    return _is_one_of(node, _RESHAPES)


def _is_one_of(node: Node, names: frozenset[str]) -> bool:
    name = word(node).removesuffix("_copy")
    return name in names and overload_name(node.target) != "dtype"  # it counts other elements


def is_cast(node: Node) -> bool:
    return word(node) in _CASTS


def is_model_cast(node: Node) -> bool:
    """A cast from one of a model's floats to another."""
    if not is_cast(node):
        return False
    values = (value_of(one) for one in (*node.all_input_nodes[:1], node))
    return {value.dtype for value in values if isinstance(value, torch.Tensor)} <= _MODEL_FLOATS


def is_writer(node: Node) -> bool:
    """Does it give a tensor with other elements at some places?"""
    return word(node) in _WRITERS


def is_mutating(node: Node) -> bool:
    """Does the operator's schema say that it changes an argument?"""
    return signature(node.target).is_mutable


def has_effect(node: Node) -> bool:
    """Must the node stay where it is even if nobody reads it?"""
    return is_mutating(node) or word(node) in _UNSEEN


def is_random(node: Node) -> bool:
    """Does it draw numbers? Not a dropout that drops nothing."""
    if not signature(node.target).is_random:
        return False
    is_dropout = word(node).endswith("dropout")
    is_off = argument(node, "train", True) is False or argument(node, "p", 0.5) == 0
    return not (is_dropout and is_off) and argument(node, "dropout_p", None) != 0


def filled_with(node: Node) -> float | None:
    """The number that every element of the node is, which takes no more than a shape; NaN for
    memory not yet written.
    """
    name = word(node)
    if name in ("full_like", "new_full"):
        value, kept = argument(node, "fill_value"), value_of(node)
        if not isinstance(value, (int, float)) or not isinstance(kept, torch.Tensor):
            return None
        return torch.tensor(float(value), dtype=torch.float64).to(kept.dtype).double().item()
    return float("nan") if name in _UNWRITTEN else _FILLED.get(name)


def attribute(node: Node) -> Any:
    """What a get_attr node reads of its module; None for another node, or where the module has
    nothing of that name.
    """
    if node.op != "get_attr":
        return None
    try:
        return attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        return None


def is_literal(node: Node) -> bool:
    """Does a get_attr node read a literal of the trace? A buffer, or a tensor that the model
    captures, may be written between calls.
    """
    return all(word(user) in ("lift_fresh_copy", "lift_fresh") for user in node.users)


# -- how it reads memory


def needs_strides(node: Node) -> bool:
    """Does the node read memory by strides of its own, or write memory whose strides it heeds? A
    copy of other strides cannot stand in for that memory.
    """
    return word(node).startswith("as_strided") or (is_mutating(node) and heeds_strides(node))


def has_reader_by_strides(graph: Graph) -> bool:
    one_of_each = {node.target: node for node in graph.nodes}
    return any(map(needs_strides, one_of_each.values()))


def heeds_strides(node: Node) -> bool:
    """May the result depend on how operands lie in memory? So it is of random operators, whose
    numbers come in the order of the memory, of custom ones, but for those that say otherwise, and
    of operators that run other graphs: these were traced with strides.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return isinstance(target, HigherOrderOperator)
    if is_random(node):
        return True
    return target.namespace not in _BUILT_IN and torch.Tag.flexible_layout not in target.tags


def count_operators(gm: GraphModule) -> dict[str, int]:
    """How often each operator is called, the commonest first."""
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    # their hashes and names cost more than the counting
    by_identity = {id(target): target for target in targets}
    counts = Counter[str]()
    for identity, count in Counter(map(id, targets)).items():
        target = by_identity[identity]
        # str of a Python function has its address
        counts[target.__name__ if isfunction(target) else str(target)] += count
    return dict(counts.most_common())
