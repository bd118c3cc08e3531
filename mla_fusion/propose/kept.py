"""Rows that caches hold in bytes, and the query that goes with them: proposals that are tried in
place of the one whose rows are bfloat16, where the kernel can write the caches itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import torch

from mla_fusion.exact.prove import Claim
from mla_fusion.graph import quantise
from mla_fusion.graph.form import MOVES, Value, filled_with, order
from mla_fusion.graph.numbers import ONE
from mla_fusion.meta.number_formats import FORMATS
from mla_fusion.meta.spec import TILE_SIZE
from mla_fusion.propose.given import Rewrites
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.quantised import strip_expand
from mla_fusion.propose.sites import Projections
from mla_fusion.targets import prolog

_NAMES = {kind.name for kind in FORMATS}


def as_kept(projections: Projections, base: Proposal) -> Iterator[Proposal]:
    """Those with a kv_cache_quant_mode, and those whose latents are kept times a number."""
    kept = _Kept(projections, base)
    if base.arguments.get("weight_quant_mode"):
        yield from kept.proposals()
    yield from kept.times_a_number()


class _Kept:
    """
    base   the proposal with rows in bfloat16
    given  its claims
    kind   the format of quantised rows
    """

    def __init__(self, projections: Projections, base: Proposal) -> None:
        self.form, self.projections = projections.form, projections
        self.base, self._beside_gamma = self._with_gamma_alone(base)
        self.given = Rewrites(self.form, [*base.optional_claims, *base.claims])
        self.kind = prolog.row_format(prolog.format_of(base.arguments.get("weight_quant_mode", 0)))
        self.latent = base.results.kv_rows.shape[1]
        self.rope = base.results.kr_rows.shape[1]

    def _with_gamma_alone(self, base: Proposal) -> tuple[Proposal, Value | None]:
        """The weight of the latents' norm without the scale of a cache, where rows are multiplied
        with both at once; and the scale.
        """
        form, name = self.form, "rmsnorm_gamma_ckv"
        inner = gamma = base.arguments[name]
        while inner.op in ("reshape", "slice", "expand"):
            inner = inner.sources[0]
        is_row = prod(inner.shape) == prod(gamma.shape)
        if not is_row or inner.op != "product" or inner.literal[1] != ONE:
            return base, None
        factors = list(zip(inner.sources, inner.literal[0], strict=True))
        own = [one for one, power in factors if power == 1 and _is_gamma(one)]
        if len(own) != 1:
            return base, None
        rest = form.product([pair for pair in factors if pair[0] is not own[0]])
        arguments = {**base.arguments, name: form.reshape(own[0], gamma.shape)}
        return replace(base, arguments=arguments), rest

    def proposals(self) -> Iterator[Proposal]:
        stored: dict[str, tuple[Value, Value, Value]] = {}
        for write in self.projections.sites[self.base.x].writes:
            rows = write.sources[2]
            if rows.shape[-1] == self._packed_width and self._is_of(rows, "kv_rows"):
                yield self._packed(rows)
            for part in ("kv_rows", "kr_rows"):
                found = self._stored(rows, part)
                if found is not None:
                    stored[part] = rows, *found
        if len(stored) == 2:
            yield self._of_channels(stored)
        elif "kv_rows" in stored:
            yield from self._of_tensor(*stored["kv_rows"])

    def times_a_number(self) -> Iterator[Proposal]:
        """kc_scale"""
        form, rows = self.form, self.base.results.kv_rows
        for write in self.projections.sites[self.base.x].writes:
            kernel = self.given.of(write.sources[2])
            times, whole = form.split(kernel) if kernel is not None else (ONE, rows)
            by = times.power(-1)
            if times == ONE or by is None or _unmoved(whole) is not rows:
                continue
            made = self._begun(0, {"kc_scale": times})
            yield self._ended(made, {}, {rows: form.scaled(made.results.kv_rows, by)})

    def _is_of(self, rows: Value, part: str) -> bool:
        known = {claim.graph for claim in self._claims(part)}
        return not known.isdisjoint(order([rows], known)) or any(
            source in known for value in order([rows], known) for source in value.sources
        )

    def _claims(self, part: str) -> list[Claim]:
        return [
            claim for claim in (*self.base.claims, *self.base.optional_claims) if claim.part == part
        ]

    # -- packed rows: tiles of the latent, the key, a step for each tile

    @property
    def _packed_width(self) -> int:
        element = self.kind.element.itemsize
        return (self.latent + 2 * self.rope + 4 * self.latent // TILE_SIZE) // element

    def _packed(self, rows: Value) -> Proposal:
        options: dict[str, Any] = {"tile_size": TILE_SIZE}
        alpha = self._clipped_at(rows)
        if alpha is not None:
            options["k_nope_clip_alpha"] = alpha
        made = self._begun(3, options)
        whole = self.form.reshape(made.results.kv_rows, rows.shape)
        return self._ended(made, {"kv_rows": [Claim("kv_rows", rows, whole)], "kr_rows": []})

    def _clipped_at(self, rows: Value) -> float | None:
        """The largest of a tile, times this, is what its numbers are cut off at."""
        for value in order([rows], [self.base.x]):
            if value.op == "function" and value.literal[0] == "clip":
                tiles, limit = value.sources
                ratio = self._ratio(limit, quantise.largest(self.form, tiles))
                one = ratio and filled_with(ratio)
                if one is not None:
                    return float(one.literal[1])
        return None

    # -- rows that are multiplied with scales

    def _stored(self, rows: Value, part: str) -> tuple[Value, Value] | None:
        """The rows before they were quantised, and what they were multiplied with."""
        inner = _unmoved(rows)
        if inner.op != "function" or inner.literal[0] not in _NAMES:
            return None
        for claim in self._claims(part):
            if prod(claim.graph.shape) != prod(inner.shape):
                continue
            before = self.form.reshape(claim.graph, inner.shape)
            ratio = self._ratio(inner.sources[0], before)
            if ratio is not None and part == "kv_rows" and self._beside_gamma is not None:
                ratio = self.form.times(ratio, self._beside_gamma)
            if ratio is not None:
                return before, ratio
        return None

    def _ratio(self, value: Value, *by: Value) -> Value | None:
        """The value over the others, if that is no activation."""
        factors = [(value, Fraction(1)), *((one, Fraction(-1)) for one in by)]
        found = strip_expand(self.form.product(factors))
        return None if found.active else found

    def _scale(self, value: Value, width: int) -> Value | None:
        """[width]; of one number in every column. None of what is more than a row."""
        one = filled_with(value) or value
        if prod(one.shape) == 1:
            return self.form.expand(self.form.reshape(one, ()), (width,))
        is_row = value.shape[-1:] == (width,) and prod(value.shape) == width
        return self.form.reshape(value, (width,)) if is_row else None

    def _of_channels(self, stored: Mapping[str, tuple[Value, Value, Value]]) -> Proposal:
        """Both caches in bytes, with a scale for each column (kv_cache_quant_mode 2)."""
        options: dict[str, Any] = {}
        widths = {"kv_rows": self.latent, "kr_rows": self.rope}
        for part, (_, _, ratio) in stored.items():
            scale = self._scale(ratio, widths[part])
            if scale is not None:
                options["quant_scale_c" + part[:2]] = scale
        made = self._begun(2, options)
        claims = {part: [self._moved(part, *stored[part][:2], made)] for part in stored}
        return self._ended(made, claims)

    def _moved(self, part: str, rows: Value, before: Value, made: Proposal) -> Claim:
        """``rows`` are the bytes of what was ``before`` quantisation."""
        kernel = self.given.of(before)
        assert kernel is not None
        old, new = getattr(self.base.results, part), getattr(made.results, part)
        kernel = self.form.substituted(kernel, {old: new})
        return Claim(part, rows, self.form.reshape(kernel, rows.shape))

    def _of_tensor(self, rows: Value, before: Value, ratio: Value) -> Iterator[Proposal]:
        """The latents in bytes with one scale, the query too, and what is rotated of it scaled to
        go with both (kv_cache_quant_mode 1).
        """
        of_cache = self._scale(ratio, 1)
        for value, kernel in self._queries():
            codes, step = quantise.by_row(self.form, value, self.kind)
            if codes not in self.projections.graph.nodes or of_cache is None:
                continue
            for claim, of_query in self._scaled_rope(step):
                options: dict[str, Any] = {"quant_scale_ckv": of_query}
                by = self._ratio(of_cache, of_query)
                if of_query is not of_cache:
                    one = by and filled_with(by)
                    if one is None:
                        continue
                    options["kc_scale"] = one.literal[1]
                made = self._begun(1, options)
                yield self._ended(
                    made,
                    {
                        "kv_rows": [self._moved("kv_rows", rows, before, made)],
                        "query": self._of_query(codes, step, kernel, made),
                        "query_rope": [
                            Claim("query_rope", claim.graph, self._other(claim.kernel, made))
                        ],
                    },
                )

    def _of_query(self, codes: Value, step: Value, kernel: Value, made: Proposal) -> list[Claim]:
        form, (old, new) = self.form, (self.base.results.query, made.results.query)
        values = form.substituted(kernel, {old: new})
        of_rows = made.results.dequant_scale_q_nope
        assert of_rows is not None
        spread = form.substituted(kernel, {old: form.expand(of_rows, old.shape)})
        steps = form.slice(spread, -1, 0, 1)
        return [
            Claim("query", codes, form.reshape(values, codes.shape)),
            Claim("dequant_scale_q_nope", step, form.reshape(steps, step.shape)),
        ]

    def _queries(self) -> Iterator[tuple[Value, Value]]:
        """The absorbed query and what is moved of it, with what each is over the result."""
        stack = [claim.graph for claim in self._claims("query")]
        for value in self._moves_of(stack):
            kernel = self.given.of(value)
            if kernel is not None and prod(value.shape) == prod(self.base.results.query.shape):
                yield value, kernel

    def _moves_of(self, values: Iterable[Value]) -> Iterator[Value]:
        stack, seen = [*values], set[Value]()
        while stack:
            value = stack.pop()
            if value not in seen:
                seen.add(value)
                yield value
                users = self.projections.users.get(value, ())
                stack += [user for user in users if user.op in MOVES]

    def _scaled_rope(self, step: Value) -> Iterator[tuple[Claim, Value]]:
        """What is rotated of the query, times a scale over the step of each head: a claim for the
        unscaled one at its place, and the scale.
        """
        for known in self._claims("query_rope"):
            for rotated in self._moves_of([known.graph]):
                for value in self.projections.users.get(rotated, ()):
                    is_held = value in self.projections.graph.nodes
                    is_rope = prod(step.shape) * self.rope == prod(value.shape)
                    if value.op != "product" or not is_held or not is_rope:
                        continue
                    steps = self.form.reshape(step, (*value.shape[:-1], 1))
                    before = self.form.reshape(rotated, value.shape)
                    ratio = self._ratio(self.form.times(value, steps), before)
                    scale = None if ratio is None else self._scale(ratio, 1)
                    kernel = self.given.of(before)
                    if scale is not None and kernel is not None:
                        yield Claim("query_rope", value, kernel), scale

    # -- proposals

    def _begun(self, mode: int, options: Mapping[str, Any]) -> Proposal:
        arguments = {**self.base.arguments, "kv_cache_quant_mode": mode, **options}
        defined = prolog.prolog(self.form, arguments)
        name = f"{self.base.results.query.literal} in mode {mode}"
        results = prolog.leaves(self.form, defined, name)
        return replace(self.base, arguments=arguments, results=results, definitions=defined)

    def _ended(
        self,
        made: Proposal,
        claims: Mapping[str, list[Claim]],
        others: Mapping[Value, Value] | None = None,
    ) -> Proposal:
        """With the claims of the base for other parts, over the new results; ``others``: what old
        results are of these, where they are not the same.
        """
        kept = [
            [
                Claim(one.part, one.graph, self._other(one.kernel, made, others))
                for one in of_base
                if one.part not in claims
            ]
            for of_base in (self.base.claims, self.base.optional_claims)
        ]
        own = [claim for some in claims.values() for claim in some]
        return replace(made, claims=[*own, *kept[0]], optional_claims=kept[1])

    def _other(
        self, kernel: Value, made: Proposal, others: Mapping[Value, Value] | None = None
    ) -> Value:
        old, new = vars(self.base.results), vars(made.results)
        leaves = {old[name]: new[name] for name in old if old[name] is not None}
        alike = {leaf: one for leaf, one in leaves.items() if leaf.shape == one.shape}
        return self.form.substituted(kernel, alike | dict(others or {}))


def _is_gamma(value: Value) -> bool:
    while value.op in ("reshape", "expand", "cast"):
        value = value.sources[0]
    return value.op == "leaf" and value.dtype == torch.bfloat16


def _unmoved(value: Value) -> Value:
    while value.op == "reshape":
        value = value.sources[0]
    return value
