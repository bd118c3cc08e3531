"""From a candidate to a plan that the operator's contract takes and that the order of the graph
allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mla_fusion.commit import rewrite, structure
from mla_fusion.commit.assumed import assumed_of_numbers
from mla_fusion.commit.in_place import InPlaceSteps
from mla_fusion.commit.region import Region, cut_out
from mla_fusion.config import Config
from mla_fusion.emit import contract
from mla_fusion.emit.targets import TARGETS
from mla_fusion.facts.obstacle import Obstacle
from mla_fusion.fx import registered
from mla_fusion.fx.view import View
from mla_fusion.match.candidate import KeyHalf
from mla_fusion.plan.plan import InPlace, Plan, Structure
from mla_fusion.report.rejection import Refuse


@dataclass(frozen=True)
class Legal:
    """A plan, the region that it replaces, and what is known of all plans like it."""

    plan: Plan
    region: Region
    structure: Structure


class Plans:
    """The legal plans of one graph. What is decided of one structure is decided of all layers that
    have it.
    """

    def __init__(self, view: View, config: Config, boundary: bool) -> None:
        """``boundary``: a wrapper will stand around the graph, so that caches can be viewed before
        the call.
        """
        self._view, self._config, self._boundary = view, config, boundary
        self.steps = InPlaceSteps(view)
        self._structures: dict[object, Structure] = {}

    def of(self, target: str, candidate: KeyHalf) -> Legal:
        """A plan of the candidate for a target, or of the next of its alternatives that has one.

        Raises ``Refuse`` with the reason of the first where there is none.
        """
        first: Refuse | None = None
        for alternative in (candidate, *candidate.others):
            try:
                found = self._accepted_by_contract(target, alternative)
                self.steps.judge(found.plan, found.region, *rewrite.prove(found.plan))
                return found
            except Refuse as reason:
                first = first or reason
        assert first is not None
        raise first

    def _accepted_by_contract(self, target: str, candidate: KeyHalf) -> Legal:
        """Where the contract refuses the caches alone, the staged plan."""
        planner = TARGETS[target].planner(self._view, self._config, candidate, self._boundary)
        found = self._described(planner.plan())
        if found.structure.accepted is not None:
            return _assuming(found, found.structure.accepted)
        try:
            sizes = contract.ask(found.plan, self._config, self._view.gm.graph)
        except Refuse as reason:
            in_place = isinstance(found.plan.caches, InPlace)
            if not in_place or candidate.key.operator or self._config.staging == "never":
                raise
            because = f"the kernel refuses the caches ({reason.code.partition(':')[2]})"
            found = self._described(
                planner.plan(Obstacle("cache.refused", f"{because}: {reason.detail}"))
            )
            try:
                sizes = contract.ask(found.plan, self._config, self._view.gm.graph)
            except Refuse:
                raise reason from None  # it was not the caches
        found.structure.accepted = sizes
        return _assuming(found, sizes)

    def _described(self, plan: Plan) -> Legal:
        region = cut_out(self._view, plan)
        known = self._structures.setdefault(structure.key(self._view, region, plan), Structure())
        assumed = assumed_of_numbers(self._view, region) if known.assumes else ()
        known.assumes = bool(assumed)
        # whether a step was registered is not told by its structure
        assumed = (*assumed, *dict.fromkeys(registered.assumed(region.nodes)))
        return _assuming(Legal(plan, region, known), assumed)


def _assuming(legal: Legal, assumed: tuple[str, ...]) -> Legal:
    if not assumed:
        return legal
    plan = legal.plan
    return replace(legal, plan=replace(plan, assumptions=(*plan.assumptions, *assumed)))
