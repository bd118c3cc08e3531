"""Proposes calls whose caches hold bytes, or latents times a number.

``plan/planner.py`` tries these variants of a proposal first. They let the kernel write caches that
would otherwise be staged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from mla_fusion.exact.prove import Claim
from mla_fusion.fx.walk import reached
from mla_fusion.graph import quantise
from mla_fusion.graph.form import MOVES, Value, filled_with, nearest, order, strip, strip_reshapes
from mla_fusion.graph.numbers import ONE
from mla_fusion.meta.spec import TILE_SIZE
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.quantised import FORMATS_BY_NAME, scale_row
from mla_fusion.propose.rewrites import Rewrites, claims_over
from mla_fusion.propose.sites import Projections
from mla_fusion.targets.prolog import format_of, row_format


def cache_variants(projections: Projections, base: Proposal) -> Iterator[Proposal]:
    """Yields the proposals with a kv_cache_quant_mode, and those whose latents are cached times a
    number.
    """
    variants = _Variants(projections, base)
    if base.arguments.get("weight_quant_mode"):
        yield from variants.proposals()
    yield from variants.scaled_latents()


class _Variants:
    """Makes variants of one proposal.

    base      the proposal with rows in bfloat16
    rewrites  what its claims say
    kind      the format of quantised rows
    """

    def __init__(self, projections: Projections, base: Proposal) -> None:
        self.form, self.projections = projections.form, projections
        self.base, self._cache_scale = self._with_gamma_alone(base)
        self.rewrites = Rewrites(self.form, [*base.optional_claims, *base.claims])
        self.kind = row_format(format_of(base.arguments.get("weight_quant_mode", 0)))
        self.latent = base.results.kv_rows.shape[1]
        self.rope = base.results.kr_rows.shape[1]

    def _with_gamma_alone(self, base: Proposal) -> tuple[Proposal, Value | None]:
        """Returns the proposal without the scale of a cache in gamma, and that scale or None.

        Some models multiply the normed rows by gamma and the scale at once.
        """
        form, name = self.form, "rmsnorm_gamma_ckv"
        gamma = base.arguments[name]
        inner = strip(gamma, "reshape", "slice", "expand")
        is_row = inner.numel == gamma.numel
        if not is_row or inner.op != "product" or inner.number != ONE:
            return base, None
        weights = [factor for factor, power in inner.operands if power == 1 and _is_gamma(factor)]
        if len(weights) != 1:
            return base, None
        scale = form.product([pair for pair in inner.operands if pair[0] is not weights[0]])
        arguments = {**base.arguments, name: form.reshape(weights[0], gamma.shape)}
        return replace(base, arguments=arguments), scale

    def proposals(self) -> Iterator[Proposal]:
        """Yields the proposals whose caches hold bytes."""
        sources_by_part: dict[str, tuple[Value, Value, Value]] = {}
        latents = {claim.graph for claim in self._claims("kv_rows")}
        # packed rows: tiles of the latent, the key, a step for each tile
        byte_count = self.latent + 2 * self.rope + 4 * self.latent // TILE_SIZE
        packed_width = byte_count // self.kind.element.itemsize
        for write in self.projections.sites[self.base.x].writes:
            rows = write.sources[2]
            if rows.shape[-1] == packed_width and nearest([rows], latents):
                yield self._packed_rows(rows)
            for part in ("kv_rows", "kr_rows"):
                source = self._unquantised_source(rows, part)
                if source is not None:
                    sources_by_part[part] = rows, *source
        if len(sources_by_part) == 2:
            yield from self._with_channel_scales(sources_by_part)
        elif "kv_rows" in sources_by_part:
            yield from self._with_tensor_scale(*sources_by_part["kv_rows"])

    def scaled_latents(self) -> Iterator[Proposal]:
        """Yields the proposals whose latents are cached times a number (kc_scale)."""
        form, rows = self.form, self.base.results.kv_rows
        for write in self.projections.sites[self.base.x].writes:
            kernel = self.rewrites.of(write.sources[2])
            number, unscaled = form.split(kernel) if kernel is not None else (ONE, rows)
            if number != ONE and strip_reshapes(unscaled) is rows:
                variant = self._variant(0, {"kc_scale": number})
                unscaled_rows = form.scaled(variant.results.kv_rows, number.inverse)
                yield self._finish(variant, {}, {rows: unscaled_rows})

    def _claims(self, part: str) -> list[Claim]:
        """Returns the claims of this part."""
        return [
            claim for claim in (*self.base.claims, *self.base.optional_claims) if claim.part == part
        ]

    def _packed_rows(self, rows: Value) -> Proposal:
        """Returns the proposal with packed rows in one cache (kv_cache_quant_mode 3)."""
        options: dict[str, Any] = {"tile_size": TILE_SIZE}
        alpha = self._clip_ratio(rows)
        if alpha is not None:
            options["k_nope_clip_alpha"] = alpha
        variant = self._variant(3, options)
        packed_result = self.form.reshape(variant.results.kv_rows, rows.shape)
        return self._finish(
            variant, {"kv_rows": [Claim("kv_rows", rows, packed_result)], "kr_rows": []}
        )

    def _clip_ratio(self, rows: Value) -> float | None:
        """Returns the ratio between the clip limit of a tile and its largest element, or None."""
        for value in order([rows], [self.base.x]):
            if value.function == "clip":
                tiles, limit = value.sources
                ratio = self._ratio(limit, quantise.largest(self.form, tiles))
                ratio_number = ratio and filled_with(ratio)
                if ratio_number is not None:
                    return float(ratio_number.number)
        return None

    # -- rows that are multiplied with scales

    def _unquantised_source(self, rows: Value, part: str) -> tuple[Value, Value] | None:
        """Returns the rows before they were quantised, and what they were multiplied by, or None.

        part  the result whose rows are in the cache
        """
        inner = strip_reshapes(rows)
        if inner.function not in FORMATS_BY_NAME:
            return None
        for claim in self._claims(part):
            if claim.graph.numel != inner.numel:
                continue
            float_rows = self.form.reshape(claim.graph, inner.shape)
            ratio = self._ratio(inner.sources[0], float_rows)
            if ratio is not None and part == "kv_rows" and self._cache_scale is not None:
                ratio = self.form.times(ratio, self._cache_scale)
            if ratio is not None:
                return float_rows, ratio
        return None

    def _ratio(self, value: Value, divisor: Value) -> Value | None:
        """Returns the value over the divisor, or None if that is an activation."""
        ratio = strip(self.form.product([(value, 1), (divisor, -1)]), "expand")
        return None if ratio.active else ratio

    def _with_channel_scales(
        self, sources: Mapping[str, tuple[Value, Value, Value]]
    ) -> Iterator[Proposal]:
        """Yields the proposal with both caches in bytes and a scale for each column
        (kv_cache_quant_mode 2), if there are such scales.

        sources  by part: the cached rows, the rows before, and what they were multiplied by
        """
        options: dict[str, Any] = {}
        widths = {"kv_rows": self.latent, "kr_rows": self.rope}
        for part, (_, _, ratio) in sources.items():
            scale = scale_row(self.form, ratio, widths[part])
            if scale is None:
                return
            options["quant_scale_c" + part[:2]] = scale
        variant = self._variant(2, options)
        claims = {part: [self._row_claim(part, *sources[part][:2], variant)] for part in sources}
        yield self._finish(variant, claims)

    def _row_claim(self, part: str, rows: Value, float_rows: Value, variant: Proposal) -> Claim:
        """Returns the claim of quantised rows.

        float_rows  the rows before they were quantised
        """
        kernel = self.rewrites.of(float_rows)
        assert kernel is not None
        return Claim(part, rows, self.form.reshape(self._rebase(kernel, variant), rows.shape))

    def _with_tensor_scale(
        self, rows: Value, float_rows: Value, ratio: Value
    ) -> Iterator[Proposal]:
        """Yields proposals with latents in bytes and one scale (kv_cache_quant_mode 1).

        The query is in bytes too. What is rotated of it is scaled to go with both.
        """
        cache_scale = scale_row(self.form, ratio, 1)
        for value in self._moves_of(claim.graph for claim in self._claims("query")):
            kernel = self.rewrites.of(value)
            if kernel is None or value.numel != self.base.results.query.numel:
                continue
            codes, step = quantise.by_row(self.form, value, self.kind)
            if codes not in self.projections.graph.nodes or cache_scale is None:
                continue
            for claim, query_scale in self._scaled_rope_claims(step):
                options: dict[str, Any] = {"quant_scale_ckv": query_scale}
                ratio_of_scales = self._ratio(cache_scale, query_scale)
                if query_scale is not cache_scale:
                    ratio_number = ratio_of_scales and filled_with(ratio_of_scales)
                    if ratio_number is None:
                        continue
                    options["kc_scale"] = ratio_number.number
                variant = self._variant(1, options)
                yield self._finish(
                    variant,
                    {
                        "kv_rows": [self._row_claim("kv_rows", rows, float_rows, variant)],
                        "query": self._query_claims(codes, step, kernel, variant),
                        "query_rope": [
                            Claim("query_rope", claim.graph, self._rebase(claim.kernel, variant))
                        ],
                    },
                )

    def _query_claims(
        self, codes: Value, step: Value, kernel: Value, variant: Proposal
    ) -> list[Claim]:
        """Returns the claims of the query's bytes and of its scales."""
        form, query = self.form, self.base.results.query
        values, scales = self._rebase(kernel, variant), variant.results.dequant_scale_q_nope
        assert scales is not None
        spread_scales = form.substituted(kernel, {query: form.expand(scales, query.shape)})
        steps = form.slice(spread_scales, -1, 0, 1)
        return [
            Claim("query", codes, form.reshape(values, codes.shape)),
            Claim("dequant_scale_q_nope", step, form.reshape(steps, step.shape)),
        ]

    def _moves_of(self, values: Iterable[Value]) -> Iterator[Value]:
        """Yields the Values, and what is computed from them by moves."""
        users = self.projections.users
        return reached(
            values, lambda value: (user for user in users.get(value, ()) if user.op in MOVES)
        )

    def _scaled_rope_claims(self, step: Value) -> Iterator[tuple[Claim, Value]]:
        """Yields claims of what is rotated of the query, times a scale over the step of each head.

        Each claim is over the unscaled result. The scale comes with it.
        """
        for claim in self._claims("query_rope"):
            for rotated in self._moves_of([claim.graph]):
                for value in self.projections.users.get(rotated, ()):
                    is_held = value in self.projections.graph.nodes
                    is_rope = step.numel * self.rope == value.numel
                    if value.op != "product" or not is_held or not is_rope:
                        continue
                    steps = self.form.reshape(step, (*value.shape[:-1], 1))
                    unscaled = self.form.reshape(rotated, value.shape)
                    ratio = self._ratio(self.form.times(value, steps), unscaled)
                    scale = None if ratio is None else scale_row(self.form, ratio, 1)
                    kernel = self.rewrites.of(unscaled)
                    if scale is not None and kernel is not None:
                        yield Claim("query_rope", value, kernel), scale

    # -- proposals

    def _variant(self, mode: int, options: Mapping[str, Any]) -> Proposal:
        """Returns the base with another cache mode and options, over new results."""
        changes = {"kv_cache_quant_mode": mode, **options}
        return self.base.with_arguments(self.form, changes, f"in mode {mode}")

    def _finish(
        self,
        variant: Proposal,
        claims: Mapping[str, list[Claim]],
        old_results: Mapping[Value, Value] | None = None,
    ) -> Proposal:
        """Returns the variant with its claims.

        Claims of the base for other parts are kept, over the new results.

        old_results  what old results are over the new ones, if they are not equal
        """
        results = self._new_results(variant) | dict(old_results or {})
        kept_claims, optional_claims = (
            claims_over(
                self.form, [claim for claim in of_base if claim.part not in claims], results
            )
            for of_base in (self.base.claims, self.base.optional_claims)
        )
        new_claims = [new_claim for part_claims in claims.values() for new_claim in part_claims]
        return replace(variant, claims=[*new_claims, *kept_claims], optional_claims=optional_claims)

    def _rebase(self, kernel: Value, variant: Proposal) -> Value:
        """Returns a Value over the new results in place of the old ones."""
        return self.form.substituted(kernel, self._new_results(variant))

    def _new_results(self, variant: Proposal) -> dict[Value, Value]:
        """Returns the results of the variant by those of the base, where the shapes are equal."""
        new = variant.results.by_name
        return {
            leaf: new[name]
            for name, leaf in self.base.results.by_name.items()
            if leaf.shape == new[name].shape
        }


def _is_gamma(value: Value) -> bool:
    """Returns True if the Value is a parameter in bfloat16, perhaps moved or cast."""
    inner = strip(value, "reshape", "expand", "cast")
    return inner.op == "leaf" and inner.dtype == torch.bfloat16
