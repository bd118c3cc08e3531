"""Pads the heads of a proposal with zeros, if the kernel does not take the model's number of heads.

``plan/planner.py`` asks this after the contract has refused the number. The results are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mla_fusion.exact.prove import Claim
from mla_fusion.graph.form import Form, Value, is_zero
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.quantised import strip_views
from mla_fusion.propose.rewrites import Rewrites, claims_over
from mla_fusion.propose.sites import Projections
from mla_fusion.targets import prolog

_PARTS_WITH_HEADS = ("query", "query_rope", "dequant_scale_q_nope")


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
    optional_claims = claims_over(form, base.optional_claims, substitutes)
    padded_claims = _padded_claims(projections, base, variant.results)
    return replace(
        variant,
        claims=claims_over(form, base.claims, substitutes),
        optional_claims=[*optional_claims, *padded_claims],
        model_heads=model_heads,
    )


def _join_filled(
    form: Form, value: Value, shape: tuple[int, ...], axis: int, fill: int = 0
) -> Value:
    """Returns a Value joined with numbers ``fill`` of this shape."""
    return form.join([value, form.filled(fill, shape, value.dtype)], axis)


def _padded_claims(
    projections: Projections, base: Proposal, results: prolog.Results
) -> Iterator[Claim]:
    """Yields claims of Values that the graph itself pads with as many heads of zeros."""
    form, claims = projections.form, [*base.claims, *base.optional_claims]
    rewrites = Rewrites(form, claims)
    for claim in claims:
        if claim.part not in _PARTS_WITH_HEADS:
            continue
        result, stack = getattr(results, claim.part), [claim.graph]
        for value in stack:
            rewrite = rewrites.of(value)
            is_result = rewrite is not None and strip_views(rewrite) is getattr(
                base.results, claim.part
            )
            for user in projections.users.get(value, ()):
                if user.op in ("permute", "reshape"):
                    stack.append(user)
                is_padded = is_result and user.op == "join" and is_zero(user.sources[-1])
                if is_padded and user.numel == result.numel:
                    yield Claim(claim.part, user, form.reshape(result, user.shape))
