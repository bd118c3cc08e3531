"""Draws a prologue from the facts that the pass has found: see :mod:`mla_fusion.report.picture`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
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
from mla_fusion.fx.walk import INPUTS, reached
from mla_fusion.match.candidate import Candidate, KeyHalf
from mla_fusion.match.finder import Finder, Found
from mla_fusion.observe.leftovers import leftovers
from mla_fusion.operators.known import value_of
from mla_fusion.plan.plan import Plan
from mla_fusion.report.picture import Drawing, Part, Picture, Step
from mla_fusion.report.text_tables import counted

_MOST = 400  # nodes; a larger drawing helps nobody
ABSENT = {
    "absorb.absent": "W_uk product",
    "rope.absent": "RoPE",
    "kv_latent.absent": "normed kv latent",
    "q_lora.absent": "normed query latent",
    "norm.gamma_absent": "gamma",
}
End = tuple[Node, str, str, str]  # the last node of a part, then its role, title and formula


def fused(finder: Finder, plan: Plan) -> Picture | None:
    """The prologue before and after; None where it is too large to be drawn."""
    rows, outputs = {"kv_cache": "c_kv", "kr_cache": "k_pe"}, _outputs(plan)
    writes = (
        (outputs[name], "write", f"write {name}", f"{name}[slots] = {row}")
        for name, row in rows.items()
        if name in outputs
    )
    ends = [*_facts(plan.candidate), *writes]
    layer, origin = module_path.layer(plan.candidate.nodes), plan.candidate.down.origin
    parts = _Parts(finder.view, ends, [origin], layer=layer, outputs=outputs)
    return Picture(layer, parts.drawing(), _call(finder.view, plan)) if parts.are_few else None


def rejected(
    finder: Finder, item: Found, code: str, nodes: Sequence[Node], red: Sequence[Node]
) -> Picture | None:
    """What was found, with ``red``, the nodes that the message names, and with what is missing."""
    layer = module_path.layer(item.nodes)
    if isinstance(item, KeyHalf):
        ends, origins = list(_facts(item)), [item.down.origin]
    else:
        found = _projections(finder, item.nodes)
        ends = [(node, "product", "", "") for node in found]
        ends += [(node, "other", "", "") for node in item.nodes if node not in found]
        origins = [one.origin for one in found.values()]
    known = {node for node, *_ in ends}
    origins = [node for node in dict.fromkeys(origins) if node not in known]
    ends += [(node, "other", "", "") for node in red if node not in known]
    parts = _Parts(finder.view, ends, origins, red, layer)
    if code in ABSENT:
        parts.add_missing(ABSENT[code], nodes[0])
    return Picture(layer, parts.drawing()) if parts.are_few else None


class _Parts:
    """Each part owns the nodes that its end is made of, up to ``origins`` and to earlier parts.

    Nodes that are not made of an origin prepare operands. The part that reads them lists the inputs
    of the graph that they are made of.
    """

    def __init__(
        self,
        view: View,
        ends: Iterable[End],
        origins: Sequence[Node],
        red: Sequence[Node] = (),
        layer: str = "",
        outputs: Mapping[str, Node] = MappingProxyType({}),
    ) -> None:
        """``layer``: its path stands above the picture, and titles leave it out."""
        self._labels, self._above = module_path.Labels(view.gm.graph), layer and f"{layer}."
        self._parts, self._owner, self._origins = list[Part](), dict[Node, int](), origins
        self._arrows = dict[tuple[int, int], None]()
        by_node: dict[Node, list[End]] = {
            node: [(node, "input", "", _tensor(node))] for node in origins
        }
        for end in ends:
            by_node.setdefault(end[0], []).append(end)
        above = reached(
            (*by_node, *outputs.values()),
            lambda node: () if node in origins else node.all_input_nodes,
            _MOST + 1,
        )
        self._order = sorted(above, key=view.position.__getitem__)
        self.are_few = len(self._order) <= _MOST
        if not self.are_few:
            return
        self._made = set[Node]()
        for node in self._order:
            if node in by_node or not self._made.isdisjoint(node.all_input_nodes):
                self._made.add(node)
        for node in self._order:
            if node in by_node:
                self._claim(node, len(self._parts))
                self._parts.append(self._part(by_node[node], node in red))
        for node in outputs.values():
            self._claim(node, self._nearest(node))
        self._join()
        for name, node in outputs.items():
            self._arrows[self._nearest(node), len(self._parts)] = None
            self._parts.append(Part(name, "output", _tensor(node)))

    def _part(self, ends: Sequence[End], is_red: bool) -> Part:
        """Of the facts that end at one node."""
        nodes, roles, *words = zip(*ends, strict=True)
        title, text = (", ".join(dict.fromkeys(filter(None, one))) for one in words)
        return Part(title or self._name(nodes[0]), roles[0], text, is_red=is_red)

    def _name(self, node: Node) -> str:
        return self._labels.of(node).removeprefix(self._above)

    def _nearest(self, node: Node) -> int:
        above = reached([node], lambda one: one.all_input_nodes)
        return next((self._owner[one] for one in above if one in self._owner), 0)

    def _claim(self, end: Node, place: int) -> None:
        stack = [end]
        while stack:
            node = stack.pop()
            if node in self._made and node not in self._owner:
                self._owner[node] = place
                stack += node.all_input_nodes

    def _join(self) -> None:
        """Give each part its steps and what it reads, and draw the arrows between parts."""
        steps: dict[int, list[Step]] = {}
        reads: dict[int, dict[str, None]] = {}
        for node in filter(self._owner.__contains__, self._order):
            source = node.args[0] if node.args and is_view(node) else None
            # a view of a product serves several parts, and stays with the product
            if isinstance(source, Node) and source in self._owner:
                place = self._owner[source]
                if self._parts[place].role in ("product", "input"):
                    self._owner[node] = place
            place = self._owner[node]
            steps.setdefault(place, []).append(_step(node))
            for read in node.all_input_nodes if node not in self._origins else ():
                if (start := self._owner.get(read)) is None:
                    reads.setdefault(place, {}).update(dict.fromkeys(self._inputs(read)))
                elif start < place:
                    self._arrows[start, place] = None
        self._parts = [
            replace(part, steps=tuple(steps.get(place, ())), reads=tuple(reads.get(place, ())))
            for place, part in enumerate(self._parts)
        ]

    def _inputs(self, node: Node) -> Iterator[str]:
        """Those of the graph that an operand is made of."""
        for one in reached([node], lambda one: one.all_input_nodes):
            if one.op in INPUTS:
                yield f"{self._name(one)} {_tensor(one)}"

    def add_missing(self, what: str, behind: Node) -> None:
        """A part that the kernel needs and the graph has not."""
        self._arrows[self._nearest(behind), len(self._parts)] = None
        self._parts.append(Part(f"no {what}", "missing", is_red=True))

    def drawing(self) -> Drawing:
        return Drawing(tuple(self._parts), tuple(self._arrows))


def _facts(item: KeyHalf) -> Iterator[End]:
    """Where the parts of a prologue end, as far as facts were found."""
    k = item.key
    if isinstance(item, Candidate):
        q, heads = item.query, f"{item.query.absorb.heads} heads"
        yield q.down.node, "product", "W_dq", "c_q = x W_dq"
        normed = f"RMSNorm(x W_dq), eps {q.norm.eps:g}{_times(q.norm.scale)}"
        yield q.norm.node, "norm", "RMSNorm c_q", f"c_q = {normed}"
        yield q.up_nope.node, "product", "W_uq", "q_nope = c_q W_uq"
        yield q.up_rope.node, "product", "W_qr", "q_pe = c_q W_qr"
        rotated = f"query_rope = {_rotated(q.rope, 'q_pe')}, {heads}"
        yield q.rope.node, "rope", "RoPE q", rotated
        absorbed = "q_nope, which no W_uk follows"
        if isinstance(q.absorb, AbsorbFact):
            times = " times one number for each token" if q.absorb.times is not None else ""
            absorbed = f"query = q_nope W_uk{times}"
        yield q.absorb.node, "product", "absorb", f"{absorbed}, {heads}"
    yield k.down.node, "product", "W_dkv", "c_kv = x W_dkv"
    yield k.down_rope.node, "product", "W_kr", "k_pe = x W_kr"
    if k.operator is not None:
        formula = f"norm, RoPE and write, eps {k.eps:g}"
        yield k.operator.node, "write", "npu_kv_rmsnorm_rope_cache", formula
    if k.norm is not None:
        formula = f"c_kv = RMSNorm(x W_dkv), eps {k.eps:g}{_times(k.scale)}"
        yield k.norm.node, "norm", "RMSNorm c_kv", formula
    if k.rope is not None:
        yield k.rope.node, "rope", "RoPE k", f"k_pe = {_rotated(k.rope, 'x W_kr')}"


def _projections(finder: Finder, nodes: Sequence[Node]) -> dict[Node, Projection]:
    """The products that nodes of a near miss are made of, down to the x that they share."""
    view, known = finder.view, {item.node: item for item in finder.projections}
    wanted, found = list(nodes), dict[Node, Projection]()
    while wanted:
        node = wanted.pop()
        # of a step at which a proof ends, what its operands are made of
        ends = node.all_input_nodes if node in view.barriers else [node]
        for source in {source for end in ends for source in view.sources(end)} - found.keys():
            if source in known:
                found[source] = known[source]
                if (origin := known[source].origin) in nodes or origin in known:
                    wanted.append(origin)
    return found


def _call(view: View, plan: Plan) -> Drawing:
    """The kernel, what it reads and what becomes of its results, and the steps that staging leaves
    beside it.
    """
    target = target_of(plan)
    name, labels = target.called, module_path.Labels(view.gm.graph)
    reads = tuple(f"{labels.of(node)} {_tensor(node)}" for node in target.inputs(plan))
    given = ", ".join(f"{name}={value}" for name, value in target.attributes(plan).items())
    parts, arrows = [Part(name, "kernel", given, reads)], list[tuple[int, int]]()
    left = {item.what: counted(item.operators) for item in leftovers(view, plan)}
    if "staging buffers" in left:
        parts.insert(0, Part("staging buffers", "other", left["staging buffers"]))
        arrows.append((0, 1))
    kernel = between = len(parts) - 1
    if "re-interleaving" in left:
        arrows.append((kernel, between := len(parts)))
        parts.append(Part("re-interleaving", "other", left["re-interleaving"]))
    for output, node in _outputs(plan).items():
        arrows.append((between if output in plan.interleave else kernel, len(parts)))
        parts.append(Part(output, "output", _tensor(node)))
    if "cache writes" in left:
        rows = [at for at, part in enumerate(parts) if part.title in ("c_kv", "k_pe")]
        arrows += [(at, len(parts)) for at in rows]
        parts.append(Part("cache writes", "write", left["cache writes"]))
    return Drawing(tuple(parts), tuple(arrows))


def _outputs(plan: Plan) -> dict[str, Node]:
    """The first node that stands for each result of the kernel."""
    return {item.output: item.node for item in reversed(plan.replacements)}


def _step(node: Node) -> Step:
    operator = op_name(node).replace("::", ".") if node.op == "call_function" else node.op
    return Step(node.name, operator, _tensor(node), module_path.source(node))


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
