"""Halves of one prologue that read two forms of one x (quantised twice, scaled, normed): one near
miss, not two.

Each half by itself lacks the other, and says so. What is true of both is how the two forms differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from mla_fusion.facts.projection import Projection
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import reached
from mla_fusion.match.near_miss import NearMiss
from mla_fusion.report.rejection import Refuse

_FARTHEST = 24  # steps from a projection up to the x that both are made of


@dataclass(frozen=True)
class Part:
    """Projections of one form of x, and the near miss that is all that was found on it; ``done``:
    more was.
    """

    group: list[Projection]
    miss: NearMiss | None
    done: bool

    @property
    def lacks(self) -> str:
        return self.miss.lacks if self.miss is not None else ""


def joined(
    view: View, parts: Sequence[Part], has_query: Callable[[list[Projection]], bool], static: bool
) -> dict[int, NearMiss | None]:
    """What becomes of parts by their places: a near miss of both halves instead of the query's,
    none of the key's.

    has_query   is there a normed latent that is projected up and rotated?
    static      is there a target for scales that are fixed ahead of time?
    """
    found: dict[int, NearMiss | None] = {}
    for place, key in enumerate(parts):
        if key.lacks != "query":
            continue
        above = _forms(view, key.group[0])
        distances = {}
        for other, query in enumerate(parts):
            if other in found or query.done or (query.miss is not None and query.lacks != "key"):
                continue
            theirs = _forms(view, query.group[0])
            shared = [above[node] + steps for node, steps in theirs.items() if node in above]
            if shared and has_query(query.group):
                distances[other] = min(shared)
        if distances:
            nearest = min(distances, key=distances.__getitem__)
            found[place], found[nearest] = None, _of_both(key, parts[nearest], static)
    return found


def _forms(view: View, item: Projection) -> dict[Node, int]:
    """What the projection multiplies, and all that is made of but for products, such as rows of x
    before they are cut, gathered or shifted; by how many nodes it is away.
    """

    def above(node: Node) -> list[Node]:
        return [] if node in view.contractions else node.all_input_nodes

    return {node: steps for steps, node in enumerate(reached([item.activation], above, _FARTHEST))}


def _of_both(key: Part, query: Part, static: bool) -> NearMiss:
    assert key.miss is not None
    of_key, of_query = key.group[0], query.group[0]
    by_scale = [item for item in (of_query, of_key) if _is_static(item)]
    forms = {
        item.quantised.format if item.quantised is not None else None for item in (of_key, of_query)
    }
    both = (
        f"{of_key.node.name} multiplies {of_key.activation.name}, {of_query.node.name} "
        f"{of_query.activation.name}"
    )
    if key.miss.reason.code != "q_lora.absent":
        reason = key.miss.reason  # the key's own
    elif by_scale and not static:
        reason = Refuse(
            "quant.static", f"{by_scale[0].node.name} has no pertoken_scale", (by_scale[0].node,)
        )
    else:
        code = (
            "quant.mixed"
            if len(forms) > 1
            else "quant.tokens_differ"
            if forms != {None}
            else "kv_latent.absent"
        )
        reason = Refuse(code, both, (of_key.activation, of_key.node))
    score = max(part.miss.score for part in (key, query) if part.miss is not None)
    nodes = dict.fromkeys(
        (*key.miss.nodes, *(query.miss.nodes if query.miss is not None else (of_query.node,)))
    )
    return replace(key.miss, reason=reason, nodes=tuple(nodes), score=score, lacks="")


def _is_static(item: Projection) -> bool:
    return item.quantised is not None and item.quantised.token_scale is None
