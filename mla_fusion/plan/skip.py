"""Prologues that ``Config.skip`` names."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.fx import module_path
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.read import Graph
from mla_fusion.propose.prologue import Proposal


class SkipError(RuntimeError):
    """A predicate of ``Config.skip`` raised."""


class Candidate(NamedTuple):
    """What a predicate of ``Config.skip`` gets.

    layer  by the name that a report gives it
    nodes  the first products
    """

    layer: str
    nodes: tuple[Node, ...]


def names(entry: object, where: str) -> bool:
    """Does an entry of ``Config.skip`` name this layer?"""
    return entry == where or (isinstance(entry, str) and where.endswith("." + entry))


def skipped(graph: Graph, proposal: Proposal, config: Config) -> None:
    """Raises Departure where the prologue is to be left alone, and SkipError."""
    if not config.skip:
        return
    nodes = [nodes[0] for nodes in map(graph.nodes_in_any_shape, proposal.products) if nodes]
    where = module_path.layer(nodes) or module_path.root(graph.gm.graph.nodes)
    for entry in config.skip:
        try:
            hit = entry(Candidate(where, tuple(nodes))) if callable(entry) else names(entry, where)
        except Exception as error:
            raise SkipError(
                f"{entry!r} in Config.skip raised {type(error).__name__}: {error}"
            ) from error
        if hit:
            detail = f"layer {where or 'unknown'} matches {entry!r}"
            raise Departure("skip", detail, proposal.products[:1])
