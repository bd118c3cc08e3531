"""Attention over the latents themselves: ``(q W_uk) . c_kv`` in place of ``q . (W_uk c_kv)``.

A cached token is its latent c_kv and its one rotated key k_pe. To expand the cache costs R * N * (D
+ Dv) products a cached token; to absorb W_uk into the query and W_uv into the output costs as much
a query token, and makes each score longer. Few queries over many tokens are absorbed, many over few
are expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fusion.models.attention import sparse
from mla_fusion.models.refusal import OptimizeError


@dataclass(frozen=True)
class LatentDims:
    """Widths of one attention: R of the latent, Dr of the rotated key, D and Dv of a head's key and
    value.
    """

    rank: int
    rope: int
    nope: int
    value: int

    @property
    def up(self) -> int:
        """What the up projection makes of a latent for one head."""
        return self.nope + self.value

    @property
    def cached(self) -> int:
        """Elements a layer keeps for one token."""
        return self.rank + self.rope

    def expanded(self, heads: int) -> int:
        """Elements a layer keeps for one token where keys and values of all heads are cached."""
        return heads * (self.nope + self.rope + self.value)

    def split_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """``[.., D]`` and ``[.., Dr]`` of ``[.., D + Dr]``."""
        return query[..., : self.nope], query[..., self.nope :]

    def absorbs(self, query_length: int, kv_length: int) -> bool:
        """Is the absorbed form the cheaper one, by its products per head?"""
        if query_length == 1:
            return True
        both = self.rank * self.up
        absorbed = query_length * both + query_length * kv_length * (2 * self.rank + self.rope)
        expanded = kv_length * both + query_length * kv_length * (
            self.nope + self.rope + self.value
        )
        return absorbed < expanded


@dataclass(frozen=True)
class LatentForm:
    """What the absorbed form needs to know of one attention.

    kv_up         name of the child that expands latents
    hidden        columns of the hidden state
    expand_kv     the function of its class that expands what it has read from its cache; None where
                  the module expands before it caches
    """

    dims: LatentDims
    heads: int
    kv_up: str
    hidden: int
    expand_kv: Callable[..., Any] | None = None

    @property
    def after_cache(self) -> bool:
        return self.expand_kv is not None


def expanded(both: Tensor, k_pe: Tensor, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """``[W_uk c_kv | k_pe]`` ``[B, N, L, D + Dr]`` and ``W_uv c_kv`` ``[B, N, L, Dv]`` of what the
    up projection gives, ``[B, 1, L, N * (D + Dv)]``, and ``[B, 1, L, Dr]``."""
    batch, _, length, _ = both.shape
    both = both.view(batch, length, -1, dims.up).transpose(1, 2)
    nope, values = both.split([dims.nope, dims.value], dim=-1)
    return torch.cat((nope, k_pe.expand(*nope.shape[:-1], -1)), dim=-1), values


def sparse_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_up: Tensor,
    dims: LatentDims,
    picks: Tensor,
    *,
    scaling: float,
    factor: Any = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """As :func:`absorbed_attention`, over the tokens ``picks [B, S, k]`` alone, by the operator for
    it.
    """
    batch, heads, length, _ = q_nope.shape
    w_uk, w_uv = _halves(kv_up, heads, dims)
    query = _absorbed(q_nope, w_uk).permute(1, 2, 0, 3)
    query_rope = q_pe.transpose(1, 2)
    if factor is not None:  # of the query [B, N, S, *]
        by_token = (
            factor.transpose(1, 2) if isinstance(factor, Tensor) and factor.dim() > 2 else factor
        )
        query, query_rope = query * by_token, query_rope * by_token
    picks = sparse.allowed(picks, mask)
    context = sparse.attend(query, query_rope, c_kv.squeeze(1), k_pe.squeeze(1), picks, scaling)
    rows = context.reshape(batch * length, heads, dims.rank).transpose(0, 1)
    return _of_values(rows, w_uv, batch), None


def _halves(kv_up: Tensor, heads: int, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """W_uk ``[N, D, R]`` and W_uv ``[N, Dv, R]``."""
    w_uk, w_uv = kv_up.view(heads, dims.up, dims.rank).split([dims.nope, dims.value], dim=1)
    return w_uk, w_uv


def _absorbed(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """``[B, N, S, D]`` by W_uk: ``[N, B, S, R]``."""
    batch, heads, length, nope = q_nope.shape
    rows = q_nope.transpose(0, 1).reshape(heads, batch * length, nope)
    return torch.bmm(rows, w_uk).view(heads, batch, length, -1)


def _of_values(context: Tensor, w_uv: Tensor, batch: int) -> Tensor:
    """``[N, B * S, R]`` by W_uv: ``[B, S, N, Dv]``."""
    # W_uv on the left: as rows it is read as it lies, transposed it would be copied element by
    # element.
    output = torch.bmm(w_uv, context.transpose(1, 2))
    return output.view(*output.shape[:2], batch, -1).permute(2, 3, 0, 1)


def absorbed_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_up: Tensor,
    dims: LatentDims,
    *,
    scaling: float,
    factor: Any = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of queries ``[B, N, S, D]`` and ``[B, N, S, Dr]`` over ``[B, 1, L, R]`` and ``[B,
    1, L, Dr]``.

    ``factor`` is what the query is multiplied by beside ``scaling``, spread over ``[B, N, S, *]``.

    kv_up is ``[N * (D + Dv), R]``, head by head W_uk then W_uv. The mask is boolean (True: attend)
    or added to the scores, ``[B or 1, N or 1, S, L]``. Returns the output ``[B, S, N, Dv]`` and the
    weights ``[B, N, S, L]``.
    """
    batch, heads, length, _ = q_nope.shape
    c_kv, k_pe = c_kv.squeeze(1), k_pe.squeeze(1)
    w_uk, w_uv = _halves(kv_up, heads, dims)

    # All heads read the same latents, so heads and tokens of a sequence are rows of one product.
    absorbed = _absorbed(q_nope, w_uk).transpose(0, 1).reshape(batch, heads * length, dims.rank)
    q_pe = q_pe.reshape(batch, heads * length, dims.rope)

    scores = (
        torch.bmm(absorbed, c_kv.transpose(1, 2)).float()
        + torch.bmm(q_pe, k_pe.transpose(1, 2)).float()
    )
    scores = scores.view(batch, heads, length, -1) * scaling
    scores = scores if factor is None else scores * factor
    if mask is not None:
        scores = masked(scores, mask)
    weights = torch.softmax(scores, dim=-1).to(q_nope.dtype)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=dropout > 0.0)

    context = torch.bmm(weights.view(batch, heads * length, -1), c_kv).view(
        batch, heads, length, dims.rank
    )
    return _of_values(
        context.transpose(0, 1).reshape(heads, batch * length, dims.rank), w_uv, batch
    ), weights


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores under a four-dimensional mask; finite everywhere, so that a row of padding stays
    finite too.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        found = f"{list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise OptimizeError(
            "attention.mask",
            "absorbed attention takes a mask [B, N or 1, S, L] as sdpa and eager attention do, "
            f"found {found}",
        )
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask
