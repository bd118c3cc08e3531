"""Verifies plans: has ``witness/`` compare the replaced nodes with the call and what reads it.

``pipeline.py`` asks this for each plan, before any graph is changed.
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from mla_fusion.commit.rewrite import Writer
from mla_fusion.config import Config
from mla_fusion.fx import module_path
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.sizes import same
from mla_fusion.fx.walk import INPUTS, reached
from mla_fusion.fx.workplace import workplace
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.numbers import is_open
from mla_fusion.graph.read import Graph
from mla_fusion.meta.number_formats import HIFLOAT8
from mla_fusion.observe.clock import use_cpu_threads
from mla_fusion.plan.caches import InPlace
from mla_fusion.plan.contract import lowering_departure
from mla_fusion.plan.outputs import Partition, is_size, source_nodes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.region import activation_nodes
from mla_fusion.plan.slots import block_size_of
from mla_fusion.targets.prolog import COLUMN_SCALES, GAMMAS, WEIGHTS
from mla_fusion.witness.compare import Mismatch, Outcome, Pair, compare

_SMALL = 1 << 26  # most products of two numbers, in the projections, that one thread verifies
_PACKED = 3  # kv_cache_quant_mode
_ROLES = {  # the role of inputs that an argument is read from
    **dict.fromkeys(WEIGHTS, "weight"),
    **dict.fromkeys((*GAMMAS, "smooth_scales_cq"), "gamma"),
    **dict.fromkeys(COLUMN_SCALES, "scale"),
    "quant_scale_ckv": "cache_scale",
    "quant_scale_ckr": "cache_scale",
}


class Verifier:
    """Verifies the plans of one graph. One plan of each structure is compared."""

    def __init__(self, graph: Graph, config: Config, usual_threads: int) -> None:
        self._graph, self._config, self._threads = graph, config, usual_threads
        self._layers: dict[object, str] = {}

    def verify(self, plan: Plan) -> Outcome:
        """Returns the outcome of verification. Raises Departure ``verify.mismatch`` if the values
        differ, ``graph.not_functional`` if steps in place may be why.
        """
        if self._config.verify == "off":
            return Outcome("not verified (Config.verify is 'off')")
        if self._config.verify == "first" and plan.structure in self._layers:
            return Outcome(f"equal in structure to {self._layers[plan.structure]}")
        size = plan.proposal.x.shape[0] * sum(
            plan.proposal.arguments[name].numel for name in WEIGHTS
        )
        with use_cpu_threads(1 if size <= _SMALL else self._threads):
            try:
                outcome = _compare_plan(plan)
            except Mismatch as error:
                # the old nodes run without steps in place that they do not read
                is_functional = not self._graph.early_writes
                code = "verify.mismatch" if is_functional else "graph.not_functional"
                raise Departure(code, str(error), plan.proposal.products) from error
            except LookupError as error:
                raise lowering_departure(plan, error) from error
        self._layers[plan.structure] = module_path.layer(plan.products) or plan.products[0].name
        return outcome


def _compare_plan(plan: Plan) -> Outcome:
    """Compares the replaced nodes of a plan with what stands for them. Raises Mismatch."""
    graph = plan.graph
    old_graph = graph.gm.graph
    new_module = workplace(graph.gm)
    x_roles = activation_nodes(plan)
    sizes = {node for node in old_graph.nodes if is_size(node)}
    partition = Partition(
        dict(plan.replaced), sizes, {*old_graph.nodes}.difference(plan.region, sizes)
    )
    writer = Writer(graph, partition, [plan], GraphBuilder(new_module, old_graph))
    copies = writer.b.copies
    for node in x_roles:  # the values of these are drawn
        if node.op != "placeholder":
            copy = copies[node] = new_module.graph.placeholder(node.name)
            copy.meta.update(node.meta)
    with writer.b.propagating():
        new_nodes = {node: writer.write_replaced(node) for node in plan.replaced}
    new_module.graph.output(tuple(new_nodes.values()))
    width = plan.dims["Dr"]
    pairs = [
        Pair(plan.part_name(value), node, new_nodes[node], _number_form(plan, value, node), width)
        for node, value in plan.replaced.items()
    ]
    roles = x_roles | _roles(plan, x_roles)
    rows, block_size = 1, 1
    for _, cache, _ in plan.written_caches:
        axes = [size for size in cache.meta["val"].shape[:-1] if not same(size, 1)]
        rows, block_size = prod(axes), axes[-1] if len(axes) > 1 else 1
    if isinstance(plan.caches, InPlace):  # the blocks of a symbolic cache may be smaller
        slot_block_size = block_size_of(plan.caches.slots)
        if slot_block_size in graph.sizes:
            block_size = graph.sizes[slot_block_size]
        elif slot_block_size and not is_open(slot_block_size):
            block_size = slot_block_size
    cut = {node: copies[node] for node in roles if node.op != "placeholder" and node in copies}
    return compare(
        old_graph,
        new_module,
        pairs,
        cut,
        roles,
        rows=rows,
        block_size=block_size,
        symbols=graph.symbols,
    )


def _number_form(plan: Plan, value: Value, node: Node) -> str:
    """Returns how the numbers of a replaced node are read, in the words of
    ``witness.compare.Pair``.
    """
    part, tensor = plan.part_name(value), node.meta["val"]
    if plan.warnings and part in ("query_rope", "k_pe", "kr_cache"):
        return "halves"
    if part == "dequant_scale_q_norm" and tensor.element_size() == 1:
        return "powers"
    is_hifloat8 = plan.attributes.get("token_x_dtype") == HIFLOAT8 and tensor.dtype == torch.uint8
    if part == "kv_cache" and plan.modes[1] == _PACKED:
        return "tiles"
    return "hifloat8" if part == "query_norm" and is_hifloat8 else ""


def _roles(plan: Plan, x_roles: dict[Node, str]) -> dict[Node, str]:
    """Returns the roles of the inputs that arguments are read from, without those that are drawn as
    x.
    """
    graph, roles = plan.graph, dict[Node, str]()
    for name, cache, _ in plan.written_caches:
        roles[cache] = "tiles" if plan.modes[1] == _PACKED else "cache"
        if name == "kr_cache" and plan.warnings:
            roles[cache] = "halves"
    for leaf, role in plan.caches.trusted_inputs.items():
        drawn_role = " ".join(
            word for word in role.split(" ") if not (word.isdigit() and is_open(int(word)))
        )
        nodes = graph.nodes.get(leaf, ())
        roles |= {node: drawn_role for node in nodes if node.op == "placeholder"}

    def operands(node: Node) -> list[Node]:
        """Returns the nodes above a node, except x and what comes before it."""
        return [operand for operand in node.all_input_nodes if operand not in x_roles]

    for name, role in _ROLES.items():
        sources = source_nodes(graph, [plan.values[name]] if name in plan.values else [])
        for node in reached((node for node in sources if node not in x_roles), operands):
            value = node.meta["val"]
            is_tensor = isinstance(value, torch.Tensor)
            if node.op in INPUTS and is_tensor and value.dtype not in (torch.int32, torch.int64):
                roles.setdefault(node, role)
    return roles
