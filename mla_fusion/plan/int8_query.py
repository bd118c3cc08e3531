"""The query as int8 or float8 attention wants it (query_quant_mode 1): in the cache's format with a
scale for each token and head, and query_rope brought to the scale of the products of such a query
and cache.

    query_int8, scale = npu_dynamic_quant(query)        query_rope * (quant_scale_ckv / scale)

The kernel gives out these three and nothing else, so every reader must read them. What the latent
rows are multiplied by on their way into the cache is ``kc_scale * quant_scale_ckv``; only
query_rope tells how much of it is which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts import dynamic_quant
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.fx.kinds import op_name
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import peel, reached
from mla_fusion.plan.outputs import ValueTree, leads_only_to, live_users, quantised_rows

_FARTHEST = 24  # plain nodes from query_rope to what is brought to scale


@dataclass(frozen=True)
class Int8Query:
    """trees: the three outputs by name; ratio: quant_scale_ckv over what the cache's rows are seen
    to be scaled by.
    """

    trees: dict[str, ValueTree]
    ratio: float


def find(
    view: View,
    query: ValueTree,
    rope: ValueTree,
    latent_dim: int,
    cache_scale: CacheScale,
    shrink: Shrink | None,
    tokens: Tokens | None = None,
) -> Int8Query | str:
    """The quantised query, or why the graph does not use the query so."""
    readers = [user for users in query.readers().values() for user in users]
    dynamic = dynamic_quant.by_operator(readers[0]) if readers else None
    others = [user for user in readers if dynamic is None or not view.same(user, dynamic.node)]
    if (
        dynamic is None
        or dynamic.smooth is not None
        or dynamic.format is not cache_scale.format
        or others
    ):
        reader = (others or readers or query.roots)[0]
        return f"{reader.name} reads the query otherwise than in {cache_scale.format.name}"
    trees = quantised_rows(view, query, latent_dim, dynamic, shrink, tokens)
    if trees is None or trees[1] is None:
        return f"{dynamic.node.name} does not quantise the query of each token and head by itself"
    values, scales = trees[0], trees[1]
    scaled = _brought_to_scale(view, rope, scales, cache_scale, shrink, tokens)
    if isinstance(scaled, str):
        return scaled
    in_scale, ratio = scaled
    outputs = {"query": values, "dequant_scale_q_nope": scales, "query_rope": in_scale}
    for name, tree in outputs.items():
        if of_both := tree.reader_of_rounding():
            return f"{of_both.name} reads what rounding leaves of {name}"
    return Int8Query(outputs, ratio)


def _brought_to_scale(
    view: View,
    rope: ValueTree,
    scales: ValueTree,
    cache_scale: CacheScale,
    shrink: Shrink | None,
    tokens: Tokens | None,
) -> tuple[ValueTree, float] | str:
    """query_rope times the cache's scale over the query's, which must be all that is read of
    query_rope; and times what number besides.
    """
    readers = [user for users in rope.readers().values() for user in users]
    behind = reached(readers, lambda node: live_users(node) if _is_plain(node) else (), _FARTHEST)
    for node in (node for node in behind if node.op == "call_function"):
        scaled = _scaled_codes(view, rope, scales, cache_scale, node, shrink)
        if scaled is not None:
            other = leads_only_to(readers, [node])
            codes, ratio = scaled
            if tokens:
                tokens.follow(nodes_between((rope.roots[0], *scales.roots), node))
                if not tokens.knows(node):
                    return _unscaled(node)
            return (
                (ValueTree(view, node, codes, (), shrink, tokens), ratio)
                if other is None
                else _unscaled(other)
            )
    return _unscaled(readers[0]) if readers else "nobody reads query_rope"


def _unscaled(node: Node) -> str:
    return f"{node.name} reads query_rope before it is brought to the scale of the quantised query"


def _is_plain(node: Node) -> bool:
    return op_name(node).startswith("aten::")


def _scaled_codes(
    view: View,
    rope: ValueTree,
    scales: ValueTree,
    cache_scale: CacheScale,
    node: Node,
    shrink: Shrink | None,
) -> tuple[torch.Tensor, float] | None:
    """Which element of query_rope each of ``node`` is, where it is brought to scale, and the ratio;
    else None.
    """
    scale = cache_scale.node
    given = [] if scale is None else [peel(scale)]
    held = [] if scale is None else [_elements(view, given[0], scale)]
    inputs = [rope.roots[0], *scales.roots, *given]
    program = Program(inputs, nodes_between(inputs, node), view.binding, shrink=shrink)
    codes = [rope.codes[rope.roots[0]], *(scales.codes[root] for root in scales.roots)]
    if not all(isinstance(code, torch.Tensor) for code in codes):
        return None
    rotated, *of_scales = (code.long() for code in codes if isinstance(code, torch.Tensor))
    elements, heads = rotated.numel(), of_scales[0].numel()
    generator = torch.Generator().manual_seed(0)

    def run(
        probe: torch.Tensor, per_head: torch.Tensor, number: float = 1.0
    ) -> torch.Tensor | None:
        constants = [torch.where(mask, number, 1.0).double() for mask in held]
        memory = program.run([probe[rotated], *(per_head[rows] for rows in of_scales), *constants])
        found = memory[program.slot(node)]
        fits = (
            isinstance(found, torch.Tensor)
            and found.is_floating_point()
            and found.numel() == elements
        )
        return found if fits else None

    unit = cache_scale.factor * torch.ones(heads, dtype=torch.float64)
    level, numbered = (
        run(torch.ones(elements, dtype=torch.float64), unit),
        run(torch.arange(elements).double(), unit),
    )
    if level is None or numbered is None or not level.min() > 0:
        return None
    ratio = float(level.flatten()[0])
    places = (numbered / ratio).round().long()
    if (
        (numbered / ratio - places).abs().max() > 1e-6
        or places.min() < 0
        or places.max() >= elements
    ):
        return None
    probe = torch.randn(elements, generator=generator, dtype=torch.float64)
    per_head = 0.5 + torch.rand(heads, generator=generator, dtype=torch.float64)
    number = 0.75  # of the cache's scale: what does not follow it is not brought to it
    factor = (
        ratio
        * cache_scale.factor
        * (1 if not given else 1 / number if cache_scale.inverse else number)
    )
    found, wanted = (
        run(probe, per_head, number),
        factor * probe[places] / per_head[places // (elements // heads)],
    )
    return (
        (places, ratio)
        if found is not None and torch.allclose(found, wanted, rtol=1e-9, atol=0)
        else None
    )


def _elements(view: View, base: Node, scale: Node) -> torch.Tensor:
    """Bool, of ``base``'s shape: which of its elements are in ``scale``, a view of it."""
    held = torch.zeros(view.binding.shape_of(base), dtype=torch.bool)
    codes = view.codes_of(base, scale)
    if codes is not None:
        held.view(-1)[codes] = True
    return held
