"""The pass, stage by stage: normalise, index, match, plan, contract, verify, commit.

A stage hands a value on to the next. One that gives up on a prologue raises ``Refuse``; graphs
change at the very end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from time import perf_counter

from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from mla_fusion.commit import rewrite, transaction
from mla_fusion.commit.legal import Plans
from mla_fusion.commit.verified import Verified
from mla_fusion.compat import without_modes
from mla_fusion.config import Config
from mla_fusion.fx import module_path, registered
from mla_fusion.fx.build import GraphBuilder, describe_attributes
from mla_fusion.fx.kinds import word
from mla_fusion.fx.normalise import forms
from mla_fusion.fx.view import View
from mla_fusion.fx.workplace import workplace
from mla_fusion.machine import compiling_for
from mla_fusion.match import absent
from mla_fusion.match.candidate import KeyHalf
from mla_fusion.match.closed import in_bodies
from mla_fusion.match.finder import Found, search
from mla_fusion.match.near_miss import NearMiss
from mla_fusion.next.fuse import Pass
from mla_fusion.next.skip import SkipError
from mla_fusion.observe.clock import Clock, on_the_cpu, threads
from mla_fusion.observe.operator_counts import count_operators
from mla_fusion.observe.record import Record
from mla_fusion.plan.ladder import Rung, descend
from mla_fusion.plan.plan import InPlace, Plan
from mla_fusion.report.rejection import Refuse, Rejection
from mla_fusion.report.report import Report
from mla_fusion.report.store import keep

log = logging.getLogger("mla_fusion")
# made of the module whose graph is written, and of the graph that it is written after
BuilderOf = Callable[[GraphModule, Graph], GraphBuilder]


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
        return _of_best_form(gm, config, builder, usual_threads, boundary)
    except SkipError:
        raise
    except Exception as error:
        reason = _defect(error, config)
        failed = [Rejection(reason.code, reason.message)]
        return Report(config, rejected=failed, committed=builder is not None)
    finally:
        for node in described:
            del node.meta["val"]


def _of_best_form(
    gm: GraphModule, config: Config, builder: BuilderOf | None, usual_threads: int, boundary: bool
) -> Report:
    """The report on the form of the graph in which most fuses; of equal ones on the first."""
    if os.environ.get("MLA_FUSION_CORE") == "values":  # private, until it is the only one
        report = Report(config, committed=builder is not None)
        found = Pass(next(forms(gm, boundary)), config, boundary, usual_threads, report)
        found.plan()
        if found.plans and builder is not None:
            found.commit(gm, builder)
        return report
    looked_at: list[tuple[GraphModule, list[Plan], Report]] = []
    for form in forms(gm, boundary):  # normalise
        report = Report(config, committed=builder is not None)
        plans = _plans(form, config, boundary, usual_threads, report)
        looked_at.append((form, plans, report))
        stepped_down = any(fusion.instead_of for fusion in report.fused)
        if (
            plans
            and not (report.rejected or stepped_down)
            and all(isinstance(plan.caches, InPlace) for plan in plans)
        ):
            break
    form, plans, report = max(looked_at, key=lambda found: _worth(found[1], config))
    if plans and builder is not None:
        _commit(gm, form, plans, config, builder, report)
    return report


def _worth(plans: list[Plan], config: Config) -> list[tuple[int, int]]:
    """For comparison: by target, the first of the ladder first, how many prologues are fused, and
    in place.
    """
    by_target = [[plan for plan in plans if plan.target == target] for target in config.targets]
    return [
        (len(some), sum(isinstance(plan.caches, InPlace) for plan in some)) for some in by_target
    ]


def _plans(
    gm: GraphModule, config: Config, boundary: bool, usual_threads: int, report: Report
) -> list[Plan]:
    """What can be fused; what became of each prologue goes to the report. Changes nothing."""
    clock = Clock(report.timings)
    view = View(gm)
    clock.stop("view")
    finder, found = search(view, config.offers)
    found += in_bodies(gm)
    clock.stop("match")
    legal_plans = Plans(view, config, boundary)
    verified = Verified(view, config, usual_threads)
    record, plans = Record(view, finder, config, report), list[Plan]()

    def fitted(rung: Rung, above: Refuse | None = None) -> Refuse | None:
        """Plan a rung of the ladder, or say why not; ``above``: why it is not the one above."""
        try:
            legal = legal_plans.of(rung.target, _wanted(rung.item, config))  # plan, contract
            record.check_gain(legal.plan)
            clock.stop("plan")
            outcome = verified.of(legal)
            clock.stop("verify")
            seen = outcome.proved, outcome.verified, outcome.figures, outcome.compared
            record.fused(legal.plan, legal.structure, *seen, above)
            plans.append(legal.plan)
            return None
        except Refuse as reason:
            return legal_plans.steps.behind(reason, rung.item.nodes)
        except SkipError:
            raise
        except Exception as error:  # costs this prologue alone: nothing has been changed yet
            return _defect(error, config)
        finally:
            clock.stop("plan")

    for item in found:
        descend(item, config, fitted, record.rejected)
    report.absent = absent.lines(finder) if not found else ()
    return plans


def _commit(
    gm: GraphModule,
    form: GraphModule,
    plans: list[Plan],
    config: Config,
    builder_of: BuilderOf,
    report: Report,
) -> None:
    """Write the graph of ``form`` with the calls of the plans in it, and give it to ``gm`` when
    that is done.
    """
    clock = Clock(report.timings)
    report.operators["before"] = count_operators(form)
    work = workplace(form)
    builder = builder_of(work, form.graph)
    rewrite.write(builder, plans, gm.graph, config.strides != "kernel")
    builder.finish()
    rewrite.clean(builder, plans)
    registered.restore(work.graph)
    report.operators["after"] = count_operators(work)
    builder.close()
    transaction.install(gm, work.graph, builder.constants)
    clock.stop("rewrite")


def _wanted(item: Found, config: Config) -> KeyHalf:
    """The candidate. Raises the reason of a near miss, and ``Refuse("skip")`` for what
    ``Config.skip`` names.
    """
    near = isinstance(item, NearMiss)
    where = (
        module_path.layer(item.nodes) or module_path.root(item.nodes[0].graph.nodes)
        if config.skip
        else ""
    )
    for entry in config.skip:
        try:
            hit = (
                not near and entry(item)
                if callable(entry)
                else entry == where or where.endswith("." + entry)
            )
        except Exception as error:
            raise SkipError(
                f"{entry!r} in Config.skip raised {type(error).__name__}: {error}"
            ) from error
        if hit:
            raise Refuse("skip", f"layer {where or 'unknown'} matches {entry!r}", item.nodes[:1])
    if isinstance(item, NearMiss):
        raise item.reason
    return item


def _defect(error: Exception, config: Config) -> Refuse:
    """A serving job does not stop because the pass met a graph it cannot read; the log has the
    traceback.

    Raises the error under ``Config(strict=True)``.
    """
    if config.strict:
        raise error
    log.error("the pass failed on this graph, which stays as it is", exc_info=error)
    return Refuse("pass.failed", f"{type(error).__name__}: {error}")
