"""CPU kernel of npu_fused_infer_attention_score_v2, in its form for absorbed MLA over pages.

Scores, softmax and both products are float32 (float64 for float64 tensors) and the result is
rounded once. The device also rounds the probabilities on the way, to the dtype of the query, or to
1/127 with an int8 query: results here are nearer to float64 than its are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta.attention import (
    ATTENTION,
    CAUSAL_AT_THE_END,
    FLOATS,
    NO_MASK,
    OP,
    axes_of,
)
from mla_fusion.meta.attention_check import check_attention
from mla_fusion.reference.numerics import working_dtype


def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """attention_out in the layout asked for, and softmax_lse [T, N, 1] or [B, N, S, 1] float32.

    softmax_lse is empty without ``return_softmax_lse``. A sequence of no key gives 0, and -inf.

    Raises ContractError for what the operator does not take (float32 and float64 are taken beside
    its dtypes), and ValueError for sparse_mode 4 and 9, which this kernel has not.
    """
    full = {**ATTENTION.defaults, "query": query, "key": key, "value": value, **options}
    wide = (*FLOATS, torch.float32, torch.float64)
    check_attention(OP, "A3", "latest", True, full, wide)
    mode, layout = full["sparse_mode"], full["input_layout"]
    if mode not in (NO_MASK, CAUSAL_AT_THE_END):
        raise ValueError(f"{ATTENTION.name}: the CPU kernel has no sparse_mode {mode}")
    heads, scale, int8 = full["num_query_heads"], full["softmax_scale"], query.dtype == torch.int8
    axes, out_axes = axes_of(layout)
    rope = full["query_rope"]
    work = working_dtype(rope.dtype)
    q, q_rope = (_by_sequence(tensor, axes, heads).to(work) for tensor in (query, rope))
    dequantised = torch.ones((), dtype=work)
    if int8:
        factor = full["dequant_scale_query"].unsqueeze(-1)
        factor = _by_sequence(factor, axes.replace("H", "ND"), heads) * full["dequant_scale_key"]
        q, q_rope, dequantised = q * factor, q_rope * factor, full["dequant_scale_value"].to(work)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    tokens, lengths = _places(full, len(q))
    for index, (new, length) in enumerate(zip(tokens, lengths, strict=True)):
        if not length:
            continue
        blocks = full["block_table"][index]
        c_kv, v, k_pe = (_rows(full[name], blocks, length).to(work) for name in _CACHES)
        scores = (q[new] @ c_kv.T + q_rope[new] @ k_pe.T) * scale  # [.., N, L], tokens first
        if mode == CAUSAL_AT_THE_END:
            count = len(scores)
            hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
            scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        out[new] = (torch.softmax(scores, -1) @ v) * dequantised
        lse[new] = torch.logsumexp(scores, -1)
    if "T" not in axes:
        b, s = (query.shape[axes.index(axis)] for axis in "BS")
        out, lse = out.unflatten(0, (b, s)), lse.unflatten(0, (b, s))
    order = "TND" if "T" in axes else "BSND"
    made = (
        out.flatten(-2)
        if out_axes.endswith("H")
        else out.permute([order.index(a) for a in out_axes])
    )
    lse = lse if "T" in axes else lse.transpose(1, 2)
    given = lse.unsqueeze(-1).float() if full["return_softmax_lse"] else lse.new_empty(0).float()
    return made.to(rope.dtype).contiguous(), given.contiguous()


_CACHES = ("key", "value", "key_rope")


def _by_sequence(tensor: Tensor, axes: str, heads: int) -> Tensor:
    """``[T, N, width]``, the tokens of one sequence behind those of another."""
    if axes.endswith("H"):
        tensor, axes = tensor.unflatten(-1, (heads, -1)), "BSND"
    if axes == "TND":
        return tensor
    return tensor.permute([axes.index(axis) for axis in "BSND"]).flatten(0, 1)


def _places(full: dict[str, Any], rows: int) -> tuple[list[slice], list[int]]:
    """The tokens of each sequence among all rows, and how many rows it has in the caches."""
    sequences, ends = len(full["block_table"]), full["actual_seq_qlen"]
    lengths = [int(length) for length in full["actual_seq_kvlen"]]
    lengths = lengths * sequences if len(lengths) == 1 else lengths
    if "T" in full["input_layout"]:
        return [slice(int(a), int(b)) for a, b in zip([0, *ends], ends, strict=False)], lengths
    each = rows // sequences
    counts = [each] * sequences if ends is None or each == 1 else [int(end) for end in ends]
    counts = counts * sequences if len(counts) == 1 else counts
    starts = range(0, rows, each)
    return [slice(a, a + n) for a, n in zip(starts, counts, strict=True)], lengths


def _rows(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """``[length, width]``: the first rows of a sequence."""
    block_size = cache.shape[-2]
    taken = cache[blocks[: -(-length // block_size)].long()]
    if cache.dim() == 5:  # [blocks, 1, width / C0, BlockSize, C0]
        taken = taken.transpose(2, 3).flatten(3)
    return taken.reshape(-1, taken.shape[-1])[:length]
