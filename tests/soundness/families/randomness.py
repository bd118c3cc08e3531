"""Random steps: two reads of one noise are one, two noises are two, and a noisy weight is made anew
at every call.

A random step may stay outside of what is replaced. Inside, it would be drawn once where the model
draws twice, or packed once and kept. Runs are compared from equal seeds, other ones at every call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..member import ALL, Family, attacks
from ..program import FLOATS, TABLES, WEIGHTS, Named, Step

_NOISE: dict[str, Step] = {
    "dropout": lambda v, i: F.dropout(v, 0.3, training=True),
    "dropout_little": lambda v, i: F.dropout(v, 0.01, training=True),
    "native_dropout": lambda v, i: torch.native_dropout(v, 0.3, True)[0],
    "alpha_dropout": lambda v, i: F.alpha_dropout(v, 0.2, training=True),
    "feature_dropout": lambda v, i: F.dropout1d(
        v.reshape(1, -1, v.shape[-1]), 0.3, training=True
    ).view(v.shape),
    "bernoulli": lambda v, i: v * torch.bernoulli(torch.full_like(v, 0.7)),
    "rand_like": lambda v, i: v + 0.5 * torch.rand_like(v),
    "randn_like": lambda v, i: v + 0.5 * torch.randn_like(v),
    "rand_scale": lambda v, i: v * (0.5 + torch.rand(())).to(v.dtype),
    "rand_column": lambda v, i: v * (0.5 + torch.rand(v.shape[-1])).to(v.dtype),
    "normal": lambda v, i: v + torch.normal(0.0, 0.5, v.shape).to(v.dtype),
    "normal_in_place": lambda v, i: v + torch.empty_like(v).normal_(0, 0.5),
    "uniform_in_place": lambda v, i: v * torch.empty_like(v).uniform_(0.5, 1.5),
    "exponential": lambda v, i: (
        v * torch.empty_like(v, dtype=torch.float32).exponential_().to(v.dtype)
    ),
    "rrelu": lambda v, i: F.rrelu(v, 0.1, 0.5, training=True),
    "randint": lambda v, i: v * torch.randint(1, 3, (v.shape[-1],)).to(v.dtype),
    "random_columns": lambda v, i: v[..., torch.randperm(v.shape[-1])],
    "multinomial": lambda v, i: v + torch.multinomial(torch.ones(8), 1).to(v.dtype),
}

_SILENT: dict[str, Step] = {
    "dropout_of_none": lambda v, i: F.dropout(v, 0.0),
    "eval_dropout": lambda v, i: F.dropout(v, 0.5, training=False),
    "eval_alpha_dropout": lambda v, i: F.alpha_dropout(v, 0.5, training=False),
}


def _on_positions(p: Tensor, i: Named) -> Tensor:
    return (p + torch.randint(0, 2, p.shape)) % 32768


FAMILIES = [
    Family(
        "random.values",
        "noise on a value of the prologue",
        attacks(_NOISE, FLOATS, ALL),
        attacks(_SILENT, ("x", "c_q", "q_pe", "c_kv"), ("T8", "sym"), ("paged",)),
        random=True,
    ),
    Family(
        "random.twice",
        "two noises of one value: two reads of x, two rotations' tables",
        attacks(
            _NOISE,
            ("x_q+x_kv", "q_cos+k_cos", "q_cos+k_cos+q_sin+k_sin", "x_q", "x_kv", "q_cos", "k_sin"),
            ALL,
        ),
        attacks(_SILENT, ("x_q+x_kv",), ("T8", "sym"), ("paged",)),
        random=True,
    ),
    Family(
        "random.weights",
        "a noisy weight must not be packed once and kept",
        attacks(_NOISE, (*WEIGHTS, *TABLES), ALL),
        attacks(_SILENT, ("w_dq", "w_uk", "gamma_q"), ("T8",), ("paged",)),
        random=True,
    ),
    Family(
        "random.integers",
        "random positions, the two rotations apart",
        attacks(
            {"randint": _on_positions},
            ("q_positions+k_positions", "k_positions"),
            ALL,
            ("paged", "blocks"),
        ),
        random=True,
    ),
]
