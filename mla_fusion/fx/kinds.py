"""Says what a node calls, and what the operator does to its operands.

Schemas say it where they can. Lists of names say the rest.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from inspect import isfunction
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import Module

from mla_fusion.compat import HigherOrderOperator, OpOverload, has_kernel, overload_name, schema_of

# Casts among these do not count when a prologue is searched. With float16 among them, a float16
# model is recognised and then refused by name. float8 and integers are quantisation.
MODEL_FLOATS = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))

# These keep all elements and their order. A name with "_copy" behind it does, too.
_RESHAPES = frozenset(
    """
    _reshape _reshape_alias _unsafe_view alias clone contiguous detach flatten lift_fresh
    npu_format_cast reshape squeeze unflatten unsqueeze view view_as
    """.split()
)
# These re-index their first argument.
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
# These return their first argument with other elements at some places.
_WRITERS = frozenset(
    """
    _unsafe_index_put copy diagonal_scatter index_add index_copy index_fill index_put index_reduce
    masked_scatter npu_scatter_nd_update scatter scatter_add scatter_reduce scatter_update
    select_scatter slice_scatter
    """.split()
)
# These write caches, though their schemas do not say so.
_UNSEEN = frozenset(("npu_kv_rmsnorm_rope_cache", "npu_mla_prolog", "npu_mla_prolog_v2"))
# Results filled with one number, in the shape of the first argument.
_FILLED = {"zeros_like": 0.0, "new_zeros": 0.0, "ones_like": 1.0, "new_ones": 1.0}
_UNWRITTEN = ("empty_like", "new_empty", "new_empty_strided")
_BUILT_IN = ("aten", "prims", "npu", "_c10d_functional")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_TORCHS_OWN = ("", "prim", "_operator", "quantized", *_BUILT_IN, *_COLLECTIVES)


# -- what the tracer recorded for a node


def value_of(node: Node) -> Any:
    """Returns the example of a node's value: a fake tensor, a list of them, or a size. None if the
    tracer recorded none.
    """
    return node.meta.get("val")


def shape_of(node: Node) -> Any:
    """Returns the shape of a node that holds one tensor."""
    return node.meta["val"].shape


def dtype_of(node: Node) -> torch.dtype:
    """Returns the dtype of a node that holds one tensor."""
    return node.meta["val"].dtype


def is_float(dtype: torch.dtype) -> bool:
    """Returns True for a real or complex float dtype."""
    return dtype.is_floating_point or dtype.is_complex


def holds_integers(node: Node) -> bool:
    """Returns True if the node holds one tensor of integers or bools."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and not is_float(value.dtype)


# -- what a node calls


def called(node: Node) -> Any:
    """Returns what the node calls.

    AOT autograd wraps the call of an operator that writes its arguments. Then it is that operator.
    """
    target = node.target
    wraps = isinstance(target, HigherOrderOperator) and "functionalized" in target.name()
    return node.args[0] if wraps else target


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """What the schema and the tags of an operator say. All fields are empty for other targets.

    name          ``namespace::name`` without the overload
    word          the name alone
    rule          the name by which the reader knows it: without ``aten::``, and without the
                  underscore of an operator in place
    arguments     names of the arguments, with their defaults
    is_mutable    True if it changes an argument
    is_in_place   True if it changes its first argument and returns it (``__and__`` does not)
    is_view       True if its results are views of its first argument
    is_random     True if it may draw numbers
    is_pointwise  True if each element of the result depends on one element of each operand
    is_check      True if it has no result
    is_composite  True if torch makes it of other operators: it may copy, or return its operand,
                  whatever the schema says
    """

    target: Any
    name: str = ""
    word: str = ""
    rule: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    is_mutable: bool = False
    is_in_place: bool = False
    is_view: bool = False
    is_random: bool = False
    is_pointwise: bool = False
    is_check: bool = False
    is_composite: bool = False

    @classmethod
    def read(cls, target: OpOverload) -> Signature:
        """Returns the signature of an operator."""
        schema = schema_of(target)
        name, is_mutable = str(schema.name), bool(schema.is_mutable)
        is_in_place = is_mutable and name.endswith("_")
        return cls(
            target,
            name,
            name.rpartition("::")[2],
            name.removeprefix("aten::").removesuffix("_" if is_in_place else ""),
            tuple((argument.name, argument.default_value) for argument in schema.arguments),
            is_mutable,
            is_in_place,
            bool(target.is_view),
            torch.Tag.nondeterministic_seeded in target.tags,
            torch.Tag.pointwise in target.tags,
            not schema.returns,
            has_kernel(target.name(), "CompositeImplicitAutograd"),
        )


_NONE = Signature(None)
_SIGNATURES: dict[int, Signature] = {}  # by the id of the target, which its signature keeps alive


def signature(target: Any) -> Signature:
    """Returns the signature of a target.

    It is read once for each operator, and found by id: the hash of an operator is slow.
    """
    known = _SIGNATURES.get(id(target))
    if known is None and isinstance(target, OpOverload):
        known = _SIGNATURES.setdefault(id(target), Signature.read(target))
    return known or _NONE


def op_name(node: Node) -> str:
    """Returns ``namespace::name`` of the operator, without its overload. "" for other targets."""
    return signature(called(node)).name


