"""What each operator does to values: the one table that the pass asks.

Every operator is in exactly one class (:class:`Kind`). A fact about a group of nodes is read off
random float64 probes; that proves the fact for all inputs where the group is made of movement and
analytic steps alone: two analytic functions on a connected domain that agree at a random point
agree everywhere, with probability 1. A choice step picks by the values it reads, so what probes
show says nothing of other values, and the group ends there.

What torch can say is taken from torch: randomness from its tag ``nondeterministic_seeded``, writes
and views from the alias annotations of the schema. The rest is listed. An operator that is in no
list is OPAQUE until somebody adds it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import OpOverload, OpOverloadPacket, overload_name, packet_name, schema_of


class Kind(Enum):
    """The classes; each value is the phrase that messages use."""

    # each element of the result is one element of an input, or a literal
    MOVEMENT = "moves elements"
    # wherever it is defined; see analytic.py for where that is
    ANALYTIC = "computes an analytic function"
    # clamp, where, max, round, comparisons, casts to integers
    CHOICE = "picks by the values it reads"
    GATHER = "moves elements by the values of an index"
    WRITER = "writes into its first argument"
    RANDOM = "is random"
    EFFECT = "has an effect beside its result"
    OPAQUE = "is not known"


def _names(text: str, namespace: str = "aten") -> frozenset[str]:
    """``namespace::name`` of each word that names no namespace of its own."""
    return frozenset(word if "::" in word else f"{namespace}::{word}" for word in text.split())


# -- movement

# Each re-indexes its first argument and changes no element; a walk may pass through.
VIEWS = _names(
    """
    view _unsafe_view reshape permute transpose t unsqueeze squeeze expand slice select clone
    contiguous alias detach flatten unflatten narrow movedim swapaxes swapdims numpy_T mT matrix_H
    view_as expand_as lift_fresh lift_fresh_copy _reshape_alias unsafe_split split split_with_sizes
    chunk unbind tensor_split unsafe_chunk _reshape_copy view_copy permute_copy transpose_copy
    t_copy unsqueeze_copy squeeze_copy expand_copy slice_copy select_copy alias_copy split_copy
    split_with_sizes_copy unbind_copy detach_copy npu::npu_format_cast npu::npu_format_cast_
    """
)

# Views that keep every element and their order, so that a producer may stand in for them.
RESHAPES = _names(
    """
    view _unsafe_view reshape unsqueeze squeeze clone contiguous alias detach flatten unflatten
    lift_fresh lift_fresh_copy _reshape_alias view_as _reshape_copy view_copy unsqueeze_copy
    squeeze_copy alias_copy detach_copy npu::npu_format_cast
    """
)

# Views and expands that name the sizes of their result.
SIZED = _names("view _unsafe_view reshape _reshape_alias view_copy expand expand_copy")

# Views that take some of the elements along one axis: which, their arguments say.
SELECTIONS = _names(
    """
    slice slice_copy select select_copy narrow split split_with_sizes split_copy
    split_with_sizes_copy unsafe_split chunk unsafe_chunk tensor_split unbind unbind_copy
    """
)

DIAGONALS = _names("diagonal diagonal_copy")

# what stands side by side is not mixed
JOINERS = _names("cat stack concat concatenate hstack vstack")

_OTHER_MOVEMENT = (
    _names(
        """
        cat stack concat concatenate hstack vstack column_stack dstack flip fliplr flipud roll rot90
        repeat repeat_interleave tile pad constant_pad_nd tril triu
        diag_embed block_diag view_as_real view_as_complex view_as_real_copy view_as_complex_copy
        real imag complex conj _conj _conj_physical conj_physical resolve_conj resolve_neg _neg_view
        atleast_1d atleast_2d atleast_3d ravel broadcast_to unfold pixel_shuffle pixel_unshuffle
        channel_shuffle meshgrid zeros ones full empty eye arange linspace scalar_tensor tensor
        zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
        new_empty_strided fill zero broadcast_tensors prims::iota prims::broadcast_in_dim
        prims::transpose prims::squeeze _operator::getitem python::getitem
        """
    )
    | VIEWS
    | DIAGONALS
)

CASTS = _names(
    """
    _to_copy to type_as prims::convert_element_type npu::npu_dtype_cast npu::_npu_dtype_cast
    """
)

# Tensors of a given shape whose elements do not depend on the argument that lends it.
FILLED = {
    "aten::new_zeros": 0.0,
    "aten::zeros_like": 0.0,
    "aten::new_ones": 1.0,
    "aten::ones_like": 1.0,
    # a value computed from memory that nothing was written to carries no fact
    "aten::new_empty": float("nan"),
    "aten::empty_like": float("nan"),
}
FILLED_WITH = _names("new_full full_like")
LENT = FILLED_WITH | {"aten::new_empty_strided"} | FILLED.keys()

# -- analytic

# Element-wise; a broadcast axis of every operand is one of the result.
_ANALYTIC_ELEMENTWISE = _names(
    """
    add sub rsub subtract mul multiply div divide true_divide neg negative reciprocal pow square
    sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh sigmoid silu gelu mish
    erf erfc addcmul addcdiv lerp atan asinh logit sinc deg2rad rad2deg logaddexp logaddexp2
    float_power polar python::add python::sub python::mul python::truediv python::neg python::pow
    _operator::add _operator::sub _operator::mul _operator::truediv
    """
)

# Along axes that they name (``dim``; all of them where they name none): sums and what is made of
# them.
REDUCTIONS = _names(
    """
    sum mean var std var_mean std_mean linalg_vector_norm norm softmax _softmax log_softmax
    _log_softmax logsumexp cumsum prod
    """
)
_ANALYTIC_NORMS = _names(  # of the last axes
    "layer_norm native_layer_norm rms_norm _fused_rms_norm npu::npu_rms_norm npu::npu_add_rms_norm"
)

_ANALYTIC_PRODUCTS = _names(
    """
    mm bmm addmm baddbmm linear matmul einsum dot mv outer inner tensordot addmv addbmm kron vdot
    _int_mm npu::npu_transpose_batchmatmul npu::npu_linear
    """
)

_ROTATIONS = _names("npu_interleave_rope npu_rotary_mul", "npu")

ELEMENTWISE_SCALING = _names("mul div neg")  # multiply elements one by one

# -- choice, gather

_CHOICE = _names(
    """
    clamp clamp_min clamp_max clip relu relu6 hardtanh threshold where max min amax amin aminmax
    maximum minimum fmax fmin abs absolute sign sgn signbit round floor ceil trunc fix frac fmod
    remainder floor_divide eq ne lt le gt ge equal greater greater_equal less less_equal not_equal
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf
    isfinite isposinf isneginf nan_to_num sort topk argsort argmax argmin cummax cummin masked_fill
    masked_select nonzero unique_consecutive _unique2 bucketize searchsorted heaviside copysign
    hardshrink softshrink hardsigmoid hardswish leaky_relu elu celu selu prelu softplus hypot angle
    median nanmedian mode kthvalue quantile nanquantile nansum nanmean nextafter isclose any all
    count_nonzero cdist dist renorm max_pool1d max_pool2d max_pool3d frexp ldexp
    fake_quantize_per_tensor_affine log_sigmoid log_sigmoid_forward gcd lcm cumprod digamma lgamma
    asin acos atan2 acosh atanh xlogy special_xlog1py quantize_per_tensor quantize_per_channel
    dequantize isreal isin python::lt python::le python::gt python::ge python::eq python::ne
    python::mod python::floordiv npu::npu_dynamic_quant npu::npu_dynamic_mx_quant npu::npu_quantize
    """
)

_GATHER = _names(
    """
    index _unsafe_index gather embedding index_select take take_along_dim _embedding_bag
    embedding_bag
    """
)

# Overloads of movement that are told their places by a tensor.
_PLACED_BY_TENSOR = frozenset(
    """
    aten::narrow.Tensor aten::repeat_interleave.self_Tensor aten::repeat_interleave.Tensor
    aten::tensor_split.tensor_indices_or_sections
    """.split()
)

# -- writers, effects, and what is never looked into

WRITERS = _names(
    """
    index_put _unsafe_index_put index_copy scatter slice_scatter select_scatter copy masked_scatter
    index_fill scatter_add index_add diagonal_scatter index_reduce scatter_reduce
    npu::npu_scatter_nd_update
    """
)

_EFFECTS = _names("copy_ npu::npu_kv_rmsnorm_rope_cache npu::npu_mla_prolog npu::npu_mla_prolog_v2")

# Writers that are movement where their index is a literal of the call.
PLACED_WRITERS = _names("slice_scatter select_scatter copy diagonal_scatter")

# npu operators that a walk or a probe may go through.
_NPU_TRANSPARENT = _names(
    """
    npu_rms_norm npu_add_rms_norm npu_interleave_rope npu_rotary_mul npu_dtype_cast _npu_dtype_cast
    npu_format_cast
    """,
    "npu",
)

# Layers by themselves, whose weights are packed, scaled or convolved with: no walk takes them for
# element-wise.
_LAYERS = _names(
    """
    _scaled_mm _grouped_mm _scaled_grouped_mm _weight_int8pack_mm _weight_int4pack_mm
    _weight_int4pack_mm_for_cpu convolution conv1d conv2d
    """
)

# Element by element; operands are broadcast from their last axes.
ELEMENTWISE = (
    _ANALYTIC_ELEMENTWISE
    | _ROTATIONS
    | CASTS
    | _names(
        """
        clamp clamp_min clamp_max clip where masked_fill maximum minimum abs relu round conj _conj
        conj_physical _conj_physical resolve_conj resolve_neg real imag complex fill
        """
    )
)

ANALYTIC = _ANALYTIC_ELEMENTWISE | REDUCTIONS | _ANALYTIC_NORMS | _ANALYTIC_PRODUCTS | _ROTATIONS
MOVEMENT = _OTHER_MOVEMENT
CHOICE = _CHOICE
GATHER = _GATHER

_LISTED = {
    **dict.fromkeys(_GATHER, Kind.GATHER),
    **dict.fromkeys(_CHOICE, Kind.CHOICE),
    **dict.fromkeys(ANALYTIC, Kind.ANALYTIC),
    **dict.fromkeys(_OTHER_MOVEMENT | CASTS | _NPU_TRANSPARENT - ANALYTIC, Kind.MOVEMENT),
    **dict.fromkeys(WRITERS, Kind.WRITER),
}


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """What is known of a call target. Made once for each: the pass asks for it a dozen times for
    every node.

    name        ``namespace::name`` without the overload; "" for nodes that call nothing
    kind        its class, as far as the target alone tells; ``kinds.kind_of`` looks at the
                arguments too
    mutates     does the schema say that it changes an argument?
    effect      must a call stay where it is even if nobody reads it?
    runs        pure, and runnable on probes?
    aliases     may a result be memory of an argument?
    functional  of ``add_`` and the like, the operator that makes a new tensor instead
    """

    target: Any
    name: str = ""
    kind: Kind = Kind.OPAQUE
    mutates: bool = False
    effect: bool = False
    runs: bool = False
    view: bool = False
    reshape: bool = False
    cast: bool = False
    writer: bool = False
    aliases: bool = False
    functional: Operator | None = None

    @property
    def random(self) -> bool:
        return self.kind is Kind.RANDOM

    @classmethod
    def describe(cls, target: Any) -> Operator:
        name = _name_of(target)
        mutates = isinstance(target, OpOverload) and schema_of(target).is_mutable
        effect = mutates or name in _EFFECTS
        kind = _kind(target, name, effect)
        pure = name.partition("::")[0] in ("aten", "prims", "_operator", "python") and not effect
        bits = overload_name(target) == "dtype"  # view.dtype reads memory as another type
        return cls(
            target,
            name,
            kind,
            mutates,
            effect,
            runs=(pure and kind is not Kind.RANDOM and name not in _LAYERS)
            or name in _NPU_TRANSPARENT,
            view=name in VIEWS and not bits and kind is not Kind.GATHER,
            reshape=name in RESHAPES and not bits,
            cast=name in CASTS,
            writer=name in WRITERS,
            aliases=may_alias(target) or name in VIEWS,
            functional=_functional(target, name) if mutates else None,
        )


NO_OPERATOR = Operator(None)
KNOWN: dict[int, Operator] = {}  # by id of the target, which its Operator keeps alive


def known(target: Any) -> Operator:
    """The table's entry for a call target."""
    found = KNOWN.get(id(target))
    return found if found is not None else KNOWN.setdefault(id(target), Operator.describe(target))


