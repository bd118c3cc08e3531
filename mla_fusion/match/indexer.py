"""The indexer beside a prologue (DSA): it picks the tokens that attention reads, by a query of c_q
and a key of x.

Its own prologue is a projection of c_q and one of x, a norm and RoPE of some columns of the key,
and the key's rows in a cache of their own. No operator of torch_npu has all of that (2.13 and 2.14,
by their schemas), so it stays as the model has it; the kernel gives c_q out for it
(``query_norm``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from mla_fusion.facts.cache_write import input_behind
from mla_fusion.facts.projection import Projection
from mla_fusion.fx.kinds import is_writer
from mla_fusion.fx.walk import reached, users
from mla_fusion.match.candidate import Candidate
from mla_fusion.match.finder import Finder

_FARTHEST = 64  # nodes from the key's projection to the product with the query


@dataclass(frozen=True)
class Indexer:
    """heads, width: of its query, whose product is ``query``; ``key``: its key's; ``cache``: what
    holds its keys.
    """

    query: Node
    key: Node
    heads: int
    width: int
    rotated: int
    cache: Node | None

    def __str__(self) -> str:
        kept = f", its keys kept in {self.cache.name}" if self.cache is not None else ""
        return (
            f"an indexer of {self.heads} heads, {self.width} wide, {self.rotated} columns "
            f"rotated{kept}: "
            "no operator of torch_npu has its prologue"
        )


def beside(finder: Finder, candidate: Candidate) -> Indexer | None:
    """The indexer that reads the c_q of this prologue; None where there is none."""
    q = candidate.query
    own = {
        q.up_nope.node,
        q.up_rope.node,
        q.down.node,
        candidate.key.down.node,
        candidate.key.down_rope.node,
    }
    for query in finder.above[q.norm.node]:
        ropes = finder.reader.read(query).ropes if query.is_flat and query.node not in own else []
        for rope in ropes:
            width = _columns(finder, query) // rope.heads
            for key in finder.above[q.down.origin]:
                if key.node not in own and key.is_flat and _columns(finder, key) == width:
                    met, cache = _meet(finder, query.node, key.node)
                    if met:
                        return Indexer(
                            query.node, key.node, rope.heads, width, rope.rope_dim, cache
                        )
    return None


def _columns(finder: Finder, item: Projection) -> int:
    size = item.width
    return finder.view.binding.size(size)


def _meet(finder: Finder, query: Node, key: Node) -> tuple[bool, Node | None]:
    """Does a product read what is made of both? And the graph input in which the key's rows lie by
    then.
    """
    products = {
        user
        for node in finder.view.members(query)
        for user in node.users
        if user in finder.view.contractions
    }
    cache = None
    for node in reached([key], users, _FARTHEST):
        for user in node.users:
            if user in products:
                return True, cache
            if is_writer(user) and isinstance(user.args[0], Node):
                cache = input_behind(user.args[0]) or cache
    return False, cache
