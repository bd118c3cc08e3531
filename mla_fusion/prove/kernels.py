"""The definitions of the operators that a plan calls, and of those that write caches, in the field.

Of a cache that an operator writes, the value here is the rows that it is given (:class:`Written`):
which row goes where is decided by the terms of the slots.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_fusion.fx.analytic import FLOOR
from mla_fusion.prove import field
from mla_fusion.prove.field import Num, mul
from mla_fusion.prove.operators import Call, rms_norm, rotated, rule
from mla_fusion.reference.numerics import FLT_EPS

_UNUSED = Num(torch.zeros(0, dtype=torch.int64))


class Written(Num):
    """A cache, by the new rows [T, width] that it holds."""

    def __init__(self, cache: Num, rows: Num) -> None:
        super().__init__(field.random("written", cache.shape).re)
        self.rows = rows

    def moved(self, move: Any) -> Written:
        return Written(super().moved(move), self.rows)


def _written(call: Call, name: str, rows: Num) -> Num:
    """A paged cache with new rows; a buffer for the new rows alone holds them."""
    cache = call.num(name)
    if call["cache_mode"] in _BUFFERS:
        return rows.moved(lambda part: part.reshape(cache.shape))
    return Written(cache, rows)


_BUFFERS = ("BSND", "TND", "Norm")


def _columns(value: Num, *widths: int) -> list[Num]:
    return value.parts(lambda part: part.split(widths, -1))


def _flat(value: Num) -> Num:
    return value.moved(lambda part: part.reshape(-1, part.shape[-1]))


@rule("npu::npu_mla_prolog_v3_functional")
def prolog(call: Call) -> list[Num]:
    """The whole prologue without quantisation."""
    if call["weight_quant_mode"] or call["kv_cache_quant_mode"]:
        raise field.Undecided("quantised")
    x, weight_uk = call.num("token_x"), call.num("weight_uk")
    lead = x.shape[:-1]
    heads, nope, latent = weight_uk.shape
    sin, cos = _flat(call.num("rope_sin")), _flat(call.num("rope_cos"))
    rope = cos.shape[-1]
    flat = _flat(x)
    c_q = _normed(field.matmul(flat, call.num("weight_dq")), call, "cq", "qc_qr_scale")
    query = field.matmul(c_q, call.num("weight_uq_qr"))
    query = query.moved(lambda part: part.reshape(-1, heads, nope + rope))
    q_nope, q_pe = _columns(query, nope, rope)
    absorbed = field.matmul(q_nope.moved(lambda part: part.transpose(0, 1)), weight_uk)
    absorbed = absorbed.moved(lambda part: part.transpose(0, 1).reshape(*lead, heads, latent))
    of_heads = [table.moved(lambda part: part.unsqueeze(1)) for table in (cos, sin)]
    query_rope = rotated(q_pe, *of_heads).moved(lambda part: part.reshape(*lead, heads, rope))
    both = field.matmul(flat, call.num("weight_dkv_kr"))
    ckv, kr = _columns(both, latent, rope)
    ckv = _normed(ckv, call, "ckv", "kc_scale")
    new = (("kv_cache", ckv), ("kr_cache", rotated(kr, cos, sin)))
    caches = [_written(call, name, rows) for name, rows in new]
    c_q = c_q.moved(lambda part: part.reshape(*lead, part.shape[-1]))
    return [absorbed, query_rope, _UNUSED, c_q, _UNUSED, *caches]


def _normed(value: Num, call: Call, name: str, scale: str) -> Num:
    found, _ = rms_norm(value, call.num(f"rmsnorm_gamma_{name}"), _epsilon(call[f"rmsnorm_epsilon_{name}"]), 1)
    return mul(found, field.number(call[scale])) if abs(call[scale] - 1.0) >= FLT_EPS else found


def _epsilon(given: float) -> float:
    """That which stands for a floor under the norm is 0 where, as the fusion assumes, no row comes near the floor."""
    return 0.0 if given <= FLOOR**2 else given


@rule("npu::npu_kv_rmsnorm_rope_cache_v2_functional", "npu::npu_kv_rmsnorm_rope_cache")
def key_half(call: Call) -> list[Num]:
    """The key's half: caches in the operator's order, then the new rows."""
    if call["k_rope_scale"] is not None or call["c_kv_scale"] is not None or call["v"] is not None:
        raise field.Undecided("quantised")
    kv, gamma = call.num("kv"), call.num("gamma")
    latent = gamma.shape[-1]
    ckv, kr = _columns(kv, latent, kv.shape[-1] - latent)
    tables = call.num("cos"), call.num("sin")
    rows = rotated(kr, *tables), rms_norm(ckv, gamma, _epsilon(call["epsilon"]), 1)[0]
    named = zip(("k_cache", "ckv_cache"), rows, strict=True)
    written = [_written(call, name, _flat(row)) for name, row in named]
    return [*rows, *written] if call.name.endswith("functional") else [*written, *rows]

