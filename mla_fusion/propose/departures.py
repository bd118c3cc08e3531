"""Explains near misses: which part of a prologue is missing, and what stands in its place.

``pipeline.py`` asks this for each prologue that was not planned. The result is a ``Departure``, of
which ``observe/`` makes a rejection.

The path between two products is walked in the order of the graph. The first step on it that the
kernel does not have is the reason. If nothing was proposed, the path begins at a product head by
head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from torch.fx import Node

from mla_fusion.fx import kinds
from mla_fusion.fx.kinds import argument, value_of
from mla_fusion.fx.module_path import Labels
from mla_fusion.graph.call import RULES, name_of
from mla_fusion.graph.departure import UNKNOWN, Departure
from mla_fusion.graph.form import BYTES, MOVES, Value, filled_with, order, serial, strip
from mla_fusion.graph.layout import Layout, Mixed, layout_of, token_layout
from mla_fusion.propose.norms import radicands, read_norm
from mla_fusion.propose.prologue import LATENT
from mla_fusion.propose.quantised import operand_format, split_blocks, unquantised_rows
from mla_fusion.propose.rotations import ROPE, rotated_pairs
from mla_fusion.propose.sites import POINT, Projections, Site, readers_in_order, users_of

_FAR = 300  # most steps between two products
_MOVES = ("reshape", "permute", "expand", "slice")
_QUANTISING = BYTES | {"size", "largest", "mxfp8", "power of two", "byte", "as"}
_ROUNDING = _QUANTISING | {"whole", "to whole", "to"}
_BRANCHES = ("cond", "while_loop", "scan", "map_impl")  # operators that run other graphs
_CODES_OF_ANY_PART = ("step.random", "linear.bias", "linear.hidden", "tokens.cut", "graph.branch")
# smooth functions; any other function of one value is a choice
_SMOOTH = frozenset(
    """
    asinh atan cos cosh erf erfc exp exp2 expm1 gelu hypot log log10 log1p log2 logaddexp logit
    mish pow sigmoid sin sinc sinh tan tanh
    """.split()
)
_EXCHANGES = "exchanges values with other devices"


class Reason(NamedTuple):
    """Why a step is not the kernel's.

    code    a code of the table of rejections; "" for that of the part
    text    the message, with %s for each Value that it names
    values  the Values that are named
    fault   the Value at fault, if that is not the first
    """

    code: str
    text: str
    values: tuple[Value, ...]
    fault: Value | None = None

    @property
    def step(self) -> Value:
        """Returns the Value at fault."""
        return self.values[0] if self.fault is None else self.fault

    def because(self, cause: Reason | None) -> Reason:
        """Returns the reason with another behind it, whose step is at fault."""
        if cause is None:
            return self
        values = *self.values, *cause.values
        return Reason(self.code, f"{self.text}; {cause.text}", values, cause.step)


def departures_to_report(
    projections: Projections, departures: Sequence[Departure], fused: Iterable[Value]
) -> list[Departure]:
    """Returns one departure for each near miss, in the order of the graph.

    departures  departures that were raised, each with its site
    fused       the products of plans; no departure is reported for them
    """
    reported_products, reported = set(fused), list[Departure]()
    near_misses = _NearMisses(projections).near_misses(departures, reported_products)
    for near_miss in sorted(near_misses, key=lambda near_miss: -near_miss.score):
        is_repeated = any(
            (near_miss.code, near_miss.values) == (earlier.code, earlier.values)
            for earlier in reported
        )
        if reported_products.isdisjoint(near_miss.site) and not is_repeated:
            reported_products |= {*near_miss.site}
            reported.append(near_miss)
    return sorted(reported, key=lambda near_miss: min(map(serial, near_miss.site), default=0))


def _is_layer(value: Value) -> bool:
    """Returns True if the Value is a product with a weight, or an operator in place of one."""
    if value.op == "dot":
        return value.sources[1].weight or _has_changing_weight(value)
    has_matrix = any(source.weight and len(source.shape) == 2 for source in value.sources)
    is_opaque = value.op == "opaque" and has_matrix and not value.model
    return is_opaque and _rows(value).shape[-1:] != value.shape[-1:]


def _has_changing_weight(layer: Value) -> bool:
    """Returns True if a product is with what is made of a weight and of an argument of the call."""
    right = layer.sources[-1]
    is_changing = layer.op == "dot" and not (right.model or right.active)
    return is_changing and any(source.weight for source in right.sources)


def _changing_weight_reason(product: Value) -> Reason:
    """Returns the reason for a product with what changes with the call."""
    text = "%s multiplies by %s, which is no weight that is equal for all calls"
    return Reason("linear.hidden", text, (product, product.sources[1]))


def _weights_only_reason(layer: Value) -> Reason | None:
    """Returns the reason for a weight of one byte an element beside wider rows; None if the weight
    is wider, too.
    """
    weights = order(source for source in layer.sources if source.weight)
    if all(weight.dtype.itemsize != 1 for weight in weights):
        return None
    text = "%s multiplies %s by a weight of one byte an element"
    return Reason("quant.weights_only", text, (layer, _rows(layer)))


def _rows(layer: Value) -> Value:
    """Returns the activation that a layer reads; of an operator, its largest operand."""
    activations = [source for source in layer.sources if not source.model]
    if layer.op == "dot":
        return activations[0]
    return max(activations, key=lambda value: value.numel)


def _is_flat(layer: Value) -> bool:
    """Returns True if the layer is not computed head by head."""
    return layer.op == "opaque" or len(layer.sources[1].shape) == 2


class _NearMisses:
    """Finds the near misses of one graph."""

    def __init__(self, projections: Projections) -> None:
        self.projections, self.graph = projections, projections.graph
        self.form, self.labels = projections.form, Labels(self.graph.gm.graph)

    def near_misses(
        self, departures: Sequence[Departure], fused: set[Value]
    ) -> Iterator[Departure]:
        """Yields the departures of what was proposed and not planned, then of what was not
        proposed.

        fused  the products of plans
        """
        products = set(fused)
        for departure in departures:
            near_miss = self._refine(departure) if fused.isdisjoint(departure.site) else None
            if near_miss is not None:
                products |= {*near_miss.site}
                yield near_miss
        for head, ups, steps in self.heads:
            if ups and products.isdisjoint(ups):
                yield from self._unproposed_misses(head, ups, steps, products)

    def _departure(
        self, reason: Reason, code: str, site: Sequence[Value], score: float
    ) -> Departure:
        """Returns the departure of a reason."""
        departure = Departure(reason.code or code, self.describe(reason), [reason.step])
        departure.site, departure.score = tuple(site), score
        return departure

    # -- how messages name Values

    def _node(self, value: Value) -> Node | None:
        """Returns the node that holds a Value, or else a node near it, or None."""
        stack = [value]
        for candidate in stack:
            if candidate in self.graph.nodes:
                return self.graph.nodes[candidate][0]
            if candidate in self.graph.enclosing:
                return self.graph.enclosing[candidate]
            size = candidate.numel if candidate.op in ("product", "reshape") else -1
            operands = [
                source for source in candidate.sources if not source.model and source.numel == size
            ]
            if len(stack) < _FAR:
                stack += operands or self.users.get(candidate, candidate.sources)
        return None

    def describe(self, reason: Reason) -> str:
        """Returns the text of a reason. Values are named by node and dims, each unlike those before
        it.
        """
        names, nodes_by_name = list[str](), dict[object, Node | None]()
        for value in reason.values:
            node = self._node(value)
            name = value.op if node is None else node.name
            tensor = None if node is None or value not in self.graph.nodes else value_of(node)
            shape = getattr(tensor, "shape", value.shape)
            dims = ", ".join(
                self.graph.size_text(size) if isinstance(size, int) else str(size) for size in shape
            )
            key = name if node is None else self.labels.of(node), dims
            prefix = "another " if nodes_by_name.setdefault(key, node) is not node else ""
            names.append(f"{prefix}{name} [{dims}]")
        return reason.text % tuple(names)

    # -- the path between products

    @cached_property
    def values(self) -> list[Value]:
        """Returns all Values that are made of inputs, in order."""
        return [value for value in order(self.graph.nodes) if not value.model]

    @cached_property
    def users(self) -> dict[Value, list[Value]]:
        """Returns the Values that read each Value."""
        return users_of(self.values)

    @cached_property
    def layers(self) -> dict[Value, list[Value]]:
        """Returns the flat layers by the activation that they read, as it is before it is
        quantised.
        """
        layers: dict[Value, list[Value]] = {}
        for value in self.values:
            if _is_layer(value) and _is_flat(value):
                layers.setdefault(self._origin(_rows(value)), []).append(value)
        return layers

    @cached_property
    def heads(self) -> list[tuple[Value, list[Value], list[Value]]]:
        """Returns each product head by head, with the flat layers above it and the steps
        between.
        """
        heads = []
        for value in self.projections.values:
            if len(value.shape) == 3 and _is_layer(value) and not _is_flat(value):
                layers, steps = self.layers_above(_rows(value))
                heads.append((value, list(filter(_is_flat, layers)), steps))
        return heads

    def _heads_of(self, up: Site) -> list[Value]:
        """Returns the products head by head of what a site's products make."""
        return [head for head, layers, _ in self.heads if not {*up.layers}.isdisjoint(layers)]

    @cached_property
    def latents(self) -> dict[Site, tuple[list[Value], list[Value]]]:
        """Returns, for each site, the layers above its rows and the steps between."""
        return {site: self.layers_above(site.rows) for site in self.projections.sites.values()}

    def layers_above(self, value: Value) -> tuple[list[Value], list[Value]]:
        """Returns the nearest layers that a Value is made of, and the steps between, in order.

        A layer that another layer is made of is left out.
        """
        layers, steps = self._reached(value)
        farther_layers = {
            layer for near_layer in layers for layer in self._reached(_rows(near_layer))[0]
        }
        nearest_layers = layers - farther_layers or layers
        made_of_layers = set(nearest_layers)
        for step in sorted(steps, key=serial):
            if not made_of_layers.isdisjoint(step.sources):
                made_of_layers.add(step)
        return sorted(nearest_layers, key=serial), sorted(made_of_layers & steps, key=serial)

    def _reached(self, value: Value) -> tuple[set[Value], set[Value]]:
        """Returns the layers and the steps that a Value is made of, up to those layers."""
        stack, steps, layers = [value], set[Value](), set[Value]()
        while stack and len(steps) < _FAR:
            current = stack.pop()
            if _is_layer(current):
                layers.add(current)
            elif current not in steps and not current.model and current.op not in ("write", "leaf"):
                steps.add(current)
                stack += current.sources
        return layers, steps

    def steps_below(self, starts: Iterable[Value]) -> list[Value]:
        """Returns the steps after layers, up to the next layers, writes and attention."""
        layers, steps = set(starts), list[Value]()
        seen = set(layers)
        for step in readers_in_order(self.users, seen):
            has_other_layers = self._has_other_layers(step, seen, layers)
            is_end = step.op == "write" or _is_layer(step) or "attention" in str(step.literal)
            if is_end or (has_other_layers and step.op in ("dot", "opaque")):
                continue
            steps.append(step)
            if not has_other_layers:
                seen.add(step)
            if len(steps) == _FAR:
                break
        return steps

    def _has_other_layers(self, value: Value, seen: set[Value], layers: set[Value]) -> bool:
        """Returns True if the Value is made of other layers' activations too.

        Two cases do not count: older scales of a product, and an adapter, which reads what the
        layers read or make.
        """
        other_sources = (source for source in value.sources if source.active and source not in seen)
        if value.op == "product":
            return any(source.serial > min(map(serial, layers)) for source in other_sources)
        if value.op != "sum":
            return any(other_sources)
        layers_above = (layer for source in other_sources for layer in self._reached(source)[0])
        return not all(
            layer_above in layers or self._reached(_rows(layer_above))[0] <= layers
            for layer_above in layers_above
        )

    def _is_cached(self, layers: Sequence[Value]) -> bool:
        """Returns True if something that the layers make is written into an input, or joined to
        one.
        """
        outputs = (*layers, *self.steps_below(layers))
        return any(
            user.op == "write"
            or (user.op == "join" and any(source.op == "leaf" for source in user.sources))
            for output in outputs
            for user in self.users.get(output, ())
        )

    def _origin(self, rows: Value) -> Value:
        """Returns the rows as they are before they are quantised."""
        inner: Value | None = rows
        while inner is not None:
            rows, blocks = inner, split_blocks(self.form, inner)
            inner = unquantised_rows(self.form, rows) if rows.active else None
            is_moved = rows.op in ("cast", "reshape", "slice") or _is_quantised(rows)
            if inner is None and (blocks is not None or is_moved):
                inner = blocks[0] if blocks is not None else _rows(rows)
        return rows

    # -- steps that the kernel does not have

    def first_odd_step(self, layers: Sequence[Value], steps: Sequence[Value]) -> Reason | None:
        """Returns the first step after layers that is no step of a prologue, or None.

        A step that runs other graphs comes first, then one with a code of its own.
        """
        odd_steps = (self._odd_step(step, layers) for step in steps)
        return min(
            filter(None, (*odd_steps, self._token_cut(layers, steps))),
            key=lambda reason: (reason.code != "graph.branch", not reason.code, reason.step.serial),
            default=None,
        )

    def odd_step_below(self, layers: Sequence[Value]) -> Reason | None:
        """Returns the first step after layers, up to the next ones, that is odd, or None."""
        return self.first_odd_step(layers, self.steps_below(layers))

    def _odd_step(self, value: Value, layers: Sequence[Value]) -> Reason | None:
        """Returns why one step is no step of a prologue, or None."""
        op, node = value.op, self._node(value)
        operands = order(source for source in value.sources if not source.active)
        random_value = next(filter(self._is_random, (value, *operands)), None)
        if random_value is not None:
            return Reason("step.random", "%s is random", (random_value,))
        if op == "opaque":
            target = value.literal[0] if node is None else kinds.called(node)
            if self.graph.symbols and name_of(target) in RULES:
                text = f"%s ({target}) is not the same step for every number of tokens"
                return Reason("tokens.mixed", text, (value,))
            if str(target) in _BRANCHES:
                return Reason("graph.branch", f"%s ({target}) runs it", (value,))
            is_collective = "c10d" in str(target)
            verb = _EXCHANGES if is_collective else UNKNOWN
            unused_rule = self.graph.unused.get(value.literal[0], "").replace("%", "%%")
            words = "; ".join(filter(None, (f"%s ({target}) {verb}", unused_rule)))
            return Reason("step.unknown", words, (value,))
        narrows = op == "cast" and (value.dtype.itemsize == 1 or not value.is_float)
        if narrows or value.function == "to":
            dtype = value.dtype if narrows else value.literal[1]
            return Reason("step.choice", f"%s rounds to {dtype}", (value,))
        if op == "function" and value.function not in _QUANTISING:
            is_choice = value.function not in _SMOOTH
            verb = "picks by the values it reads" if is_choice else "is no step of a prologue"
            return Reason("step.choice" if is_choice else "", f"%s {verb}", (value,))
        return self._added_term(value, layers) if op in ("sum", "join") else None

    def _is_random(self, value: Value) -> bool:
        """Returns True if the Value is drawn at random."""
        node = self._node(value) if value.op == "opaque" else None
        return node is not None and kinds.is_random(node)

    def _added_term(self, value: Value, layers: Sequence[Value]) -> Reason | None:
        """Returns the reason if a sum or join adds a bias, or what another layer makes."""
        addends = [
            source
            for source in value.sources
            if source.model or (source.op == "leaf" and len(source.shape) == 1)
        ]
        terms = [source for source in value.sources if source not in addends]
        layers_of_terms = [set(filter(_is_flat, self.layers_above(term)[0])) for term in terms]
        for two_terms in combinations(filter(None, layers_of_terms), 2):
            if two_terms[0].isdisjoint(two_terms[1]):
                text = f"%s {'adds' if value.op == 'sum' else 'joins'} what %s and %s make"
                pair = sorted((min(term, key=serial) for term in two_terms), key=serial)
                return Reason("linear.hidden", text, (value, *pair))
        for term, is_adapter in self._other_addends(value) if any(layers_of_terms) else ():
            return Reason("linear.hidden" if is_adapter else "", "%s adds %s", (value, term))
        is_wide = bool(layers) and value.numel > layers[0].shape[0]
        if value.op == "sum" and len(terms) == 1 and is_wide and _is_layer_output(terms[0]):
            bias = tuple(addends[:1])
            bias_name = "%s" if bias else f"{float(value.number):g}"
            return Reason("linear.bias", f"%s adds {bias_name}", (value, *bias))
        return None

    def _token_cut(self, layers: Sequence[Value], steps: Iterable[Value]) -> Reason | None:
        """Returns the first step that keeps only some of the tokens, or moves them, or None."""
        flat_layers = (layer for layer in layers if len(layer.shape) == 2)
        layouts: dict[Value, Layout] = {layer: token_layout(layer.shape) for layer in flat_layers}
        for value in steps:
            if not any(source in layouts for source in value.sources):
                continue
            try:
                layouts[value] = layout_of(value, layouts)
            except Mixed:
                size = value.sources[0].numel
                is_joined = any(
                    user.op == "join" and user.numel >= size for user in self.users.get(value, ())
                )
                if value.op in ("slice", "gather") and value.numel < size and not is_joined:
                    text = "%s has some of the tokens of %s"
                    return Reason("tokens.cut", text, (value, value.sources[0]))
                return Reason("", "%s does not treat all tokens alike", (value,))
        return None

    # -- departures that were raised

    def _refine(self, departure: Departure) -> Departure | None:
        """Returns the departure with the step at fault, or None if the products look like no
        prologue.
        """
        products = {*departure.site}
        sites = [
            site for site in self.projections.sites.values() if not products.isdisjoint(site.roots)
        ]
        pair = next(((down, up) for down in sites for up in down.next_sites if up in sites), None)
        if pair is None:
            return self._with_names(departure)
        likeness = self._likeness(*pair)
        if not likeness and departure.score < 1:
            return None
        departure.score *= likeness or 0.5
        finders = {
            "norm.absent": self._latent_reason,
            "absorb.absent": self._absorb_reason,
            "rope.absent": self._rotation_reason,
            "proof.differs": self._proof_reason,
            "tokens.mixed": self._tokens_reason,
            "reader.latent": self._reader_reason,
        }
        find_reason = finders.get(departure.code)
        reason = find_reason and find_reason(departure, *pair)
        if reason is None:
            return self._with_names(departure)
        return self._departure(reason, departure.code, departure.site, departure.score)

    def _with_names(self, departure: Departure) -> Departure:
        """Returns the departure, with the Values that it is at in its detail if that names none."""
        detail, names = departure.detail, {node.name for node in self.graph.gm.graph.nodes}
        value_of_node = {self._node(value): value for value in departure.values}
        value_of_node.pop(None, None)
        values = tuple(value_of_node.values())[:2]
        is_named = not names.isdisjoint(re.findall(r"\w*[a-z_]\w*", detail))
        if not values or is_named or departure.code.startswith("contract"):
            return departure
        text = f"{detail.replace('%', '%%')}: {' and '.join(['%s'] * len(values))}"
        departure.detail = self.describe(Reason(departure.code, text, values))
        return departure

    def _likeness(self, down: Site, up: Site) -> float:
        """Returns how much of a prologue the products of two sites are part of, from 0 to 1."""
        dots = {*down.layers}
        up_sites = [
            site
            for site, (layers, steps) in self.latents.items()
            if not dots.isdisjoint(layers)
            and not any(self._is_residual(step, down.rows) for step in steps)
        ]
        if up not in up_sites:
            return 0
        normed_sites = [
            site
            for site in up_sites
            if has_root(steps := self.latents[site][1]) and all(step.op != "dot" for step in steps)
        ]
        has_heads = bool(self._heads_of(up))
        is_turned, has_latents = any(map(_has_rotation, up_sites)), up in normed_sites
        count = has_heads + is_turned + _has_rotation(down) + (len(normed_sites) > 1)
        if not count or not (has_heads or has_latents or is_turned):
            return 0
        count += has_latents + self._is_cached(down.roots)
        return 0.5 + 0.08 * count if count > 1 else 0

    def _latent_reason(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        """Returns what stands in place of a norm of the query's latents, or of the key's."""
        layers, steps = self.latents[up]
        fault, layer = departure.values[0], up.products[0].dot
        is_wide = fault in steps or fault.shape[-1:] == up.rows.shape[-1:]
        if fault is not up.rows and (fault in down.roots or not is_wide):
            return self._key_reason(departure, down, up, layers)
        reason = self._quantisation_reason((*layers, layer), layer)
        return reason or self._path_reason(layers, steps, layer, _find_norm(down, steps, up.rows))

    def _path_reason(
        self, layers: Sequence[Value], steps: Sequence[Value], layer: Value, norm: Value | None
    ) -> Reason | None:
        """Returns what is wrong between the layers that make the query's latents and ``layer``, or
        None.

        norm  the norm of the latents, if the steps have one
        """
        rows = _rows(layer)
        if norm is None and not layers:
            return None
        later_steps = [step for step in steps if norm is None or step.serial > norm.serial]
        cause = self.first_odd_step(layers if norm is None else [], later_steps)
        if cause is not None and (cause.code in _CODES_OF_ANY_PART or _EXCHANGES in cause.text):
            return cause
        values: tuple[Value, ...] = layer, rows, layers[0] if norm is None else norm
        if norm is not None:
            code, text = "q_lora.interrupted", "%s projects %s, not the norm %s"
        elif strip(rows, *_MOVES) is strip(layers[0], *_MOVES):
            code, text, values = "norm.absent", "%s projects %s, which is not normed", values[:2]
        else:
            code, text = "norm.absent", "%s projects %s, which is no RMSNorm of %s"
        return Reason(code, text, values, rows).because(cause)

    def _weight_reason(self, layer: Value) -> Reason | None:
        """Returns the reason if a weight changes with the call, or is scaled behind its product."""
        if _has_changing_weight(layer):
            return _changing_weight_reason(layer)
        if layer.op != "dot" or operand_format(_rows(layer)) is not None:
            return None
        for step in self.steps_below([layer]):
            if step.op != "product" or len(step.sources) != 2:
                continue
            product, factor = sorted(step.sources, key=lambda source: source.weight)
            row = strip(factor, "reshape", "expand")
            is_row = factor.weight and row.shape[-1:] == (row.numel,)
            if is_row and strip(product, *_MOVES) is layer:
                scaled = Reason("linear.scaled", "%s is multiplied by %s", (layer, factor))
                return _weights_only_reason(layer) or scaled
        return None

    def _quantisation_reason(
        self, layers: Sequence[Value], up: Value | None = None
    ) -> Reason | None:
        """Returns what is wrong with products of operands of one byte, or None.

        up  the product of the query's latents
        """
        for layer in layers:
            if reason := self._weight_reason(layer):
                return reason
            rows, node = _rows(layer), self._node(layer) if layer.op == "opaque" else None
            bias = None if node is None else argument(node, "bias")
            if node is not None and bias is not None:
                text = f"%s ({kinds.called(node)}) adds {bias.name}"
                return Reason("linear.bias", text, (layer,))
            weights_only = _weights_only_reason(layer)
            if weights_only is not None:
                is_rounded = any(map(_is_rounding, (rows, *self._reached(rows)[1])))
                if operand_format(rows) is None and not is_rounded:
                    return weights_only
                if layer is up and unquantised_rows(self.form, rows) is None:
                    cut = self._token_cut([layer], self.steps_below([layer]))  # of padded rows
                    return cut or Reason("quant.dynamic", "%s multiplies %s", (layer, rows))
            if node is not None:
                cause = self._odd_step(layer, ())
                if cause is not None and cause.code == "graph.branch":
                    return cause
                return Reason("linear.hidden", f"%s ({kinds.called(node)}) {UNKNOWN}", (layer,))
        return None

    def _key_reason(
        self, departure: Departure, down: Site, up: Site, query: Sequence[Value]
    ) -> Reason:
        """Returns what stands in place of the key's latents."""
        q_layer = query[0] if query else down.products[0].dot
        other_layers = [
            layer for layer in self.layers.get(self._origin(down.rows), ()) if layer not in query
        ]
        x_format = operand_format(_rows(q_layer))
        for layer in other_layers:
            if operand_format(_rows(layer)) is not x_format:
                text = "%s and %s multiply x in different formats"
                return Reason("quant.mixed", text, (layer, q_layer))
            if _rows(layer) is not _rows(q_layer) and x_format is not None:
                text = "%s and %s multiply different quantised forms of x"
                return Reason("quant.tokens_differ", text, (layer, q_layer))
            if layer.op == "opaque" and (reason := self._quantisation_reason((layer,))):
                return reason
            if reason := self._weight_reason(layer):
                return reason
        cause = self.odd_step_below(other_layers)
        if cause is not None and cause.code:
            return cause
        query_cause = self.odd_step_below(up.roots)
        if query_cause is not None and query_cause.code == "linear.hidden":
            return query_cause
        if not other_layers:
            text = "%s projects %s; no RMSNorm of another latent is recognised beside it"
            return Reason("kv_latent.absent", text, (q_layer, down.rows), departure.values[0])
        layer, rows = other_layers[0], _rows(other_layers[0])
        if x_format is None and rows is not down.rows:
            text = "%s projects %s, and %s projects %s"
            return Reason("kv_latent.absent", text, (layer, rows, q_layer, down.rows))
        text = "%s projects %s; no RMSNorm of its columns is recognised"
        return Reason("kv_latent.absent", text, (layer, down.rows)).because(cause)

    def _absorb_reason(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        """Returns why no part of the query is multiplied by W_uk, or None."""
        heads = self._heads_of(up)
        if reason := next(filter(None, map(self._weight_reason, heads)), None):
            return reason
        for step in self.steps_below(up.layers):
            is_argument = step.op == "dot" and strip(step.sources[1], *MOVES).op == "leaf"
            if is_argument and step.shape[-1] == LATENT and not step.sources[1].model:
                return _changing_weight_reason(step)
        direct_query = None if rotated_pairs(up) else self._direct_query(down)
        if reason := direct_query or self._odd_part(up):
            return reason
        text = "%s multiplies %s, which is more than columns of %s"
        return Reason("", text, (heads[0], _rows(heads[0]), up.roots[0])) if heads else None

    def _direct_query(self, down: Site) -> Reason | None:
        """Returns the reason if a query is made of x without latents, or None."""
        for value, pairs in rotated_pairs(down):
            if pairs.heads > 1:
                text = "%s, with more heads than a key, is made of %s"
                return Reason("q_lora.absent", text, (value, down.rows))
        return None

    def _odd_part(self, site: Site, width: int | None = None) -> Reason | None:
        """Returns the first odd step after a site's products, or a norm of ``width`` there, or
        None.
        """
        steps = self.steps_below(site.layers)
        cause = self.first_odd_step(site.layers, steps)
        for step in steps:
            size = step.numel // max(site.tokens, 1)
            is_wide = step.shape[-1:] != (1,) and size > 1 and width in (None, size)
            is_first = cause is None or step.serial < cause.step.serial
            source_readings = (site.readings.get(source) for source in step.sources)
            is_after_rotation = any(
                reading is not None and reading.kind == "turned" for reading in source_readings
            )
            if is_wide and has_root([step]) and is_first and not is_after_rotation:
                return Reason("rope.normed_key", "%s is normed", (step,))
        return cause

    def _rotation_reason(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        """Returns what stands in place of the rotation of query or key."""
        queries = rotated_pairs(up)
        keys = [entry for entry in rotated_pairs(down) if entry[1].heads == 1]
        if queries and keys:
            (query, query_pairs), (key, key_pairs) = queries[0], keys[0]
            product = up.products[0]
            if product.kind is not None and not product.factors:
                text = "%s is multiplied by no scale of columns"
                return Reason("quant.scale", text, (product.dot,))
            for dot in (product.dot, *down.layers):
                if reason := self._weight_reason(dot):
                    return reason
            # a sign alone may be that of the cosines
            if query_pairs.multiple_of(key_pairs) not in (None, 1, POINT.p - 1):
                text = "%s and %s are rotated alike, and scaled differently"
                return Reason("scale.unequal", text, (query, key))
            text = "the tables of %s and %s are not proved equal"
            return Reason("rope.tables_differ", text, (query, key))
        if not queries and (reason := self._direct_query(down)):
            return reason
        cause = None if queries else self._odd_part(up)
        cause = cause or (None if keys else self._odd_part(down, ROPE))
        # a join repeats the key for all heads
        if cause is not None and cause.values[0].op != "join":
            return cause
        layers, _ = self.latents[up]
        root = next(
            (product.root for product in down.products if product.dot not in layers), down.roots[0]
        )
        if queries or keys:
            value, other = (queries or keys)[0][0], root if queries else up.roots[0]
            text = f"%s is rotated, no {ROPE} columns of %s are"
            return Reason("", text, (value, other), other)
        text = f"no {ROPE} columns of %s or %s are rotated, or left as they are"
        # a step may read products of both sites
        cause = self.odd_step_below([*up.layers, *down.layers])
        is_unknown = cause is not None and cause.code == "step.unknown"
        return Reason("", text, (up.roots[0], root)).because(cause if is_unknown else None)

    def _proof_reason(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        """Returns why a proof differs, or None."""
        part, fault = departure.detail.partition(" ")[0], departure.values[0]
        if part in ("query_rope", "kr_rows") and _has_rotation(down):
            return Reason("rope.tables_differ", f"%s: {departure.detail}", (fault,))
        if part != "query" or up.products[0].kind is not None:
            return None
        rows = strip(fault, *_MOVES)
        rows = strip(_rows(rows), *_MOVES) if _is_layer(rows) else rows
        factors = [
            factor for factor in rows.sources if not factor.active and filled_with(factor) is None
        ]
        if rows.op == "product" and factors:
            return Reason("scale.unequal", "%s is multiplied by %s", (rows, factors[0]))
        return None

    def _tokens_reason(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        """Returns which step does not treat all tokens alike, if their number is no symbol."""
        text = "%s does not treat all tokens alike"
        is_static = not self.graph.symbols
        return Reason("proof.differs", text, departure.values[:1]) if is_static else None

    def _reader_reason(self, departure: Departure, down: Site, up: Site) -> Reason | None:
        """Returns the reason if something is added to a product with W_uk, or None."""
        cause = self.odd_step_below(self._heads_of(up))
        return cause if cause is not None and cause.code == "linear.bias" else None

    # -- prologues that were not proposed

    def _unproposed_misses(
        self, head: Value, ups: list[Value], steps: list[Value], reported_products: set[Value]
    ) -> Iterator[Departure]:
        """Yields the departure of a product head by head of some columns of layers.

        reported_products  products of departures that were reported
        """
        up, (heads, _, nope) = ups[0], _rows(head).shape
        product = next((step for step in steps if step.op == "dot"), None)
        is_value = product is not None and product.sources[1].active  # attention is before it
        if is_value or heads * nope > sum(layer.shape[-1] for layer in ups):
            return
        layers = self.layers.get(self._origin(_rows(up)), [])
        if product is not None:
            reason: Reason | None = _changing_weight_reason(product)
        elif self._is_cached(layers) and has_root(self.steps_below(layers)):
            text = "%s, which %s multiplies head by head, projects %s"
            reason = Reason("q_lora.absent", text, (up, head, _rows(up)))
        else:
            downs, between = self.layers_above(_rows(up))
            layers = self.layers.get(self._origin(_rows(downs[0])), []) if downs else []
            if not self._is_cached(layers) or any(
                self._is_residual(step, _rows(downs[0])) for step in between
            ):
                return
            reason = self._quantisation_reason((*downs, up), up)
            if reason is None and (self.first_odd_step(downs, between) or not has_root(between)):
                reason = self._path_reason(downs, between, up, None)
            reason = reason or self.first_odd_step(ups, steps)
            head_by_head = next((down for down in downs if not _is_flat(down)), None)
            if reason is None and head_by_head is not None:
                text = "%s multiplies by %s, which is not one weight for all tokens"
                reason = Reason("linear.hidden", text, (head_by_head, head_by_head.sources[1]))
            layers = [*downs, *layers]
        site = [*ups, *layers]
        if reason is not None and reported_products.isdisjoint(site):
            yield self._departure(reason, "absorb.absent", site, 0.5)

    def _is_residual(self, value: Value, rows: Value) -> bool:
        """Returns True if the Value is a sum with what the rows of a layer are made of."""
        if value.shape[-1:] in ((), (1,)):
            return False
        for addend, is_product in self._other_addends(value):
            inputs = {leaf for leaf in order([addend]) if leaf.op == "leaf" and not leaf.model}
            if not is_product and not inputs.isdisjoint(order([rows])):
                return True
        return False

    def _other_addends(self, value: Value) -> Iterator[tuple[Value, bool]]:
        """Yields the addends of a sum, as large as it is, that no layer makes, and whether a
        product does.
        """
        for addend in value.sources if value.op == "sum" else ():
            layers, steps = self._reached(addend)
            if not (layers or addend.model) and addend.numel == value.numel:
                yield addend, any(step.op in ("dot", "opaque") for step in steps)


def _find_norm(down: Site, steps: Sequence[Value], rows: Value) -> Value | None:
    """Returns the last of the steps that is the norm of a whole row, or None.

    rows  what the steps make: the norm may be some of its factors
    """
    for value, reading in reversed(down.readings_of("normed")):
        is_row = len(reading.column_set) == len(reading.columns) == value.shape[-1]
        is_step = value in steps or (rows.op == "product" and {*value.sources} < {*rows.sources})
        if is_row and is_step:
            with suppress(Departure):
                read_norm(down, value, "latents")
                return value
    return None


def _is_layer_output(value: Value) -> bool:
    """Returns True if the Value is what a layer makes, moved or scaled."""
    while value.op in MOVES or value.op == "product":
        is_move = value.op in MOVES
        operands = [(source, 1) for source in value.sources] if is_move else value.operands
        factors = [
            (source, power)
            for source, power in operands
            if not source.model and (is_move or source.numel == value.numel)
        ]
        if [power for _, power in factors] != [1]:
            return False
        ((value, _),) = factors
    return _is_layer(value)


def _is_quantised(value: Value) -> bool:
    """Returns True if the Value is a quantisation of other numbers."""
    return value.function in BYTES or (value.op == "opaque" and "quant" in str(value.literal))


def _is_rounding(value: Value) -> bool:
    """Returns True if the Value is of one byte, or is rounded."""
    return value.dtype.itemsize == 1 or value.function in _ROUNDING or _is_quantised(value)


def _has_rotation(site: Site) -> bool:
    """Returns True if a Value of the site is rotated."""
    return bool(site.readings_of("turned"))


def has_root(steps: Iterable[Value]) -> bool:
    """Returns True if one of the steps takes a root."""
    return any(True for step in steps for _ in radicands(step))
