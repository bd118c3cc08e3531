"""Draw a prologue from the facts that the pass has found: see :mod:`mla_fusion.report.picture`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.emit.targets import target_of
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.rope import RopeFact
from mla_fusion.fx import module_path
from mla_fusion.fx.kinds import is_view, op_name
from mla_fusion.fx.view import View
from mla_fusion.match.candidate import Candidate, KeyHalf
from mla_fusion.match.finder import Finder, Found
from mla_fusion.observe.leftovers import leftovers
from mla_fusion.operators.known import value_of
from mla_fusion.plan.outputs import Replacement
from mla_fusion.plan.plan import Plan, QueryPlan
from mla_fusion.report.picture import INPUTS, Arrow, Dot, Drawing, Picture
from mla_fusion.report.text_tables import counted

_MOST = 400  # nodes; what is larger is no prologue and helps nobody as a drawing
_HELD = ("placeholder", "get_attr")
_ABSENT = {
    "absorb.absent": "W_uk product",
    "rope.absent": "RoPE",
    "kv_latent.absent": "normed kv latent",
    "q_lora.absent": "normed query latent",
    "norm.gamma_absent": "gamma",
}
_OF_A_STEP = ("step.", "tokens.")  # codes whose first node is one step, at fault by itself
_READERS = 4  # of a failing node, that are drawn
_STEP_OF_OUTPUT = {
    "query": "absorb",
    "q_nope": "absorb",
    "query_rope": "RoPE q",
    "c_kv": "RMSNorm c_kv",
}
# what a tensor at the boundary is: role, and the kernel's argument
Labels = dict[Node, tuple[str, str]]


def fused(finder: Finder, plan: Plan) -> Picture | None:
    """The prologue before and after; None where it is too large to be drawn."""
    region = _Region(finder, _arguments(plan))
    region.claim_candidate(plan.candidate)
    for item in plan.replacements:
        region.claim_output(item)
    if len(region.steps) > _MOST:
        return None
    return Picture(
        module_path.layer(plan.candidate.nodes), region.drawing(), _after(finder.view, plan)
    )


def rejected(finder: Finder, item: Found, code: str, nodes: Sequence[Node]) -> Picture | None:
    """What was found, with the edges that keep it from being fused."""
    layer = module_path.layer(item.nodes)
    region = _Region(finder, _operands(item) if isinstance(item, KeyHalf) else {}, layer)
    if isinstance(item, KeyHalf):
        region.claim_candidate(item)
    else:
        region.claim_found((*item.nodes, *nodes[:1]) if code.startswith(_OF_A_STEP) else item.nodes)
    region.fail(code, nodes)
    if len(region.steps) > _MOST:
        return None
    return Picture(layer, region.drawing())


class _Region:
    """Nodes claimed step by step, each with all that it needs and nobody has claimed."""

    def __init__(self, finder: Finder, boundary: Labels, layer: str = "") -> None:
        """``layer``: whose path titles leave out, as what stands above the picture says it."""
        self._above = [f"{path}." for path in (layer, layer.rpartition(".")[0]) if path]
        self.view, self.finder, self.boundary = finder.view, finder, boundary
        self.steps: dict[Node, tuple[str, str]] = {}  # role, step
        self.formulas: dict[str, str] = {}
        self.outputs: list[Replacement] = []
        self.failing: set[tuple[Node, Node]] = set()
        self.missing: list[tuple[Node, str, bool]] = []  # node, what, does it come before the node?
        self._stops: set[Node] = set()
        self._titles: dict[str, Node] = {}
        self._named = module_path.Labels(self.view.gm.graph)

    def claim(self, end: Node, role: str, step: str, formula: str = "") -> None:
        if formula:
            self.formulas.setdefault(step, formula)
        stack = [end]
        while stack and len(self.steps) <= _MOST:
            node = stack.pop()
            if node in self.steps:
                continue
            if node in self.boundary:
                self.steps[node] = self.boundary[node]
            elif node.op in _HELD or node in self._stops:
                self.steps[node] = ("input", self._title(node))
            else:
                self.steps[node] = (role, step)
                stack += node.all_input_nodes

    def claim_candidate(self, item: KeyHalf) -> None:
        for node, role, step, formula in _steps(item):
            self.claim(node, role, step, formula)

    def claim_output(self, item: Replacement) -> None:
        written = item.output in ("kv_cache", "kr_cache")
        rows = "c_kv" if item.output == "kv_cache" else "k_pe"
        if written:
            self.claim(item.node, "write", f"write {item.output}", f"{item.output}[slots] = {rows}")
        else:
            step = _STEP_OF_OUTPUT.get(
                item.output, "RoPE k" if item.output == "k_pe" else "RMSNorm c_q"
            )
            role = next((role for role, known in self.steps.values() if known == step), "other")
            self.claim(item.node, role, step)
        self.outputs.append(item)

    def claim_found(self, nodes: Iterable[Node]) -> None:
        """Of a near miss: the products, norms and rotations below its nodes, up to the x that they
        share.
        """
        nodes = list(nodes)
        wanted, products = list(nodes), dict[Node, Projection]()
        by_node = {item.node: item for item in self.finder.projections}
        inside = set(nodes)
        while wanted:
            for source in self._products_behind(wanted.pop()):
                found = by_node.get(source)
                if found is None or source in products:
                    continue
                products[source] = found
                if found.origin in inside or found.origin in by_node:
                    wanted.append(found.origin)
        self._stops = {item.origin for item in products.values()} - inside - products.keys()
        for node in sorted({*products, *nodes}, key=self.view.position.__getitem__):
            if node not in products:
                self.claim(node, "other", self._title(node))
                continue
            item = products[node]
            factors = f"{self._title(item.origin)} times {self._title(item.weight)}"
            self.claim(item.node, "product", self._title(item.node), factors)
            facts = self.finder.reader.read(item)
            for norm in facts.norms:
                if norm.node in inside:
                    self.claim(
                        norm.node,
                        "norm",
                        f"RMSNorm {self._place(norm.node)}",
                        f"RMSNorm, eps {norm.eps:g}",
                    )
            for rope in facts.ropes:
                if rope.node in inside:
                    self.claim(
                        rope.node,
                        "rope",
                        f"RoPE {self._place(rope.node)}",
                        f"RoPE, heads {rope.heads}",
                    )

    def _title(self, node: Node) -> str:
        """What the user calls it; two steps of one name are told apart by the graph's."""
        title = self._named.of(node)
        title = title.removeprefix(
            next((path for path in self._above if title.startswith(path)), "")
        )
        first = self._titles.setdefault(title, node)
        return title if first is node else f"{title} ({node.name})"

    def _place(self, node: Node) -> str:
        return self._title(node).partition("'s ")[0]

    def _products_behind(self, node: Node) -> frozenset[Node]:
        """The products that a node is made of; of a step at which the proof ends, those that its
        operands are.
        """
        if node not in self.view.barriers:
            return self.view.sources(node)
        return frozenset[Node]().union(*(self.view.sources(read) for read in node.all_input_nodes))

    def fail(self, code: str, nodes: Sequence[Node]) -> None:
        """Mark the edges between the nodes at fault; where there are none, those into them, or to
        what is missing.
        """
        for node in nodes:
            self.steps.setdefault(node, ("other", self._title(node)))
        if code in _ABSENT and nodes:
            self.missing.append(
                (self._anchor(code, nodes), _ABSENT[code], code == "norm.gamma_absent")
            )
            return
        named = set(nodes)
        self.failing = {
            (start, end) for end in named for start in end.all_input_nodes if start in named
        }
        if code == "rope.tables_differ":
            tables = {node for node, (role, _) in self.steps.items() if role == "table"}
            self.failing |= {
                (table, user) for table in tables for user in table.users if user in self.steps
            }
        elif not self.failing:
            blamed = (
                nodes[:1]
                if code.startswith(_OF_A_STEP)
                else nodes[-1:]
                if code.startswith("norm")
                else nodes
            )
            for node in blamed:
                self.failing |= self._around(
                    node, code.startswith(("reader", "contract", "token_x", "rope"))
                )

    def _around(self, node: Node, outward: bool) -> set[tuple[Node, Node]]:
        """Edges from the node to what reads it, or into it; the others where there are none."""
        sources = {
            (source, node)
            for source in node.all_input_nodes
            if source in self.steps and self._is_open(node)
        }
        readers = [user for user in node.users if user in self.steps or outward][:_READERS]
        if not readers or (sources and not outward):
            return sources
        for reader in readers:
            self.steps.setdefault(reader, ("other", self._title(reader)))
        return {(node, reader) for reader in readers}

    def _anchor(self, code: str, nodes: Sequence[Node]) -> Node:
        """Where what is missing should hang: on the product below, or on x."""
        if code.startswith("norm"):
            return nodes[0]
        below = [source for node in nodes[-1].all_input_nodes for source in self.view.sources(node)]
        products = [node for node in below if node in self.steps]
        if code.endswith(("latent.absent", "lora.absent")):
            return next((node for node in self.steps if node in self._stops), nodes[0])
        return products[0] if products else nodes[-1]

    def drawing(self) -> Drawing:
        order = sorted(self.steps, key=self.view.position.__getitem__)
        self._leave_views_with_their_source(order)
        place = {node: index for index, node in enumerate(order)}
        dots = [_dot(node, *self.steps[node]) for node in order]
        arrows = [
            Arrow(place[source], place[node], (source, node) in self.failing)
            for node in order
            if self._is_open(node)
            for source in node.all_input_nodes
            if source in place
        ]
        for item in self.outputs:
            arrows.append(Arrow(place[item.node], len(dots)))
            dots.append(_result(item))
        for node, what, above in self.missing:
            pair = (len(dots), place[node]) if above else (place[node], len(dots))
            arrows.append(Arrow(*pair, failing=True))
            dots.append(Dot(f"no {what}", "", "missing", f"no {what}"))
            self.formulas[f"no {what}"] = "The kernel needs it; the graph has none."
        used = {dot.step for dot in dots}
        return Drawing(
            tuple(dots),
            tuple(arrows),
            {step: text for step, text in self.formulas.items() if step in used},
        )

    def _leave_views_with_their_source(self, order: list[Node]) -> None:
        """A split of a product, or a view of a table, serves several steps and is none of them."""
        for node in order:
            source = node.args[0] if node.args and is_view(node) else None
            if isinstance(source, Node) and self._is_open(node):
                role, step = self.steps.get(source, ("", ""))
                if role in ("product", *INPUTS):
                    self.steps[node] = role, step

    def _is_open(self, node: Node) -> bool:
        return node not in self.boundary and node not in self._stops and node.op not in _HELD


