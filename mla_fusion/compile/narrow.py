"""Norm weights that are held in float32 although each of their numbers is a bfloat16 one, as in DeepSeek-V3.2's code.

The kernel takes them in bfloat16, which changes nothing then. That is a matter of values: they are looked at when a
graph is compiled, where parameters are at hand, and again whenever they are packed (:mod:`mla_fusion.weights.cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion.compat import HELD, FakeTensor, without_fake_mode
from mla_fusion.fx.kinds import HOLDS_BFLOAT16


def mark(gm: GraphModule, given: Sequence[Any]) -> None:
    """Note on the inputs of an AOT graph what the parameters hold that its caller gives, one for each input."""
    inputs = gm.graph.find_nodes(op="placeholder")
    if len(inputs) != len(given):  # AOT autograd has taken some for one another, or apart
        return
    for node, value in zip(inputs, given, strict=True):
        held = holds_bfloat16(value)
        if held is not None and _same_form(node.meta.get("val"), value):
            node.meta[HOLDS_BFLOAT16] = held


def holds_bfloat16(value: Any) -> bool | None:
    """Are all numbers of a float32 vector, a parameter, bfloat16 numbers? None for anything else."""
    if isinstance(value, FakeTensor):
        known: bool | None = getattr(value, HELD, None)
        return known
    if not isinstance(value, torch.nn.Parameter) or value.dtype != torch.float32 or value.dim() != 1 or value.is_meta:
        return None
    with torch.no_grad(), without_fake_mode():
        return bool((value.to(torch.bfloat16).to(value.dtype) == value).all())


def remember(source: torch.Tensor, fake: torch.Tensor) -> None:
    """A fake tensor that stands for a parameter knows what it holds."""
    held = holds_bfloat16(source)
    if held is not None:
        setattr(fake, HELD, held)


def _same_form(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
