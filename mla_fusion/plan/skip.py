"""Leaves the prologues that ``Config.skip`` names. ``pipeline.py`` asks this before it plans."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.fx import module_path
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.read import Graph
from mla_fusion.plan.outputs import first_nodes
from mla_fusion.propose.prologue import Proposal


class SkipError(RuntimeError):
    """A predicate of ``Config.skip`` raised."""


class Candidate(NamedTuple):
    """The argument of a predicate of ``Config.skip``.

    layer  the name that a report gives the layer
    nodes  the first products of the prologue
    """

    layer: str
    nodes: tuple[Node, ...]


def is_named(entry: object, layer: str) -> bool:
    """Returns True if an entry of ``Config.skip`` names this layer."""
    return entry == layer or (isinstance(entry, str) and layer.endswith("." + entry))


def check_skip(graph: Graph, proposal: Proposal, config: Config) -> None:
    """Raises Departure if ``Config.skip`` names the prologue.

    Raises SkipError if a predicate raises.
    """
    if not config.skip:
        return
    nodes = first_nodes(graph, proposal.products)
    layer = module_path.layer(nodes) or module_path.root(graph.gm.graph.nodes)
    for rule in config.skip:
        try:
            hit = rule(Candidate(layer, tuple(nodes))) if callable(rule) else is_named(rule, layer)
        except Exception as error:
            raise SkipError(
                f"{rule!r} in Config.skip raised {type(error).__name__}: {error}"
            ) from error
        if hit:
            detail = f"layer {layer or 'unknown'} matches {rule!r}"
            raise Departure("skip", detail, proposal.products[:1])
