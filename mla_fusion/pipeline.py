"""The pass, from a graph to a new one: read, propose, plan, verify, write.

A stage that gives up on a prologue raises ``Departure``; graphs change at the very end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from time import perf_counter

from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.nn import Module

from mla_fusion.commit import transaction
from mla_fusion.commit.rewrite import Writer, keep_output_names
from mla_fusion.commit.verified import Verified
from mla_fusion.compat import HigherOrderOperator, without_modes
from mla_fusion.config import Config
from mla_fusion.fx import memory, module_path, strides
from mla_fusion.fx.build import GraphBuilder, describe_attributes
from mla_fusion.fx.kinds import attribute, count_operators, word
from mla_fusion.fx.normalise import normalised
from mla_fusion.fx.workplace import workplace
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.parameters import used_as_weights
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.machine import compiling_for
from mla_fusion.observe.clock import Clock, on_the_cpu, threads
from mla_fusion.observe.record import Record, absent
from mla_fusion.plan import policy
from mla_fusion.plan.caches import InPlace
from mla_fusion.plan.outputs import Settled, settled
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.planner import Planner
from mla_fusion.plan.skip import SkipError, skipped
from mla_fusion.propose.departures import reported
from mla_fusion.propose.given import Given
from mla_fusion.propose.prologue import proposals
from mla_fusion.propose.sites import Projections
from mla_fusion.report.rejection import Rejection, message
from mla_fusion.report.report import Report
from mla_fusion.report.store import keep
from mla_fusion.witness.compare import Outcome

log = logging.getLogger("mla_fusion")
# made of the module whose graph is written, and of the graph that it is written after
BuilderOf = Callable[[GraphModule, FxGraph], GraphBuilder]


def fuse(gm: GraphModule, config: Config | None = None) -> Report:
    """Rewrite every MLA prologue of ``gm`` that the kernel computes exactly, in place.

    gm      a functionalised ATen graph whose nodes carry ``meta["val"]``, as AOT autograd,
            torch.export and make_fx make it
    config  options of the pass

    The graph's inputs and outputs stay as they are; weights are packed inside it. A graph in which
    nothing can be fused is left untouched, with a reason for each candidate in the report.

    Raises TypeError for anything but a GraphModule, ValueError for a graph without ``meta["val"]``.
    """
    return run(gm, config, GraphBuilder)


def explain(gm: GraphModule, config: Config | None = None, *, boundary: bool = False) -> Report:
    """What :func:`fuse` would do, with the same reasons, changing nothing; ``boundary``: what the
    backend would.
    """
    return run(gm, config, None, boundary)


def run(
    gm: GraphModule,
    config: Config | None,
    builder: BuilderOf | None,
    boundary: bool = False,
    is_trial: bool = False,
) -> Report:
    """One pass over ``gm``; ``builder`` makes what writes the graph's changes, None: nothing is
    changed. ``boundary``: a wrapper stands around the graph, as that of ``mf.backend`` does.
    ``is_trial``: no graph that runs is made, so no report is kept, and nothing
    is logged of prologues that were not fused.

    Either all of it succeeds, or ``gm`` stays as it is: a defect of the pass is reported as
    ``pass.failed``, and raised under ``Config(strict=True)``. Raises what a predicate of
    ``Config.skip`` raises, as SkipError.
    """
    _check_graph(gm)
    config = Config.given(config)
    started, nodes = perf_counter(), len(gm.graph.nodes)
    report = Report(config, committed=builder is not None)
    if not config.enable:
        report.absent = ("the pass is off: Config.enable is False",)
    else:
        # A compiler calls with its fake mode on; probes are real tensors.
        for_chip = compiling_for(config.machine.soc)
        with without_modes(), for_chip, on_the_cpu(), threads(1) as usual:
            report = _all_or_nothing(gm, config, builder, usual, boundary)
    report.nodes_before = nodes
    report.timings["total"] = perf_counter() - started
    report.nodes_after = len(gm.graph.nodes)
    if report.rejected or not report.fused:
        report.notes = gm.meta.get(module_path.NOTES, ())
    if is_trial:
        return report
    if report.committed:
        keep(report)
    unasked = [item for item in report.rejected if item.code != "skip"]
    if unasked and not report.fused and report.committed:
        worst = max(unasked, key=lambda item: item.score)
        log.warning(
            "no MLA prologue was fused; nearest miss %s: [%s] %s",
            worst.where,
            worst.code,
            worst.message,
        )
    return report


def _check_graph(gm: object) -> None:
    if not isinstance(gm, GraphModule):
        hint = (
            "; a module is compiled: torch.compile(model, backend='mla_fusion')"
            if isinstance(gm, Module)
            else ""
        )
        raise TypeError(f"expected a torch.fx.GraphModule, got {type(gm).__name__}{hint}")
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            if not node.users or word(node) == "copy_":  # an unused input, an assertion
                continue
            raise ValueError(
                f"node {node.name} carries no meta['val']; capture the graph with AOT autograd, "
                "torch.export "
                "or make_fx, or run FakeTensorProp over it first"
            )


def _all_or_nothing(
    gm: GraphModule, config: Config, builder: BuilderOf | None, usual_threads: int, boundary: bool
) -> Report:
    """The report; a defect leaves one rejection that names it, and the graph as it was."""
    described: list[Node] = []
    try:
        described = describe_attributes(gm)
        report = Report(config, committed=builder is not None)
        found = Pass(normalised(gm, boundary), config, boundary, usual_threads, report)
        found.plan()
        if found.plans and builder is not None:
            found.commit(gm, builder)
        return report
    except SkipError:
        raise
    except Exception as error:
        reason = _defect(error, config)
        failed = [Rejection(reason.code, message(reason.code, reason.detail))]
        return Report(config, rejected=failed, committed=builder is not None)
    finally:
        for node in described:
            del node.meta["val"]


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
        departures, found = list[Departure](), dict[Plan, Outcome | str]()
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
                found[plan] = seen
                if isinstance(plan.caches, InPlace):
                    self._planner.taken.update(one.value for one in plan.caches.writes.values())
            except Departure as reason:
                reason.site = reason.site or tuple(proposal.products)  # type: ignore[union-attr]
                departures.append(reason)
            except Exception as error:  # costs this prologue alone: nothing has been changed yet
                failed = _defect(error, self.config)
                if not isinstance(proposal, Departure):
                    failed.site = tuple(proposal.products)
                departures.append(failed)
            self._clock.stop("plan")
        departures += self._settle([*found])
        places = {node: at for at, node in enumerate(self.graph.gm.graph.nodes)}
        self.plans.sort(key=lambda plan: places[plan.products[0]])
        for plan in self.plans:
            self._record.fused(plan, found[plan])
        fused = [value for plan in self.plans for value in plan.proposal.products]
        for departure in reported(self._projections, departures, fused):
            self._record.rejected(self._first_cause(departure), departure.site)
        for departure in _in_bodies(self.graph):
            self._record.rejected(departure, departure.values)
        self._clock.stop("plan")
        if not self.plans and not self.report.rejected:
            self.report.absent = absent(self._projections)

    def _settle(self, plans: list[Plan]) -> list[Departure]:
        """Which of the plans can be done together; why the others cannot."""
        departures = list[Departure]()
        try:
            self.plans, self._settled = plans, self._settled_by(plans)
        except Departure:
            self.plans = []
            for plan in plans:  # one more each time
                try:
                    self._settled = self._settled_by([*self.plans, plan])
                    self.plans.append(plan)
                except Departure as reason:
                    reason.site = reason.site or tuple(plan.proposal.products)
                    departures.append(reason)
        return departures

    def _first_cause(self, departure: Departure) -> Departure:
        """That a step changes memory, where it changes what the reason is about."""
        graph, values = self.graph, departure.values or departure.site
        stale = {graph.base(node) for _, node in graph.stale}
        nodes = [node for value in values for node in graph.nodes.get(value, ())]
        nodes += [above for node in nodes for above in node.all_input_nodes]
        try:
            policy.functional(graph, [node for node in nodes if graph.base(node) in stale])
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
        writer = Writer(self.graph, self._settled, self._by_leaf(), builder)
        with builder.propagating():
            writer.write()
        strides.follow(builder, writer.handed_on, exact)
        memory.follow(builder, gm.graph, exact)
        builder.finish()
        work.graph.eliminate_dead_code()
        keep_output_names(source, work.graph)
        work.graph.lint()
        self.report.operators["after"] = count_operators(work)
        builder.close()
        transaction.install(gm, work.graph, builder.constants)
        self._clock.stop("rewrite")

    def _settled_by(self, plans: list[Plan]) -> Settled:
        given, products, read = Given(self.graph.form), list[Value](), list[Value]()
        for plan in plans:
            for claim in plan.claims:
                given.add(claim.graph, claim.kernel)
            products += plan.proposal.products
            read += plan.values.values()
        return settled(self.graph, given, products, read)

    def _by_leaf(self) -> dict[Value, Plan]:
        return {leaf: plan for plan in self.plans for leaf in plan.results.values()}


def _in_bodies(graph: Graph) -> Iterator[Departure]:
    """Prologues, or most of one, in what a condition or a loop runs: seen, and left alone."""
    for node in graph.gm.graph.find_nodes(op="get_attr"):
        body = attribute(node)
        callers = [user for user in node.users if isinstance(user.target, HigherOrderOperator)]
        if not callers or not isinstance(body, GraphModule):
            continue
        if any("val" not in one.meta for one in body.graph.nodes if one.op == "call_function"):
            continue
        projections = Projections(Graph(body, used_as_weights(body.graph)))
        found = [*proposals(projections, True)]
        missed = [one for one in found if isinstance(one, Departure)]
        if len(missed) < len(found) or [*reported(projections, missed, [])]:
            caller = callers[0]
            detail = f"{caller.name} ({caller.target}) runs it in {node.target}"
            yield Departure("graph.branch", detail, list(values_of(graph.readings[caller])))


def _defect(error: Exception, config: Config) -> Departure:
    """A serving job does not stop because the pass met a graph it cannot read; the log has the
    traceback.

    Raises the error under ``Config(strict=True)``.
    """
    if config.strict or isinstance(error, SkipError):
        raise error
    log.error("the pass failed on this graph, which stays as it is", exc_info=error)
    return Departure("pass.failed", f"{type(error).__name__}: {error}")
