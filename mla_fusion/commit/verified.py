"""What is compared by the witness: a plan's replaced nodes, beside the call with what it reads."""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from mla_fusion.commit.rewrite import Writer
from mla_fusion.config import Config
from mla_fusion.fx import module_path
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.workplace import workplace
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.numbers import is_open
from mla_fusion.graph.read import Graph
from mla_fusion.meta.number_formats import HIFLOAT8
from mla_fusion.observe.clock import threads
from mla_fusion.plan.caches import InPlace
from mla_fusion.plan.outputs import Partition, is_size, source_nodes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.region import activation_nodes
from mla_fusion.plan.slots import block_size_of
from mla_fusion.witness.compare import Mismatch, Outcome, Pair, compare
from mla_fusion.witness.sizes import bound

_FEW = 1 << 20  # elements of token_x up to which one thread verifies
_PACKED = 3  # kv_cache_quant_mode
_ROLES = {  # of what an argument is read from
    "weight_dq": "weight",
    "weight_uq_qr": "weight",
    "weight_uk": "weight",
    "weight_dkv_kr": "weight",
    "rmsnorm_gamma_cq": "gamma",
    "rmsnorm_gamma_ckv": "gamma",
    "smooth_scales_cq": "gamma",
    "dequant_scale_w_dq": "scale",
    "dequant_scale_w_uq_qr": "scale",
    "dequant_scale_w_dkv_kr": "scale",
    "dequant_scale_x": "token_scale",
    "quant_scale_ckv": "cache_scale",
    "quant_scale_ckr": "cache_scale",
    "token_x": "x",
}


class Verified:
    """The plans of one graph that have been compared."""

    def __init__(self, graph: Graph, config: Config, usual_threads: int) -> None:
        self._graph, self._config, self._threads = graph, config, usual_threads
        self._seen: dict[object, str] = {}

    def of(self, plan: Plan) -> Outcome | str:
        """What verification found, or why it was not done. Raises Departure
        ``verify.mismatch``.
        """
        if self._config.verify == "off":
            return "not verified (Config.verify is 'off')"
        if self._config.verify == "first" and plan.structure in self._seen:
            return f"equal in structure to {self._seen[plan.structure]}"
        few = plan.proposal.arguments["token_x"].shape[0] * plan.dims["He"] <= _FEW
        with threads(1 if few else self._threads):
            try:
                found = _compared(plan)
            except Mismatch as error:
                raise Departure("verify.mismatch", str(error), plan.proposal.products) from error
        self._seen[plan.structure] = module_path.layer(plan.products) or plan.products[0].name
        return found


def _compared(plan: Plan) -> Outcome:
    graph = plan.graph
    source = graph.gm.graph
    work = workplace(graph.gm)
    x = activation_nodes(plan)
    sizes = {node for node in source.nodes if is_size(node)}
    settled = Partition(dict(plan.replaced), sizes, {*source.nodes}.difference(plan.region, sizes))
    leaves = {leaf: plan for leaf in plan.results.values()}
    writer = Writer(graph, settled, leaves, GraphBuilder(work, source))
    for node in source.find_nodes(op="placeholder"):
        writer.b.value(node)
    copies = {node: writer.copy_as_input(node) for node in x}
    with writer.b.propagating():
        after = {node: writer.write_replaced(node) for node in plan.replaced}
    work.graph.output(tuple(after.values()))
    pairs = [
        Pair(plan.part_name(value), node, after[node], _form(plan, value, node))
        for node, value in plan.replaced.items()
    ]
    roles = x | _roles(plan, x)
    rows, block_size = 1, 1
    for _, cache, _ in plan.written_caches:
        axes = [size for size in cache.meta["val"].shape[:-1] if size != 1]
        rows, block_size = prod(axes), axes[-1] if len(axes) > 1 else 1
    if isinstance(plan.caches, InPlace):  # blocks of a symbolic cache may be cut into smaller ones
        number = block_size_of(plan.caches.slots)
        own = graph.sizes.get(number) or (0 if is_open(number) else number)
        block_size = own or block_size
    attributes = {node for node in roles if node.op == "get_attr"}
    copies |= {node: writer.b.copies[node] for node in attributes & writer.b.copies.keys()}
    cut = {node: copy for node, copy in copies.items() if node.op != "placeholder"}
    alike = bound(source, graph.symbols)
    return compare(source, work, pairs, cut, roles, rows=rows, block_size=block_size, binding=alike)


def _form(plan: Plan, value: Value, node: Node) -> str:
    """Of what is compared, as ``witness.compare`` names it."""
    part, held = plan.part_name(value), node.meta["val"]
    if plan.warnings and part in ("query_rope", "k_pe", "kr_cache"):
        return "halves"
    if part == "dequant_scale_q_norm" and held.element_size() == 1:
        return "powers"
    is_hifloat8 = plan.attributes.get("token_x_dtype") == HIFLOAT8 and held.dtype == torch.uint8
    if part == "kv_cache" and plan.modes[1] == _PACKED:
        return "tiles"
    return "hifloat8" if part == "query_norm" and is_hifloat8 else ""


def _roles(plan: Plan, drawn: dict[Node, str]) -> dict[Node, str]:
    """Of the graph's inputs that arguments are read from, apart from what is drawn."""
    graph, found = plan.graph, dict[Node, str]()
    for name, cache, _ in plan.written_caches:
        found[cache] = "tiles" if plan.modes[1] == _PACKED else "cache"
        if name == "kr_cache" and plan.warnings:
            found[cache] = "halves"
    if isinstance(plan.caches, InPlace):
        for leaf, role in plan.caches.trusted_inputs.items():
            found |= {node: role for node in graph.nodes[leaf] if node.op == "placeholder"}
    for name, role in _ROLES.items():
        stack, seen = (
            source_nodes(graph, [plan.values[name]] if name in plan.values else []),
            set[Node](),
        )
        while stack:
            node = stack.pop()
            if node in seen or node in drawn:
                continue
            seen.add(node)
            held = node.meta["val"]
            if node.op not in ("placeholder", "get_attr"):
                stack += node.all_input_nodes
            elif isinstance(held, torch.Tensor) and held.dtype not in (torch.int32, torch.int64):
                found.setdefault(node, role)
    return found
