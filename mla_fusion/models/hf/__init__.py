"""Hugging Face models: ``optimize`` and ``revert`` for loaded models, DeepSeek-V3 layers for
demonstration.

``MlaPagedCache`` is imported on first use, because it imports ``transformers``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion._autoload import cann_location
from mla_fusion.models.absorbed import AbsorbedDecoder
from mla_fusion.models.hf.generation import DecodeStep
from mla_fusion.models.hf.optimize import optimize, revert
from mla_fusion.models.hf.summary import Converted, Skipped, Summary
from mla_fusion.models.refusal import OptimizeError

if TYPE_CHECKING:
    from mla_fusion.models.hf.paged_cache import MlaPagedCache

__all__ = [
    "Converted",
    "DecodeStep",
    "MlaPagedCache",
    "OptimizeError",
    "Skipped",
    "Summary",
    "TransformersMissing",
    "modeling",
    "optimize",
    "random_decoder",
    "revert",
]


def __getattr__(name: str) -> Any:
    if name != "MlaPagedCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _without_broken_torch_npu():
        from mla_fusion.models.hf.paged_cache import MlaPagedCache
    return MlaPagedCache


class TransformersMissing(ImportError):
    """``transformers`` is absent or too old to hold DeepSeek-V3; the message says what to
    install.
    """


def modeling() -> Any:
    """Returns the module ``transformers.models.deepseek_v3.modeling_deepseek_v3``."""
    # nothing is ever downloaded: weights are random or the caller's
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with _without_broken_torch_npu():
            from transformers.models.deepseek_v3 import modeling_deepseek_v3
    except ImportError as error:
        raise TransformersMissing(
            f"Hugging Face's DeepSeek-V3 is needed: pip install 'mla-fusion[hf]' ({error})"
        ) from error
    return modeling_deepseek_v3


@contextlib.contextmanager
def _without_broken_torch_npu() -> Iterator[None]:
    """Hides a torch_npu without CANN, whose import fails: transformers imports any torch_npu."""
    is_broken = "torch_npu" not in sys.modules and cann_location() is None
    if is_broken:
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_broken:
            del sys.modules["torch_npu"]


def random_decoder(
    *, layers: int = 2, heads: int = 16, hidden: int = 7168, intermediate: int = 2048
) -> AbsorbedDecoder:
    """Returns absorbed DeepSeek-V3 decoder layers of Hugging Face, with random bfloat16 weights.

    Every dense layer keeps activations near unit scale, so that rounding errors are those of a
    trained model. The MLP is dense and narrow, because measurements are of the prologue.

    heads  the share of one tensor-parallel rank (128 / TP)
    """
    source = modeling()
    config = source.DeepseekV3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        first_k_dense_replace=layers,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        blocks = [source.DeepseekV3DecoderLayer(config, index) for index in range(layers)]
    generator = torch.Generator().manual_seed(0)
    for block in blocks:
        block.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
        for parameter in block.parameters():
            # unit variance through every linear layer, gains of norms around one
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    rotary_emb = source.DeepseekV3RotaryEmbedding(config)
    return AbsorbedDecoder(blocks, rotary_emb, source.apply_rotary_pos_emb_interleave).eval()
