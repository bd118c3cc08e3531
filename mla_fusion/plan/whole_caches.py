"""Where the whole prologue's new rows go: pairs of caches, packed rows, the model's own cache
operator.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts import cache_write, packed_rows
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.cache_write import Slots, WriteFact
from mla_fusion.facts.obstacle import Obstacle
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.fx.kinds import is_getitem, word
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.sizes import same_shape
from mla_fusion.fx.view import View
from mla_fusion.match.candidate import Candidate
from mla_fusion.meta import layout, limits
from mla_fusion.meta.number_formats import INT8
from mla_fusion.operators.known import shape_of, value_of
from mla_fusion.plan import int8_query
from mla_fusion.plan.caches import Placement, WritePlanner, in_ratio, shaped
from mla_fusion.plan.int8_query import Int8Query
from mla_fusion.plan.outputs import Replacement, ValueTree, leads_only_to, live_users, whole_readers
from mla_fusion.plan.plan import InPlace, Staged
from mla_fusion.report.rejection import Refuse


class CachesOfWhole(WritePlanner):
    """Of the whole prologue. Raises ``Refuse`` where the model's own operator cannot be
    replaced.
    """

    def __init__(
        self,
        view: View,
        config: Config,
        candidate: Candidate,
        trees: dict[str, ValueTree],
        boundary: bool,
    ) -> None:
        super().__init__(view, config, candidate, trees, boundary)
        self.candidate = candidate
        self._int8_queries: dict[CacheScale, Int8Query | str] = {}

    def place(self, token_x: Node, pairs: bool, stage_because: Obstacle | None) -> Placement:
        if self.key.operator is not None:
            return self._by_operator(token_x)
        return super().place(token_x, pairs, stage_because)

    def check_order(self, writer: Node) -> None:
        """Slots that the query decides, and that the model itself keeps from being negative, are
        the kernel's but for their time: it writes before its query can say where to.
        """
        made = self.candidate.query.down.node
        for index in _integers(writer):
            above = nodes_between((), index) if self.view.depends_on_products(index) else []
            if made in above and any(word(node) in _NEVER_NEGATIVE for node in above):
                raise Refuse(
                    "order.cycle",
                    f"the kernel needs {index.name} before it is computed",
                    (index,),
                )

    def writable(self, cache: Any) -> bool:
        machine = self.config.machine
        allowed = limits("npu_mla_prolog_v3", machine.soc, machine.cann, "graph")
        free, compares = allowed.strided_caches, allowed.compares_strides
        return layout.writable(cache, first_axis_free=free, ones_free=not compares)

    def as_quantised(self, kv: CacheScale | None, kr: CacheScale | None) -> Int8Query | str | None:
        """The query that goes with caches scaled so (None: in bfloat16), or why they are no mode of
        the kernel.

        Both per channel is mode 2, the latent cache alone mode 1: its scale is one value, and the
        query is int8.
        """
        if kv is None and kr is None:
            return None
        weights = self.candidate.weight_quant_mode
        mode = 2 if kr is not None else 1
        element = self.candidate.format.element if self.candidate.format is not None else None
        others = [
            scale.format.name
            for scale in (kv, kr)
            if scale is not None and scale.format.element != element
        ]
        if kv is None or others or not self._takes(mode):
            which, name = "both caches" if kv and kr else "one cache", (others or ["quantised"])[0]
            return f"with weight_quant_mode {weights} the kernel writes no {name} rows to {which}"
        if mode == 2:
            return None
        if kv.node is not None and math.prod(shape_of(kv.node)) != 1:
            return f"{kv.node.name} scales each channel of the latent, and the key is not int8"
        if not isinstance(self.candidate.query.absorb, AbsorbFact):
            return "the kernel would quantise the absorbed query, and this one is not absorbed"
        if kv not in self._int8_queries:
            query, rope, width = (
                self.trees["query"],
                self.trees["query_rope"],
                self.candidate.query.absorb.latent_dim,
            )
            how = self.candidate.shrink, self.candidate.tokens
            self._int8_queries[kv] = int8_query.find(self.view, query, rope, width, kv, *how)
        return self._int8_queries[kv]

    def _takes(self, mode: int) -> bool:
        """Is the kv_cache_quant_mode one that goes with the weights' mode, on this chip and
        release?
        """
        machine = self.config.machine
        legal = limits("npu_mla_prolog_v3", machine.soc, machine.cann).quant_modes
        return (self.candidate.weight_quant_mode, mode) in legal

    # -- one cache of packed rows

    def packed(self, token_x: Node) -> Placement | None:
        """Rows of quantised tiles, key and scales in one cache; None where the graph packs no such
        rows.
        """
        form = self.candidate.format or INT8
        if form.element not in self.view.held_dtypes:
            return None
        latent, key = self.trees["c_kv"], self.trees["k_pe"]
        columns, rope, shrink = len(self.key.columns), self.key.rope_dim, self.candidate.shrink
        of_latent, of_key = (_rows(tree, width) for tree, width in ((latent, columns), (key, rope)))
        rows = (
            packed_rows.find(self.view, of_latent, of_key, shrink, form.element)
            if of_latent and of_key
            else None
        )
        if rows is None:
            return None
        if not self._takes(3):
            message = (
                "the kernel writes no packed rows with weight_quant_mode "
                f"{self.candidate.weight_quant_mode}"
            )
            return Placement(Staged((Obstacle("cache.quantised", message),)))
        readers = [
            user for tree in (latent, key) for users in tree.readers().values() for user in users
        ]
        other = leads_only_to(readers, [rows.node])
        writers = live_users(rows.node)
        if other is not None or len(writers) != 1:
            culprit = other or (writers or [rows.node])[-1]
            message = f"{culprit.name} reads the new rows too, not from the cache"
            return Placement(Staged((Obstacle("cache.rows_read", message),)))
        write = cache_write.find(self.view, writers[0], rows.node)
        if not isinstance(write, WriteFact):
            return Placement(Staged(write))
        obstacles = self.obstacles(token_x, write, shape_of(rows.node)[-1])
        if obstacles:
            return Placement(Staged(tuple(obstacles)))
        shape = cache_write.paged_shape(write.cache)
        assert shape is not None
        slots = shaped(write.slots, shape_of(token_x)[:-1])
        in_place = InPlace(
            kv_cache=write.cache,
            kr_cache=None,
            kv_shape=shape,
            kr_shape=(0,),
            slots=slots,
            mode="PA_BSND",
            trusted=write.trusted,
            rows=(rows.node,),
        )
        in_place = replace(in_place, clip_alpha=rows.alpha)
        return Placement(
            in_place, tuple(whole_readers(write.result, "kv_cache", shape, same_shape))
        )

    # -- the model's own fused operator

    def _by_operator(self, token_x: Node) -> Placement:
        operator = self.key.operator
        assert operator is not None
        slots = shape_of(operator.index)
        if not self.as_many(slots, token_x):
            tokens = list(shape_of(token_x)[:-1])
            detail = f"{operator.index.name} has {list(slots)} slots for tokens {tokens}"
            raise Refuse("cache.slots", detail, (operator.node, operator.index))
        if operator.cache_mode is None or operator.other is not None:
            detail = f"{operator.node.name} has {operator.other or 'another cache_mode'}"
            raise Refuse("cache.operator_mode", detail, (operator.node,))
        both = ((operator.kv_scale, operator.kv_format), (operator.kr_scale, operator.kr_format))
        if any(node is not None and form is None for node, form in both):
            raise Refuse(
                "quant.cache",
                f"{operator.node.name} writes a cache of another format",
                (operator.node,),
            )
        scales = [
            CacheScale(node, format=form) if node is not None and form else None
            for node, form in both
        ]
        query = self.as_quantised(*scales)
        if isinstance(query, str):
            raise Refuse("quant.cache", f"{operator.node.name}: {query}", (operator.node,))
        inputs = [
            self._input_of_operator(operator.node, cache)
            for cache in (operator.kv_cache, operator.kr_cache)
        ]
        parts = {
            node.args[1]: node
            for node in operator.node.users
            if is_getitem(node) and live_users(node)
        }
        k_pe, c_kv, kr, kv = operator.results
        found: list[Replacement] = []
        for index, name, width in (
            (k_pe, "k_pe", self.key.rope_dim),
            (c_kv, "c_kv", self._latent_dim),
        ):
            if index in parts:
                if not operator.gives_rows or operator.kv_scale is not None:
                    why = (
                        "the cache holds in int8"
                        if operator.gives_rows
                        else "are given with is_output_kv alone"
                    )
                    detail = f"{parts[index].name} reads the new {name} rows, which {why}"
                    raise Refuse("reader.latent", detail, (parts[index],))
                shape = (*shape_of(token_x)[:-1], width)
                found += whole_readers(parts[index], name, shape, same_shape)
        for index, name, cache in (
            (kv, "kv_cache", operator.kv_cache),
            (kr, "kr_cache", operator.kr_cache),
        ):
            if index in parts:
                found += whole_readers(parts[index], name, shape_of(cache), same_shape)
        kv_shape, kr_shape = (
            tuple(shape_of(cache)) for cache in (operator.kv_cache, operator.kr_cache)
        )
        in_place = InPlace(
            kv_cache=inputs[0],
            kr_cache=inputs[1],
            kv_shape=kv_shape,
            kr_shape=kr_shape,
            slots=shaped(Slots(operator.index), shape_of(token_x)[:-1]),
            mode=operator.cache_mode,
            copies=operator.hidden_write,
            kv_scale=in_ratio(scales[0], query),
            kr_scale=scales[1],
        )
        return Placement(in_place, tuple(found), query)

    @property
    def _latent_dim(self) -> int:
        return len(self.key.columns)

    def _input_of_operator(self, operator: Node, cache: Node) -> Node:
        """The graph input that the operator writes to: its operand itself, or what a wrapper can
        view so.
        """
        found = cache_write.input_behind(cache)
        if found is None or (found is not cache and not self.boundary):
            raise Refuse(
                "cache.view_of_input", f"{operator.name} gets {cache.name}", (operator, cache)
            )
        if not self.writable(found.meta["val"]):
            detail = f"{found.name} has strides {list(found.meta['val'].stride())}"
            raise Refuse("contract:contiguous.kv_cache", detail, (operator, found))
        others = cache_write.readers(found, operator)
        if others:
            raise Refuse(
                "cache.also_read", f"{others[0].name} reads {found.name}", (others[0], found)
            )
        return found


def _integers(writer: Node) -> list[Node]:
    """The operands of a writer that say where rows go."""
    values = ((node, value_of(node)) for node in writer.all_input_nodes)
    return [
        node
        for node, value in values
        if isinstance(value, torch.Tensor) and value.dtype in _INDICES
    ]


_INDICES = (torch.int32, torch.int64)
_NEVER_NEGATIVE = frozenset("abs relu clamp clamp_min argsort nonzero".split())


def _rows(tree: ValueTree, width: int) -> packed_rows.Rows | None:
    codes = tree.codes[tree.roots[0]]
    return (
        packed_rows.Rows(tree.roots[0], codes, width) if isinstance(codes, torch.Tensor) else None
    )
