"""The same attention as one `npu_fused_infer_attention_score_v2`, which knows MLA by its query_rope
and key_rope.

One token a sequence is layout BSND without a mask; more are TND with the causal mask that ends at
the sequence's end (sparse_mode 3). Results with heads first are TND_NTD, also of one token a
sequence. Every call is checked against the operator's contract in `mla_fusion.meta` first.

Lengths are host integers in the operator's schema. torchair has a second one, for GE graphs only,
that takes tensors; it is used where lengths are tensors and the function is being compiled.
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

_DEFAULTS = ATTENTION.defaults
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
    """out [T, N, 512], or [N, T, 512], and lse [T, N], which means nothing without ``return_lse``.

    Heads that the operator does not take in their number are padded to the next, and cut off again.
    """
    tokens, heads, latent = query.shape
    more = padded_heads(heads) - heads
    of_heads = {"query": query, "query_rope": query_rope}
    if query_scale is not None:
        of_heads["dequant_scale_query"] = query_scale.reshape(tokens, heads, 1)
    if more:
        of_heads = {name: pad(tensor, (0, 0, 0, more)) for name, tensor in of_heads.items()}
    layout: dict[str, Any]
    if query_lens is None and not heads_first:
        operator, (kv_lens,) = _form(seq_lens)
        of_heads = {name: tensor.unsqueeze(1) for name, tensor in of_heads.items()}
        layout = {"input_layout": "BSND"}
    else:
        operator, (kv_lens, ends) = _form(seq_lens, _ends(query_lens, seq_lens, tokens))
        causal = {"sparse_mode": CAUSAL_AT_THE_END, "atten_mask": _forbidden(query.device)}
        ragged = "TND_NTD" if heads_first else "TND"
        layout = {"input_layout": ragged, "actual_seq_qlen": ends, **causal}
    # squeezed, not viewed: a view of dynamic sizes would read the cache's shape, and GE then keeps
    # a copy of the cache
    key, key_rope = (c.squeeze(2) if c.dim() == 4 else c for c in (kv_cache, kr_cache))
    options = {
        "query_rope": of_heads["query_rope"].contiguous(),
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
        options["dequant_scale_query"] = of_heads["dequant_scale_query"].squeeze(-1)
        options["dequant_scale_key"] = options["dequant_scale_value"] = kv_scale.reshape(1)
        options["query_quant_mode"] = PER_TOKEN_AND_HEAD
    inputs = {"query": of_heads["query"].contiguous(), "key": key, "value": key}
    # the newest tables: which release runs a function is not known while it is traced
    Attention({**_DEFAULTS, **inputs, **options}).check("A3", "latest", False)
    out, lse = operator(*inputs.values(), **options)
    out = out if heads_first else out.reshape(tokens, heads + more, latent)
    out = out.narrow(0 if heads_first else 1, 0, heads) if more else out
    if not return_lse:
        return out, lse
    lse = lse.reshape(tokens, heads + more)
    lse = lse[:, :heads] if more else lse
    # of several tokens each sees at least itself
    return (out, lse) if query_lens is not None else _without_empty(out, lse, seq_lens, heads_first)


def _form(*lengths: Lengths) -> tuple[Any, list[Any]]:
    """The operator that takes these lengths, and the lengths as it takes them."""
    tensors = [isinstance(value, Tensor) for value in lengths]
    if any(tensors) and torch.compiler.is_compiling():
        from torchair.ops import npu_fused_infer_attention_score_v2

        device = next(value.device for value in lengths if isinstance(value, Tensor))
        return npu_fused_infer_attention_score_v2, [
            torch.as_tensor(value, dtype=torch.int64, device=device) for value in lengths
        ]
    operator = torch.ops.npu.npu_fused_infer_attention_score_v2
    return operator, [
        value.tolist() if isinstance(value, Tensor) else list(value) for value in lengths
    ]


def _ends(query_lens: Lengths | None, seq_lens: Lengths, tokens: int) -> Tensor | list[int]:
    """TND counts query tokens in prefix sums."""
    if isinstance(query_lens, Tensor):
        return query_lens.to(torch.int64).cumsum(0)
    if query_lens is not None:
        return list(accumulate(query_lens))
    if isinstance(seq_lens, Tensor):
        return torch.arange(1, tokens + 1, device=seq_lens.device)
    return list(range(1, tokens + 1))


def _forbidden(device: torch.device) -> Tensor:
    return torch.ones(MASK_WIDTH, MASK_WIDTH, dtype=torch.bool, device=device).triu(1)


def _without_empty(
    out: Tensor, lse: Tensor, seq_lens: Lengths, heads_first: bool
) -> tuple[Tensor, Tensor]:
    """Sequences of no key as on a CPU: what the kernel leaves there is not
    documented.
    """
    empty = (torch.as_tensor(seq_lens, device=out.device) == 0).unsqueeze(1)
    out = out.masked_fill(empty if heads_first else empty.unsqueeze(2), 0)
    return out, lse.masked_fill(empty, float("-inf"))
