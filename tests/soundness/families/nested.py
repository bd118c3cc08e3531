"""Regions within the graph: autocast, checkpoints, branches; an attack hides in one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..member import Family, attacks
from ..program import FLOATS, Named, Step, Style, prologue


def _checkpointed(step: Step) -> Step:
    def outer(v: Tensor, i: Named) -> Any:
        return checkpoint(lambda value: step(value, i), v, use_reentrant=False)

    return outer


def _in_autocast(i: Named, style: Style) -> tuple[Tensor, ...]:
    """Autocast to the dtype that the tensors have."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return prologue(i, style)


def _in_float32(v: Tensor, i: Named) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return v.float().tanh().to(v.dtype) if v.dim() > 3 else v.float().clamp(-12, 12).to(v.dtype)


_HIDDEN: dict[str, Step] = {
    "checkpointed_clamp": _checkpointed(lambda v, i: v.clamp(-12, 12)),
    "checkpointed_mask": _checkpointed(lambda v, i: v.masked_fill(v.abs() > 12, 0.0)),
    "checkpointed_flag": _checkpointed(lambda v, i: torch.where(i["flag"], v, v * 2 + 0.1)),
    "checkpointed_dropout_like": _checkpointed(lambda v, i: v * (v.abs() < 11)),
    "cond_by_flag": lambda v, i: torch.cond(
        i["flag"], lambda u: u * 1.0, lambda u: u.sin() + 0.1, (v,)
    ),
    "cond_by_size": lambda v, i: torch.cond(
        (v.abs().amax() < 12), lambda u: u * 1.0, lambda u: u.clamp(-12, 12), (v,)
    ),
    "embedded_autocast": _in_float32,
}


_SAME: dict[str, Step] = {"checkpointed_same": _checkpointed(lambda v, i: v * 1.0)}

FAMILIES = [
    Family(
        "nested.regions",
        "an attack within a checkpoint or a branch",
        attacks(_HIDDEN, FLOATS, ("dynamo",), ("paged", "neox")),
        attacks(_SAME, ("c_q",), ("dynamo",), ("paged",))
        + attacks({"autocast": _in_autocast}, ("program",), ("T8", "sym"), ("paged",)),
    )
]
