"""Runs the stages: normalise, read, propose, plan (which proves), verify, choose, commit.

This file is the entry of ``mf.fuse``, ``mf.explain`` and the backend. A stage that gives up on a
prologue raises ``Departure``. The graph is replaced in the last step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from mla_fusion.commit import transaction
from mla_fusion.commit.rewrite import Writer, keep_output_names
from mla_fusion.commit.verify import Verifier
from mla_fusion.compat import HigherOrderOperator, without_autocast, without_modes
from mla_fusion.config import Config
from mla_fusion.fx import memory, module_path, strides
from mla_fusion.fx.build import GraphBuilder, describe_attributes
from mla_fusion.fx.kinds import attribute, check_graph_module, count_operators, word
from mla_fusion.fx.normalise import normalised
from mla_fusion.fx.workplace import workplace
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.parameters import used_as_weights
from mla_fusion.graph.pools import take_apart
from mla_fusion.graph.read import Graph
from mla_fusion.machine import compiling_for
from mla_fusion.observe.clock import Clock, default_device_cpu, use_cpu_threads
from mla_fusion.observe.record import Record, describe_absence
from mla_fusion.plan import policy
from mla_fusion.plan.caches import InPlace
from mla_fusion.plan.contract import lowering_departure
from mla_fusion.plan.outputs import departure_at, partition_nodes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.planner import Planner
from mla_fusion.plan.skip import SkipError, check_skip
from mla_fusion.propose.departures import departures_to_report
from mla_fusion.propose.prologue import proposals
from mla_fusion.propose.rewrites import Rewrites
from mla_fusion.propose.sites import Projections
from mla_fusion.report.rejection import Rejection, message
from mla_fusion.report.report import Report
from mla_fusion.report.store import keep_report
from mla_fusion.witness.compare import Outcome

log = logging.getLogger("mla_fusion")
# arguments: the module whose graph is written, and the graph that the pass reads
BuilderOf = Callable[[GraphModule, FxGraph], GraphBuilder]


def fuse(gm: GraphModule, config: Config | None = None) -> Report:
    """Rewrites every MLA prologue of ``gm`` that the kernel computes exactly.

    gm      a functionalised ATen graph whose nodes carry ``meta["val"]``, as AOT autograd,
            torch.export and make_fx make it
    config  options of the pass

    ``gm`` itself is changed. Its inputs and outputs stay as they are; weights are packed inside it.
    A graph in which nothing can be fused is left untouched, with a reason for each candidate in the
    report.

    Raises TypeError for anything but a GraphModule, ValueError for a graph without ``meta["val"]``.
    """
    return run(gm, config, GraphBuilder)


def explain(gm: GraphModule, config: Config | None = None, *, boundary: bool = False) -> Report:
    """Reports what :func:`fuse` would do, with the same reasons. The graph is not changed.

    boundary  True: report what ``mf.backend`` would do
    """
    return run(gm, config, None, boundary)


def run(
    gm: GraphModule,
    config: Config | None,
    builder: BuilderOf | None,
    boundary: bool = False,
    is_trial: bool = False,
) -> Report:
    """Runs the pass once over ``gm``.

    builder   makes the object that writes the new graph; None: the graph is not changed
    boundary  True if a wrapper stands around the graph, as that of ``mf.backend`` does
    is_trial  True if the result is not run: the report is not kept, and nothing is logged

    Either the whole rewrite succeeds, or ``gm`` stays as it is. A defect of the pass is reported as
    ``pass.failed``. Under ``Config(strict=True)`` it is raised.

    Raises SkipError if a predicate of ``Config.skip`` raises.
    """
    _check_graph(gm)
    config = Config.given(config)
    start_time, count = perf_counter(), len(gm.graph.nodes)
    report = Report(config, committed=builder is not None)
    if not config.enable:
        report.absent = ("the pass is off: Config.enable is False",)
    else:
        # a compiler calls the pass in its fake mode; probes need real tensors
        with (
            without_modes(),
            without_autocast(),
            compiling_for(config.machine.soc),
            default_device_cpu(),
            use_cpu_threads(1) as usual,
        ):
            report = _run_or_report_defect(gm, report, builder, usual, boundary)
    report.nodes_before = count
    report.timings["total"] = perf_counter() - start_time
    report.nodes_after = len(gm.graph.nodes)
    if report.rejected or all(fusion.staged_by for fusion in report.fused):
        report.notes = gm.meta.get(module_path.NOTES, ())
    if is_trial:
        return report
    if report.committed:
        keep_report(report)
    rejections = [rejection for rejection in report.rejected if rejection.code != "skip"]
    if rejections and not report.fused and report.committed:
        nearest_miss = max(rejections, key=lambda rejection: rejection.score)
        log.warning(
            "no MLA prologue was fused; nearest miss %s: [%s] %s",
            nearest_miss.where,
            nearest_miss.code,
            nearest_miss.message,
        )
    return report


def _check_graph(gm: GraphModule) -> None:
    """Raises TypeError if it is no GraphModule, ValueError if a node has no ``meta["val"]``."""
    check_graph_module(gm)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            if not node.users or word(node) == "copy_":  # an unused input, or an assertion
                continue
            raise ValueError(
                f"node {node.name} carries no meta['val']; capture the graph with AOT autograd, "
                "torch.export or make_fx, or run FakeTensorProp over it first"
            )


def _run_or_report_defect(
    gm: GraphModule, report: Report, builder: BuilderOf | None, usual_threads: int, boundary: bool
) -> Report:
    """Fills the report, and returns it. After a defect, the graph is unchanged, and the only
    rejection of a new report names the defect.
    """
    annotated_nodes: list[Node] = []
    try:
        annotated_nodes = describe_attributes(gm)
        source = normalised(gm)
        source = take_apart(source) if boundary else source
        one_pass = Pass(source, boundary, usual_threads, report)
        one_pass.plan()
        if one_pass.plans and builder is not None:
            one_pass.commit(gm, builder)
        return report
    except Exception as error:
        reason = _defect(error, report.config)
        rejections = [Rejection(reason.code, message(reason.code, reason.detail))]
        return Report(report.config, rejected=rejections, committed=report.committed)
    finally:
        for node in annotated_nodes:
            del node.meta["val"]


class Pass:
    """Plans and commits the fusions of one graph.

    source    the graph that is read: ``gm`` itself, or the same computation with subgraphs inlined
    boundary  True if a wrapper stands around the graph
    """

    def __init__(
        self, source: GraphModule, boundary: bool, usual_threads: int, report: Report
    ) -> None:
        self.config, self.report = report.config, report
        self._clock = Clock(report.timings)
        self.graph = Graph(source)
        self._clock.stop("view")
        self._projections = Projections(self.graph)
        self._planner = Planner(self.graph, self._projections, report.config, boundary)
        self._verifier = Verifier(self.graph, report.config, usual_threads)
        self._record = Record(self.graph, report)
        self.plans: list[Plan] = []

    def plan(self) -> None:
        """Decides what can be fused, and adds an entry for each prologue to the report."""
        departures, outcomes = list[Departure](), dict[Plan, Outcome]()
        on_defect = partial(_defect, config=self.config)
        by_identity = "identity" in self.config.targets
        for proposal in proposals(self._projections, by_identity, on_defect):
            self._clock.stop("match")
            try:
                if isinstance(proposal, Departure):
                    raise proposal
                check_skip(self.graph, proposal, self.config)
                plan = self._planner.plan(proposal)
                self._record.check_gain(plan)
                self._clock.stop("plan")
                outcomes[plan] = self._verifier.verify(plan)
                self._clock.stop("verify")
                if isinstance(plan.caches, InPlace):
                    self._planner.taken_writes.update(
                        write.value for write in plan.caches.writes.values()
                    )
            except Exception as error:  # the graph is unchanged: the others go on
                refusal = on_defect(error)
                refusal.site = refusal.site or tuple(proposal.products)  # type: ignore[union-attr]
                departures.append(refusal)
            self._clock.stop("plan")
        self.plans = sorted(outcomes, key=lambda plan: plan.products[0])
        rewrites, products, arguments = Rewrites(self.graph.form), list[Value](), list[Value]()
        for plan in self.plans:
            rewrites.update(plan.rewrites)
            products += plan.proposal.products
            arguments += plan.values.values()
        # which nodes stay and which read results, if all these plans are done
        self._partition = partition_nodes(self.graph, rewrites, products, arguments)
        for plan in self.plans:
            self._record.add_fusion(plan, outcomes[plan])
        try:
            near_misses = departures_to_report(self._projections, departures, products)
        except Exception as error:  # a defect in a reason costs no fusion
            near_misses = [on_defect(error)]
        for departure in near_misses:
            self._record.add_rejection(self._first_cause(departure), departure.site)
        for departure in _in_bodies(self.graph):
            self._record.add_rejection(departure, departure.values)
        self._clock.stop("plan")
        if not self.plans and not self.report.rejected:
            self.report.absent = describe_absence(self._projections)

    def _first_cause(self, departure: Departure) -> Departure:
        """Returns ``graph.not_functional`` if a step changes memory that the departure is about.

        Otherwise returns the departure itself.
        """
        graph, values = self.graph, departure.values or departure.site
        stale = {graph.base(node) for _, node in graph.stale}
        nodes = [node for value in values for node in graph.nodes.get(value, ())]
        nodes += [producer for node in nodes for producer in node.all_input_nodes]
        try:
            policy.check_functional(graph, [node for node in nodes if graph.base(node) in stale])
        except Departure as first_cause:
            return first_cause
        return departure

    def commit(self, gm: GraphModule, builder_of: BuilderOf) -> None:
        """Writes a graph with the calls of the plans. Installs it in ``gm`` when it is complete."""
        old_graph, keeps_strides = self.graph.gm.graph, self.config.strides != "kernel"
        self.report.operators["before"] = count_operators(self.graph.gm)
        new_module = workplace(self.graph.gm)
        builder = builder_of(new_module, old_graph)
        writer = Writer(self.graph, self._partition, self.plans, builder)
        try:
            with builder.propagating():
                writer.write()
        except LookupError as error:  # a step in place stands between the call and its reader
            raise lowering_departure(self.plans[0], error) from error
        strides.follow(builder, writer.replaced_reads, keeps_strides)
        memory.follow(builder, gm.graph, keeps_strides)
        builder.finish()
        # it lints the graph first; a module may check what an exported program was exported for
        new_module.graph.eliminate_dead_code(
            lambda node: bool(node.users) or node.is_impure() or node.op == "call_module"
        )
        keep_output_names(old_graph, new_module.graph)
        self.report.operators["after"] = count_operators(new_module)
        builder.close()
        transaction.install(gm, new_module.graph, builder.constants)
        self._clock.stop("rewrite")


def _in_bodies(graph: Graph) -> Iterator[Departure]:
    """Yields a departure for each body of a condition or loop that holds a prologue or a near miss.

    The pass does not rewrite such bodies.
    """
    for node in graph.gm.graph.find_nodes(op="get_attr"):
        body = attribute(node)
        callers = [user for user in node.users if isinstance(user.target, HigherOrderOperator)]
        if not callers or not isinstance(body, GraphModule):
            continue
        if any("val" not in node.meta for node in body.graph.nodes if node.op == "call_function"):
            continue
        projections = Projections(Graph(body, used_as_weights(body.graph)))
        candidates = [*proposals(projections, True)]
        departures = [candidate for candidate in candidates if isinstance(candidate, Departure)]
        has_prologue = len(departures) < len(candidates)
        if has_prologue or departures_to_report(projections, departures, []):
            caller = callers[0]
            detail = f"{caller.name} runs it in {node.target}"
            yield departure_at(graph, caller, "graph.branch", detail)


def _defect(error: Exception, config: Config) -> Departure:
    """Returns a departure as it is. Logs any other error with its traceback, and returns it as
    ``pass.failed``.

    A serving job must not stop because of a graph that the pass cannot read. Raises the error under
    ``Config(strict=True)``, and SkipError always.
    """
    if isinstance(error, Departure):
        return error
    if config.strict or isinstance(error, SkipError):
        raise error
    log.error("the pass failed on this graph, which stays as it is", exc_info=error)
    return Departure("pass.failed", f"{type(error).__name__}: {error}")
