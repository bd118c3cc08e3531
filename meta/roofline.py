"""What a prologue call costs at least: products, bytes, and the time a chip needs for them.

Counted are the multiply-adds of the four matmuls and each byte of the call's tensors once; vector
work, launches and caches closer than main memory are left out, so the times are lower bounds. The
unfused sequence is the one that a model runs without the operator: a kernel per step, every
intermediate written and read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mla_fusion.meta.errors import ContractError

_BF16, _FP32, _INDEX = 2, 4, 8
# No figure for a launch is published. A small kernel whose bytes take next to nothing is one launch
# and little more.
LAUNCH = 3.5e-6
LAUNCH_SOURCE = "what a small fused vector kernel took in all in vllm-ascend's pull request 10730"


@dataclass(frozen=True)
class Chip:
    """One device as torch sees it. Peaks in products-and-sums per second, None where none is
    published.
    """

    name: str
    bytes_per_second: float
    bf16_flops: float | None = None
    quantised_flops: float | None = None
    source: str = "given by the caller"


CHIPS: Mapping[str, Chip] = {
    "910C": Chip(
        "910C", 1.6e12, 376e12, 752e12, "one die; Serving LLMs on CloudMatrix384, arXiv 2506.12708"
    ),
    "950PR": Chip("950PR", 1.6e12, None, 1e15, "announced at Huawei Connect 2025"),
    "950DT": Chip("950DT", 4.0e12, None, 1e15, "announced at Huawei Connect 2025"),
}


def chip_named(chip: str | Chip | None) -> Chip | None:
    """A chip from its name; ContractError ``chip`` for a name that is not in `CHIPS`."""
    if chip is None or isinstance(chip, Chip):
        return chip
    if chip not in CHIPS:
        expected = f"one of {', '.join(CHIPS)}, or a Chip(...) with numbers of your own"
        raise ContractError("chip", "chip", expected, repr(chip))
    return CHIPS[chip]


@dataclass(frozen=True)
class Step:
    """One kernel of the unfused sequence: products, bytes of weights, and bytes of everything
    else.
    """

    name: str
    flops: int = 0
    quantised: bool = False
    weight_bytes: int = 0
    other_bytes: int = 0

    def seconds(self, chip: Chip) -> float:
        return max(
            (self.weight_bytes + self.other_bytes) / chip.bytes_per_second,
            _compute_seconds(chip, self.quantised, self.flops),
        )


@dataclass(frozen=True)
class Cost:
    """Sums over a call. ``intensity`` is products-and-sums per byte; ``seconds`` a lower bound on a
    chip.
    """

    kernels: int
    flops: int
    weight_bytes: int
    activation_bytes: int
    cache_bytes: int
    seconds: float | None

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


def fused_cost(sizes: Sizes, results: int, chip: Chip | None) -> Cost:
    """The operator: every argument read once, ``results`` bytes and the new cache rows written
    once.
    """
    steps = list(unfused_steps(sizes))
    weight_bytes = sum(step.weight_bytes for step in steps)
    activations = sizes.x + 2 * sizes.rope + sizes.index + results
    cache = sizes.tokens * (sizes.kv_row + sizes.kr_row)
    seconds = None
    if chip is not None:
        compute = sum(_compute_seconds(chip, step.quantised, step.flops) for step in steps)
        seconds = max((weight_bytes + activations + cache) / chip.bytes_per_second, compute)
    return Cost(1, sum(step.flops for step in steps), weight_bytes, activations, cache, seconds)


def unfused_cost(sizes: Sizes, chip: Chip | None) -> Cost:
    """The sequence of `unfused_steps`, one after the other."""
    steps = list(unfused_steps(sizes))
    writes = [step for step in steps if step.name.startswith("write")]
    cache = sum(step.other_bytes for step in writes)
    return Cost(
        len(steps),
        sum(step.flops for step in steps),
        sum(step.weight_bytes for step in steps),
        sum(step.other_bytes for step in steps) - cache,
        cache,
        None if chip is None else sum(step.seconds(chip) for step in steps),
    )


@dataclass(frozen=True)
class Sizes:
    """The axes of a call and the bytes of its tensors; ``weights`` by name include their scales."""

    dims: Mapping[str, int]
    tokens: int
    wq: int
    kv: int
    weights: Mapping[str, int]
    x: int
    rope: int  # one of sin and cos
    index: int
    kv_row: int
    kr_row: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any], dims: Mapping[str, int], wq: int, kv: int) -> Sizes:
        def size(*names: str) -> int:
            present = (arguments.get(name) for name in names)
            return sum(t.numel() * t.element_size() for t in present if t is not None)

        def row(name: str) -> int:
            cache = arguments[name]
            return cache.shape[-1] * cache.element_size() if name == "kv_cache" or kv != 3 else 0

        weights = {
            "cq": size("weight_dq", "dequant_scale_w_dq"),
            "gamma_cq": size("rmsnorm_gamma_cq"),
            "smooth": size("smooth_scales_cq"),
            "qcqr": size("weight_uq_qr", "dequant_scale_w_uq_qr"),
            "uk": size("weight_uk"),
            "ckvkr": size("weight_dkv_kr", "dequant_scale_w_dkv_kr"),
            "gamma_ckv": size("rmsnorm_gamma_ckv"),
            "cache": size("quant_scale_ckv", "quant_scale_ckr", "k_nope_clip_alpha"),
        }
        return cls(
            dims,
            dims["tokens"],
            wq,
            kv,
            weights,
            size("token_x", "dequant_scale_x"),
            size("rope_sin"),
            size("cache_index", "actual_seq_len"),
            row("kv_cache"),
            row("kr_cache"),
        )


def unfused_steps(sizes: Sizes) -> Iterator[Step]:
    """The kernels of the prologue without the operator, in order, for the scenario of the call."""
    t, d, w = sizes.tokens, sizes.dims, sizes.weights
    full, quantised = sizes.wq >= 2, sizes.wq >= 1
    heads, hcq, hckv, dr = d["N"], d["Hcq"], d["Hckv"], d["Dr"]
    cq, ckv, kr = t * hcq * _BF16, t * hckv * _BF16, t * dr * _BF16
    q_all, query, q_rope = (t * heads * n * _BF16 for n in (d["D"] + dr, hckv, dr))

    yield Step("matmul c_q", 2 * t * d["He"] * hcq, full, w["cq"], sizes.x + cq)
    yield Step("rms_norm c_q", 0, False, w["gamma_cq"], 2 * cq)
    c_q = cq
    if quantised:
        c_q = t * (hcq + (hcq // 32 if sizes.wq == 3 else _FP32))
        yield Step("quantise c_q", 0, False, w["smooth"], cq + c_q)
    yield Step("matmul q", 2 * t * hcq * heads * (d["D"] + dr), quantised, w["qcqr"], c_q + q_all)
    yield Step("absorb W_uk", 2 * t * heads * d["D"] * hckv, False, w["uk"], q_all - q_rope + query)
    yield Step("rope q", 0, False, 0, 2 * q_rope + 2 * sizes.rope)
    if sizes.kv == 1:
        scales = t * heads * _FP32
        yield Step("quantise query", 0, False, 0, query + query // _BF16 + scales)
        yield Step("rescale query_rope", 0, False, 0, 2 * q_rope + scales)
    yield Step("matmul ckv_kr", 2 * t * d["He"] * (hckv + dr), full, w["ckvkr"], sizes.x + ckv + kr)
    yield Step("rms_norm ckv", 0, False, w["gamma_ckv"], 2 * ckv)
    yield Step("rope kr", 0, False, 0, 2 * kr + 2 * sizes.rope)
    kv_rows, kr_rows = t * sizes.kv_row, t * sizes.kr_row
    if sizes.kv:
        rope_too = kr + kr_rows if sizes.kv in (2, 3) else 0
        yield Step("quantise cache rows", 0, False, w["cache"], ckv + kv_rows + rope_too)
    yield Step("write kv_cache", 0, False, 0, 2 * kv_rows + sizes.index)
    if kr_rows or sizes.kv != 3:
        yield Step("write kr_cache", 0, False, 0, 2 * kr_rows + sizes.index)


def _compute_seconds(chip: Chip, quantised: bool, flops: int) -> float:
    """0 where no peak is published: still a lower bound."""
    peak = chip.quantised_flops if quantised else chip.bf16_flops
    return flops / peak if peak else 0.0
