"""What the absorbed form needs to know of an attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mla_fusion.models.attention import sparse
from mla_fusion.models.hf.latent_attention import LatentDims

IMPLEMENTATIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class LatentForm:
    """What the absorbed form needs to know of one attention.

    kv_up         name of the child that expands latents
    hidden        columns of the hidden state
    after_cache   does the module expand what it has read from its cache (by its ``expand_kv``), or
                  before it caches?
    expand_kv     that function of its class; None where it expands before it caches
    """

    dims: LatentDims
    heads: int
    kv_up: str
    after_cache: bool
    hidden: int
    expand_kv: Callable[..., Any] | None = None

    @property
    def is_for_sparse_operator(self) -> bool:
        """Has the installed torch_npu an operator for attention of these dims over picked
        tokens?
        """
        return sparse.is_there() and sparse.takes(self.heads, self.dims.rank, self.dims.rope)


def expanded(both: Tensor, k_pe: Tensor, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """``[W_uk c_kv | k_pe]`` ``[B, N, L, D + Dr]`` and ``W_uv c_kv`` ``[B, N, L, Dv]`` of what the
    up projection gives, ``[B, 1, L, N * (D + Dv)]``, and ``[B, 1, L, Dr]``."""
    batch, _, length, _ = both.shape
    both = both.view(batch, length, -1, dims.up).transpose(1, 2)
    nope, values = both.split([dims.nope, dims.value], dim=-1)
    keys = nope.new_empty(*nope.shape[:-1], dims.nope + dims.rope)
    keys[..., : dims.nope] = nope
    keys[..., dims.nope :] = k_pe
    return keys, values
