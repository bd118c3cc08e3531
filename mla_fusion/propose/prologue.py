"""Joins the readings of two sites to a proposal: arguments of a call, and claims about its results.

The sites are those of x and of the query's latents. A proposal may be wrong: ``plan/planner.py``
has each claim proved by ``exact/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mla_fusion.exact.field import number
from mla_fusion.exact.prove import Claim
from mla_fusion.graph import quantise
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import MOVES, Form, Value, filled_with, numbered, strip
from mla_fusion.graph.layout import Layout, Mixed, layout_of, token_layout
from mla_fusion.graph.numbers import ONE, is_open
from mla_fusion.meta.number_formats import NumberFormat
from mla_fusion.propose.norms import Norm, fill_products, read_norm
from mla_fusion.propose.quantised import (
    column_scales,
    has_fixed_step,
    row_scales,
    split_blocks,
    unquantised_rows,
)
from mla_fusion.propose.rotations import (
    ROPE,
    Pairs,
    identity_pairs,
    read_pairs,
    read_tables,
    rotated_pairs,
)
from mla_fusion.propose.sites import POINT, Projections, Site, from_rows
from mla_fusion.targets import prolog

LATENT = 512  # the width of latents that the operator has


@dataclass
class Proposal:
    """A call of the operator that a graph may contain, and claims of what its results are.

    x                the activation [T, He] that the first products read
    arguments        arguments of the operator by name: Values, and numbers of attributes
    results          leaves that stand for the results of the call, by name
    claims           which Value of the graph is which result: all must hold
    optional_claims  further claims, each of which may hold or not
    products         Values that the call computes inside
    rotation         the order of elements before and after it; None if nothing is rotated
    identity_reason  why the target above does not take the prologue, for a call with W_uk = [I | 0]
    model_heads      the model's number of heads if the call has more, else 0
    """

    x: Value
    arguments: dict[str, Any]
    results: prolog.Results
    claims: list[Claim]
    optional_claims: list[Claim]
    products: list[Value]
    rotation: tuple[str, str] | None
    identity_reason: Departure | None = None
    model_heads: int = 0

    @property
    def target(self) -> str:
        """Returns the name of the target in ``Config.targets`` that takes the proposal."""
        return "v3" if self.identity_reason is None else "identity"

    @property
    def has_pairs(self) -> bool:
        """Returns True if the model's rotated rows are pairs, where the kernel's are halves."""
        return self.rotation is not None and self.rotation[1] == "interleaved"

    @property
    def activations(self) -> dict[Value, Layout]:
        """Returns the activation from which claims are proved, with its layout."""
        return {self.x: token_layout(self.x.shape)}

    @cached_property
    def numbered(self) -> tuple[object, list[Value]]:
        """Returns the structure of all that is claimed, and its Values.

        What token_x is made of, and other activations that were there before it, stand for
        themselves.
        """
        token_x, claims = self.arguments["token_x"], (*self.claims, *self.optional_claims)
        operands = [argument for argument in self.arguments.values() if isinstance(argument, Value)]
        sides = [side for claim in claims for side in (claim.graph, claim.kernel)]
        key, values = numbered(
            [self.x, *operands, *sides], [token_x, *self.results.by_name.values()], token_x.serial
        )
        names = [
            (name, None if isinstance(argument_value, Value) else argument_value)
            for name, argument_value in self.arguments.items()
        ]
        parts = [claim.part for claim in claims]
        return (key, len(self.claims), tuple(names), tuple(parts)), values

    def definitions(self, form: Form) -> dict[Value, Value]:
        """Returns the operator's definition of each result, by the leaf that stands for it."""
        defined = prolog.prolog(form, self.arguments)
        return {leaf: getattr(defined, name) for name, leaf in self.results.by_name.items()}

    def with_arguments(self, form: Form, changes: Mapping[str, Any], name: str) -> Proposal:
        """Returns the proposal of a call with other arguments and results of its own.

        changes  the arguments that differ
        name     added to the name of the results

        Its claims are still those over the results of this call.
        """
        arguments = {**self.arguments, **changes}
        defined = prolog.prolog(form, arguments)
        results = prolog.leaves(form, defined, f"{self.results.query.literal} {name}")
        return replace(self, arguments=arguments, results=results)

    def renamed(self, form: Form, substitutes: dict[Value, Value], name: str) -> Proposal:
        """Returns the proposal of a prologue of the same structure.

        substitutes  its Values, by the Values of this prologue

        Raises LookupError if the prologue is made of more than ``substitutes``.
        """
        leaves = prolog.leaves(form, self.results, name)
        substitutes |= {leaf: getattr(leaves, part) for part, leaf in self.results.by_name.items()}

        def new(argument: Any) -> Any:
            """Returns an argument of the other prologue."""
            return form.renamed(argument, substitutes) if isinstance(argument, Value) else argument

        claims, optional_claims = (
            [Claim(claim.part, new(claim.graph), new(claim.kernel)) for claim in own_claims]
            for own_claims in (self.claims, self.optional_claims)
        )
        proposal = replace(
            self,
            x=new(self.x),
            arguments={name: new(argument) for name, argument in self.arguments.items()},
            results=leaves,
            claims=claims,
            optional_claims=optional_claims,
            products=list(map(new, self.products)),
        )
        key, values = self.numbered
        proposal.numbered = key, [substitutes[value] for value in values]
        return proposal


