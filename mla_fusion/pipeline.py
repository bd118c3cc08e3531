"""The pass: find candidates, judge, plan, prove and verify each, then commit all in one go."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from time import perf_counter

import torch
from torch.fx import GraphModule, Node

from mla_fusion.commit import rewrite, structure, transaction, verify
from mla_fusion.commit.in_place import InPlaceSteps
from mla_fusion.commit.region import Region, cut_out
from mla_fusion.commit.verify import Outcome
from mla_fusion.compat import without_modes
from mla_fusion.config import Config
from mla_fusion.emit import call, contract
from mla_fusion.fx import empty_parts, module_path, regions, writes
from mla_fusion.fx.build import GraphBuilder, describe_attributes
from mla_fusion.fx.collector import paused
from mla_fusion.fx.view import View
from mla_fusion.match.candidate import Candidate
from mla_fusion.match.finder import Finder, search
from mla_fusion.match.near_miss import NearMiss
from mla_fusion.observe import draw, proof
from mla_fusion.observe.graphs import Graphs
from mla_fusion.plan.plan import InPlace, Plan
from mla_fusion.plan.planner import Planner
from mla_fusion.report.picture import Picture
from mla_fusion.report.rejection import Refuse, Rejection
from mla_fusion.report.report import Fusion, Report, keep

log = logging.getLogger("mla_fusion")
BuilderOf = type[GraphBuilder]  # made of the module whose graph is written, and of the graph that it is written after
_FEW = 1 << 20  # elements of token_x up to which one thread verifies


def fuse(gm: GraphModule, config: Config | None = None) -> Report:
    """Rewrite every MLA prologue of ``gm`` that the kernel computes exactly, in place.

    ``gm`` is a functionalised ATen graph whose nodes carry ``meta["val"]``, as AOT autograd, torch.export and
    make_fx make it. Its inputs and outputs stay as they are; weights are packed inside the graph. A graph
    in which nothing can be fused is left untouched, with a reason for each candidate in the report.

    Raises TypeError for anything but a GraphModule, ValueError for a graph without ``meta["val"]``.
    """
    return run(gm, config or Config(), GraphBuilder)


def explain(gm: GraphModule, config: Config | None = None) -> Report:
    """What :func:`fuse` would do, with the same reasons, changing nothing."""
    return run(gm, config or Config(), None)


def run(gm: GraphModule, config: Config, builder: BuilderOf | None) -> Report:
    """One pass over ``gm``; ``builder`` is the kind that makes the graph's changes, None for none.

    Either all of it succeeds, or ``gm`` stays as it is: a defect of the pass is reported as ``pass.failed``, and raised
    under ``Config(strict=True)``. Raises what a predicate of ``Config.skip`` raises, as SkipError.
    """
    _check_graph(gm)
    started, nodes = perf_counter(), len(gm.graph.nodes)
    report = Report(config, committed=builder is not None)
    if config.enable:
        # A compiler calls with its fake mode on; probes are real tensors.
        with without_modes(), paused(), _threads(1) as usual:
            report = _all_or_nothing(gm, config, builder, usual)
    report.nodes_before = nodes
    report.timings["total"] = perf_counter() - started
    report.nodes_after = len(gm.graph.nodes)
    if report.committed:
        keep(report)
    unasked = [item for item in report.rejected if item.code != "skip"]
    if unasked and not report.fused:
        worst = max(unasked, key=lambda item: item.score)
        log.warning("no MLA prologue was fused; nearest miss %s: [%s] %s", worst.layer, worst.code, worst.message)
    return report


def _check_graph(gm: object) -> None:
    if not isinstance(gm, GraphModule):
        raise TypeError(f"expected a torch.fx.GraphModule, got {type(gm).__name__}")
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            if not node.users:  # an unused input, an assertion
                continue
            raise ValueError(
                f"node {node.name} carries no meta['val']; capture the graph with AOT autograd, torch.export "
                "or make_fx, or run FakeTensorProp over it first"
            )


def _all_or_nothing(gm: GraphModule, config: Config, builder: BuilderOf | None, threads: int) -> Report:
    """The report; a defect leaves one rejection that names it, and the graph as it was."""
    described: list[Node] = []
    try:
        described = describe_attributes(gm)
        return _of_best_reading(gm, config, builder, threads)
    except SkipError:
        raise
    except Exception as error:
        reason = _defect(error, config)
        failed = [Rejection(reason.code, reason.message)]
        return Report(config, rejected=failed, committed=builder is not None)
    finally:
        for node in described:
            del node.meta["val"]


def _of_best_reading(gm: GraphModule, config: Config, builder: BuilderOf | None, threads: int) -> Report:
    """The report on the first reading of the graph in which something fuses, else on the first of all."""
    reports: list[Report] = []
    graphs = Graphs()
    graphs.write("given", gm)
    for reading in _readings(gm):
        graphs.write("normalised", reading)
        report = Report(config, committed=builder is not None)
        work = _Pass(reading, config, report, threads)
        ready = work.plans(builder)
        reports.append(report)
        if ready:
            report.fused = [fusion for _, fusion in ready]
            if builder is not None:
                work.commit(gm, builder, [plan for plan, _ in ready])
                graphs.write("fused", gm)
            return report
    return reports[0]


def _readings(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph, regions laid open and empty parts dropped; then with what was assembled in place as its parts, too."""
    if regions.found(gm) or empty_parts.found(gm.graph):
        gm = _laid_open(gm)
        empty_parts.drop(gm.graph)
    yield gm
    if writes.found(gm.graph):
        apart = _laid_open(gm)
        writes.take_apart(apart)
        yield apart


