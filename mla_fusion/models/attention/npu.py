"""Attention over paged latents as one `npu_fused_infer_attention_score_v2`, which takes MLA's
query_rope and key_rope.

One token a sequence is layout BSND without a mask. Several tokens are TND with the causal mask that
ends at the sequence's end (sparse_mode 3). If results have heads first, the layout is TND_NTD for
any number of tokens. Every call is first checked against the operator's contract in
`mla_fusion.meta`.

Lengths are host integers in the operator's schema. torchair has a second operator, for GE graphs
only, whose lengths are tensors. It is called if lengths are tensors and the function is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_fusion.meta.attention import (
    ATTENTION,
    CAUSAL_AT_THE_END,
    MASK_WIDTH,
    PER_TOKEN_AND_HEAD,
    Attention,
    padded_heads,
)

Lengths = Tensor | Sequence[int]


def attend(
    query: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Lengths,
    query_lens: Lengths | None,
    scale: float,
    *,
    return_lse: bool = False,
    query_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns out [T, N, 512] or [N, T, 512], and lse [T, N]; without ``return_lse`` ignore lse.

    If the operator does not take the number of heads, the heads are padded, and cut afterwards.
    """
    tokens, heads, latent = query.shape
    more = padded_heads(heads) - heads
    by_head = {"query": query, "query_rope": query_rope}
    if query_scale is not None:
        by_head["dequant_scale_query"] = query_scale.reshape(tokens, heads, 1)
    if more:
        by_head = {name: pad(tensor, (0, 0, 0, more)) for name, tensor in by_head.items()}
    layout: dict[str, Any]
    if query_lens is None and not heads_first:
        operator, (kv_lens,) = _form(seq_lens)
        by_head = {name: tensor.unsqueeze(1) for name, tensor in by_head.items()}
        layout = {"input_layout": "BSND"}
    else:
        operator, (kv_lens, ends) = _form(seq_lens, _ends(query_lens, seq_lens, tokens))
        mask = torch.ones(MASK_WIDTH, MASK_WIDTH, dtype=torch.bool, device=query.device).triu(1)
        layout = {
            "input_layout": "TND_NTD" if heads_first else "TND",
            "actual_seq_qlen": ends,
            "sparse_mode": CAUSAL_AT_THE_END,
            "atten_mask": mask,
        }
    # squeezed, not viewed: a view of dynamic sizes would read the cache's shape, and GE then keeps
    # a copy of the cache
    key, key_rope = (c.squeeze(2) if c.dim() == 4 else c for c in (kv_cache, kr_cache))
    options = {
        "query_rope": by_head["query_rope"].contiguous(),
        "key_rope": key_rope,
        "block_table": block_tables.to(torch.int32),
        "block_size": key.shape[3] if key.dim() == 5 else key.shape[1],
        "actual_seq_kvlen": kv_lens,
        "num_query_heads": heads + more,
        "num_key_value_heads": 1,
        "softmax_scale": scale,
        "return_softmax_lse": return_lse,
        **layout,
    }
    if kv_scale is not None:
        options["dequant_scale_query"] = by_head["dequant_scale_query"].squeeze(-1)
        options["dequant_scale_key"] = options["dequant_scale_value"] = kv_scale.reshape(1)
        options["query_quant_mode"] = PER_TOKEN_AND_HEAD
    inputs = {"query": by_head["query"].contiguous(), "key": key, "value": key}
    # the newest tables: the release that will run a function is unknown while it is traced
    Attention({**ATTENTION.defaults, **inputs, **options}).check("A3", "latest", False)
    out, lse = operator(*inputs.values(), **options)
    out = out if heads_first else out.reshape(tokens, heads + more, latent)
    lse = lse.reshape(tokens, heads + more) if return_lse else lse
    if more:
        out = out.narrow(0 if heads_first else 1, 0, heads)
        lse = lse[:, :heads] if return_lse else lse
    if not return_lse or query_lens is not None:  # each of several tokens sees at least itself
        return out, lse
    # The kernel's results for a sequence of no key are not documented: they become those of a CPU.
    empty = (torch.as_tensor(seq_lens, device=out.device) == 0).unsqueeze(1)
    out = out.masked_fill(empty if heads_first else empty.unsqueeze(2), 0)
    return out, lse.masked_fill(empty, float("-inf"))


def _form(*lengths: Lengths) -> tuple[Any, list[Any]]:
    """Returns the operator that takes these lengths, and the lengths in its form."""
    devices = [value.device for value in lengths if isinstance(value, Tensor)]
    if devices and torch.compiler.is_compiling():
        from torchair.ops import npu_fused_infer_attention_score_v2

        return npu_fused_infer_attention_score_v2, [
            torch.as_tensor(value, dtype=torch.int64, device=devices[0]) for value in lengths
        ]
    return torch.ops.npu.npu_fused_infer_attention_score_v2, [
        value.tolist() if isinstance(value, Tensor) else list(value) for value in lengths
    ]


def _ends(query_lens: Lengths | None, seq_lens: Lengths, tokens: int) -> Tensor | list[int]:
    """Returns the numbers of query tokens as TND counts them: in prefix sums."""
    if isinstance(query_lens, Tensor):
        return query_lens.to(torch.int64).cumsum(0)
    if query_lens is not None:
        return list(accumulate(query_lens))
    if isinstance(seq_lens, Tensor):
        return torch.arange(1, tokens + 1, device=seq_lens.device)
    return list(range(1, tokens + 1))
