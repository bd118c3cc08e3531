"""Every matrix product, however it is spelled, as one einsum: operands, labels, no operator names.

mm(a, b)                 ik,kj->ij
bmm(a, b)                bik,bkj->bij
linear(x, w)             ..k,jk->..j
npu_transpose_batchmatmul(x, w, perm_x1=[1,0,2], perm_y=[1,0,2])     tnd,ndc->tnc
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import argument
from mla_fusion.fx.sizes import same, same_shape
from mla_fusion.fx.walk import codes_of, expands, origin, peel, reshapes, row_reshapes
from mla_fusion.meta import number_formats
from mla_fusion.meta.number_formats import INT8, NumberFormat
from mla_fusion.operators.forms import join_of
from mla_fusion.operators.known import dtype_of, rule_of, rules, shape_of, value_of

Labels = tuple[int, ...]


@dataclass(frozen=True)
class Scales:
    """What a quantised product is multiplied by: ``weight`` per column, ``token`` per row (None:
    static quantisation).

    Rows are multiplied by ``factor * token``, with ``inverse`` by ``factor / token``. Of a format
    in blocks both hold the codes of a power of two for each block, ``[k/64, n, 2]`` and ``[..,
    k/64, 2]``.

    format  of both operands; None: one that no prologue has
    """

    weight: Node
    token: Node | None
    offset: Node | None = None
    factor: float = 1.0
    inverse: bool = False
    format: NumberFormat | None = INT8


@dataclass(frozen=True)
class Contraction:
    """``node = einsum(left, right)``; a label is an int, equal labels are one axis.

    pieces  products of one activation whose columns ``node`` puts side by side; left and right are
            the first one's
    inside  nodes from the bare product of integers until ``node``, where that is written in steps
    """

    node: Node
    left: Node
    right: Node
    left_labels: Labels
    right_labels: Labels
    out_labels: Labels
    bias: Node | None = None
    # (alpha on the product, beta on the bias)
    factors: tuple[float, float] = field(default=(1.0, 1.0))
    scales: Scales | None = None
    pieces: tuple[Contraction, ...] = ()
    inside: tuple[Node, ...] = ()


def read(node: Node) -> Contraction | None:
    """The node as a contraction of two tensors, or None where it is not one."""
    reader = rule_of(node, "einsum", RULES)
    made = reader(node) if reader else None
    return _unrepeated(made) if made is not None and len(made.right_labels) > 2 else made


def _unrepeated(made: Contraction) -> Contraction:
    """Without the axes of tokens along which the right operand is one matrix repeated. So torch
    multiplies an x that is not contiguous by the weight of a linear layer.

    Heads are no such axes: whoever splits heads off has rows longer than those that are summed.
    """
    repeated = origin(made.right, _same_axes)
    matrix = expands(repeated)
    if matrix is None:  # most are such
        return made
    rows = shape_of(peel(made.left))
    if not rows or not same(rows[-1], shape_of(made.left)[-1]):
        return made
    wide, narrow = shape_of(repeated), shape_of(matrix)
    new = len(wide) - len(narrow)
    along = [
        label
        for axis, label in enumerate(made.right_labels)
        if axis < new or not same(narrow[axis - new], wide[axis])
    ]
    if not {*along} <= {*made.left_labels} & {*made.out_labels}:
        return made  # nothing else has that axis
    fresh = count(_ONES)
    kept = [next(fresh) if label in along else label for label in made.right_labels[new:]]
    return replace(made, right=matrix, right_labels=tuple(kept))


def _same_axes(node: Node) -> Node | None:
    """Reshapes to the very shape that was."""
    above = reshapes(node)
    return above if above is not None and same_shape(shape_of(above), shape_of(node)) else None


def join(node: Node, known: Mapping[Node, Contraction]) -> Contraction | None:
    """``cat([x W0, x W1, ..], -1)`` as one product with more columns (a weight in chunks), or None.

    Whether the products read one x is for the caller to say.
    """
    joined = join_of(node)
    if joined is None:
        return None
    (axis, values), rank = joined, _rank(node)
    if not 0 < axis == rank - 1 or len(values) < 2:
        return None
    pieces = []
    for value in values:
        piece = known.get(origin(value, row_reshapes)) if isinstance(value, Node) else None
        if piece is None or piece.pieces or len(piece.right_labels) != 2:
            return None
        if piece.out_labels[-1] not in piece.right_labels:
            return None
        pieces.append(piece)
    tokens = tuple(range(_TOKENS, _TOKENS + rank - 1))
    return replace(
        pieces[0], node=node, out_labels=(*tokens, pieces[0].out_labels[-1]), pieces=tuple(pieces)
    )


_ONES = 1000  # labels of axes of length one
_TOKENS = 10_000  # labels that no operand has: the token axes may be other ones than the products'


def _rank(node: object) -> int:
    return (
        node.meta["val"].dim() if isinstance(node, Node) and hasattr(value_of(node), "dim") else -1
    )


def _make(
    node: Node, a: object, b: object, la: Labels, lb: Labels, lo: Labels
) -> Contraction | None:
    if (
        not (isinstance(a, Node) and isinstance(b, Node))
        or _rank(a) != len(la)
        or _rank(b) != len(lb)
    ):
        return None
    return Contraction(node, a, b, la, lb, lo)


def _mm(node: Node) -> Contraction | None:
    return _make(node, node.args[0], node.args[1], (0, 1), (1, 2), (0, 2))


def _bmm(node: Node) -> Contraction | None:
    return _make(node, node.args[0], node.args[1], (0, 1, 2), (0, 2, 3), (0, 1, 3))


def _addmm(node: Node) -> Contraction | None:
    return _onto(node, _make(node, node.args[1], node.args[2], (0, 1), (1, 2), (0, 2)))


def _baddbmm(node: Node) -> Contraction | None:
    return _onto(node, _make(node, node.args[1], node.args[2], (0, 1, 2), (0, 2, 3), (0, 1, 3)))


def _onto(node: Node, made: Contraction | None) -> Contraction | None:
    """``beta * bias + alpha * product``."""
    bias = node.args[0]
    if made is None or not isinstance(bias, Node):
        return None
    factors = float(argument(node, "alpha", 1)), float(argument(node, "beta", 1))
    return replace(made, bias=bias, factors=factors)


def _linear(node: Node) -> Contraction | None:
    rank = _rank(node.args[0])
    if rank < 1:
        return None
    lead = tuple(range(rank - 1))
    made = _make(node, node.args[0], node.args[1], (*lead, 100), (101, 100), (*lead, 101))
    bias = argument(node, "bias")
    if made is not None and isinstance(bias, Node):
        return Contraction(
            node, made.left, made.right, made.left_labels, made.right_labels, made.out_labels, bias
        )
    return made


def _matmul(node: Node) -> Contraction | None:
    """Batch axes are aligned from the right; an axis of size 1 that broadcasts gets a label of its
    own.
    """
    a, b = node.args[0], node.args[1]
    rank_a, rank_b = _rank(a), _rank(b)
    if rank_a < 2 or rank_b < 2:
        return None
    assert isinstance(a, Node) and isinstance(b, Node)
    shape_a, shape_b = shape_of(a), shape_of(b)
    fresh = count(_ONES)
    batch = max(rank_a, rank_b) - 2
    la, lb, lo = [], [], []
    for axis in range(batch):
        ia, ib = axis - (batch - (rank_a - 2)), axis - (batch - (rank_b - 2))
        broadcast_a = ia >= 0 and ib >= 0 and _is_one(shape_a[ia]) and not _is_one(shape_b[ib])
        broadcast_b = ia >= 0 and ib >= 0 and _is_one(shape_b[ib]) and not _is_one(shape_a[ia])
        if ia >= 0:
            la.append(next(fresh) if broadcast_a else axis)
        if ib >= 0:
            lb.append(next(fresh) if broadcast_b else axis)
        lo.append(axis)
    return _make(node, a, b, (*la, 100, 101), (*lb, 101, 102), (*lo, 100, 102))


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


def _einsum(node: Node) -> Contraction | None:
    equation, operands = node.args[0], node.args[1]
    if (
        not isinstance(equation, str)
        or not isinstance(operands, (list, tuple))
        or len(operands) != 2
    ):
        return None
    terms = einsum_terms(equation, [_rank(operand) for operand in operands])
    made = None if terms is None else _make(node, operands[0], operands[1], *terms)
    if made is None:
        return None
    sizes = dict(zip(made.left_labels, shape_of(made.left), strict=True))
    sides = zip(made.right_labels, shape_of(made.right), strict=True)
    # an axis of length one is spread over the other operand's
    return made if all(same(size, sizes.get(label, size)) for label, size in sides) else None


def einsum_terms(equation: str, ranks: Sequence[int]) -> list[Labels] | None:
    """The labels of both operands and of the result; axes of an ellipsis are counted from the last.

    None where an operand names an axis twice, or the equation does not say what the result is.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    named = [*inputs.split(","), out]
    if not arrow or len(named) != 3:
        return None
    halves = [term.partition("...") for term in named]
    unnamed = [rank - len(term.replace(".", "")) for term, rank in zip(named, ranks, strict=False)]
    unnamed.append(max(unnamed))
    terms = [
        (*map(ord, before), *(range(-more, 0) if dots else ()), *map(ord, after))
        for (before, dots, after), more in zip(halves, unnamed, strict=True)
    ]
    return None if any(len({*term}) < len(term) for term in terms) else terms


