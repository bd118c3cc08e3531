"""A candidate: the facts of one prologue, joined; what the verdict and the plan ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Node

from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.kv_operator import KvOperatorFact
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact, Table
from mla_fusion.facts.unabsorbed import UnabsorbedFact
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.tokens import Tokens
from mla_fusion.meta.number_formats import NumberFormat


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
    """c_kv = norm(x W_dkv); k_pe = rope(x W_kr), by plain nodes or by one npu operator that also
    writes.
    """

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
class KeyHalf:
    """The key's side of a prologue, whatever its query is.

    shrink   on how many tokens the facts were read
    tokens   where these stand in the nodes
    others   the same with other nodes for its parts: one node may hold the normed latent, another
             twice it
    """

    key: KeySide
    shrink: Shrink | None
    tokens: Tokens
    others: tuple[KeyHalf, ...] = ()

    @property
    def down(self) -> Projection:
        """The projection that stands for the whole, and whose activation has the tokens."""
        return self.key.down

    @property
    def taken(self) -> tuple[Node, ...]:
        """Products that a call takes as they are; those of a whole prologue are computed in it."""
        return tuple(dict.fromkeys((self.key.down.node, self.key.down_rope.node)))

    @property
    def rotation(self) -> RopeFact:
        """One of plain nodes: the query's, of a key alone the key's."""
        assert self.key.rope is not None
        return self.key.rope

    @property
    def columns(self) -> tuple[object, ...]:
        """Of every product, those that are taken, and the axis along which they lie."""
        k = self.key
        axes = [
            item.product.out_labels.index(item.column_labels[0]) for item in (k.down, k.down_rope)
        ]
        return k.columns, k.first, k.second, *axes

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that the kernel takes: here those of the product."""
        value: torch.Tensor = self.key.down.node.meta["val"]
        return value.dtype

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The distinct projections that the call replaces, each with one weight."""
        return ()

    @property
    def made_of_x(self) -> frozenset[Node]:
        """The products among those that are computed from x itself."""
        return frozenset()

    @property
    def weight_quant_mode(self) -> int:
        return 0

    @property
    def format(self) -> NumberFormat | None:
        """Of the weights of the projections that the call replaces, some at least; None:
        bfloat16.
        """
        return None

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The rare nodes, for messages."""
        k = self.key
        facts = (
            [k.operator.node] if k.operator else [f.node for f in (k.norm, k.rope) if f is not None]
        )
        return tuple(dict.fromkeys([k.down.node, k.down_rope.node, *facts]))


@dataclass(frozen=True, kw_only=True)
class Candidate(KeyHalf):
    """Everything a call of the whole prologue needs to know of the graph, and nothing yet about
    whether it is legal.
    """

    query: QuerySide
    others: tuple[Candidate, ...] = ()

    @property
    def down(self) -> Projection:
        return self.query.down

    @property
    def taken(self) -> tuple[Node, ...]:
        return ()

    @property
    def rotation(self) -> RopeFact:
        return self.query.rope

    @property
    def columns(self) -> tuple[object, ...]:
        q = self.query
        return q.norm.columns, q.absorb.columns, q.rope.first, q.rope.second, *super().columns

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """Absorbed product included."""
        q, k = self.query, self.key
        every = [q.down, q.up_nope, q.up_rope, q.absorb.projection, k.down, k.down_rope]
        return tuple({part.node: part for item in every for part in item.by_weight}.values())

    @property
    def made_of_x(self) -> frozenset[Node]:
        downs = (self.query.down, self.key.down, self.key.down_rope)
        return frozenset(part.node for item in downs for part in item.by_weight)

    @property
    def weight_quant_mode(self) -> int:
        """0 nothing quantised, else that of the format (the verdict has seen that there is one)."""
        form = self.format
        if form is None:
            return 0
        return form.partial or 0 if self.query.down.quantised is None else form.full

    @property
    def format(self) -> NumberFormat | None:
        quantised = self.query.up_nope.quantised
        return quantised.format if quantised is not None else None

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        q = self.query
        named = [
            q.down.node,
            q.norm.node,
            q.up_nope.node,
            q.up_rope.node,
            q.absorb.node,
            q.rope.node,
        ]
        return tuple(dict.fromkeys([*named, *super().nodes]))


def plain_key(down: Projection, down_rope: Projection, norm: NormFact, rope: RopeFact) -> KeySide:
    """The key's side, of plain nodes."""
    return KeySide(
        down=down,
        down_rope=down_rope,
        columns=norm.columns,
        gamma=norm.gamma,
        eps=norm.eps,
        scale=norm.scale,
        norm=norm,
        first=rope.first[0],
        second=rope.second[0],
        layout=rope.layout,
        cos=rope.cos,
        sin=rope.sin,
        rope=rope,
        operator=None,
    )
