"""GE graphs as networkx graphs, compared as wirings, and the call as one writes it by hand."""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from tests.catalogue import base


def wiring(proto: Any) -> nx.MultiDiGraph:
    """Operators by type and attributes; an edge per input, labelled with both ends' places.

    An Identity, which AOT's detach becomes, is passed through.
    """
    graph, passed = (
        nx.MultiDiGraph(),
        {f"{op.name}:0": op.input[0] for op in proto.op if op.type == "Identity"},
    )
    operators = [op for op in proto.op if op.type != "Identity"]
    for op in operators:
        graph.add_node(op.name, kind=(op.type, _attributes(op)))
    for op in operators:
        for place, name in enumerate(op.input):
            name = passed.get(name, name)
            if name:
                source, _, output = name.rpartition(":")
                graph.add_edge(
                    source, op.name, label=(int(output), place if op.type != "NetOutput" else -1)
                )
    return graph


def same_wiring(a: Any, b: Any) -> bool:
    return nx.is_isomorphic(
        wiring(a),
        wiring(b),
        node_match=lambda x, y: x.get("kind") == y.get("kind"),
        edge_match=lambda x, y: (
            sorted(e["label"] for e in x.values()) == sorted(e["label"] for e in y.values())
        ),
    )


def _attributes(op: Any) -> str:
    if op.type in ("Data", "NetOutput"):
        # numbered by position among the graph's inputs, which is what the comparison is free in
        return ""
    kept = {key: str(value) for key, value in op.attr.items() if not key.startswith("_")}
    return str(sorted(kept.items()))


def called_by_hand(
    held: nn.Module,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    **options: Any,
) -> Tensor:
    """Attention over what the kernel makes of ``x`` with the weights that ``held`` has under the
    operator's names.
    """
    query, query_rope, *_ = torch.ops.npu.npu_mla_prolog_v3(
        x,
        held.weight_dq,
        held.weight_uq_qr,
        held.weight_uk,
        held.weight_dkv_kr,
        held.gamma_cq,
        held.gamma_ckv,
        sin,
        cos,
        *caches,
        cache_index=slots,
        rmsnorm_epsilon_cq=1e-6,
        rmsnorm_epsilon_ckv=1e-6,
        **options,
    )
    return base.attend(
        query, query_rope, caches[0].view(-1, base.HCKV), caches[1].view(-1, base.DR)
    )
