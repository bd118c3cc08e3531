"""Prologues of linear layers that quantise with plain operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import quantised
from .base import DR, HCKV, HCQ, HE, D, paged_args
from .entry import IN_PLACE, OURS, entry
from .int8_attention import Int8Attention, int8_latent_args
from .int8_caches import PackedRows, packed_args
from .int8_plain import (
    LINEARS,
    PlainFull,
    PlainLinear,
    PlainPartial,
    Smoothed,
    in_float32,
    linear_of,
    model_of,
)
from .layouts import Sequences, sequence_args


def plain(name: str, mode: int, cache: int = 0, **fields: Any) -> Callable[[Any], Any]:
    """Puts a model of plain int8 operators into the catalogue."""

    modes = {"weight_quant_mode": mode, "kv_cache_quant_mode": cache}
    tags = "int8, plain, cache" if cache else "int8, plain"
    name = f"plain {name}"
    return entry(IN_PLACE, source=OURS, tags=tags, name=name, slack=1.1, **modes, **fields)


@plain("joined", 2)
class Joined(quantised.MergedDown):
    linear = PlainLinear


@plain("of_sequences", 2, args=sequence_args)
class OfSequences(Sequences):
    """Rows and sums [B, S, ..] throughout."""

    def __init__(self) -> None:
        super().__init__()
        kind: Any = linear_of("l", multiply=in_float32)
        self.q_a_proj, self.kv_a_proj_with_mqa = kind(HE, HCQ), kind(HE, HCKV + DR)
        self.q_b_proj = kind(HCQ, self.heads * (D + DR))


@plain("in_halves", 2)
class InHalves(quantised.Chunked):
    linear = PlainLinear


@plain("on_in_float32", 2)
class OnInFloat32(PlainFull):
    """Norms and rotations read the float32 results."""

    linear = linear_of("l", bring_back=lambda self, sums, scale: sums.float() * scale * self.scale)

    def absorb(self, q_nope: Tensor) -> Tensor:
        return super().absorb(q_nope.to(self.kv_b_proj.weight.dtype))

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, c, s).to(c.dtype)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return c_kv.to(x.dtype), k_pe


@plain("indexer_reads", 2)
class IndexerReads(quantised.IndexerReads):
    """The indexer quantises c_q by itself; its int8 values and scales are the kernel's outputs."""

    linear = PlainLinear


@plain("smoothed", 1)
class SmoothedPartial(PlainPartial):
    linear = Smoothed


@plain("half_rope", 2)
class HalfRope(quantised.HalfRope):
    linear = PlainLinear


@plain("scaled", 2)
class Scaled(PlainFull):
    """A softmax scale on the whole query is no scale of the product."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(q * 0.07)


class PlainInt8Attention(Int8Attention):
    linear = PlainLinear


class PlainPackedRows(PackedRows):
    linear = PlainLinear


def one_token() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x[:1], cos[:1], sin[:1], kv_cache, kr_cache, slots[:1]


def many_tokens(count: int = 100) -> tuple[Tensor, ...]:
    rows = [torch.randn(count, width).bfloat16() for width in (HE, DR, DR)]
    caches = [torch.randn(count, 16, 1, width).bfloat16() for width in (HCKV, DR)]
    return *rows, *caches, torch.randperm(16 * count)[:count]


plain("partial", 1)(PlainPartial)
plain("partial_clamped", 1)(partial(model_of, PlainPartial, LINEARS["clamped"]))
plain("partial_columns_first", 1)(partial(model_of, PlainPartial, LINEARS["columns_first"]))
plain("one_token", 2, args=one_token)(partial(model_of, PlainFull, LINEARS["by_norm"]))
plain("many_tokens", 2, args=many_tokens)(partial(model_of, PlainFull, LINEARS["by_norm"]))
plain("int8_attention", 2, cache=1, args=int8_latent_args)(PlainInt8Attention)
plain("packed_rows", 2, cache=3, args=packed_args)(PlainPackedRows)