def _laid_open(gm: GraphModule) -> GraphModule:
    opened = transaction.workplace(gm)
    regions.copied(gm, opened.graph)
    describe_attributes(opened)
    return opened


class SkipError(RuntimeError):
    """A predicate of ``Config.skip`` raised."""


class _Pass:
    def __init__(self, gm: GraphModule, config: Config, report: Report, threads: int) -> None:
        self.gm, self.config, self.report, self.threads = gm, config, report, threads
        self._structures: dict[object, int] = {}  # a number for each: hashing one takes as long as a fact
        self._accepted: set[int] = set()
        self._verified: dict[int, str] = {}
        self._pictures: dict[object, int | None] = {}
        self._proofs: dict[int, tuple[str, ...]] = {}

    def plans(self, builder_of: BuilderOf | None) -> list[tuple[Plan, Fusion]]:
        """What can be fused; what cannot goes to the report. Changes nothing."""
        clock = _Clock(self.report.timings)
        view = View(self.gm)
        clock.stop("view")
        finder, found = search(view, self.config.unabsorbed == "identity")
        clock.stop("match")
        boundary = builder_of is not None and builder_of.has_boundary
        ready: list[tuple[Plan, Fusion]] = []
        self._steps = InPlaceSteps(view)
        for item in found:
            try:
                if isinstance(item, NearMiss):
                    raise item.reason
                self._skip(item)
                plan, region, key = self._first_plan(view, item, boundary)
                clock.stop("plan")
                verified = self._verify(view, key, plan, region)
                clock.stop("verify")
                drawn = self._picture(key, partial(draw.fused, finder, plan))
                ready.append((plan, self._fusion(view, plan, key, verified, drawn)))
                continue
            except Refuse as reason:
                refused = reason
            except SkipError:
                raise
            except Exception as error:  # costs this prologue alone: nothing has been changed yet
                refused = _defect(error, self.config)
            self.report.rejected.append(self._rejection(finder, item, refused))
            clock.stop("plan")
        return ready

    def _first_plan(self, view: View, item: Candidate, boundary: bool) -> tuple[Plan, Region, int]:
        """A plan of the candidate, or of the next reading of it that has one; the reason is the first one's."""
        first: Refuse | None = None
        for reading in (item, *item.others):
            try:
                plan, region, key = self._legal_plan(view, reading, boundary)
                self._steps.judge(plan, region, rewrite.prove(plan))
                return plan, region, key
            except Refuse as reason:
                first = first or reason
        assert first is not None
        raise first

    def _legal_plan(self, view: View, item: Candidate, boundary: bool) -> tuple[Plan, Region, int]:
        """A plan that the operator's contract accepts: where it refuses the caches alone, the staged one."""
        planner = Planner(view, self.config, item, boundary)
        plan = planner.plan()
        region = cut_out(view, plan)
        key = self._structure(region, plan)
        if key in self._accepted:
            return plan, region, key
        try:
            contract.ask(plan, self.config)
        except Refuse as reason:
            if not isinstance(plan.caches, InPlace) or item.key.operator or self.config.staging == "never":
                raise
            plan = planner.plan(stage_because=f"the kernel refuses the caches ({reason.code.partition(':')[2]})")
            region = cut_out(view, plan)
            key = self._structure(region, plan)
            try:
                contract.ask(plan, self.config)
            except Refuse:
                raise reason from None  # it was not the caches
        self._accepted.add(key)
        return plan, region, key

    def _structure(self, region: Region, plan: Plan) -> int:
        """Equal for plans that differ only in which layer they are."""
        return self._structures.setdefault(structure.key(region, plan), len(self._structures))

    def commit(self, gm: GraphModule, builder_of: BuilderOf, plans: list[Plan]) -> None:
        """Write the graph as planned, and give it to ``gm`` when that is done."""
        clock = _Clock(self.report.timings)
        self.report.operators["before"] = count_operators(self.gm)
        work = transaction.workplace(self.gm)
        builder = builder_of(work, self.gm.graph)
        rewrite.write(builder, plans)
        builder.finish()
        rewrite.clean(builder, plans)
        self.report.operators["after"] = count_operators(work)
        builder.close()
        transaction.install(gm, work.graph, builder.constants)
        clock.stop("rewrite")

    def _skip(self, candidate: Candidate) -> None:
        where = module_path.layer(candidate.nodes) if self.config.skip else ""
        for entry in self.config.skip:
            try:
                hit = entry(candidate) if callable(entry) else entry == where or where.endswith("." + entry)
            except Exception as error:
                raise SkipError(f"{entry!r} in Config.skip raised {type(error).__name__}: {error}") from error
            if hit:
                raise Refuse("skip", f"layer {where or 'unknown'} matches {entry!r}", candidate.nodes[:1])

    def _verify(self, view: View, key: int, plan: Plan, region: Region) -> Outcome | str:
        """What verification found, or why it was not done."""
        if self.config.verify == "off":
            return "not verified (Config.verify is 'off')"
        if self.config.verify == "first" and key in self._verified:
            return f"equal in structure to {self._verified[key]}"
        half_rows = self.config.kr_layout == "half" and plan.candidate.query.rope.layout == "interleaved"
        few = prod(view.binding.shape(plan.token_x.meta["val"].shape)) <= _FEW
        with _threads(1 if few else self.threads):
            outcome = verify.compare(view, plan, half_rows, region=region)
        self._verified[key] = module_path.layer(plan.candidate.nodes) or plan.candidate.query.down.node.name
        return outcome

    def _proof(self, view: View, plan: Plan, key: int) -> tuple[str, ...]:
        """Equal for layers of equal structure, but for what each says of its slots."""
        if key not in self._proofs:
            self._proofs[key] = proof.lines(view, plan)
        return (*self._proofs[key], proof.slots(plan))

    def _fusion(self, view: View, plan: Plan, key: int, verified: Outcome | str, picture: int | None) -> Fusion:
        q, k = plan.candidate.query, plan.candidate.key
        x = plan.token_x.meta["val"]
        dims = {
            "T": "*".join(str(size) for size in x.shape[:-1]),
            "He": int(x.shape[-1]),
            "Hcq": len(q.norm.columns),
            "Hckv": len(k.columns),
            "N": plan.heads,
            "D": q.absorb.nope_dim,
            "Dr": q.rope.rope_dim,
        }
        return Fusion(
            layer=module_path.layer(plan.candidate.nodes),
            nodes=tuple(node.name for node in plan.candidate.nodes),
            dims=dims,
            cache_mode=plan.cache_mode,
            placement="in place" if isinstance(plan.caches, InPlace) else f"staged: {plan.caches.reason}",
            rope=f"{q.rope.input_layout} in, {q.rope.layout} out",
            attributes=call.attributes(plan),
            replaced={item.node.name: item.output for item in plan.replacements},
            assumptions=plan.assumptions,
            verified=verified if isinstance(verified, str) else verified.verified,
            figures=() if isinstance(verified, str) else verified.figures,
            compared="" if isinstance(verified, str) else verified.compared,
            source=module_path.source(q.down.node),
            picture=picture,
            proof=(*self._proof(view, plan, key), verified if isinstance(verified, str) else verified.compared),
        )

    def _picture(self, key: object, draw_it: Callable[[], Picture | None]) -> int | None:
        """The place in ``Report.pictures`` of the one that stands for ``key``; drawn when first asked for."""
        if key not in self._pictures:
            drawn = draw_it()
            self._pictures[key] = None if drawn is None else len(self.report.pictures)
            self.report.pictures += [drawn] if drawn is not None else []
        return self._pictures[key]

    def _rejection(self, finder: Finder, item: Candidate | NearMiss, reason: Refuse) -> Rejection:
        nodes: tuple[Node, ...] = reason.nodes or item.nodes
        if any(code in self.config.skip for code in (reason.code, reason.code.partition(":")[0])):
            reason = Refuse("skip", f"{reason.code} is in Config.skip; {reason.detail}", nodes)
        source = next((text for node in nodes if (text := module_path.source(node))), "")
        alike = reason.code, source, *(str(node.target) for node in (*item.nodes, *nodes) if node.op == "call_function")
        return Rejection(
            code=reason.code,
            message=reason.message,
            nodes=tuple(node.name for node in nodes),
            layer=module_path.layer(item.nodes),
            source=source,
            picture=self._picture(alike, partial(draw.rejected, finder, item, reason.code, nodes)),
            score=item.score if isinstance(item, NearMiss) else 1.0,
        )


