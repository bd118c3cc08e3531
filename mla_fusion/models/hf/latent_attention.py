"""Attention over the latents themselves: ``(q W_uk) . c_kv`` in place of ``q . (W_uk c_kv)``.

A cached token is its latent c_kv and its one rotated key k_pe. To expand the cache costs R * N * (D
+ Dv) products a cached token. To absorb W_uk into the query and W_uv into the output costs as much
a query token, and makes each score longer. So a few queries over many tokens are absorbed, and many
queries over few tokens are expanded.

On an NPU, one `npu_sparse_flash_attention` attends to the tokens that an indexer has picked (DSA).
Its sizes are those of torch_npu's documentation: heads a power of two up to 128, latents 512 wide,
rotated keys 64, bfloat16 or float16. Unused picks of a token are -1, and last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fusion import compat
from mla_fusion.meta.attention import HEADS, LATENT, ROPE

SPARSE_OPERATOR = "npu::npu_sparse_flash_attention"
ABSORBED = 2  # attention_mode: keys and values are latents, and rotated parts are other arguments
NO_MASK = 0  # sparse_mode: attention reads exactly the picks
BLOCK_SIZE = 128  # tokens a page


@dataclass(frozen=True)
class LatentDims:
    """Widths of an attention: R of the latent, Dr of the rotated key, D and Dv of a head's key and
    value.
    """

    rank: int
    rope: int
    nope: int
    value: int

    def absorbs(self, query_length: int, kv_length: int) -> bool:
        """Returns True if the absorbed form has fewer products per head."""
        expansion = self.rank * (self.nope + self.value)
        absorbed = query_length * (expansion + kv_length * (2 * self.rank + self.rope))
        expanded = kv_length * (expansion + query_length * (self.nope + self.rope + self.value))
        return query_length == 1 or absorbed < expanded


@dataclass(frozen=True)
class LatentForm:
    """The facts about an attention that its absorbed form depends on.

    kv_up           name of the child that expands latents
    expand_kv       the function of its class that expands latents which its cache returned; None if
                    the module expands before it caches
    complex_tables  rotary tables are complex numbers, not cosines and sines
    """

    dims: LatentDims
    heads: int
    kv_up: str
    expand_kv: Callable[..., Any] | None
    complex_tables: bool

    @property
    def takes_picks(self) -> bool:
        """True if the installed torch_npu has an operator that attends to picked tokens."""
        sizes = self.dims.rank, self.dims.rope
        is_known = compat.has_argument(SPARSE_OPERATOR, "attention_mode")
        return is_known and self.heads in HEADS and sizes == (LATENT, ROPE)


def expanded(product: Tensor, k_pe: Tensor, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """Returns keys ``[W_uk c_kv | k_pe]`` ``[B, N, L, D + Dr]`` and values ``W_uv c_kv``
    ``[B, N, L, Dv]``.

    product  of latents with the up projection, ``[B, 1, L, N * (D + Dv)]``
    k_pe     ``[B, 1, L, Dr]``
    """
    by_head = product.squeeze(1).unflatten(-1, (-1, dims.nope + dims.value)).transpose(1, 2)
    nope, values = by_head.split([dims.nope, dims.value], dim=-1)
    return torch.cat((nope, k_pe.expand(*nope.shape[:-1], -1)), dim=-1), values


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
    picks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the output ``[B, S, N, Dv]`` and the weights ``[B, N, S, L]`` of attention.

    q_nope  [B, N, S, D], q_pe [B, N, S, Dr]
    c_kv    [B, 1, L, R], k_pe [B, 1, L, Dr]
    kv_up   [N * (D + Dv), R], head by head W_uk then W_uv
    factor  multiplies the query beside ``scaling``, in the shape [B, N, S, *] or one like it
    mask    boolean (True: attend) or added to the scores, [B or 1, N or 1, S, L]
    picks   [B, S, k], the only tokens to attend to, by the operator for them; the weights are None
    """
    batch, heads, length, _ = q_nope.shape
    c_kv, k_pe = c_kv.squeeze(1), k_pe.squeeze(1)
    w_uk, w_uv = kv_up.view(heads, -1, dims.rank).split([dims.nope, dims.value], dim=1)
    query = torch.bmm(q_nope.transpose(0, 1).flatten(1, 2), w_uk)
    query = query.view(heads, batch, length, -1).transpose(0, 1)
    if factor is not None:
        query, q_pe = query * factor, q_pe * factor
    weights = None
    if picks is not None:
        context = _over_picks(query, q_pe, c_kv, k_pe, _allowed(picks, mask), scaling)
    else:
        # all heads read the same latents: heads and tokens of a sequence are rows of one product
        scores = torch.bmm(query.flatten(1, 2), c_kv.mT).float()
        scores = (scores + torch.bmm(q_pe.flatten(1, 2), k_pe.mT).float()) * scaling
        scores = scores.view(batch, heads, length, -1)
        if mask is not None and mask.dtype == torch.bool:
            # finite, so that a row of padding stays finite too
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        elif mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, dim=-1).to(q_nope.dtype)
        weights = torch.dropout(weights, dropout, dropout > 0.0)
        context = torch.bmm(weights.flatten(1, 2), c_kv).view(batch, heads, length, -1)
    # W_uv on the left is read as it lies; transposed it would be copied element by element
    output = torch.bmm(w_uv, context.transpose(0, 1).flatten(1, 2).mT)
    return output.view(heads, -1, batch, length).permute(2, 3, 0, 1), weights


def _over_picks(
    query: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor, picks: Tensor, scaling: float
) -> Tensor:
    """Returns what attention to these tokens makes of the latents, ``[B, N, S, R]``."""
    key = c_kv.unsqueeze(2)
    out: Tensor = torch.ops.npu.npu_sparse_flash_attention(
        query.transpose(1, 2),
        key,
        key,
        picks.unsqueeze(2),
        scaling,
        query_rope=q_pe.transpose(1, 2),
        key_rope=k_pe.unsqueeze(2),
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="BSND",
        sparse_mode=NO_MASK,
        attention_mode=ABSORBED,
    )[0]
    return out.transpose(1, 2)


def _allowed(picks: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the picks, with -1 in place of those that a mask ``[B or 1, 1, S, L]`` forbids.

    Picks are sorted by score, and tokens that the mask forbids had the lowest: they are last.
    """
    if mask is None:
        return picks
    is_allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    is_allowed = is_allowed[:, 0].expand(picks.shape[0], -1, -1).gather(-1, picks.long())
    return torch.where(is_allowed, picks, -1)
