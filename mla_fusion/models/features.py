"""Features in which releases of ``transformers`` differ.

A feature is looked up in the class or the code itself, never by a version. ``since`` is the first
release that has it, for messages that name what to install.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

OLDEST = "4.57"
"""The first release whose attentions call an attention function by the arguments that the
conversion exchanges.
"""

OWN_CLASS = (
    f"load the checkpoint with the class that transformers {OLDEST} or newer has for it, without "
    "remote code"
)


@dataclass(frozen=True)
class Feature:
    """A feature that a class or function of ``transformers`` may have.

    asked_of  what ``has`` takes
    without   what happens without it
    """

    since: str
    text: str
    asked_of: str
    without: str
    has: Callable[[Any], bool]

    @property
    def install(self) -> str:
        return f"pip install 'transformers>={self.since}'"


EXPANDS_AFTER_CACHE = Feature(
    "5.15",
    "an attention caches latents; its `expand_kv` makes keys and values of what is cached",
    "the attention's class",
    "its forward expands latents before it caches them, and the product with the up projection is "
    "put off",
    lambda kind: hasattr(kind, "expand_kv"),
)
TWO_WIDTHS = Feature(
    "5.0",
    "a static cache has keys and values of different widths",
    "the class of a static layer",
    "a `StaticCache` under an optimised model is refused (`cache.kind`); `MlaPagedCache` has a "
    "fixed size too",
    lambda layer: "value_states" in _parameters(layer.lazy_initialization),
)
COUNTS_POSITIONS = Feature(
    "5.4",
    "the model takes positions from a cache whose length is a tensor",
    "the model's forward",
    "a compiled step is given `cache_position`, as `generate()` and `DecodeStep` do",
    lambda forward: "cache_position" not in _parameters(forward),
)
FEATURES = (EXPANDS_AFTER_CACHE, TWO_WIDTHS, COUNTS_POSITIONS)


def advice(module: Any) -> str:
    """Returns what to install or to load so that an attention caches latents, in brackets; "" if
    neither would help.
    """
    if type(module).__module__.startswith("transformers."):
        from packaging.version import Version

        is_older = Version(metadata.version("transformers")) < Version(EXPANDS_AFTER_CACHE.since)
        return f" ({EXPANDS_AFTER_CACHE.install})" if is_older else ""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return f" ({OWN_CLASS})" if model_type in CONFIG_MAPPING_NAMES else ""


def _parameters(function: Callable[..., Any]) -> Any:
    return inspect.signature(inspect.unwrap(function)).parameters
