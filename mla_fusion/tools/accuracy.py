"""How far the fused and the unfused bfloat16 runs are from the same maths in float64.

The reference is the model itself, copied to float64; it reads the bfloat16 rotary tables that both
runs read, so that no run is excused by an error in its inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mla_fusion.models.absorbed import AbsorbedDecoder, AbsorbedLayer
from mla_fusion.tools.by_hand.memory import same_bits
from mla_fusion.tools.paged import PagedBatch

# The kernel rounds at fewer places than the usual eager code, so its error should not be the larger
# one. Models that round at fewer places than usual are left a tenth.
LARGEST_RATIO = 1.1
# Which way a sum is rounded depends on the order of its terms, which differs between processors, so
# both errors are samples. An error is the root of the mean of n squared roundings: it scatters by 1
# / sqrt(2 n) of itself, the ratio of two by 1 / sqrt(n). So many of these deviations are chance.
DEVIATIONS = 4


_QUERY = ("query", "query_rope")
Compile = Callable[[nn.Module], Callable[..., Any]]


def largest_ratio(numbers: int, largest: float = LARGEST_RATIO) -> float:
    """By how much the fused error of so many numbers may exceed the unfused one: ``largest``, and
    chance.
    """
    return largest + DEVIATIONS / math.sqrt(numbers)


class _AsModule(nn.Module):
    """A method of a module, which is found so, and copied."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.owner = function, getattr(function, "__self__", None)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@dataclass(frozen=True)
class Measurement:
    """Relative L2 errors against float64 of one output.

    ``untouched``: are all other cache rows bit-identical? ``numbers``: how many numbers the output
    has.
    """

    where: str
    output: str
    unfused: float
    fused: float
    untouched: bool | None = None
    numbers: int = 1 << 20

    @property
    def ratio(self) -> float:
        if self.unfused == 0.0:
            return 1.0 if self.fused == 0.0 else float("inf")
        return self.fused / self.unfused

    @property
    def allowed(self) -> float:
        return largest_ratio(self.numbers)

    @property
    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong; empty where it passed."""
        error = (
            f"fused error is {self.ratio:.2f} x the unfused error ({self.unfused:.2e}), allowed "
            f"{self.allowed:.2f}"
        )
        rows = "rows that belong to nobody have changed"
        is_near = self.ratio <= self.allowed  # what is no number is not
        return [error] * (not is_near) + [rows] * (self.untouched is False)


class _RoundedTables(nn.Module):
    """The bfloat16 rotary tables, in the dtype of the caller."""

    rotary_emb: Any

    def __init__(self, rotary_emb: nn.Module) -> None:
        super().__init__()
        self.rotary_emb = rotary_emb

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary_emb(hidden.to(torch.bfloat16), positions)
        return cos.to(hidden.dtype), sin.to(hidden.dtype)


def layers_of(model: AbsorbedDecoder) -> list[AbsorbedLayer]:
    """The layers, as what they are."""
    return [cast(AbsorbedLayer, layer) for layer in model.layers]


def inputs_of_layers(
    model: AbsorbedDecoder, batch: PagedBatch
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(hidden, cos, sin) with which an eager run enters each layer's attention."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[:3]))
        for layer in layers_of(model)
    ]
    try:
        model(*batch.fresh())
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def measure_prologues(
    model: AbsorbedDecoder, batch: PagedBatch, compile_fused: Compile
) -> list[Measurement]:
    """Every layer's prologue by itself, all runs from the same bfloat16 input."""
    found = []
    for index, inputs in enumerate(inputs_of_layers(model, batch)):
        prologue = _AsModule(layers_of(model)[index].self_attn.prologue)
        caches = (batch.kv_caches[index], batch.kr_caches[index])
        wide = copy.deepcopy(prologue).double()
        runs = []
        for function, dtype in (
            (prologue, torch.bfloat16),
            (compile_fused(prologue), torch.bfloat16),
            (wide, torch.float64),
        ):
            copies = [cache.to(dtype, copy=True) for cache in caches]
            outputs = function(*(item.to(dtype) for item in inputs), batch.slot_mapping, *copies)
            runs.append([*outputs, *copies])
        where = f"layer {index}"
        found += [
            measured(where, name, *(run[at] for run in runs)) for at, name in enumerate(_QUERY)
        ]
        found += _of_caches(where, batch.slot_mapping, caches, *(run[-2:] for run in runs))
    return found


def measure_model(
    model: AbsorbedDecoder, batch: PagedBatch, compile_fused: Compile
) -> list[Measurement]:
    """The whole step: model output, and every cache after it. Errors of earlier layers are carried
    along.
    """
    unfused, fused, exact = batch.fresh(), batch.fresh(), batch.fresh(torch.float64)
    unfused_out = model(*unfused)
    fused_out = compile_fused(model)(*fused)
    reference = copy.deepcopy(model).double()
    reference.rotary_emb = _RoundedTables(reference.rotary_emb)
    exact_out = reference(*exact)
    found = [measured("model", "output", unfused_out, fused_out, exact_out)]
    for index in range(len(model.layers)):
        caches = [
            (step.kv_caches[index], step.kr_caches[index])
            for step in (batch, unfused, fused, exact)
        ]
        found += _of_caches(f"model, layer {index}", batch.slot_mapping, *caches)
    return found


def _of_caches(
    where: str, slots: Tensor, before: Sequence[Tensor], *runs: Sequence[Tensor]
) -> Iterator[Measurement]:
    """Errors over the rows written; bits of all others."""
    for name, kept, *after in zip(("kv_cache", "kr_cache"), before, *runs, strict=True):
        unfused, fused, exact = (split_rows(cache, slots) for cache in after)
        untouched = same_bits(split_rows(kept, slots)[1], fused[1])
        yield measured(where, name, unfused[0], fused[0], exact[0], untouched=untouched)


def split_rows(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are written, in the order of the slots, and all others."""
    rows = cache.reshape(-1, cache.shape[-1])
    others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, slots, False)
    return rows[slots], rows[others]


def measured(
    where: str,
    name: str,
    unfused: Tensor,
    fused: Tensor,
    exact: Tensor,
    *,
    untouched: bool | None = None,
) -> Measurement:
    ours, theirs = (
        float((found.double() - exact).norm() / exact.norm()) for found in (fused, unfused)
    )
    return Measurement(where, name, theirs, ours, untouched, exact.numel())
