"""Explains a call: its scenario, its kernel, and its least cost in products and bytes.

Divided by a chip's figures, these costs are lower bounds of times. They count the multiply-adds of
the four matmuls and each byte of the call's tensors once. They leave out vector work, launches and
caches closer than main memory. The unfused sequence is what a model runs without the operator: a
kernel per step, which writes every intermediate and reads it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

from mla_fusion.meta.check import Call, checked
from mla_fusion.meta.infer import infer
from mla_fusion.meta.prolog import CACHES, PROLOGS
from mla_fusion.meta.tiling_key import TilingKey, tiling_key


class Step(NamedTuple):
    """A kernel of the unfused sequence: bytes without weights, bytes of weights, and products."""

    name: str
    other_bytes: int
    weight_bytes: int = 0
    flops: int = 0


class Cost(NamedTuple):
    """Sums over a call. A kernel is a launch; ``intensity`` is products-and-sums per byte."""

    kernels: int
    flops: int
    weight_bytes: int
    activation_bytes: int
    cache_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def __str__(self) -> str:
        return (
            f"{self.kernels} launches, {self.flops / 1e9:.3f} GFLOP, {self.bytes / 1e6:.2f} MB "
            f"(weights {self.weight_bytes / 1e6:.2f}, activations "
            f"{self.activation_bytes / 1e6:.2f}, cache {self.cache_bytes / 1e6:.3f}), "
            f"{self.intensity:.1f} FLOP/byte"
        )


def _bytes(call: Call, *names: str) -> int:
    """Returns the bytes of the arguments of these names that the call has."""
    return sum(call.full[name].nbytes for name in names if call.full.get(name) is not None)


def _row_bytes(call: Call, name: str) -> int:
    """Returns the bytes of the new rows of a cache."""
    if name == "kr_cache" and call.cache.kr is None:
        return 0
    cache = call.full[name]
    return int(call.dims["tokens"] * cache.shape[-1] * cache.element_size())


def unfused_steps(call: Call) -> Iterator[Step]:
    """Yields the kernels of the prologue without the operator, in order."""
    d, bytes_of = call.dims, partial(_bytes, call)
    t, he = d["tokens"], d["He"]
    heads, hcq, hckv, dr = d["N"], d["Hcq"], d["Hckv"], d["Dr"]
    cq, ckv, kr = (2 * t * width for width in (hcq, hckv, dr))  # bytes of bfloat16
    q_all, query, q_rope = (2 * t * heads * width for width in (d["D"] + dr, hckv, dr))
    x, tables = bytes_of("token_x", "dequant_scale_x"), bytes_of("rope_sin", "rope_cos")

    def product(name: str, activations: int, weight: str, elements: int) -> Step:
        """Returns a product with a weight that has so many elements."""
        weight_bytes = bytes_of(f"weight_{weight}", f"dequant_scale_w_{weight}")
        return Step(name, activations, weight_bytes, 2 * t * elements)

    yield product("matmul c_q", x + cq, "dq", he * hcq)
    yield Step("rms_norm c_q", 2 * cq, bytes_of("rmsnorm_gamma_cq"))
    c_q = cq
    if call.wq:
        c_q = t * (hcq + (hcq // 32 if call.wq == 3 else 4))
        yield Step("quantise c_q", cq + c_q, bytes_of("smooth_scales_cq"))
    yield product("matmul q", c_q + q_all, "uq_qr", hcq * heads * (d["D"] + dr))
    yield product("absorb W_uk", q_all - q_rope + query, "uk", heads * d["D"] * hckv)
    yield Step("rope q", 2 * q_rope + tables)
    if call.kv == 1:
        scales = 4 * t * heads
        yield Step("quantise query", query + query // 2 + scales)
        yield Step("rescale query_rope", 2 * q_rope + scales)
    yield product("matmul ckv_kr", x + ckv + kr, "dkv_kr", he * (hckv + dr))
    yield Step("rms_norm ckv", 2 * ckv, bytes_of("rmsnorm_gamma_ckv"))
    yield Step("rope kr", 2 * kr + tables)
    kv_rows, kr_rows = (_row_bytes(call, name) for name in CACHES)
    index = bytes_of("cache_index", "actual_seq_len")
    if call.kv:
        scales = bytes_of("quant_scale_ckv", "quant_scale_ckr", "k_nope_clip_alpha")
        rope_bytes = kr + kr_rows if call.kv in (2, 3) else 0
        yield Step("quantise cache rows", ckv + kv_rows + rope_bytes, scales)
    yield Step("write kv_cache", 2 * kv_rows + index)
    if call.kv != 3:
        yield Step("write kr_cache", 2 * kr_rows + index)


class CallExplanation(NamedTuple):
    """A legal call in words and numbers. ``str()`` of it is a report.

    ``dims`` are the axes of `mla_fusion.meta.spec`; ``fused`` is the operator, ``unfused`` the
    sequence of kernels that computes the same, which are ``steps``.
    """

    op: str
    soc: str
    cann: str
    scenario: str
    dims: Mapping[str, int]
    tiling_key: TilingKey
    fused: Cost
    unfused: Cost
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        fields = (
            f"    {field.low:>2}-{field.high:<2} {field.name} = {field.value}"
            for field in self.tiling_key.fields
        )
        lines = [
            f"{self.op} on {self.soc}, CANN {self.cann}",
            f"  scenario   {self.scenario}",
            "  sizes      " + ", ".join(f"{axis} {size}" for axis, size in self.dims.items()),
            f"  tiling key {self.tiling_key.value:#x}",
            *fields,
            "  at least, matmuls and memory only",
            f"    fused    {self.fused}",
            f"    unfused  {self.unfused}",
        ]
        return "\n".join(lines)


def explain_call(
    op: str,
    *,
    soc: str = "A3",
    cann: str = "latest",
    path: str = "eager",
    **arguments: Any,
) -> CallExplanation:
    """Returns an explanation of a call: scenario, sizes, the tiling key that ``cann`` selects with
    its fields, and its kernels, products and bytes.

    op, soc, cann, path, arguments  as `mla_fusion.meta.check` takes them, of concrete sizes; it
                refuses an illegal call first

    Raises ContractError as `check` does, and ``explain.symbolic``.
    """
    call = checked(op, soc, cann, path, arguments)
    dims, full = call.dims, call.full
    for axis, size in dims.items():
        if type(size) is not int:
            call.refuse("explain.symbolic", axis, "concrete sizes: a cost is a number", size)
    results = dict(
        zip(PROLOGS[op].results, infer(op, cann=cann, path=path, **arguments), strict=True)
    )
    steps = tuple(unfused_steps(call))
    unfused_bytes = sum(step.other_bytes for step in steps)
    weights = sum(step.weight_bytes for step in steps)
    flops = sum(step.flops for step in steps)
    names = "token_x dequant_scale_x rope_sin rope_cos cache_index actual_seq_len".split()
    # the operator reads every argument once and writes its results and the new cache rows
    activations = _bytes(call, *names)
    for name, (shape, dtype) in results.items():
        if name not in CACHES and len(shape) > 1:  # others are absent
            activations += prod(shape) * dtype.itemsize
    written = sum(step.other_bytes for step in steps if step.name.startswith("write"))
    mode = full["cache_mode"]
    return CallExplanation(
        op,
        soc,
        cann,
        f"weights: {call.weights.title}; cache: {call.cache.title} "
        f"(weight_quant_mode {call.wq}, kv_cache_quant_mode {call.kv}), {mode}",
        dims,
        tiling_key(cann, call.wq, call.kv, mode, dims, full.get("actual_seq_len") is not None),
        Cost(1, flops, weights, activations, sum(_row_bytes(call, name) for name in CACHES)),
        Cost(len(steps), flops, weights, unfused_bytes - written, written),
        steps,
    )
