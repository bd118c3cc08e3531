"""Columns and axes of the weights in another order than the kernel's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mla_fusion.tools.by_hand.calls import Arguments, Call, Change, Repair, on
from mla_fusion.tools.by_hand.roles import ALL, KR, KV, QUERY, Roles, Sizes

# the columns as the kernel wants them, None where they do not have these sizes
Order = Callable[[Tensor, Sizes], Tensor | None]
Move = Callable[[Tensor], Tensor]
Arrange = Callable[[Tensor, Sizes], Tensor]


def _of_heads(arrange: Arrange) -> Order:
    """The order of W_uq_qr's columns, which ``arrange`` gives as [.., N, D + Dr]."""

    def order(columns: Tensor, sizes: Sizes) -> Tensor | None:
        width, rest = divmod(columns.shape[-1], sizes.heads or 1)
        if not sizes.heads or rest or width <= sizes.rope:
            return None
        return arrange(columns, sizes).flatten(-2)

    return order


def _of_key(arrange: Arrange) -> Order:
    """The order of the columns of c_kv and k_pe; those of the query, where there are any, stay."""

    def order(columns: Tensor, sizes: Sizes) -> Tensor | None:
        width = sizes.latent + sizes.rope
        if columns.shape[-1] < width:
            return None
        return torch.cat([arrange(columns[..., :width], sizes), columns[..., width:]], -1)

    return order


def _last(order: Move, columns: Tensor, count: int) -> Tensor:
    """``order`` done to the last so many columns."""
    kept = columns.shape[-1] - count
    return torch.cat([columns[..., :kept], order(columns[..., kept:])], -1)


def _rope_of_heads(order: Move) -> Order:
    return _of_heads(
        lambda columns, sizes: _last(order, columns.unflatten(-1, (sizes.heads, -1)), sizes.rope)
    )


def _rope_of_key(order: Move) -> Order:
    return _of_key(lambda columns, sizes: _last(order, columns, sizes.rope))


def _to_pairs(columns: Tensor) -> Tensor:
    """[a0 .. | b0 ..] to a0, b0, a1, b1, .. along the last axis."""
    return columns.unflatten(-1, (2, -1)).mT.flatten(-2)


def _to_halves(columns: Tensor) -> Tensor:
    return columns.unflatten(-1, (-1, 2)).mT.flatten(-2)


def _nope_then_rope(columns: Tensor, sizes: Sizes) -> Tensor:
    parts = columns.tensor_split([-sizes.heads * sizes.rope], -1)
    return torch.cat([part.unflatten(-1, (sizes.heads, -1)) for part in parts], -1)


def _query_first(columns: Tensor, sizes: Sizes) -> Tensor | None:
    rank = columns.shape[-1] - sizes.latent - sizes.rope
    return columns.roll(-rank, -1) if rank > 0 else None


_HALF = "the rope columns are in half layout; the kernel wants interleaved pairs"
_TWICE = "the rope columns were interleaved twice, or of a model that interleaves already"
_BY_HEAD = "the kernel wants [D | Dr] head by head"
# code, the weight's role, what the order alters, what it is, how it is put right. The rope columns
# of a weight and of its scales are put right apart, too: each may have been forgotten.
_ORDERS = (
    ("rope_columns.half", "up", QUERY, _HALF, _rope_of_heads(_to_pairs)),
    ("rope_columns.half", "down", KR, _HALF, _rope_of_key(_to_pairs)),
    ("rope_columns.interleaved", "up", QUERY, _TWICE, _rope_of_heads(_to_halves)),
    ("rope_columns.interleaved", "down", KR, _TWICE, _rope_of_key(_to_halves)),
    (
        "columns.key_first",
        "down",
        KV | KR,
        "its columns are [k_pe | c_kv]; the kernel wants [c_kv | k_pe]",
        _of_key(lambda columns, sizes: columns.roll(-sizes.rope, -1)),
    ),
    (
        "columns.query_first",
        "down",
        ALL,
        "its columns are [q | kv]; the kernel wants [kv | q]",
        _query_first,
    ),
    (
        "heads.nope_then_rope",
        "up",
        QUERY,
        f"all nope columns come before all rope columns; {_BY_HEAD}",
        _of_heads(_nope_then_rope),
    ),
    (
        "heads.rope_first",
        "up",
        QUERY,
        f"each head is [Dr | D]; {_BY_HEAD}",
        _of_heads(
            lambda columns, sizes: columns.unflatten(-1, (sizes.heads, -1)).roll(-sizes.rope, -1)
        ),
    ),
    (
        "heads.transposed",
        "up",
        QUERY,
        f"heads vary fastest: [D + Dr, N]; {_BY_HEAD}",
        _of_heads(lambda columns, sizes: columns.unflatten(-1, (-1, sizes.heads)).mT),
    ),
)
_LINEAR = "a linear layer's [out, in] reshaped to [in, out]"
# code, the weight's role, what it alters, what it holds, its axes that a reshape has exchanged
_RESHAPED = (
    ("w_uk.transposed", "absorbed", QUERY, "[N, Hckv, D] reshaped to [N, D, Hckv]", (1, 2)),
    ("w_uk.heads", "absorbed", QUERY, "[D, N, Hckv] reshaped to [N, D, Hckv]", (0, 1)),
    ("weight.reshaped", "down_query", QUERY, _LINEAR, (0, 1)),
    ("weight.reshaped", "up", QUERY, _LINEAR, (0, 1)),
    ("weight.reshaped", "down", KV | KR, _LINEAR, (0, 1)),
)


def of_columns(call: Call) -> Iterator[Repair]:
    """Every order in which columns, or axes, of a weight may stand."""
    roles = call.roles
    for code, role, touches, text, order in _ORDERS:
        weight = getattr(roles, role)
        if not weight or (order is _query_first and not roles.down_also_query):
            continue
        vectors = [name for name in roles.vectors.get(weight, ()) if call.tensor(name) is not None]
        together, apart = [weight, *vectors], code.startswith("rope_columns")
        for names in [[weight], vectors, together] if vectors and apart else [together]:
            said = ", ".join(names) if apart else weight
            yield Repair(code, f"{said}: {text}", said, touches, _reordered(roles, order, names))
    for code, role, touches, text, axes in _RESHAPED:
        weight, rank = getattr(roles, role), 3 if role == "absorbed" else 2
        said = f"{weight} holds {text}: transpose it instead"
        yield Repair(code, said, weight, touches, on(partial(_exchanged, axes, rank), weight))


def _reordered(roles: Roles, order: Order, names: list[str]) -> Change:
    def change(call: Call) -> Arguments:
        def ordered(matrix: Tensor) -> Tensor | None:
            columns = roles.columns(matrix)
            made = None if columns is None else order(columns, roles.sizes(call.arguments))
            return None if made is None else roles.like(matrix, made)

        return on(ordered, *names)(call)

    return change


def _exchanged(axes: tuple[int, int], rank: int, matrix: Tensor) -> Tensor | None:
    """Read with these axes in the other order, then transposed."""
    if matrix.dim() != rank:
        return None
    one, other = axes
    shape = list(matrix.shape)
    shape[one], shape[other] = shape[other], shape[one]
    return matrix.reshape(shape).transpose(one, other)
