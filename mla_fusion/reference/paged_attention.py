"""Computes attention of absorbed MLA over pages of latents: the CPU kernel of
npu_fused_infer_attention_score_v2.

Scores, softmax and both products are float32 (float64 for float64 tensors), and the result is
rounded once. The device also rounds the probabilities on the way, to the dtype of the query, or to
1/127 with an int8 query. So results here are nearer to float64 than the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta.attention import (
    ATTENTION,
    CAUSAL_AT_THE_END,
    FLOATS,
    NO_MASK,
    Attention,
)
from mla_fusion.reference.numerics import rows_of_nz, working_dtype


def attend(
    query: Tensor,
    query_rope: Tensor,
    caches: Sequence[Tensor],
    tables: Tensor,
    seen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns out ``[B, S, N, D]`` and log-sum-exp ``[B, S, N]`` for S tokens of each of B
    sequences, in the working dtype.

    query   [B, S, N, D], query_rope [B, S, N, R]
    caches  key, value and key_rope: [BlockNum, .., BlockSize, width], or NZ,
            [BlockNum, 1, width / C0, BlockSize, C0]
    tables  [B, blocks]; entries behind a sequence's last block are not read
    seen    [B, S], how many positions each token sees. For 0, out is 0 and log-sum-exp is -inf
    """
    work = working_dtype(query.dtype)
    tokens, heads = query.shape[1:3]
    key, value, key_rope = caches
    length = seen.amax(-1, keepdim=True)
    c_kv, k_pe = (_rows(cache, tables, length).to(work) for cache in (key, key_rope))
    values = c_kv if value is key else _rows(value, tables, length).to(work)
    # heads and tokens of a sequence read the same rows: one product
    q, q_rope = (part.flatten(1, 2).to(work) for part in (query, query_rope))
    scores = torch.bmm(q, c_kv.mT) + torch.bmm(q_rope, k_pe.mT)
    visible = torch.arange(c_kv.shape[1], device=seen.device) < seen.unsqueeze(-1)
    scores = (scores * scale).unflatten(1, (tokens, heads))
    scores = scores.masked_fill(~visible.unsqueeze(2), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0, lse).unsqueeze(-1))
    return torch.bmm(weights.flatten(1, 2), values).unflatten(1, (tokens, heads)), lse


def attend_ragged(
    query: Tensor,
    query_rope: Tensor,
    caches: Sequence[Tensor],
    tables: Tensor,
    lengths: Tensor,
    counts: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the same for queries ``[T, N, ..]``: the last ``counts[i]`` tokens of sequence i.

    Each token sees the positions up to its own.
    """
    out = query.new_zeros(query.shape, dtype=working_dtype(query.dtype))
    lse = out.new_full(query.shape[:2], float("-inf"))
    end = 0
    for length, table, count in zip(lengths, tables, counts, strict=False):
        if count:
            new = slice(end, end + count)
            seen = length - torch.arange(count - 1, -1, -1, device=lengths.device)
            queries = query[None, new], query_rope[None, new]
            results = attend(*queries, caches, table[None], seen[None], scale)
            out[new], lse[new] = (result.squeeze(0) for result in results)
        end += count
    return out, lse


def _rows(cache: Tensor, tables: Tensor, length: Tensor) -> Tensor:
    """Returns the rows of each sequence in order, ``[B, L, width]``, and zeros behind its end (a
    pool may hold NaN there).
    """
    block_size = cache.shape[-2]
    starts = torch.arange(tables.shape[1], device=tables.device) * block_size
    rows = cache[torch.where(starts < length, tables, 0)]
    if cache.dim() == 5:  # [B, blocks, 1, width / C0, BlockSize, C0]
        rows = rows_of_nz(rows)
    rows = rows.flatten(1, -2)
    beyond = torch.arange(rows.shape[1], device=rows.device) >= length
    return rows.masked_fill(beyond.unsqueeze(-1), 0)


def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Returns attention_out in the layout that the call names, and softmax_lse [T, N, 1] or [B, N,
    S, 1] float32.

    softmax_lse is empty without ``return_softmax_lse``. A sequence without keys gives 0, and -inf.

    Raises ContractError for what the operator does not take (this kernel takes float32 and float64
    too), and ValueError for sparse_mode 4 and 9, which this kernel lacks.
    """
    full = {**ATTENTION.defaults, "query": query, "key": key, "value": value, **options}
    dtypes = (*FLOATS, torch.float32, torch.float64)
    call = Attention(full, dtypes)
    call.check("A3", "latest", True)
    mode = full["sparse_mode"]
    if mode not in (NO_MASK, CAUSAL_AT_THE_END):
        raise ValueError(f"{ATTENTION.name}: the CPU kernel has no sparse_mode {mode}")
    axes, out_axes = call.axes, call.out_axes
    order = "TND" if "T" in axes else "BSND"

    def laid_out(tensor: Tensor, axes: str) -> Tensor:
        """Returns the tensor in the axes of ``order``, of which it may lack the last."""
        if axes.endswith("H"):
            tensor, axes = tensor.unflatten(-1, (full["num_query_heads"], -1)), order
        return tensor.permute([axes.index(axis) for axis in order[: tensor.dim()]])

    rope = full["query_rope"]
    q, q_rope = laid_out(query, axes), laid_out(rope, axes)
    if call.int8:
        factor = laid_out(full["dequant_scale_query"], axes.replace("H", "N").replace("D", ""))
        factor = factor.unsqueeze(-1) * full["dequant_scale_key"]
        q, q_rope = q * factor, q_rope * factor
    caches, tables = (key, value, full["key_rope"]), full["block_table"]
    scale = full["softmax_scale"]
    lengths, ends = torch.as_tensor(full["actual_seq_kvlen"]), full["actual_seq_qlen"]
    if order == "TND":
        ends = torch.as_tensor(ends)
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        out, lse = attend_ragged(q, q_rope, caches, tables, lengths, counts, scale)
    else:
        tokens = torch.arange(q.shape[1])
        # with a single token a sequence, the operator does not read their number
        new = torch.as_tensor([len(tokens)] if ends is None or len(tokens) == 1 else ends)
        new, seen = new.unsqueeze(1), lengths.unsqueeze(1)
        if mode == CAUSAL_AT_THE_END:
            seen = seen - (new - 1 - tokens)
        seen = seen.masked_fill(tokens >= new, 0).expand(len(q), -1)
        out, lse = attend(q, q_rope, caches, tables, seen, scale)
        lse = lse.transpose(1, 2)
    if call.int8:
        out = out * full["dequant_scale_value"]
    out = out.flatten(-2) if out_axes[-1] == "H" else out.permute([*map(order.index, out_axes)])
    lse = lse.unsqueeze(-1) if full["return_softmax_lse"] else lse.new_empty(0)
    return out.to(rope.dtype).contiguous(), lse.float().contiguous()
