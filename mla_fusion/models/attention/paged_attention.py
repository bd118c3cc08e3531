"""Computes the attention of absorbed MLA over the paged latent cache, with its log-sum-exp.

    out = softmax(scale * (query . c_kv + query_rope . k_pe)) c_kv

On device npu this is one `npu_fused_infer_attention_score_v2` (see `models/attention/npu.py`);
elsewhere the PyTorch code of `reference/paged_attention.py`, whose results the kernel should
return. The device decides, so that a compiled function holds one of them and no graph break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from mla_fusion.meta import ContractError
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.prolog import Operator
from mla_fusion.models.attention import npu
from mla_fusion.models.attention.npu import Lengths
from mla_fusion.reference.paged_attention import attend, attend_ragged


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
    """Computes the attention of T tokens of B sequences over their first ``seq_lens`` positions.

    query         [T, N, Hckv], query_rope [T, N, Dr]: W_uk is already multiplied in
    kv_cache      [BlockNum, BlockSize, 1, Hckv], kr_cache [BlockNum, BlockSize, 1, Dr], new rows
                  already written; or both NZ, [BlockNum, 1, width / C0, BlockSize, C0], where C0
                  elements are 32 bytes
    block_tables  int [B, blocks]; entries behind a sequence's last block are not read
    seq_lens      int [B], new tokens counted, at most blocks * BlockSize
    query_lens    int [B] that sum to T: the tokens of a sequence are its last ones, and each sees
                  the positions up to its own. None: one token a sequence, T = B
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
    query_heads = query.shape[1]
    if heads is not None and not 1 <= heads <= query_heads:
        _refuse("heads", f"1 to {query_heads}, the heads of query", heads)
    if out_layout not in ("TND", "NTD"):
        _refuse("out_layout", "'TND' or 'NTD'", repr(out_layout))
    is_ntd = out_layout == "NTD"
    if query.device.type == "npu":
        out, lse = npu.attend(
            *(query, query_rope, kv_cache, kr_cache, block_tables, seq_lens, query_lens),
            scale,
            return_lse=return_lse,
            query_scale=query_scale,
            kv_scale=kv_scale,
            heads_first=is_ntd,
        )
    else:
        dtype = query_rope.dtype
        if query_scale is not None and kv_scale is not None:
            factor = query_scale.reshape(*query.shape[:2], 1) * kv_scale
            query, query_rope = query * factor, query_rope * factor
        kv, kr = (cache.squeeze(2) if cache.dim() == 4 else cache for cache in (kv_cache, kr_cache))
        parts = query, query_rope, (kv, kv, kr)
        out, lse = _attend_on_cpu(*parts, block_tables, seq_lens, query_lens, scale)
        out = (out if kv_scale is None else out * kv_scale).to(dtype)
        out = out.transpose(0, 1).contiguous() if is_ntd else out
    if heads is not None and heads < query_heads:
        out = out.narrow(0 if is_ntd else 1, 0, heads)
        lse = lse[:, :heads] if return_lse else lse
    return (out, lse) if return_lse else out


def _attend_on_cpu(
    query: Tensor,
    query_rope: Tensor,
    caches: Sequence[Tensor],
    tables: Tensor,
    seq_lens: Lengths,
    query_lens: Lengths | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns out [T, N, Hckv] and lse [T, N]; ``caches`` are key, value and key_rope."""
    visible = torch.as_tensor(seq_lens, device=query.device)
    if isinstance(query_lens, Tensor) and torch.compiler.is_compiling():
        # lengths unknown while tracing: query_heads token as a sequence of its own
        owner = torch.repeat_interleave(query_lens, output_size=query.shape[0])
        behind = query_lens.cumsum(0)[owner] - 1 - torch.arange(len(owner), device=query.device)
        tables, visible = tables[owner], visible[owner] - behind
    elif query_lens is not None:
        counts = query_lens.tolist() if isinstance(query_lens, Tensor) else list(query_lens)
        if sum(counts) != len(query):
            _refuse("query_lens", f"lengths that sum to the {len(query)} tokens", sum(counts))
        return attend_ragged(query, query_rope, caches, tables, visible, counts, scale)
    parts = query.unsqueeze(1), query_rope.unsqueeze(1)
    out, lse = attend(*parts, caches, tables, visible.unsqueeze(1), scale)
    return out.squeeze(1), lse.squeeze(1)


_ARGUMENTS = Operator(
    "mla_paged_attention(Tensor query, Tensor query_rope, Tensor kv_cache, Tensor kr_cache, "
    "Tensor block_tables, *, Tensor? query_scale=None, Tensor? kv_scale=None) "
    "-> (Tensor, Tensor)",
    "",
    ("out", "lse"),
)


class _Call(Binder):
    """One call. The codes of its refusals name only the argument."""

    def refuse(
        self, code: str, argument: str, expected: object, found: object, source: str = ""
    ) -> NoReturn:
        _refuse(argument, f"{expected}", found)


def _check(seq_lens: Lengths, query_lens: Lengths | None, tensors: dict[str, Any]) -> None:
    call = _Call(_ARGUMENTS, "", tensors)
    call.sizes("query", "T N D")
    call.sizes("query_rope", "T N R")
    call.sizes("block_tables", "B Blocks")
    is_nz = tensors["kv_cache"].dim() == 5
    kind, cache_kind = tensors["query"].dtype, tensors["kv_cache"].dtype
    for name, axis in (("kv_cache", "D"), ("kr_cache", "R")):
        c0 = 32 // tensors[name].element_size()
        nd = f"BlockNum BlockSize 1 {axis}"
        call.sizes(name, f"BlockNum 1 {axis}/{c0} BlockSize {c0}" if is_nz else nd)
    tokens, sequences = call.dims["T"], call.dims["B"]
    for name, lengths in (("seq_lens", seq_lens), ("query_lens", query_lens)):
        if lengths is not None and len(lengths) != sequences:
            _refuse(name, f"{sequences} entries, one a row of block_tables", len(lengths))
    if query_lens is None and tokens != sequences:
        expected = f"lengths of the {sequences} sequences, since there are {tokens} tokens"
        _refuse("query_lens", expected, None)
    is_int8 = kind == torch.int8
    if (cache_kind == torch.int8) != is_int8:
        _refuse("kv_cache", f"{kind}, as query", cache_kind)
    for name, *shapes in (("query_scale", "T N", "T N 1"), ("kv_scale", "1", "")):
        call.presence(name, is_int8, f"with a query of {kind}")
        if is_int8:
            ranks = {len(shape.split()): shape for shape in shapes}
            call.tensor(name, ranks.get(tensors[name].dim(), shapes[0]), torch.float32)


def _refuse(argument: str, expected: str, found: object) -> NoReturn:
    raise ContractError(f"attention.{argument}", argument, expected, str(found))
