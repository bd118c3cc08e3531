"""Plans of the key's side alone: ``npu_kv_rmsnorm_rope_cache`` reads the products, and writes both
caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts import cache_write
from mla_fusion.facts.cache_write import WriteFact
from mla_fusion.facts.obstacle import Obstacles
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.fx.view import View
from mla_fusion.match.candidate import KeyHalf
from mla_fusion.operators.known import shape_of
from mla_fusion.plan import verdict
from mla_fusion.plan.caches import WritePlanner
from mla_fusion.plan.plan import InPlace, KeyPlan, Staged
from mla_fusion.plan.planner import Planner


class KeyPlanner(Planner[KeyHalf, KeyPlan]):
    """Plans one half. Raises ``Refuse`` where no exact plan exists."""

    def __init__(
        self, view: View, config: Config, candidate: KeyHalf, boundary: bool = False
    ) -> None:
        super().__init__(view, config, candidate, boundary)
        self.caches = _Caches(view, config, candidate, self.trees, boundary)

    def judge(self) -> None:
        verdict.judge_half(self.view, self.candidate)

    def plan_at(self, token_x: Node) -> KeyPlan:
        k, lead = self.candidate.key, self.lead_of(token_x)
        rows = {"c_kv": (*lead, len(k.columns)), "k_pe": (*lead, k.rope_dim)}
        # Config.kr_layout says nothing here: the query is the model's, and stays in the model's
        # layout
        interleaved = k.layout == "interleaved"
        placement = self.caches.place(token_x, interleaved, self.stage_because)
        if isinstance(placement.caches, Staged):
            read = self.staged(placement.caches, rows)
        else:  # what reads the rows beside their writers gets them as results
            own = {writer for write in self.caches.writes.values() for writer in write}
            read = [
                item
                for name, shape in rows.items()
                for item in self.trees[name].replacements(name, shape, own)
            ]
        return KeyPlan(
            target="key",
            candidate=self.candidate,
            token_x=token_x,
            cos=k.cos,
            sin=k.sin,
            caches=placement.caches,
            replacements=(*placement.found, *read),
            interleave=frozenset({"k_pe"}) if interleaved else frozenset(),
            assumptions=(*self.assumed(placement.caches), *self.narrowed(k.gamma)),
            gives_rows=isinstance(placement.caches, InPlace) and bool(read),
        )


class _Caches(WritePlanner):
    """``writes``: of each value, the nodes that take it to its cache."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.writes: dict[str, list[Node]] = {}

    def write_of(self, name: str) -> tuple[WriteFact | Obstacles, CacheScale | None]:
        """The only write of whole rows to a cache; other readers get the rows, which the operator
        gives out too.
        """
        found, scale = self.single_write(name)
        if isinstance(found, WriteFact):
            self.writes[name] = [
                user for users in self.trees[name].readers().values() for user in users
            ]
            return found, scale
        tree, writes, why = self.trees[name], list[WriteFact](), found
        for value, users in tree.readers().items():
            for user in users if tree.in_order(value) else ():
                write = cache_write.find(self.view, user, value)
                writes += [write] if isinstance(write, WriteFact) else []
                if not isinstance(write, WriteFact) and any(
                    one.code == "slots.unproven" for one in write
                ):
                    why = write
        if len(writes) != 1:
            return why, None
        self.writes[name] = [writes[0].node]
        return writes[0], None

    def shape_of_slots(self, token_x: Node) -> Sequence[object]:
        return (math.prod(shape_of(token_x)[:-1]),)
