"""More heads than the model has, where the kernel takes no such number: those of zeros, whose
results are cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from mla_fusion.exact.prove import Claim
from mla_fusion.graph.form import Form, Value, filled_with
from mla_fusion.propose.given import Rewrites
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.quantised import strip_views
from mla_fusion.propose.sites import Projections
from mla_fusion.targets import prolog

_OF_HEADS = ("query", "query_rope", "dequant_scale_q_nope")


def padded(projections: Projections, base: Proposal, heads: int) -> Proposal | None:
    """The proposal with so many heads; None where scales of blocks would have to be made."""
    form, a = projections.form, base.arguments
    own, nope, latent = a["weight_uk"].shape
    depth, columns = a["weight_uq_qr"].shape
    more = heads - own
    scale = a.get("dequant_scale_w_uq_qr")
    if scale is not None and len(scale.shape) > 1:
        return None
    arguments = dict(a)
    arguments["weight_uk"] = _joined(form, a["weight_uk"], (more, nope, latent), 0)
    beside = depth, columns // own * more
    arguments["weight_uq_qr"] = _joined(form, a["weight_uq_qr"], beside, 1)
    if scale is not None:
        arguments["dequant_scale_w_uq_qr"] = _joined(form, scale, beside[1:], 0, 1)
    defined = prolog.prolog(form, arguments)
    results = prolog.leaves(form, defined, f"{base.results.query.literal} of {heads} heads")
    others = {leaf: getattr(results, name) for name, leaf in vars(base.results).items() if leaf}
    for name in _OF_HEADS:
        leaf = getattr(base.results, name)
        if leaf is not None:
            others[leaf] = form.slice(getattr(results, name), 1, 0, own)

    def changed(claim: Claim) -> Claim:
        return Claim(claim.part, claim.graph, form.substituted(claim.kernel, others))

    wide = list(_padded_too(projections, base, results))
    return replace(
        base,
        arguments=arguments,
        results=results,
        definitions=defined,
        claims=list(map(changed, base.claims)),
        optional_claims=[*map(changed, base.optional_claims), *wide],
        model_heads=own,
    )


def _joined(form: Form, value: Value, shape: tuple[int, ...], axis: int, of: int = 0) -> Value:
    return form.join([value, form.filled(of, shape, value.dtype)], axis)


def _padded_too(
    projections: Projections, base: Proposal, results: prolog.Results
) -> Iterator[Claim]:
    """What the graph pads with as many heads of zeros."""
    form, claims = projections.form, [*base.claims, *base.optional_claims]
    given = Rewrites(form, claims)
    for claim in claims:
        if claim.part not in _OF_HEADS:
            continue
        whole, stack = getattr(results, claim.part), [claim.graph]
        for value in stack:
            known = given.of(value)
            is_result = known is not None and strip_views(known) is getattr(
                base.results, claim.part
            )
            for user in projections.users.get(value, ()):
                if user.op in ("permute", "reshape"):
                    stack.append(user)
                zeros = user.op == "join" and filled_with(user.sources[-1])
                is_padded = zeros and is_result and not zeros.literal[1].ratio
                if is_padded and prod(user.shape) == prod(whole.shape):
                    yield Claim(claim.part, user, form.reshape(whole, user.shape))
