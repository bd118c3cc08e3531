"""Attention over the tokens that an indexer has picked (DSA), as one `npu_sparse_flash_attention`
on an NPU.

Sizes are those of torch_npu's documentation of the operator: heads a power of two up to 128,
latents 512 wide, rotated keys 64, bfloat16 or float16. Of each token's picks those that stand for
nothing are -1, and last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion import compat
from mla_fusion.meta.attention import HEADS, LATENT, ROPE

OPERATOR = "npu::npu_sparse_flash_attention"
ABSORBED = 2  # attention_mode: keys and values are latents, and rotated parts come apart
NO_MASK = 0  # sparse_mode: the picks alone say what is attended


def is_there() -> bool:
    """Has the torch_npu that is installed the operator, in the form that knows latents?"""
    return compat.has_argument(OPERATOR, "attention_mode")


def takes(heads: int, latent: int, rope: int) -> bool:
    return heads in HEADS and (latent, rope) == (LATENT, ROPE)


def runs_on(tensor: Tensor) -> bool:
    return tensor.device.type == "npu" and tensor.dtype in (torch.bfloat16, torch.float16)


def attend(
    query: Tensor, query_rope: Tensor, c_kv: Tensor, k_pe: Tensor, picks: Tensor, scale: float
) -> Tensor:
    """``[B, S, N, 512]`` of queries ``[B, S, N, 512]`` and ``[B, S, N, 64]``, latents ``[B, L,
    512]`` and keys ``[B, L, 64]``, and int32 ``picks`` ``[B, S, k]``."""
    key = c_kv.unsqueeze(2)
    out: Tensor = torch.ops.npu.npu_sparse_flash_attention(
        query,
        key,
        key,
        picks.unsqueeze(2),
        scale,
        query_rope=query_rope,
        key_rope=k_pe.unsqueeze(2),
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="BSND",
        sparse_mode=NO_MASK,
        attention_mode=ABSORBED,
    )[0]
    return out


def allowed(picks: Tensor, mask: Tensor | None) -> Tensor:
    """The picks ``[B, S, k]`` with -1 for those that a mask ``[B or 1, 1, S, L]``, boolean or
    additive, forbids.

    They come best first, and what the mask forbids had the lowest score: so these are last.
    """
    if mask is None:
        return picks
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = seen[:, 0].expand(picks.shape[0], -1, -1).gather(-1, picks.long())
    return torch.where(seen, picks, -1)
