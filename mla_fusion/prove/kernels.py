"""The definitions of the operators that a plan calls, and of those that write caches, in the field.

Of a cache that an operator writes, the value here is the rows that it is given (:class:`Written`):
which row goes where is decided by the terms of the slots.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import torch

from mla_fusion.fx.analytic import FLOOR
from mla_fusion.meta import number_formats
from mla_fusion.meta.number_formats import FORMATS, FP8, MXFP8, NumberFormat
from mla_fusion.meta.preprocess import EPSILON
from mla_fusion.prove import field, quantising
from mla_fusion.prove.field import Literal, Num
from mla_fusion.prove.operators import Call, real, rms_norm, rotated, rotated_halves, rule
from mla_fusion.reference.numerics import FLT_EPS

# in names of arguments that say where results go, and are not computed with
PLACES = re.compile("cache|index|slot|out")
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
        return rows.reshape(cache.shape)
    return Written(cache, rows)


_BUFFERS = ("BSND", "TND", "Norm")


def _columns(value: Num, *widths: int) -> list[Num]:
    return value.parts(lambda part: part.split(widths, -1))


def _flat(value: Num) -> Num:
    return value if len(value.shape) == 2 else value.reshape(-1, value.shape[-1])


@rule
def prolog(call: Call) -> list[Num]:
    """The whole prologue, in bfloat16 or a format of one byte."""
    x, weight_uk = call.num("token_x"), call.num("weight_uk")
    lead = x.shape[:-1]
    heads, nope, latent = weight_uk.shape
    sin, cos = _flat(call.num("rope_sin")), _flat(call.num("rope_cos"))
    rope = cos.shape[-1]
    flat = _flat(x)
    c_q = _normed(_projected(call, flat, "dq", "dequant_scale_x"), call, "cq", "qc_qr_scale")
    step, form = None, _format(call)
    if form is not None:
        smoothed = call.times(c_q, "smooth_scales_cq")
        c_q, step = (
            quantising.by_block(smoothed) if form is MXFP8 else quantising.by_row(smoothed, form)
        )
    query = _projected(call, c_q, "uq_qr", step)
    query = query.reshape(-1, heads, nope + rope)
    q_nope, q_pe = _columns(query, nope, rope)
    absorbed = q_nope.transpose(0, 1) @ weight_uk
    absorbed = absorbed.transpose(0, 1)
    query_rope = rotated(q_pe, *(table.unsqueeze(1) for table in (cos, sin)))
    both = _projected(call, flat, "dkv_kr", "dequant_scale_x")
    ckv, kr = _columns(both, latent, rope)
    ckv, kr = _normed(ckv, call, "ckv", "kc_scale"), rotated(kr, cos, sin)
    of_query = _UNUSED
    if call["kv_cache_quant_mode"] == 1:
        scale = call.num("quant_scale_ckv").moved(lambda part: part.reshape(-1)[0])
        absorbed, of_query = quantising.by_row(absorbed, _of_rows(call))
        query_rope = query_rope * (scale / of_query)
        ckv = quantising.saturated(ckv * scale, _of_rows(call))
    elif call["kv_cache_quant_mode"] == 2:
        ckv = quantising.saturated(ckv * call.num("quant_scale_ckv"))
        kr = quantising.saturated(kr * call.num("quant_scale_ckr"))
    elif call["kv_cache_quant_mode"] == 3:
        alpha = 1.0 if call["k_nope_clip_alpha"] is None else call.num("k_nope_clip_alpha").past
        ckv = packed(ckv, kr, _of_rows(call), call["tile_size"], alpha)
    caches = [_written(call, name, rows) for name, rows in (("kv_cache", ckv), ("kr_cache", kr))]
    given = (absorbed, query_rope, c_q)
    query, query_rope, c_q = (part.reshape(*lead, *part.shape[1:]) for part in given)
    return [query, query_rope, of_query, c_q, step or _UNUSED, *caches]


def packed(ckv: Num, kr: Num, form: NumberFormat, tile: int, alpha: float = 1.0) -> Num:
    """Rows of bytes: tiles of the latent, the key in bfloat16, a float32 step for each tile."""
    tiles = ckv.unflatten(-1, (-1, tile))
    if alpha == 1.0:
        values, steps = quantising.by_row(tiles, form)
    else:
        limit = quantising.largest_of(tiles) * field.number(alpha)
        steps = limit / field.number(quantising.STEPS)
        values = quantising.saturated(quantising.clipped(tiles, limit) / steps)
    steps = steps.squeeze(-1)
    parts = [
        values.flatten(-2),
        quantising.as_bytes(kr, torch.bfloat16, form.element),
        quantising.as_bytes(steps, torch.float32, form.element),
    ]
    return field.joined(parts, -1)


def _projected(call: Call, rows: Num, weight: str, step: Num | str | None) -> Num:
    """``rows @ weight``, of numbers of one byte times the steps of rows and columns."""
    matrix = call.num(f"weight_{weight}")
    if isinstance(step, str):
        step = None if call[step] is None else call.num(step)
    if step is None:
        return rows @ matrix
    form, of_columns = _format(call), call.num(f"dequant_scale_w_{weight}")
    if form is MXFP8:
        of_columns = of_columns.mT
        return quantising.product_of_blocks(rows, matrix, _flat(step), of_columns)
    assert form is not None
    return quantising.read_as(rows, form.number) @ matrix * step * of_columns


def _format(call: Call) -> NumberFormat | None:
    mode = call["weight_quant_mode"]
    return next((form for form in FORMATS if mode and mode in (form.full, form.partial)), None)


def _of_rows(call: Call) -> NumberFormat:
    """The format of the query and of cache rows, whose steps are those of rows."""
    form = _format(call)
    assert form is not None
    return FP8 if form is MXFP8 else form


def _in_bytes(call: Call, scale: str, cache: str, rows: Num) -> Num:
    """In the format of the cache, where a scale is given."""
    if call[scale] is None:
        return rows
    dtype = call.holds(cache)
    form = None if dtype is None else number_formats.of_product((dtype,), (call[f"{cache}_dtype"],))
    if form is None:
        raise field.Undecided("a cache of another format")
    return quantising.saturated(rows * call.num(scale), form)


def _normed(value: Num, call: Call, name: str, scale: str) -> Num:
    found, _ = rms_norm(
        value, call.num(f"rmsnorm_gamma_{name}"), _epsilon(call[f"rmsnorm_epsilon_{name}"]), 1
    )
    if abs(call[scale] - 1.0) < FLT_EPS:
        return found
    exact = constant(scale, call[scale])
    if exact.is_root and call[scale] < 0:
        raise field.Undecided("a negative root")
    return quantising.scaled(found, call[scale], exact.num())


def _epsilon(given: float) -> Num:
    return constant("epsilon", given).num(given)


def constant(name: str, given: float) -> Literal:
    """The exact number that an attribute stands for.

    An epsilon that stands for a floor is 0: as the fusion assumes, no row comes near the floor.
    """
    if "epsilon" in name and field.here().floors and given <= FLOOR**2:
        return Literal(Fraction(0))
    return (
        field.nearest(given) if "scale" in name and field.here().read_off else field.literal(given)
    )


@rule
def key_half(call: Call) -> list[Num]:
    """The key's half: caches in the operator's order, then the new rows."""
    if any(call[name] is not None for name in ("k_rope_offset", "c_kv_offset", "v")):
        raise field.Undecided("offsets, or values of their own")
    kv, gamma = call.num("kv"), call.num("gamma")
    latent = gamma.shape[-1]
    ckv, kr = _columns(kv, latent, kv.shape[-1] - latent)
    tables = call.num("cos"), call.num("sin")
    rows = rotated(kr, *tables), rms_norm(ckv, gamma, _epsilon(call["epsilon"]), 1)[0]
    named = zip(("k_cache", "ckv_cache"), ("k_rope_scale", "c_kv_scale"), rows, strict=True)
    written = [
        _written(call, name, _flat(_in_bytes(call, scale, name, row))) for name, scale, row in named
    ]
    return [*rows, *written] if call.name.endswith("functional") else [*written, *rows]


# -- W8A8 by fixed scales, the input's norm inside


@rule
def preprocess(call: Call) -> list[Num]:
    """The whole prologue behind the input's norm: latent, key and c_q side by side, rotations of
    halves.
    """
    hidden = _with_beta(call, "0", real(call.value))
    heads, nope, latent = call.num("wuk").shape
    cos, sin = call.num("cos"), call.num("sin")
    rope, rank = cos.shape[-1], call.num("gamma1").shape[-1]
    ckv, kr, c_q = _columns(_static_product(call, "0", "wdqkv", hidden), latent, rope, rank)
    up = _static_product(call, "1", "wuq", _with_beta(call, "1", c_q))
    q_nope, q_pe = _columns(up.unflatten(-1, (heads, nope + rope)), nope, rope)
    query = q_nope.transpose(0, 1) @ call.num("wuk")
    query_rope = rotated_halves(q_pe, *(table.unsqueeze(1) for table in (cos, sin)))
    rows = (
        rms_norm(ckv, call.num("gamma2"), _epsilon(EPSILON), 1)[0],
        rotated_halves(kr, cos, sin),
    )
    caches = [
        _stored(call.num(name), part)
        for name, part in zip(("kv_cache", "kv_cache_rope"), rows, strict=True)
    ]
    return [query.transpose(0, 1), caches[0], query_rope, caches[1]]


def _with_beta(call: Call, stage: str, value: Num) -> Num:
    normed, _ = rms_norm(value, call.num(f"gamma{stage}"), _epsilon(EPSILON), 1)
    return normed + call.num(f"beta{stage}")


def _static_product(call: Call, stage: str, weight: str, rows: Num) -> Num:
    scale, matrix = call.num(f"quant_scale{stage}"), call.num(weight)
    if len(matrix.shape) == 4:  # FRACTAL_NZ
        matrix = matrix.moved(lambda part: part[0].transpose(0, 1).flatten(1))
    quantised = quantising.saturated(rows / scale + call.num(f"quant_offset{stage}"))
    found = quantised @ matrix.mT + call.num(f"bias{stage}")
    return found * call.num(f"descale{stage}")


def _stored(cache: Num, rows: Num) -> Num:
    """A cache of the model's; or a buffer, whose first rows they are."""
    if len(cache.shape) == 1:
        return Written(cache, rows)
    rest = cache.moved(lambda part: part.reshape(-1, part.shape[-1])[rows.shape[0] :])
    return field.joined([rows, rest], 0).reshape(cache.shape)
