"""Attention over the paged latent cache."""

from mla_fusion.meta.attention import padded_heads
from mla_fusion.models.attention.paged_attention import mla_paged_attention

__all__ = ["mla_paged_attention", "padded_heads"]
