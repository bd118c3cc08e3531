"""Prologues that ``Config.skip`` names."""

from __future__ import annotations

from mla_fusion.config import Config
from mla_fusion.fx import module_path
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.read import Graph
from mla_fusion.propose.prologue import Proposal


class SkipError(RuntimeError):
    """A predicate of ``Config.skip`` raised."""


def skipped(graph: Graph, proposal: Proposal, config: Config) -> None:
    """Raises Departure where the prologue is to be left alone, and SkipError."""
    if not config.skip:
        return
    nodes = [nodes[0] for nodes in map(graph.in_any_shape, proposal.products) if nodes]
    where = module_path.layer(nodes) or module_path.root(graph.gm.graph.nodes)
    for entry in config.skip:
        try:
            is_named = entry == where or (isinstance(entry, str) and where.endswith("." + entry))
            hit = entry(proposal) if callable(entry) else is_named
        except Exception as error:
            raise SkipError(
                f"{entry!r} in Config.skip raised {type(error).__name__}: {error}"
            ) from error
        if hit:
            detail = f"layer {where or 'unknown'} matches {entry!r}"
            raise Departure("skip", detail, proposal.products[:1])
