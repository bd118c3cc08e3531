"""Writes the report of one graph: what became of each prologue, and why a fusion is exact.

``pipeline.py`` calls ``Record`` after each decision, and ``describe_absence`` for a graph without
prologues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.fx import Node

from mla_fusion.compat import tree_leaves
from mla_fusion.exact.field import POINTS
from mla_fusion.exact.prove import CHANCE
from mla_fusion.fx import module_path, registered
from mla_fusion.fx.kinds import is_mutating, op_name
from mla_fusion.fx.sizes import bytes_of, has_symbols, is_empty
from mla_fusion.fx.walk import is_copy_into, upward, views_and_writes
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.read import Graph
from mla_fusion.machine import is_for_ge
from mla_fusion.observe.gain import seconds_saved
from mla_fusion.observe.leftovers import count_replaced, leftovers_of
from mla_fusion.plan.caches import Staged
from mla_fusion.plan.contract import OPERATOR
from mla_fusion.plan.outputs import first_nodes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.skip import is_named
from mla_fusion.propose.norms import radicands
from mla_fusion.propose.sites import Projections
from mla_fusion.report.rejection import Rejection, message
from mla_fusion.report.report import Fusion, Report
from mla_fusion.report.staging import REMEDIES, StagedBy
from mla_fusion.report.text_tables import size
from mla_fusion.witness.compare import Outcome


class Record:
    """Writes the entries of one graph's report."""

    def __init__(self, graph: Graph, report: Report) -> None:
        self._graph, self._config, self._report = graph, report.config, report
        self._labels = module_path.Labels(graph.gm.graph)

    def add_fusion(self, plan: Plan, outcome: Outcome) -> None:
        """Adds the entry of a fusion.

        outcome  the outcome of verification
        """
        leaves = leftovers_of(plan)
        gain = seconds_saved(plan, leaves, self._config.machine)
        self._report.fused.append(
            Fusion(
                layer=self._layer(plan.products),
                nodes=tuple(node.name for node in plan.products),
                dims=plan.dims,
                cache_mode=plan.attributes["cache_mode"],
                placement=self._placement(plan),
                staged_by=self._staged_by(plan),
                leaves=leaves,
                operators_before=count_replaced(plan),
                operators_after=1 + sum(item.launches for item in leaves),
                saves="" if gain is None else f"up to {max(gain, 0) * 1e6:.0f} us less a call",
                warnings=tuple(map(self._labels, (*plan.warnings, *_ge_copy_warnings(plan)))),
                rope=_describe_rotation(plan),
                attributes=plan.attributes,
                replaced={
                    node.name: plan.part_name(value) for node, value in plan.replaced.items()
                },
                assumptions=tuple(map(self._labels, plan.assumptions)),
                verified=self._labels(outcome.verified),
                figures=outcome.figures,
                compared=outcome.compared,
                steps=tuple(map(_step_row, plan.region)) if outcome.compared else (),
                source=module_path.source(plan.products[0]),
                proof=(*self._proof(plan), outcome.compared or outcome.verified),
                target=plan.proposal.target,
                operator=OPERATOR,
                instead_of=self._target_reason(plan),
            )
        )

    def check_gain(self, plan: Plan) -> None:
        """Raises Departure if a staged plan saves no time."""
        caches = plan.caches
        if not isinstance(caches, Staged) or self._config.staging == "always":
            return
        gain = seconds_saved(plan, leftovers_of(plan), self._config.machine)
        if gain is not None and gain <= 0:
            obstacles = ", ".join(map(str, caches.obstacles))
            detail = f"a call takes {-gain * 1e6:.0f} us more; not in place: {obstacles}"
            raise Departure("staging.gains_nothing", detail, plan.proposal.products[-2:])

    def add_rejection(self, departure: Departure, site: Sequence[Value]) -> None:
        """Adds the entry of a prologue that is left.

        site  the products of the prologue
        """
        nodes = first_nodes(self._graph, departure.values) or self._labels.nodes(departure.detail)
        site_nodes = first_nodes(self._graph, site)
        nodes = nodes or site_nodes
        code, detail, layer = departure.code, departure.detail, self._layer(site_nodes or nodes)
        skip_entry = next((entry for entry in self._config.skip if is_named(entry, layer)), None)
        if skip_entry is not None and code != "skip":
            code, detail = "skip", f"layer {layer} matches {skip_entry!r}; {detail}"
        elif self._config.skips(code):
            code, detail = "skip", f"{code} is in Config.skip; {detail}"
        self._report.rejected.append(
            Rejection(
                code=code,
                message=message(code, self._labels(detail)),
                nodes=tuple(node.name for node in nodes),
                layer=layer,
                source=next(filter(None, map(module_path.source, (*nodes, *site_nodes))), ""),
                score=departure.score,
            )
        )

    def _target_reason(self, plan: Plan) -> str:
        """Returns why the target above did not take the prologue, or ""."""
        departure = plan.proposal.identity_reason
        if departure is None:
            return ""
        return f"[{departure.code}] {message(departure.code, self._labels(departure.detail))}"

    def _placement(self, plan: Plan) -> str:
        """Returns in words who writes the caches."""
        if isinstance(plan.caches, Staged):
            return f"staged: {self._labels(plan.caches.obstacles[0].message)}"
        new_caches = [
            cache.name
            for name, cache, _ in plan.written_caches
            if not _is_written_back(plan, cache)
        ]
        if not new_caches:
            return "in place"
        names = self._labels(", ".join(new_caches))
        return (
            "written by the kernel into new caches, as the model returns them: the whole of "
            f"{names} is copied"
        )

    def _staged_by(self, plan: Plan) -> tuple[StagedBy, ...]:
        """Returns every obstacle of a staged plan, with its remedy."""
        if not isinstance(plan.caches, Staged):
            return ()
        entries = (
            StagedBy(item.code, self._labels(item.message), item.remedy or REMEDIES[item.code])
            for item in plan.caches.obstacles
        )
        return tuple(dict.fromkeys(entries))

    def _layer(self, nodes: Sequence[Node]) -> str:
        """Returns the module path of the nodes; if the model is one layer, its class."""
        return module_path.layer(nodes) or self._labels.whole

    def _proof(self, plan: Plan) -> Iterator[str]:
        """Yields why the fusion is exact, one line for each fact."""
        parts = ", ".join(dict.fromkeys(claim.part for claim in plan.rewrites.claims))
        yield (
            f"{parts}: equal to the kernel's in exact arithmetic, {plan.compared} elements at "
            f"{len(POINTS)} random points, wrong by a chance below {CHANCE:.0e}"
        )
        heads, padded = plan.dims["N"], plan.dims.get("N_padded", plan.dims["N"])
        if padded != heads:
            yield f"heads: {heads}, and {padded - heads} of zeros"
        if plan.proposal.rotation is None:
            yield "no rotation: cos is 1 and sin is 0"
        caches = plan.caches
        if isinstance(caches, Staged):
            yield "slots: the model's own writes stay"
        elif any(cache in self._graph.hidden for _, cache, _ in plan.written_caches):
            yield "slots: as the model's operator is given them"
        else:
            nodes = first_nodes(self._graph, [*caches.trusted_inputs])
            trusted = ", ".join(self._labels.of(node) for node in nodes)
            yield f"slots: input {trusted}, trusted" if trusted else "slots: by their range"


