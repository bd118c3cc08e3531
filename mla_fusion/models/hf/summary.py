"""What ``optimize`` did to a model, and which of its attentions the fused prologue could serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from mla_fusion.models.hf.asked import Answer
from mla_fusion.models.hf.latent_attention import LatentDims


@dataclass(frozen=True)
class Converted:
    """One attention in absorbed form.

    ask        the pass, when its answer is first wanted (half a second for each kind of attention)
    kernel     "" where the pass fuses its prologue in a compiled decode step in bfloat16, otherwise
               ``code: message``
    placement  where the kernel writes then: "in place", or "staged"
    """

    name: str
    layer: int
    heads: int
    dims: LatentDims
    itemsize: int
    ask: Callable[[], Answer] = field(repr=False, compare=False)

    @property
    def kernel(self) -> str:
        return self.ask().kernel

    @property
    def placement(self) -> str:
        return self.ask().placement

    def to_dict(self) -> dict[str, Any]:
        known = {
            name: getattr(self, name)
            for name in ("name", "layer", "heads", "itemsize", "kernel", "placement")
        }
        return known | {"dims": asdict(self.dims)}

    @property
    def bytes_per_token(self) -> int:
        return self.dims.cached * self.itemsize

    @property
    def expanded_bytes_per_token(self) -> int:
        return self.dims.expanded(self.heads) * self.itemsize


@dataclass(frozen=True)
class Skipped:
    """One attention that was left alone, with a code of ``refusal.CODES``."""

    name: str
    code: str
    message: str


@dataclass(frozen=True)
class Summary:
    """What ``optimize`` did. Bytes are those of one token over all converted layers."""

    converted: tuple[Converted, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def converts(self, layer: int) -> bool:
        """Is the attention of this layer converted?"""
        return any(item.layer == layer for item in self.converted)

    @property
    def bytes_per_token(self) -> int:
        """Latent and rotated key of every converted layer."""
        return sum(item.bytes_per_token for item in self.converted)

    @property
    def expanded_bytes_per_token(self) -> int:
        """The same where keys and values of all heads are cached, as ``transformers`` did up to
        5.14.
        """
        return sum(item.expanded_bytes_per_token for item in self.converted)

    @property
    def fusable(self) -> int:
        """Converted layers whose prologue is fused in a compiled decode step in bfloat16."""
        return sum(not item.kernel for item in self.converted)

    def to_dict(self) -> dict[str, Any]:
        return {
            "converted": [item.to_dict() for item in self.converted],
            "skipped": [asdict(item) for item in self.skipped],
            "fusable": self.fusable,
            "bytes_per_token": self.bytes_per_token,
            "expanded_bytes_per_token": self.expanded_bytes_per_token,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        total = len(self.converted) + len(self.skipped)
        lines = [f"optimized {len(self.converted)} of {total} attentions"]
        for (dims, heads, kernel), items in _grouped(
            self.converted, lambda item: (item.dims, item.heads, item.kernel)
        ):
            shape = f"N {heads}, D {dims.nope}, Dr {dims.rope}, Dv {dims.value}, Hckv {dims.rank}"
            verdict = f"not fusable: {kernel}" if kernel else "fusable in bfloat16"
            verdict += ", staged" if items[0].placement == "staged" else ""
            lines.append(f"  + {_span(items)}: {shape}; {verdict}")
        for (code, message), items in _grouped(
            self.skipped, lambda item: (item.code, item.message)
        ):
            lines.append(f"  - {_span(items)}: [{code}] {message}")
        if self.converted:
            ratio = self.expanded_bytes_per_token / self.bytes_per_token
            lines.append(
                f"  cache: {self.bytes_per_token:,} bytes a token"
                f" ({self.expanded_bytes_per_token:,} with keys and values of all heads, "
                f"{ratio:.1f} x)"
            )
        return "\n".join(lines)


def _grouped(items: Iterable[Any], key: Any) -> Iterable[tuple[Any, list[Any]]]:
    return ((found, list(group)) for found, group in groupby(items, key))


def _span(items: list[Any]) -> str:
    first, last = items[0].name, items[-1].name
    return first if len(items) == 1 else f"{first} to {last} ({len(items)})"