def _transposed(node: Node) -> Contraction | None:
    if argument(node, "bias") is not None or argument(node, "scale") is not None:
        return None
    if argument(node, "batch_split_factor", 1) not in (None, 1):
        return None
    orders = [tuple(argument(node, name) or default) for name, default in _PERMS]
    canonical: list[Labels] = [(0, 1, 2), (0, 2, 3), (0, 1, 3)]
    la, lb = [0] * 3, [0] * 3
    for place, axis in enumerate(orders[0]):
        la[axis] = canonical[0][place]
    for place, axis in enumerate(orders[1]):
        lb[axis] = canonical[1][place]
    out = tuple(canonical[2][axis] for axis in orders[2])
    return _make(node, node.args[0], node.args[1], tuple(la), tuple(lb), out)


def _quant_matmul(node: Node) -> Contraction | None:
    """One byte by one byte, scaled to a float; the packed and requantising forms are none of a
    prologue's.
    """
    made, requantised = _matmul(node), argument(node, "y_scale")
    numbers = [argument(node, name) for name in ("x1_dtype", "x2_dtype")]
    if (
        made is None
        or requantised is not None
        or not {*numbers} <= {None, number_formats.HIFLOAT8.number}
    ):
        return None
    dtypes = [dtype_of(side) for side in (made.left, made.right)]
    if any(dtype.itemsize != 1 for dtype in dtypes):
        return None
    weight, token, offset, bias = (
        argument(node, name) for name in ("scale", "pertoken_scale", "offset", "bias")
    )
    given = [
        (weight, argument(node, "scale_dtype")),
        (token, argument(node, "pertoken_scale_dtype")),
    ]
    scales = [(dtype_of(scale), number) if scale is not None else None for scale, number in given]
    form = number_formats.of_product(dtypes, numbers, scales, argument(node, "group_sizes"))
    held = Scales(
        codes_of(weight), codes_of(token) if token is not None else None, offset, format=form
    )
    return replace(made, bias=bias, scales=held)


def _weight_quant_batchmatmul(node: Node) -> Contraction | None:
    """A float activation by an int8 weight."""
    made = _matmul(node)
    if made is None or dtype_of(made.right) != torch.int8:
        return None
    weight, offset = argument(node, "antiquant_scale"), argument(node, "antiquant_offset")
    return replace(made, bias=argument(node, "bias"), scales=Scales(weight, None, offset))


_PERMS = (("perm_x1", (0, 1, 2)), ("perm_x2", (0, 1, 2)), ("perm_y", (1, 0, 2)))

RULES = rules(
    _mm,
    _bmm,
    _addmm,
    _baddbmm,
    _linear,
    _matmul,
    _einsum,
    _transposed,
    _quant_matmul,
    _weight_quant_batchmatmul,
)
