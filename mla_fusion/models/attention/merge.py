"""Merging attention over parts of a context: split-KV, shared prefixes, parts on other devices.

Attention over a set of keys leaves a state: its output ``v`` and the log-sum-exp ``s`` of its
scores (natural logarithm, after scaling). Two states over disjoint sets merge into the state over
their union; the operation is commutative and associative up to rounding, and the state of no key at
all is its identity: ``s = -inf``, ``v`` whatever it may be, NaN included.

Weights are computed in the dtype of ``s``, which is float32 (float64 is kept).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.meta import ContractError


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state over both sets: ``v_a``, ``v_b`` [T, N, d] with ``s_a``, ``s_b`` [T, N].

    Returns v [T, N, d] in the dtype of ``v_a`` and s [T, N]. Merging with an empty state gives the
    other bit by bit. Raises ContractError ``merge.v_b``, ``merge.s_a`` or ``merge.s_b`` for another
    shape.
    """
    _shape("v_b", v_b, v_a.shape)
    _shape("s_a", s_a, v_a.shape[:-1])
    _shape("s_b", s_b, v_a.shape[:-1])
    largest = _finite(torch.maximum(s_a, s_b))
    weight_a, weight_b = torch.exp(s_a - largest), torch.exp(s_b - largest)
    total = weight_a + weight_b
    v = _weighted(v_a, weight_a, total) + _weighted(v_b, weight_b, total)
    return v.to(v_a.dtype), largest + torch.log(total)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state over n sets at once: ``v`` [T, n, N, d] with ``s`` [T, n, N].

    Returns v [T, N, d] in the dtype of ``v`` and s [T, N]. Raises ContractError ``merge.v`` or
    ``merge.s``.
    """
    if v.dim() != 4:
        raise ContractError("merge.v", "v", "4-D [T, n, N, d]", f"{v.dim()}-D {list(v.shape)}")
    _shape("s", s, v.shape[:-1])
    if v.shape[1] == 0:
        raise ContractError("merge.v", "v", "at least one state", f"none, {list(v.shape)}")
    largest = _finite(s.amax(dim=1, keepdim=True))
    weights = torch.exp(s - largest)
    total = weights.sum(dim=1, keepdim=True)
    merged = _weighted(v, weights, total).sum(dim=1)
    return merged.to(v.dtype), (largest + torch.log(total)).squeeze(1)


def _weighted(v: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """v in proportion to its weight; of an empty state nothing, whatever a kernel left in it."""
    share = torch.where(weight == 0, 0, weight / total).unsqueeze(-1)
    # x + -0.0 is x for every x; with +0.0 a negative zero would lose its sign
    return torch.where(share == 0, -0.0, v * share)


def _finite(largest: Tensor) -> Tensor:
    """What to subtract from scores before exp: of states that are all empty, 0 instead of -inf."""
    return torch.where(largest == float("-inf"), 0, largest)


def _shape(name: str, tensor: Tensor, expected: torch.Size) -> None:
    if tensor.shape != expected:
        raise ContractError(f"merge.{name}", name, str(list(expected)), str(list(tensor.shape)))
