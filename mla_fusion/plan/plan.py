"""Defines the plan of one fusion: all that the rewrite does, decided before a node is changed.

``planner.py`` makes a ``Plan`` from a proven proposal. ``commit/`` verifies and lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from torch.fx import Node

from mla_fusion.fx.walk import nodes_between
from mla_fusion.graph.form import Value, nearest
from mla_fusion.graph.read import Graph
from mla_fusion.plan import modes
from mla_fusion.plan.caches import InPlace, Staged
from mla_fusion.plan.outputs import first_nodes, source_nodes
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.rewrites import Rewrites

_ROWS = {"kv_rows": "c_kv", "kr_rows": "k_pe"}  # report names of rows that no cache takes
_LEAST = 1e-30  # negligible beside the mean square of any row of bfloat16


@dataclass(eq=False)
class Plan:
    """Describes one call of ``npu_mla_prolog_v3_functional``.

    rewrites     what Values of the graph are over the results of the call, by proven claims
    region       the nodes that the call stands for, in order
    replaced     nodes of the region that are read elsewhere, with what they are over the results
    compared     how many elements the proof compared
    assumptions  what the fusion takes for granted, for the report
    warnings     lines about caches that hold other numbers than the model's
    structure    a number that is equal for the plans of equal layers
    """

    graph: Graph
    proposal: Proposal
    caches: InPlace | Staged
    rewrites: Rewrites
    region: list[Node]
    replaced: dict[Node, Value]
    compared: int = 0
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    structure: int = -1

    @cached_property
    def products(self) -> list[Node]:
        """Returns the nodes of the products, in order."""
        return first_nodes(self.graph, self.proposal.products)

    @cached_property
    def values(self) -> dict[str, Value]:
        """Returns the arguments that are Values, by name, with the slots as ``cache_index``."""
        arguments = {
            name: argument
            for name, argument in self.proposal.arguments.items()
            if isinstance(argument, Value)
        }
        if isinstance(self.caches, InPlace):
            arguments["cache_index"] = self.caches.slots
        return arguments

    @cached_property
    def results(self) -> dict[str, Value]:
        """Returns the Values that stand for results, by name.

        They are leaves. In place, the written caches replace the leaves of the new rows.
        """
        results = self.proposal.results.by_name
        if isinstance(self.caches, InPlace):
            del results["kv_rows"], results["kr_rows"]
            results |= {name: write.value for name, write in self.caches.writes.items()}
        return results

    def part_name(self, value: Value) -> str:
        """Returns the name, in a report, of the first result that a replaced output is made of.

        Returns "" if it is made of none.
        """
        names = {leaf: name for name, leaf in self.results.items()}
        name = next((names[source] for source in nearest([value], names)), "")
        return _ROWS.get(name, name)

    @cached_property
    def read_results(self) -> set[str]:
        """Returns the names of the results that something reads."""
        names = {leaf: name for name, leaf in self.results.items()}
        return {names[leaf] for leaf in nearest(self.replaced.values(), names)}

    @property
    def tokens(self) -> Any:
        """Returns the number of tokens, which may be symbolic."""
        return self.graph.unbound(self.proposal.x.shape[0])

    @cached_property
    def dims(self) -> dict[str, Any]:
        """Returns the sizes of the axes, by the names of the operator's documents."""
        arguments = self.proposal.arguments
        heads, nope, latent = arguments["weight_uk"].shape
        model_heads = self.proposal.model_heads
        padded = {"N_padded": heads} if model_heads else {}
        return {
            "T": str(self.tokens),
            "He": arguments["token_x"].shape[1],
            "Hcq": arguments["weight_dq"].shape[1],
            "Hckv": latent,
            "N": model_heads or heads,
            "D": nope,
            "Dr": arguments["rope_cos"].shape[1],
            **padded,
        }

    @property
    def modes(self) -> tuple[int, int]:
        """Returns weight_quant_mode and kv_cache_quant_mode."""
        arguments = self.proposal.arguments
        return arguments.get("weight_quant_mode", 0), arguments.get("kv_cache_quant_mode", 0)

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """Returns the keyword attributes of the call.

        Both epsilons are always passed, because the operator's default is not the models'.
        """
        arguments = self.proposal.arguments
        attributes: dict[str, Any] = {
            "rmsnorm_epsilon_cq": _epsilon(arguments["rmsnorm_epsilon_cq"]),
            "rmsnorm_epsilon_ckv": _epsilon(arguments["rmsnorm_epsilon_ckv"]),
            "cache_mode": self.caches.mode,
        }
        if not self.read_results.isdisjoint(("query_norm", "dequant_scale_q_norm")):
            attributes["query_norm_flag"] = True
        attributes |= modes.attributes(*self.modes)
        for name in ("qc_qr_scale", "kc_scale"):
            if name in arguments:
                attributes[name] = float(arguments[name])
        return attributes

    @cached_property
    def written_caches(self) -> tuple[tuple[str, Node, tuple[Any, ...]], ...]:
        """Returns the caches that the kernel writes: result name, graph input, shape that the
        kernel takes.

        It is empty for a staged plan.
        """
        return tuple(
            (name, write.cache, tuple(map(self.graph.unbound, write.shape)))
            for name, write in self.caches.writes.items()
        )

    @cached_property
    def inputs(self) -> list[Node]:
        """Returns the nodes that the call reads, and all other nodes that hold the same Values."""
        graph, values = self.graph, self.values.values()
        caches = [cache for _, cache, _ in self.written_caches]
        duplicates = [node for value in values for node in graph.nodes_holding(value)]
        return [*dict.fromkeys((*source_nodes(graph, values), *duplicates, *caches))]

    @cached_property
    def steps(self) -> set[Node]:
        """Returns the calls from the inputs to what is replaced."""
        nodes = nodes_between(self.inputs, self.replaced)
        return {node for node in nodes if node.op == "call_function"}


def _epsilon(epsilon: Fraction) -> float:
    """Returns a norm's epsilon as the kernel takes it.

    A norm without an epsilon keeps a row of zeros by a least length. The smallest number that
    float32 can add does the same.
    """
    return float(epsilon) or _LEAST
