"""Attention of absorbed MLA over the paged latent cache, with its log-sum-exp.

    out = softmax(scale * (query . c_kv + query_rope . k_pe)) c_kv

On device npu this is one `npu_fused_infer_attention_score_v2` (see `models/attention/npu.py`);
elsewhere the plain PyTorch below, which is also the reference that says what the kernel should
give. The device decides, so that a compiled function holds the one or the other and never a graph
break.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from mla_fusion.meta import ContractError
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.prolog import Operator
from mla_fusion.models.attention import npu
from mla_fusion.models.attention.npu import Batch, Lengths


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
    return_lse: bool = False,
    query_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    heads: int | None = None,
    out_layout: str = "TND",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T tokens of B sequences over their first ``seq_lens`` cached positions.

    query         [T, N, Hckv], query_rope [T, N, Dr]: W_uk is already multiplied in
    kv_cache      [BlockNum, BlockSize, 1, Hckv], kr_cache [BlockNum, BlockSize, 1, Dr], new rows
                  already written; or both NZ, [BlockNum, 1, width / C0, BlockSize, C0], where C0
                  elements are 32 bytes
    block_tables  int [B, blocks]; entries behind a sequence's last block are not read
    seq_lens      int [B], new tokens counted, at most blocks * BlockSize
    query_lens    int [B] that sum to T: the tokens of a sequence are its last ones, and each sees
                  what stands up to itself. None: one token a sequence, T = B
    query_scale   float32 [T, N] or [T, N, 1], with an int8 query and an int8 kv_cache alone: the
                  dequant_scale_q_nope of npu_mla_prolog_v3 with kv_cache_quant_mode 1. query_rope
                  is the prologue's too, which has divided it by query_scale and kv_scale
    kv_scale      float32 [1], what an int8 kv_cache is multiplied by: 1 / quant_scale_ckv
    heads         the number of the model's heads, where the query has more: out and lse are cut to
                  them. None: all heads of the query
    out_layout    "TND"; or "NTD", heads first: the product with W_uv then needs no transpose

    Returns out [T, N, Hckv], or [N, T, Hckv], in the dtype of ``query_rope`` and, with
    ``return_lse``, the natural logarithm of sum(exp(scaled scores)), [T, N] float32. A token that
    sees nothing has out 0 and lse -inf. Products and softmax are float32 (float64 inputs stay
    float64, lse too).

    On an NPU the operator takes 1, 2, 4, .. 128 heads. For other numbers this function copies the
    query into one with heads of zeros, and cuts them off. To save both copies, pad W_uq and W_uk
    once to ``padded_heads(N)`` heads: the prologue then gives the operator's number. Pad W_uv too
    to save the cut, or give ``heads``. (Give ``heads`` with an int8 query: the prologue divides by
    the scale of a head, and that of a head of zeros is 0.)

    Lengths may be tensors or host integers. On an NPU the kernel takes host integers when called
    eagerly or from captured ACL graphs (eagerly a tensor costs a synchronisation) and tensors in
    torchair's GE graphs. Its documents allow more than 16 tokens a sequence after CANN 9.1.

    Raises ContractError ``attention.<argument>`` for arguments that do not belong together and, on
    an NPU, what ``mla_fusion.meta.check("npu_fused_infer_attention_score_v2", ..)`` raises for a
    call that the operator does not take.
    """
    tensors = query, query_rope, kv_cache, kr_cache, block_tables, query_scale, kv_scale
    _check(seq_lens, query_lens, dict(zip(_ARGUMENTS.ge_inputs, tensors, strict=True)))
    if heads is not None and not 1 <= heads <= query.shape[1]:
        _refuse("heads", f"1 to {query.shape[1]}, the heads of query", heads)
    if out_layout not in ("TND", "NTD"):
        _refuse("out_layout", "'TND' or 'NTD'", repr(out_layout))
    by_head = 0 if out_layout == "NTD" else 1
    batch = Batch(query, query_rope, kv_cache, kr_cache, block_tables, seq_lens, query_lens)
    if query.device.type == "npu":
        out, lse = npu.attend(
            batch,
            scale,
            return_lse=return_lse,
            query_scale=query_scale,
            kv_scale=kv_scale,
            heads_first=by_head == 0,
        )
    else:
        if query_scale is not None and kv_scale is not None:
            factor = query_scale.reshape(*query.shape[:2], 1) * kv_scale
            batch = Batch(query * factor, query_rope * factor, *batch[2:])
        out, lse = _reference(batch, scale)
        out = (out if kv_scale is None else out * kv_scale).to(query_rope.dtype)
        out = out if by_head else out.transpose(0, 1).contiguous()
    if heads is not None and heads < query.shape[1]:
        out = out.narrow(by_head, 0, heads)
        lse = lse[:, :heads] if return_lse else lse
    return (out, lse) if return_lse else out


