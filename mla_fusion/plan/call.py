"""The call of ``npu_mla_prolog_v3_functional``: its arguments lowered, its results by the leaves
that stand for them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.build import Builder
from mla_fusion.fx.held import Exact
from mla_fusion.fx.module_path import label
from mla_fusion.graph.form import Value
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.numbers import literal
from mla_fusion.meta.prolog import V3_FUNCTIONAL
from mla_fusion.plan import modes
from mla_fusion.plan.caches import InPlace
from mla_fusion.plan.operands import buffer, dense, identity, nothing
from mla_fusion.plan.outputs import source_nodes
from mla_fusion.plan.plan import Plan

aten = torch.ops.aten
_WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr")
_GAMMAS = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")
_OF_COLUMNS = ("dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
_PLACES = {name: place for place, name in enumerate(V3_FUNCTIONAL.results)}


def called(b: Builder, lower: Lowering, plan: Plan) -> dict[Value, Any]:
    """Emit the call; handles of the results that are read."""
    a, graph = plan.proposal.arguments, plan.graph
    mode = plan.modes[0]
    full = mode and "dequant_scale_x" in a
    bfloat16 = torch.bfloat16
    x = lower.of(a["token_x"], None if full else bfloat16)
    weights = []
    for name in _WEIGHTS:
        has_bytes = name != "weight_uk" and mode and (full or name == "weight_uq_qr")
        nz = name != "weight_uk"
        if not nz and plan.proposal.instead is not None:
            weights.append(_identity(b, plan))
            continue
        weights.append(_packed(b, plan, name, None if has_bytes else bfloat16, nz))
    gammas = [_gamma(b, plan, name) for name in _GAMMAS]
    sin, cos = (lower.of(a[name], bfloat16) for name in ("rope_sin", "rope_cos"))
    lead = [plan.tokens]
    options: dict[str, Any] = {}
    if isinstance(plan.caches, InPlace):
        caches = [b.cache(node, shape) for _, node, shape in plan.written_caches]
        caches += [nothing(b, x) for _ in range(2 - len(caches))]
        slots = plan.caches.slots

        def row_numbers(b: Builder) -> Any:
            return b.cast(Lowering(b, graph).of(slots), torch.int64)

        b.check_slots(row_numbers, source_nodes(graph, [slots]), [*plan.written_caches], False)
        options["cache_index"] = b.cast(lower.of(slots), torch.int64)
    else:
        widths = a["weight_uk"].shape[2], a["rope_cos"].shape[1]
        caches = [buffer(b, x, lead, width) for width in widths]
    for name in _OF_COLUMNS:
        if name in a:
            options[name] = _packed(b, plan, name, None, False)
    if "smooth_scales_cq" in a:
        row = (1, *a["smooth_scales_cq"].shape[-1:])
        options["smooth_scales_cq"] = lower.of(a["smooth_scales_cq"], torch.float32, row)
    if full:
        options["dequant_scale_x"] = _scale(b, lower.of(a["dequant_scale_x"]), mode == 3)
    options |= _scales_of_caches(lower, plan)
    operation = getattr(torch.ops.npu, V3_FUNCTIONAL.name).default
    given = (x, *weights, *gammas, sin, cos, *caches)
    made = b.call(operation, *given, **options, **plan.attributes)
    found: dict[Value, Any] = {}
    for name, value in plan.results.items():
        if name in plan.read_results or name in ("query", "query_rope") or "cache" in name:
            place = _PLACES[name.replace("_rows", "_cache")]
            found[value] = b.call(operator.getitem, made, place)
    return found


def _scales_of_caches(lower: Lowering, plan: Plan) -> dict[str, Any]:
    """The scales of the caches by name, lowered; one that is a number is filled in."""
    shapes = modes.scale_shapes(*plan.modes, plan.dims["Hckv"], plan.dims["Dr"])
    scales = {}
    for name, shape in shapes.items():
        scale = plan.proposal.arguments.get(name, 1.0)
        if isinstance(scale, float):
            scale = lower.form.filled(literal(scale), shape, torch.float32)
        scales[name] = lower.of(scale, torch.float32, shape)
    return scales


def _packed(b: Builder, plan: Plan, name: str, dtype: torch.dtype | None, nz: bool) -> Any:
    """A weight, or scales of its columns: made ahead of the graph where that can be."""
    value, graph = plan.proposal.arguments[name], plan.graph
    leaves = source_nodes(graph, [value])
    is_scale = name in _OF_COLUMNS

    def recipe(b: Builder) -> Any:
        lower = Lowering(b, graph, {}, set(leaves).__contains__)
        if not is_scale:
            return dense(b, lower.of(value, dtype), nz)
        is_row = len(value.shape) == 1
        made = lower.of(value, shape=(1, *value.shape) if is_row else None)
        return dense(b, _scale(b, made, not is_row), False)

    return b.packed(name, recipe, leaves)


def _identity(b: Builder, plan: Plan) -> Any:
    """[I | 0] for every head: layers share it."""
    heads, nope, latent = map(int, plan.proposal.arguments["weight_uk"].shape)
    shape = heads, nope, latent
    device = plan.products[0].meta["val"].device

    def recipe(b: Builder) -> Any:
        return b.packed("weight_uk", lambda b: identity(b, shape, device), [])

    return b.once(("identity", shape), recipe)


def _gamma(b: Builder, plan: Plan, name: str) -> Any:
    """The weight of a norm; one that is wider holds bfloat16's numbers (the policy has seen to
    that).
    """
    value, graph = plan.proposal.arguments[name], plan.graph
    leaves = source_nodes(graph, [value])

    def recipe(b: Builder) -> Any:
        return Lowering(b, graph, {}, set(leaves).__contains__).of(value, torch.bfloat16)

    wide = [node for node in leaves if _is_wide(node)]
    if not wide or len(leaves) > 1:
        return recipe(b)
    held = str(wide[0].meta["val"].dtype).removeprefix("torch.")
    what = f"the numbers of {label(wide[0])}, a norm weight in {held}, are not all bfloat16 numbers"
    return b.packed(name, recipe, leaves, exact=Exact("norm.gamma_dtype", what))


def _is_wide(node: Node) -> bool:
    return node.op == "placeholder" and node.meta["val"].dtype != torch.bfloat16


def _scale(b: Builder, value: Any, of_blocks: bool) -> Any:
    """In float32; of blocks the codes of powers of two."""
    if not of_blocks:
        return b.cast(value, torch.float32)
    is_code = b.dtype(value) == torch.float8_e8m0fnu
    return value if is_code else b.call(aten.view.dtype, value, torch.float8_e8m0fnu)