def _step_row(node: Node) -> tuple[str, str, str, str]:
    """Returns name, operator, value and source line of a node, for a table."""
    descriptions = (
        f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
        for tensor in tree_leaves(node.meta.get("val"))
        if isinstance(tensor, Tensor)
    )
    operator = op_name(node).replace("::", ".") if node.op == "call_function" else node.op
    return node.name, operator, ", ".join(descriptions), module_path.source(node)


def _describe_rotation(plan: Plan) -> str:
    """Returns the order of elements before and after the rotation, and in the kernel's results."""
    rotation = plan.proposal.rotation
    if rotation is None:
        return "none: cos is 1, sin is 0"
    suffix = ", stored as halves" if plan.warnings else ""
    return f"{rotation[0]} in, {rotation[1]} out{suffix}"


def _ge_copy_warnings(plan: Plan) -> Iterator[str]:
    """Yields a line for each cache that torchair copies, because GE takes only contiguous
    inputs.
    """
    for _, cache, _ in plan.written_caches if is_for_ge() else ():
        value = cache.meta["val"]
        if not value.is_contiguous():
            moved = "" if has_symbols(value.shape) else f" ({size(2 * bytes_of(value))} a step)"
            yield (
                f"{cache.name} has strides {list(value.stride())}, and GE takes contiguous inputs "
                f"alone: torchair copies the whole of it in and back at every step{moved}. Give "
                "each layer contiguous caches, or compile with npugraph_ex"
            )


def _is_written_back(plan: Plan, cache: Node) -> bool:
    """Returns True if the model writes this input. False: it returns a new cache."""
    if cache in plan.graph.hidden or any(is_copy_into(user, cache) for user in cache.users):
        return True
    written = {write.value for write in plan.caches.writes.values() if write.cache is cache}
    return any(
        is_mutating(step)
        for node, value in plan.replaced.items()
        if value in written
        for step in upward(node, views_and_writes)
    )


def describe_absence(projections: Projections) -> tuple[str, ...]:
    """Returns, for a graph without a prologue, what the parts of one are and how many it has."""
    graph, values = projections.graph, projections.values
    if any(map(is_empty, graph.gm.graph.find_nodes(op="placeholder"))):
        return ("no tokens in this graph: it was compiled for a call with none",)
    counts = [len(site.products) for site in projections.sites.values()]
    norms = len({radicand for value in values for radicand in radicands(value)})
    dots = [value.sources[1] for value in values if value.op == "dot"]
    by_head = sum(factor.weight and len(factor.shape) == 3 for factor in dots)
    writes = sum(value.op == "write" for value in values)
    lines = [
        "no MLA prologue in this graph. The parts of one, and how many the graph has:",
        f"  products with weights (W_dq, W_dkv_kr, W_uq_qr): {sum(counts)}",
        "  values that more than one weight multiplies, as W_dq and W_dkv_kr multiply x: "
        f"{sum(count > 1 for count in counts)}",
        f"  norms (RMSNorm of c_q and of c_kv): {norms}",
        f"  products head by head (W_uk): {by_head}",
        f"  writes into inputs (both caches): {writes}",
    ]
    if not counts:
        lines.append(
            "  A weight is a parameter or buffer of an nn.Module. One in an argument, a closure or "
            "a plain object is none, and what it makes is not counted here."
        )
    if unknown := ", ".join(registered.unknown(graph.gm.graph.nodes)):
        lines.append(
            f"  operators that the pass does not know: {unknown}. mf.register_operator tells it "
            "what one computes that writes into no argument"
        )
    return (*lines, *(f"  {name} is not known: {why}" for name, why in graph.unused.items()))