def proposals(
    projections: Projections,
    by_identity: bool = False,
    on_defect: Callable[[Exception], Departure] | None = None,
) -> Iterator[Proposal | Departure]:
    """Yields a proposal or a departure for each pair of sites, the second computed from the first.

    by_identity  True: if the query is not multiplied by W_uk, propose a call with W_uk = [I | 0]
    on_defect    makes the departure of a pair of which an unexpected error was raised. None: the
                 error is raised
    """
    by_structure: dict[object, tuple[list[Value], Proposal | Departure]] = {}
    for down in projections.sites.values():
        for up in down.next_sites:
            readers = (reader for value in up.cone for reader in projections.users.get(value, ()))
            key, values = down.numbered((*up.cone, *readers))
            proposal = None
            if key in by_structure:
                with suppress(LookupError):
                    proposal = _copy_to_layer(
                        projections.form, *by_structure[key], values, _result_name(down, up)
                    )
            if proposal is None:
                try:
                    proposal = _propose(projections, down, up, by_identity)
                except Exception as error:
                    if on_defect is None:
                        raise
                    proposal = on_defect(error)
                by_structure[key] = values, proposal
            if isinstance(proposal, Departure):
                proposal.site, proposal.score = (*down.layers, *up.layers), 0.75
            else:
                projections.key_gammas.add(proposal.arguments["rmsnorm_gamma_ckv"])
            yield proposal


def _propose(
    projections: Projections, down: Site, up: Site, by_identity: bool
) -> Proposal | Departure:
    """Returns the proposal of two sites, or why there is none."""
    down.probe()
    up.probe()
    try:
        return _Joiner(projections, down, up).proposal()
    except Mixed as mixed:
        return Departure("tokens.mixed", "a step mixes tokens", mixed.args)
    except Departure as departure:
        if departure.code != "absorb.absent" or not by_identity:
            return departure
        try:
            return _Joiner(projections, down, up, departure).proposal()
        except Departure as second_departure:
            return second_departure


def _copy_to_layer(
    form: Form, layer: list[Value], proposal: Proposal | Departure, values: list[Value], name: str
) -> Proposal | Departure:
    """Copies a proposal or departure to a layer of the same structure, replacing each Value.

    layer   the Values of the layer that the proposal is of
    values  the Values of the other layer
    """
    substitutes = dict(zip(layer, values, strict=True))
    if isinstance(proposal, Proposal):
        return proposal.renamed(form, substitutes, name)
    values_at_fault = [form.renamed(value, substitutes) for value in proposal.values]
    return Departure(proposal.code, proposal.detail, values_at_fault)


