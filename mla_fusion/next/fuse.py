"""The pass on Values, from a graph to a new one: read, propose, plan, verify, write."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from mla_fusion.commit import transaction
from mla_fusion.commit.rewrite import keep_output_names
from mla_fusion.config import Config
from mla_fusion.fx import memory, registered, strides
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.workplace import workplace
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.read import Graph
from mla_fusion.next import policy
from mla_fusion.next.outputs import Settled, settled
from mla_fusion.next.plan import Plan
from mla_fusion.next.planner import Planner
from mla_fusion.next.record import Record, absent
from mla_fusion.next.rewrite import Writer
from mla_fusion.next.skip import SkipError, skipped
from mla_fusion.next.verified import Verified
from mla_fusion.observe.clock import Clock
from mla_fusion.observe.operator_counts import count_operators
from mla_fusion.propose.departures import reported
from mla_fusion.propose.given import Given
from mla_fusion.propose.prologue import proposals
from mla_fusion.propose.sites import Projections
from mla_fusion.report.report import Report

log = logging.getLogger("mla_fusion")
BuilderOf = Callable[[GraphModule, FxGraph], GraphBuilder]


class Pass:
    """Over one graph.

    form      what is read: ``gm`` itself, or the same computation with subgraphs opened
    boundary  a wrapper stands around the graph
    """

    def __init__(
        self, form: GraphModule, config: Config, boundary: bool, usual_threads: int, report: Report
    ) -> None:
        self.config, self.report = config, report
        self._clock = Clock(report.timings)
        self.graph = Graph(form)
        self._clock.stop("view")
        self._projections = Projections(self.graph)
        self._planner = Planner(self.graph, self._projections, config, boundary)
        self._verified = Verified(self.graph, config, usual_threads)
        self._record = Record(self.graph, config, report)
        self.plans: list[Plan] = []

    def plan(self) -> None:
        """What can be fused; what became of each prologue goes to the report."""
        departures = list[Departure]()
        for proposal in proposals(self._projections, "identity" in self.config.targets):
            self._clock.stop("match")
            try:
                if isinstance(proposal, Departure):
                    raise proposal
                skipped(self.graph, proposal, self.config)
                plan = self._planner.plan(proposal)
                self._record.check_gain(plan)
                self._clock.stop("plan")
                seen = self._verified.of(plan)
                self._clock.stop("verify")
                self._record.fused(plan, seen)
                self.plans.append(plan)
            except Departure as reason:
                reason.site = reason.site or tuple(proposal.products)  # type: ignore[union-attr]
                departures.append(reason)
            except Exception as error:  # costs this prologue alone: nothing has been changed yet
                if self.config.strict or isinstance(error, SkipError):
                    raise
                log.error("the pass failed on this graph, which stays as it is", exc_info=error)
                failed = Departure("pass.failed", f"{type(error).__name__}: {error}")
                if not isinstance(proposal, Departure):
                    failed.site = tuple(proposal.products)
                departures.append(failed)
            self._clock.stop("plan")
        places = {node.name: at for at, node in enumerate(self.graph.gm.graph.nodes)}
        self.report.fused.sort(key=lambda fusion: places[fusion.nodes[0]])
        fused = [value for plan in self.plans for value in plan.proposal.products]
        for departure in reported(self._projections, departures, fused):
            self._record.rejected(self._first_cause(departure), departure.site)
        self._clock.stop("plan")
        if not self.plans and not self.report.rejected:
            self.report.absent = absent(self._projections)

    def _first_cause(self, departure: Departure) -> Departure:
        """That a step changes memory, where it changes what the reason is about."""
        graph, values = self.graph, departure.values or departure.site
        early = self._planner.early & {graph.base(node) for _, node in graph.stale}
        nodes = [node for value in values for node in graph.nodes.get(value, ())]
        try:
            policy.functional(graph, early, nodes)
        except Departure as cause:
            return cause
        return departure

    def commit(self, gm: GraphModule, builder_of: BuilderOf) -> None:
        """Write the graph with the calls of the plans in it, and give it to ``gm`` when that is
        done.
        """
        source, exact = self.graph.gm.graph, self.config.strides != "kernel"
        self.report.operators["before"] = count_operators(self.graph.gm)
        work = workplace(self.graph.gm)
        builder = builder_of(work, source)
        writer = Writer(self.graph, self._settled(), self._by_leaf(), builder)
        with builder.propagating():
            writer.write()
        strides.follow(builder, writer.handed_on, exact)
        memory.follow(builder, gm.graph, exact)
        builder.finish()
        work.graph.eliminate_dead_code()
        keep_output_names(source, work.graph)
        work.graph.lint()
        registered.restore(work.graph)
        self.report.operators["after"] = count_operators(work)
        builder.close()
        transaction.install(gm, work.graph, builder.constants)
        self._clock.stop("rewrite")

    def _settled(self) -> Settled:
        given, products, read = Given(self.graph.form), list[Value](), list[Value]()
        for plan in self.plans:
            for claim in plan.claims:
                given.add(claim.graph, claim.kernel)
            products += plan.proposal.products
            read += plan.values.values()
        return settled(self.graph, given, products, read)

    def _by_leaf(self) -> dict[Value, Plan]:
        return {leaf: plan for plan in self.plans for leaf in plan.results.values()}
