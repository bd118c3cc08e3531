"""``npu_mla_prolog_v3`` in the form: reads as the operator document does.

Arguments are Values by their names, rows of tokens flat: ``token_x`` [T, He], tables [T, Dr],
``weight_uk`` [N, D, Hckv]; attributes are numbers. Of the caches the results are the new rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mla_fusion.graph import quantise
from mla_fusion.graph.form import Form, Value
from mla_fusion.graph.fused import apply_rope, rms_norm
from mla_fusion.graph.numbers import Number, literal, number
from mla_fusion.meta.number_formats import FORMATS, FP8, INT8, MXFP8, NumberFormat

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """Rows of T tokens.

    query                 [T, N, Hckv]
    query_rope            [T, N, Dr]
    dequant_scale_q_nope  [T, N, 1], of a quantised query
    query_norm            [T, Hcq]
    dequant_scale_q_norm  [T, 1], of quantised latents
    kv_rows, kr_rows      what is written to the caches
    """

    query: Value
    query_rope: Value
    dequant_scale_q_nope: Value | None
    query_norm: Value
    dequant_scale_q_norm: Value | None
    kv_rows: Value
    kr_rows: Value


def leaves(form: Form, defined: Results, name: str) -> Results:
    """Results of a call, of which nothing is known but their sizes."""

    def leaf(part: str, value: Value | None) -> Value | None:
        return None if value is None else form.activation(f"{part} of {name}", value.shape)

    return Results(**{part: leaf(part, value) for part, value in vars(defined).items()})  # type: ignore[arg-type]


def prolog(form: Form, a: Arguments) -> Results:
    x, weight_uk = a["token_x"], a["weight_uk"]
    heads, nope, latent = weight_uk.shape
    tokens, rope = a["rope_cos"].shape
    kind = format_of(a.get("weight_quant_mode", 0))
    of_x = a.get("dequant_scale_x")
    c_q = _normed(form, a, _projected(form, a, "dq", x, of_x), "cq")
    times: Number = a.get("qc_qr_scale", number(1))
    step = None
    if kind is not None:
        c_q, times = form.scaled(c_q, times), number(1)
        smooth = a.get("smooth_scales_cq")
        smoothed = c_q if smooth is None else form.times(c_q, form.bare(smooth))
        quantised = quantise.by_block if kind is MXFP8 else _by_row(kind)
        c_q, step = quantised(form, smoothed)
    # behind the product, where it meets the graph's own number: a root is no square there
    query = form.scaled(_projected(form, a, "uq_qr", c_q, step), times)
    c_q = form.scaled(c_q, times)
    query = form.reshape(query, (tokens, heads, nope + rope))
    q_nope, q_pe = form.slice(query, -1, 0, nope), form.slice(query, -1, nope, nope + rope)
    absorbed = form.dot(form.permute(q_nope, (1, 0, 2)), weight_uk)
    absorbed = form.permute(absorbed, (1, 0, 2))
    cos, sin = a["rope_cos"], a["rope_sin"]
    of_heads = [form.reshape(table, (tokens, 1, rope)) for table in (cos, sin)]
    query_rope = apply_rope(form, q_pe, *of_heads, interleaved=True)
    both = _projected(form, a, "dkv_kr", x, of_x)
    ckv, kr = form.slice(both, -1, 0, latent), form.slice(both, -1, latent, latent + rope)
    kv_rows = form.scaled(_normed(form, a, ckv, "ckv"), a.get("kc_scale", number(1)))
    kr_rows = apply_rope(form, kr, cos, sin, interleaved=True)
    of_query, cache_mode = None, a.get("kv_cache_quant_mode", 0)
    if cache_mode == 1:
        scale = form.reshape(a["quant_scale_ckv"], (1, 1))
        absorbed, of_query = quantise.by_row(form, absorbed, of_rows(kind))
        ratio = form.product([(form.bare(form.reshape(scale, (1, 1, 1))), 1), (of_query, -1)])
        query_rope = form.times(query_rope, ratio)
        kv_rows = quantise.saturated(form, form.times(kv_rows, form.bare(scale)), of_rows(kind))
    elif cache_mode == 2:
        kv_rows = _stored(form, kv_rows, a["quant_scale_ckv"])
        kr_rows = _stored(form, kr_rows, a["quant_scale_ckr"])
    elif cache_mode == 3:
        kv_rows = packed(form, a, kv_rows, kr_rows, of_rows(kind))
    return Results(absorbed, query_rope, of_query, c_q, step, kv_rows, kr_rows)


def _by_row(kind: NumberFormat) -> Any:
    return lambda form, rows: quantise.by_row(form, rows, kind)


def format_of(weight_quant_mode: int) -> NumberFormat | None:
    if not weight_quant_mode:
        return None
    return next(kind for kind in FORMATS if weight_quant_mode in (kind.full, kind.partial))


def of_rows(kind: NumberFormat | None) -> NumberFormat:
    """The format of the query and of cache rows, whose steps are those of rows."""
    return INT8 if kind is None else FP8 if kind is MXFP8 else kind


def _projected(form: Form, a: Arguments, name: str, rows: Value, step: Value | None) -> Value:
    """``rows @ weight``, of numbers of one byte times the steps of rows and columns."""
    weight = a[f"weight_{name}"]
    if step is None:
        return form.dot(rows, weight)
    kind = format_of(a["weight_quant_mode"])
    assert kind is not None
    of_columns = a[f"dequant_scale_w_{name}"]
    if kind is MXFP8:
        return quantise.product_of_blocks(form, rows, weight, step, form.transposed(of_columns))
    found = form.dot(quantise.read_as(form, rows, kind.number), weight)
    return form.times(found, form.bare(step), form.bare(of_columns))


def _normed(form: Form, a: Arguments, rows: Value, name: str) -> Value:
    gamma, epsilon = a[f"rmsnorm_gamma_{name}"], a[f"rmsnorm_epsilon_{name}"]
    return rms_norm(form, rows, gamma, epsilon)[0]


def _stored(form: Form, rows: Value, scale: Value) -> Value:
    row = form.reshape(scale, (1, scale.shape[-1]))
    return quantise.saturated(form, form.times(rows, form.bare(row)))


def packed(form: Form, a: Arguments, ckv: Value, kr: Value, kind: NumberFormat) -> Value:
    """Rows of bytes: tiles of the latent, the key in bfloat16, a float32 step for each tile."""
    tile = a["tile_size"]
    tokens, width = ckv.shape
    tiles = form.reshape(ckv, (tokens, width // tile, tile))
    alpha = a.get("k_nope_clip_alpha")
    if alpha is None:
        values, steps = quantise.by_row(form, tiles, kind)
    else:
        limit = form.scaled(quantise.largest(form, tiles), literal(alpha))
        steps = form.scaled(limit, _one_of(quantise.STEPS))
        clipped = form.function("clip", (), tiles, limit)
        values = quantise.saturated(form, form.product([(clipped, 1), (steps, -1)]))
    steps = form.reshape(steps, (tokens, width // tile))
    element = kind.element
    parts = [
        form.reshape(values, ckv.shape),
        quantise.as_bytes(form, kr, torch.bfloat16, element),
        quantise.as_bytes(form, steps, torch.float32, element),
    ]
    return form.join(parts, -1)


def _one_of(steps: int) -> Number:
    found = number(steps).power(-1)
    assert found is not None
    return found