def _reference(batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
    query, query_rope, kv_cache, kr_cache, block_tables, seq_lens, query_lens = batch
    lengths = torch.as_tensor(seq_lens, device=query.device)

    def attended(
        axis: int, tables: Tensor, seen: Tensor, tokens: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Of tokens of one sequence (axis 0), or of a sequence each (1); each sees so many
        positions, the last token of a sequence all.
        """
        q, q_rope, seen = (x.unsqueeze(axis) for x in (query[tokens], query_rope[tokens], seen))
        c_kv, k_pe = (_rows(cache, tables, seen[:, -1]) for cache in (kv_cache, kr_cache))
        visible = torch.arange(c_kv.shape[1], device=c_kv.device) < seen.unsqueeze(-1)
        out, lse = _attend(q, q_rope, c_kv, k_pe, visible, scale)
        return out.squeeze(axis), lse.squeeze(axis)

    if query_lens is None:
        return attended(1, block_tables, lengths)
    if isinstance(query_lens, Tensor) and torch.compiler.is_compiling():
        # lengths unknown while tracing: every token as a sequence of its own
        owner = torch.repeat_interleave(query_lens, output_size=query.shape[0])
        behind = query_lens.cumsum(0)[owner] - 1 - torch.arange(query.shape[0], device=query.device)
        return attended(1, block_tables[owner], lengths[owner] - behind)
    counts = query_lens.tolist() if isinstance(query_lens, Tensor) else list(query_lens)
    if sum(counts) != query.shape[0]:
        _refuse("query_lens", f"lengths that sum to the {query.shape[0]} tokens", sum(counts))
    outs, lses = [query[:0]], [query.new_zeros(0, query.shape[1], dtype=_high(query))]
    for index, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        if count:
            one = slice(index, index + 1)
            seen = lengths[one] - torch.arange(count - 1, -1, -1, device=query.device)
            out, lse = attended(0, block_tables[one], seen, slice(end - count, end))
            outs.append(out)
            lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _rows(cache: Tensor, block_tables: Tensor, lengths: Tensor) -> Tensor:
    """[B, S, width]: the rows of each sequence in order, zeros behind its end (a pool may hold NaN
    there).
    """
    block_size = cache.shape[3] if cache.dim() == 5 else cache.shape[1]
    starts = torch.arange(block_tables.shape[1], device=cache.device) * block_size
    used = starts < lengths.unsqueeze(1)
    rows = cache[torch.where(used, block_tables, 0)]
    if cache.dim() == 5:  # NZ: [B, blocks, 1, width / C0, BlockSize, C0]
        rows = rows.transpose(3, 4).flatten(4, 5)
    rows = rows.flatten(1, 3)
    beyond = torch.arange(rows.shape[1], device=cache.device) >= lengths.unsqueeze(1)
    return rows.masked_fill(beyond.unsqueeze(-1), 0)


def _attend(
    query: Tensor, query_rope: Tensor, c_kv: Tensor, k_pe: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out [B, Q, N, Hckv] and lse [B, Q, N] of query [B, Q, N, Hckv] over c_kv [B, S, Hckv],
    visible [B, Q, S].
    """
    tokens, heads = query.shape[1:3]
    high = _high(query)
    keys = c_kv.to(high)
    scores = torch.bmm(query.flatten(1, 2).to(high), keys.transpose(1, 2))
    scores = scores + torch.bmm(query_rope.flatten(1, 2).to(high), k_pe.to(high).transpose(1, 2))
    scores = (
        (scores * scale)
        .unflatten(1, (tokens, heads))
        .masked_fill(~visible.unsqueeze(2), float("-inf"))
    )
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0, lse).unsqueeze(-1))
    out = torch.bmm(weights.flatten(1, 2), keys).unflatten(1, (tokens, heads))
    return out.to(query.dtype), lse


def _high(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


_ARGUMENTS = Operator(
    "mla_paged_attention(Tensor query, Tensor query_rope, Tensor kv_cache, Tensor kr_cache, "
    "Tensor block_tables, *, Tensor? query_scale=None, Tensor? kv_scale=None) "
    "-> (Tensor, Tensor)",
    "",
    ("out", "lse"),
)


class _Call(Binder):
    """One call; its codes name the argument alone."""

    def refuse(
        self, code: str, argument: str, expected: object, found: object, source: str = ""
    ) -> NoReturn:
        _refuse(argument, f"{expected}", found)


def _check(seq_lens: Lengths, query_lens: Lengths | None, full: dict[str, Any]) -> None:
    call = _Call(_ARGUMENTS, "", full)
    call.sizes("query", "T N D")
    call.sizes("query_rope", "T N R")
    call.sizes("block_tables", "B Blocks")
    nz, dims = full["kv_cache"].dim() == 5, call.dims
    for name, axis in (("kv_cache", "D"), ("kr_cache", "R")):
        c0 = 32 // full[name].element_size()
        dims[f"{axis}/C0"] = dims[axis] // c0
        nd = f"BlockNum BlockSize 1 {axis}"
        call.sizes(name, f"BlockNum 1 {axis}/C0 BlockSize {c0}" if nz else nd)
    sequences = dims["B"]
    for name, lengths in (("seq_lens", seq_lens), ("query_lens", query_lens)):
        if lengths is not None and len(lengths) != sequences:
            _refuse(name, f"{sequences} entries, one a row of block_tables", len(lengths))
    if query_lens is None and dims["T"] != sequences:
        expected = f"lengths of the {sequences} sequences, since there are {dims['T']} tokens"
        _refuse("query_lens", expected, None)
    int8, query = full["query"].dtype == torch.int8, f"with a query of {full['query'].dtype}"
    if (full["kv_cache"].dtype == torch.int8) != int8:
        _refuse("kv_cache", f"{full['query'].dtype}, as query", full["kv_cache"].dtype)
    for name, shapes in (("query_scale", {2: "T N", 3: "T N 1"}), ("kv_scale", {1: "1", 0: ""})):
        call.presence(name, int8, query)
        if int8:
            call.tensor(
                name, shapes.get(full[name].dim(), next(iter(shapes.values()))), torch.float32
            )


def _refuse(argument: str, expected: str, found: object) -> NoReturn:
    raise ContractError(f"attention.{argument}", argument, expected, str(found))
