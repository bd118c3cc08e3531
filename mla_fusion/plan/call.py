"""Emits the call of ``npu_mla_prolog_v3_functional`` for a plan: lowers arguments, returns results.

``commit/rewrite.py`` calls this for the new graph, ``contract.py`` to see the arguments alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from mla_fusion.fx.build import Builder
from mla_fusion.fx.module_path import label
from mla_fusion.fx.vector_numbers import Exact
from mla_fusion.graph.form import Value
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.numbers import literal
from mla_fusion.meta.prolog import V3_FUNCTIONAL
from mla_fusion.plan import modes
from mla_fusion.plan.caches import InPlace
from mla_fusion.plan.operands import empty_kr_cache, identity, row_buffer, to_kernel_layout
from mla_fusion.plan.outputs import source_nodes
from mla_fusion.plan.plan import Plan
from mla_fusion.targets.prolog import COLUMN_SCALES, GAMMAS, WEIGHTS, format_of

aten = torch.ops.aten
_PLACES = {name: place for place, name in enumerate(V3_FUNCTIONAL.results)}


def emit_call(builder: Builder, lower: Lowering, plan: Plan) -> dict[Value, Any]:
    """Emits the call. Returns the handles of the results that are read, by the Values that stand
    for them.

    lower  lowers Values into the same builder
    """
    arguments = plan.proposal.arguments
    x_format = format_of(plan.modes[0]) if "dequant_scale_x" in arguments else None
    x = lower.of(arguments["token_x"], x_format.element if x_format else torch.bfloat16)
    is_absorbed = plan.proposal.identity_reason is None
    weights = [
        _packed_operand(builder, lower, plan, name)
        if is_absorbed or name != "weight_uk"
        else _packed_identity(builder, plan)
        for name in WEIGHTS
    ]
    gammas = [_gamma(builder, plan, name) for name in GAMMAS]
    sin, cos = (lower.of(arguments[name], torch.bfloat16) for name in ("rope_sin", "rope_cos"))
    options: dict[str, Any] = {}
    if isinstance(plan.caches, InPlace):
        caches = [builder.cache(node, shape) for _, node, shape in plan.written_caches]
        caches += [empty_kr_cache(builder, x) for _ in range(2 - len(caches))]
        builder.check_slots(plan)
        options["cache_index"] = builder.cast(lower.of(plan.caches.slots), torch.int64)
    else:
        widths = plan.dims["Hckv"], plan.dims["Dr"]
        caches = [row_buffer(builder, x, plan.tokens, width) for width in widths]
    for name in COLUMN_SCALES:
        if name in arguments:
            options[name] = _packed_operand(builder, lower, plan, name)
    if "smooth_scales_cq" in arguments:
        row = (1, *arguments["smooth_scales_cq"].shape[-1:])
        options["smooth_scales_cq"] = lower.of(arguments["smooth_scales_cq"], torch.float32, row)
    if x_format:
        options["dequant_scale_x"] = _cast_scale(
            builder, lower.of(arguments["dequant_scale_x"]), plan.modes[0] == 3
        )
    options |= _cache_scales(lower, plan)
    operation = getattr(torch.ops.npu, V3_FUNCTIONAL.name).default
    options |= plan.attributes
    call_result = builder.call_again(
        plan.structure, operation, x, *weights, *gammas, sin, cos, *caches, **options
    )
    return {
        value: builder.call(operator.getitem, call_result, _PLACES[name.replace("_rows", "_cache")])
        for name, value in plan.results.items()
        if name in plan.read_results or name in ("query", "query_rope") or "cache" in name
    }


def _cache_scales(lower: Lowering, plan: Plan) -> dict[str, Any]:
    """Returns the lowered scales of the caches by name. A scale that is one number is filled in."""
    shapes = modes.scale_shapes(*plan.modes, plan.dims["Hckv"], plan.dims["Dr"])
    scales = {}
    for name, shape in shapes.items():
        scale = plan.proposal.arguments.get(name, 1.0)
        if isinstance(scale, float):
            scale = lower.form.filled(literal(scale), shape, torch.float32)
        scales[name] = lower.of(scale, torch.float32, shape)
    return scales


def _packed_operand(builder: Builder, graph_lower: Lowering, plan: Plan, name: str) -> Any:
    """Returns a weight, or scales of its columns. They are computed ahead of the graph if possible.

    A weight with such scales keeps its dtype. weight_uk alone is not read in FRACTAL_NZ.

    graph_lower  lowers scales that are numbers of the graph
    """
    arguments, graph = plan.proposal.arguments, plan.graph
    value, is_scale = arguments[name], name in COLUMN_SCALES
    has_scale = name.replace("weight", "dequant_scale_w") in arguments
    leaves = source_nodes(graph, [value])

    def recipe(builder: Builder) -> Any:
        lower = Lowering(builder, graph, set(leaves).__contains__) if leaves else graph_lower
        if not is_scale:
            weight = lower.of(value, None if has_scale else torch.bfloat16)
            return to_kernel_layout(builder, weight, name != "weight_uk")
        scale, is_row = lower.of(value), len(value.shape) == 1
        scale = builder.reshape(scale, (1, *builder.shape(scale))) if is_row else scale
        return to_kernel_layout(builder, _cast_scale(builder, scale, not is_row), False)

    return builder.packed(name, recipe, leaves) if leaves else recipe(builder)


def _packed_identity(builder: Builder, plan: Plan) -> Any:
    """Returns [I | 0] for every head, packed once for all layers."""
    shape = plan.proposal.arguments["weight_uk"].shape
    device = plan.products[0].meta["val"].device

    def recipe(builder: Builder) -> Any:
        return builder.packed("weight_uk", lambda builder: identity(builder, shape, device), [])

    return builder.once(("identity", shape), recipe)


def _gamma(builder: Builder, plan: Plan, name: str) -> Any:
    """Returns the weight of a norm in bfloat16.

    A wider weight holds bfloat16 numbers, as ``policy.py`` has checked. They are checked again when
    it is packed.
    """
    value, graph = plan.proposal.arguments[name], plan.graph
    leaves = source_nodes(graph, [value])

    def recipe(builder: Builder) -> Any:
        return Lowering(builder, graph, set(leaves).__contains__).of(value, torch.bfloat16)

    wide = [
        node
        for node in leaves
        if node.op == "placeholder" and node.meta["val"].dtype != torch.bfloat16
    ]
    if not wide or len(leaves) > 1:
        return recipe(builder)
    kind = str(wide[0].meta["val"].dtype).removeprefix("torch.")
    text = f"the numbers of {label(wide[0])}, a norm weight in {kind}, are not all bfloat16 numbers"
    return builder.packed(name, recipe, leaves, exact=Exact("norm.gamma_dtype", text))


def _cast_scale(builder: Builder, value: Any, is_of_blocks: bool) -> Any:
    """Returns a scale in float32. Scales of blocks are codes of powers of two, in
    float8_e8m0fnu.
    """
    if not is_of_blocks:
        return builder.cast(value, torch.float32)
    is_code = builder.dtype(value) == torch.float8_e8m0fnu
    return value if is_code else builder.call(aten.view.dtype, value, torch.float8_e8m0fnu)
