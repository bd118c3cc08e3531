"""What ``optimize`` did to a model, and which of its attentions the fused prologue could serve."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.meta import ContractError, check
from mla_fusion.models.hf.latent_attention import LatentDims
from mla_fusion.models.hf.latent_form import LatentForm


@dataclass(frozen=True)
class Converted:
    """One attention in absorbed form.

    kernel  "" where ``npu_mla_prolog_v3`` takes its dims in bfloat16, otherwise ``code: message``
    """

    name: str
    layer: int
    heads: int
    dims: LatentDims
    itemsize: int
    kernel: str = ""

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

    @property
    def bytes_per_token(self) -> int:
        """Latent and rotated key of every converted layer."""
        return sum(item.bytes_per_token for item in self.converted)

    @property
    def expanded_bytes_per_token(self) -> int:
        """The same where keys and values of all heads are cached, as ``transformers`` did up to 5.11."""
        return sum(item.expanded_bytes_per_token for item in self.converted)

    @property
    def fusable(self) -> int:
        """Converted layers whose dims the kernel takes in bfloat16."""
        return sum(not item.kernel for item in self.converted)

    def to_dict(self) -> dict[str, Any]:
        return {
            "converted": [asdict(item) for item in self.converted],
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
        for (dims, heads, kernel), items in _grouped(self.converted, lambda item: (item.dims, item.heads, item.kernel)):
            shape = f"N {heads}, D {dims.nope}, Dr {dims.rope}, Dv {dims.value}, Hckv {dims.rank}"
            verdict = f"not fusable: {kernel}" if kernel else "fusable in bfloat16"
            lines.append(f"  + {_span(items)}: {shape}; {verdict}")
        for (code, message), items in _grouped(self.skipped, lambda item: (item.code, item.message)):
            lines.append(f"  - {_span(items)}: [{code}] {message}")
        if self.converted:
            ratio = self.expanded_bytes_per_token / self.bytes_per_token
            lines.append(
                f"  cache: {self.bytes_per_token:,} bytes a token"
                f" ({self.expanded_bytes_per_token:,} with keys and values of all heads, {ratio:.1f} x)"
            )
        return "\n".join(lines)


def _grouped(items: Iterable[Any], key: Any) -> Iterable[tuple[Any, list[Any]]]:
    return ((found, list(group)) for found, group in groupby(items, key))


def _span(items: list[Any]) -> str:
    first, last = items[0].name, items[-1].name
    return first if len(items) == 1 else f"{first} to {last} ({len(items)})"


def kernel_objection(module: nn.Module, form: LatentForm) -> str:
    """What keeps the kernel from the prologue of this attention, as ``code: message``; "" for nothing."""
    dims, heads = form.dims, form.heads
    weights = {name: child.weight for name, child in module.named_children() if isinstance(child, nn.Linear)}
    hidden = next((w.shape[1] for w in weights.values() if w.shape[0] == dims.rank + dims.rope), None)
    ups = [w.shape[1] for name, w in weights.items() if w.shape[0] == heads * (dims.nope + dims.rope)]
    q_rank = next((width for width in ups if width != hidden), None)
    if hidden is None or q_rank is None:
        return "q_lora.absent: the query is projected from the hidden state directly"
    biased = [
        name
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) and child.bias is not None and child.weight.shape[1] != heads * dims.value
    ]
    if biased:
        return f"linear.bias: {', '.join(biased)} adds a bias"

    def like(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    try:
        check(
            "npu_mla_prolog_v3",
            path="graph",
            token_x=like(1, hidden),
            weight_dq=like(hidden, q_rank),
            weight_uq_qr=like(q_rank, heads * (dims.nope + dims.rope)),
            weight_uk=like(heads, dims.nope, dims.rank),
            weight_dkv_kr=like(hidden, dims.rank + dims.rope),
            rmsnorm_gamma_cq=like(q_rank),
            rmsnorm_gamma_ckv=like(dims.rank),
            rope_sin=like(1, dims.rope),
            rope_cos=like(1, dims.rope),
            kv_cache=like(1, 128, 1, dims.rank),
            kr_cache=like(1, 128, 1, dims.rope),
            cache_index=torch.empty(1, dtype=torch.int64, device="meta"),
        )
    except ContractError as error:
        return f"{error.code}: expected {error.expected}, found {error.found}"
    return ""
