"""The definition of ``npu_mla_prolog_v3``, as Values. It follows the operator document.

``propose/`` substitutes the definition for the results of a proposed call, and ``exact/prove.py``
compares it with the graph.

Arguments are Values by the operator's names. Tokens are one leading axis: ``token_x`` [T, He],
tables [T, Dr]. ``weight_uk`` is [N, D, Hckv]. Attributes are numbers. Instead of caches the
definition returns their new rows.
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
# names of arguments
WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr")
GAMMAS = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")
COLUMN_SCALES = ("dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")


@dataclass(frozen=True)
class Results:
    """The results of a call for T tokens.

    query                 [T, N, Hckv]
    query_rope            [T, N, Dr]
    dequant_scale_q_nope  [T, N, 1] of a quantised query, else None
    query_norm            [T, Hcq]
    dequant_scale_q_norm  [T, 1] of quantised latents, else None
    kv_rows, kr_rows      rows to write to the caches
    """

    query: Value
    query_rope: Value
    dequant_scale_q_nope: Value | None
    query_norm: Value
    dequant_scale_q_norm: Value | None
    kv_rows: Value
    kr_rows: Value

    @property
    def by_name(self) -> dict[str, Value]:
        """The results that the call has, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def leaves(form: Form, results: Results, name: str) -> Results:
    """The results of a call as leaves: only their shapes are known.

    results  the results by the definition
    name     of the call
    """
    parts: dict[str, Any] = dict.fromkeys(vars(results))
    for part, value in results.by_name.items():
        parts[part] = form.activation(f"{part} of {name}", value.shape)
    return Results(**parts)


def prolog(form: Form, a: Arguments) -> Results:
    """Returns the results of a call by the operator's definition."""
    x, weight_uk = a["token_x"], a["weight_uk"]
    heads, nope, latent = weight_uk.shape
    tokens, rope = a["rope_cos"].shape
    kind = format_of(a.get("weight_quant_mode", 0))
    x_scale = a.get("dequant_scale_x")
    c_q = _norm(form, a, _project(form, a, "dq", x, x_scale), "cq")
    times: Number = a.get("qc_qr_scale", number(1))
    row_scale = None
    if kind is not None:
        c_q, times = form.scaled(c_q, times), number(1)
        smooth = a.get("smooth_scales_cq")
        smoothed = c_q if smooth is None else form.times(c_q, form.bare(smooth))
        if kind is MXFP8:
            c_q, row_scale = quantise.by_block(form, smoothed)
        else:
            c_q, row_scale = quantise.by_row(form, smoothed, kind)
    # ``times`` follows the product, as the graph's own number does: a root is not squared there
    query = form.scaled(_project(form, a, "uq_qr", c_q, row_scale), times)
    c_q = form.scaled(c_q, times)
    query = form.reshape(query, (tokens, heads, nope + rope))
    q_nope, q_pe = form.slice(query, -1, 0, nope), form.slice(query, -1, nope, nope + rope)
    absorbed = form.dot(form.permute(q_nope, (1, 0, 2)), weight_uk)
    absorbed = form.permute(absorbed, (1, 0, 2))
    # what rounded them before is theirs: ``bare`` leaves out the last rounding alone
    cos, sin = (form.cast(a[name], torch.bfloat16) for name in ("rope_cos", "rope_sin"))
    head_tables = [form.reshape(table, (tokens, 1, rope)) for table in (cos, sin)]
    query_rope = apply_rope(form, q_pe, *head_tables, interleaved=True)
    kv_and_key = _project(form, a, "dkv_kr", x, x_scale)
    ckv, kr = (
        form.slice(kv_and_key, -1, 0, latent),
        form.slice(kv_and_key, -1, latent, latent + rope),
    )
    kv_rows = form.scaled(_norm(form, a, ckv, "ckv"), a.get("kc_scale", number(1)))
    kr_rows = apply_rope(form, kr, cos, sin, interleaved=True)
    query_scale, cache_mode = None, a.get("kv_cache_quant_mode", 0)
    if cache_mode == 1:
        scale = form.reshape(a["quant_scale_ckv"], (1, 1))
        absorbed, query_scale = quantise.by_row(form, absorbed, row_format(kind))
        ratio = form.product([(form.bare(form.reshape(scale, (1, 1, 1))), 1), (query_scale, -1)])
        query_rope = form.times(query_rope, ratio)
        kv_rows = quantise.saturated(form, form.times(kv_rows, form.bare(scale)), row_format(kind))
    elif cache_mode == 2:
        kv_rows = _quantise_by_column(form, kv_rows, a["quant_scale_ckv"])
        kr_rows = _quantise_by_column(form, kr_rows, a["quant_scale_ckr"])
    elif cache_mode == 3:
        kv_rows = pack_rows(form, a, kv_rows, kr_rows, row_format(kind))
    return Results(absorbed, query_rope, query_scale, c_q, row_scale, kv_rows, kr_rows)


