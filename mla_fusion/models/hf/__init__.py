"""Hugging Face models: ``optimize`` and ``revert`` for loaded models.

``MlaPagedCache`` is imported on first use, because it imports ``transformers``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mla_fusion._autoload import cann_location
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
