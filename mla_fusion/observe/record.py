"""What the report says of each prologue: what became of it, and why that is exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.exact.field import POINTS
from mla_fusion.exact.prove import CHANCE
from mla_fusion.fx import module_path, registered
from mla_fusion.fx.kinds import is_mutating, op_name, word
from mla_fusion.fx.sizes import has_symbols, is_empty
from mla_fusion.fx.walk import upward, views_and_writes
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value, nearest
from mla_fusion.graph.read import Graph
from mla_fusion.machine import is_for_ge
from mla_fusion.observe import leftovers
from mla_fusion.observe.gain import seconds_saved
from mla_fusion.plan.caches import InPlace, Staged
from mla_fusion.plan.contract import OPERATOR
from mla_fusion.plan.outputs import strip_reshapes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.skip import is_named
from mla_fusion.propose.sites import Projections
from mla_fusion.report.rejection import Rejection, message
from mla_fusion.report.report import Fusion, Report
from mla_fusion.report.staging import REMEDIES, Leftover, StagedBy
from mla_fusion.report.text_tables import size
from mla_fusion.witness.compare import Outcome


class Record:
    """Of one graph."""

    def __init__(self, graph: Graph, config: Config, report: Report) -> None:
        self._graph, self._config, self._report = graph, config, report
        self._named = module_path.Labels(graph.gm.graph)

    def fused(self, plan: Plan, seen: Outcome | str) -> None:
        """``seen``: what verification found, or why it was not done."""
        leaves = left(plan)
        saved = _saved(plan, leaves, self._config)
        outcome = seen if isinstance(seen, Outcome) else None
        verified = seen.verified if isinstance(seen, Outcome) else seen
        warnings = (*plan.warnings, *_copied_by_ge(plan))
        self._report.fused.append(
            Fusion(
                layer=self._layer(plan.products),
                nodes=tuple(node.name for node in plan.products),
                dims=plan.dims,
                cache_mode=plan.attributes["cache_mode"],
                placement=self._placement(plan),
                staged_by=self._staged_by(plan),
                leaves=leaves,
                operators_before=leftovers.count_replaced(
                    [*plan.replaced], plan.inputs, _new_rows(plan)
                ),
                operators_after=1 + sum(item.launches for item in leaves),
                saves="" if saved is None else f"up to {max(saved, 0) * 1e6:.0f} us less a call",
                warnings=tuple(map(self._named, warnings)),
                rope=_rotation(plan),
                attributes=plan.attributes,
                replaced={
                    node.name: plan.part_name(value) for node, value in plan.replaced.items()
                },
                assumptions=tuple(map(self._named, plan.assumptions)),
                verified=self._named(verified),
                figures=outcome.figures if outcome is not None else (),
                compared=outcome.compared if outcome is not None else "",
                steps=tuple(map(_step, plan.region)) if outcome is not None else (),
                source=module_path.source(plan.products[0]),
                proof=(*self._proof(plan), outcome.compared if outcome is not None else verified),
                target=plan.target,
                operator=OPERATOR,
                instead_of=self._instead(plan),
            )
        )

    def check_gain(self, plan: Plan) -> None:
        """Raise Departure for a staged plan that saves no time."""
        caches = plan.caches
        if not isinstance(caches, Staged) or self._config.staging == "always":
            return
        saved = _saved(plan, left(plan), self._config)
        if saved is not None and saved <= 0:
            why = ", ".join(f"[{one.code}] {one.message}" for one in caches.obstacles)
            detail = f"a call takes {-saved * 1e6:.0f} us more; not in place: {why}"
            raise Departure("staging.gains_nothing", detail, plan.proposal.products[-2:])

    def rejected(self, reason: Departure, site: Sequence[Value]) -> None:
        """``site``: products of the prologue."""
        nodes = _nodes_of(self._graph, reason.values) or self._named.nodes(reason.detail)
        own = _nodes_of(self._graph, site)
        nodes = nodes or own
        code, detail, layer = reason.code, reason.detail, self._layer(own or nodes)
        by = next((one for one in self._config.skip if is_named(one, layer)), None)
        if by is not None and code != "skip":
            code, detail = "skip", f"layer {layer} matches {by!r}; {detail}"
        elif self._config.skips(code):
            code, detail = "skip", f"{code} is in Config.skip; {detail}"
        sources = map(module_path.source, (*nodes, *own))
        self._report.rejected.append(
            Rejection(
                code=code,
                message=message(code, self._named(detail)),
                nodes=tuple(node.name for node in nodes),
                layer=layer,
                source=next(filter(None, sources), ""),
                score=reason.score,
            )
        )

    def _instead(self, plan: Plan) -> str:
        """Why the target above it did not take the prologue."""
        why = plan.proposal.identity_reason
        if why is None:
            return ""
        return f"[{why.code}] {message(why.code, self._named(why.detail))}"

    def _placement(self, plan: Plan) -> str:
        if isinstance(plan.caches, Staged):
            return f"staged: {self._named(plan.caches.obstacles[0].message)}"
        new = [
            cache.name
            for name, cache, _ in plan.written_caches
            if not _is_written_back(plan, cache)
        ]
        if not new:
            return "in place"
        whole = self._named(", ".join(new))
        return (
            "written by the kernel into new caches, as the model returns them: the whole of "
            f"{whole} is copied"
        )

    def _staged_by(self, plan: Plan) -> tuple[StagedBy, ...]:
        if not isinstance(plan.caches, Staged):
            return ()
        found = (
            StagedBy(one.code, self._named(one.message), one.remedy or REMEDIES[one.code])
            for one in plan.caches.obstacles
        )
        return tuple(dict.fromkeys(found))

    def _layer(self, nodes: Sequence[Node]) -> str:
        """The module path; of a whole model its class."""
        return module_path.layer(nodes) or self._named.whole

    def _proof(self, plan: Plan) -> Iterator[str]:
        """Why the fusion is exact, a line for each fact."""
        parts = ", ".join(dict.fromkeys(claim.part for claim in plan.claims))
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
            nodes = _nodes_of(self._graph, [*caches.trusted_inputs])
            trusted = ", ".join(self._named.of(node) for node in nodes)
            yield f"slots: input {trusted}, trusted" if trusted else "slots: by their range"


def _step(node: Node) -> tuple[str, str, str, str]:
    """Its name, operator, value and line, for a table."""
    held = node.meta.get("val")
    values = held if isinstance(held, (list, tuple)) else [held]
    shown = (
        f"{str(one.dtype).removeprefix('torch.')}[{', '.join(map(str, one.shape))}]"
        for one in values
        if isinstance(one, Tensor)
    )
    operator = op_name(node).replace("::", ".") if node.op == "call_function" else node.op
    return node.name, operator, ", ".join(shown), module_path.source(node)


def _nodes_of(graph: Graph, values: Sequence[Value]) -> tuple[Node, ...]:
    held = map(graph.nodes_in_any_shape, values)
    return tuple(sorted({nodes[0] for nodes in held if nodes}))


def _rotation(plan: Plan) -> str:
    """The order of elements before and behind the rotation, and in what the kernel gives out."""
    rotation = plan.proposal.rotation
    if rotation is None:
        return "none: cos is 1, sin is 0"
    stored = ", stored as halves" if plan.warnings else ""
    return f"{rotation[0]} in, {rotation[1]} out{stored}"


def _new_rows(plan: Plan) -> dict[Node, bool]:
    """Nodes that hold the new rows of a staged plan, and whether each joins those of both."""
    rows = {plan.proposal.results.kv_rows, plan.proposal.results.kr_rows}
    names = rows.union(plan.results.values())
    return {
        node: strip_reshapes(value).op == "join"
        for node, value in plan.replaced.items()
        if not rows.isdisjoint(nearest([value], names))
    }


def left(plan: Plan) -> tuple[Leftover, ...]:
    """What a staged plan leaves in the graph; nothing of one whose caches the kernel writes."""
    if not isinstance(plan.caches, Staged):
        return ()
    rope, turned = plan.dims["Dr"], list[int]()
    if plan.proposal.rotation is not None and plan.proposal.rotation[1] == "interleaved":
        turned = [rope * (plan.dims["N"] if name == "query_rope" else 1) for name in _ROTATED]
    widths = plan.dims["Hckv"], rope
    tokens = max(plan.proposal.x.shape[0], 1)
    return leftovers.staging_leftovers(_new_rows(plan), turned, widths, tokens, plan.graph.shape)


_ROTATED = ("query_rope", "k_pe")


def _saved(plan: Plan, leaves: Sequence[Leftover], config: Config) -> float | None:
    tokens = 1 if has_symbols([plan.tokens]) else plan.proposal.x.shape[0]
    is_identity = plan.proposal.identity_reason is not None
    axes = plan.dims | {"N": plan.dims.get("N_padded", plan.dims["N"])}
    return seconds_saved(tokens, axes, plan.modes, leaves, config.machine, is_identity)


def _copied_by_ge(plan: Plan) -> Iterator[str]:
    """Caches that torchair copies, since GE takes contiguous inputs alone: a line for each."""
    for _, cache, _ in plan.written_caches if is_for_ge() else ():
        value = cache.meta["val"]
        if not value.is_contiguous():
            moved = "" if has_symbols(value.shape) else f" ({size(2 * value.nbytes)} a step)"
            yield (
                f"{cache.name} has strides {list(value.stride())}, and GE takes contiguous inputs "
                f"alone: torchair copies the whole of it in and back at every step{moved}. Give "
                "each layer contiguous caches, or compile with npugraph_ex"
            )


def _is_written_back(plan: Plan, cache: Node) -> bool:
    """Does the model write this input, rather than make a new cache of it?"""
    if cache in plan.graph.hidden:
        return True
    if any(word(user) == "copy_" and user.args[0] is cache for user in cache.users):
        return True
    caches = plan.caches
    assert isinstance(caches, InPlace)
    written = {write.value for write in caches.writes.values() if write.cache is cache}
    results = [n for n, value in plan.replaced.items() if value in written]
    return any(is_mutating(step) for node in results for step in upward(node, views_and_writes))


def absent(projections: Projections) -> tuple[str, ...]:
    """Of a graph without a prologue: what the parts of one are, and how many of them it has."""
    graph, found = projections.graph, Counter[str]()
    if any(map(is_empty, graph.gm.graph.find_nodes(op="placeholder"))):
        return ("no tokens in this graph: it was compiled for a call with none",)
    values = projections.values
    roots = [value for value in values if value.op == "product" and _has_root(value)]
    for site in projections.sites.values():
        found["flat"] += len(site.products)
        found["pairs"] += len(site.products) > 1
    heads = [value for value in values if value.op == "dot" and value.sources[1].weight]
    by_head = sum(len(value.sources[1].shape) == 3 for value in heads)
    writes = sum(value.op == "write" for value in values)
    nodes = graph.gm.graph.nodes
    unknown = ", ".join(registered.unknown(nodes))
    return (
        "no MLA prologue in this graph. The parts of one, and how many the graph has:",
        f"  products with weights (W_dq, W_dkv_kr, W_uq_qr): {found['flat']}",
        "  values that more than one weight multiplies, as W_dq and W_dkv_kr multiply x: "
        f"{found['pairs']}",
        f"  norms (RMSNorm of c_q and of c_kv): {len(roots)}",
        f"  products head by head (W_uk): {by_head}",
        f"  writes into inputs (both caches): {writes}",
        *(
            [
                f"  operators that the pass does not know: {unknown}. mf.register_operator tells "
                "it what one computes that writes into no argument"
            ]
            if unknown
            else ()
        ),
        *(f"  {name} is not known: {why}" for name, why in graph.unused.items()),
    )


def _has_root(value: Value) -> bool:
    return any(exponent.denominator == 2 for exponent in value.literal[0])