def _steps(item: KeyHalf) -> Iterator[tuple[Node, str, str, str]]:
    """What the facts rest on, in the order in which it is claimed: node, role, step, formula."""
    k = item.key
    products = ((p.node, "product", step, formula) for p, _, step, formula in _products(item))
    if isinstance(item, Candidate):
        q, heads = item.query, item.query.absorb.heads
        yield from islice(products, 3)
        normed = f"RMSNorm(x W_dq), eps {q.norm.eps:g}{_times(q.norm.scale)}"
        yield q.norm.node, "norm", "RMSNorm c_q", f"c_q = {normed}"
        yield from products
        rotated = f"query_rope = {_rotated(q.rope, 'q_pe')}, {heads} heads"
        yield q.rope.node, "rope", "RoPE q", rotated
        absorbed = "q_nope, which no W_uk follows"
        if isinstance(q.absorb, AbsorbFact):
            times = " times one number for each token" if q.absorb.times is not None else ""
            absorbed = f"query = q_nope W_uk{times}"
        yield q.absorb.node, "product", "absorb", f"{absorbed}, {heads} heads"
    yield from products
    if k.operator is not None:
        formula = f"norm, RoPE and write, eps {k.eps:g}"
        yield k.operator.node, "write", "npu_kv_rmsnorm_rope_cache", formula
    if k.norm is not None:
        formula = f"c_kv = RMSNorm(x W_dkv), eps {k.eps:g}{_times(k.scale)}"
        yield k.norm.node, "norm", "RMSNorm c_kv", formula
    if k.rope is not None:
        yield k.rope.node, "rope", "RoPE k", f"k_pe = {_rotated(k.rope, 'x W_kr')}"


