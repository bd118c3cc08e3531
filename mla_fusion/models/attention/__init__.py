"""Attention over the paged latent cache, and merging what was attended in parts."""

from mla_fusion.meta.attention import padded_heads
from mla_fusion.models.attention.merge import merge_state, merge_states
from mla_fusion.models.attention.paged_attention import mla_paged_attention

__all__ = ["merge_state", "merge_states", "mla_paged_attention", "padded_heads"]
