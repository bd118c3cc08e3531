"""The call of ``npu_mla_prolog_v3_functional``: its arguments lowered, its results by the leaves
that stand for them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from mla_fusion.fx.build import Builder
from mla_fusion.graph.form import Value
from mla_fusion.graph.lower import Lowering
from mla_fusion.meta.prolog import V3_FUNCTIONAL
from mla_fusion.next.caches import InPlace, Staged
from mla_fusion.plan import cache_modes, weight_modes
from mla_fusion.propose.prologue import Proposal

aten = torch.ops.aten
_WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr")
_GAMMAS = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")
_ROWS = (
    "dequant_scale_w_dq",
    "dequant_scale_w_uq_qr",
    "dequant_scale_w_dkv_kr",
    "smooth_scales_cq",
)


def called(
    b: Builder, lower: Lowering, proposal: Proposal, caches: InPlace | Staged
) -> dict[Value, Any]:
    """Emit the call; handles of the results."""
    a, results = proposal.arguments, proposal.results
    quantised = a.get("weight_quant_mode", 0)
    bfloat16 = torch.bfloat16
    full = quantised and "dequant_scale_x" in a
    x = lower.of(a["token_x"], None if full else bfloat16)
    weights = []
    for name in _WEIGHTS:
        is_byte = name != "weight_uk" and quantised and (full or name == "weight_uq_qr")
        value = lower.of(a[name], None if is_byte else bfloat16)
        weights.append(
            b.contiguous(value) if name != "weight_uk" or a[name].op != "leaf" else value
        )
    gammas = [lower.of(a[name], bfloat16) for name in _GAMMAS]
    sin, cos = (lower.of(a[name], bfloat16) for name in ("rope_sin", "rope_cos"))
    tokens = b.sizes([lower.graph.unbound(proposal.x.shape[0])], x)
    latent, rope = a["weight_uk"].shape[2], a["rope_cos"].shape[1]
    options: dict[str, Any] = {}
    if isinstance(caches, InPlace):
        held = [
            b.cache(write.cache, [lower.graph.unbound(size) for size in write.shape])
            for write in (caches.kv, caches.kr)
        ]
        options["cache_index"] = b.cast(lower.of(caches.slots), torch.int64)
        mode = caches.mode
    else:
        held = [
            b.call(aten.new_zeros.default, x, [*tokens, 1, width], dtype=bfloat16)
            for width in (latent, rope)
        ]
        mode = "TND"
    for name in _ROWS:
        if name in a:
            value = lower.of(a[name])
            is_row = len(a[name].shape) == 1
            value = b.reshape(value, (1, a[name].shape[0])) if is_row else b.contiguous(value)
            options[name] = _scale(b, value, not is_row)
    if full:
        options["dequant_scale_x"] = _scale(b, lower.of(a["dequant_scale_x"]), quantised == 3)
    options |= {
        "rmsnorm_epsilon_cq": float(a["rmsnorm_epsilon_cq"]),
        "rmsnorm_epsilon_ckv": float(a["rmsnorm_epsilon_ckv"]),
        "cache_mode": mode,
        "query_norm_flag": True,
        **weight_modes.attributes(quantised, 0),
        **cache_modes.attributes(0),
    }
    operation = getattr(torch.ops.npu, V3_FUNCTIONAL.name).default
    made = b.call(operation, x, *weights, *gammas, sin, cos, *held, **options)
    places = {name: place for place, name in enumerate(V3_FUNCTIONAL.results)}
    found: dict[Value, Any] = {}

    def result(name: str) -> Any:
        return b.call(operator.getitem, made, places[name])

    for name in ("query", "query_rope", "query_norm"):
        found[getattr(results, name)] = result(name)
    if results.dequant_scale_q_norm is not None:
        found[results.dequant_scale_q_norm] = result("dequant_scale_q_norm")
    if isinstance(caches, InPlace):
        found[caches.kv.value] = result("kv_cache")
        found[caches.kr.value] = result("kr_cache")
    else:
        found[results.kv_rows] = result("kv_cache")
        found[results.kr_rows] = result("kr_cache")
    return found


def _scale(b: Builder, value: Any, of_blocks: bool) -> Any:
    """In float32; of blocks the codes of powers of two."""
    if not of_blocks:
        return b.cast(value, torch.float32)
    is_code = b.dtype(value) == torch.float8_e8m0fnu
    return value if is_code else b.call(aten.view.dtype, value, torch.float8_e8m0fnu)
