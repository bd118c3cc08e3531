"""Pads the heads of a proposal with zeros, if the kernel does not take the model's number of heads.

``plan/planner.py`` asks this after the contract has refused the number. The results are cut.
"""

from __future__ import annotations

from dataclasses import replace

from mla_fusion.graph.form import Form, Value
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.rewrites import claims_over
from mla_fusion.propose.sites import Projections


def pad_heads(projections: Projections, base: Proposal, heads: int) -> Proposal | None:
    """Returns the proposal with so many heads, or None if scales of blocks would have to be made.

    heads  the number of heads that the kernel takes
    """
    form = projections.form
    weight_uk, weight_uq_qr = base.arguments["weight_uk"], base.arguments["weight_uq_qr"]
    (model_heads, nope, latent), (depth, columns) = weight_uk.shape, weight_uq_qr.shape
    added_heads = heads - model_heads
    scale = base.arguments.get("dequant_scale_w_uq_qr")
    if scale is not None and len(scale.shape) > 1:
        return None
    zeros_shape = depth, columns // model_heads * added_heads
    changes = {
        "weight_uk": _join_filled(form, weight_uk, (added_heads, nope, latent), 0),
        "weight_uq_qr": _join_filled(form, weight_uq_qr, zeros_shape, 1),
    }
    if scale is not None:
        changes["dequant_scale_w_uq_qr"] = _join_filled(form, scale, zeros_shape[1:], 0, 1)
    variant = base.with_arguments(form, changes, f"of {heads} heads")
    results = variant.results.by_name
    substitutes = {  # cut to the model's heads
        leaf: form.slice(results[name], 1, 0, leaf.shape[1])
        for name, leaf in base.results.by_name.items()
    }
    return replace(
        variant,
        claims=claims_over(form, base.claims, substitutes),
        optional_claims=claims_over(form, base.optional_claims, substitutes),
        model_heads=model_heads,
    )


def _join_filled(
    form: Form, value: Value, shape: tuple[int, ...], axis: int, fill: int = 0
) -> Value:
    """Returns a Value joined with numbers ``fill`` of this shape."""
    return form.join([value, form.filled(fill, shape, value.dtype)], axis)
