"""Rules of operators that are several steps: norms, rotations, and ``npu_kv_rmsnorm_rope_cache``.

``graph/read.py`` calls the rules. ``targets/prolog.py`` writes the kernel with the same functions,
``rms_norm`` and ``apply_rope``.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Any

from mla_fusion.graph import quantise
from mla_fusion.graph.call import Call, Departs, operator
from mla_fusion.graph.form import Form, Value
from mla_fusion.graph.numbers import is_open
from mla_fusion.meta import number_formats


def rms_norm(
    form: Form, x: Value, gamma: Value, epsilon: Fraction, rank: int = 1
) -> tuple[Value, Value]:
    """RMSNorm over the last ``rank`` axes: the normed rows, and the factor 1 / rms of each row."""
    squares = form.mean(form.power(x, 2), range(-rank, 0))
    step = form.power(form.total([(1, squares)], epsilon), Fraction(-1, 2))
    return form.times(x, step, form.bare(gamma)), step


@operator("npu::npu_rms_norm")
def _(c: Call, x: Value, gamma: Value, epsilon: Any = 1e-6) -> Any:
    if not x.active:
        raise Departs
    return list(rms_norm(c.form, x, gamma, c.ratio_of(epsilon), len(gamma.shape)))


@operator("npu::npu_add_rms_norm")
def _(c: Call, x1: Value, x2: Value, gamma: Value, epsilon: Any = 1e-6) -> Any:
    if not (x1.active or x2.active):
        raise Departs
    total = c.form.plus(c.form.bare(x1), c.form.bare(x2))
    return [*rms_norm(c.form, total, gamma, c.ratio_of(epsilon), len(gamma.shape)), total]


# -- rotations


def rotate_half(form: Form, x: Value) -> Value:
    """``(-second half, first half)`` of the last axis."""
    size = x.shape[-1] // 2
    first, second = form.slice(x, -1, 0, size), form.slice(x, -1, size, 2 * size)
    return form.join([form.negated(second), first], -1)


def pairs_to_halves(form: Form, x: Value) -> Value:
    """The last axis reordered from interleaved pairs to halves: even columns, then odd columns."""
    return form.reshape(form.transposed(form.cut(x, 2)), x.shape)


def apply_rope(form: Form, x: Value, cos: Value, sin: Value, *, interleaved: bool) -> Value:
    """RoPE on the last axis. The result is in halves.

    interleaved  the pairs of ``x`` are columns 2i and 2i + 1, else i and i + size / 2
    """
    x = pairs_to_halves(form, x) if interleaved else x
    cos, sin = form.bare(cos), form.bare(sin)
    return form.plus(form.times(x, cos), form.times(rotate_half(form, x), sin))


@operator("npu::npu_interleave_rope")
def _(c: Call, x: Value, cos: Value, sin: Value) -> Value:
    if not x.active:
        raise Departs
    return apply_rope(c.form, x, cos, sin, interleaved=True)


@operator("npu::npu_rotary_mul")
def _(
    c: Call, x: Value, r1: Value, r2: Value, rotary_mode: Any = "half", rotate: Any = None
) -> Value:
    form = c.form
    if not x.active or rotate is not None or rotary_mode not in ("half", "interleave", None):
        raise Departs
    if rotary_mode != "interleave":
        return apply_rope(form, x, r1, r2, interleaved=False)
    rotated_pairs = form.reshape(rotate_half(form, form.cut(x, 2)), x.shape)
    r1, r2 = form.bare(r1), form.bare(r2)
    return form.plus(form.times(x, r1), form.times(rotated_pairs, r2))


# -- the key's half

PAGED = {"PA": None, "PA_BNSD": None, "PA_BSND": None, "PA_NZ": "PA_NZ"}


@operator("npu::npu_kv_rmsnorm_rope_cache", "npu::npu_kv_rmsnorm_rope_cache_v2_functional")
def _(
    c: Call,
    kv: Value,
    gamma: Value,
    cos: Value,
    sin: Value,
    index: Value,
    k_cache: Value,
    ckv_cache: Value,
    epsilon: Any,
    cache_mode: str,
    **options: Any,
) -> Any:
    unsupported = ("k_rope_offset", "c_kv_offset", "v")
    if not kv.active or any(options.get(name) is not None for name in unsupported):
        raise Departs
    form = c.form
    rank = gamma.shape[-1]
    latents, keys = form.slice(kv, -1, 0, rank), form.slice(kv, -1, rank, kv.shape[-1])
    latents = rms_norm(form, latents, gamma, c.ratio_of(epsilon))[0]
    keys = apply_rope(form, keys, cos, sin, interleaved=True)
    caches = []
    for result, name, cache, rows in (
        ("k_rope", "k_cache", k_cache, keys),
        ("c_kv", "ckv_cache", ckv_cache, latents),
    ):
        scale = options.get(f"{result}_scale")
        if scale is not None:
            kind = number_formats.of_product((cache.dtype,), (options.get(f"{name}_dtype"),))
            if kind is None:
                raise Departs
            rows = quantise.saturated(form, form.times(rows, form.bare(scale)), kind)
        caches.append(_write_cache(c, cache, index, rows, cache_mode))
    if not options.get("is_output_kv"):  # these results are not initialised
        keys, latents = (
            form.opaque("not given", (c.name, part), [kv], rows.shape, rows.dtype)
            for part, rows in (("keys", keys), ("latents", latents))
        )
    if c.name.endswith("functional"):
        return [keys, latents, *caches]
    return [*caches, keys, latents]


def _write_cache(c: Call, cache: Value, index: Value, rows: Value, mode: str) -> Value:
    """The cache after rows were written at the numbers ``index``.

    The cache is opaque if the mode does not write rows at slots, or if the counts of rows and
    numbers differ.
    """
    form = c.form
    row_counts = index.numel, prod(rows.shape[:-1])
    if mode in PAGED and all(map(is_open, row_counts)):
        c.equate(*row_counts)
    if mode not in PAGED or row_counts[0] != row_counts[1]:
        return form.opaque("cache", mode, [cache, index, rows], cache.shape, cache.dtype)
    width = rows.shape[-1]
    c.equate(cache.shape[-1], width)
    flat, flat_rows = (form.reshape(value, (-1, width)) for value in (cache, rows))
    result = form.write(flat, form.reshape(index, (-1,)), flat_rows, PAGED[mode])
    return form.reshape(result, cache.shape)


@operator("npu::npu_scatter_pa_kv_cache_functional")
def _(
    c: Call,
    key: Value,
    value: Value,
    key_cache: Value,
    value_cache: Value,
    slot_mapping: Value,
    cache_mode: Any = "PA_NZ",
    **options: Any,
) -> Any:
    if any(option is not None for option in options.values()):
        raise Departs
    mode = "PA" if cache_mode == "Norm" else cache_mode or "PA_NZ"
    pairs = ((key_cache, key), (value_cache, value))
    return [_write_cache(c, cache, slot_mapping, rows, mode) for cache, rows in pairs]
