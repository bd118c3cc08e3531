"""GE graphs as networkx graphs, compared as wirings."""

from __future__ import annotations

from typing import Any

import networkx as nx


def wiring(proto: Any) -> nx.MultiDiGraph:
    """Operators by type and attributes; an edge per input, labelled with both ends' places.

    An Identity, which AOT's detach becomes, is passed through.
    """
    graph, passed = nx.MultiDiGraph(), {f"{op.name}:0": op.input[0] for op in proto.op if op.type == "Identity"}
    operators = [op for op in proto.op if op.type != "Identity"]
    for op in operators:
        graph.add_node(op.name, kind=(op.type, _attributes(op)))
    for op in operators:
        for place, name in enumerate(op.input):
            name = passed.get(name, name)
            if name:
                source, _, output = name.rpartition(":")
                graph.add_edge(source, op.name, label=(int(output), place if op.type != "NetOutput" else -1))
    return graph


def same_wiring(a: Any, b: Any) -> bool:
    return nx.is_isomorphic(
        wiring(a),
        wiring(b),
        node_match=lambda x, y: x.get("kind") == y.get("kind"),
        edge_match=lambda x, y: sorted(e["label"] for e in x.values()) == sorted(e["label"] for e in y.values()),
    )


def _attributes(op: Any) -> str:
    if op.type in ("Data", "NetOutput"):
        return ""  # numbered by position among the graph's inputs, which is what the comparison is free in
    kept = {key: str(value) for key, value in op.attr.items() if not key.startswith("_")}
    return str(sorted(kept.items()))
