"""Whether a plan is verified, and by what: once for each structure, if so configured."""

from __future__ import annotations

from dataclasses import replace

from mla_fusion.commit import verify
from mla_fusion.commit.legal import Legal
from mla_fusion.commit.proof import prove
from mla_fusion.commit.verify import Outcome
from mla_fusion.config import Config
from mla_fusion.fx import module_path
from mla_fusion.fx.view import View
from mla_fusion.observe.clock import threads
from mla_fusion.plan.plan import Plan
from mla_fusion.report.report import Shown

_FEW = 1 << 20  # elements of token_x up to which one thread verifies


class Verified:
    """The plans of one graph that have been compared."""

    def __init__(self, view: View, config: Config, usual_threads: int) -> None:
        self._view, self._config, self._threads = view, config, usual_threads

    def of(self, legal: Legal) -> Outcome:
        """What verification found, or why it was not done.

        Raises ``Refuse("proof.differs")``, ``Refuse("verify.mismatch")``.
        """
        shown = self._prove(legal)
        return replace(self._compare(legal), proved=shown)

    def _compare(self, legal: Legal) -> Outcome:
        if self._config.verify == "off":
            return Outcome("not verified (Config.verify is 'off')")
        plan, known = legal.plan, legal.structure
        if self._config.verify == "first" and known.compared:
            return Outcome(f"equal in structure to {known.compared}")
        half_rows = self._half_rows(plan)
        few = self._view.binding.count_of(plan.token_x) <= _FEW
        with threads(1 if few else self._threads):
            outcome = verify.compare(self._view, plan, half_rows, region=legal.region)
        layer = module_path.layer(plan.candidate.nodes)
        known.compared = layer or plan.candidate.down.node.name
        return outcome

    def _half_rows(self, plan: Plan) -> bool:
        """Did the caller choose another order for what is rotated?"""
        interleaved = plan.candidate.key.layout == "interleaved" and not plan.interleave
        return self._config.kr_layout == "half" and interleaved

    def _prove(self, legal: Legal) -> Shown:
        """What was shown of the structure."""
        plan, known = legal.plan, legal.structure
        if known.proved is None:
            known.proved = prove(self._view, plan, legal.region, self._half_rows(plan))
        return known.proved
