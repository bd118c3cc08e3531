"""Readers that take nothing, overwritten columns, values that the kernel does not give out."""

from __future__ import annotations

import torch
from torch import Tensor

from ..member import ALL, Family, attacks
from ..program import FLOATS, OUTPUTS, Named, Step


def _overwritten(v: Tensor, i: Named) -> Tensor:
    v = v.clone()
    v[..., :4] = 0
    return v


def _overwritten_by_others(v: Tensor, i: Named) -> Tensor:
    v = v.clone()
    v[..., :8] = v[..., 8:16]
    return v


def _one_column_added_to(v: Tensor, i: Named) -> Tensor:
    v = v.clone()
    v[..., -1].add_(v[..., 0])
    return v


def _last_token_overwritten(v: Tensor, i: Named) -> Tensor:
    v = v.clone()
    v[-1] = 0.5
    return v


_COLUMNS: dict[str, Step] = {
    "overwritten": _overwritten,
    "overwritten_by_others": _overwritten_by_others,
    "one_column_added_to": _one_column_added_to,
    "last_token_overwritten": _last_token_overwritten,
    "rolled": lambda v, i: v.roll(1, -1),
    "half_of_the_columns": lambda v, i: torch.cat([v[..., :32], v[..., 32:] * 1.5], -1),
    "strided": lambda v, i: v.contiguous().as_strided(v.shape, (*v.contiguous().stride()[:-1], 0)),
    "unfolded": lambda v, i: v.unfold(-1, 2, 2).flip(-1).flatten(-2),
    "flat_rolled": lambda v, i: v.reshape(-1).roll(1).view(v.shape),
    "viewed_as_int": lambda v, i: (v.contiguous().view(torch.int16) & -16).view(v.dtype) * 1.25,
    "bits_dropped": lambda v, i: (v.contiguous().view(torch.int16) & -256).view(v.dtype),
    "index_add": lambda v, i: v.index_add(-1, torch.tensor([0]), v[..., 1:2].contiguous()),
    "index_fill": lambda v, i: v.index_fill(-1, torch.tensor([3, 4]), 0.25),
    "diagonal": lambda v, i: v + torch.ones_like(v).triu(0),
    "tril": lambda v, i: v.tril(48),
}

_WINDOWS: dict[str, Step] = {"windows": lambda v, i: v.unfold(-1, 8, 8).flatten(-2)}
_NOTHING: dict[str, Step] = {
    "nothing_passed": lambda v, i: torch.cat((v, v[..., v.shape[-1] :]), -1),
    "nothing_before": lambda v, i: torch.cat((v[..., :0], v), -1),
    "own_columns": lambda v, i: torch.cat((v[..., :16], v[..., 16:]), -1),
    "unflattened": lambda v, i: v.unflatten(-1, (-1, 2)).flatten(-2),
    "indexed": lambda v, i: v[..., torch.arange(v.shape[-1])],
    "expanded": lambda v, i: v.expand_as(v),
    "cloned": lambda v, i: v.clone(),
    "contiguous": lambda v, i: v.contiguous(),
    "added_zero": lambda v, i: v + 0,
    "times_one": lambda v, i: v * 1.0,
    "float_and_back": lambda v, i: v.float().to(v.dtype),
}


def _raw_norms(
    i: Named, query: Tensor, q_pe: Tensor, c_q: Tensor, c_kv: Tensor, k_pe: Tensor
) -> tuple[Tensor, ...]:
    return query, q_pe, c_q.float().norm(dim=-1), c_kv, k_pe.sum(-1)


def _mixed(
    i: Named, query: Tensor, q_pe: Tensor, c_q: Tensor, c_kv: Tensor, k_pe: Tensor
) -> tuple[Tensor, ...]:
    return query + query.mean(0), q_pe.flip(0), c_q.cumsum(0)


def _caches_read(
    i: Named, query: Tensor, q_pe: Tensor, c_q: Tensor, c_kv: Tensor, k_pe: Tensor
) -> tuple[Tensor, ...]:
    return query, q_pe, i["kv_cache"][:2].clone(), i["kr_cache"].sum()


def _in_place_after(
    i: Named, query: Tensor, q_pe: Tensor, c_q: Tensor, c_kv: Tensor, k_pe: Tensor
) -> tuple[Tensor, ...]:
    query = query.contiguous()
    query.mul_(2)
    i["kv_cache"].mul_(0.5)
    return query, q_pe


_GIVEN: dict[str, Step] = {
    f.__name__[1:]: f for f in (_raw_norms, _mixed, _caches_read, _in_place_after)
}

FAMILIES = [
    Family(
        "readers.columns",
        "columns that are overwritten, moved or reinterpreted",
        attacks(_COLUMNS, (*FLOATS, *OUTPUTS), ALL),
        attacks(_NOTHING, ("c_q", "q_pe_raw", "k_pe"), ("T8", "sym"), ("paged",))
        + attacks(_WINDOWS, ("q_pe_raw", "k_pe"), ("T8", "sym"), ("paged",))
        + attacks(_NOTHING, ("q_nope",), ("T1",), ("neox",)),
    ),
    Family(
        "readers.outputs", "others read what the prologue makes", attacks(_GIVEN, ("outputs",), ALL)
    ),
]