def _kind(target: Any, name: str, effect: bool) -> Kind:
    """Torch's own tag first, then the lists, then what the schema says of aliases."""
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        return Kind.RANDOM
    if effect:
        return Kind.EFFECT
    if overload_name(target) == "dtype" and name in VIEWS:
        return Kind.CHOICE  # a float's bits as integers are no analytic function of it
    if f"{name}.{overload_name(target)}" in _PLACED_BY_TENSOR:
        return Kind.GATHER
    if name in _LISTED:
        return _LISTED[name]
    if name.startswith("aten::") and _is_alias(target):
        return Kind.MOVEMENT
    return Kind.OPAQUE


def _is_alias(target: Any) -> bool:
    """Does the schema say that every result is a view of the first argument?"""
    if not isinstance(target, OpOverload) or "as_strided" in schema_of(target).name:
        return False  # as_strided reads memory, whose layout a probe need not have
    arguments, results = schema_of(target).arguments, schema_of(target).returns
    return bool(arguments and results) and all(
        side.alias_info is not None and not side.alias_info.is_write
        for side in (arguments[0], *results)
    )


def may_alias(target: Any) -> bool:
    """Does the schema say of any result that it may be an argument's memory?"""
    if not isinstance(target, OpOverload):
        return False
    return any(result.alias_info is not None for result in schema_of(target).returns)