def _defect(error: Exception, config: Config) -> Refuse:
    """A serving job does not stop because the pass met a graph it cannot read; the log has the traceback.

    Raises the error under ``Config(strict=True)``.
    """
    if config.strict:
        raise error
    log.error("the pass failed on this graph, which stays as it is", exc_info=error)
    return Refuse("pass.failed", f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _threads(wanted: int) -> Iterator[int]:
    """Run with so many threads; yields the usual number.

    Probes are small: a second thread gains nothing, and on a busy machine each operator waits for it. Changing
    the number costs milliseconds, so it is done once for the whole pass.
    """
    usual = torch.get_num_threads()
    if usual == wanted:
        yield usual
        return
    torch.set_num_threads(wanted)
    try:
        yield usual
    finally:
        torch.set_num_threads(usual)


class _Clock:
    """Adds the time since the last stop to a stage."""

    def __init__(self, timings: dict[str, float]) -> None:
        self.timings, self._last = timings, perf_counter()

    def stop(self, stage: str) -> None:
        now = perf_counter()
        self.timings[stage] = self.timings.get(stage, 0.0) + now - self._last
        self._last = now


def count_operators(gm: GraphModule) -> dict[str, int]:
    """How often each operator is called, the commonest first."""
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    by_identity = {id(target): target for target in targets}  # their hashes and names cost more than the counting
    counts = Counter[str]()
    for identity, count in Counter(map(id, targets)).items():
        counts[str(by_identity[identity])] += count
    return dict(counts.most_common())