def word(node: Node) -> str:
    """Returns the operator's name without namespace and overload. "" for other targets."""
    return signature(node.target).word


def is_torchs_own(target: Any) -> bool:
    """Returns True for an operator of torch or torch_npu, and for what is no operator."""
    return (target.namespace if isinstance(target, OpOverload) else "") in _TORCHS_OWN


def is_getitem(node: Node) -> bool:
    """Returns True if the node takes an item of a list."""
    return node.target is operator.getitem


def argument(node: Node, name: str, default: Any = None) -> Any:
    """Returns an argument by its name in the schema. If the graph omits it: the schema's default.

    AOT autograd drops arguments that equal the default. Defaults differ by operator (epsilon: 1e-6
    in npu_rms_norm, 1e-5 in npu_mla_prolog), so none is assumed.
    """
    if name in node.kwargs:
        return node.kwargs[name]
    for position, (other_name, schema_default) in enumerate(signature(node.target).arguments):
        if other_name == name:
            return node.args[position] if position < len(node.args) else schema_default
    return default


# -- what the operator does


def is_view(node: Node) -> bool:
    """Returns True if the node re-indexes one tensor. An item of a split counts."""
    if is_getitem(node):
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return _is_one_of(node, _VIEWS)


def is_reshape(node: Node) -> bool:
    """Returns True if the node keeps all elements and their order."""
    return _is_one_of(node, _RESHAPES)


def _is_one_of(node: Node, names: frozenset[str]) -> bool:
    """Returns True if the node calls an operator of this name, or its copying form."""
    name = word(node).removesuffix("_copy")
    return name in names and overload_name(node.target) != "dtype"  # it counts other elements


def is_cast(node: Node) -> bool:
    """Returns True if the node changes the dtype."""
    return word(node) in _CASTS


def is_model_cast(node: Node) -> bool:
    """Returns True for a cast from one float dtype of models to another."""
    if not is_cast(node):
        return False
    values = map(value_of, (*node.all_input_nodes[:1], node))
    return {value.dtype for value in values if isinstance(value, torch.Tensor)} <= MODEL_FLOATS


def is_writer(node: Node) -> bool:
    """Returns True if the node returns a tensor with other elements at some places."""
    return word(node) in _WRITERS


def is_mutating(node: Node) -> bool:
    """Returns True if the schema says that the operator changes an argument."""
    return signature(node.target).is_mutable


def writes(node: Node) -> bool:
    """Returns True if the node writes into a tensor, or returns one with other elements at some
    places.
    """
    return is_writer(node) or is_mutating(node) or word(node) in _UNSEEN


def is_random(node: Node) -> bool:
    """Returns True if the node draws numbers. A dropout that drops nothing does not."""
    if not signature(node.target).is_random:
        return False
    is_dropout = word(node).endswith("dropout")
    is_off = argument(node, "train", True) is False or argument(node, "p", 0.5) == 0
    return not (is_dropout and is_off) and argument(node, "dropout_p", None) != 0


def filled_with(node: Node) -> float | None:
    """Returns the number that a node is filled with, if it reads no more than a shape.

    NaN stands for memory that is not written. None for other nodes.
    """
    name = word(node)
    return float("nan") if name in _UNWRITTEN else _FILLED.get(name)


def attribute(node: Node) -> Any:
    """Returns the attribute that a get_attr node reads; None if the module has no such one."""
    try:
        return attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        return None


def is_literal(node: Node) -> bool:
    """Returns True if a get_attr node reads a literal of the trace.

    A buffer, or a tensor that the model captures, may be written between calls.
    """
    return all(word(user) in ("lift_fresh_copy", "lift_fresh") for user in node.users)


# -- how the operator reads memory


def needs_strides(node: Node) -> bool:
    """Returns True if a copy with other strides cannot replace an operand of the node.

    The node reads memory by strides of its own, or writes memory whose strides matter to it.
    """
    return word(node).startswith("as_strided") or (is_mutating(node) and heeds_strides(node))


def heeds_strides(node: Node) -> bool:
    """Returns True if the result may depend on the strides of operands.

    It may for random operators, which draw numbers in the order of memory; for custom operators
    without the tag ``flexible_layout``; and for operators that run other graphs, which were traced
    with strides.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return isinstance(target, HigherOrderOperator)
    if is_random(node):
        return True
    return target.namespace not in _BUILT_IN and torch.Tag.flexible_layout not in target.tags


def check_graph_module(gm: object) -> None:
    """Raises TypeError if it is no GraphModule."""
    if not isinstance(gm, GraphModule):
        hint = (
            "; of a program: program.run_decompositions({}).module()"
            if hasattr(gm, "module")
            else ""
        )
        if isinstance(gm, Module):
            hint = "; a module is compiled: torch.compile(model, backend='mla_fusion')"
        raise TypeError(f"expected a torch.fx.GraphModule, got {type(gm).__name__}{hint}")


def count_operators(gm: GraphModule) -> dict[str, int]:
    """Returns how often each operator is called, the most frequent first."""
    counts = Counter(node.target for node in gm.graph.nodes if node.op == "call_function")
    return {  # str of a Python function has its address
        target.__name__ if isfunction(target) else str(target): count
        for target, count in counts.most_common()
    }