def _functional(target: Any, name: str) -> Operator | None:
    """``aten::add`` of ``aten::add_``: decompositions update values of their own making in
    place.
    """
    namespace, _, base = name.partition("::")
    arguments = schema_of(target).arguments
    changed = [arg.alias_info is not None and arg.alias_info.is_write for arg in arguments]
    if (
        namespace != "aten"
        or not base.endswith("_")
        or changed != [True] + [False] * (len(arguments) - 1)
    ):
        return None
    functional = getattr(getattr(torch.ops.aten, base[:-1], None), overload_name(target), None)
    return Operator.describe(functional) if functional is not None else None


def _name_of(target: Any) -> str:
    if isinstance(target, OpOverload):
        return schema_of(target).name
    if isinstance(target, OpOverloadPacket):
        return packet_name(target)
    return f"python::{getattr(target, '__name__', target)}"


# -- operators whose class depends on their arguments

Argument = Callable[[Node, str, Any], Any]


def _division(node: Node, argument: Argument) -> Kind:
    return Kind.ANALYTIC if argument(node, "rounding_mode", None) is None else Kind.CHOICE


def _vector_norm(node: Node, argument: Argument) -> Kind:
    """The Euclidean one alone is analytic away from zero."""
    order = argument(node, "ord", argument(node, "p", 2))
    return Kind.ANALYTIC if order in (2, 2.0, None) else Kind.CHOICE


