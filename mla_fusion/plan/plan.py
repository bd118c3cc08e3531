"""The plan of one fusion: everything the rewrite does, decided before a node is touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from torch.fx import Node

from mla_fusion.exact.prove import Claim
from mla_fusion.graph.form import Value, nearest
from mla_fusion.graph.read import Graph
from mla_fusion.plan import modes
from mla_fusion.plan.caches import InPlace, Staged
from mla_fusion.plan.outputs import holders
from mla_fusion.propose.prologue import Proposal

_ROWS = {"kv_rows": "c_kv", "kr_rows": "k_pe"}  # written by nobody: the model's own names
_LEAST = 1e-30  # beside the mean square of any row of bfloat16


@dataclass(eq=False)
class Plan:
    """One call of ``npu_mla_prolog_v3_functional``.

    claims       Values of the graph, and what they are over the results of the call
    region       the nodes that the call stands for, in order
    replaced     those of them that are read elsewhere, with what they are over the results
    compared     how many elements the proof compared
    assumptions  what the fusion takes for granted, for the report
    warnings     where a cache holds other numbers than the model's
    structure    a number, the same for the plans of equal layers
    """

    graph: Graph
    target: str
    proposal: Proposal
    caches: InPlace | Staged
    claims: list[Claim]
    region: list[Node]
    replaced: dict[Node, Value]
    compared: int
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    structure: int = -1
    products: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = map(self.graph.nodes_in_any_shape, self.proposal.products)
        self.products = sorted({nodes[0] for nodes in held if nodes})

    @property
    def values(self) -> dict[str, Value]:
        """Arguments that are Values; slots among them."""
        found = {n: a for n, a in self.proposal.arguments.items() if isinstance(a, Value)}
        if isinstance(self.caches, InPlace):
            found["cache_index"] = self.caches.slots
        return found

    @property
    def results(self) -> dict[str, Value]:
        """What stands for results, by name: leaves, and caches with their new rows."""
        found = {n: leaf for n, leaf in vars(self.proposal.results).items() if leaf is not None}
        if isinstance(self.caches, InPlace):
            del found["kv_rows"], found["kr_rows"]
            found |= {name: write.value for name, write in self.caches.writes.items()}
        return found

    def part(self, value: Value) -> str:
        """The first result that a replaced output is made of, by its name in a report; "" where
        there is none.
        """
        names = {leaf: name for name, leaf in self.results.items()}
        name = next((names[one] for one in nearest([value], names)), "")
        return _ROWS.get(name, name)

    @cached_property
    def read(self) -> set[str]:
        """The results that something reads."""
        names = {leaf: name for name, leaf in self.results.items()}
        found, stack = set[str](), list(self.replaced.values())
        seen = set[Value]()
        while stack:
            one = stack.pop()
            if one in names:
                found.add(names[one])
            elif one not in seen:
                seen.add(one)
                stack += one.sources
        return found

    @property
    def tokens(self) -> Any:
        return self.graph.unbound(self.proposal.x.shape[0])

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of the axes, by the names of the operator's documents."""
        a = self.proposal.arguments
        heads, nope, latent = a["weight_uk"].shape
        own = self.proposal.heads
        padded = {"N_padded": int(heads)} if own else {}
        return {
            "T": str(self.tokens),
            "He": int(a["token_x"].shape[1]),
            "Hcq": int(a["weight_dq"].shape[1]),
            "Hckv": int(latent),
            "N": own or int(heads),
            "D": int(nope),
            "Dr": int(a["rope_cos"].shape[1]),
            **padded,
        }

    @property
    def modes(self) -> tuple[int, int]:
        """weight_quant_mode and kv_cache_quant_mode."""
        a = self.proposal.arguments
        return a.get("weight_quant_mode", 0), a.get("kv_cache_quant_mode", 0)

    @property
    def attributes(self) -> dict[str, Any]:
        """Keyword attributes of the call. Both epsilons are always given: the operator's default
        is not the models'.
        """
        a = self.proposal.arguments
        found: dict[str, Any] = {
            "rmsnorm_epsilon_cq": _epsilon(a["rmsnorm_epsilon_cq"]),
            "rmsnorm_epsilon_ckv": _epsilon(a["rmsnorm_epsilon_ckv"]),
            "cache_mode": self.caches.mode if isinstance(self.caches, InPlace) else "TND",
        }
        if not self.read.isdisjoint(("query_norm", "dequant_scale_q_norm")):
            found["query_norm_flag"] = True
        found |= modes.attributes(*self.modes)
        for name in ("qc_qr_scale", "kc_scale"):
            if name in a:
                found[name] = float(a[name])
        return found

    @cached_property
    def held(self) -> tuple[tuple[str, Node, tuple[Any, ...]], ...]:
        """Caches that the kernel writes: name, graph input, and the shape in which it takes it."""
        writes = self.caches.writes if isinstance(self.caches, InPlace) else {}
        return tuple(
            (name, write.cache, tuple(map(self.graph.unbound, write.shape)))
            for name, write in writes.items()
        )

    @cached_property
    def inputs(self) -> list[Node]:
        """Nodes of the graph that the call reads, and others that hold the same."""
        graph, values = self.graph, self.values.values()
        caches = [cache for _, cache, _ in self.held]
        alike = [node for value in values for node in graph.nodes_holding(value)]
        return [*dict.fromkeys((*holders(graph, values), *alike, *caches))]


def _epsilon(of_norm: Fraction) -> float:
    """For the kernel. A norm without one keeps a row of zeros, by a least length: so does the
    smallest number that float32 adds.
    """
    return float(of_norm) or _LEAST