def format_of(weight_quant_mode: int) -> NumberFormat | None:
    """The format of weights in a ``weight_quant_mode``; None for mode 0."""
    if not weight_quant_mode:
        return None
    return next(kind for kind in FORMATS if weight_quant_mode in (kind.full, kind.partial))


def row_format(kind: NumberFormat | None) -> NumberFormat:
    """The format of the query and of cache rows, which have one scale a row."""
    return INT8 if kind is None else FP8 if kind is MXFP8 else kind


def _project(form: Form, a: Arguments, name: str, rows: Value, row_scale: Value | None) -> Value:
    """``rows @ weight``. Quantised operands are multiplied with the scales of rows and columns."""
    weight = a[f"weight_{name}"]
    if row_scale is None:
        return form.dot(rows, weight)
    kind = format_of(a["weight_quant_mode"])
    assert kind is not None
    column_scale = a[f"dequant_scale_w_{name}"]
    if kind is MXFP8:
        return quantise.product_of_blocks(
            form, rows, weight, row_scale, form.transposed(column_scale)
        )
    product = form.dot(quantise.read_as(form, rows, kind.number), weight)
    return form.times(product, form.bare(row_scale), form.bare(column_scale))


def _norm(form: Form, a: Arguments, rows: Value, name: str) -> Value:
    """RMSNorm with the gamma and the epsilon of a latent ("cq" or "ckv")."""
    gamma, epsilon = a[f"rmsnorm_gamma_{name}"], a[f"rmsnorm_epsilon_{name}"]
    return rms_norm(form, rows, gamma, epsilon)[0]


def _quantise_by_column(form: Form, rows: Value, scale: Value) -> Value:
    """Rows of a cache in int8, by a scale for each column."""
    column_scale = form.reshape(scale, (1, scale.shape[-1]))
    return quantise.saturated(form, form.times(rows, form.bare(column_scale)))


def pack_rows(form: Form, a: Arguments, ckv: Value, kr: Value, kind: NumberFormat) -> Value:
    """Cache rows of bytes: [tiles of the latent | key in bfloat16 | a float32 step for each tile].

    ckv   the latents [T, Hckv]
    kr    the keys [T, Dr]
    kind  the format of the tiles
    """
    tile = a["tile_size"]
    tokens, width = ckv.shape
    tiles = form.reshape(ckv, (tokens, width // tile, tile))
    alpha = a.get("k_nope_clip_alpha")
    if alpha is None:
        values, steps = quantise.by_row(form, tiles, kind)
    else:
        limit = form.scaled(quantise.largest(form, tiles), literal(alpha))
        steps = form.scaled(limit, number(quantise.STEPS).inverse)
        clipped = form.function("clip", tiles, limit)
        values = quantise.saturated(form, form.product([(clipped, 1), (steps, -1)]))
    steps = form.reshape(steps, (tokens, width // tile))
    element = kind.element
    parts = [
        form.reshape(values, ckv.shape),
        quantise.as_bytes(form, kr, torch.bfloat16, element),
        quantise.as_bytes(form, steps, torch.float32, element),
    ]
    return form.join(parts, -1)
