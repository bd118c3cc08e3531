"""A candidate: the facts of one prologue, joined; what the verdict and the plan ask of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.kv_operator import KvOperatorFact
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact, Table
from mla_fusion.facts.unabsorbed import UnabsorbedFact
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class QuerySide:
    """c_q = norm(x W_dq); q = c_q W_uq_qr; query = absorb(q_nope); query_rope = rope(q_pe)."""

    down: Projection
    norm: NormFact
    up_nope: Projection
    up_rope: Projection
    absorb: AbsorbFact | UnabsorbedFact
    rope: RopeFact


@dataclass(frozen=True, kw_only=True)
class KeySide:
    """c_kv = norm(x W_dkv); k_pe = rope(x W_kr), by plain nodes or by one npu operator that also writes."""

    down: Projection
    down_rope: Projection
    columns: tuple[int, ...]
    gamma: Node | None
    eps: float
    scale: float
    norm: NormFact | None
    first: tuple[int, ...]
    second: tuple[int, ...]
    layout: str
    cos: Table
    sin: Table
    rope: RopeFact | None
    operator: KvOperatorFact | None

    @property
    def rope_dim(self) -> int:
        return 2 * len(self.first)

    @property
    def latent(self) -> Node:
        """The product of which the latent is made: one for each prologue."""
        return self.down.node


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Everything a fused call needs to know of the graph, and nothing yet about whether it is legal.

    shrink   on how many tokens the facts were read
    tokens   where these stand in the nodes
    others   the same prologue with other nodes for its parts: one node may hold the normed latent, another twice it
    """

    query: QuerySide
    key: KeySide
    shrink: Shrink | None
    tokens: Tokens
    others: tuple[Candidate, ...] = ()

    @property
    def weight_quant_mode(self) -> int:
        """0 no int8 weight, 1 W_uq_qr alone, 2 all three projections (the verdict has seen that it is one of them)."""
        if self.query.up_nope.quantised is None:
            return 0
        return 1 if self.query.down.quantised is None else 2

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The rare nodes of the prologue, for messages."""
        q, k = self.query, self.key
        key_nodes = [k.operator.node] if k.operator else [f.node for f in (k.norm, k.rope) if f is not None]
        named = [q.down.node, q.norm.node, q.up_nope.node, q.up_rope.node, q.absorb.node, q.rope.node]
        return tuple(dict.fromkeys([*named, k.down.node, k.down_rope.node, *key_nodes]))
