"""What ``optimize`` did to a model, and which of its attentions the fused prologue could serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

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
    """One attention that was left alone, with a code of ``OptimizeError``."""

    name: str
    code: str
    message: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


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
        return sum((item.dims.rank + item.dims.rope) * item.itemsize for item in self.converted)

    @property
    def expanded_bytes_per_token(self) -> int:
        """The same where keys and values of all heads are cached, as ``transformers`` did up to
        5.14.
        """
        return sum(
            item.heads * (item.dims.nope + item.dims.rope + item.dims.value) * item.itemsize
            for item in self.converted
        )

    @property
    def fusable(self) -> int:
        """Converted layers whose prologue is fused in a compiled decode step in bfloat16."""
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
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        items: list[Converted | Skipped] = [*self.converted, *self.skipped]
        lines = [f"optimized {len(self.converted)} of {len(items)} attentions"]
        for text, group in groupby(items, str):
            first, *others = group
            last = f" to {others[-1].name} ({len(others) + 1})" if others else ""
            sign = "+" if isinstance(first, Converted) else "-"
            lines.append(f"  {sign} {first.name}{last}: {text}")
        if self.converted:
            bytes_now, before = self.bytes_per_token, self.expanded_bytes_per_token
            lines.append(
                f"  cache: {bytes_now:,} bytes a token ({before:,} with keys and values of all "
                f"heads, {before / bytes_now:.1f} x)"
            )
        return "\n".join(lines)
