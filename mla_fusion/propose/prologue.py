"""A prologue's arguments and claims, joined from the readings of two sites: that of x, and that of
the query's latents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fusion.exact.field import number, power
from mla_fusion.exact.prove import Claim
from mla_fusion.graph import quantise
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import MOVES, Form, Value, filled_with, numbered
from mla_fusion.graph.layout import Layout, Mixed, layout_of, token_layout
from mla_fusion.graph.numbers import Number, is_open
from mla_fusion.meta.number_formats import MXFP8, NumberFormat
from mla_fusion.propose.norms import Norm, fill_products, read_norm
from mla_fusion.propose.quantised import (
    column_scales,
    row_scales,
    split_blocks,
    strip_expand,
    strip_views,
    unquantised_rows,
)
from mla_fusion.propose.rotations import Pairs, identity_pairs, read_pairs, read_tables
from mla_fusion.propose.sites import POINT, Projections, Reading, Site, from_rows, to_rows
from mla_fusion.targets import prolog

ROPE, LATENT = 64, 512  # of the operator


@dataclass
class Proposal:
    """
    x          the activation [T, He] that the first products read
    arguments  of the operator, by name: Values, numbers of attributes
    results    of the call: leaves, by name
    defined    what each result is, by the operator's definition; None: it is to be made
    claims     what of the graph is which result: Values of the graph, beside Values of the results
    more       further ones, of which each may hold or not
    products   Values that the call computes inside
    rotation   the order of elements before and behind it; None where nothing is rotated
    instead    why it is not the call of a whole prologue: W_uk is [I | 0]
    heads      of the model, where the call has more; else 0
    """

    x: Value
    arguments: dict[str, Any]
    results: prolog.Results
    definitions: prolog.Results | None
    claims: list[Claim]
    optional_claims: list[Claim]
    products: list[Value]
    rotation: tuple[str, str] | None
    identity_reason: Departure | None = None
    model_heads: int = 0

    @property
    def activations(self) -> dict[Value, Layout]:
        return {self.x: token_layout(self.x.shape[:1], self.x.shape[1:])}

    def numbered(self) -> tuple[object, list[Value]]:
        """The structure of all that is claimed, and its Values: what token_x is made of, and other
        activations that were there before it, stand for themselves.
        """
        first, claims = self.arguments["token_x"], (*self.claims, *self.optional_claims)
        results = (leaf for leaf in vars(self.results).values() if leaf is not None)
        given = [one for one in self.arguments.values() if isinstance(one, Value)]
        sides = [side for claim in claims for side in (claim.graph, claim.kernel)]
        key, values = numbered([self.x, *given, *sides], [first, *results], first.serial)
        names = [(n, None if isinstance(a, Value) else a) for n, a in self.arguments.items()]
        parts = [claim.part for claim in claims]
        return (key, len(self.claims), tuple(names), tuple(parts)), values

    def with_definitions(self, form: Form, claim: Claim) -> Claim:
        """With the definition of each result in its place."""
        defined = self.definitions or prolog.prolog(form, self.arguments)
        others = {
            leaf: getattr(defined, name)
            for name, leaf in vars(self.results).items()
            if leaf is not None
        }
        return Claim(claim.part, claim.graph, form.substituted(claim.kernel, others))

    def renamed(self, form: Form, others: dict[Value, Value], name: str) -> Proposal:
        """For a prologue of the same structure. Raises LookupError where it is made of more than
        ``others``.
        """
        own = prolog.leaves(form, self.results, name)
        parts = vars(self.results)
        others |= {leaf: getattr(own, part) for part, leaf in parts.items() if leaf is not None}

        def new(given: Any) -> Any:
            return form.renamed(given, others) if isinstance(given, Value) else given

        return Proposal(
            new(self.x),
            {argument: new(given) for argument, given in self.arguments.items()},
            own,
            None,
            [Claim(one.part, new(one.graph), new(one.kernel)) for one in self.claims],
            [Claim(one.part, new(one.graph), new(one.kernel)) for one in self.optional_claims],
            [new(value) for value in self.products],
            self.rotation,
            self.identity_reason,
        )


def proposals(
    projections: Projections, by_identity: bool = False
) -> Iterator[Proposal | Departure]:
    """One for each pair of sites of which the second is computed from the first.

    by_identity  a query that is not multiplied with W_uk is, by the identity
    """
    known: dict[object, tuple[list[Value], Proposal | Departure]] = {}
    for down in projections.sites.values():
        for up in down.next_sites:
            users = (one for value in up.cone for one in projections.users.get(value, ()))
            key, values = down.numbered((*up.cone, *users))
            found = None
            if key in known:
                with suppress(LookupError):
                    found = _renamed(projections.form, *known[key], values, _name(down, up))
            if found is None:
                found = _found(projections, down, up, by_identity)
                known[key] = values, found
            if isinstance(found, Departure):
                found.site, found.score = (*down.roots, *up.roots), 0.75
            yield found


def _found(
    projections: Projections, down: Site, up: Site, by_identity: bool
) -> Proposal | Departure:
    try:
        return _Joined(projections, down, up).proposal()
    except Departure as departure:
        if departure.code != "absorb.absent" or not by_identity:
            return departure
        try:
            return _Joined(projections, down, up, departure).proposal()
        except Departure as other:
            return other


def _renamed(
    form: Form, before: list[Value], found: Proposal | Departure, values: list[Value], name: str
) -> Proposal | Departure:
    """What was found of Values ``before``, of others of the same structure."""
    others = dict(zip(before, values, strict=True))
    if isinstance(found, Proposal):
        return found.renamed(form, others, name)
    at = [form.renamed(value, others) for value in found.values]
    return Departure(found.code, found.detail, at)


def _name(down: Site, up: Site) -> str:
    """Of the results of a call."""
    return f"{down.rows.serial} {up.rows.serial}"


@dataclass(frozen=True)
class _Absorbed:
    """A product with W_uk: the Value, the matrices [h, D, C], the columns that it reads, and what
    they were multiplied with before.
    """

    value: Value
    weight: Value
    columns: Tensor
    factor: Value | None


@dataclass(frozen=True)
class _Rotated:
    """``value`` is what the pairs are turned to, times ``factor``."""

    value: Value
    pairs: Pairs
    factor: Value | None = None


def _said(factor: Value | None) -> str:
    """A factor, for a message."""
    if factor is None:
        return "1"
    filled = filled_with(factor)
    return "a number for each token" if filled is None else f"{float(filled.literal[1]):g}"


def _in_order(form: Form, rows: Value, places: list[int]) -> Value:
    """``rows`` [T, n] with their columns in another order: by axes where halves become pairs, so
    that the graph needs no row numbers for it.
    """
    step = places[1] - places[0]
    turns = next((k for k, place in enumerate(places) if place != k * step), len(places))
    if step > 1 and len(places) % (turns * step) == 0:
        pairs = torch.arange(len(places)).reshape(-1, turns, step).transpose(1, 2)
        if pairs.flatten().tolist() == places:
            apart = form.reshape(rows, (rows.shape[0], -1, turns, step))
            return form.reshape(form.permute(apart, (0, 1, 3, 2)), rows.shape)
    return form.take(rows, 1, places)


def _used(site: Site, columns: set[int]) -> Iterator[Value]:
    """The products of a site that have some of the columns."""
    at = 0
    for one in site.products:
        if not columns.isdisjoint(range(at, at + one.columns)):
            yield one.root
            yield one.dot
        at += one.columns


class _Joined:
    def __init__(
        self, projections: Projections, down: Site, up: Site, instead: Departure | None = None
    ) -> None:
        """``instead``: why W_uk is the identity."""
        self.form: Form = projections.form
        self.projections, self.down, self.up, self.identity_reason = projections, down, up, instead
        self._step: Value | None = None  # of quantised latents
        self._scale: Number | None = None  # qc_qr_scale

    def proposal(self) -> Proposal:
        form, down, up = self.form, self.down, self.up
        kind, latents, smooth = up.products[0].kind, up.rows, None
        if kind is not None:
            latents, smooth = self._before_quantisation()
        of_query = read_norm(down, latents, "the query's latents")
        absorbed = list(self._absorbed() if self.identity_reason is None else self._not_absorbed())
        if not absorbed:
            if any(is_open(one.columns) for one in up.products):
                detail = "the query's projection has a symbolic number of columns"
                raise Departure("linear.symbolic", detail, up.roots)
            if self.identity_reason is not None:
                raise Departure("rope.absent", "no part of the query is rotated", up.roots)
            detail = "no part of the query is multiplied with W_uk"
            raise Departure("absorb.absent", detail, up.roots)
        weight_uk = form.join([one.weight for one in absorbed], 0)
        heads, _, latent = weight_uk.shape
        columns = torch.cat([one.columns for one in absorbed])
        of_key = self._latents(latent, of_query)
        factor = absorbed[0].factor
        of_nope = set(columns.flatten().tolist())
        query, key = self._rotations(of_nope, heads, of_query, of_key, factor)
        parts: list[_Absorbed | _Rotated] = [*absorbed, query]
        for one in parts:
            by_tokens = one is query and factor is not None and filled_with(factor) is None
            if one.factor is not factor and not (by_tokens and one.factor is None):
                factors = f"q_nope by {_said(factor)}, another part of the query by "
                detail = factors + _said(one.factor)
                raise Departure("scale.unequal", detail, [one.value])
        if query.pairs.heads != heads:
            detail = f"{heads} heads are multiplied with W_uk, {query.pairs.heads} are rotated"
            code = "rope.heads_differ" if query.pairs.heads < heads else "absorb.absent"
            raise Departure(code, detail, [absorbed[0].value])
        if self._is_turned(down, key.value):
            cos, sin = read_tables(down, key.value, key.pairs)
        else:
            shape = down.tokens, ROPE
            cos, sin = (form.filled(number, shape, torch.bfloat16) for number in (1, 0))
        nope_rope = torch.cat((columns, query.pairs.columns), 1).flatten()
        of_caches = [*of_key.columns.tolist(), *key.pairs.columns.flatten().tolist()]
        arguments = {
            "token_x": down.rows,
            "weight_dq": form.take(down.weight, 1, of_query.columns.tolist()),
            "weight_uq_qr": form.take(up.weight, 1, nope_rope.tolist()),
            "weight_uk": weight_uk,
            "weight_dkv_kr": form.take(down.weight, 1, of_caches),
            "rmsnorm_gamma_cq": of_query.gamma,
            "rmsnorm_gamma_ckv": of_key.gamma,
            "rope_cos": cos,
            "rope_sin": sin,
            "rmsnorm_epsilon_cq": of_query.epsilon,
            "rmsnorm_epsilon_ckv": of_key.epsilon,
        }
        scale = None if factor is None or kind is not None else filled_with(factor)
        if scale is not None:
            arguments["qc_qr_scale"] = self._scale = scale.literal[1]
        if smooth is not None:
            arguments["smooth_scales_cq"] = smooth
        if kind is not None:
            self._add_quantisation(kind, arguments, nope_rope, of_query, of_caches)
        defined = prolog.prolog(form, arguments)
        results = prolog.leaves(form, defined, _name(down, up))
        latents = self._given_latents(of_query)
        claims = list(self._claims(results, absorbed, query, key, latents, of_key))
        more = list(self._more(results, query, key, of_query, of_key))
        products = [
            *_used(up, {*nope_rope.tolist()}),
            *_used(down, {*of_query.columns.tolist(), *of_caches}),
        ]
        rotation = query.pairs.layouts if self._is_turned(down, key.value) else None
        what = results, defined, claims, more, products, rotation, self.identity_reason
        return Proposal(down.rows, arguments, *what)

    def _before_quantisation(self) -> tuple[Value, Value | None]:
        """c_q before it was quantised, and what smooths it."""
        form, down, rows = self.form, self.down, self.up.rows
        before = unquantised_rows(form, rows)
        if before is None:
            raise Departure("quant.dynamic", "how c_q is quantised is not known", [rows])
        reading, nodes = down.reading_of(before), self.projections.graph.nodes
        found = before, None
        for value, other in down.readings.items():
            if reading is None or value not in nodes or value.shape[-1:] != before.shape[-1:]:
                continue
            if other.kind != "normed" or not torch.equal(other.columns, reading.columns):
                continue
            rows = form.reshape(value, before.shape)
            ratio = strip_expand(form.product([(before, 1), (rows, -1)]))
            if ratio.is_number:
                found = rows, None
                continue
            is_vector = not ratio.active and ratio.shape[-1:] == before.shape[-1:]
            if is_vector and not self._is_plain(value):
                return rows, form.reshape(ratio, before.shape[-1:])
        return found

    def _is_plain(self, value: Value) -> bool:
        """Is a normed Value not multiplied with a weight yet?"""
        return filled_with(read_norm(self.down, value, "latents").gamma) is not None

    def _add_quantisation(
        self,
        kind: NumberFormat,
        arguments: dict[str, Any],
        up: Tensor,
        of_query: Norm,
        of_caches: list[int],
    ) -> None:
        """Scales of operands of one byte, and which of the products have them."""
        form, of_x = self.form, self.down.products[0].kind
        arguments["weight_quant_mode"] = kind.full if of_x is not None else kind.partial
        step = None
        if not kind.in_blocks:
            smooth = arguments.get("smooth_scales_cq")
            rows = of_query.value if smooth is None else form.times(of_query.value, smooth)
            step = self._step = quantise.by_row(form, rows, kind)[1]
        names = [("uq_qr", self.up, up.tolist(), step)]
        if of_x is not None:
            if kind is not of_x:
                detail = f"x comes in {of_x.name}, c_q is quantised to {kind.name}"
                raise Departure("quant.mixed", detail, [self.down.rows])
            first = self.down.products[0]
            of_rows_of_x = first.blocks[0] if first.blocks else row_scales(form, first)
            if of_rows_of_x is None:
                raise Departure("quant.static", "x has no scales of its rows", [self.down.rows])
            arguments["token_x"], arguments["dequant_scale_x"] = self._operand(), of_rows_of_x
            names += [
                ("dq", self.down, of_query.columns.tolist(), of_rows_of_x),
                ("dkv_kr", self.down, of_caches, of_rows_of_x),
            ]
        for name, site, columns, rows_step in names:
            scales = [
                one.blocks[1] if one.blocks else column_scales(form, one, rows_step)
                for one in site.products
            ]
            known = [scale for scale in scales if scale is not None]
            if len(known) < len(scales):
                raise Departure("quant.scale", f"{name} has no scales of its columns", site.roots)
            scale = form.take(form.join(known, -1), -1, columns)
            arguments[f"dequant_scale_w_{name}"] = (
                form.transposed(scale) if kind.in_blocks else scale
            )

    def _operand(self) -> Value:
        """x in bytes, before a call says which format's they are."""
        rows = self.down.rows
        if self.down.products[0].kind is MXFP8:
            parts = split_blocks(self.form, rows)
            assert parts is not None
            return parts[0]
        inner = strip_views(rows)
        is_named = inner.op == "function" and inner.literal[0] == "of format"
        return self.form.reshape(inner.sources[0], rows.shape) if is_named else rows

    # -- the product with W_uk

    def _absorbed(self) -> Iterator[_Absorbed]:
        """Products with matrices of heads, of what is moved of the query."""
        for value, reading in self.up.readings.items():
            if reading.kind != "moved":
                continue
            for user in self.projections.users.get(value, ()):
                if user.op != "dot" or user.sources[0] is not value:
                    continue
                weight = user.sources[1]
                if not weight.weight:
                    continue
                nope = weight.shape[-2]
                heads = len(reading.columns) // nope
                if len(weight.shape) == 2:  # one for all heads
                    weight = self.form.expand(weight, (heads, *weight.shape))
                if len(reading.columns) == weight.shape[0] * nope:
                    columns = reading.columns.reshape(weight.shape[0], nope)
                    yield _Absorbed(user, weight, columns, self._factor(self.up, value))

    def _not_absorbed(self) -> Iterator[_Absorbed]:
        """Values of the columns that are not rotated, as products with [I | 0]."""
        form, readings = self.form, self.up.readings
        turned, heads = set[int](), 0
        for _, found in self._turned(self.up):  # an indexer's heads may be rotated, too
            turned |= {*found.columns.flatten().tolist()}
            heads = heads or found.heads
        if not turned:
            turned = self._last_columns()
            heads = 0 if len(turned) % ROPE else len(turned) // ROPE
        nope = [column for column in range(self.up.columns) if column not in turned]
        if not heads or len(nope) % heads or not nope:
            return
        width = len(nope) // heads
        eye = torch.eye(width, LATENT, dtype=torch.bfloat16)
        weight = form.expand(form.constant(eye), (heads, width, LATENT))
        for value, reading in reversed(readings.items()):
            columns = reading.columns.tolist()
            is_held = value in self.projections.graph.nodes
            if is_held and reading.kind == "moved" and sorted(columns) == nope:
                wanted = torch.tensor(nope, dtype=torch.int64).reshape(heads, width)
                factor = self._factor(self.up, value)
                yield _Absorbed(value, weight, wanted, factor)
                return

    def _last_columns(self) -> set[int]:
        """Of heads as wide as what is rotated, of which nothing is."""
        for value, reading in reversed(self.up.readings.items()):
            columns = {*reading.columns.tolist()}
            is_some = reading.kind == "moved" and len(columns) < self.up.columns
            if is_some and value.shape[-1] == ROPE and self._are_read_as_they_are(self.up, columns):
                return columns
        return set()

    def _factor(self, site: Site, value: Value) -> Value | None:
        """What the columns of a moved Value are multiplied with [T, 1]; None for 1."""
        (ones,) = site.readings[value].factors
        if bool((ones == 1).all()):
            return None
        form = self.form
        rows = fill_products(site, self._rows(site, value), form.number(1))
        return form.slice(rows, 1, 0, 1)

    # -- the key

    def _latents(self, latent: int, of_query: Norm) -> Norm:
        """The norm of the latents."""
        down, of_others = self.down, set(of_query.columns.tolist())
        error = Departure("norm.absent", f"no {latent} columns of x are normed", down.roots)
        first: Norm | None = None
        # of layers beside each other, those that are made nearest to the query
        made = {self._start(one): value.serial for value, one in self._last("normed")}
        at = self.up.rows.serial
        for value, reading in sorted(
            self._last("normed"), key=lambda one: abs(made[self._start(one[1])] - at)
        ):
            if len(reading.columns) == latent:
                columns = reading.columns.tolist()
                if of_others.isdisjoint(columns) and len(set(columns)) == latent:
                    try:
                        norm = read_norm(down, value, "the latents")
                    except Departure as departure:
                        error = departure
                        continue
                    if norm.gamma.op == "leaf":
                        return norm
                    first = first or norm
        if first is None:
            raise error
        return first

    @staticmethod
    def _start(reading: Reading) -> int:
        return int(reading.columns.min())

    def _last(self, kind: str) -> list[tuple[Value, Reading]]:
        """What is computed from x so, the last first."""
        found = reversed(self.down.readings.items())
        return [(value, reading) for value, reading in found if reading.kind == kind]

    # -- rotations

    def _is_turned(self, site: Site, value: Value) -> bool:
        return site.readings[value].kind == "turned"

    def _rotations(
        self, absorbed: set[int], heads: int, of_query: Norm, of_key: Norm, factor: Value | None
    ) -> tuple[_Rotated, _Rotated]:
        """Of query and key by the same tables; or of neither. ``heads``, ``factor``: of the part
        that is absorbed; another projection of the latents may have other heads.
        """
        up, down = self.up, self.down
        at = min(absorbed)
        queries = sorted(
            [*self._turned(up)][::-1],
            key=lambda one: (one[1].heads != heads, abs(int(one[1].columns.min()) - at)),
        )
        # of layers beside each other, those that one product makes with the latents
        behind = int(of_key.columns.max())
        keys = sorted(self._last("turned"), key=lambda one: abs(self._start(one[1]) - behind))
        scaled = None
        for value, found in queries:
            for other, reading in keys:
                if len(reading.columns) != ROPE:
                    continue
                of_other = read_pairs(reading, ROPE, found)
                if of_other is not None and torch.equal(of_other.diagonal, found.diagonal):
                    return _Rotated(value, found), _Rotated(other, of_other)
                scaled = scaled or self._scaled(value, found, other, read_pairs(reading, ROPE))
        if scaled is not None:
            return scaled
        taken = {*of_query.columns.tolist(), *of_key.columns.tolist()}
        query = self._unrotated(up, absorbed, 0, factor)
        key = self._unrotated(down, taken, ROPE, None)
        if query is None or key is None:
            what = "the query" if query is None else "the key"
            detail = f"no part of {what} is rotated, by tables of both, or left as it is"
            raise Departure("rope.absent", detail, (up if query is None else down).dots)
        return query, key

    def _turned(self, site: Site) -> Iterator[tuple[Value, Pairs]]:
        for value, reading in site.readings.items():
            found = read_pairs(reading, ROPE) if reading.kind == "turned" else None
            if found is not None:
                yield value, found

    def _scaled(
        self, query: Value, found: Pairs, key: Value, of_key: Pairs | None
    ) -> tuple[_Rotated, _Rotated] | None:
        """Of a query that was multiplied with one number a token before it was rotated."""
        if of_key is None:
            return None
        ratio = found.diagonal * power(of_key.diagonal, -1, POINT.p) % POINT.p
        if not bool((ratio == ratio[:, :1]).all()):
            return None
        times = self.form.split(query)[0]
        if number(times, POINT) == int(ratio[0, 0]):
            return _Rotated(query, found, self.form.number(times)), _Rotated(key, of_key)
        columns = {*found.columns.flatten().tolist()}
        for value, reading in self.up.readings.items():
            if reading.kind == "moved" and columns <= set(reading.columns.tolist()):
                (ones,) = reading.factors
                if bool((ones[0] == ratio[0, 0]).all()):
                    factor = self._factor(self.up, value)
                    return _Rotated(query, found, factor), _Rotated(key, of_key)
        return None

    def _unrotated(
        self, site: Site, others: set[int], width: int, factor: Value | None
    ) -> _Rotated | None:
        """A Value that holds just the columns that are left, or as many as ``width`` of them; the
        last that is multiplied with ``factor``.
        """
        found = list[_Rotated]()
        wanted = set(range(site.columns)) - others
        for value, reading in reversed(site.readings.items()):
            if reading.kind == "moved" and len(reading.columns) == (width or len(wanted)):
                columns = set(reading.columns.tolist())
                (ones,) = reading.factors
                is_even = bool((ones == ones[:, :1]).all())
                is_whole = is_even and columns <= wanted and len(columns) == len(reading.columns)
                if is_whole and self._are_read_as_they_are(site, columns):
                    found.append(
                        _Rotated(value, identity_pairs(reading, ROPE), self._factor(site, value))
                    )
        return next((one for one in found if one.factor is factor), found[0] if found else None)

    def _are_read_as_they_are(self, site: Site, columns: set[int]) -> bool:
        """Do products, writes and attention read them, and no step that might be a rotation?"""
        moved = {value: one for value, one in site.readings.items() if one.kind == "moved"}
        stack = [value for value, one in moved.items() if columns >= {*one.columns.tolist()}]
        seen, layouts = set[Value](), dict(site.layouts)
        while stack:
            for user in self.projections.users.get(stack.pop(), ()):
                is_attention = user.op == "opaque" and "attention" in str(user.literal)
                if user in seen or user.op in ("dot", "write") or is_attention:
                    continue
                is_multiple = user.op == "product" and len(user.sources) == 1
                if user.op != "cast" and user.op not in MOVES and not is_multiple:
                    return False
                try:
                    layouts[user] = layout_of(user, layouts)
                except Mixed:
                    return False
                except KeyError:  # beside what is of no layout
                    pass
                seen.add(user)
                stack.append(user)
        return True

    # -- what is which result

    def _claims(
        self,
        results: prolog.Results,
        absorbed: Iterable[_Absorbed],
        query: _Rotated,
        key: _Rotated,
        latents: Value,
        of_key: Norm,
    ) -> Iterator[Claim]:
        form, at = self.form, 0
        if self.identity_reason is not None:
            yield from self._as_it_is(results, *absorbed)
            absorbed = ()
        for one in absorbed:
            heads = one.weight.shape[0]
            part = form.slice(results.query, 1, at, at + heads)
            at += heads
            layout = layout_of(one.value, self.up.layouts)
            rows = self._times(form.reshape(part, (self.up.tokens, -1)), one.factor)
            yield Claim("query", one.value, from_rows(form, rows, one.value, layout))
        yield self._turned_rows("query_rope", self.up, query, results.query_rope)
        yield self._turned_rows("kr_rows", self.down, key, results.kr_rows)
        normed = self._times(results.query_norm, None)
        yield Claim("query_norm", latents, form.reshape(normed, latents.shape))
        layout = self.down.layouts[of_key.value]
        yield Claim("kv_rows", of_key.value, from_rows(form, results.kv_rows, of_key.value, layout))

    def _as_it_is(self, results: prolog.Results, one: _Absorbed) -> Iterator[Claim]:
        """The first columns of the query, wherever they are all held."""
        form, width = self.form, one.columns.shape[1]
        rows = form.reshape(form.slice(results.query, -1, 0, width), (self.up.tokens, -1))
        places = {column: at for at, column in enumerate(one.columns.flatten().tolist())}
        for value, reading in self.up.readings.items():
            columns = reading.columns.tolist()
            if reading.kind == "moved" and sorted(columns) == sorted(places):
                taken = form.take(rows, 1, [places[column] for column in columns])
                taken = self._times(taken, self._factor(self.up, value))
                layout = self.up.layouts[value]
                yield Claim("query", value, from_rows(form, taken, value, layout))

    def _turned_rows(self, part: str, site: Site, one: _Rotated, rows: Value) -> Claim:
        form = self.form
        flat = _in_order(form, form.reshape(rows, (site.tokens, -1)), one.pairs.places.tolist())
        flat = self._times(flat, one.factor, site is self.up)
        return Claim(part, one.value, from_rows(form, flat, one.value, site.layouts[one.value]))

    def _more(
        self,
        results: prolog.Results,
        query: _Rotated,
        key: _Rotated,
        of_query: Norm,
        of_key: Norm,
    ) -> Iterator[Claim]:
        """Other Values that hold what is rotated; scales of quantised latents."""
        form = self.form
        for part, site, one, rows in (
            ("query_rope", self.up, query, results.query_rope),
            ("kr_rows", self.down, key, results.kr_rows),
        ):
            kind = site.readings[one.value].kind
            if kind != "turned":
                continue
            columns = one.pairs.columns.flatten().sort().values
            for value, reading in site.readings.items():
                if reading.kind != kind or value is one.value:
                    continue
                other = read_pairs(reading, ROPE, one.pairs)
                if other is None or not torch.equal(other.diagonal, one.pairs.diagonal):
                    continue
                if torch.equal(other.columns.flatten().sort().values, columns):
                    yield self._turned_rows(part, site, _Rotated(value, other, one.factor), rows)
        yield from self._normed(of_key, "kv_rows", results.kv_rows)
        if self.up.products[0].kind is None:
            yield from self._normed(of_query, "query_norm", self._times(results.query_norm, None))
        if results.dequant_scale_q_norm is not None:
            steps = self._step
            if steps is None:
                parts = split_blocks(form, self.up.rows)
                assert parts is not None
                steps = parts[1]
            yield Claim("dequant_scale_q_norm", steps, results.dequant_scale_q_norm)

    def _normed(self, norm: Norm, part: str, rows: Value) -> Iterator[Claim]:
        """Values that hold normed rows in some order, or without the number in front."""
        form, site = self.form, self.down
        known = {int(column): at for at, column in enumerate(norm.columns)}
        by = form.split(norm.value)[0].power(-1)
        assert by is not None
        for value, reading in site.readings.items():
            if reading.kind == "normed" and known.keys() == {*reading.columns.tolist()}:
                places = [known[int(column)] for column in reading.columns]
                own = form.scaled(form.take(rows, 1, places), form.split(value)[0] * by)
                yield Claim(part, value, from_rows(form, own, value, site.layouts[value]))

    def _given_latents(self, of_query: Norm) -> Value:
        """What the kernel gives out as c_q: in bytes where it is quantised."""
        rows = self.up.rows
        kind = self.up.products[0].kind
        if kind is None:
            return of_query.value
        if kind.in_blocks:
            parts = split_blocks(self.form, rows)
            assert parts is not None
            return parts[0]
        inner = strip_views(rows)
        is_named = inner.literal[0] == "of format"
        return self.form.reshape(inner.sources[0] if is_named else inner, rows.shape)

    def _times(self, rows: Value, factor: Value | None, is_scaled: bool = True) -> Value:
        """``is_scaled``: the call multiplies these by its scale."""
        inverse = self._scale.power(-1) if self._scale is not None and is_scaled else None
        rows = rows if factor is None else self.form.times(rows, factor)
        return rows if inverse is None else self.form.scaled(rows, inverse)

    def _rows(self, site: Site, value: Value) -> Value:
        return to_rows(self.form, value, site.layouts[value], site.tokens)