def _result_name(down: Site, up: Site) -> str:
    """Returns a name for the results of a call, unlike those of other sites."""
    return f"{down.rows.serial} {up.rows.serial}"


@dataclass(frozen=True)
class _Absorbed:
    """A product of the query with W_uk.

    value    the product
    weight   the matrices [h, D, C]
    columns  the columns of the site that it reads
    factor   what these columns were multiplied by before; None for 1
    """

    value: Value
    weight: Value
    columns: Tensor
    factor: Value | None


@dataclass(frozen=True)
class _Rotated:
    """A rotated Value: its pairs, and the factor by which it was multiplied."""

    value: Value
    pairs: Pairs
    factor: Value | None = None


def _describe_factor(factor: Value | None) -> str:
    """Returns a factor as text."""
    if factor is None:
        return "1"
    number = filled_with(factor)
    if number is not None:
        return f"{float(number.number):g}"
    is_scalar = not strip(factor, *MOVES).shape
    owner = "model" if factor.model else "call"
    return f"a number of the {owner}" if is_scalar else "a number for each token"


def _products_with(site: Site, columns: set[int]) -> Iterator[Value]:
    """Yields the products of a site that have some of the columns."""
    for product, first, last in site.parts:
        if not columns.isdisjoint(range(first, last)):
            yield product.root
            yield product.dot