def _products(item: KeyHalf) -> list[tuple[Projection, str, str, str]]:
    """The projections with the kernel's argument, their step and what they compute: those of x (of
    a whole prologue three), then two of c_q.
    """
    k = item.key
    key = ("W_dkv", "c_kv = x W_dkv")
    if k.down.node is k.down_rope.node:
        key = ("W_dkv_kr", "[c_kv | k_pe] = x W_dkv_kr")
    of_key = [
        (k.down, "weight_dkv_kr", *key),
        (k.down_rope, "weight_dkv_kr", "W_kr", "k_pe = x W_kr"),
    ]
    if not isinstance(item, Candidate):
        return of_key
    q = item.query
    down, up = ("W_dq", "c_q = x W_dq"), ("W_uq", "q_nope = c_q W_uq")
    if q.down.node is k.down.node:
        down = ("W_dq, W_dkv_kr", "[c_q | c_kv | k_pe] = x [W_dq | W_dkv_kr]")
    if q.up_nope.node is q.up_rope.node:
        up = ("W_uq_qr", "[q_nope | q_pe] = c_q W_uq_qr")
    return [
        (q.down, "weight_dq", *down),
        *of_key,
        (q.up_nope, "weight_uq_qr", *up),
        (q.up_rope, "weight_uq_qr", "W_qr", "q_pe = c_q W_qr"),
    ]


