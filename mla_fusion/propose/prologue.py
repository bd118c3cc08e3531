"""A prologue's arguments and claims, joined from the readings of two sites: that of x, and that of
the query's latents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_fusion.exact.prove import Claim
from mla_fusion.graph.form import Form, Value
from mla_fusion.graph.layout import Layout, of_tokens
from mla_fusion.propose.departure import Departure
from mla_fusion.propose.norms import Norm, solved
from mla_fusion.propose.rotations import Pairs, pairs, tables
from mla_fusion.propose.sites import Projections, Site, rows_of
from mla_fusion.targets import prolog

ROPE = 64  # of the operator


@dataclass
class Proposal:
    """
    x          the activation [T, He]
    arguments  of the operator, by name: Values, numbers of attributes
    results    the operator's, as Values
    claims     what of the graph is which result
    """

    x: Value
    arguments: dict[str, Any]
    results: prolog.Results
    claims: list[Claim] = field(default_factory=list)

    @property
    def given(self) -> dict[Value, Layout]:
        return {self.x: of_tokens(self.x.shape[:1], self.x.shape[1:])}


def proposals(projections: Projections) -> Iterator[Proposal | Departure]:
    """One for each pair of sites of which the second is computed from the first."""
    for down in projections.sites.values():
        for up in down.ahead:
            try:
                yield _Joined(projections, down, up).proposal()
            except Departure as departure:
                yield departure


@dataclass
class _Absorbed:
    """A product with W_uk: the Value, the matrices [h, D, C], and the columns that it reads."""

    value: Value
    weight: Value
    columns: Tensor


class _Joined:
    def __init__(self, projections: Projections, down: Site, up: Site) -> None:
        self.form: Form = projections.form
        self.projections, self.down, self.up = projections, down, up

    def proposal(self) -> Proposal:
        form, down, up = self.form, self.down, self.up
        reading = down.readings.get(up.rows)
        if reading is None or reading.kind != "normed":
            raise Departure("norm.absent", "the query's latents are not normed", [up.rows])
        of_query = solved(down, up.rows)
        turned = self._turned(up)
        if not turned:
            raise Departure("rope.absent", "no part of the query is rotated", up.dots)
        absorbed = list(self._absorbed(turned))
        if not absorbed:
            raise Departure("absorb.absent", "no part of the query is multiplied with W_uk", up.dots)
        weight_uk = form.join([one.weight for one in absorbed], 0)
        heads, nope, latent = weight_uk.shape
        columns = torch.cat([one.columns for one in absorbed])
        value, found = turned[-1]
        if found.heads != heads:
            detail = f"{heads} heads are multiplied with W_uk, {found.heads} are rotated"
            raise Departure("absorb.absent", detail, [absorbed[0].value])
        key, of_key, key_pairs = self._key(found, latent, of_query)
        cos, sin = tables(up, value, found)
        nope_rope = torch.cat((columns, found.columns), 1).flatten()
        arguments = {
            "token_x": down.rows,
            "weight_dq": form.take(down.weight, 1, of_query.columns.tolist()),
            "weight_uq_qr": form.take(up.weight, 1, nope_rope.tolist()),
            "weight_uk": weight_uk,
            "weight_dkv_kr": form.take(
                down.weight, 1, [*of_key.columns.tolist(), *key_pairs.columns.flatten().tolist()]
            ),
            "rmsnorm_gamma_cq": of_query.gamma,
            "rmsnorm_gamma_ckv": of_key.gamma,
            "rope_cos": cos,
            "rope_sin": sin,
            "rmsnorm_epsilon_cq": of_query.epsilon,
            "rmsnorm_epsilon_ckv": of_key.epsilon,
        }
        results = prolog.prolog(form, arguments)
        made = Proposal(down.rows, arguments, results)
        made.claims += self._claims(made, absorbed, turned, key, key_pairs, up.rows)
        return made

    def _turned(self, site: Site) -> list[tuple[Value, Pairs]]:
        found = (
            (value, pairs(reading, ROPE))
            for value, reading in site.readings.items()
            if reading.kind == "turned"
        )
        return [(value, of_value) for value, of_value in found if of_value is not None]

    def _absorbed(self, turned: Sequence[tuple[Value, Pairs]]) -> Iterator[_Absorbed]:
        """Products with matrices of heads, of what is moved of the query."""
        up = self.up
        for value, reading in up.readings.items():
            if reading.kind != "moved":
                continue
            for user in self.projections.users.get(value, ()):
                if user.op != "dot" or user.sources[0] is not value:
                    continue
                weight = user.sources[1]
                if not weight.weight:
                    continue
                if len(weight.shape) == 2:
                    weight = self.form.reshape(weight, (1, *weight.shape))
                heads, nope, _ = weight.shape
                if len(reading.columns) == heads * nope:
                    yield _Absorbed(user, weight, reading.columns.reshape(heads, nope))

    def _key(self, query: Pairs, latent: int, of_query: Norm) -> tuple[Value, Norm, Pairs]:
        """The rotated key, by the query's tables, and the norm of the latents."""
        down = self.down
        of_others = set(of_query.columns.tolist())
        normed = [
            value
            for value, reading in down.readings.items()
            if reading.kind == "normed"
            and len(reading.columns) == latent
            and of_others.isdisjoint(reading.columns.tolist())
        ]
        if not normed:
            raise Departure("norm.absent", f"no {latent} columns of x are normed", down.dots)
        keys = []
        for value, reading in down.readings.items():
            if reading.kind == "turned" and len(reading.columns) == ROPE:
                found = pairs(reading, ROPE, query)
                if found is not None and torch.equal(found.diagonal, query.diagonal):
                    keys.append((value, found))
        if not keys:
            raise Departure("rope.absent", "no key is rotated by the query's tables", down.dots)
        error: Departure | None = None
        for value in normed[::-1]:
            try:
                return keys[-1][0], solved(down, value), keys[-1][1]
            except Departure as departure:
                error = departure
        assert error is not None
        raise error

    def _claims(
        self,
        made: Proposal,
        absorbed: Iterable[_Absorbed],
        turned: Sequence[tuple[Value, Pairs]],
        key: Value,
        key_pairs: Pairs,
        latents: Value,
    ) -> Iterator[Claim]:
        form, results = self.form, made.results
        at = 0
        for one in absorbed:
            heads = one.weight.shape[0]
            part = form.slice(results.query, 1, at, at + heads)
            at += heads
            yield Claim("query", one.value, self._like(form.permute(part, (1, 0, 2)), one.value))
        rows = self._rows(self.up, turned[-1][0])
        flat = form.reshape(results.query_rope, rows.shape)
        yield Claim("query_rope", rows, form.take(flat, 1, turned[-1][1].places.tolist()))
        rows = self._rows(self.down, key)
        yield Claim("kr_rows", rows, form.take(results.kr_rows, 1, key_pairs.places.tolist()))
        yield Claim("query_norm", latents, results.query_norm)

    def _like(self, value: Value, other: Value) -> Value:
        return self.form.reshape(value, other.shape)

    def _rows(self, site: Site, value: Value) -> Value:
        return rows_of(self.form, value, site.layouts[value], site.tokens)


