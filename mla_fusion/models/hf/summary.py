"""The summary of ``optimize``: which attentions were converted, and which of them would fuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from mla_fusion.models.hf.latent_attention import LatentDims
from mla_fusion.report.text_tables import as_json


@dataclass(frozen=True)
class Converted:
    """An attention in absorbed form.

    ask        asks the pass, which takes half a second for each kind of attention
    kernel     "" if the pass fuses its prologue in a compiled decode step in bfloat16, otherwise
               ``code: message``
    placement  where the kernel then writes: "in place", or "staged"
    """

    name: str
    layer: int
    heads: int
    dims: LatentDims
    itemsize: int
    ask: Callable[[], tuple[str, str]] = field(repr=False, compare=False)

    @property
    def kernel(self) -> str:
        return self.ask()[0]

    @property
    def placement(self) -> str:
        return self.ask()[1]

    def __str__(self) -> str:
        dims = self.dims
        verdict = f"not fusable: {self.kernel}" if self.kernel else "fusable in bfloat16"
        return (
            f"N {self.heads}, D {dims.nope}, Dr {dims.rope}, Dv {dims.value}, Hckv {dims.rank}; "
            f"{verdict}{', staged' if self.placement == 'staged' else ''}"
        )


@dataclass(frozen=True)
class Skipped:
    """An attention that was left alone, with a code of ``OptimizeError``."""

    name: str
    code: str
    message: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


@dataclass(frozen=True)
class Summary:
    """The attentions that ``optimize`` converted, and those that it left alone."""

    converted: tuple[Converted, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def converts(self, layer: int) -> bool:
        """Returns True if the attention of this layer is converted."""
        return any(item.layer == layer for item in self.converted)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the latent and the rotated key, over all converted layers."""
        return sum((item.dims.rank + item.dims.rope) * item.itemsize for item in self.converted)

    @property
    def expanded_bytes_per_token(self) -> int:
        """Bytes of keys and values of all heads, which ``transformers`` cached up to 5.14."""
        return sum(
            item.heads * (item.dims.nope + item.dims.rope + item.dims.value) * item.itemsize
            for item in self.converted
        )

    @property
    def fusable(self) -> int:
        """Number of converted layers whose prologue fuses in a compiled decode step in bfloat16."""
        return sum(not item.kernel for item in self.converted)

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "layer", "heads", "itemsize", "kernel", "placement")
        return {
            "converted": [
                {name: getattr(item, name) for name in names} | {"dims": asdict(item.dims)}
                for item in self.converted
            ],
            "skipped": [asdict(item) for item in self.skipped],
            "fusable": self.fusable,
            "bytes_per_token": self.bytes_per_token,
            "expanded_bytes_per_token": self.expanded_bytes_per_token,
        }

    def to_json(self) -> str:
        return as_json(self.to_dict())

    def __str__(self) -> str:
        items: list[Converted | Skipped] = [*self.converted, *self.skipped]
        lines = [f"optimized {len(self.converted)} of {len(items)} attentions"]
        for text, group in groupby(items, str):
            first, *duplicates = group
            last = f" to {duplicates[-1].name} ({len(duplicates) + 1})" if duplicates else ""
            sign = "+" if isinstance(first, Converted) else "-"
            lines.append(f"  {sign} {first.name}{last}: {text}")
        if self.converted:
            size, expanded = self.bytes_per_token, self.expanded_bytes_per_token
            lines.append(
                f"  cache: {size:,} bytes a token ({expanded:,} with keys and values of all heads, "
                f"{expanded / size:.1f} x)"
            )
        return "\n".join(lines)