def _operands(item: KeyHalf) -> Labels:
    """Tensors at the boundary that the facts name."""
    k = item.key
    found: Labels = dict.fromkeys(item.taken, ("input", "kv"))
    gammas, tables = {"gamma": k.gamma}, {"cos": k.cos, "sin": k.sin}
    if isinstance(item, Candidate):
        q = item.query
        found[q.down.origin] = ("input", "token_x")
        for projection, argument, _, _ in _products(item):
            for part in projection.by_weight:
                _add(found, part.weight, "weight", argument)
        if isinstance(q.absorb, AbsorbFact):
            for weight in q.absorb.weights:
                _add(found, weight, "weight", "weight_uk")
        gammas = {"rmsnorm_gamma_cq": q.norm.gamma, "rmsnorm_gamma_ckv": k.gamma}
        tables = {"rope_cos": (*q.rope.cos, *k.cos), "rope_sin": (*q.rope.sin, *k.sin)}
    for argument, gamma in gammas.items():
        if gamma is not None:
            _add(found, gamma, "weight", argument)
    for argument, runs in tables.items():
        for run in runs:
            _add(found, run.base, "table", argument)
    return found


def _arguments(plan: Plan) -> Labels:
    """Every node that the kernel reads, with the names of its arguments."""
    whole = isinstance(plan, QueryPlan)
    found: Labels = {plan.token_x: ("input", "token_x")} if whole else {}
    for name, cache, _ in plan.caches.held:
        _add(found, cache, "cache", name)
    for node in plan.caches.slots.nodes:
        _add(found, node, "input", "cache_index" if whole else "index")
    for node, (role, label) in _operands(plan.candidate).items():
        _add(found, node, role, label)
    for node in target_of(plan).inputs(plan):
        if node not in found:
            _add(found, node, "weight", "scale")
    return found


def _add(found: Labels, node: Node, role: str, argument: str) -> None:
    known = found.get(node, (role, ""))[1].split(", ")
    if argument not in known:
        found[node] = (role, ", ".join([*filter(None, known), argument]))


def _after(view: View, plan: Plan) -> Drawing:
    """The kernel with its arguments and what becomes of its results, with the steps that a staged
    fusion leaves.
    """
    target = target_of(plan)
    read = set(target.inputs(plan))
    labels = {node: label for node, label in _arguments(plan).items() if node in read}
    dots = [_dot(node, role, step) for node, (role, step) in labels.items()]
    left = {item.what: item for item in leftovers(view, plan)}
    if "staging buffers" in left:
        dots.append(Dot("staging buffers", "aten.new_empty", "other", "staging buffers"))
    kernel = len(dots)
    given = ", ".join(f"{name}={value}" for name, value in target.attributes(plan).items())
    name = target.operator.name
    dots.append(Dot(name, f"npu.{name}", "kernel", name))
    formulas = {name: given}
    arrows = [Arrow(index, kernel) for index in range(kernel)]
    made: set[tuple[str, str]] = set()
    for item in plan.replacements:
        if (item.output, _tensor(item.node)) in made:
            continue
        made.add((item.output, _tensor(item.node)))
        source = kernel
        if item.output in plan.interleave:
            arrows.append(Arrow(kernel, source := len(dots)))
            dots.append(
                Dot(f"pairs of {item.output}", "aten.transpose", "other", f"pairs of {item.output}")
            )
        arrows.append(Arrow(source, len(dots)))
        if not item.is_free:
            formulas[item.output] = "Its axes reordered, or reshaped, as the model has them."
        if item.output in ("c_kv", "k_pe"):
            formulas[item.output] = "The new rows, for the model's own cache write, which stays."
        dots.append(_result(item))
    if "cache writes" in left:
        rows = [
            place
            for place, dot in enumerate(dots)
            if dot.role == "output" and dot.name in ("c_kv", "k_pe")
        ]
        arrows += [Arrow(place, len(dots)) for place in rows]
        formulas["cache writes"] = (
            f"The model's own, which stay: {counted(left['cache writes'].operators)}."
        )
        dots.append(
            Dot("cache writes", left["cache writes"].operators[-1], "write", "cache writes")
        )
    return Drawing(tuple(dots), tuple(arrows), formulas)


def _result(item: Replacement) -> Dot:
    return Dot(item.output, "", "output", item.output, _tensor(item.node))


def _dot(node: Node, role: str, step: str) -> Dot:
    return Dot(node.name, _operator(node), role, step, _tensor(node), module_path.source(node))


def _operator(node: Node) -> str:
    return op_name(node).replace("::", ".") if node.op == "call_function" else node.op


def _tensor(node: Node) -> str:
    return ", ".join(_described(value_of(node)))


def _described(value: Any) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _described(item)


def _rotated(fact: RopeFact, what: str) -> str:
    return (
        f"RoPE({what}), {fact.input_layout} in, {fact.layout} out"
        if fact.rotates
        else f"{what}, not rotated"
    )


def _times(scale: float) -> str:
    return f", times {scale:g}" if scale != 1.0 else ""
