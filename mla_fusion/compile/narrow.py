"""Looks at the vectors of a model: float32 norm weights whose numbers are bfloat16's, as in
DeepSeek-V3.2's code, and static scales that were repeated for every channel when a checkpoint was
loaded, as vllm-ascend does.

What they hold is a matter of values: they are looked at when a graph is compiled, where parameters
are at hand, and again whenever they are packed (:mod:`mla_fusion.weights.cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion.compat import HELD, FakeTensor, is_of_model
from mla_fusion.fx.held import NUMBERS, Numbers
from mla_fusion.modes import outside_modes
from mla_fusion.operators.known import value_of


def mark(gm: GraphModule, given: Sequence[Any]) -> None:
    """Note on the inputs of an AOT graph what the vectors hold that its caller gives, one for each
    input.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    if len(inputs) != len(given):  # AOT autograd has taken some for one another, or apart
        return
    for node, value in zip(inputs, given, strict=True):
        held = looked_at(value) if isinstance(value, FakeTensor) or is_of_model(value) else None
        if held is not None and _same_form(value_of(node), value):
            node.meta[NUMBERS] = held


def looked_at(value: torch.Tensor) -> Numbers | None:
    """What a vector holds; None for anything else."""
    if isinstance(value, FakeTensor):
        known: Numbers | None = getattr(value, HELD, None)
        return known
    is_plain = isinstance(value, torch.nn.Parameter) or type(value) is torch.Tensor
    if not is_plain or value.dim() != 1 or value.is_meta:
        return None
    if value.dtype not in _LOOKED_AT:
        return None
    with outside_modes():
        return Numbers.of(value)


_LOOKED_AT = (torch.bfloat16, torch.float32, torch.int8, torch.int32)


def remember(source: torch.Tensor, fake: torch.Tensor) -> None:
    """A fake tensor that stands for a parameter or a buffer knows what it holds."""
    held = looked_at(source)
    if held is not None:
        setattr(fake, HELD, held)


def _same_form(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
