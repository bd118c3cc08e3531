"""Attention of absorbed MLA over the paged latent cache, with the log-sum-exp that merging needs.

    out = softmax(scale * (query . c_kv + query_rope . k_pe)) c_kv

On device npu this is one `npu_fused_infer_attention_score_v2` (see `attention_npu`); elsewhere the plain PyTorch
below, which is also the reference that says what the kernel should give. The device decides, so that a compiled
function holds the one or the other and never a graph break.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from mla_fusion.meta import ContractError
from mla_fusion.models.attention import npu

Lengths = Tensor | Sequence[int]


def mla_paged_attention(
    query: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Lengths,
    *,
    scale: float,
    query_lens: Lengths | None = None,
    mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T tokens of B sequences over their first ``seq_lens`` cached positions.

    query         [T, N, Hckv], query_rope [T, N, Dr]: W_uk is already multiplied in
    kv_cache      [BlockNum, BlockSize, 1, Hckv], kr_cache [BlockNum, BlockSize, 1, Dr], new rows already written
    block_tables  int [B, blocks]; entries behind a sequence's last block are not read
    seq_lens      int [B], new tokens counted, at most blocks * BlockSize
    query_lens    int [B] that sum to T: the tokens of a sequence are its last ones, and each sees what stands up to
                  itself. None: one token a sequence, T = B
    mask          bool [T, blocks * BlockSize], True where a token may look; restricts further

    Returns out [T, N, Hckv] in the dtype of ``query`` and, with ``return_lse``, the natural logarithm of
    sum(exp(scaled scores)), [T, N] float32. A token that sees nothing has out 0 and lse -inf. Products and softmax
    are float32 (float64 inputs stay float64, lse too).

    Lengths may be tensors or host integers. On an NPU the kernel takes host integers when called eagerly or from
    captured ACL graphs (eagerly a tensor costs a synchronisation) and tensors in torchair's GE graphs.

    Raises ContractError ``attention.<argument>`` for shapes that do not belong together and, on an NPU, for sizes
    that the kernel has no form for.
    """
    _check(query, query_rope, kv_cache, kr_cache, block_tables, seq_lens, query_lens, mask)
    if query.device.type == "npu":
        out, lse = npu.attend(
            query, query_rope, kv_cache, kr_cache, block_tables, seq_lens, scale, query_lens, mask, return_lse
        )
    else:
        out, lse = _reference(query, query_rope, kv_cache, kr_cache, block_tables, seq_lens, scale, query_lens, mask)
    return (out, lse) if return_lse else out


def _reference(
    query: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Lengths,
    scale: float,
    query_lens: Lengths | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    lengths = torch.as_tensor(seq_lens, device=query.device)
    if query_lens is None:
        return _attend_each(query, query_rope, kv_cache, kr_cache, block_tables, lengths, scale, mask)
    if isinstance(query_lens, Tensor) and torch.compiler.is_compiling():
        # lengths unknown while tracing: every token as a sequence of its own
        owner = torch.repeat_interleave(query_lens, output_size=query.shape[0])
        behind = query_lens.cumsum(0)[owner] - 1 - torch.arange(query.shape[0], device=query.device)
        seen = lengths[owner] - behind
        return _attend_each(query, query_rope, kv_cache, kr_cache, block_tables[owner], seen, scale, mask)
    counts = query_lens.tolist() if isinstance(query_lens, Tensor) else list(query_lens)
    if sum(counts) != query.shape[0]:
        _refuse("query_lens", f"lengths that sum to the {query.shape[0]} tokens", sum(counts))
    outs, lses = [query[:0]], [query.new_zeros(0, query.shape[1], dtype=_high(query))]
    for index, tokens in enumerate(_slices(counts)):
        one = slice(index, index + 1)
        c_kv, k_pe = (_rows(cache, block_tables[one], lengths[one]) for cache in (kv_cache, kr_cache))
        behind = torch.arange(counts[index] - 1, -1, -1, device=query.device)
        visible = _visible(c_kv, lengths[one] - behind, None if mask is None else mask[tokens])
        out, lse = _attend(query[None, tokens], query_rope[None, tokens], c_kv, k_pe, visible[None], scale)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses)