class _Joiner:
    """Joins two sites to one proposal."""

    def __init__(
        self, projections: Projections, down: Site, up: Site, reason: Departure | None = None
    ) -> None:
        """Prepares the proposal.

        reason  why W_uk is [I | 0]; None if the graph has W_uk
        """
        self.form = projections.form
        self.projections, self.down, self.up, self.identity_reason = projections, down, up, reason
        self._latent_scales: Value | None = None  # scales of quantised latents
        self._scale = ONE  # qc_qr_scale

    def proposal(self) -> Proposal:
        """Returns the proposal. Raises Departure if a part of the prologue is missing."""
        form, down, up = self.form, self.down, self.up
        kind, latents, smooth = up.products[0].kind, up.rows, None
        x_format = down.products[0].kind
        if kind is not None:
            latents, smooth = self._unquantised_latents()
        query_norm = read_norm(down, latents, "the query's latents")
        absorbed = list(
            self._absorbed_products() if self.identity_reason is None else self._identity_products()
        )
        if not absorbed:
            if any(is_open(product.columns) for product in up.products):
                detail = "the query's projection has a symbolic number of columns"
                raise Departure("linear.symbolic", detail, up.roots)
            if self.identity_reason is not None:
                raise Departure("rope.absent", "no part of the query is rotated", up.roots)
            detail = "no part of the query is multiplied with W_uk as it is projected"
            raise Departure("absorb.absent", detail, up.roots)
        # a narrower matrix may rotate
        *_, widest = sorted(product.weight.shape[:0:-1] for product in absorbed)
        absorbed = [product for product in absorbed if product.weight.shape[:0:-1] == widest]
        weight_uk = form.join([product.weight for product in absorbed], 0)
        heads, _, latent = weight_uk.shape
        columns = torch.cat([product.columns for product in absorbed])
        key_norm = self._key_norm(latent, query_norm)
        factor = absorbed[0].factor
        nope_columns = set(columns.flatten().tolist())
        query, key = self._rotated_parts(nope_columns, heads, query_norm, key_norm, factor)
        parts: list[_Absorbed | _Rotated] = [*absorbed, query]
        for part in parts:
            is_by_tokens = part is query and factor is not None and filled_with(factor) is None
            if part.factor is not factor and not (is_by_tokens and part.factor is None):
                factors = f"q_nope by {_describe_factor(factor)}, another part of the query by "
                detail = factors + _describe_factor(part.factor)
                raise Departure(
                    "scale.unequal", detail, [(part if part.factor else parts[0]).value]
                )
        if query.pairs.heads != heads:
            detail = f"{heads} heads are multiplied with W_uk, {query.pairs.heads} are rotated"
            code = "rope.heads_differ" if query.pairs.heads < heads else "absorb.absent"
            raise Departure(code, detail, [absorbed[0].value])
        is_rotated = down.readings[key.value].kind == "turned"
        if is_rotated:
            cos, sin = read_tables(down, key.value, key.pairs)
        else:
            shape = down.tokens, ROPE
            cos, sin = (form.filled(number, shape, torch.bfloat16) for number in (1, 0))
        nope_rope = torch.cat((columns, query.pairs.columns), 1).flatten()
        cache_columns = [*key_norm.columns, *key.pairs.columns.flatten().tolist()]
        arguments = {
            "token_x": down.rows,
            "weight_dq": form.take(down.weight, 1, query_norm.columns),
            "weight_uq_qr": form.take(up.weight, 1, nope_rope.tolist()),
            "weight_uk": weight_uk,
            "weight_dkv_kr": form.take(down.weight, 1, cache_columns),
            "rmsnorm_gamma_cq": query_norm.gamma,
            "rmsnorm_gamma_ckv": key_norm.gamma,
            "rope_cos": cos,
            "rope_sin": sin,
            "rmsnorm_epsilon_cq": query_norm.epsilon,
            "rmsnorm_epsilon_ckv": key_norm.epsilon,
        }
        scale = None if factor is None or kind is not None else filled_with(factor)
        if scale is not None:
            arguments["qc_qr_scale"] = self._scale = scale.number
        if smooth is not None:
            arguments["smooth_scales_cq"] = smooth
        if kind is not x_format and (x_format or (kind and not kind.partial)):
            formats = [known.name if known else "no such format" for known in (x_format, kind)]
            detail = f"x comes in {formats[0]}, c_q in {formats[1]}"
            raise Departure("quant.mixed", detail, [down.roots[0], up.roots[0]])
        if kind is not None:
            self._add_quantisation(kind, arguments, nope_rope, query_norm, cache_columns)
        results = prolog.leaves(form, prolog.prolog(form, arguments), _result_name(down, up))
        # the kernel returns bytes if they are quantised
        latents = query_norm.value if kind is None else form.reshape(up.base, up.rows.shape)
        claims = list(self._claims(results, absorbed, query, key, latents, key_norm))
        optional_claims = list(self._optional_claims(results, query, key, query_norm, key_norm))
        products = [
            *_products_with(up, {*nope_rope.tolist()}),
            *_products_with(down, {*query_norm.columns, *cache_columns}),
        ]
        return Proposal(
            x=down.rows,
            arguments=arguments,
            results=results,
            claims=claims,
            optional_claims=optional_claims,
            products=products,
            rotation=query.pairs.layouts if is_rotated else None,
            identity_reason=self.identity_reason,
        )

    def _unquantised_latents(self) -> tuple[Value, Value | None]:
        """Returns c_q before it was quantised, and the smooth scales or None."""
        form, down, rows = self.form, self.down, self.up.rows
        float_rows = unquantised_rows(form, rows)
        if float_rows is None:
            if has_fixed_step(rows):
                raise Departure("quant.static", "the steps of c_q are not made of it", [rows])
            raise Departure("quant.dynamic", "how c_q is quantised is not known", [rows])
        reading, nodes = down.reading_of(float_rows), self.projections.graph.nodes
        result = float_rows, None
        if reading is None:
            return result
        for value, other in down.readings_of("normed"):
            is_same = torch.equal(other.columns, reading.columns)
            if not is_same or value not in nodes or value.shape[-1:] != float_rows.shape[-1:]:
                continue
            rows = form.reshape(value, float_rows.shape)
            ratio = strip(form.product([(float_rows, 1), (rows, -1)]), "expand")
            if ratio.is_number:
                result = rows, None
                continue
            is_vector = not ratio.active and ratio.shape[-1:] == float_rows.shape[-1:]
            # gamma is no part of the smooth scales
            if is_vector and filled_with(read_norm(down, value, "latents").gamma) is None:
                return rows, form.reshape(ratio, float_rows.shape[-1:])
        return result

    def _add_quantisation(
        self,
        kind: NumberFormat,
        arguments: dict[str, Any],
        up_columns: Tensor,
        query_norm: Norm,
        cache_columns: list[int],
    ) -> None:
        """Adds the scales of operands of one byte and the mode to the arguments.

        up_columns     columns of W_uq_qr, in the kernel's order
        cache_columns  columns of W_dkv_kr, in the kernel's order
        """
        form, x_format = self.form, self.down.products[0].kind
        arguments["weight_quant_mode"] = kind.full if x_format is not None else kind.partial
        latent_scales = None
        if not kind.in_blocks:
            smooth = arguments.get("smooth_scales_cq")
            rows = query_norm.value if smooth is None else form.times(query_norm.value, smooth)
            latent_scales = self._latent_scales = quantise.by_row(form, rows, kind)[1]
        weights = [("uq_qr", self.up, up_columns.tolist(), latent_scales)]
        if x_format is not None:
            x_scales = row_scales(form, self.down.products[0], self.projections.graph.multiples_of)
            if x_scales is None:
                raise Departure("quant.static", "x has no scales of its rows", [self.down.rows])
            x = form.reshape(self.down.base, self.down.rows.shape)
            arguments["token_x"], arguments["dequant_scale_x"] = x, x_scales
            weights += [
                ("dq", self.down, query_norm.columns, x_scales),
                ("dkv_kr", self.down, cache_columns, x_scales),
            ]
        for name, site, columns, scales_of_rows in weights:
            scales = [column_scales(form, product, scales_of_rows) for product in site.products]
            all_scales = [scale for scale in scales if scale is not None]
            if len(all_scales) < len(scales):
                raise Departure("quant.scale", f"{name} has no scales of its columns", site.roots)
            scale = form.take(form.join(all_scales, -1), -1, columns)
            arguments[f"dequant_scale_w_{name}"] = (
                form.transposed(scale) if kind.in_blocks else scale
            )

    # -- the product with W_uk

    def _absorbed_products(self) -> Iterator[_Absorbed]:
        """Yields the products of heads of the query with matrices."""
        for value, reading in self.up.readings_of("moved"):
            for user in self.projections.users.get(value, ()):
                if user.op != "dot" or user.sources[0] is not value:
                    continue
                weight = user.sources[1]
                if not weight.weight or len(weight.shape) > 3:
                    continue
                nope = weight.shape[-2]
                heads = len(reading.columns) // nope
                if len(weight.shape) == 2:  # one matrix for all heads
                    weight = self.form.expand(weight, (heads, *weight.shape))
                if len(reading.columns) == weight.shape[0] * nope:
                    columns = reading.columns.reshape(weight.shape[0], nope)
                    yield _Absorbed(user, weight, columns, self._factor(self.up, value))

    def _identity_products(self) -> Iterator[_Absorbed]:
        """Yields the Value of the columns that are not rotated, as a product with [I | 0]."""
        form, rotated_columns, heads = self.form, set[int](), 0
        for _, pairs in rotated_pairs(self.up):  # an indexer may have rotated heads, too
            rotated_columns |= pairs.column_set
            heads = heads or pairs.heads
        if not rotated_columns:
            rotated_columns = self._unrotated_heads()
            heads = 0 if len(rotated_columns) % ROPE else len(rotated_columns) // ROPE
        nope = [column for column in range(self.up.columns) if column not in rotated_columns]
        if not heads or len(nope) % heads or not nope:
            return
        width = len(nope) // heads
        eye = torch.eye(width, LATENT, dtype=torch.bfloat16)
        weight = form.expand(form.constant(eye), (heads, width, LATENT))
        for value, reading in reversed(self.up.readings_of("moved")):
            has_node = value in self.projections.graph.nodes
            if has_node and sorted(reading.columns.tolist()) == nope:
                nope_columns = torch.tensor(nope, dtype=torch.int64).reshape(heads, width)
                yield _Absorbed(value, weight, nope_columns, self._factor(self.up, value))
                return

    def _unrotated_heads(self) -> set[int]:
        """Returns the columns of heads as wide as a rotated part, if nothing is rotated, else
        nothing.
        """
        for value, reading in reversed(self.up.readings_of("moved")):
            columns = reading.column_set
            is_part = len(columns) < self.up.columns
            if is_part and value.shape[-1] == ROPE and self._are_read_unchanged(self.up, columns):
                return columns
        return set()

    def _factor(self, site: Site, value: Value) -> Value | None:
        """Returns what the columns of a moved Value are multiplied by: a number, or [T, 1]. Returns
        None for 1.
        """
        (ones,) = site.readings[value].factors
        if bool((ones == 1).all()):
            return None
        form = self.form
        rows = site.to_rows(value, site.layouts[value])
        factor = form.slice(fill_products(site, rows, form.number(1)), 1, 0, 1)
        return filled_with(factor) or factor

    # -- the key

    def _key_norm(self, latent: int, query_norm: Norm) -> Norm:
        """Returns the norm of the key's latents. Raises Departure if there is none.

        Of parallel layers, those made nearest to the query are tried first, and the first that is
        no other query's key is taken.
        """
        down, query_columns = self.down, set(query_norm.columns)
        error = Departure("norm.absent", f"no {latent} columns of x are normed", down.roots)
        first_norm: Norm | None = None
        normed = down.readings_of("normed")[::-1]
        # by first column: the serial number of the normed Value
        serials = {min(reading.column_set): value.serial for value, reading in normed}
        serial = self.up.rows.serial
        for value, reading in sorted(
            normed, key=lambda item: abs(serials[min(item[1].column_set)] - serial)
        ):
            columns = reading.column_set
            if len(reading.columns) == len(columns) == latent and columns.isdisjoint(query_columns):
                try:
                    norm = read_norm(down, value, "the latents")
                except Departure as departure:
                    error = departure
                    continue
                if norm.gamma.op == "leaf" and norm.gamma not in self.projections.key_gammas:
                    return norm
                first_norm = first_norm or norm
        if first_norm is None:
            raise error
        return first_norm

    # -- rotations

    def _rotated_parts(
        self, absorbed: set[int], heads: int, query_norm: Norm, key_norm: Norm, factor: Value | None
    ) -> tuple[_Rotated, _Rotated]:
        """Returns the rotated parts of query and key, by the same tables, or parts of both without
        rotation.

        absorbed  the columns that W_uk multiplies
        heads     how many heads are absorbed; another projection of the latents may have other
                  heads
        factor    the factor of the absorbed part

        Raises Departure if neither is found.
        """
        up, down = self.up, self.down
        start = min(absorbed)
        queries = sorted(
            rotated_pairs(up)[::-1],
            key=lambda item: (item[1].heads != heads, abs(min(item[1].column_set) - start)),
        )
        # of parallel layers, the one that makes the latents too comes first
        end = max(key_norm.columns)
        keys = sorted(
            down.readings_of("turned")[::-1], key=lambda item: abs(min(item[1].column_set) - end)
        )
        parts = list[tuple[_Rotated, _Rotated]]()
        for value, query_pairs in queries:
            for key_value, reading in keys:
                if len(reading.columns) != ROPE:
                    continue
                key_pairs = read_pairs(reading, query_pairs)
                if key_pairs is not None and torch.equal(key_pairs.diagonal, query_pairs.diagonal):
                    parts.append((_Rotated(value, query_pairs), _Rotated(key_value, key_pairs)))
                    if factor is None or not factor.is_number:
                        return parts[-1]
                elif scaled := self._scaled_parts(
                    value, query_pairs, key_value, read_pairs(reading)
                ):
                    parts.append(scaled)
        if parts:
            factors = factor, None  # in this order
            return min(parts, key=lambda pair: [pair[0].factor is not wanted for wanted in factors])
        normed_columns = {*query_norm.columns, *key_norm.columns}
        query = self._unrotated(up, absorbed, 0, factor)
        key = self._unrotated(down, normed_columns, ROPE, None)
        if query is None or key is None:
            part = "the query" if query is None else "the key"
            detail = f"no part of {part} is rotated, by tables of both, or left as it is"
            raise Departure("rope.absent", detail, (up if query is None else down).roots)
        return query, key

    def _scaled_parts(
        self, query: Value, query_pairs: Pairs, key: Value, key_pairs: Pairs | None
    ) -> tuple[_Rotated, _Rotated] | None:
        """Returns the rotated parts if the query was multiplied by one number a token before, or
        None.
        """
        multiple = None if key_pairs is None else query_pairs.multiple_of(key_pairs)
        if key_pairs is None or multiple is None:
            return None
        factor_of_query = self.form.split(query)[0]
        if number(factor_of_query, POINT) == multiple:
            return _Rotated(query, query_pairs, self.form.number(factor_of_query)), _Rotated(
                key, key_pairs
            )
        for value, reading in self.up.readings_of("moved"):
            if query_pairs.column_set <= reading.column_set:
                (ones,) = reading.factors
                if bool((ones[0] == multiple).all()):
                    factor = self._factor(self.up, value)
                    return _Rotated(query, query_pairs, factor), _Rotated(key, key_pairs)
        return None

    def _unrotated(
        self, site: Site, used_columns: set[int], width: int, factor: Value | None
    ) -> _Rotated | None:
        """Returns a Value that holds just the columns that are left, or ``width`` of them, or None.

        The last Value with the factor ``factor`` is preferred.
        """
        parts = list[_Rotated]()
        unused = set(range(site.columns)) - used_columns
        for value, reading in reversed(site.readings_of("moved")):
            if len(reading.columns) == (width or len(unused)):
                columns = reading.column_set
                (ones,) = reading.factors
                is_equal = bool((ones == ones[:, :1]).all())
                is_free = is_equal and columns <= unused and len(columns) == len(reading.columns)
                if is_free and self._are_read_unchanged(site, columns):
                    parts.append(
                        _Rotated(value, identity_pairs(reading), self._factor(site, value))
                    )
        return next((part for part in parts if part.factor is factor), parts[0] if parts else None)

    def _are_read_unchanged(self, site: Site, columns: set[int]) -> bool:
        """Returns True if only products, writes and attention read the columns, and moves before
        them.

        Any other step might be a rotation.
        """
        moved = site.readings_of("moved")
        stack = [value for value, reading in moved if columns >= reading.column_set]
        seen = set[Value]()
        while stack:
            for user in self.projections.users.get(stack.pop(), ()):
                is_attention = user.op == "opaque" and "attention" in str(user.literal)
                if user in seen or user.op in ("dot", "write") or is_attention:
                    continue
                is_multiple = user.op == "product" and len(user.sources) == 1
                if user.op != "cast" and user.op not in MOVES and not is_multiple:
                    return False
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
        key_norm: Norm,
    ) -> Iterator[Claim]:
        """Yields the claims of what the results are."""
        form, start = self.form, 0
        if self.identity_reason is not None:
            yield from self._identity_claims(results, *absorbed)
            absorbed = ()
        for product in absorbed:
            heads = product.weight.shape[0]
            part = form.slice(results.query, 1, start, start + heads)
            start += heads
            rows = self._times(form.reshape(part, (self.up.tokens, -1)), product.factor)
            yield self._claim("query", self.up, product.value, rows)
        yield self._rotated_claim("query_rope", self.up, query, results.query_rope)
        yield self._rotated_claim("kr_rows", self.down, key, results.kr_rows)
        normed = self._times(results.query_norm, None)
        yield Claim("query_norm", latents, form.reshape(normed, latents.shape))
        yield self._claim("kv_rows", self.down, key_norm.value, results.kv_rows)

    def _identity_claims(self, results: prolog.Results, absorbed: _Absorbed) -> Iterator[Claim]:
        """Yields the claims of Values that hold the unrotated columns, if W_uk is [I | 0]."""
        form, width = self.form, absorbed.columns.shape[1]
        rows = form.reshape(form.slice(results.query, -1, 0, width), (self.up.tokens, -1))
        places = {column: place for place, column in enumerate(absorbed.columns.flatten().tolist())}
        for value, reading in self.up.readings_of("moved"):
            columns = reading.columns.tolist()
            if sorted(columns) == sorted(places):
                taken_rows = form.take(rows, 1, [places[column] for column in columns])
                taken_rows = self._times(taken_rows, self._factor(self.up, value))
                yield self._claim("query", self.up, value, taken_rows)

    def _rotated_claim(self, part: str, site: Site, rotated: _Rotated, rows: Value) -> Claim:
        """Returns the claim of a rotated part."""
        form = self.form
        flat = form.reshape(rows, (site.tokens, -1))
        flat = form.take(flat, 1, rotated.pairs.places.tolist())
        flat = self._times(flat, rotated.factor, site is self.up)
        return self._claim(part, site, rotated.value, flat)

    def _claim(self, part: str, site: Site, value: Value, rows: Value) -> Claim:
        """Returns the claim that a Value has these rows [T, n]. It is of the site's cone, or a
        product of it head by head.
        """
        layout = site.layouts.get(value) or layout_of(value, site.layouts)
        return Claim(part, value, from_rows(self.form, rows, value, layout))

    def _optional_claims(
        self,
        results: prolog.Results,
        query: _Rotated,
        key: _Rotated,
        query_norm: Norm,
        key_norm: Norm,
    ) -> Iterator[Claim]:
        """Yields claims of other Values that hold what is rotated or normed, and of scales of
        latents.
        """
        form = self.form
        for part, site, rotated, rows in (
            ("query_rope", self.up, query, results.query_rope),
            ("kr_rows", self.down, key, results.kr_rows),
        ):
            for value, reading in site.readings_of("turned"):
                is_other = value is not rotated.value
                pairs = read_pairs(reading, rotated.pairs) if is_other else None
                if pairs is None or not torch.equal(pairs.diagonal, rotated.pairs.diagonal):
                    continue
                if pairs.column_set == rotated.pairs.column_set:
                    other = _Rotated(value, pairs, rotated.factor)
                    yield self._rotated_claim(part, site, other, rows)
        yield from self._normed_claims(key_norm, "kv_rows", results.kv_rows)
        if self.up.products[0].kind is None:
            yield from self._normed_claims(
                query_norm, "query_norm", self._times(results.query_norm, None)
            )
        if results.dequant_scale_q_norm is not None:
            blocks = split_blocks(form, self.up.rows)
            scales = self._latent_scales if blocks is None else blocks[1]
            if scales is not None:
                yield Claim("dequant_scale_q_norm", scales, results.dequant_scale_q_norm)

    def _normed_claims(self, norm: Norm, part: str, rows: Value) -> Iterator[Claim]:
        """Yields claims of Values that hold normed rows in another order, or times a number."""
        form, site = self.form, self.down
        places_by_column = {column: place for place, column in enumerate(norm.columns)}
        inverse = form.split(norm.value)[0].inverse
        for value, reading in site.readings_of("normed"):
            if places_by_column.keys() == reading.column_set:
                places = [places_by_column[column] for column in reading.columns.tolist()]
                kernel_rows = form.scaled(
                    form.take(rows, 1, places), form.split(value)[0] * inverse
                )
                yield self._claim(part, site, value, kernel_rows)

    def _times(self, rows: Value, factor: Value | None, is_scaled: bool = True) -> Value:
        """Returns rows times a factor, over the scale of the call.

        is_scaled  True if the call multiplies these rows by its scale
        """
        rows = rows if factor is None else self.form.times(rows, factor)
        return self.form.scaled(rows, self._scale.inverse) if is_scaled else rows
