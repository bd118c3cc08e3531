"""Columns and axes of the weights in another order than the kernel's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mla_fusion.tools.by_hand.calls import Call, Change
from mla_fusion.tools.by_hand.repair import KR, KV, QUERY, Repair, both, on, touching
from mla_fusion.tools.by_hand.roles import Roles


def of_columns(roles: Roles, call: Call) -> Iterator[Repair]:
    yield from _rope_columns(roles, call)
    yield from _order_of_columns(roles, call)
    yield from _up_by_heads(roles)
    yield from _transposed(roles)


def _interleaved(columns: Tensor) -> Tensor:
    """[a0 .. | b0 ..] to a0, b0, a1, b1, .. along the last axis."""
    return columns.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _halved(columns: Tensor) -> Tensor:
    return columns.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


_ORDERS: tuple[tuple[str, Callable[[Tensor], Tensor], str], ...] = (
    ("half", _interleaved, "are in half layout; the kernel wants interleaved pairs"),
    ("interleaved", _halved, "were interleaved twice, or of a model that interleaves already"),
)


def _rope_columns(roles: Roles, call: Call) -> Iterator[Repair]:
    rope = roles.rope_dim(call)
    for label, order, text in _ORDERS:
        for weight, scale, touched in (
            (roles.up, roles.up_scale, QUERY),
            (roles.down, roles.down_scale, KR),
        ):
            if not weight:
                continue

            def rows(
                matrix: Tensor, order: Any = order, of_query: bool = touched == QUERY
            ) -> Tensor | None:
                return _reordered_rope(matrix, roles, call, rope, order, of_query)

            code = f"rope_columns.{label}"
            every: list[tuple[str, Change]] = [(weight, on(weight, rows))]
            if scale and isinstance(call.arguments.get(scale), Tensor):
                of_both = both(on(weight, rows), on(scale, rows))
                every += [(scale, on(scale, rows)), (f"{weight}, {scale}", of_both)]
            for name, change in every:
                yield Repair(
                    code, f"{name}: the rope columns {text}", name, touching(touched), change
                )


def _reordered_rope(
    matrix: Tensor,
    roles: Roles,
    call: Call,
    rope: int,
    order: Callable[[Tensor], Tensor],
    of_query: bool,
) -> Tensor | None:
    columns = roles.columns(matrix)
    if columns is None:
        return None
    if of_query:
        heads = roles.heads(call)
        per_head = columns.shape[-1] // heads if heads else 0
        if not heads or columns.shape[-1] % heads or per_head <= rope:
            return None
        split = columns.unflatten(-1, (heads, per_head))
        made = torch.cat([split[..., :-rope], order(split[..., -rope:])], -1).flatten(-2)
    else:
        start = roles.latent_dim(call)
        if columns.shape[-1] < start + rope:
            return None
        made = columns.clone()
        made[..., start : start + rope] = order(columns[..., start : start + rope])
    return roles.like(matrix, made)


def _order_of_columns(roles: Roles, call: Call) -> Iterator[Repair]:
    rope, latent = roles.rope_dim(call), roles.latent_dim(call)
    if not roles.down:
        return

    def key_first(matrix: Tensor) -> Tensor | None:
        columns = roles.columns(matrix)
        if columns is None or columns.shape[-1] < latent + rope:
            return None
        rest = columns[..., latent + rope :]
        made = torch.cat([columns[..., rope : rope + latent], columns[..., :rope], rest], -1)
        return roles.like(matrix, made)

    changes = [on(name, key_first) for name in (roles.down, roles.down_scale) if name]
    yield Repair(
        "columns.key_first",
        f"{roles.down} has the columns [k_pe | c_kv]; the kernel wants [c_kv | k_pe]",
        roles.down,
        touching(KV, KR),
        both(*changes),
    )
    if roles.down_also_query:

        def query_first(matrix: Tensor) -> Tensor | None:
            columns = roles.columns(matrix)
            if columns is None or columns.shape[-1] <= latent + rope:
                return None
            rank = columns.shape[-1] - latent - rope
            return roles.like(matrix, torch.cat([columns[..., rank:], columns[..., :rank]], -1))

        changes = [on(name, query_first) for name in (roles.down, *roles.down_vectors)]
        yield Repair(
            "columns.query_first",
            f"{roles.down} has the columns [q | kv]; the kernel wants [kv | q]",
            roles.down,
            touching(QUERY, KV, KR),
            both(*changes),
        )


def _up_by_heads(roles: Roles) -> Iterator[Repair]:
    """The columns of W_uq_qr, and the axes of W_uk."""
    if roles.up:

        def by_heads(arrange: Callable[[Tensor, int, int, int], Tensor]) -> Change:
            def change(call: Call) -> dict[str, Any]:
                heads, rope = roles.heads(call), roles.rope_dim(call)

                def rows(matrix: Tensor) -> Tensor | None:
                    columns = roles.columns(matrix)
                    if columns is None or not heads or columns.shape[-1] % heads:
                        return None
                    width = columns.shape[-1] // heads
                    return (
                        roles.like(matrix, arrange(columns, heads, width - rope, rope))
                        if width > rope
                        else None
                    )

                return both(*(on(name, rows) for name in (roles.up, roles.up_scale) if name))(call)

            return change

        for code, text, arrange in (
            (
                "heads.nope_then_rope",
                "all nope columns come before all rope columns",
                _all_nope_first,
            ),
            ("heads.rope_first", "each head is [Dr | D]", _rope_first),
            ("heads.transposed", "heads vary fastest: [D + Dr, N]", _heads_last),
        ):
            wanted = "the kernel wants [D | Dr] head by head"
            yield Repair(
                code, f"{roles.up}: {text}; {wanted}", roles.up, touching(QUERY), by_heads(arrange)
            )
    if roles.absorbed:

        def as_latent_rows(weight: Tensor) -> Tensor | None:
            if weight.dim() != 3:
                return None
            heads, nope, latent = weight.shape
            return weight.reshape(heads, latent, nope).transpose(1, 2)

        def as_heads_last(weight: Tensor) -> Tensor | None:
            if weight.dim() != 3:
                return None
            heads, nope, latent = weight.shape
            return weight.reshape(nope, heads, latent).transpose(0, 1)

        for code, axes, function in (
            ("w_uk.transposed", "[N, Hckv, D]", as_latent_rows),
            ("w_uk.heads", "[D, N, Hckv]", as_heads_last),
        ):
            text = f"{roles.absorbed} holds {axes} reshaped to [N, D, Hckv]: transpose it instead"
            yield Repair(code, text, roles.absorbed, touching(QUERY), on(roles.absorbed, function))


def _all_nope_first(columns: Tensor, heads: int, nope: int, rope: int) -> Tensor:
    of_nope = columns[..., : heads * nope].unflatten(-1, (heads, nope))
    of_rope = columns[..., heads * nope :].unflatten(-1, (heads, rope))
    return torch.cat([of_nope, of_rope], -1).flatten(-2)


def _rope_first(columns: Tensor, heads: int, nope: int, rope: int) -> Tensor:
    split = columns.unflatten(-1, (heads, nope + rope))
    return torch.cat([split[..., rope:], split[..., :rope]], -1).flatten(-2)


def _heads_last(columns: Tensor, heads: int, nope: int, rope: int) -> Tensor:
    return columns.unflatten(-1, (nope + rope, heads)).transpose(-1, -2).flatten(-2)


def _transposed(roles: Roles) -> Iterator[Repair]:
    for weight, touched in (
        (roles.down_query, (QUERY,)),
        (roles.up, (QUERY,)),
        (roles.down, (KV, KR)),
    ):
        if not weight:
            continue

        def read_as_rows(matrix: Tensor) -> Tensor | None:
            return (
                matrix.reshape(matrix.shape[1], matrix.shape[0]).t() if matrix.dim() == 2 else None
            )

        text = (
            f"{weight} holds a linear layer's [out, in] reshaped to [in, out]: transpose it instead"
        )
        yield Repair("weight.reshaped", text, weight, touching(*touched), on(weight, read_as_rows))