def _slices(counts: Sequence[int]) -> list[slice]:
    """The tokens of each sequence."""
    ends = list(accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _attend_each(
    query: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_tables: Tensor,
    seen: Tensor,
    scale: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One token a sequence; ``seen`` [T] positions of it are visible."""
    c_kv, k_pe = (_rows(cache, block_tables, seen) for cache in (kv_cache, kr_cache))
    visible = _visible(c_kv, seen, mask).unsqueeze(1)
    out, lse = _attend(query.unsqueeze(1), query_rope.unsqueeze(1), c_kv, k_pe, visible, scale)
    return out.squeeze(1), lse.squeeze(1)


def _rows(cache: Tensor, block_tables: Tensor, lengths: Tensor) -> Tensor:
    """[B, S, width]: the rows of each sequence in order, zeros behind its end (a pool may hold NaN there)."""
    block_size = cache.shape[1]
    starts = torch.arange(block_tables.shape[1], device=cache.device) * block_size
    used = starts < lengths.unsqueeze(1)
    rows = cache[torch.where(used, block_tables, 0)].flatten(1, 3)
    beyond = torch.arange(rows.shape[1], device=cache.device) >= lengths.unsqueeze(1)
    return rows.masked_fill(beyond.unsqueeze(-1), 0)


def _visible(c_kv: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
    """bool [tokens, S]: the first ``seen`` positions, less what ``mask`` forbids."""
    visible = torch.arange(c_kv.shape[1], device=c_kv.device) < seen.unsqueeze(1)
    return visible if mask is None else visible & mask


def _attend(
    query: Tensor, query_rope: Tensor, c_kv: Tensor, k_pe: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out [B, Q, N, Hckv] and lse [B, Q, N] of query [B, Q, N, Hckv] over c_kv [B, S, Hckv], visible [B, Q, S]."""
    tokens, heads = query.shape[1:3]
    high = _high(query)
    keys = c_kv.to(high)
    scores = torch.bmm(query.flatten(1, 2).to(high), keys.transpose(1, 2))
    scores = scores + torch.bmm(query_rope.flatten(1, 2).to(high), k_pe.to(high).transpose(1, 2))
    scores = (scores * scale).unflatten(1, (tokens, heads)).masked_fill(~visible.unsqueeze(2), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0, lse).unsqueeze(-1))
    out = torch.bmm(weights.flatten(1, 2), keys).unflatten(1, (tokens, heads))
    return out.to(query.dtype), lse


def _high(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _check(
    query: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Lengths,
    query_lens: Lengths | None,
    mask: Tensor | None,
) -> None:
    ranks = {"query": (query, 3), "query_rope": (query_rope, 3), "kv_cache": (kv_cache, 4), "kr_cache": (kr_cache, 4)}
    for name, (tensor, rank) in {**ranks, "block_tables": (block_tables, 2)}.items():
        if tensor.dim() != rank:
            _refuse(name, f"{rank}-D", f"{tensor.dim()}-D {list(tensor.shape)}")
    tokens, heads, latent = query.shape
    blocks, block_size = kv_cache.shape[:2]
    rope = query_rope.shape[2]
    if tuple(query_rope.shape[:2]) != (tokens, heads):
        _refuse("query_rope", f"[{tokens}, {heads}, Dr]", list(query_rope.shape))
    if tuple(kv_cache.shape[2:]) != (1, latent):
        _refuse("kv_cache", f"[BlockNum, BlockSize, 1, {latent}]", list(kv_cache.shape))
    if tuple(kr_cache.shape) != (blocks, block_size, 1, rope):
        _refuse("kr_cache", f"[{blocks}, {block_size}, 1, {rope}]", list(kr_cache.shape))
    sequences = block_tables.shape[0]
    if len(seq_lens) != sequences:
        _refuse("seq_lens", f"{sequences} entries, one a row of block_tables", len(seq_lens))
    if query_lens is None and tokens != sequences:
        _refuse("query_lens", f"lengths of the {sequences} sequences, since there are {tokens} tokens", None)
    if query_lens is not None and len(query_lens) != sequences:
        _refuse("query_lens", f"{sequences} entries, one a row of block_tables", len(query_lens))
    if mask is not None:
        positions = block_tables.shape[1] * block_size
        if mask.dtype != torch.bool or tuple(mask.shape) != (tokens, positions):
            _refuse("mask", f"bool [{tokens}, {positions}]", f"{mask.dtype} {list(mask.shape)}")


def _refuse(argument: str, expected: str, found: object) -> NoReturn:
    raise ContractError(f"attention.{argument}", argument, expected, str(found))
