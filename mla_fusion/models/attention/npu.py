"""The same attention as one `npu_fused_infer_attention_score_v2`, which knows MLA by its query_rope and key_rope.

One token a sequence is layout BSND without a mask; more are TND with the causal mask that ends at the sequence's end
(sparse_mode 3). Sizes and layouts are those of torch_npu's own documentation of the operator.

Lengths are host integers in the operator's schema. torchair has a second one, for GE graphs only, that takes
tensors; it is used where lengths are tensors and the function is being compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import lt
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import ContractError

HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
LATENT, ROPE = 512, 64
BLOCK_SIZES = (16, 128)
MOST_QUERIES = 16
CAUSAL_AT_THE_END = 3  # sparse_mode; its mask is always this wide
CAUSAL_WIDTH = 2048


def attend(
    query: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor | Sequence[int],
    scale: float,
    query_lens: Tensor | Sequence[int] | None,
    mask: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """out [T, N, 512] and lse [T, N], which is meaningless without ``return_lse``."""
    _check(query, query_rope, kv_cache, seq_lens, query_lens, mask)
    tokens, heads, latent = query.shape
    layout: dict[str, Any]
    if query_lens is None:
        operator, (kv_lens,) = _form(seq_lens)
        query, query_rope = query.unsqueeze(1), query_rope.unsqueeze(1)
        layout = {"input_layout": "BSND"}
    else:
        operator, (kv_lens, ends) = _form(seq_lens, _ends(query_lens))
        causal = {"sparse_mode": CAUSAL_AT_THE_END, "atten_mask": _forbidden(query.device)}
        layout = {"input_layout": "TND", "actual_seq_qlen": ends, **causal}
    # squeezed, not viewed: a view of dynamic sizes would read the cache's shape, and GE then keeps a copy of the cache
    key = kv_cache.squeeze(2)
    out, lse = operator(
        query.contiguous(),
        key,
        key,
        query_rope=query_rope.contiguous(),
        key_rope=kr_cache.squeeze(2),
        block_table=block_tables.to(torch.int32),
        block_size=kv_cache.shape[1],
        actual_seq_kvlen=kv_lens,
        num_query_heads=heads,
        num_key_value_heads=1,
        softmax_scale=scale,
        return_softmax_lse=return_lse,
        **layout,
    )
    out = out.reshape(tokens, heads, latent)
    if not return_lse:
        return out, lse
    lse = lse.reshape(tokens, heads)
    # of several tokens each sees at least itself
    return _without_empty(out, lse, seq_lens) if query_lens is None else (out, lse)


def _form(*lengths: Tensor | Sequence[int]) -> tuple[Any, list[Any]]:
    """The operator that takes these lengths, and the lengths as it takes them."""
    tensors = [isinstance(value, Tensor) for value in lengths]
    if any(tensors) and torch.compiler.is_compiling():
        from torchair.ops import npu_fused_infer_attention_score_v2

        device = next(value.device for value in lengths if isinstance(value, Tensor))
        return npu_fused_infer_attention_score_v2, [
            torch.as_tensor(value, dtype=torch.int64, device=device) for value in lengths
        ]
    operator = torch.ops.npu.npu_fused_infer_attention_score_v2
    return operator, [value.tolist() if isinstance(value, Tensor) else list(value) for value in lengths]


def _ends(query_lens: Tensor | Sequence[int]) -> Tensor | list[int]:
    """TND counts query tokens in prefix sums."""
    if isinstance(query_lens, Tensor):
        return query_lens.to(torch.int64).cumsum(0)
    return list(accumulate(query_lens))


def _forbidden(device: torch.device) -> Tensor:
    return torch.ones(CAUSAL_WIDTH, CAUSAL_WIDTH, dtype=torch.bool, device=device).triu(1)


def _without_empty(out: Tensor, lse: Tensor, seq_lens: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sequences of no key as merging expects them: what the kernel leaves there is not documented."""
    empty = (torch.as_tensor(seq_lens, device=out.device) == 0).unsqueeze(1)
    return out.masked_fill(empty.unsqueeze(2), 0), lse.masked_fill(empty, float("-inf"))


def _check(
    query: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor | Sequence[int],
    query_lens: Tensor | Sequence[int] | None,
    mask: Tensor | None,
) -> None:
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ContractError("attention.query", "query", "bfloat16 or float16 on an NPU", str(query.dtype))
    sizes = {
        "query": (query.shape[1], HEADS, "heads"),
        "query_rope": (query_rope.shape[2], (ROPE,), "columns"),
        "kv_cache": (kv_cache.shape[1], BLOCK_SIZES, "rows a block"),
    }
    for name, (size, allowed, what) in sizes.items():
        if size not in allowed:
            raise ContractError(
                f"attention.{name}", name, f"one of {', '.join(map(str, allowed))} {what} on an NPU", str(size)
            )
    if query.shape[2] != LATENT:
        raise ContractError("attention.query", "query", f"{LATENT} columns on an NPU", str(query.shape[2]))
    if mask is not None:
        raise ContractError("attention.mask", "mask", "None on an NPU: the kernel masks MLA by lengths", "a tensor")
    if query_lens is None or isinstance(query_lens, Tensor):
        return
    if max(query_lens, default=0) > MOST_QUERIES:
        longest = f"at most {MOST_QUERIES} tokens a sequence on an NPU (longer prompts: expand the latents)"
        raise ContractError("attention.query_lens", "query_lens", longest, str(max(query_lens)))
    if not isinstance(seq_lens, Tensor) and any(map(lt, seq_lens, query_lens)):
        enough = f"at least the new tokens {list(query_lens)} on an NPU"
        raise ContractError("attention.seq_lens", "seq_lens", enough, str(list(seq_lens)))