def _clamped_logit(node: Node, argument: Argument) -> Kind:
    """With an epsilon it clamps first."""
    return Kind.ANALYTIC if argument(node, "eps", None) is None else Kind.CHOICE


_BY_ARGUMENTS: dict[str, Callable[[Node, Argument], Kind]] = {
    "aten::div": _division,
    "aten::divide": _division,
    "aten::linalg_vector_norm": _vector_norm,
    "aten::norm": _vector_norm,
    "aten::logit": _clamped_logit,
}


def kind_by_arguments(node: Node, entry: Operator, argument: Argument) -> Kind:
    """The class of a call, where its arguments decide it; else the operator's."""
    by_arguments = _BY_ARGUMENTS.get(entry.name)
    if by_arguments is not None:
        return by_arguments(node, argument)
    return _quiet(node, entry, argument) if entry.kind is Kind.RANDOM else entry.kind


# without a probability, or not in training
_PASSED_ON = _names("dropout alpha_dropout feature_dropout")


def _quiet(node: Node, entry: Operator, argument: Argument) -> Kind:
    """A call that may draw numbers, and by its arguments draws none."""
    if entry.name in _PASSED_ON and (
        argument(node, "train", True) is False or argument(node, "p", 0.5) == 0
    ):
        return Kind.MOVEMENT
    return Kind.OPAQUE if argument(node, "dropout_p", None) == 0 else Kind.RANDOM  # attention, say


def is_getitem(node: Node) -> bool:
    return node.target is operator.getitem
